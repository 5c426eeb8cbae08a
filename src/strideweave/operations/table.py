"""All operations by name."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from strideweave.operations import comparison, contraction, elementwise, functions, indexing, reduction, views

if TYPE_CHECKING:
    from collections.abc import Mapping

    from strideweave.operations.definition import OperationDefinition

__all__ = ["OPERATIONS"]

OPERATIONS: Mapping[str, OperationDefinition] = MappingProxyType(
    {
        definition.name: definition
        for room in (elementwise, functions, comparison, reduction, contraction, indexing, views)
        for definition in room.DEFINITIONS
    }
)
"""Every operation that a carrier may offer, by name."""
