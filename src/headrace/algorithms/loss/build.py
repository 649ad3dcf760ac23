"""From the recipe's `loss` section to a loss."""

from headrace.algorithms.loss.policy_gradient import PolicyGradientLoss
from headrace.config import LossConfig
from headrace.errors import ConfigError


def build_loss(cfg: LossConfig) -> PolicyGradientLoss:
    """Return the loss that the recipe's `loss` section describes.

    Raises:
        ConfigError: keys that contradict each other, or a key that would have no effect.
    """
    if cfg.kind == "cispo" and cfg.dual_clip is not None:
        raise ConfigError(
            f"loss.dual_clip={cfg.dual_clip} has no effect with loss.kind=cispo, which clips weights and not "
            "the objective; remove it or set loss.kind=clipped_pg"
        )
    bounded = cfg.importance_correction in ("icepop", "sequence_mask")
    if bounded and cfg.importance_low > cfg.importance_high:
        raise ConfigError(
            f"loss.importance_low={cfg.importance_low} is more than loss.importance_high="
            f"{cfg.importance_high}, so {cfg.importance_correction} masks everything; swap them"
        )
    return PolicyGradientLoss(cfg)
