"""A training step for one device -> TrainGraph."""

from .capture import Capture, capture_step
from .precision import MixedPrecision

__all__ = ["Capture", "MixedPrecision", "capture_step"]
