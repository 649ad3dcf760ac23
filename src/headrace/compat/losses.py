"""What a loss is: `models.interfaces.LossFn` and `LossType`, under the names that outside code uses."""

from headrace.models.interfaces import LossFn as LossFunction
from headrace.models.interfaces import LossType

__all__ = ["LossFunction", "LossType"]
