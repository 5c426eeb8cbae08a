"""Every operation on Metal against the same operation on CPU.

Integers, booleans, positions and copied elements agree exactly. Floats agree within ``UNITS`` units in the last
place of the dtype, relative to the largest number that was added, and within ``FUNCTIONS`` absolutely, which is
as far as either library's error function and exponentials are accurate in 32 bits.
"""

import warnings

import ml_dtypes
import numpy as np
import pytest

import strideweave as sw
from strideweave import CPU, Layout, Metal, Tensor, row_major
from strideweave.carriers import metal_operations
from strideweave.carriers.metal_kernels import METAL_KERNELS, computes
from strideweave.dtype import DType
from strideweave.operations.table import OPERATIONS

pytest.importorskip("mlx.core", reason="the extra strideweave[metal] is not installed")

UNITS, FUNCTIONS = 16, 4e-7
MEMBERS = DType.members()
FLOATS = tuple(member for member in MEMBERS if member.is_differentiable)
EXTREMES = np.array(
    [-np.inf, -1e30, -1000, -30, -1, -1e-20, -0.0, 0.0, 1e-20, 0.3, 1, 2.5, 30, 1000, 1e30, np.inf, np.nan]
)
UNARY = (
    *("neg", "abs", "sign", "recip", "sqrt", "rsqrt", "exp", "log", "sin", "cos", "erf", "relu", "sigmoid"),
    *("tanh", "gelu", "silu", "softplus"),
)
BINARY = (
    *("add", "sub", "mul", "elementwise_mul", "div", "pow", "maximum", "minimum", "eq", "ne", "lt", "le"),
)
REDUCTIONS = (
    "reduce_sum",
    "reduce_mean",
    "reduce_max",
    "reduce_min",
    "argmax",
    "argmin",
    "cumsum",
    "softmax",
)
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of overflow and the like


@pytest.fixture
def rng():
    return np.random.default_rng(12)


def values_of(rng, dtype, shape=(5, 7), *, extreme=False):
    if dtype is DType.Bool:
        return rng.integers(0, 2, shape).astype(bool)
    if not dtype.is_differentiable:
        return rng.integers(0 if dtype is DType.UInt8 else -9, 10, shape).astype(dtype.numpy)
    chosen = rng.choice(EXTREMES, shape) if extreme else rng.normal(0, 3, shape)
    return np.asarray(chosen).astype(dtype.numpy)


def put(kind, value):
    if not isinstance(value, np.ndarray):
        return value
    carrier = kind(0).new_like(value.reshape(-1), dtype=DType.from_numpy(value.dtype))
    return Tensor(carrier, 0, row_major(value.shape), requires_grad=False)


def compare(name, *operands, scale=0, **options):
    """Run an operation on both carriers: the same error, or results that agree."""
    function = getattr(sw, name)
    try:
        expected = function(*(put(CPU, operand) for operand in operands), **options)
    except (TypeError, ValueError, IndexError, OverflowError) as error:
        with pytest.raises(type(error)):
            function(*(put(Metal, operand) for operand in operands), **options)
        return
    found = function(*(put(Metal, operand) for operand in operands), **options)
    assert type(found.carrier) is Metal
    agree(found, expected, scale)


def agree(found, expected, scale=0):
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    if not found.dtype.is_differentiable:
        assert found.tolist() == expected.tolist()
        return
    about = ml_dtypes.finfo(found.dtype.numpy)
    a, b = (x.numpy().astype(np.float64) for x in (found, expected))
    assert np.isnan(a).tolist() == np.isnan(b).tolist()
    assert a[np.isinf(a)].tolist() == b[np.isinf(a)].tolist()
    finite = np.isfinite(b)
    near = UNITS * float(about.eps) * np.maximum(np.abs(b[finite]), scale)
    apart = np.abs(a[finite] - b[finite])
    assert (apart <= near + FUNCTIONS).all(), f"off by {apart.max():.3g}"


def test_every_operation_that_computes_has_a_kernel():
    computing = {name for name, definition in OPERATIONS.items() if definition.result != "view"}
    assert METAL_KERNELS.keys() == computing
    tested = {*UNARY, *BINARY, *REDUCTIONS, "select", "clamp", "matmul", "gather", "scatter_add"}
    assert tested == computing


@pytest.mark.parametrize("dtype", MEMBERS)
@pytest.mark.parametrize("name", UNARY)
def test_functions_of_one_operand(rng, name, dtype):
    extremes = values_of(rng, dtype, extreme=True)
    if name in ("sin", "cos"):  # MLX's reduction to one period does not reach 1e30 in every version
        extremes[np.isfinite(extremes.astype(np.float64)) & (np.abs(extremes.astype(np.float64)) > 1e3)] = 0
    compare(name, values_of(rng, dtype))
    compare(name, extremes)
    compare(name, values_of(rng, dtype, ()))
    compare(name, values_of(rng, dtype, (0, 3)))


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_other_gelu(rng, dtype):
    compare("gelu", values_of(rng, dtype), approximate=True)


@pytest.mark.parametrize("dtype", MEMBERS)
@pytest.mark.parametrize("name", BINARY)
def test_functions_of_two_operands(rng, name, dtype):
    for extreme in (False, True):
        x = values_of(rng, dtype, extreme=extreme)
        compare(name, x, values_of(rng, dtype, (1, 7)))
        compare(name, values_of(rng, dtype, (7,)), x)
        compare(name, x, 2)
        compare(name, 1.5, x)
    for other in MEMBERS:
        compare(name, x, values_of(rng, other, (5, 1)))


@pytest.mark.parametrize("dtype", MEMBERS)
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions(rng, name, dtype):
    for extreme in (False, True):
        x = values_of(rng, dtype, (3, 4, 5), extreme=extreme)
        with np.errstate(all="ignore"):
            scale = np.nansum(np.abs(x.astype(np.float64))[np.isfinite(x.astype(np.float64))])
        for axis in (0, 1, -1):
            compare(name, x, axis=axis, scale=scale)
        if name != "softmax":
            compare(name, x, scale=scale)
        if name.startswith("reduce"):
            compare(name, x, axis=(0, 2), keepdims=True, scale=scale)
            compare(name, x, axis=(), scale=scale)
        compare(name, x[:, :0], axis=2)


@pytest.mark.parametrize("name", ["argmax", "argmin"])
def test_the_first_of_equals_is_found_and_a_nan_before_them(name):
    for row in ([1, 3, 3, 1], [np.inf, np.nan, np.inf, np.nan], [-np.inf, np.nan, 0, 0], [2, 2, 2, 2]):
        compare(name, np.array([row, row], np.float32), axis=1)


@pytest.mark.parametrize("dtype", MEMBERS)
def test_choices(rng, dtype):
    for extreme in (False, True):
        x = values_of(rng, dtype, extreme=extreme)
        compare("select", values_of(rng, dtype, extreme=extreme), x, values_of(rng, dtype, (7,)))
        compare("select", values_of(rng, DType.Bool), 1, x)
        compare("clamp", x, min=-1, max=2)
        compare("clamp", x, max=0.5)
        compare("clamp", x)


SHAPES = [
    ((5, 7), (7, 3)),
    ((7,), (7,)),
    ((7,), (7, 3)),
    ((5, 7), (7,)),
    ((2, 5, 7), (7, 3)),
    ((2, 1, 5, 7), (3, 7, 3)),
    ((5, 0), (0, 3)),
]


@pytest.mark.parametrize("dtype", MEMBERS)
@pytest.mark.parametrize("shapes", SHAPES)
def test_products_of_matrices(rng, shapes, dtype):
    x, y = (values_of(rng, dtype, shape) for shape in shapes)
    scale = float(np.matmul(np.abs(x.astype(float)), np.abs(y.astype(float))).max(initial=0))
    compare("matmul", x, y, scale=scale)


@pytest.mark.parametrize("dtype", MEMBERS)
def test_indexing(rng, dtype):
    indices = rng.integers(-4, 4, (2, 3))
    x = values_of(rng, dtype, (4, 4), extreme=True)
    for axis in (0, 1):
        compare("gather", x, indices, axis=axis)
        compare("scatter_add", x, indices, values_of(rng, dtype, ()), axis=axis)
    compare("scatter_add", values_of(rng, dtype, (4, 4)), indices, values_of(rng, dtype, (2, 3, 4)), scale=60)
    compare("gather", x, np.array([0, 4]))
    compare("scatter_add", x, np.array([-5]), values_of(rng, dtype, ()))


@pytest.mark.parametrize("dtype", [DType.Float16, DType.BFloat16, DType.Float32])
def test_copied_elements_keep_every_bit(dtype):
    bits = np.random.default_rng(5).integers(0, 256, 64 * dtype.itemsize, dtype=np.uint8)
    x = put(Metal, bits.view(dtype.numpy).reshape(8, 8))
    rows = put(Metal, np.arange(8))
    yes = put(Metal, np.ones((8, 8), bool))
    assert sw.gather(x, rows).numpy().tobytes() == bits.tobytes()
    assert sw.select(yes, x, 0).numpy().tobytes() == bits.tobytes()


LAYOUTS = [
    (0, Layout((4, 5), (1, 4))),
    (3, Layout((2, 3), (7, 2))),
    (1, Layout((3, 4), (0, 1))),
    (19, Layout((4, 5), (-5, -1))),
    (0, Layout(((2, 2), 5), ((10, 1), 2))),
    (0, Layout((5, (2, 2)), (4, (2, 1)))),
    (7, Layout((1, 1), (3, 9))),
    (20, Layout((0, 3), (1, 1))),
    (6, Layout((), ())),
]


@pytest.mark.parametrize(("offset", "layout"), LAYOUTS)
@pytest.mark.parametrize("dtype", [DType.Float32, DType.Int64, DType.BFloat16, DType.Float64])
def test_operands_of_any_layout(dtype, offset, layout):
    values = np.arange(20).astype(dtype.numpy)
    operands = [
        Tensor(kind(0).new_like(values, dtype=dtype), offset, layout, requires_grad=False)
        for kind in (Metal, CPU)
    ]
    found, expected = (x + x * 3 for x in operands)
    assert type(found.carrier) is Metal
    assert found.tolist() == expected.tolist()
    found, expected = (sw.cumsum(x) for x in operands)
    assert found.tolist() == expected.tolist()


def test_mlx_computes_what_it_can_and_numpy_the_rest(monkeypatch):
    asked = {}
    monkeypatch.setattr(
        metal_operations, "computes", lambda bound: asked.setdefault(bound.definition.name, computes(bound))
    )
    x, whole, wide = (put(Metal, np.ones((2, 2), kind)) for kind in (np.float32, np.int64, np.float64))
    for name, operands in {
        "mul": (x, 2),
        "exp": (x,),
        "matmul": (x, x),
        "reduce_sum": (whole,),
        "lt": (whole, 3),
        "div": (whole, whole),
        "pow": (whole, whole),
        "add": (x, wide),
        "le": (x, whole),
    }.items():
        assert type(getattr(sw, name)(*operands).carrier) is Metal
    on_numpy = {name for name, by_mlx in asked.items() if not by_mlx}
    assert on_numpy == {"div", "pow", "add", "le"}


def test_operands_on_two_classes_are_refused():
    with pytest.raises(TypeError, match="bring all operands to one carrier class"):
        put(Metal, np.ones(2)) + put(CPU, np.ones(2))


class TestGradients:
    """The vector-Jacobian products are the same, run by this carrier's operations."""

    @staticmethod
    def gradients(kind, function, *arrays):
        leaves = [put(kind, array) for array in arrays]
        leaves = [Tensor(leaf.carrier, 0, leaf.layout) for leaf in leaves]
        result = function(*leaves)
        sw.reduce_sum(result * result).backward()
        return [leaf.grad for leaf in leaves]

    CASES = {
        "mlp": (lambda x, w, b: sw.gelu(x @ w + b), [(3, 4), (4, 5), (5,)]),
        "softmax": (lambda x: sw.softmax(x * 2.0, axis=0), [(4, 3)]),
        "norm": (lambda x: (x - sw.reduce_mean(x)) * sw.rsqrt(sw.reduce_mean(x * x) + 1e-5), [(6,)]),
        "extremes": (lambda x, y: sw.maximum(x, y) + sw.reduce_max(x, axis=0), [(3, 4), (4,)]),
        "functions": (lambda x: sw.tanh(x) + sw.erf(x) + sw.silu(x) + sw.softplus(x) + sw.sin(x), [(5,)]),
        "sums": (lambda x: sw.cumsum(sw.clamp(x, -1, 1), axis=1).T, [(3, 4)]),
    }

    @pytest.mark.parametrize("case", CASES)
    def test_they_agree_with_those_of_cpu_and_land_on_metal(self, rng, case):
        function, shapes = self.CASES[case]
        arrays = [values_of(rng, DType.Float32, shape) for shape in shapes]
        found = self.gradients(Metal, function, *arrays)
        expected = self.gradients(CPU, function, *arrays)
        for one, other in zip(found, expected, strict=True):
            assert type(one.carrier) is Metal
            assert one.shape == other.shape
            scale = max(1.0, float(np.abs(other.numpy()).max()))
            assert np.allclose(one.numpy(), other.numpy(), rtol=1e-4, atol=1e-5 * scale)


def test_mlx_raises_no_warnings_of_its_own():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        x = put(Metal, EXTREMES.astype(np.float32))
        sw.exp(x)
        sw.log(x)
        x / 0.0
