"""Losses over log-probabilities; `build_loss` makes the one that a recipe names."""

from headrace.algorithms.loss.build import build_loss
from headrace.algorithms.loss.nll import NLLLoss
from headrace.algorithms.loss.policy_gradient import PolicyGradientLoss

__all__ = ["NLLLoss", "PolicyGradientLoss", "build_loss"]
