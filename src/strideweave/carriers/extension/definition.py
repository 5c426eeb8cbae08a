"""What a definition says of a carrier class: storage, operations, facets and moves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from strideweave.carriers.base import Carrier
from strideweave.carriers.dependent import DependentCarrier
from strideweave.carriers.extension.defined import DefinedCarrier
from strideweave.carriers.extension.storage import StorageProvider
from strideweave.carriers.move.operations import MoveOperation
from strideweave.flags import as_flag
from strideweave.operations.definition import Operation, OperationDefinition
from strideweave.operations.table import OPERATIONS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from strideweave.dtype import DType

__all__ = ["CarrierDefinition", "CarrierFacet", "CompositeProvider", "TransferRoute"]


@dataclass(frozen=True, slots=True)
class CompositeProvider:
    """Storage that is other carriers, the tiers of a composite, reached through their own public methods.

    The first tier computes: its operations bound what the composite's class can run, and factories fill it.

    Args:
        tiers: gives the tiers of a composite, the one that computes first.
        compose: makes a fresh composite of the kind of the first argument around other tiers, given in that order.
    """

    tiers: Callable[[Any], tuple[Carrier, ...]]
    compose: Callable[[Any, tuple[Carrier, ...]], Carrier]

    def __post_init__(self) -> None:
        for name in ("tiers", "compose"):
            if not callable(getattr(self, name)):
                raise TypeError(f"CompositeProvider.{name} must be a function")


@dataclass(frozen=True, slots=True)
class CarrierFacet:
    """A facet that every carrier of a class carries: ``carrier.require_facet(facet_type)`` makes it.

    Args:
        facet_type: the type that callers ask for.
        make: makes the facet of one carrier; None calls the type with the carrier.
    """

    facet_type: type[Any]
    make: Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.facet_type, type):
            raise TypeError(f"facet_type must be a class, found {type(self.facet_type).__name__}")
        if self.make is not None and not callable(self.make):
            raise TypeError("CarrierFacet.make must be a function of the carrier")

    def of(self, carrier: Carrier) -> Any:
        """Make the facet of one carrier."""
        return (self.make or self.facet_type)(carrier)


@dataclass(frozen=True, slots=True)
class TransferRoute:
    """The move between two exact carrier classes, of which one is the definition's.

    Args:
        source: class of the carriers that are read.
        destination: class of the carriers that are written.
        operation: the MoveOperation class, made without arguments for every use.
    """

    source: type[Carrier]
    destination: type[Carrier]
    operation: type[MoveOperation]

    def __post_init__(self) -> None:
        for end in (self.source, self.destination):
            if not _is_class(end, Carrier):
                raise TypeError(f"a route leads from one carrier class to another, found {end!r}")
        if not _is_class(self.operation, MoveOperation):
            raise TypeError(f"a subclass of MoveOperation is needed, found {self.operation!r}")


@dataclass(frozen=True, slots=True)
class CarrierDefinition:
    """What a carrier class is: who provides its storage, what it runs, what it carries, and how it moves.

    ``register_carrier`` installs it on the exact class; subclasses of that class have none.

    Spec: *TiledEvictable owns one flat logical storage extent*.

    Args:
        carrier_class: the exact class, derived from ``DefinedCarrier`` for a StorageProvider and from
            ``DependentCarrier`` for a CompositeProvider.
        storage: where the values are; None leaves that to the class.
        operations: names of the operations to install, in addition to those that the class itself runs.
        make_operation: makes the ``Operation`` of one definition for the class, anew for every dispatch.
        facets: what carriers of the class carry.
        routes: the moves from and to the class. With a StorageProvider those to and from carriers in memory and in
            files, and within the class, need not be given.

    Raises:
        TypeError: an argument is of a wrong type.
        ValueError: an operation is unknown, given twice or has no ``make_operation``, or a route does not touch
            the class or is given twice.
    """

    carrier_class: type[Carrier]
    storage: StorageProvider | CompositeProvider | None = None
    operations: tuple[str, ...] = ()
    make_operation: Callable[[OperationDefinition, type[Carrier]], Operation] | None = None
    facets: tuple[CarrierFacet, ...] = ()
    routes: tuple[TransferRoute, ...] = ()

    def __post_init__(self) -> None:
        if not _is_class(self.carrier_class, Carrier):
            raise TypeError(f"a definition is of a carrier class, found {self.carrier_class!r}")
        for name in ("operations", "facets", "routes"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        self._check_storage()
        self._check_operations()
        if not all(isinstance(facet, CarrierFacet) for facet in self.facets):
            raise TypeError("facets must be CarrierFacets")
        if not all(isinstance(route, TransferRoute) for route in self.routes):
            raise TypeError("routes must be TransferRoutes")
        pairs = [(route.source, route.destination) for route in self.routes]
        if len(set(pairs)) < len(pairs) or any(self.carrier_class not in pair for pair in pairs):
            raise ValueError(
                f"every route leads from {self.carrier_class.__name__} or to it, and none is there twice"
            )

    def _check_storage(self) -> None:
        for provider, base in ((StorageProvider, DefinedCarrier), (CompositeProvider, DependentCarrier)):
            if isinstance(self.storage, provider):
                if not issubclass(self.carrier_class, base):
                    raise TypeError(
                        f"{self.carrier_class.__name__} must be a subclass of {base.__name__} to have its storage "
                        f"from a {provider.__name__}"
                    )
                return
        if self.storage is not None:
            found = type(self.storage).__name__
            raise TypeError(
                f"storage must be a StorageProvider or a CompositeProvider, an object, found {found}"
            )

    def _check_operations(self) -> None:
        unknown = [name for name in self.operations if name not in OPERATIONS]
        if unknown or len(set(self.operations)) < len(self.operations):
            raise ValueError(f"operations must be distinct names of operations, found {self.operations}")
        if self.operations and not callable(self.make_operation):
            raise ValueError("operations need make_operation, which makes them")

    # What Carrier asks of the definition of its class

    def supports(self, carrier: Carrier, dtype: DType) -> bool:
        """Whether carriers like this one can hold a dtype."""
        if isinstance(self.storage, StorageProvider):
            return self.storage.supports_dtype(dtype)
        tiers = self._tiers(carrier)
        return all(tier.supports_storage_dtype(dtype) for tier in tiers)

    def runs(self, carrier: Carrier, name: str) -> bool:
        """Whether an operation is installed, and run by the tier that computes where there is one."""
        if name not in self.operations:
            return False
        tiers = self._tiers(carrier)
        return not tiers or bool(tiers[0].operation_capabilities(name))

    def operation(self, definition: OperationDefinition) -> Operation:
        """Make an installed operation."""
        make = cast("Callable[[OperationDefinition, type[Carrier]], Operation]", self.make_operation)
        return make(definition, self.carrier_class)

    def facet(self, carrier: Carrier, facet_type: type[Any]) -> Any:
        """The first facet of that type or of a type derived from it, or None."""
        for facet in self.facets:
            if issubclass(facet.facet_type, facet_type):
                return facet.of(carrier)
        return None

    def new_like(
        self, carrier: Carrier, values: Iterable[Any], mutable: bool, dtype: DType | None
    ) -> Carrier:
        """Make a fresh carrier like this one that holds values."""
        if isinstance(carrier, DefinedCarrier):
            return carrier._filled_like(values, mutable, _chosen(carrier, dtype))
        first = self._tiers(carrier)[0]
        return self._composed(carrier, first.new_like(values, mutable=mutable, dtype=dtype))

    def allocate_like(
        self, carrier: Carrier, size: int, mutable: bool, dtype: DType | None, empty: bool
    ) -> Carrier:
        """Make a fresh carrier like this one with slots for values."""
        as_flag(empty, "empty")
        if isinstance(carrier, DefinedCarrier):
            return type(carrier)(size, mutable=mutable, dtype=_chosen(carrier, dtype))
        first = self._tiers(carrier)[0]
        return self._composed(carrier, first.allocate_like(size, mutable=mutable, dtype=dtype, empty=empty))

    def _tiers(self, carrier: Carrier) -> tuple[Carrier, ...]:
        return self.storage.tiers(carrier) if isinstance(self.storage, CompositeProvider) else ()

    def _composed(self, carrier: Carrier, first: Carrier) -> Carrier:
        """A composite like this one around a fresh first tier; the others are empty."""
        provider = cast("CompositeProvider", self.storage)
        others = self._tiers(carrier)[1:]
        empty = [other.allocate_like(0, mutable=True, dtype=first.dtype()) for other in others]
        return provider.compose(carrier, (first, *empty))


def _chosen(carrier: Carrier, dtype: DType | None) -> DType:
    chosen = carrier.dtype() if dtype is None else dtype
    carrier.supports_storage_dtype(chosen)
    return chosen


def _is_class(value: object, base: type) -> bool:
    return isinstance(value, type) and issubclass(value, base)
