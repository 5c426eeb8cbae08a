"""The half of the contract that is about slots: values, indices, versions, factories, moves."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from strideweave.carriers.cpu import CPU
from strideweave.carriers.move.operations import Transfer, run_transfers
from strideweave.carriers.move.registry import dispatch_move
from strideweave.dtype import DType
from strideweave.errors import ImmutableError
from strideweave.layout import Layout, row_major
from strideweave.runtime.await_result import AwaitResult
from strideweave.runtime.task_scope import TaskScope
from strideweave.tensor import Tensor
from strideweave.testing.fixtures import ContractFixtures, MakeCarrier, state_of
from strideweave.testing.values import bit_patterns, values_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strideweave.carriers.base import Carrier

__all__ = ["StorageContract"]


def copied(source: Carrier, destination: Carrier) -> Carrier:
    """Copy all slots through the registered move; gives the destination."""
    scope = TaskScope("a test's transfer")
    transfers = [Transfer(source, 0, destination, 0, source.size())]
    operation = dispatch_move(type(source), type(destination))
    try:
        scope.start(AwaitResult[None](), run_transfers, operation, transfers).wait(60)
    finally:
        scope.close()
    return destination


class StorageContract(ContractFixtures):
    """What a carrier promises about its slots. ``CarrierContract`` documents the attributes."""

    def patterns(self, dtype: DType) -> NDArray[Any]:
        """Values of every kind that the class keeps."""
        values = bit_patterns(dtype)
        if self.keeps_bits or not dtype.is_differentiable:
            return values
        with np.errstate(invalid="ignore"):  # a signalling NaN warns
            finite: NDArray[Any] = values[np.isfinite(values.astype(np.float64))]
        return finite

    # Slots

    def test_a_fresh_carrier_holds_its_values(self, carrier: Carrier) -> None:
        """Values, size, dtype and version of a carrier that nobody has written to."""
        assert [carrier[i] for i in range(4)] == [1.0, 2.0, 3.0, 4.0]
        assert (carrier.size(), carrier.dtype(), carrier.version) == (4, DType.Float32, 0)
        assert carrier.is_mutable()
        assert not carrier.is_owned()
        assert not carrier.is_released()

    @pytest.mark.parametrize("dtype", DType.members(), ids=lambda dtype: dtype.name)
    def test_every_bit_of_every_dtype_is_kept(self, make_carrier: MakeCarrier, dtype: DType) -> None:
        """-0.0, NaN payloads, denormals, and all 256 patterns of the types of one byte."""
        if dtype not in self.dtypes:
            pytest.skip(f"the class does not store {dtype.name}")
        values = self.patterns(dtype)
        carrier = make_carrier(values)
        assert values_of(carrier).tobytes() == values.tobytes()
        assert values_of(carrier.new_like(values)).tobytes() == values.tobytes()
        assert [repr(carrier[i]) for i in range(8)] == [repr(dtype.to_python(value)) for value in values[:8]]
        carrier.release()

    @pytest.mark.parametrize("index", [True, 0.0, "0", None, (0,)], ids=repr)
    def test_an_index_is_an_integer(self, carrier: Carrier, index: Any) -> None:
        """Anything else is a TypeError, for reading and writing."""
        before = state_of(carrier)
        with pytest.raises(TypeError):
            carrier[index]
        with pytest.raises(TypeError):
            carrier[index] = 5
        assert state_of(carrier) == before

    @pytest.mark.parametrize("index", [-1, 4, 10**30])
    def test_an_index_lies_in_the_carrier(self, carrier: Carrier, index: int) -> None:
        """Negative and too large ones are an IndexError, for reading and writing."""
        before = state_of(carrier)
        with pytest.raises(IndexError):
            carrier[index]
        with pytest.raises(IndexError):
            carrier[index] = 5
        assert state_of(carrier) == before

    def test_any_integer_type_is_an_index(self, carrier: Carrier) -> None:
        """NumPy's integers too."""
        assert carrier[np.uint8(1)] == 2.0  # type: ignore[index]

    # Versions and mutability

    def test_a_write_advances_the_version_by_one(self, carrier: Carrier) -> None:
        """Each successful public write, in either spelling."""
        carrier[0] = 7
        carrier.set_value(3, np.float32(8))
        assert [carrier[i] for i in range(4)] == [7.0, 2.0, 3.0, 8.0]
        assert carrier.version == 2
        carrier.increment_version()
        assert carrier.version == 3

    @pytest.mark.parametrize("value", ["x", None, [1], 1j], ids=repr)
    def test_a_refused_value_changes_nothing(self, carrier: Carrier, value: object) -> None:
        """What is no real number is a TypeError."""
        before = state_of(carrier)
        with pytest.raises(TypeError):
            carrier[0] = value
        assert state_of(carrier) == before

    def test_a_value_that_does_not_fit_changes_nothing(self, make_carrier: MakeCarrier) -> None:
        """As NumPy decides for scalars."""
        carrier = make_carrier(np.array([1, 2], np.int8))
        before = state_of(carrier)
        for value, error in ((128, OverflowError), (float("nan"), ValueError)):
            with pytest.raises(error):
                carrier[0] = value
        assert state_of(carrier) == before
        carrier.release()

    def test_an_immutable_carrier_refuses_writes(self, constant: Carrier) -> None:
        """A RuntimeError, and nothing changes; reading goes on."""
        before = state_of(constant)
        assert not constant.is_mutable()
        with pytest.raises(ImmutableError):
            constant[0] = 5
        with pytest.raises(ImmutableError):
            constant.increment_version()
        assert state_of(constant) == before
        assert constant[1] == 2.0

    def test_writes_of_many_threads_all_count(self, carrier: Carrier) -> None:
        """Public writes are safe from several threads at once."""

        def write(slot: int) -> None:
            for number in range(25):
                carrier[slot] = number

        threads = [threading.Thread(target=write, args=(slot,)) for slot in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert carrier.version == 100
        assert values_of(carrier).tolist() == [24.0] * 4

    # Tensors over it

    def test_a_tensor_reads_through_any_layout(self, make_carrier: MakeCarrier) -> None:
        """Rows, columns, backwards, repeated, and two digits in one mode."""
        carrier = make_carrier(np.arange(12, dtype=np.float32))
        expected = np.arange(12, dtype=np.float32)
        for offset, layout, view in (
            (0, row_major(3, 4), expected.reshape(3, 4)),
            (0, Layout((4, 3), (1, 4)), expected.reshape(3, 4).T),
            (11, Layout(12, -1), expected[::-1]),
            (5, Layout((2, 3), (0, 1)), np.broadcast_to(expected[5:8], (2, 3))),
            (0, Layout(((2, 3),), ((6, 1),)), expected[[0, 6, 1, 7, 2, 8]]),
            (12, Layout(0, 1), expected[:0]),
        ):
            found = Tensor(carrier, offset, layout, requires_grad=False).numpy()
            assert found.shape == layout.extents
            assert np.array_equal(found, view)
        carrier.release()

    # Factories

    def test_new_like_holds_its_values(self, carrier: Carrier) -> None:
        """Same class and dtype, fresh storage, from any finite iterable."""
        made = carrier.new_like(float(value) for value in (5, 6, 7, 8))
        assert type(made) is type(carrier)
        assert (made.dtype(), made.version, made.is_mutable()) == (DType.Float32, 0, True)
        assert values_of(made).tolist() == [5.0, 6.0, 7.0, 8.0]
        made[0] = 1
        assert values_of(carrier).tolist() == [1.0, 2.0, 3.0, 4.0]
        assert not carrier.new_like([1, 2, 3, 4], mutable=False).is_mutable()

    def test_new_like_refuses_values_that_do_not_fit(self, carrier: Carrier) -> None:
        """With the error that a write of the value raises."""
        with pytest.raises(TypeError):
            carrier.new_like(["x", 2, 3, 4])
        with pytest.raises(TypeError):
            carrier.new_like(7)  # type: ignore[arg-type]
        with pytest.raises(OverflowError):
            carrier.new_like([300, 2, 3, 4], dtype=DType.Int8)

    def test_factories_take_another_dtype(self, carrier: Carrier) -> None:
        """The override is checked, and None keeps the receiver's."""
        other = next((dtype for dtype in self.dtypes if dtype is not DType.Float32), None)
        if other is not None:
            assert carrier.supports_storage_dtype(other)
            assert carrier.new_like([1, 0, 1, 0], dtype=other).dtype() is other
            assert carrier.allocate_like(4, dtype=other).dtype() is other
        for wrong in ("float32", np.float32):
            with pytest.raises(TypeError):
                carrier.supports_storage_dtype(wrong)  # type: ignore[arg-type]
            with pytest.raises(TypeError):
                carrier.allocate_like(4, dtype=wrong)  # type: ignore[arg-type]

    def test_allocate_like_gives_zeros(self, carrier: Carrier) -> None:
        """Fresh mutable slots of zero; ``empty`` leaves the values open, ``mutable`` the writes."""
        made = carrier.allocate_like(4)
        assert type(made) is type(carrier)
        assert (made.size(), made.dtype(), made.version, made.is_mutable()) == (4, DType.Float32, 0, True)
        assert values_of(made).tobytes() == bytes(16)
        assert carrier.allocate_like(4, empty=True).size() == 4
        assert not carrier.allocate_like(4, mutable=False).is_mutable()

    @pytest.mark.parametrize(
        ("size", "error"), [(-1, ValueError), (2.0, TypeError), ("4", TypeError), (True, TypeError)]
    )
    def test_a_size_is_a_number_of_slots(self, carrier: Carrier, size: Any, error: type[Exception]) -> None:
        """Not negative, and an integer."""
        with pytest.raises(error):
            carrier.allocate_like(size)

    def test_factories_make_any_size(self, carrier: Carrier) -> None:
        """One slot, none, and many."""
        if not self.any_size:
            pytest.skip("the class has one size")
        assert carrier.allocate_like(70_000).size() == 70_000
        assert values_of(carrier.new_like([3])).tolist() == [3.0]
        if self.can_be_empty:
            for empty in (carrier.allocate_like(0), carrier.new_like([])):
                assert (empty.size(), values_of(empty).shape) == (0, (0,))
                with pytest.raises(IndexError):
                    empty[0]

    # Moves

    @pytest.mark.parametrize("dtype", DType.members(), ids=lambda dtype: dtype.name)
    def test_moves_keep_every_bit(self, make_carrier: MakeCarrier, dtype: DType) -> None:
        """From memory to the carrier and back, without a version or an owner changing."""
        if not self.moves or dtype not in self.dtypes:
            pytest.skip("no such move")
        values = self.patterns(dtype)
        memory = CPU(0, dtype=dtype).new_like(values)
        there = copied(memory, make_carrier(np.zeros_like(values)))
        back = copied(there, memory.allocate_like(len(values)))
        assert values_of(there).tobytes() == values_of(back).tobytes() == values.tobytes()
        assert (memory.version, there.version, back.version) == (0, 0, 0)
        there.release()
