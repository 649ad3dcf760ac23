"""What a loss is, under the names that outside code uses."""

from headrace.algorithms.interfaces import LossFunction, LossType

__all__ = ["LossFunction", "LossType"]
