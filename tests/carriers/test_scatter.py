"""carrier.scatter: values written to the slots that a Layout names."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strideweave import CPU, Generic, Layout, Tensor, column_major, row_major
from strideweave.dtype import DType
from strideweave.errors import ImmutableError, OwnershipError, PendingWorkError, ReleasedError


@pytest.fixture(params=[CPU, Generic], ids=lambda kind: kind.__name__)
def make(request):
    """Make a carrier of each kind that computes, with given values."""
    return maker(request.param)


def maker(kind):
    like = CPU(0) if kind is CPU else Generic([])

    def make(values, dtype=DType.Float32, mutable=True):
        return like.new_like(values, dtype=dtype, mutable=mutable)

    return make


def on(carrier, offset=0, layout=None):
    return Tensor(carrier, offset, layout or row_major(carrier.size() - offset))


def test_each_coordinate_lands_at_offset_plus_mapping(make):
    source = on(make(range(1, 7)), layout=row_major(2, 3))
    target = make([0] * 12)
    assert target.scatter(source, on(target, 2), column_major(2, 3), 1) is None
    assert list(target) == [0, 0, 0, 1, 4, 2, 5, 3, 6, 0, 0, 0]
    assert target.version == 1
    assert source.version == 0


def test_a_negative_offset_and_stride_are_places_too(make):
    target = make([0] * 5)
    target.scatter(on(make([1, 2, 3])), on(target, 4), Layout(3, -2), 0)
    target.scatter(on(make([9])), on(target, 4), row_major(1), -1)
    assert list(target) == [3, 0, 2, 9, 1]
    assert target.version == 2


def test_the_source_may_lie_on_the_same_slots(make):
    """The source is read before anything is written."""
    carrier = make(range(6))
    carrier.scatter(on(carrier, 0, row_major(5)), on(carrier, 1), row_major(5))
    assert list(carrier) == [0, 0, 1, 2, 3, 4]
    carrier.scatter(on(carrier), on(carrier, 5), Layout(6, -1))
    assert list(carrier) == [4, 3, 2, 1, 0, 0]


def test_two_carriers_on_the_same_memory_do_not_disturb_each_other():
    memory = np.arange(6, dtype=np.float32)
    source, target = CPU.from_numpy(memory), CPU.from_numpy(memory)
    target.scatter(on(source, 0, row_major(5)), on(target, 1), row_major(5))
    assert memory.tolist() == [0, 0, 1, 2, 3, 4]


@pytest.mark.parametrize("dtype", [DType.Float8E4M3FN, DType.Float8E5M2])
def test_every_bit_is_moved(make, dtype):
    patterns = np.arange(256, dtype=np.uint8)
    target = make(np.zeros(256, dtype.numpy), dtype)
    target.scatter(on(make(patterns.view(dtype.numpy), dtype)), on(target, 255), Layout(256, -1))
    assert target._bytes().tolist() == patterns[::-1].tolist()


def test_a_broadcast_source_and_a_scalar_are_sources(make):
    target = make([0] * 4)
    source = on(make([7]), layout=row_major(1)).broadcast_to((3,))
    target.scatter(source, on(target), row_major(3), 1)
    target.scatter(Tensor(make([5]), 0, row_major(())), on(target), row_major(()))
    assert list(target) == [5, 7, 7, 7]


def test_a_scatter_of_nothing_is_one_write_of_nothing(make):
    target = make([1, 2])
    target.scatter(Tensor(make([]), 0, row_major(0)), on(target), row_major(0))
    assert (list(target), target.version) == ([1, 2], 1)


def test_wrong_arguments_change_nothing(make):
    target, other = make([1, 2, 3]), make([4, 5])
    onto, source, line = on(target), on(other), row_major(2)
    foreign = on(Generic([1, 2]) if isinstance(target, CPU) else CPU(2))
    released = make([1, 2])
    gone = on(released)
    released.release()
    for error, words, arguments in (
        (TypeError, "to_scatter must be a Tensor", ([1, 2], onto, line)),
        (TypeError, "scatter_onto must be a Tensor", (source, target, line)),
        (TypeError, "mapping must be a Layout", (source, onto, (2,))),
        (TypeError, "mapping_offset must be an integer", (source, onto, line, 0.0)),
        (TypeError, "bring all operands to one carrier class", (foreign, onto, line)),
        (TypeError, "converts none", (on(make([1, 2], DType.Float64)), onto, line)),
        (ValueError, "another carrier", (source, source, line)),
        (ValueError, "must be the same", (source, onto, row_major(3))),
        (ValueError, "must be the same", (source, onto, row_major(2, 1))),
        (ValueError, "reaches the slots 2 to 3", (source, onto, line, 2)),
        (ValueError, "reaches the slots -1 to 0", (source, onto, line, -1)),
        (ValueError, "two coordinates to one slot", (source, onto, Layout(2, 0))),
        (ReleasedError, "released", (gone, onto, line)),
    ):
        with pytest.raises(error, match=words):
            target.scatter(*arguments)
    assert (list(target), target.version) == ([1, 2, 3], 0)
    assert (list(other), other.version) == ([4, 5], 0)


def test_a_carrier_that_refuses_writes_refuses_a_scatter(make):
    fixed, owned, gone = make([1], mutable=False), make([1]), make([1])
    tensors = [on(carrier) for carrier in (fixed, owned, gone)]
    owner = object()
    owned._claim(owner)
    gone.release()
    for carrier, tensor, error in zip(
        (fixed, owned, gone), tensors, (ImmutableError, OwnershipError, ReleasedError), strict=True
    ):
        with pytest.raises(error):
            carrier.scatter(on(make([2])), tensor, row_major(1))
    assert (list(fixed), list(owned)) == ([1], [1])
    assert (fixed.version, owned.version) == (0, 0)


def test_a_scatter_under_way_holds_off_release_and_owners(make, monkeypatch):
    """A write that is being made is pending work of the carrier."""
    target, seen = make([1, 2]), []
    store = type(target)._store_layout

    def meanwhile(self, source, layout, first):
        for call in (self.release, lambda: self._claim(object())):
            with pytest.raises(PendingWorkError):
                call()
        seen.append(self.version)
        store(self, source, layout, first)

    monkeypatch.setattr(type(target), "_store_layout", meanwhile)
    target.scatter(on(make([5])), on(target), row_major(1))
    assert (seen, list(target), target.version) == ([0], [5, 2], 1)
    target.release()


def test_a_scatter_that_fails_on_the_way_does_not_count(make, monkeypatch):
    target = make([1, 2])

    def fail(self, source, layout, first):
        raise MemoryError

    monkeypatch.setattr(type(target), "_store_layout", fail)
    with pytest.raises(MemoryError):
        target.scatter(on(make([5])), on(target), row_major(1))
    assert (list(target), target.version, target.statistics().pending) == ([1, 2], 0, 0)


@st.composite
def mappings(draw):
    """A permuted dense Layout with gaps, some modes nested, and the shape that it takes."""
    digits = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    strides, reach = [0] * len(digits), 1
    for place in draw(st.permutations(range(len(digits)))):
        strides[place] = reach * draw(st.integers(1, 2))
        reach = strides[place] * (digits[place] - 1) + reach
    cut = draw(st.integers(0, len(digits) - 1))
    shape, stride = (
        (tuple(digits[: cut + 1]), *digits[cut + 1 :]),
        (tuple(strides[: cut + 1]), *strides[cut + 1 :]),
    )
    return Layout(shape, stride)


@pytest.mark.parametrize("kind", [CPU, Generic], ids=lambda kind: kind.__name__)
@given(mapping=mappings(), start=st.integers(0, 3), extra=st.integers(-2, 2), order=st.booleans())
def test_a_scatter_is_what_its_definition_says(kind, mapping, start, extra, order):
    make, first = maker(kind), start + extra
    if first < 0:
        start, first = start - first, 0
    target = make([-1] * (first + mapping.cosize + start + 1))
    layout = (row_major if order else column_major)(*mapping.extents)
    source = Tensor(make(range(mapping.size)), 0, layout)
    expected = list(target)
    for coordinate in np.ndindex(*mapping.extents):
        expected[first + mapping(coordinate)] = source[coordinate]
    target.scatter(source, on(target, start), mapping, extra)
    assert list(target) == expected
