"""Tensor: a carrier, an offset and a Layout."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import strideweave as sw
from strideweave import CPU, DType, Generic, Layout, Tensor, row_major
from strideweave.errors import ImmutableError, OwnershipError, ReleasedError
from strideweave.runtime.await_result import AwaitResult


def counting(size, dtype=DType.Float32):
    """A CPU carrier whose slots hold their own numbers."""
    return CPU(0, dtype=dtype).new_like(range(size))


def by_definition(tensor):
    """The values as the Layout defines them, one coordinate at a time."""
    values = np.empty(tensor.shape, tensor.dtype.numpy)
    for coordinate in np.ndindex(*tensor.shape):
        values[coordinate] = tensor.carrier[tensor.offset + tensor.layout(coordinate)]
    return values


@st.composite
def placed_layouts(draw):
    """A Layout of nested modes with any strides, and an offset that keeps it inside 4096 slots."""
    extents, strides = st.integers(1, 3), st.integers(-5, 12)
    modes = draw(st.lists(st.lists(st.tuples(extents, strides), min_size=1, max_size=3), max_size=3))
    shape = [tuple(e for e, _ in mode) if len(mode) > 1 else mode[0][0] for mode in modes]
    stride = [tuple(s for _, s in mode) if len(mode) > 1 else mode[0][1] for mode in modes]
    layout = Layout(tuple(shape), tuple(stride))
    return layout, draw(st.integers(-layout.min_index, 600))


def test_a_tensor_tells_what_it_is():
    carrier = counting(30, DType.Int16)
    tensor = Tensor(carrier, 2, Layout(((2, 3), 4), ((1, 2), 6)))
    assert (tensor.shape, tensor.ndim, tensor.size, tensor.nbytes) == ((6, 4), 2, 24, 48)
    assert (tensor.carrier, tensor.offset, tensor.dtype, tensor.version) == (carrier, 2, DType.Int16, 0)
    assert tensor.layout.shape == ((2, 3), 4)
    assert all(type(extent) is int for extent in tensor.shape)
    assert type(tensor.shape) is tuple
    assert repr(tensor) == "Tensor(shape=(6, 4), Int16, CPU, requires_grad=False)"


@pytest.mark.parametrize(
    ("offset", "layout", "error"),
    [
        (0, row_major(3, 4), None),
        (8, row_major(2, 2), None),
        (9, row_major(2, 2), ValueError),
        (-1, row_major(2, 2), ValueError),
        (11, Layout((12,), (-1,)), None),
        (10, Layout((12,), (-1,)), ValueError),
        (0, Layout((5, 5), (0, 0)), None),
        (12, Layout((0, 5), (5, 1)), None),
        (13, Layout((0, 5), (5, 1)), ValueError),
        (12, row_major(), ValueError),
        (0, Layout((10**9, 10**9), (10**9, 1)), ValueError),
        (True, row_major(2), TypeError),
        (0.0, row_major(2), TypeError),
        (0, (2, 2), TypeError),
        (0, None, TypeError),
    ],
)
def test_a_layout_has_to_lie_inside_the_carrier(offset, layout, error):
    carrier = counting(12)
    if error is None:
        assert Tensor(carrier, offset, layout).numpy().shape == layout.extents
    else:
        with pytest.raises(error):
            Tensor(carrier, offset, layout)


def test_a_carrier_is_needed():
    with pytest.raises(TypeError, match="Carrier"):
        Tensor(np.zeros(3), 0, row_major(3))


@pytest.mark.parametrize(
    ("dtype", "expected"), [(DType.Float32, True), (DType.BFloat16, True), (DType.Int8, False)]
)
def test_requires_grad_follows_the_dtype_unless_told(dtype, expected):
    carrier = CPU(4, dtype=dtype)
    assert Tensor(carrier, 0, row_major(4)).requires_grad is expected
    assert Tensor(carrier, 0, row_major(4), requires_grad=False).requires_grad is False
    assert Tensor(carrier, 0, row_major(4)).detach().requires_grad is False


def test_requires_grad_needs_a_floating_dtype_and_a_bool():
    with pytest.raises(TypeError, match="floating"):
        Tensor(CPU(1, dtype=DType.Int8), 0, row_major(1), requires_grad=True)
    with pytest.raises(TypeError, match="bool"):
        Tensor(CPU(1), 0, row_major(1), requires_grad=1)


def test_an_integer_indexes_with_the_first_mode_fastest_and_a_tuple_by_coordinate():
    """Contract section 3: integer coordinates expand first-mode-fastest everywhere."""
    tensor = Tensor(counting(6), 0, row_major(2, 3))
    assert [tensor[i] for i in range(6)] == [0, 3, 1, 4, 2, 5]
    assert [tensor[i, j] for i in range(2) for j in range(3)] == [0, 1, 2, 3, 4, 5]
    assert type(tensor[0]) is float
    nested = Tensor(counting(8), 0, Layout(((2, 2), 2), ((1, 4), 2)))
    assert nested[3, 1] == nested[(1, 1), 1] == 7
    scalar = Tensor(counting(3), 2, row_major())
    assert scalar[()] == scalar[0] == scalar.item() == 2


@pytest.mark.parametrize("index", [-1, 6, (0, 3), (2, 0), (0, -1), (0,), (0, 0, 0), ()])
def test_an_index_outside_is_an_index_error(index):
    tensor = Tensor(counting(6), 0, row_major(2, 3))
    with pytest.raises(IndexError):
        tensor[index]
    with pytest.raises(IndexError):
        tensor[index] = 1
    assert tensor.version == 0


def test_an_index_that_takes_a_part_says_what_does():
    tensor = sw.asarray([[1.0, 2.0]])
    for index in (slice(None), (0, slice(None)), [0], None, ...):
        with pytest.raises(TypeError, match="must be an integer") as caught:
            tensor[index]
        assert caught.value.__notes__ == [
            "an index names one element; gather() and numpy() take parts of a tensor"
        ]
    with pytest.raises(IndexError, match=r"coordinate 2 is outside \[0, 2\) of Shape\(1, 2\)$"):
        tensor[2]
    with pytest.raises(IndexError, match=r"coordinate 1 is outside \[0, 1\) of the mode 1 of Shape\(1, 2\)$"):
        tensor[1, 0]


@pytest.mark.parametrize(
    "index", [True, 1.0, None, slice(None), [0, 1], (0, True), (0, 1.0), (0, slice(None))]
)
def test_an_index_of_another_type_is_a_type_error(index):
    with pytest.raises(TypeError):
        Tensor(counting(6), 0, row_major(2, 3))[index]


def test_assignment_is_a_public_mutation():
    tensor = Tensor(counting(6), 0, row_major(2, 3))
    tensor[1, 0] = 30
    tensor[2] = 10
    assert (tensor.tolist(), tensor.version) == ([[0, 10, 2], [30, 4, 5]], 2)
    fixed = Tensor(CPU(2, mutable=False), 0, row_major(2))
    with pytest.raises(ImmutableError):
        fixed[0] = 1


def test_numpy_is_a_read_only_view_and_writable_when_asked():
    tensor = Tensor(counting(6), 0, row_major(2, 3))
    view = tensor.numpy()
    assert not view.flags.writeable
    assert np.shares_memory(view, tensor.carrier.numpy())
    tensor.numpy(writable=True)[0, 1] = 50
    assert (tensor[0, 1], view[0, 1], tensor.version) == (50, 50, 0)
    copy = tensor.numpy(copy=True)
    copy[:] = -1
    assert tensor[0, 1] == 50


def test_a_writable_view_needs_a_mutable_carrier_and_distinct_slots():
    with pytest.raises(ImmutableError):
        Tensor(CPU(2, mutable=False), 0, row_major(2)).numpy(writable=True)
    owned = CPU(2)
    owned._claim(object())
    with pytest.raises(OwnershipError):
        Tensor(owned, 0, row_major(2)).numpy(writable=True)
    repeated = Tensor(CPU(2), 0, Layout((3, 2), (0, 1)))
    with pytest.raises(ValueError, match="no writable view"):
        repeated.numpy(writable=True)
    with pytest.raises(ValueError, match="no writable view"):
        Tensor(CPU(8), 0, Layout(((2, 2), 2), ((1, 4), 2))).numpy(writable=True)


def test_without_a_view_numpy_copies_or_refuses():
    tensor = Tensor(counting(8), 0, Layout(((2, 2), 2), ((1, 4), 2)))
    copied = tensor.numpy()
    assert copied.tolist() == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert copied.flags.writeable
    assert not np.shares_memory(copied, tensor.carrier.numpy())
    with pytest.raises(ValueError, match="no view"):
        tensor.numpy(copy=False)


def test_a_nested_mode_whose_parts_continue_each_other_has_a_view():
    tensor = Tensor(counting(12), 0, Layout(((2, 3), 2), ((2, 4), 1)))
    assert tensor.numpy(copy=False).strides == (8, 4)


@given(placed_layouts(), st.sampled_from([DType.Int8, DType.BFloat16, DType.Float64]))
def test_numpy_equals_the_definition_for_any_layout(placed, dtype):
    layout, offset = placed
    raw = np.random.default_rng(0).integers(0, 100, 800).astype(dtype.numpy)
    tensor = Tensor(CPU.from_numpy(raw), offset, layout)
    expected = by_definition(tensor)
    assert tensor.numpy().tobytes() == expected.tobytes()
    assert tensor.numpy(copy=True).tobytes() == expected.tobytes()
    if all(len(mode) <= 1 for mode in layout.digits()):
        assert tensor.numpy(copy=False).base is not None


def test_every_bit_survives_numpy():
    for dtype in (DType.Float8E4M3FN, DType.Float8E5M2):
        patterns = np.arange(256, dtype=np.uint8)
        tensor = Tensor(CPU.from_numpy(patterns.view(dtype.numpy)), 255, Layout(((16, 16),), ((-16, -1),)))
        order = [255 - 16 * i - j for j in range(16) for i in range(16)]
        assert tensor.numpy().view(np.uint8).tolist() == patterns[order].tolist()


def test_numpy_protocol():
    tensor = Tensor(counting(6), 0, row_major(2, 3))
    assert np.shares_memory(np.asarray(tensor), tensor.carrier.numpy())
    assert not np.shares_memory(np.array(tensor), tensor.carrier.numpy())
    assert np.array(tensor).flags.writeable
    assert np.asarray(tensor, dtype=np.int8).dtype == np.int8
    with pytest.raises(ValueError, match="without a copy"):
        np.asarray(tensor, dtype=np.int8, copy=False)
    assert np.exp(tensor).shape == (2, 3)


def test_item_and_tolist():
    assert Tensor(counting(6), 5, row_major(1, 1)).item() == 5.0
    with pytest.raises(ValueError, match="exactly one"):
        Tensor(counting(6), 0, row_major(2)).item()
    small = sw.asarray([[1, 2], [3, 4]], dtype=DType.BFloat16)
    assert small.tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert type(small.tolist()[0][0]) is float
    assert Tensor(counting(3), 2, row_major()).tolist() == 2.0


def test_one_element_is_a_number_of_python():
    for one in (Tensor(counting(6), 5, row_major(1, 1)), Tensor(counting(6), 5, row_major())):
        assert (float(one), int(one)) == (5.0, 5)
    assert float(sw.asarray([True])) == 1.0
    for number in (float, int):
        with pytest.raises(ValueError, match="exactly one"):
            number(Tensor(counting(6), 0, row_major(2)))
        with pytest.raises(ValueError, match="exactly one"):
            number(sw.zeros((0,)))


def test_a_tensor_is_not_a_sequence_and_has_a_truth_value_only_alone():
    tensor = Tensor(counting(6), 0, row_major(2, 3))
    with pytest.raises(TypeError, match="not iterable"):
        iter(tensor)
    with pytest.raises(ValueError, match="ambiguous"):
        bool(tensor)
    assert bool(Tensor(counting(6), 1, row_major()))
    assert not Tensor(counting(6), 0, row_major())


def test_views_are_methods_that_take_integers_or_a_tuple():
    tensor = Tensor(counting(24), 0, row_major(2, 3, 4))
    array = tensor.numpy()
    for view, expected in (
        (tensor.permute(2, 0, 1), array.transpose(2, 0, 1)),
        (tensor.permute((2, 0, -2)), array.transpose(2, 0, 1)),
        (tensor.reshape(6, 4), array.reshape(6, 4)),
        (tensor.reshape((4, -1)), array.reshape(4, 6)),
        (tensor.reshape(-1), array.reshape(-1)),
        (tensor.T, array.T),
        (tensor.unsqueeze(1), array[:, None]),
        (tensor.unsqueeze(-1).squeeze(), array),
        (tensor.reshape(2, 1, 12).squeeze(1), array.reshape(2, 12)),
        (tensor.unsqueeze(0).broadcast_to(5, 2, 3, 4), np.broadcast_to(array, (5, 2, 3, 4))),
    ):
        assert view.numpy().tolist() == expected.tolist()
        assert view.carrier is tensor.carrier


def test_operators_take_scalars_on_either_side_and_numpy_scalars_too():
    tensor = Tensor(counting(3), 0, row_major(3))
    array = tensor.numpy()
    for found, expected in (
        (tensor + 1, array + 1),
        (1 - tensor, 1 - array),
        (tensor - tensor, array - array),
        (2.0 * tensor, 2.0 * array),
        (1 / (tensor + 1), 1 / (array + 1)),
        (tensor / 2, array / 2),
        (-tensor, -array),
        (tensor @ tensor, array @ array),
        (np.float64(2) * tensor, array * 2),
        (tensor + np.int64(1), array + 1),
    ):
        assert isinstance(found, Tensor)
        assert found.dtype is DType.Float32
        assert found.numpy().tolist() == expected.tolist()


@pytest.mark.parametrize("other", ["1", None, [1, 2, 3], np.ones(3, np.float32)])
def test_operators_refuse_other_types(other):
    tensor = Tensor(counting(3), 0, row_major(3))
    with pytest.raises(TypeError):
        tensor + other
    with pytest.raises(TypeError):
        other * tensor
    with pytest.raises(TypeError):
        tensor @ other


def test_a_pending_result_is_no_operand_and_the_error_says_to_wait():
    """Spec: an AwaitProjection SHALL not be a Tensor and SHALL fail ordinary operand validation with TypeError."""
    tensor, pending = Tensor(counting(3), 0, row_major(3)), AwaitResult()
    for use in (
        lambda: tensor + pending,
        lambda: pending * tensor,
        lambda: tensor @ pending,
        lambda: sw.matmul(pending, tensor),
        lambda: sw.gelu(pending),
        lambda: sw.reshape(pending, (3, 1)),
        lambda: sw.gather(tensor, pending),
    ):
        with pytest.raises(TypeError, match=r"AwaitResult.*wait\(\)"):
            use()


def test_a_released_carrier_raises_from_every_use():
    carrier = counting(3)
    tensor = Tensor(carrier, 0, row_major(3))
    carrier.release()
    for use in (
        tensor.numpy,
        tensor.tolist,
        lambda: tensor[0],
        lambda: tensor + 1,
        lambda: tensor.reshape(3, 1),
        lambda: sw.asarray([1.0, 2.0, 3.0]) + tensor,
        lambda: np.asarray(tensor),
        tensor.detach,
    ):
        with pytest.raises(ReleasedError):
            use()
    assert (tensor.shape, tensor.dtype) == ((3,), DType.Float32)
    assert "released" in repr(tensor)


def test_generic_tensors_have_views_too():
    tensor = Tensor(Generic(range(6)), 0, row_major(2, 3))
    assert tensor.numpy(copy=False).tolist() == [[0, 1, 2], [3, 4, 5]]
    tensor.numpy(writable=True)[0, 0] = 9
    assert tensor[0] == 9


def test_zero_extents_have_arrays_lists_and_views():
    tensor = Tensor(CPU(0), 0, row_major(2, 0))
    assert tensor.numpy().shape == (2, 0)
    assert tensor.tolist() == [[], []]
    assert tensor.reshape(0, 5).shape == (0, 5)
    assert (tensor + 1).shape == (2, 0)
