"""Files that exist already: what their headers say, checked, and tiled tensors over them."""

from strideweave.formats.description import StoredArray
from strideweave.formats.opening import FORMATS, describe, detect_format, open_tiled

__all__ = ["FORMATS", "StoredArray", "describe", "detect_format", "open_tiled"]
