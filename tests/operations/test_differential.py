"""Two independent implementations, one meaning: CPU (NumPy) beside Generic (plain Python).

Operands are views with their axes permuted. What counts as agreement is said in conftest.py: equal integers
and booleans, floats within ``UNITS`` units in the last place. Where terms are added, a unit is that of the
sum of their magnitudes; where a formula passes through 1 (``erf``, ``gelu``, ``softmax``), that of 1 or of
the operand.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import strideweave as sw
from strideweave import CPU, Generic
from strideweave.dtype import DType
from strideweave.operations.table import OPERATIONS

# There are some fifty properties here; this keeps the file at a few seconds.
EXAMPLES = settings(max_examples=30)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, np.inf, -np.inf, np.nan, 1e-6, 300.0, -300.0, 2.5]
BINARY = ("add", "sub", "mul", "div", "elementwise_mul", "maximum", "minimum", "eq", "ne", "lt", "le")
EXACT = ("neg", "abs", "sign", "recip", "relu", "sqrt", "rsqrt")
ROUNDED = ("exp", "log", "sin", "cos", "tanh", "erf", "sigmoid", "silu", "softplus", "gelu")
NO_BOOLEANS = ("sub", "neg", "sign", "relu")
REDUCTIONS = ("reduce_sum", "reduce_mean", "reduce_max", "reduce_min")
PLACES = ("argmax", "argmin")
OTHERS = ("pow", "select", "clamp", "softmax", "cumsum", "matmul", "gather", "scatter_add")

DTYPES = st.sampled_from(DType.members())
FLOATS = st.sampled_from([member for member in DType.members() if member.is_differentiable])
SHAPES = arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)
FULL_SHAPES = arrays.array_shapes(min_dims=1, max_dims=3, min_side=1, max_side=4)


def numbers(dtype, special):
    """Numbers that fit the dtype."""
    if not dtype.is_differentiable:
        kinds = {DType.Bool: (0, 1)}
        low, high = kinds.get(dtype) or (np.iinfo(dtype.numpy).min, np.iinfo(dtype.numpy).max)
        return st.integers(int(low), int(high)) | st.integers(max(int(low), -3), min(int(high), 3))
    usual = st.floats(-30, 30, width=32)
    return usual | st.sampled_from(SPECIAL) if special else usual


@st.composite
def operands(draw, shape=SHAPES, dtype=DTYPES, special=True):
    """An array, and the order in which the axes of its storage stand."""
    kind, extents = draw(dtype), draw(shape)
    count = int(np.prod(extents))
    values = draw(st.lists(numbers(kind, special), min_size=count, max_size=count))
    plain = np.array(values, np.float64 if kind.is_differentiable else kind.numpy).reshape(extents)
    return plain.astype(kind.numpy), tuple(draw(st.permutations(range(len(extents)))))


@pytest.fixture(scope="session")
def both(make_on):
    """Run an operation on CPU and on Generic; operands are pairs of an array and an order, or scalars."""

    def both(name, *operands, **options):
        def run(kind):
            def tensor(array, order):
                stored = make_on(kind)(array.transpose(order).copy())
                return stored.permute(tuple(int(place) for place in np.argsort(order)))

            given = [tensor(*item) if isinstance(item, tuple) else item for item in operands]
            return getattr(sw, name)(*given, **options)

        return run(CPU), run(Generic).numpy()

    return both


def magnitude(array):
    finite = np.abs(array.astype(np.float64))
    return float(finite[np.isfinite(finite)].max(initial=0))


def test_every_operation_that_computes_is_compared():
    compared = {*BINARY, *EXACT, *ROUNDED, *REDUCTIONS, *PLACES, *OTHERS}
    assert compared == {name for name, definition in OPERATIONS.items() if definition.result == "tensor"}


@pytest.mark.parametrize("name", BINARY)
@EXAMPLES
@given(data=st.data())
def test_binary_operations(both, near, name, data):
    shapes = data.draw(arrays.mutually_broadcastable_shapes(num_shapes=2, max_dims=3, max_side=3, min_side=0))
    x, y = (data.draw(operands(shape=st.just(shape))) for shape in shapes.input_shapes)
    if name in NO_BOOLEANS and x[0].dtype == y[0].dtype == np.bool_:
        with pytest.raises(TypeError, match="Bool"):
            both(name, x, y)
        return
    near(*both(name, x, y))


@pytest.mark.parametrize("name", [name for name in BINARY if name != "elementwise_mul"])
@EXAMPLES
@given(x=operands(), scalar=st.sampled_from([0, 1, 2, True, 0.5, -0.25, 100]), left=st.booleans())
def test_scalars_beside_tensors(both, near, name, x, scalar, left):
    if name in NO_BOOLEANS and x[0].dtype == np.bool_ and scalar is True:
        return
    near(*(both(name, scalar, x) if left else both(name, x, scalar)))


@pytest.mark.parametrize("name", [*EXACT, *ROUNDED])
@EXAMPLES
@given(x=operands())
def test_functions_of_one_element(both, near, name, x):
    if name in NO_BOOLEANS and x[0].dtype == np.bool_:
        with pytest.raises(TypeError, match="Bool"):
            both(name, x)
        return
    scale = {"erf": 1, "gelu": magnitude(x[0])}.get(name, 0)
    near(*both(name, x), scale=scale)


@EXAMPLES
@given(x=operands())
def test_gelu_with_the_tangent(both, near, x):
    near(*both("gelu", x, approximate=True), scale=magnitude(x[0]))


@EXAMPLES
@given(data=st.data(), dtype=DTYPES)
def test_pow(both, near, data, dtype):
    shapes = data.draw(arrays.mutually_broadcastable_shapes(num_shapes=2, max_dims=3, max_side=3))
    x, y = (data.draw(operands(st.just(shape), st.just(dtype))) for shape in shapes.input_shapes)
    if not dtype.is_differentiable:
        y = np.where(y[0] < 0, y[0] & 7, y[0]).astype(y[0].dtype), y[1]
    near(*both("pow", x, y))


@EXAMPLES
@given(data=st.data())
def test_select(both, near, data):
    shapes = data.draw(arrays.mutually_broadcastable_shapes(num_shapes=3, max_dims=3, max_side=3))
    near(*both("select", *(data.draw(operands(st.just(shape))) for shape in shapes.input_shapes)))


@EXAMPLES
@given(x=operands(), low=st.sampled_from([None, 0, 1.5, -0.25]), high=st.sampled_from([None, 1, 2.25, 100]))
def test_clamp(both, near, x, low, high):
    if x[0].dtype == np.bool_ and not any(isinstance(bound, float | int) for bound in (low, high)):
        return
    near(*both("clamp", x, low, high))


@pytest.mark.parametrize("name", REDUCTIONS)
@EXAMPLES
@given(data=st.data())
def test_reductions(both, near, name, data):
    x = data.draw(operands(FULL_SHAPES, special=name in ("reduce_max", "reduce_min")))
    axes = data.draw(st.none() | st.lists(st.integers(0, x[0].ndim - 1), unique=True).map(tuple))
    keepdims = data.draw(st.booleans())
    adds = name in ("reduce_sum", "reduce_mean")
    scale = (
        float(np.abs(x[0].astype(float)).sum())
        if adds and DType.from_numpy(x[0].dtype).is_differentiable
        else 0
    )
    near(*both(name, x, axis=axes, keepdims=keepdims), scale=scale)


@pytest.mark.parametrize("name", PLACES)
@EXAMPLES
@given(data=st.data())
def test_places(both, near, name, data):
    x = data.draw(operands(FULL_SHAPES))
    near(*both(name, x, axis=data.draw(st.none() | st.integers(-x[0].ndim, x[0].ndim - 1))))


@EXAMPLES
@given(data=st.data())
def test_cumsum(both, near, data):
    x = data.draw(operands(FULL_SHAPES, special=False))
    axis = data.draw(st.none() | st.integers(-x[0].ndim, x[0].ndim - 1))
    near(*both("cumsum", x, axis=axis), scale=float(np.abs(x[0].astype(float)).sum()))


@EXAMPLES
@given(data=st.data())
def test_softmax(both, near, data):
    x = data.draw(operands(FULL_SHAPES, special=False))
    near(*both("softmax", x, axis=data.draw(st.integers(-x[0].ndim, x[0].ndim - 1))), scale=1)


@EXAMPLES
@given(data=st.data(), dtype=DTYPES)
def test_matmul(both, near, data, dtype):
    shapes = data.draw(
        arrays.mutually_broadcastable_shapes(signature=np.matmul.signature, max_dims=2, max_side=3)
    )
    x, y = (data.draw(operands(st.just(s), st.just(dtype), special=False)) for s in shapes.input_shapes)
    scale = x[0].shape[-1] * magnitude(x[0]) * magnitude(y[0])
    near(*both("matmul", x, y), scale=scale if dtype.is_differentiable else 0)


@st.composite
def indexed(draw, special):
    """A tensor, an axis of it, and numbers along that axis."""
    x = draw(operands(FULL_SHAPES, special=special))
    axis = draw(st.integers(-x[0].ndim, x[0].ndim - 1))
    extent = x[0].shape[axis]
    shape = draw(arrays.array_shapes(min_dims=0, max_dims=2, max_side=3))
    indices = draw(arrays.arrays(np.int64, shape, elements=st.integers(-extent, extent - 1)))
    return x, axis, (indices, tuple(range(indices.ndim)))


@EXAMPLES
@given(case=indexed(special=True))
def test_gather(both, near, case):
    x, axis, indices = case
    near(*both("gather", x, indices, axis=axis))


@EXAMPLES
@given(case=indexed(special=False), data=st.data())
def test_scatter_add(both, near, case, data):
    x, axis, indices = case
    shape = np.take(x[0], indices[0], axis=axis).shape
    dtype = DType.from_numpy(x[0].dtype)
    values = data.draw(operands(st.just(shape), st.just(dtype), special=False))
    scale = sum(float(np.abs(item[0].astype(float)).sum()) for item in (x, values))
    near(*both("scatter_add", x, indices, values, axis=axis), scale=scale if dtype.is_differentiable else 0)


@pytest.mark.parametrize("kind", [CPU, Generic], ids=lambda kind: kind.__name__)
@EXAMPLES
@given(data=st.data())
def test_views_of_views_read_as_numpys(make_on, kind, data):
    """Chains of permute, reshape, broadcast_to, squeeze and unsqueeze, then a sum over some axes."""
    array = np.arange(24.0).reshape(data.draw(st.sampled_from([(24,), (4, 6), (2, 3, 4), (1, 8, 3)])))
    tensor = make_on(kind)(array)
    for _ in range(data.draw(st.integers(1, 4))):
        step = data.draw(st.sampled_from(["permute", "reshape", "broadcast_to", "squeeze", "unsqueeze"]))
        if step == "permute":
            order = data.draw(st.permutations(range(array.ndim)))
            array, tensor = array.transpose(order), tensor.permute(*order)
        elif step == "reshape":
            shape = data.draw(st.sampled_from([(-1,), (2, -1), (-1, 3), (2, 2, -1), (3, -1, 2)]))
            array, tensor = array.reshape(shape), tensor.reshape(shape)
        elif step == "broadcast_to" and array.ndim < 4:
            array, tensor = np.broadcast_to(array, (2, *array.shape)), tensor.broadcast_to((2, *array.shape))
        elif step == "squeeze":
            array, tensor = array.squeeze(), tensor.squeeze()
        elif step == "unsqueeze":
            axis = data.draw(st.integers(-array.ndim - 1, array.ndim))
            array, tensor = np.expand_dims(array, axis), tensor.unsqueeze(axis)
    assert tensor.tolist() == array.tolist()
    axes = data.draw(st.lists(st.integers(0, array.ndim - 1), unique=True).map(tuple))
    assert sw.reduce_sum(tensor, axis=axes).tolist() == np.sum(array, axis=axes).tolist()
