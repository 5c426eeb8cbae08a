"""A machine drives an Evictable, and a list of numbers says what it must hold."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from strideweave import CPU, Evictable, FileBacked, Generic, Tensor, add, move, row_major
from strideweave.errors import EvictedError, ImmutableError, OwnershipError, PendingWorkError, ReleasedError
from strideweave.layout import Layout
from strideweave.testing import failing_transfers, held_transfers, values_of

NUMBERS = st.integers(-1000, 1000).map(float)
TIERS = {
    "CPU": lambda: CPU(0),
    "Generic": lambda: Generic([]),
    "FileBacked": FileBacked,
    "Evictable": lambda: Evictable(CPU(1), Generic([])),
}


class EvictableMachine(RuleBasedStateMachine):
    """Evict, promote, write, scatter, read, compute, fail, hold and release, in any order."""

    @initialize(
        values=st.lists(NUMBERS, min_size=1, max_size=5),
        primary=st.sampled_from(list(TIERS)),
        secondary=st.sampled_from(list(TIERS)),
        room=st.sampled_from([0, 1, 5]),
        mutable=st.booleans(),
    )
    def construct(self, values, primary, secondary, room, mutable):
        self.values, self.version, self.mutable = list(values), 0, mutable
        self.evicted = self.released = False
        slow = TIERS[secondary]()
        self.classes = (type(TIERS[primary]()), type(slow))
        self.first = TIERS[primary]().new_like(values, mutable=mutable)
        self.carrier = Evictable(self.first, slow.allocate_like(room) if room else slow)
        self.aliases = [self.carrier.primary, self.carrier.secondary]
        self.done = [0, 0]  # evictions, promotions

    def pair(self, evict):
        return self.classes if evict else tuple(reversed(self.classes))

    def usable(self):
        return not self.released and not self.evicted

    def refused(self):
        """The error that a public write must meet now; None where it is allowed."""
        if self.released:
            return ReleasedError
        if not self.mutable:
            return ImmutableError
        return EvictedError if self.evicted else None

    @rule(evict=st.booleans())
    def transition(self, evict):
        call = self.carrier.evict if evict else self.carrier.promote
        if self.released:
            with pytest.raises(ReleasedError):
                call()
            return
        assert call() is None
        self.done[0 if evict else 1] += self.evicted is not evict
        self.evicted = evict
        self.aliases += [self.carrier.primary, self.carrier.secondary]

    @precondition(lambda self: not self.released)
    @rule(after=st.booleans())
    def fail_a_transition(self, after):
        evict = not self.evicted
        call = self.carrier.evict if evict else self.carrier.promote
        tiers = (self.carrier.primary, self.carrier.secondary)
        with (
            failing_transfers(*self.pair(evict), after=after) as faults,
            pytest.raises(OSError, match="filled"),
        ):
            call()
        assert faults.failed == 1
        assert (self.carrier.primary, self.carrier.secondary) == tiers

    @precondition(lambda self: not self.released)
    @rule(slot=st.integers(0, 4))
    def look_while_it_moves(self, slot):
        evict = not self.evicted
        with held_transfers(*self.pair(evict)) as hold:
            handle = (self.carrier.evict_async if evict else self.carrier.promote_async)()
            hold.entered.wait(10)
            assert self.carrier.is_evicted() is self.evicted
            for call in (self.carrier.evict_async, self.carrier.promote_async, self.carrier.release):
                with pytest.raises(PendingWorkError):
                    call()
            with pytest.raises(self.refused() or PendingWorkError):
                self.carrier[0] = 1
            if evict:
                assert self.carrier[slot % len(self.values)] == self.values[slot % len(self.values)]
            hold.open()
            handle.wait(10)
        self.done[0 if evict else 1] += 1
        self.evicted = evict

    @rule(slot=st.integers(0, 4), value=NUMBERS)
    def write(self, slot, value):
        slot %= len(self.values)
        error = self.refused()
        if error is not None:
            with pytest.raises(error):
                self.carrier[slot] = value
            return
        self.carrier[slot] = value
        self.values[slot] = value
        self.version += 1

    @precondition(lambda self: self.usable())
    @rule()
    def reverse(self):
        """Scatter the carrier onto itself, backwards."""
        count = len(self.values)
        onto = Tensor(self.carrier, 0, row_major(count))
        last = Tensor(self.carrier, count - 1, row_major(1))
        error = self.refused()
        if error is not None or isinstance(self.bearer(), FileBacked):
            with pytest.raises(error or NotImplementedError):
                self.carrier.scatter(onto, last, Layout(count, -1))
            return
        self.carrier.scatter(onto, last, Layout(count, -1))
        self.values.reverse()
        self.version += 1

    @precondition(lambda self: self.usable())
    @rule(number=NUMBERS)
    def compute(self, number):
        tensor = Tensor(self.carrier, 0, row_major(len(self.values)), requires_grad=False)
        if isinstance(self.bearer(), FileBacked):
            with pytest.raises(NotImplementedError):
                add(tensor, number)
            return
        result = add(tensor, number)
        assert result.tolist() == [value + number for value in self.values]
        assert type(result.carrier) is Evictable
        assert result.carrier.primary.is_owned()

    @rule(slot=st.integers(0, 4))
    def read(self, slot):
        slot %= len(self.values)
        if self.usable():
            assert self.carrier[slot] == self.values[slot]
            return
        with pytest.raises(ReleasedError if self.released else EvictedError):
            self.carrier[slot]

    @rule()
    def make_another(self):
        made = self.carrier.new_like(self.values)
        assert values_of(made).tolist() == self.values
        assert (type(made.primary), type(made.secondary)) == self.classes
        made.release()

    @precondition(lambda self: self.usable())
    @rule()
    def move_away_and_go_on_there(self):
        """The source ends; what was made like it goes on with the values."""
        moved = move(
            Tensor(self.carrier, 0, row_major(len(self.values)), requires_grad=False),
            self.carrier.allocate_like(len(self.values), mutable=True),
        )
        assert self.carrier.is_released()
        self.carrier = moved.carrier
        self.mutable, self.version, self.done = True, 1, [0, 0]

    @rule(patience=st.integers(0, 5))
    def release(self, patience):
        if patience and not self.released:
            return  # most lives are to be long
        assert self.carrier.release() is None
        self.released = True

    def bearer(self):
        return self.carrier._bearer()

    @invariant()
    def the_model_agrees(self):
        carrier = self.carrier
        assert carrier.is_released() is self.released
        assert carrier.size() == (0 if self.released else len(self.values))
        if self.released:
            assert carrier.primary.is_released()
            assert carrier.secondary.is_released()
            return
        assert carrier.is_evicted() is self.evicted
        assert carrier.version == self.version
        assert carrier.is_mutable() is self.mutable
        record = carrier.statistics()
        assert (record.evictions, record.promotions, record.pending) == (*self.done, 0)
        holder = carrier.secondary if self.evicted else carrier.primary
        assert values_of(holder)[: len(self.values)].tolist() == self.values
        assert holder.is_owned()
        assert (type(carrier.primary), type(carrier.secondary)) == self.classes

    @invariant()
    def aliases_change_nothing(self):
        for alias in self.aliases:
            if not alias.is_released():
                assert not alias.is_mutable()
                with pytest.raises(OwnershipError):
                    alias.release()

    def teardown(self):
        self.carrier.release()


TestEvictableMachine = EvictableMachine.TestCase
TestEvictableMachine.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
