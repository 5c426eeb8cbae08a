"""Exceptions from outside, such as Ctrl-C, while a request starts: nothing stays pending, pinned or owned.

Contract, section 6: *a request that fails before it starts work raises from the call; ... residency, values, versions
and ownership as they were*.
"""

import os

import numpy as np
import pytest

from interruptions import interrupted_everywhere
from strideweave import (
    CPU,
    Evictable,
    FileBacked,
    Generic,
    Tensor,
    TileSet,
    add,
    asarray,
    is_grad_enabled,
    move_async,
    reduce_sum,
)
from strideweave.runtime.locks import holds_short_lock

# The collector would run finalizers in the midst of a call, which are interrupted without a word.
pytestmark = pytest.mark.usefixtures("no_collector")


def tiles(*experts):
    return TileSet([(expert, 0, 0) for expert in experts])


def let_end(carrier):
    """Wait for what runs although nobody has its handle."""
    for handle in carrier._scope.unfinished():
        handle.wait()


def projected(tensor):
    return tensor.carrier.project(tensor, tensor.carrier.select({})).wait().numpy()


MANY = (0, 1, 2, 3, 4, 5, 6, 7)  # FEW_TILES are counted one by one


class Project:
    """A projection to a destination."""

    def __init__(self, model, experts):
        self.model, self.experts = model, experts
        self.destination = CPU(0)
        self.carriers = (self.destination,)

    def __call__(self):
        return self.model.project(*self.experts, destination=self.destination)


class Scatter:
    def __init__(self, model, experts):
        self.model, self.experts = model, experts
        self.compact = asarray(model.values[list(experts)])
        self.carriers = (self.compact.carrier,)

    def __call__(self):
        model = self.model
        return model.carrier.scatter(self.compact, model.tensor, model.select(*self.experts), "add")


class Assign(Scatter):
    def __call__(self):
        model = self.model
        return model.carrier.assign(self.compact, model.tensor, model.select(*self.experts))


class Promote:
    carriers = ()

    def __init__(self, model, experts):
        self.model, self.experts = model, experts

    def __call__(self):
        return self.model.carrier.promote_async(tiles(*self.experts))


class Evict(Promote):
    def __call__(self):
        return self.model.carrier.evict_async(tiles(*self.experts))


class Flush(Promote):
    def __call__(self):
        return self.model.carrier.flush_async(durable=True)


REQUESTS = [Project, Scatter, Assign, Promote, Evict, Flush]


@pytest.mark.parametrize("experts", [(2,), MANY], ids=["few", "many"])
@pytest.mark.parametrize("request_kind", REQUESTS)
@pytest.mark.parametrize("start", ["primary", "secondary"])
def test_what_interrupts_a_request_leaves_nothing_behind(make_model, start, request_kind, experts):
    model = make_model(start)
    made = []

    def begin():
        made[:] = [request_kind(model, experts)]
        if start == "primary":
            model.carrier.promote(tiles(*MANY))
        elif request_kind is not Evict:
            model.carrier.evict(tiles(*MANY))
        return (lambda: made[0]().wait()) if len(experts) == 1 else made[0]

    for place in interrupted_everywhere(begin):
        assert not holds_short_lock(), place
        let_end(model.carrier)
        assert model.at_rest(), place
        assert not any(carrier.is_owned() for carrier in made[0].carriers), place
        model.check(*MANY)
        begin()()  # what was interrupted can be done
        let_end(model.carrier)
    let_end(model.carrier)
    model.check(*MANY)


@pytest.mark.parametrize("tiled", ["source", "destination", "both", "neither"])
def test_what_interrupts_a_move_leaves_nothing_behind(make_model, tiled):
    made, values = [], make_model("secondary").values

    def begin():
        source = make_model("secondary") if tiled in ("source", "both") else None
        target = make_model("empty") if tiled in ("destination", "both") else None
        tensor = asarray(values) if source is None else source.tensor
        carrier = CPU(0) if target is None else target.carrier
        made[:] = [tensor, carrier]
        return lambda: move_async(tensor, carrier)

    for place in interrupted_everywhere(begin):
        tensor, destination = made
        let_end(destination)
        assert not destination.is_owned(), place
        if tensor.carrier.is_released():  # it had begun, and has ended
            moved = Tensor(destination, 0, tensor.layout)
        else:
            assert not tensor.carrier.is_owned(), place
            moved = move_async(tensor, destination).wait()
        whole = moved.numpy() if tiled in ("source", "neither") else projected(moved)
        assert np.array_equal(whole, values), place
        destination.release()
    let_end(made[1])


@pytest.mark.parametrize("start", ["primary", "secondary"])
def test_what_interrupts_an_operation_leaves_nothing_behind(make_model, start):
    """It holds the tiles of two carriers, one request each."""
    models = [make_model(start), make_model(start)]
    wanted = 2 * models[0].values

    def begin():
        return lambda: add(models[0].tensor, models[1].tensor)

    for place in interrupted_everywhere(begin, every=5):
        for model in models:
            let_end(model.carrier)
            assert model.at_rest(), place
        assert np.array_equal(add(models[0].tensor, models[1].tensor).numpy(), wanted)


@pytest.mark.parametrize("start", ["primary", "secondary"])
def test_a_release_that_was_interrupted_has_ended_or_has_not_begun(make_model, start):
    made = []

    def begin():
        made[:] = [make_model(start)]
        made[0].carrier.evict(tiles(1))
        return made[0].carrier.release

    for place in interrupted_everywhere(begin):
        model = made[0]
        secondary = model.carrier.secondary
        if model.carrier.is_released():
            assert secondary.is_released(), place
            assert not os.path.exists(secondary.path), place  # noqa: PTH110 - a string
            assert model.carrier.primary.is_released(), place
        else:
            model.check(*MANY)
        model.carrier.release()
        assert not os.path.exists(secondary.path), place  # noqa: PTH110


def test_what_interrupts_a_write_of_a_slot_leaves_nothing_behind(make_model):
    model = make_model("secondary")
    slot = FileBacked().new_like([1.0])

    def begin():
        model.carrier.evict(tiles(0))

        def write():
            model.carrier[0] = 0.0
            slot[0] = 1.0

        return write

    for place in interrupted_everywhere(begin):
        let_end(model.carrier)
        assert model.at_rest(), place
        assert slot.statistics().pending == model.carrier.statistics().pending_requests == 0, place
    model.check(*MANY)
    slot.release()


@pytest.mark.parametrize("kind", ["tiled", "tiled, to be fetched", "memory", "python", "file", "evictable"])
def test_a_value_that_an_interrupted_write_has_changed_is_kept_and_counted(make_model, kind):
    if kind.startswith("tiled"):
        carrier = make_model("secondary").carrier
    elif kind == "evictable":
        carrier = Evictable(CPU(0).new_like([0.0]), FileBacked())
    else:
        carrier = {"memory": CPU(0), "python": Generic([]), "file": FileBacked()}[kind].new_like([0.0])
    before = []

    def begin():
        if kind == "tiled":
            carrier.promote(tiles(0))
        if kind.startswith("tiled"):
            carrier.flush()
        if kind == "tiled, to be fetched":
            carrier.evict(tiles(0))
        before[:] = [carrier[0], carrier.version]
        return lambda: carrier.__setitem__(0, before[0] + 1.0)

    changed = set()
    for place in interrupted_everywhere(begin):
        let_end(carrier)
        value = carrier[0]
        changed.add(value != before[0])
        assert value == before[0] or carrier.version > before[1], place
        if kind.startswith("tiled"):
            assert carrier.tile_state((0, 0, 0)).dirty or value == before[0], place
            carrier.evict(tiles(0))
            assert carrier[0] == value, place
    assert changed == {False, True}
    carrier.release()


def test_what_interrupts_backward_leaves_gradients_switched_on_and_warnings_as_they_were():
    leaf, made = asarray([1.0, 2.0]), []

    def begin():
        made[:] = [reduce_sum(leaf * leaf)]
        return made[0].backward

    errors = np.geterr()
    for place in interrupted_everywhere(begin, every=5):
        assert is_grad_enabled(), place
        assert np.geterr() == errors, place
        assert leaf.grad is None or leaf.grad.tolist() == [2.0, 4.0], place
        leaf.grad = None
