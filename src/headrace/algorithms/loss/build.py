"""From the recipe's `loss` section to a loss."""

from headrace.algorithms.loss.policy_gradient import PolicyGradientLoss
from headrace.config import LossConfig


def build_loss(cfg: LossConfig) -> PolicyGradientLoss:
    """Return the loss that the recipe's `loss` section describes."""
    return PolicyGradientLoss(cfg)
