"""Inbox: what any thread posts is called in the loop, which is woken where it sleeps; nothing of it outlives it."""

import asyncio
import contextvars
import gc
import os
import threading

import pytest

from strideweave.runtime.inbox import Inbox
from strideweave.runtime.pacing import paced_loop

KINDS = [False, True] if hasattr(os, "eventfd") else [False]
counted = pytest.mark.skipif(len(KINDS) == 1, reason="the system has no event counter")


@pytest.fixture(params=KINDS, ids=lambda counter: "counter" if counter else "the loop's own way")
def inbox(request):
    return Inbox(counter=request.param)


@pytest.fixture
def loop(inbox):
    loop = paced_loop(inbox)
    inbox.serve(loop, contextvars.copy_context())
    yield loop
    loop.close()


def test_a_call_from_another_thread_is_made_in_the_loop_that_sleeps(loop, inbox):
    made = []

    async def main():
        here = threading.current_thread()
        for _ in range(3):
            called = asyncio.Event()

            def call(called=called):
                made.append(threading.current_thread() is here)
                called.set()

            thread = threading.Thread(target=inbox.post, args=(call,))
            thread.start()
            await asyncio.wait_for(called.wait(), 60)
            thread.join()

    loop.run_until_complete(main())
    assert made == [True] * 3


def test_what_is_posted_before_the_loop_sleeps_keeps_it_awake(loop, inbox):
    """No timer is set and nothing is registered: a loop that slept would never wake up."""

    async def main():
        future = loop.create_future()
        inbox.post(future.set_result, "called")
        return await future

    assert loop.run_until_complete(main()) == "called"


def test_a_task_that_a_call_starts_takes_its_first_step_in_the_same_turn(loop, inbox):
    steps = []

    async def step():
        steps.append("task")

    async def main():
        inbox.post(lambda: steps.append(loop.create_task(step())))
        loop.call_soon(steps.append, "a turn later")
        await asyncio.sleep(0)  # the call is made
        loop.call_soon(steps.append, "two turns later")
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    loop.run_until_complete(main())
    assert steps[0] == "a turn later" or steps.index("task") < steps.index("two turns later")
    assert steps.index("task") < steps.index("two turns later")


def test_calls_see_the_context_that_was_given(inbox):
    variable = contextvars.ContextVar("variable", default="none")
    context = contextvars.copy_context()
    context.run(variable.set, "given")
    loop = paced_loop(inbox)
    inbox.serve(loop, context)
    seen = []

    async def main():
        inbox.post(lambda: seen.append(variable.get()))
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    loop.run_until_complete(main())
    loop.close()
    assert seen == ["given"]


@counted
def test_a_ring_that_nobody_needed_is_over_with_the_next_turn(monkeypatch):
    """Edge-triggered: a loop that was rung does not find the same ring again and again."""
    inbox = Inbox(counter=True)
    loop = paced_loop(inbox)
    inbox.serve(loop, contextvars.copy_context())
    turns = []
    fall_asleep = inbox.fall_asleep
    monkeypatch.setattr(inbox, "fall_asleep", lambda: turns.append(1) or fall_asleep())

    async def main():
        for _ in range(5):
            inbox.ring()
        await asyncio.sleep(0.05)

    loop.run_until_complete(main())
    loop.close()
    assert len(turns) <= 3


@counted
def test_the_counter_closes_with_the_inbox_and_not_with_the_loop():
    """Who rings as the loop ends must not write to another file that was given the number since."""
    inbox = Inbox(counter=True)
    loop = paced_loop(inbox)
    inbox.serve(loop, contextvars.copy_context())
    number = inbox._counter
    loop.close()
    inbox.ring()
    assert os.eventfd_read(number) == 1
    del inbox, loop
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)


def test_the_loop_s_own_way_says_that_the_loop_has_ended():
    inbox = Inbox(counter=False)
    loop = paced_loop(inbox)
    inbox.serve(loop, contextvars.copy_context())
    loop.close()
    with pytest.raises(RuntimeError, match="closed"):
        inbox.ring()
