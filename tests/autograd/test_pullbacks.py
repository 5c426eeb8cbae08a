"""Every operation's gradient, held against central finite differences of its own forward in Float64."""

from __future__ import annotations

import numpy as np
import pytest

import strideweave as sw
from strideweave import CPU, DType, no_grad
from strideweave.operations.table import OPERATIONS

STEP = 1e-6


def is_near(found, expected):
    """Differences with a step of 1e-6 are exact to some 1e-9 where values and slopes are about 1."""
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=2e-8)


def differences(case, make, place, weights):
    """The gradient of ``sum(weights * result)`` for the operand at ``place``, one element at a time."""

    def value(moved):
        inputs = tuple(moved if i == place else x for i, x in enumerate(case.inputs))
        with no_grad():
            return float((case(make, inputs)[1].numpy() * weights).sum())

    x = case.inputs[place]
    slopes = np.empty(x.shape)
    for at in np.ndindex(x.shape):
        up, down = x.copy(), x.copy()
        up[at] += STEP
        down[at] -= STEP
        slopes[at] = (value(up) - value(down)) / (2 * STEP)
    return slopes


def test_a_gradient_is_what_finite_differences_give(case, make_on, cotangent):
    def make(*args, **options):
        return make_on("CPU", *args, **options)

    operands, result = case(make)
    weights = cotangent(result)
    result.backward(weights)
    for place in case.floating:
        x = operands[place]
        if case.operation == "select" and place == 0:
            assert x.grad is None
            continue
        assert (x.grad.shape, x.grad.dtype, type(x.grad.carrier)) == (x.shape, x.dtype, CPU)
        assert not x.grad.requires_grad
        assert x.grad.grad_fn is None
        is_near(x.grad.numpy(), differences(case, make, place, weights.numpy()))


@pytest.mark.parametrize("kind", ["Generic", "Evictable"])
def test_other_carriers_give_the_same_gradients_on_their_own_class(case, make_on, cotangent, kind):
    if kind == "Evictable" and any(isinstance(x, np.ndarray) and not x.size for x in case.inputs):
        with pytest.raises(ValueError, match="empty"):  # a hierarchy has at least one slot
            case(lambda *args, **options: make_on(kind, *args, **options))
        return
    gradients = {}
    for name in ("CPU", kind):
        operands, result = case(lambda *args, name=name, **options: make_on(name, *args, **options))
        result.backward(cotangent(result))
        gradients[name] = [operands[place].grad for place in case.floating]
    for expected, found in zip(gradients["CPU"], gradients[kind], strict=True):
        if expected is None:
            assert found is None
        else:
            assert type(found.carrier).__name__ == kind
            np.testing.assert_allclose(found.numpy(), expected.numpy(), rtol=1e-12, atol=1e-14)


def test_a_gradient_is_made_from_what_was_saved_and_from_nothing_else(case, make_on, cotangent):
    """Whatever the definition does not name may be changed, or released, before backward."""

    def make(*args, **options):
        return make_on("CPU", *args, **options)

    saves = OPERATIONS[case.operation].saves
    for place in case.floating:
        operands, result = case(make, wanted=place)
        if operands[place].size == 0:
            continue
        result.backward(cotangent(result), retain_graph=True)
        expected = operands[place].grad
        operands[place].grad = None
        kept = saves[place] if place < len(saves) else ()
        weights = cotangent(result)
        tensors = [x for x in [*enumerate(operands), (-1, result)] if isinstance(x[1], sw.Tensor)]
        needed = {tensor.carrier for position, tensor in tensors if position in kept}
        for carrier in {tensor.carrier for _, tensor in tensors} - needed:
            carrier.release()
        result.backward(weights)
        if expected is None:
            assert operands[place].grad is None
        else:
            assert operands[place].grad.numpy().tobytes() == expected.numpy().tobytes()


def test_every_operation_has_a_pullback_unless_its_result_cannot_have_a_gradient(make_on):
    x = make_on("CPU", np.array([1.0, 2.0]))
    without = {name for name, definition in OPERATIONS.items() if definition.vjp is None}
    arguments = {"eq": (x, x), "ne": (x, x), "lt": (x, x), "le": (x, x), "argmax": (x,), "argmin": (x,)}
    assert without == arguments.keys()
    for name in without:
        result = getattr(sw, name)(*arguments[name])
        assert not result.dtype.is_differentiable
        assert not result.requires_grad
        assert result.grad_fn is None


def test_the_table_tries_every_operation_that_has_a_pullback(cases):
    tried = {case.operation for case in cases}
    assert tried == {name for name, definition in OPERATIONS.items() if definition.vjp is not None}


def slopes(make, name, values, dtype=DType.Float64, **options):
    x = make(values, dtype)
    result = getattr(sw, name)(x, **options)
    result.backward(make(np.ones(result.shape), result.dtype))
    return x.grad.tolist()


INF = float("inf")


@pytest.mark.parametrize(
    ("name", "at", "expected", "options"),
    [
        ("sqrt", 0.0, INF, {}),
        ("rsqrt", 0.0, -INF, {}),
        ("log", 0.0, INF, {}),
        ("recip", 0.0, -INF, {}),
        ("abs", 0.0, 0.0, {}),
        ("sign", 0.0, 0.0, {}),
        ("relu", 0.0, 0.0, {}),
        ("clamp", 1.0, 1.0, {"min": 1.0}),
        ("clamp", 2.0, 1.0, {"max": 2.0}),
        ("clamp", 0.5, 0.0, {"min": 1.0, "max": 0.0}),
        ("sigmoid", 800.0, 0.0, {}),
        ("sigmoid", -800.0, 0.0, {}),
        ("tanh", 400.0, 0.0, {}),
        ("softplus", 800.0, 1.0, {}),
        ("softplus", -800.0, 0.0, {}),
        ("silu", 800.0, 1.0, {}),
        ("silu", -800.0, 0.0, {}),
        ("erf", 1e200, 0.0, {}),
        *(
            ("gelu", at, slope, {"approximate": approximate})
            for approximate in (False, True)
            for at, slope in ((0.0, 0.5), (1e200, 1.0), (-1e200, 0.0), (INF, 1.0), (-INF, 0.0))
        ),
    ],
)
def test_slopes_at_the_edge_are_limits_without_a_warning(make, name, at, expected, options):
    values = [at, 1.0]
    with np.errstate(all="ignore"):  # the forward may warn, as NumPy's does
        x = make(values)
        result = getattr(sw, name)(x, **options)
    result.backward(make(np.ones(2)))
    assert x.grad[0] == expected


@pytest.mark.parametrize(
    ("x", "y", "for_x", "for_y"),
    [
        (0.0, 0.0, 0.0, 0.0),
        (0.0, 1.0, 1.0, 0.0),
        (0.0, 2.0, 0.0, 0.0),
        (0.0, -1.0, -INF, -INF),
        (-2.0, 3.0, 12.0, float("nan")),
        (-2.0, 0.0, 0.0, float("nan")),
        (INF, 0.0, 0.0, INF),
    ],
)
def test_powers_at_the_edge_are_those_of_pytorch(make, x, y, for_x, for_y):
    for base_is_tensor, exponent_is_tensor in ((True, True), (True, False), (False, True)):
        base = make([x]) if base_is_tensor else x
        exponent = make([y]) if exponent_is_tensor else y
        with np.errstate(all="ignore"):
            result = sw.pow(base, exponent)
        result.backward(make([1.0]))
        if base_is_tensor:
            np.testing.assert_equal(base.grad.tolist(), [for_x])
        if exponent_is_tensor:
            np.testing.assert_equal(exponent.grad.tolist(), [for_y])


def test_negative_bases_have_slopes_for_integer_exponents_of_either_kind(make):
    for exponent in (make([2, 3, 0]), make([2.0, 3.0, 0.0])):
        x = make([-3.0, -2.0, -1.0])
        sw.reduce_sum(sw.pow(x, exponent)).backward()
        assert x.grad.tolist() == [-6.0, 12.0, 0.0]


def test_the_exponent_of_a_small_integer_is_not_computed_in_its_own_precision(make):
    y = make([1.5], DType.Float64)
    sw.pow(make([3], DType.Int8), y).backward()
    assert y.grad.item() == pytest.approx(3**1.5 * np.log(3), rel=1e-14)


def test_a_quotient_of_large_numbers_has_a_slope(make):
    y = make([1e200])
    sw.div(1e300, y).backward()
    assert y.grad.item() == pytest.approx(-1e-100)


def test_softmax_leaves_masked_entries_without_gradient(make):
    x = make([[0.0, -INF, 1.0]])
    sw.softmax(x).backward(make([[1.0, 5.0, -1.0]]))
    grad = x.grad.tolist()[0]
    assert grad[1] == 0.0
    assert grad[0] == pytest.approx(-grad[2])
    assert grad[0] > 0


@pytest.mark.parametrize("name", ["reduce_max", "reduce_min"])
def test_equal_extremes_share_the_gradient(make, name):
    x = make([[3.0, 3.0, 1.0], [1.0, 1.0, 1.0]])
    result = getattr(sw, name)(x, axis=1)
    result.backward(make([6.0, 3.0]))
    assert x.grad.tolist()[1] == [1.0, 1.0, 1.0]
    assert x.grad.tolist()[0] == ([3.0, 3.0, 0.0] if name == "reduce_max" else [0.0, 0.0, 6.0])


@pytest.mark.parametrize("name", ["maximum", "minimum"])
def test_of_two_equal_operands_each_gets_half(make, name):
    x, y = make([1.0, 2.0]), make([1.0, 2.0])
    getattr(sw, name)(x, y).backward(make([4.0, 6.0]))
    assert x.grad.tolist() == y.grad.tolist() == [2.0, 3.0]
    x = make([1.0])
    getattr(sw, name)(x, 1.0).backward()
    assert x.grad.item() == 0.5


def test_an_operand_used_twice_gets_both_shares(make):
    x = make([3.0, 4.0])
    (x * x).backward(make([1.0, 10.0]))
    assert x.grad.tolist() == [6.0, 80.0]
    x = make([[1.0, 2.0], [3.0, 4.0]])
    sw.reduce_sum(x @ x).backward()
    assert x.grad.tolist() == [[7.0, 11.0], [9.0, 13.0]]


def test_repeated_indices_add_up(make):
    x = make([[1.0, 2.0], [3.0, 4.0]])
    sw.gather(x, make([0, 0, -1, 0])).backward(make([[1.0, 2.0]] * 4))
    assert x.grad.tolist() == [[3.0, 6.0], [1.0, 2.0]]


FLOATS = (DType.Float64, DType.Float32, DType.Float16, DType.BFloat16)


@pytest.mark.parametrize("left", FLOATS)
@pytest.mark.parametrize("right", FLOATS)
@pytest.mark.parametrize("name", ["add", "sub", "mul", "div", "maximum", "matmul", "pow"])
def test_each_share_has_its_operands_dtype(make, name, left, right):
    x, y = make([[1.0, 2.0], [2.0, 4.0]], left), make([[2.0, 1.0], [1.0, 0.5]], right)
    sw.reduce_sum(getattr(sw, name)(x, y)).backward()
    assert (x.grad.dtype, y.grad.dtype) == (left, right)
    wide_x, wide_y = make(x.numpy(), DType.Float64), make(y.numpy(), DType.Float64)
    sw.reduce_sum(getattr(sw, name)(wide_x, wide_y)).backward()
    rough = 2e-2 if DType.BFloat16 in (left, right) else 2e-3
    np.testing.assert_allclose(x.grad.numpy().astype(float), wide_x.grad.numpy(), rtol=rough)
    np.testing.assert_allclose(y.grad.numpy().astype(float), wide_y.grad.numpy(), rtol=rough)


MANY_STEPS = {
    **{name: {} for name in ("recip", "sqrt", "rsqrt", "log", "sin", "cos", "erf", "tanh", "sigmoid")},
    **{name: {} for name in ("gelu", "silu", "softplus", "exp", "softmax", "abs", "neg")},
}


@pytest.mark.parametrize("dtype", [DType.Float16, DType.BFloat16])
@pytest.mark.parametrize("name", MANY_STEPS)
def test_small_floats_are_rounded_only_where_a_value_is_stored(make_on, name, dtype):
    """The gradient is the exact one at the stored values, rounded once, to one unit in the last place."""
    values = np.linspace(0.25, 3, 45)
    x = make_on("CPU", values, dtype)
    result = getattr(sw, name)(x)
    weights = make_on("CPU", np.linspace(1, 2, 45), dtype)
    result.backward(weights)
    wide = make_on("CPU", x.numpy(), DType.Float64)
    from_wide = getattr(sw, name)(wide)
    if -1 in OPERATIONS[name].saves[0] if OPERATIONS[name].saves else False:
        from_wide.numpy(writable=True)[...] = result.numpy()  # the rule reads the stored result
    from_wide.backward(make_on("CPU", weights.numpy(), DType.Float64))
    expected = wide.grad.numpy().astype(dtype.numpy)
    bits = np.abs(x.grad.numpy().view(np.int16).astype(int) - expected.view(np.int16))
    scale = np.abs(wide.grad.numpy()).max()
    tiny = np.abs(wide.grad.numpy()) < 1e-2 * scale  # where terms cancel
    assert bits[~tiny].max() <= 1


def test_the_mean_of_many_small_floats_has_a_gradient(make_on):
    x = make_on("CPU", np.ones(100_000), DType.Float16)
    sw.reduce_mean(x).backward()
    assert x.grad[0] == float(np.float16(1e-5))
    x = make_on("CPU", np.ones(100_000), DType.Float16)
    sw.reduce_max(x).backward(make_on("CPU", np.array(1000.0), DType.Float16))
    assert x.grad[0] == float(np.float16(0.01))


def test_a_share_too_large_for_its_dtype_is_infinite_without_a_warning(make_on):
    x = make_on("CPU", np.array([1.0]), DType.Float16)
    (x * make_on("CPU", np.array([1e30]), DType.Float32)).backward()
    assert x.grad.item() == INF


def test_integers_and_booleans_get_no_gradient(make):
    x, n, flags = make([1.0, 2.0]), make([3, 4]), make([True, False])
    sw.reduce_sum(sw.select(flags, x * n, x + n)).backward()
    assert x.grad.tolist() == [3.0, 1.0]
    assert n.grad is None
    assert flags.grad is None
    assert not sw.add(n, n).requires_grad


def test_gradients_flow_through_views_in_any_layout(make):
    x = make(np.arange(24.0).reshape(2, 3, 4))
    view = x.permute(2, 0, 1).reshape(4, 6).T.unsqueeze(0).broadcast_to(2, 6, 4)
    weights = np.arange(48.0).reshape(2, 6, 4)
    view.backward(make(weights))
    expected = weights.sum(0).T.reshape(4, 2, 3).transpose(1, 2, 0)
    np.testing.assert_array_equal(x.grad.numpy(), expected)


def test_a_large_batch_multiplies_a_matrix_without_a_gradient_for_each_element_of_it(make_on):
    """One product over all rows; the gradient of the matrix never exists once per batch element."""
    x, w = make_on("CPU", np.ones((50, 2, 64))), make_on("CPU", np.ones((64, 64)))
    result = x @ w
    shares = result.grad_fn.pull_back(make_on("CPU", np.ones((50, 2, 64))))
    assert [share.carrier.size() for share in shares] == [50 * 2 * 64, 64 * 64]
    assert shares[1].tolist() == np.full((64, 64), 100.0).tolist()
