"""What a request does about residency, from what it requires and what the policy answers."""

import numpy as np
import pytest

from strideweave.tiles.grid import TileGrid
from strideweave.tiles.plan import plan_request
from strideweave.tiles.policy import ResidencyPlan
from strideweave.tiles.selection import TileSet

GRID = TileGrid((8,), (2,))


class Fixed:
    """A policy that answers what it was told to, and remembers what it was asked."""

    def __init__(self, answer):
        self.answer = answer
        self.asked = []

    def plan(self, required, purpose):
        self.asked.append((required, purpose))
        return self.answer


def tile_set(*ordinals):
    return TileSet([(ordinal,) for ordinal in ordinals])


def plan(answer, required=(3, 1, 2)):
    return plan_request(Fixed(answer), GRID, np.array(required, np.int64), tile_set(*required), "projection")


def fields(plan):
    return {name: getattr(plan, name).tolist() for name in ("passing", "extra", "retain", "early")}


def test_without_a_policy_everything_required_stays():
    plan = plan_request(None, GRID, np.array([3, 1], np.int64), tile_set(1, 3), "projection")
    assert plan.required.tolist() == [3, 1]
    assert fields(plan) == {"passing": [], "extra": [], "retain": [], "early": []}


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (ResidencyPlan(), {}),
        (ResidencyPlan(promote=tile_set(1, 2, 3)), {}),
        (ResidencyPlan(promote=tile_set(2, 5)), {"extra": [5]}),
        (ResidencyPlan(retain=tile_set(2, 6)), {"retain": [2, 6]}),
        (ResidencyPlan(evict=tile_set(1, 7)), {"passing": [1], "early": [7]}),
        (ResidencyPlan(evict=tile_set(1, 2, 3)), {"passing": [1, 2, 3]}),
    ],
)
def test_the_answer_is_sorted_by_what_is_to_be_done(answer, expected):
    everything = {"passing": [], "extra": [], "retain": [], "early": []} | expected
    assert fields(plan(answer)) == everything


@pytest.mark.parametrize("purpose", ["operation", "projection", "scatter", "backward"])
def test_the_policy_is_asked_once_for_the_requirement_and_the_purpose(purpose):
    policy = Fixed(ResidencyPlan())
    required = tile_set(4)
    plan_request(policy, GRID, np.array([4], np.int64), required, purpose)
    assert policy.asked == [(required, purpose)]


@pytest.mark.parametrize("answer", [None, {}, (tile_set(1),), ResidencyPlan])
def test_another_answer_is_a_type_error(answer):
    """Spec: Reject an invalid policy result before execution."""
    with pytest.raises(TypeError, match="ResidencyPlan"):
        plan(answer)


@pytest.mark.parametrize("field", ["promote", "retain", "evict"])
@pytest.mark.parametrize("tiles", [TileSet([(8,)]), TileSet([(0, 0)])])
def test_tiles_outside_the_grid_are_a_value_error(field, tiles):
    with pytest.raises(ValueError, match="grid"):
        plan(ResidencyPlan(**{field: tiles}))


def test_an_exception_of_the_policy_is_passed_on():
    class Broken:
        def plan(self, required, purpose):
            raise ZeroDivisionError("broken")

    with pytest.raises(ZeroDivisionError, match="broken"):
        plan_request(Broken(), GRID, np.array([0], np.int64), tile_set(0), "projection")


def test_what_is_only_held_is_promoted_where_the_policy_says_so():
    """A replacing scatter reads none of its tiles, so none has to be primary; a plan for them is kept."""
    required = np.array([5, 2, 7], np.int64)

    def plan_for(policy):
        return plan_request(policy, GRID, required, tile_set(2, 5, 7), "scatter", reads=False)

    found = plan_for(None)
    assert (found.reads, found.required.tolist(), found.staying.tolist()) == (False, [5, 2, 7], [])
    assert not len(found.extra)
    found = plan_for(Fixed(ResidencyPlan(promote=tile_set(2, 3), evict=tile_set(0, 7), retain=tile_set(5))))
    assert (found.extra.tolist(), found.staying.tolist()) == ([2, 3], [])
    assert (found.passing.tolist(), found.early.tolist(), found.retain.tolist()) == ([7], [0], [5])

    class Echo:
        def plan(self, required, purpose):
            return ResidencyPlan(promote=required)

    assert plan_for(Echo()).extra.tolist() == [5, 2, 7]
