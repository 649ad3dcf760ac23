"""From an `env` section to an environment."""

from headrace.config import DataConfig, EnvironmentConfig, MathConfig, ReasoningGymConfig
from headrace.environments.dataset import dataset_environment
from headrace.environments.interfaces import Environment
from headrace.errors import ConfigError


def build_environment(cfg: EnvironmentConfig, data: DataConfig, *, seed: int) -> Environment:
    """Build the environment that `cfg.kind` names, with its prompts.

    `seed` decides the order of the training prompts if `data.shuffle` is on, and nothing else: all seeds
    share the same two splits, and no question is in both.

    Raises:
        ConfigError: settings, a file or an installation that cannot be used.
    """
    try:
        if isinstance(cfg, ReasoningGymConfig):
            from headrace.environments.reasoning_gym import reasoning_gym_environment  # noqa: PLC0415 - optional

            return reasoning_gym_environment(cfg, data, seed=seed)
        if isinstance(cfg, MathConfig):
            from headrace.environments.math import math_environment  # noqa: PLC0415 - optional

            return math_environment(cfg, data, seed=seed)
    except ImportError as error:
        raise ConfigError(
            f"env.kind={cfg.kind} needs the package '{error.name}', which is not installed; install "
            "headrace[train]"
        ) from error
    return dataset_environment(cfg, data, seed=seed)
