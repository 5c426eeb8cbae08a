"""Backward as a whole: what arrives where, what an error leaves, what is shared, kept and let go."""

from __future__ import annotations

import threading
import weakref

import anyio
import numpy as np
import pytest

import strideweave as sw
from strideweave import (
    CPU,
    DType,
    Evictable,
    FileBacked,
    Generic,
    StaleGraphError,
    Tensor,
    no_grad,
    row_major,
)
from strideweave.autograd.graph import Contribution, Node, attach


def leaf(*values, **options):
    return Tensor(CPU(0, dtype=DType.Float64).new_like(values), 0, row_major(len(values)), **options)


def ones_like(tensor):
    return Tensor(tensor.carrier.new_like([1.0] * tensor.size), 0, row_major(tensor.shape))


def custom(x, pullback, name="custom", saved=()):
    """A result with the values of ``x`` whose way back is ``pullback``."""
    result = Tensor(x.carrier.new_like(x.numpy()), 0, row_major(x.shape))
    return attach(result, Node(name, (x,), pullback, saved))


# What arrives


def test_the_shares_of_all_paths_add_up(make):
    x = make([1.0, 2.0])
    y = x * 3.0
    sw.reduce_sum(y * y + y + x).backward()
    assert x.grad.tolist() == [9 * 2 * 1.0 + 3 + 1, 9 * 2 * 2.0 + 3 + 1]
    assert y.grad is None  # only leaves keep gradients


def test_a_diamond_is_walked_once_for_each_result():
    calls = []
    x = leaf(1.0)

    def pullback(g):
        calls.append(g.item())
        return (g,)

    y = custom(x, pullback)
    (y * 2.0 + y * 3.0).backward()
    assert calls == [5.0]
    assert x.grad.item() == 5.0


def test_two_passes_accumulate_and_none_clears(make):
    x = make([1.0, 2.0])
    for expected in ([2.0, 4.0], [4.0, 8.0]):
        sw.reduce_sum(x * x).backward()
        assert x.grad.tolist() == expected
    before = x.grad
    sw.reduce_sum(x).backward()
    assert before.tolist() == [4.0, 8.0]  # who kept the earlier gradient keeps its values
    x.grad = None
    sw.reduce_sum(x).backward()
    assert x.grad.tolist() == [1.0, 1.0]


def test_a_leaf_is_its_own_root(make):
    x = make([5.0])
    x.backward()
    x.backward(make([2.0]))
    assert x.grad.tolist() == [3.0]


def test_the_root_is_kept_free_of_a_gradient_and_one_element_of_any_shape_is_enough(make):
    x = make([[[2.0]]])
    y = x * x
    y.backward()
    assert y.grad is None
    assert x.grad.tolist() == [[[4.0]]]


def test_operands_that_require_no_gradient_get_none(make):
    x, y = make([1.0], requires_grad=False), make([2.0])
    (x * y).backward()
    assert x.grad is None
    assert y.grad.tolist() == [1.0]


def test_a_branch_that_nothing_arrives_at_is_not_called():
    x, y = leaf(1.0), leaf(1.0)

    def fail(_):
        raise AssertionError("called")

    unreached = custom(y, fail)
    both = Tensor(CPU(0, dtype=DType.Float64).new_like([1.0]), 0, row_major(1))
    attach(both, Node("half", (unreached, x), lambda g: (None, g)))
    both.backward()
    assert x.grad.item() == 1.0
    assert y.grad is None


def test_a_chain_of_ten_thousand_operations_needs_no_recursion():
    x = leaf(1.0)
    y = x
    for _ in range(10_000):
        y = y + 0.5
    y.backward()
    assert x.grad.item() == 1.0


def test_a_long_chain_that_is_dropped_without_backward_needs_no_recursion():
    y = leaf(1.0)
    gone = weakref.ref(y)
    for _ in range(20_000):
        y = y + 0.5
    assert gone() is not None
    del y
    assert gone() is None


def test_a_wide_fan_in_adds_up():
    x = leaf(1.0)
    total = x * 0.0
    for _ in range(500):
        total = total + x
    total.backward()
    assert x.grad.item() == 500.0


def test_the_graph_names_operations_and_their_inputs(make):
    x, y = make([1.0]), make([2.0])
    z = sw.add(x, 1.0) * y
    assert z.grad_fn.name == "mul"
    assert z.grad_fn.inputs[1] is y
    assert z.grad_fn.inputs[0].grad_fn.inputs == (x,)
    assert x.grad_fn is None
    assert repr(z.grad_fn) == "<Node 'mul'>"


# Asking for it


def test_a_tensor_that_does_not_require_a_gradient_has_no_backward(make):
    for tensor in (make([1.0], requires_grad=False), make([1]), make([1.0]).detach()):
        with pytest.raises(RuntimeError, match="does not"):
            tensor.backward()


def test_more_than_one_element_needs_a_gradient(make):
    x = make([1.0, 2.0])
    with pytest.raises(ValueError, match="gradient"):
        (x * x).backward()
    assert x.grad is None


@pytest.mark.parametrize(
    ("gradient", "error"),
    [
        (lambda: leaf(1.0, 2.0, 3.0), ValueError),
        (lambda: sw.asarray([[1.0, 2.0]]), ValueError),
        (lambda: sw.asarray([1.0, 2.0], dtype=DType.Float32), TypeError),
        (lambda: Tensor(Generic([1.0, 2.0], dtype=DType.Float64), 0, row_major(2)), TypeError),
        (lambda: np.ones(2), TypeError),
        (lambda: [1.0, 2.0], TypeError),
        (lambda: 1.0, TypeError),
    ],
)
def test_a_gradient_must_fit_its_tensor(gradient, error):
    x = leaf(1.0, 2.0)
    y = x * 2.0
    with pytest.raises(error):
        y.backward(gradient())
    with pytest.raises(error):
        x.grad = gradient()
    assert x.grad is None
    y.backward(leaf(1.0, 1.0))
    assert x.grad.tolist() == [2.0, 2.0]


def test_an_assigned_gradient_is_detached_and_added_to():
    x, given = leaf(1.0, 2.0), leaf(5.0, 6.0)
    x.grad = given
    assert not x.grad.requires_grad
    assert x.grad.carrier is given.carrier
    sw.reduce_sum(x).backward()
    assert x.grad.tolist() == [6.0, 7.0]
    assert given.tolist() == [5.0, 6.0]


def test_a_released_gradient_is_refused():
    x, given = leaf(1.0), leaf(5.0)
    given.carrier.release()
    with pytest.raises(sw.ReleasedError):
        x.grad = given
    with pytest.raises(sw.ReleasedError):
        (x * 2.0).backward(given)
    assert x.grad is None


# Going through it again


def test_a_graph_is_used_up_unless_it_is_retained(make):
    x = make([3.0])
    y = x * x
    y.backward(retain_graph=True)
    y.backward()
    assert x.grad.item() == 12.0
    with pytest.raises(RuntimeError, match="retain_graph"):
        y.backward()
    assert x.grad.item() == 12.0


def test_a_result_above_a_used_up_part_cannot_be_walked():
    x = leaf(3.0)
    shared = x * x
    first, second = shared * 2.0, shared * 3.0
    first.backward()
    with pytest.raises(RuntimeError, match="'mul' was used up"):
        second.backward()
    assert x.grad.item() == 12.0


def test_an_error_leaves_the_graph_to_be_walked_again():
    x, y = leaf(1.0), leaf(1.0)
    failing = [True]

    def pullback(g):
        if failing:
            raise OSError("disk")
        return (g,)

    z = custom(x, pullback) * y
    with pytest.raises(OSError, match="disk"):
        z.backward()
    assert (x.grad, y.grad) == (None, None)
    failing.clear()
    z.backward()
    assert (x.grad.item(), y.grad.item()) == (1.0, 1.0)


def test_an_error_while_gradients_are_added_leaves_all_of_them():
    """The last leaf's earlier gradient is gone, so nothing can be added to it, and the first must not change."""
    x, y = leaf(1.0), leaf(2.0)
    (x * y).backward()
    y.grad.carrier.release()
    before = x.grad
    z = x * y
    with pytest.raises(sw.ReleasedError):
        z.backward()
    assert x.grad is before
    assert before.item() == 2.0
    y.grad = None
    z.backward()
    assert (x.grad.item(), y.grad.item()) == (4.0, 1.0)


# Stale values


STALE = {
    "mul": (lambda x, y: x * y, "xy"),
    "div": (lambda x, y: x / y, "xy"),
    "matmul": (lambda x, y: x @ y, "xy"),
    "maximum": (sw.maximum, "xy"),
    "exp": (lambda x, y: sw.exp(x), "z"),
    "sqrt": (lambda x, y: sw.sqrt(x), "z"),
    "softmax": (lambda x, y: sw.softmax(x), "z"),
    "log": (lambda x, y: sw.log(x), "x"),
    "reduce_max": (lambda x, y: sw.reduce_max(x), "xz"),
    "select": (lambda x, y: sw.select(x, y, 1.0), "x"),
    "add": (lambda x, y: x + y, ""),
    "sub": (lambda x, y: x - y, ""),
    "reduce_sum": (lambda x, y: sw.reduce_sum(x), ""),
    "mul by a scalar": (lambda x, y: x * 3.0, ""),
    "view": (lambda x, y: x.reshape(2, 1), ""),
    "gather": (lambda x, y: sw.gather(x, sw.asarray([0, 1])), ""),
}


@pytest.mark.parametrize("name", STALE)
@pytest.mark.parametrize("end", ["changed", "released"])
def test_a_saved_value_that_changed_is_stale_and_any_other_is_not(name, end):
    """Contract section 7: *Versions of saved inputs are checked before backward*."""
    compute, saved = STALE[name]
    for which in "xyz":
        x, y = leaf(1.0, 2.0), leaf(3.0, 4.0)
        z = compute(x, y)
        gradient = ones_like(z)
        changed = {"x": x, "y": y, "z": z}[which].carrier
        if end == "released":
            changed.release()
        else:
            changed[0] = 7.0
        if which in saved:
            with pytest.raises(StaleGraphError, match=name.split()[0]):
                z.backward(gradient)
            assert (x.grad, y.grad) == (None, None)
        else:
            z.backward(gradient)
            assert x.grad is not None or y.grad is not None


def test_what_no_wanted_gradient_is_made_from_may_change():
    """The product's share for ``x`` is made from ``y`` alone."""
    x, y = leaf(1.0, 2.0), leaf(3.0, 4.0, requires_grad=False)
    z = sw.reduce_sum(x * y)
    x[0] = 100.0
    z.backward()
    assert x.grad.tolist() == [3.0, 4.0]


def test_a_write_through_a_view_is_noticed():
    x = leaf(1.0, 2.0)
    z = sw.reduce_sum(x * x)
    x.detach().reshape(2, 1)[0] = 5.0
    with pytest.raises(StaleGraphError, match=r"version 0 .* version 1"):
        z.backward()


def test_a_stale_value_is_noticed_before_any_pullback_runs():
    calls = []
    x, y = leaf(1.0), leaf(2.0)
    early = x * y
    late = custom(early, lambda g: calls.append(g) or (g,))
    y[0] = 3.0
    with pytest.raises(StaleGraphError):
        late.backward()
    assert calls == []


def test_a_value_saved_by_a_node_of_ones_own_is_checked():
    x, kept = leaf(1.0), leaf(2.0)
    y = custom(x, lambda g: (g * kept,), name="own", saved=[kept])
    kept[0] = 3.0
    with pytest.raises(StaleGraphError, match="'own'"):
        y.backward()


# Gradient mode


def test_results_made_without_gradients_are_leaves_that_require_none(make):
    x = make([1.0])
    with no_grad():
        y = x * x
    assert not y.requires_grad
    assert y.grad_fn is None
    assert x.requires_grad
    z = y * x
    z.backward()
    assert x.grad.item() == 1.0


def test_backward_works_inside_no_grad_and_pullbacks_run_without_gradients():
    modes = []
    x = leaf(2.0)
    y = custom(x * x, lambda g: modes.append(sw.is_grad_enabled()) or (g * g,))
    with no_grad():
        y.backward()
    assert modes == [False]
    assert x.grad.item() == 4.0
    assert sw.is_grad_enabled()


def test_a_failing_pass_restores_the_mode():
    def fail(_):
        raise OSError

    with pytest.raises(OSError):
        custom(leaf(1.0), fail).backward()
    assert sw.is_grad_enabled()


@no_grad
def without(x):
    return x * x


def test_a_decorated_function_makes_no_graph(make):
    assert without(make([1.0])).grad_fn is None


@pytest.mark.anyio
async def test_a_task_without_gradients_leaves_other_tasks_alone():
    x = leaf(3.0)
    inside, results = anyio.Event(), {}

    async def serving():
        with no_grad():
            inside.set()
            await anyio.lowlevel.checkpoint()
            results["serving"] = x * x

    async def training():
        await inside.wait()
        results["training"] = x * x

    async with anyio.create_task_group() as group:
        group.start_soon(serving)
        group.start_soon(training)
    assert results["serving"].grad_fn is None
    results["training"].backward()
    assert x.grad.item() == 6.0


def test_detach_cuts_the_graph_and_shares_the_values(make):
    x = make([2.0])
    y = x * x
    cut = y.detach()
    assert cut.carrier is y.carrier
    assert (cut.requires_grad, cut.grad_fn) == (False, None)
    (cut * x).backward()
    assert x.grad.item() == 4.0
    y.carrier.release()
    with pytest.raises(sw.ReleasedError):
        y.detach()


# Sharing


def test_no_two_gradients_share_storage(make):
    x, y = make([1.0, 2.0]), make([3.0, 4.0])
    gradient = make([1.0, 1.0])
    (x + y).backward(gradient)
    carriers = {x.grad.carrier, y.grad.carrier, gradient.carrier}
    assert len(carriers) == 3
    x.grad[0] = 50.0
    gradient[1] = 60.0
    assert (x.grad.tolist(), y.grad.tolist()) == ([50.0, 1.0], [1.0, 1.0])


def test_the_gradient_of_a_leaf_root_is_a_copy(make):
    x, gradient = make([1.0, 2.0]), make([3.0, 4.0])
    x.backward(gradient)
    gradient[0] = 9.0
    assert x.grad.tolist() == [3.0, 4.0]


def test_a_repeated_gradient_is_written_out(make):
    x = make([[1.0, 2.0], [3.0, 4.0]])
    sw.reduce_sum(x).backward()
    assert x.grad.carrier.size() == 4
    assert x.grad.layout == row_major(2, 2)
    x.grad[0, 0] = 7.0
    assert x.grad.tolist() == [[7.0, 1.0], [1.0, 1.0]]


def test_a_gradient_argument_may_be_a_broadcast_view(make):
    x = make([[1.0, 2.0], [3.0, 4.0]])
    y = x * 2.0
    y.backward(make([1.0]).broadcast_to(2, 2))
    assert x.grad.tolist() == [[2.0, 2.0], [2.0, 2.0]]
    assert x.grad.carrier.size() == 4


def test_two_leaves_of_one_carrier_have_gradients_of_their_own():
    carrier = CPU(0, dtype=DType.Float64).new_like([1.0, 2.0, 3.0, 4.0])
    x, y = Tensor(carrier, 0, row_major(2)), Tensor(carrier, 2, row_major(2))
    sw.reduce_sum(x * y).backward()
    assert (x.grad.tolist(), y.grad.tolist()) == ([3.0, 4.0], [1.0, 2.0])
    assert x.grad.carrier is not y.grad.carrier
    assert x.grad.carrier.size() == 2


def test_immutable_carriers_have_gradients():
    x = Tensor(CPU(0).new_like([1.0, 2.0], mutable=False), 0, row_major(2))
    for _ in range(2):
        sw.reduce_sum(x * x).backward()
    assert x.grad.tolist() == [4.0, 8.0]
    assert x.version == 0


@pytest.mark.parametrize("dtype", [DType.Float16, DType.BFloat16, DType.Float8E5M2])
def test_gradients_of_small_floats_keep_their_dtype(make, dtype):
    x = make([1.0, 2.0], dtype)
    for _ in range(2):
        sw.reduce_sum(x * x).backward()
    assert x.grad.dtype is dtype
    assert x.grad.tolist() == [4.0, 8.0]


# Memory


def test_backward_lets_go_of_what_it_saved_though_the_result_stays(no_collector):
    """Only the leaves and the result live on; the graph's inputs are those that someone else holds."""
    x = leaf(1.0, 2.0)
    hidden = sw.exp(x)
    gone = weakref.ref(hidden.carrier)
    loss = sw.reduce_sum(sw.tanh(hidden) * x)
    del hidden
    loss.backward(retain_graph=True)
    assert gone() is not None
    loss.backward()
    assert gone() is None
    assert loss.grad_fn.name == "reduce_sum"
    assert loss.grad_fn.inputs == ()


def test_inputs_that_someone_holds_stay_visible_after_backward():
    x = leaf(1.0)
    y = x * x
    y.backward()
    assert y.grad_fn.inputs == (x, x)


def test_a_result_that_is_dropped_frees_its_graph_without_a_collector(no_collector):
    x = leaf(1.0)
    hidden = sw.exp(x)
    gone = weakref.ref(hidden.carrier)
    result = sw.reduce_sum(sw.sqrt(hidden))
    del hidden, result
    assert gone() is None


def test_no_grad_keeps_no_intermediate_result():
    x = leaf(1.0)
    with no_grad():
        hidden = sw.exp(x)
        gone = weakref.ref(hidden)
        result = sw.reduce_sum(hidden)
        del hidden
    assert gone() is None
    assert result.grad_fn is None


# Threads


def run_together(*functions):
    barrier, errors = threading.Barrier(len(functions)), []

    def run(function):
        try:
            barrier.wait(30)
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []


def test_threads_with_graphs_of_their_own_add_to_one_leaf_without_losing_anything():
    x = leaf(1.0, 2.0)

    def train():
        for _ in range(50):
            sw.reduce_sum(x * x).backward()

    run_together(train, train)
    assert x.grad.tolist() == [200.0, 400.0]


def test_two_threads_walk_one_retained_graph():
    x = leaf(3.0)
    y = x * x
    run_together(lambda: y.backward(retain_graph=True), lambda: y.backward(retain_graph=True))
    assert x.grad.item() == 12.0


# Composed carriers


def evictable(*values):
    hierarchy = Evictable(CPU(0, dtype=DType.Float64).new_like(values), FileBacked(dtype=DType.Float64))
    return Tensor(hierarchy, 0, row_major(len(values)))


def test_gradients_of_evictables_are_evictables_that_own_their_tiers():
    """Spec: *Evictable results retain composition ownership*."""
    x, y = evictable(1.0, 2.0), evictable(3.0, 4.0)
    result = x * y + x
    result.backward(evictable(1.0, 1.0))
    for tensor in (result, x.grad, y.grad):
        hierarchy = tensor.carrier
        assert type(hierarchy) is Evictable
        assert hierarchy.primary.is_owned()
        assert not hierarchy.primary.is_mutable()
        assert hierarchy.secondary.is_owned()
        with pytest.raises(sw.OwnershipError):
            hierarchy.primary[0] = 1.0
        hierarchy.evict()
        hierarchy.promote()
    assert (x.grad.tolist(), y.grad.tolist()) == ([4.0, 5.0], [1.0, 2.0])
    assert x.grad.carrier.primary is not y.grad.carrier.primary


def test_an_eviction_between_forward_and_backward_changes_nothing_that_was_saved():
    """Spec: *Transitions preserve logical version identity*."""
    x = evictable(1.0, 2.0)
    y = x * x
    x.carrier.evict()
    with pytest.raises(sw.EvictedError):
        y.backward(evictable(1.0, 1.0))
    assert x.grad is None
    x.carrier.promote()
    y.backward(evictable(1.0, 1.0))
    assert x.grad.tolist() == [2.0, 4.0]


def test_an_evicted_leaf_that_is_not_read_gets_its_gradient():
    x = evictable(1.0, 2.0)
    y = x + 1.0
    x.carrier.evict()
    y.backward(evictable(1.0, 3.0))
    assert type(x.grad.carrier) is Evictable
    assert x.grad.tolist() == [1.0, 3.0]


def test_files_have_gradients_through_views_and_add_them_in_memory():
    """A FileBacked carrier computes nothing but views; its gradients are sums all the same."""
    carrier = FileBacked(dtype=DType.Float64).new_like([1.0, 2.0, 3.0])
    x = Tensor(carrier, 0, row_major(3))
    view = x.unsqueeze(0).broadcast_to(2, 3).T
    gradient = Tensor(carrier.new_like(range(6), dtype=DType.Float64), 0, row_major(3, 2))
    for expected in ([1.0, 5.0, 9.0], [2.0, 10.0, 18.0]):
        view.backward(gradient, retain_graph=True)
        assert type(x.grad.carrier) is FileBacked
        assert x.grad.tolist() == expected


# Contributions: shares that are added to a total instead of being tensors of their own


class AddAt(Contribution):
    """A share that is zero save in one slot; counts the storage that it made."""

    made = 0

    def __init__(self, like, place, value):
        self.like, self.place, self.value = like, place, value

    def onto(self, total):
        if total is None:
            type(self).made += 1
            total = Tensor(self.like.carrier.new_like([0.0] * self.like.size), 0, row_major(self.like.shape))
        total[self.place] = total[self.place] + self.value
        return total


def part(x, place):
    """The element ``x[place]`` as a tensor of its own, whose way back is a contribution."""
    result = Tensor(x.carrier.new_like([x[place]]), 0, row_major(1))
    return attach(result, Node("part", (x,), lambda g: (AddAt(x, place, g.item()),)))


def test_contributions_that_meet_share_one_total(monkeypatch):
    monkeypatch.setattr(AddAt, "made", 0)
    x = leaf(1.0, 2.0, 3.0)
    (part(x, 0) * 5.0 + part(x, 2) * 7.0 + part(x, 2)).backward()
    assert x.grad.tolist() == [5.0, 0.0, 8.0]
    assert AddAt.made == 1


@pytest.mark.parametrize("contribution_first", [True, False])
def test_a_contribution_never_changes_a_tensor_that_others_refer_to(contribution_first):
    x = leaf(1.0, 2.0)
    gradients = []

    def kept(g):
        gradients.append(g)  # the very tensor goes on to x
        return (g,)

    whole = sw.reduce_sum(custom(x, kept) * 3.0)
    one = part(x, 1)
    (one + whole if contribution_first else whole + one).backward()
    assert x.grad.tolist() == [3.0, 4.0]
    assert [gradient.tolist() for gradient in gradients] == [[3.0, 3.0]]


def test_a_contribution_reaches_inner_results_as_a_tensor():
    x = leaf(1.0, 2.0)
    y = x * 2.0
    seen = []
    z = custom(y, lambda g: (seen.append(g.tolist()), g)[1:])
    (part(z, 0) * 4.0).backward()
    assert seen == [[4.0, 0.0]]
    assert x.grad.tolist() == [8.0, 0.0]


def test_a_failing_contribution_leaves_gradients_and_graph_as_they_were():
    x = leaf(1.0, 2.0)
    one = part(x, 0)
    broken = custom(x, lambda g: (AddAt(x, 9, 1.0),))
    with pytest.raises(IndexError):
        (one + sw.reduce_sum(broken)).backward()
    assert x.grad is None
    one.backward()
    assert x.grad.tolist() == [1.0, 0.0]


# Saved versions


def test_a_version_that_was_taken_earlier_counts():
    x = leaf(1.0)
    earlier = x.carrier.version
    x[0] = 2.0
    late = custom(x, lambda g: (g,), saved=[(x.carrier, earlier)])
    with pytest.raises(StaleGraphError, match="version 0"):
        late.backward()
    custom(x, lambda g: (g,), saved=[(x.carrier, x.carrier.version)]).backward()
    assert x.grad.tolist() == [1.0]


def test_a_carrier_may_refuse_gradients_of_another_geometry(monkeypatch):
    def refuse(self, tensor, gradient):
        raise ValueError("another geometry")

    x = leaf(1.0, 2.0)
    monkeypatch.setattr(CPU, "_check_gradient", refuse)
    with pytest.raises(ValueError, match="another geometry"):
        x.grad = ones_like(x)
    with pytest.raises(ValueError, match="another geometry"):
        (x * 2.0).backward(ones_like(x))
    assert x.grad is None
