"""Operation definitions: operands, overloads, and what a carrier says it can run."""

import numpy as np
import pytest

import strideweave as sw
from strideweave import CPU, Generic, Tensor, row_major
from strideweave.operations.definition import Operation, OperationCapability, apply
from strideweave.operations.table import OPERATIONS

PUBLIC = sorted(OPERATIONS)


@pytest.mark.parametrize("name", PUBLIC)
def test_every_operation_has_a_public_function_and_a_capability(name):
    assert callable(getattr(sw, name))
    assert name in sw.__all__
    entries = CPU(1).operation_capabilities(name)
    assert entries
    assert all(entry.operation == name for entry in entries)
    assert entries == Generic([1]).operation_capabilities(name)


def test_capabilities_list_everything_and_an_unknown_name_has_none():
    carrier = CPU(1)
    assert {entry.operation for entry in carrier.operation_capabilities()} == set(OPERATIONS)
    assert carrier.operation_capabilities("nothing") == ()
    assert carrier.operation_capabilities("mul") == (
        OperationCapability("mul", ("tensor", "tensor"), "tensor"),
        OperationCapability("mul", ("tensor", "scalar"), "tensor"),
        OperationCapability("mul", ("scalar", "tensor"), "tensor"),
    )
    assert carrier.operation_capabilities("permute") == (OperationCapability("permute", ("tensor",), "view"),)


def test_dispatch_gives_a_fresh_operation_that_knows_its_name_and_class():
    carrier = CPU(1)
    operation = carrier.dispatch_op("add")
    assert isinstance(operation, Operation)
    assert (operation.name, operation.carrier_class) == ("add", CPU)
    assert carrier.dispatch_op("add") is not operation
    assert Generic([1]).dispatch_op("reshape").carrier_class is Generic


def test_an_operation_runs_by_dispatch_as_by_function(make):
    tensor = make([1.0, 2.0])
    assert tensor.carrier.dispatch_op("mul").forward(2, tensor).tolist() == [2.0, 4.0]
    assert tensor.carrier.dispatch_op("reduce_sum").forward(tensor, keepdims=True).tolist() == [3.0]


def test_an_unknown_operation_is_not_implemented():
    with pytest.raises(NotImplementedError, match="'frobnicate'"):
        CPU(1).dispatch_op("frobnicate")


@pytest.mark.parametrize(
    "call",
    [
        lambda x: sw.add(x, "1"),
        lambda x: sw.add(None, x),
        lambda x: sw.add(1, 2),
        lambda x: sw.add(x, 1j),
        lambda x: sw.add(x, [1, 2]),
        lambda x: sw.elementwise_mul(x, 2),
        lambda x: sw.elementwise_mul(2, x),
        lambda x: sw.matmul(x, 2),
        lambda x: sw.gelu(2.0),
        lambda x: sw.gather(x, [0]),
        lambda x: x.carrier.dispatch_op("add").forward(x),
        lambda x: x.carrier.dispatch_op("add").forward(x, x, x),
        lambda x: x.carrier.dispatch_op("neg").forward(),
        lambda x: x.carrier.dispatch_op("add").forward(x, x, axis=0),
    ],
)
def test_operands_and_options_of_a_wrong_kind_are_type_errors(make, call):
    with pytest.raises(TypeError):
        call(make([1.0, 2.0]))


def test_operands_lie_on_one_carrier_class():
    left = sw.asarray([1.0, 2.0])
    right = Tensor(Generic([1, 2], dtype=left.dtype), 0, row_major(2))
    with pytest.raises(TypeError, match="add runs on CPU, but an operand lies on Generic"):
        left + right
    with pytest.raises(TypeError, match="runs on Generic"):
        right.carrier.dispatch_op("neg").forward(left)


def test_results_lie_on_fresh_mutable_storage_of_the_operands_class(make):
    tensor = make(np.arange(6.0).reshape(2, 3))
    for result in (
        tensor + 0,
        -tensor,
        sw.softmax(tensor),
        sw.gelu(tensor),
        sw.reduce_sum(tensor, axis=()),
        sw.reduce_max(tensor, axis=()),
        sw.matmul(tensor, tensor.T),
        sw.gather(tensor, make([0, 1])),
        sw.sqrt(tensor),
    ):
        assert type(result.carrier) is type(tensor.carrier)
        assert result.carrier is not tensor.carrier
        assert (result.carrier.is_mutable(), result.carrier.version) == (True, 0)
        assert result.layout == row_major(*result.shape)
        assert result.carrier.size() == result.size
        before = tensor.tolist()
        result.numpy(writable=True)[...] = -1
        assert tensor.tolist() == before


def test_results_require_gradients_when_an_operand_does_and_the_mode_is_on(make):
    wants, plain = make([1.0, 2.0]), make([1.0, 2.0], requires_grad=False)
    index = make([0, 1])
    for call in (
        lambda x: x + 1,
        lambda x: x * plain,
        lambda x: x.reshape(2, 1),
        lambda x: sw.gather(x, index),
    ):
        assert call(wants).requires_grad
        assert not call(plain).requires_grad
        with sw.no_grad():
            assert not call(wants).requires_grad
    assert not sw.argmax(wants).requires_grad
    assert not (index + 1).requires_grad
    assert (index * wants).requires_grad


@pytest.mark.parametrize("reverse", [False, True])
def test_the_class_that_takes_precedence_is_asked_wherever_it_stands(monkeypatch, reverse):
    asked = []

    def dispatch(self, name):
        asked.append((type(self), name))
        raise NotImplementedError

    monkeypatch.setattr(CPU, "dispatch_op", dispatch)
    monkeypatch.setattr(Generic, "dispatch_op", dispatch)
    monkeypatch.setattr(Generic, "_dispatch_priority", 1)
    operands = [Tensor(CPU(1), 0, row_major(1)), 2.0, Tensor(Generic([1]), 0, row_major(1))]
    with pytest.raises(NotImplementedError):
        apply("add", *(reversed(operands) if reverse else operands))
    assert asked == [(Generic, "add")]
