"""Gradient mode: local to the thread and the task, whichever way it is switched."""

import asyncio
import threading

import anyio
import pytest

from strideweave.autograd import is_grad_enabled, no_grad, set_grad_enabled


def test_gradients_are_on_until_switched_off():
    assert is_grad_enabled()
    with no_grad():
        assert not is_grad_enabled()
        with no_grad():
            assert not is_grad_enabled()
        assert not is_grad_enabled()
    assert is_grad_enabled()


def test_an_exception_switches_back():
    with pytest.raises(KeyError), no_grad():
        raise KeyError
    assert is_grad_enabled()


def test_one_object_can_be_entered_again_inside_itself():
    guard = no_grad()
    with guard, guard:
        assert not is_grad_enabled()
    assert is_grad_enabled()


@pytest.mark.parametrize("decorator", [no_grad, no_grad()])
def test_a_decorated_function_runs_without_gradients(decorator):
    @decorator
    def ask(x, *, y):
        """Docs."""
        return is_grad_enabled(), x, y

    assert ask(1, y=2) == (False, 1, 2)
    assert (ask.__name__, ask.__doc__) == ("ask", "Docs.")
    assert is_grad_enabled()


def test_what_is_not_callable_is_not_decorated():
    with pytest.raises(TypeError, match="decorates functions"):
        no_grad()(3)


def test_a_decorated_generator_is_guarded_and_its_consumer_is_not():
    events = []

    @no_grad
    def body():
        try:
            events.append(is_grad_enabled())
            try:
                received = yield "first"
            except KeyError:
                events.append(is_grad_enabled())
                received = yield "caught"
            events.append(received)
            yield "last"
        finally:
            events.append(("closed", is_grad_enabled()))
        return "end"

    running = body()
    assert next(running) == "first"
    assert is_grad_enabled()
    assert running.throw(KeyError()) == "caught"
    assert running.send("sent") == "last"
    with pytest.raises(StopIteration) as stop:
        next(running)
    assert stop.value.value == "end"
    assert events == [False, False, "sent", ("closed", False)]

    events.clear()
    running = body()
    next(running)
    running.close()
    assert events == [False, ("closed", False)]
    assert is_grad_enabled()


@pytest.mark.anyio
async def test_a_decorated_coroutine_is_guarded_and_other_tasks_are_not():
    inside, seen = anyio.Event(), []

    @no_grad
    async def guarded():
        inside.set()
        await anyio.lowlevel.checkpoint()
        seen.append(is_grad_enabled())

    async def other():
        await inside.wait()
        seen.append(is_grad_enabled())

    async with anyio.create_task_group() as group:
        group.start_soon(guarded)
        group.start_soon(other)
    assert sorted(seen) == [False, True]
    await guarded()
    assert is_grad_enabled()


@pytest.mark.anyio
async def test_a_decorated_asynchronous_generator_is_guarded_and_its_consumer_is_not():
    events = []

    @no_grad
    async def body():
        try:
            events.append(is_grad_enabled())
            try:
                received = yield "first"
            except KeyError:
                received = yield "caught"
            events.append((received, is_grad_enabled()))
        finally:
            events.append("closed")

    running = body()
    assert await anext(running) == "first"
    assert is_grad_enabled()
    assert await running.athrow(KeyError()) == "caught"
    with pytest.raises(StopAsyncIteration):
        await running.asend("sent")
    assert events == [False, ("sent", False), "closed"]

    events.clear()
    running = body()
    await anext(running)
    await running.aclose()
    assert events == [False, "closed"]


def test_a_thread_starts_with_gradients_on():
    seen = []
    with no_grad():
        thread = threading.Thread(target=lambda: seen.append(is_grad_enabled()))
        thread.start()
        thread.join()
    assert seen == [True]


def test_one_guard_object_serves_two_tasks_that_overlap():
    guard, seen = no_grad(), []

    async def main():
        first_in, second_in = asyncio.Event(), asyncio.Event()

        async def first():
            with guard:
                first_in.set()
                await second_in.wait()
            seen.append(is_grad_enabled())

        async def second():
            await first_in.wait()
            with guard:
                second_in.set()
                await asyncio.sleep(0)
                seen.append(is_grad_enabled())
            seen.append(is_grad_enabled())

        await asyncio.gather(first(), second())

    asyncio.run(main())
    assert sorted(seen) == [False, True, True]


def test_set_grad_enabled_switches_at_once_and_restores_as_a_block():
    set_grad_enabled(False)
    try:
        assert not is_grad_enabled()
        with set_grad_enabled(True):
            assert is_grad_enabled()
        assert not is_grad_enabled()
    finally:
        set_grad_enabled(True)
    assert is_grad_enabled()


def test_no_grad_restores_what_it_found_though_the_mode_was_set_inside():
    with no_grad():
        set_grad_enabled(True)
        assert is_grad_enabled()
    assert is_grad_enabled()
    with set_grad_enabled(False):
        with no_grad():
            set_grad_enabled(True)
        assert not is_grad_enabled()


def test_set_grad_enabled_takes_only_a_bool():
    with pytest.raises(TypeError, match="bool"):
        set_grad_enabled(1)
    assert is_grad_enabled()
