"""Fixtures of the gradients' tests: carriers that compute, and one table of calls for every operation."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest

import strideweave as sw
from strideweave import CPU, DType, Evictable, FileBacked, Generic, Tensor, row_major

CARRIERS = {
    "CPU": lambda slots: CPU(0, dtype=DType.from_numpy(slots.dtype)).new_like(slots),
    "Generic": lambda slots: Generic([]).new_like(slots, dtype=DType.from_numpy(slots.dtype)),
    "Evictable": lambda slots: Evictable(
        CARRIERS["CPU"](slots), FileBacked(dtype=DType.from_numpy(slots.dtype))
    ),
}


def on(kind: str, values: Any, dtype: DType | None = None, **options: Any) -> Tensor:
    """A row-major tensor with the values and dtype of an array."""
    array = np.asarray(values) if dtype is None else np.asarray(values).astype(dtype.numpy)
    return Tensor(CARRIERS[kind](np.ravel(array)), 0, row_major(array.shape), **options)


@pytest.fixture(params=sorted(CARRIERS))
def make(request):
    """Make a tensor on each of the carrier classes in turn."""
    return lambda values, dtype=None, **options: on(request.param, values, dtype, **options)


@pytest.fixture
def make_on():
    """Give the function that makes a tensor on a carrier class by its name."""
    return on


class Case(NamedTuple):
    """One call of one operation: arrays become tensors, Python numbers stay scalars."""

    operation: str
    inputs: tuple[Any, ...]
    options: dict[str, Any]
    note: str

    def __call__(self, make, inputs: tuple[Any, ...] | None = None, wanted: int | None = None):
        """The operands and the result; ``wanted`` lets one operand alone require a gradient."""
        operands = [
            make(value, requires_grad=value.dtype.kind == "f" and wanted in (None, place))
            if isinstance(value, np.ndarray)
            else value
            for place, value in enumerate(self.inputs if inputs is None else inputs)
        ]
        return operands, getattr(sw, self.operation)(*operands, **self.options)

    @property
    def floating(self) -> list[int]:
        """Places of the operands that have a gradient."""
        return [i for i, x in enumerate(self.inputs) if isinstance(x, np.ndarray) and x.dtype.kind == "f"]


def any_of(*shape: int) -> np.ndarray:
    """Different numbers between -2 and 2, none within 0.05 of zero or of another."""
    count = int(np.prod(shape))
    numbers = np.linspace(-2, 2, 2 * (count + 1))[1::2][:count]
    return np.random.default_rng(count).permutation(numbers + 0.0317).reshape(shape)


def positive(*shape: int) -> np.ndarray:
    return np.asarray(np.abs(any_of(*shape)) + 0.2)


def whole(*values: Any) -> np.ndarray:
    return np.array(values, np.int64)


def case(operation: str, *inputs: Any, note: str = "", **options: Any) -> Case:
    return Case(operation, inputs, options, note)


def binary(name: str, second=any_of, scalars: bool = True, first=any_of) -> list[Case]:
    cases = [
        case(name, first(2, 3), second(2, 3)),
        case(name, first(2, 1, 3), second(4, 1)),
        case(name, first(3), second(2, 3)),
        case(name, first(), second(2)),
        case(name, first(2), second()),
        case(name, first(), second()),
        case(name, first(0, 3), second(1, 3)),
        case(name, first(2, 3), second(1, 1), note="ones"),
        case(name, first(3), whole(1, 2, 3), note="integers on the right"),
        case(name, whole(1, 2, 3), second(3), note="integers on the left"),
        case(name, np.array([True, True, True]), second(3), note="booleans on the left"),
    ]
    return cases + [case(name, first(2, 3), 3), case(name, 0.7, second(2, 3))] * scalars


UNARY = {
    **dict.fromkeys(("neg", "abs", "sign", "recip", "exp", "sin", "cos", "erf", "tanh", "sigmoid"), any_of),
    **dict.fromkeys(("relu", "silu", "softplus", "gelu"), any_of),
    **dict.fromkeys(("sqrt", "rsqrt", "log"), positive),
}
REDUCTIONS = ("reduce_sum", "reduce_mean", "reduce_max", "reduce_min")
MATRICES = (
    [(2, 3), (3, 4)],
    [(3,), (3,)],
    [(3,), (3, 4)],
    [(2, 3), (3,)],
    [(2, 2, 3), (3,)],
    [(3,), (2, 3, 2)],
    [(2, 2, 3), (3, 2)],
    [(3, 1, 2, 3), (2, 3, 2)],
    [(2, 3), (2, 3, 2)],
    [(1, 2, 3), (2, 3, 1)],
    [(2, 0), (0, 3)],
    [(0, 2), (2, 3)],
    [(2, 0, 3), (3, 2)],
)
CASES: tuple[Case, ...] = (
    *(c for name in ("add", "sub", "mul", "div", "maximum", "minimum") for c in binary(name)),
    *binary("elementwise_mul", scalars=False),
    *binary("pow", first=positive),
    case("pow", any_of(4), 2),
    case("pow", any_of(4), 3.0),
    case("pow", any_of(4), 0),
    case("pow", any_of(4), 1),
    case("pow", any_of(4), -2),
    case("pow", any_of(4), whole(-1, 0, 2, 3), note="negative bases"),
    *(case(name, draw(*shape)) for name, draw in UNARY.items() for shape in ((2, 3), (), (0, 2))),
    case("gelu", any_of(7), approximate=True),
    *(case("softmax", any_of(2, 3), axis=axis) for axis in (0, 1, -1)),
    case("softmax", any_of(2, 0)),
    *(
        case("clamp", any_of(8), **bounds)
        for bounds in ({"min": -0.5}, {"max": 1}, {"min": -1, "max": 0.5}, {})
    ),
    *(
        case("select", np.array([[True, False, True]]), x, y)
        for x, y in (
            (any_of(2, 3), any_of(3)),
            (any_of(2, 1), 1.5),
            (2, any_of(3)),
            (any_of(3), whole(1, 2, 3)),
        )
    ),
    case("select", np.array([0.0, 2.0, -1.0]), any_of(3), any_of(3), note="a float condition"),
    *(
        case(name, any_of(2, 3, 2), axis=axis, keepdims=keepdims)
        for name in REDUCTIONS
        for axis in (None, 0, -1, (0, 2), (2, 1), ())
        for keepdims in (False, True)
    ),
    *(case(name, any_of()) for name in REDUCTIONS),
    *(case(name, any_of(0, 3), axis=axis) for name in ("reduce_sum", "cumsum") for axis in (0, 1)),
    *(case(name, any_of(0, 3), axis=1) for name in REDUCTIONS),
    *(case("cumsum", any_of(2, 3), axis=axis) for axis in (None, 0, 1, -1)),
    case("cumsum", any_of()),
    *(case("matmul", any_of(*left), any_of(*right)) for left, right in MATRICES),
    case("matmul", any_of(2, 3), whole([1, 2], [3, 4], [5, 6]), note="integers on the right"),
    *(
        case("gather", any_of(3, 4), whole(*indices), axis=0)
        for indices in ((2, 0, 2), ([1], [-1]), (), (2,))
    ),
    *(case("gather", any_of(2, 3, 2), whole(2, 0), axis=axis) for axis in (1, -2)),
    case("gather", any_of(3, 2), np.array(1), axis=0),
    case("scatter_add", any_of(3, 2), whole(2, 0, 2), any_of(3, 2), axis=0),
    case("scatter_add", any_of(3, 2), whole(-1, 0), any_of(2), axis=0, note="broadcast values"),
    case("scatter_add", any_of(2, 3), whole([0], [2]), any_of(2, 2, 1), axis=1),
    case("scatter_add", any_of(3), np.array(1), any_of(), axis=0),
    case("scatter_add", any_of(3), whole(1, 1), whole(3, 4), axis=0, note="integer values"),
    *(case("permute", any_of(2, 3, 2), axes=axes) for axes in ((2, 0, 1), (0, 2, 1), (-1, -2, -3))),
    case("permute", any_of(), axes=()),
    *(case("reshape", any_of(2, 6), shape=shape) for shape in ((3, 4), (-1,), (2, 3, 2))),
    case("reshape", any_of(0, 3), shape=(3, 0)),
    *(case("broadcast_to", any_of(3, 1), shape=shape) for shape in ((3, 1), (3, 4), (2, 3, 2), (0, 3, 1))),
    case("broadcast_to", any_of(), shape=(2, 2)),
    case("broadcast_to", any_of(1), shape=(0,)),
    *(case("squeeze", any_of(1, 3, 1), axis=axis) for axis in (None, 0, (0, 2))),
    *(case("unsqueeze", any_of(2, 3), axis=axis) for axis in (0, 1, -1)),
)


def described(case: Case) -> str:
    shown = [
        "x".join(map(str, x.shape)) or "()" if isinstance(x, np.ndarray) else repr(x) for x in case.inputs
    ]
    options = [f"{name}={value}" for name, value in case.options.items()]
    return "-".join([case.operation, *shown, *options, *([case.note] if case.note else [])]).replace(" ", "")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that asks for ``case`` with every call of the table."""
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", CASES, ids=described)


@pytest.fixture
def cases() -> tuple[Case, ...]:
    return CASES


@pytest.fixture
def cotangent():
    """Give the function that makes a gradient for a result: different numbers, none of them zero."""

    def cotangent(result: Tensor) -> Tensor:
        values = np.random.default_rng(5).uniform(0.5, 2.0, result.shape).astype(result.dtype.numpy)
        # As a result would be made, since a public factory gives no hierarchy without slots.
        return Tensor(result.carrier._adopt_like(np.ravel(values), result.dtype), 0, row_major(result.shape))

    return cotangent
