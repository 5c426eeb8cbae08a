"""The move registry: exact pairs, no fallback, registered once, replaced for a while."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

from strideweave.carriers import CPU, Carrier, FileBacked, Generic
from strideweave.carriers.move import (
    ElementwiseMoveOperation,
    MoveOperation,
    Transfer,
    dispatch_move,
    register_move_operation,
    registered_move_operation,
    unregister_move_operation,
)
from strideweave.dtype import DType

SHIPPED = (Generic, CPU, FileBacked)


class Shelf(Carrier):
    """A carrier of somebody else's: values in a list."""

    def __init__(self, values: Iterable[Any], dtype: DType = DType.Float32) -> None:
        self.values = list(values)
        super().__init__(len(self.values), dtype=dtype)

    def new_like(self, values: Iterable[Any], *, mutable: bool = True, dtype: DType | None = None) -> Shelf:
        return Shelf(values, dtype or self.dtype())

    def allocate_like(
        self, size: int, *, mutable: bool = True, dtype: DType | None = None, empty: bool = False
    ) -> Shelf:
        return Shelf([0] * size, dtype or self.dtype())

    def _load_slot(self, i: int) -> Any:
        return self.values[i]

    def _store_slot(self, i: int, value: Any) -> None:
        self.values[i] = value.item()

    def _free_storage(self) -> None:
        self.values = []


class Refusing(MoveOperation):
    async def transfer(self, transfers: Sequence[Transfer]) -> None:
        raise OSError("refused")


@pytest.mark.parametrize("pair", list(itertools.product(SHIPPED, SHIPPED)), ids=repr)
def test_every_ordered_pair_of_the_shipped_carriers_is_registered(pair: tuple[type, type]) -> None:
    """Contract: *every ordered pair of the shipped carriers is registered*."""
    operation = dispatch_move(*pair)
    assert issubclass(operation, MoveOperation)
    assert isinstance(operation(), MoveOperation)
    with pytest.raises(ValueError, match=rf"{pair[0].__name__} to {pair[1].__name__} already"):
        register_move_operation(*pair, Refusing)
    assert dispatch_move(*pair) is operation


def test_a_pair_that_nobody_registered_has_no_fallback() -> None:
    """Contract: *raises NotImplementedError naming both; there is no silent fallback*."""
    for pair in ((Shelf, CPU), (CPU, Shelf), (Shelf, Shelf), (Carrier, CPU)):
        with pytest.raises(NotImplementedError, match=rf"{pair[0].__name__} to {pair[1].__name__}"):
            dispatch_move(*pair)
        with pytest.raises(KeyError, match=rf"{pair[0].__name__} to {pair[1].__name__}"):
            unregister_move_operation(*pair)


def test_a_registered_operation_is_found_until_it_is_unregistered() -> None:
    register_move_operation(Shelf, CPU, ElementwiseMoveOperation)
    try:
        assert dispatch_move(Shelf, CPU) is ElementwiseMoveOperation
        with pytest.raises(NotImplementedError):
            dispatch_move(CPU, Shelf)
        with pytest.raises(ValueError, match="ElementwiseMoveOperation is registered"):
            register_move_operation(Shelf, CPU, ElementwiseMoveOperation)
    finally:
        assert unregister_move_operation(Shelf, CPU) is ElementwiseMoveOperation
    with pytest.raises(NotImplementedError):
        dispatch_move(Shelf, CPU)


def test_a_subclass_is_another_class() -> None:
    derived = type("Derived", (Shelf,), {})
    with registered_move_operation(Shelf, CPU, ElementwiseMoveOperation), pytest.raises(NotImplementedError):
        dispatch_move(derived, CPU)


def test_a_registration_for_a_block_ends_with_it_however_it_ends() -> None:
    with registered_move_operation(Shelf, CPU, Refusing):
        assert dispatch_move(Shelf, CPU) is Refusing
    with pytest.raises(ZeroDivisionError), registered_move_operation(Shelf, CPU, Refusing):
        raise ZeroDivisionError
    with pytest.raises(NotImplementedError):
        dispatch_move(Shelf, CPU)


def test_a_replacement_gives_the_place_back() -> None:
    shipped = dispatch_move(CPU, FileBacked)
    with (
        pytest.raises(ValueError, match="replace=True"),
        registered_move_operation(CPU, FileBacked, Refusing),
    ):
        pass
    assert dispatch_move(CPU, FileBacked) is shipped
    with registered_move_operation(CPU, FileBacked, Refusing, replace=True):
        assert dispatch_move(CPU, FileBacked) is Refusing
        assert unregister_move_operation(CPU, FileBacked) is Refusing
    assert dispatch_move(CPU, FileBacked) is shipped
    with registered_move_operation(Shelf, Shelf, Refusing, replace=True):
        assert dispatch_move(Shelf, Shelf) is Refusing
    with pytest.raises(NotImplementedError):
        dispatch_move(Shelf, Shelf)


@pytest.mark.parametrize(
    "call",
    [
        lambda: dispatch_move(int, CPU),  # type: ignore[arg-type]
        lambda: dispatch_move(CPU, CPU(1)),  # type: ignore[arg-type]
        lambda: unregister_move_operation(CPU, "CPU"),  # type: ignore[arg-type]
        lambda: register_move_operation(Shelf, CPU, int),  # type: ignore[arg-type]
        lambda: register_move_operation(Shelf, CPU, Refusing()),  # type: ignore[arg-type]
        lambda: register_move_operation(Shelf, object, Refusing),  # type: ignore[arg-type]
        lambda: registered_move_operation(Shelf, CPU, object).__enter__(),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_carrier_or_operation_class_is_refused(call: Callable[[], object]) -> None:
    with pytest.raises(TypeError):
        call()
    with pytest.raises(NotImplementedError):
        dispatch_move(Shelf, CPU)
