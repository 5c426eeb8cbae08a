"""All operations by name."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from strideweave.operations import comparison, contraction, elementwise, functions, indexing, reduction, views
from strideweave.operations.pullbacks import PULLBACKS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from strideweave.operations.definition import OperationDefinition

__all__ = ["OPERATIONS"]


def _with_pullback(definition: OperationDefinition) -> OperationDefinition:
    rule = PULLBACKS.get(definition.name)
    return definition if rule is None else replace(definition, vjp=rule.vjp, saves=rule.saves)


OPERATIONS: Mapping[str, OperationDefinition] = MappingProxyType(
    {
        definition.name: _with_pullback(definition)
        for room in (elementwise, functions, comparison, reduction, contraction, indexing, views)
        for definition in room.DEFINITIONS
    }
)
"""Every operation that a carrier may offer, by name."""
