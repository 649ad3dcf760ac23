"""From the recipe's `loss` section to a loss."""

from headrace.algorithms.loss.policy_gradient import PolicyGradientLoss
from headrace.config import LossConfig


def build_loss(cfg: LossConfig, *, filtered: bool = False) -> PolicyGradientLoss:
    """Return the loss that the recipe's `loss` section describes.

    `filtered`: the policy scores under top-k or top-p (`GenerationConfig.filters`); a KL then needs other logprobs.
    """
    return PolicyGradientLoss(cfg, filtered=filtered)
