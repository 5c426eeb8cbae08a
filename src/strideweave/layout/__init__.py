"""Integer algebra of hierarchical layouts, after *CuTe* (NVIDIA CUTLASS documentation).

A `Layout` maps a coordinate of its `Shape` to a flat slot index. Nothing here knows arrays, carriers or
loops.
"""

from strideweave.layout.algebra import broadcast_to, coalesce, complement, compose, divide, permute
from strideweave.layout.layout import Layout, column_major, row_major
from strideweave.layout.shape import Shape, Stride

__all__ = [
    "Layout",
    "Shape",
    "Stride",
    "broadcast_to",
    "coalesce",
    "column_major",
    "complement",
    "compose",
    "divide",
    "permute",
    "row_major",
]
