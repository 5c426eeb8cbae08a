"""The same gradients as PyTorch's, call by call of the table; it runs where PyTorch happens to be installed."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")


def _along(function, x, axis=None, keepdims=False):
    axes = tuple(range(x.ndim)) if axis is None else axis
    return x if axes == () else function(x, axes, keepdims)  # PyTorch takes no axes for all of them


def _gather(x, indices, axis):
    picked = torch.index_select(x, axis, (indices % x.shape[axis]).reshape(-1))
    axis %= x.ndim
    return picked.reshape(x.shape[:axis] + indices.shape + x.shape[axis + 1 :])


def _scatter_add(x, indices, values, axis):
    numbers = (indices % x.shape[axis]).reshape(-1)
    shape = x.shape[:axis] + indices.shape + x.shape[axis + 1 :]
    slices = values.to(x.dtype).broadcast_to(shape)
    return x.index_add(axis, numbers, slices.reshape(x.shape[:axis] + numbers.shape + x.shape[axis + 1 :]))


def _as_tensor(x):
    return x if isinstance(x, torch.Tensor) else torch.tensor(x, dtype=torch.float64)


def _matmul(x, y):
    return torch.matmul(x.double(), y.double())


PYTORCH = {
    "elementwise_mul": torch.mul,
    "recip": torch.reciprocal,
    "silu": torch.nn.functional.silu,
    "softplus": lambda x: torch.nn.functional.softplus(x, threshold=1000),
    "gelu": lambda x, approximate=False: torch.nn.functional.gelu(
        x, approximate="tanh" if approximate else "none"
    ),
    "softmax": lambda x, axis=-1: torch.softmax(x, axis),
    "maximum": lambda x, y: torch.maximum(_as_tensor(x), _as_tensor(y)),
    "minimum": lambda x, y: torch.minimum(_as_tensor(x), _as_tensor(y)),
    "add": lambda x, y: _as_tensor(x) + y,
    "sub": lambda x, y: _as_tensor(x).double() - y,
    "mul": lambda x, y: _as_tensor(x) * y,
    "div": lambda x, y: _as_tensor(x) / y,
    "select": lambda condition, x, y: torch.where(condition != 0, x, y),
    "clamp": lambda x, **bounds: torch.clamp(x, **bounds) if bounds else x,
    "reduce_sum": lambda x, **options: _along(torch.sum, x, **options),
    "reduce_mean": lambda x, **options: _along(torch.mean, x, **options),
    "reduce_max": lambda x, **options: _along(torch.amax, x, **options),
    "reduce_min": lambda x, **options: _along(torch.amin, x, **options),
    "cumsum": lambda x, axis=None: torch.cumsum(x.reshape(-1) if axis is None else x, axis or 0),
    "matmul": _matmul,
    "gather": _gather,
    "scatter_add": _scatter_add,
    "permute": lambda x, axes: x.permute(axes),
    "reshape": lambda x, shape: x.reshape(shape),
    "broadcast_to": lambda x, shape: x.broadcast_to(shape),
    "squeeze": lambda x, axis: x.squeeze() if axis is None else x.squeeze(axis),
    "unsqueeze": lambda x, axis: x.unsqueeze(axis),
}


def test_gradients_are_those_of_pytorch(case, make_on, cotangent):
    operands, result = case(lambda *args, **options: make_on("CPU", *args, **options))
    weights = cotangent(result)
    result.backward(weights)
    theirs = [
        torch.tensor(x, requires_grad=x.dtype.kind == "f") if isinstance(x, np.ndarray) else x
        for x in case.inputs
    ]
    function = PYTORCH.get(case.operation) or getattr(torch, case.operation)
    output = function(*theirs, **case.options)
    assert tuple(output.shape) == result.shape
    output.backward(torch.tensor(weights.numpy(), dtype=output.dtype))
    for place in case.floating:
        ours, expected = operands[place].grad, theirs[place].grad
        if expected is None:
            assert ours is None
        else:
            np.testing.assert_allclose(ours.numpy(), expected.numpy(), rtol=1e-12, atol=1e-14)


EDGES = [0.0, -0.0, 1.0, -1.0, 3.0, 700.0, -700.0, float("inf")]
NAMES = (
    "abs",
    "sign",
    "recip",
    "sqrt",
    "rsqrt",
    "exp",
    "log",
    "sin",
    "cos",
    "erf",
    "tanh",
    "sigmoid",
    "softplus",
)


@pytest.mark.parametrize("name", NAMES)
def test_slopes_at_the_edge_are_those_of_pytorch(make_on, name):
    x = make_on("CPU", np.array(EDGES))
    with np.errstate(all="ignore"):
        result = case_result(name, x)
    result.backward(make_on("CPU", np.ones(len(EDGES))))
    theirs = torch.tensor(EDGES, dtype=torch.float64, requires_grad=True)
    (PYTORCH.get(name) or getattr(torch, name))(theirs).backward(torch.ones(len(EDGES), dtype=torch.float64))
    np.testing.assert_allclose(x.grad.numpy(), theirs.grad.numpy(), rtol=1e-12)


@pytest.mark.parametrize("base", [0.0, 1.0, 2.0, -2.0, float("inf")])
@pytest.mark.parametrize("exponent", [0.0, 1.0, 2.0, -1.0, 0.5])
def test_powers_at_the_edge_are_those_of_pytorch(make_on, base, exponent):
    x, y = make_on("CPU", np.array([base])), make_on("CPU", np.array([exponent]))
    with np.errstate(all="ignore"):
        result = case_result("pow", x, y)
    result.backward()
    a, b = (torch.tensor([value], dtype=torch.float64, requires_grad=True) for value in (base, exponent))
    torch.pow(a, b).backward()
    np.testing.assert_allclose([x.grad.item(), y.grad.item()], [a.grad.item(), b.grad.item()], rtol=1e-12)


def case_result(name, *operands):
    return operands[0].carrier.dispatch_op(name).forward(*operands)
