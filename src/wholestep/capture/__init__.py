"""A training step for one device -> TrainGraph."""

from .capture import Capture, capture_step
from .capture_options import CaptureOptions

__all__ = ["Capture", "CaptureOptions", "capture_step"]
