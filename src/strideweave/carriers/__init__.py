"""Carriers: one-dimensional storage of one dtype, in memory, in files, or composed of other carriers."""

from strideweave.carriers.base import Carrier

__all__ = ["Carrier"]
