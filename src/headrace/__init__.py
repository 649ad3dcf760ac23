"""headrace: a data plane for LLM reinforcement-learning post-training, with the trainers that use it.

The names below are loaded when they are first used, so that `import headrace.data_plane` stays light.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "train": "headrace.training",
    "RunResult": "headrace.training",
    "RecipeConfig": "headrace.config",
    "load_recipe": "headrace.utils.recipe",
    "Message": "headrace.experience.types",
    "Prompt": "headrace.experience.types",
    "StepResult": "headrace.environments.interfaces",
    "LossInputs": "headrace.algorithms.loss",
    "RunObserver": "headrace.algorithms.observer",
    "HeadraceError": "headrace.errors",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'headrace' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
