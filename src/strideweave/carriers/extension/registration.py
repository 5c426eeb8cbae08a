"""Installing definitions on carrier classes, until somebody has seen what a class is.

The definition is kept on the exact class itself: there is nothing to look up, nothing a subclass inherits, and
nothing that a fork could split. The moves go into the move registry, in the same step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from strideweave.carriers.base import Carrier
from strideweave.carriers.block_device import BlockDeviceCarrier
from strideweave.carriers.cpu import CPU
from strideweave.carriers.extension.definition import CarrierDefinition, TransferRoute
from strideweave.carriers.extension.moves import ProviderMove
from strideweave.carriers.extension.storage import StorageProvider
from strideweave.carriers.file_backed import FileBacked
from strideweave.carriers.generic import Generic
from strideweave.carriers.metal import Metal
from strideweave.carriers.move.registry import replace_routes
from strideweave.flags import as_flag
from strideweave.runtime.locks import short_lock

if TYPE_CHECKING:
    from strideweave.carriers.move.operations import MoveOperation

    Pair = tuple[type[Carrier], type[Carrier]]

__all__ = ["carrier_definition", "register_carrier", "withdraw_carrier"]


def register_carrier(definition: CarrierDefinition, *, replace: bool = False) -> None:
    """Install a definition on its exact class, and its moves in the move registry, both or neither.

    The class is sealed when it is first observed: when its first carrier is made, or its definition is looked up.
    From then on it is what it is for the rest of the process.

    Args:
        definition: what to install.
        replace: take the place of a definition that nobody has observed yet.

    Raises:
        TypeError: ``definition`` is no CarrierDefinition, or ``replace`` no bool.
        RuntimeError: the class is sealed; nothing has changed.
        ValueError: the class has a definition and ``replace`` is false, or somebody has registered another move
            for one of the pairs; nothing has changed.
    """
    if not isinstance(definition, CarrierDefinition):
        raise TypeError(f"register_carrier takes a CarrierDefinition, found {type(definition).__name__}")
    replace = as_flag(replace, "replace")
    cls = definition.carrier_class
    with short_lock:
        _require_unsealed(cls, "register")
        present = cls._installed()
        if present is not None and not replace:
            raise ValueError(f"{cls.__name__} has a definition already; replace=True takes its place")
        replace_routes(_routes(present), _routes(definition))
        cls._definition = definition


def withdraw_carrier(carrier_class: type[Carrier]) -> CarrierDefinition:
    """Take the definition off a class that nobody has observed yet, and its moves out of the registry.

    Returns:
        The definition.

    Raises:
        TypeError: ``carrier_class`` is not a carrier class.
        KeyError: it has no definition.
        RuntimeError: it is sealed; nothing has changed.
    """
    cls = _checked(carrier_class)
    with short_lock:
        _require_unsealed(cls, "withdraw")
        present = cls._installed()
        if present is None:
            raise KeyError(f"{cls.__name__} has no definition")
        replace_routes(_routes(present), {})
        del cls._definition
    return present


def carrier_definition(carrier_class: type[Carrier]) -> CarrierDefinition | None:
    """Give the definition of an exact class, or None; the answer seals the class.

    Raises:
        TypeError: ``carrier_class`` is not a carrier class.
    """
    cls = _checked(carrier_class)
    cls._seal()
    return cls._installed()


def _checked(carrier_class: object) -> type[Carrier]:
    if not (isinstance(carrier_class, type) and issubclass(carrier_class, Carrier)):
        raise TypeError(f"definitions are of carrier classes, found {carrier_class!r}")
    return carrier_class


def _require_unsealed(cls: type[Carrier], doing: str) -> None:
    if cls._is_sealed():
        raise RuntimeError(
            f"{cls.__name__} is sealed: carriers of it were made or its definition was looked up, so it is too late "
            f"to {doing} a definition; do it where the class is defined"
        )


def _routes(definition: CarrierDefinition | None) -> dict[Pair, type[MoveOperation]]:
    """The moves that come with a definition, those of its provider included."""
    if definition is None:
        return {}
    routes = list(definition.routes)
    if isinstance(definition.storage, StorageProvider):
        own = definition.carrier_class
        for other in (BlockDeviceCarrier, CPU, FileBacked, Generic, Metal):
            routes[:0] = [TransferRoute(own, other, ProviderMove), TransferRoute(other, own, ProviderMove)]
        routes.insert(0, TransferRoute(own, own, ProviderMove))
    return {(route.source, route.destination): route.operation for route in routes}  # its own words come last
