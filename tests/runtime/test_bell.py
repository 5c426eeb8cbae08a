"""Bell: however often it rings, its loop answers, and nothing of it outlives it."""

import asyncio
import gc
import os
import threading

import pytest

from strideweave.runtime.bell import Bell

KINDS = [False, True] if hasattr(os, "eventfd") else [False]


@pytest.fixture
def loop():
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.mark.parametrize("counter", KINDS)
def test_a_ring_from_another_thread_is_answered_in_the_loop(loop, counter):
    answered = []
    enough = asyncio.Event()

    async def main():
        here = threading.current_thread()

        def answer():
            answered.append(threading.current_thread() is here)
            enough.set()

        bell = Bell(loop, answer, counter=counter)
        for _ in range(3):
            enough.clear()
            thread = threading.Thread(target=bell.ring)
            thread.start()
            await asyncio.wait_for(enough.wait(), 60)
            thread.join()

    loop.run_until_complete(main())
    assert answered == [True] * 3


@pytest.mark.skipif(len(KINDS) == 1, reason="the system has no event counter")
def test_rings_that_come_together_are_answered_once(loop):
    answered = []

    async def main():
        bell = Bell(loop, lambda: answered.append(1), counter=True)
        for _ in range(5):
            bell.ring()
        for _ in range(5):
            await asyncio.sleep(0)

    loop.run_until_complete(main())
    assert answered == [1]


@pytest.mark.skipif(len(KINDS) == 1, reason="the system has no event counter")
def test_the_counter_closes_with_the_bell_and_not_with_the_loop():
    """Who rings as the loop ends must not write to another file that was given the number since."""
    loop = asyncio.new_event_loop()
    bell = Bell(loop, lambda: None, counter=True)
    number = bell._counter
    loop.close()
    bell.ring()
    assert os.eventfd_read(number) == 1
    del bell
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)


def test_the_loop_s_own_way_says_that_the_loop_has_ended():
    loop = asyncio.new_event_loop()
    bell = Bell(loop, lambda: None, counter=False)
    loop.close()
    with pytest.raises(RuntimeError, match="closed"):
        bell.ring()
