"""Requests that end in the loop without a task: as those that take one, for everybody who looks."""

import threading

import pytest

from strideweave.runtime import AwaitResult, current_runtime

pytestmark = pytest.mark.anyio


class Watched:
    """A request in both forms, and what became of each."""

    def __init__(self, answer=None):
        self.answer = answer
        self.threads = []
        self.tasks = 0
        self.cleanups = 0

    def at_once(self):
        self.threads.append(threading.current_thread().name)
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer

    async def run(self):
        self.tasks += 1
        return "from a task"

    def start(self, scope):
        return scope.start(AwaitResult(), self.run, cleanup=self.clean_up, at_once=self.at_once)

    def clean_up(self):
        self.cleanups += 1


async def test_a_value_ends_the_request_without_a_task(scope):
    request = Watched("at once")
    handle = request.start(scope)
    assert await handle == "at once"
    assert handle.wait() == "at once"
    assert (request.tasks, request.cleanups, scope.pending) == (0, 1, 0)


def test_it_runs_in_the_runtime_thread_and_not_in_the_callers(scope):
    request = Watched("at once")
    request.start(scope).wait()
    assert request.threads == ["strideweave-runtime"]


async def test_none_takes_a_task(scope):
    request = Watched(None)
    assert await request.start(scope) == "from a task"
    assert (len(request.threads), request.tasks, request.cleanups) == (1, 1, 1)


@pytest.mark.parametrize("kind", [OSError, KeyboardInterrupt])
def test_an_exception_ends_the_request_with_that_object(scope, kind):
    error = kind("no luck")
    request = Watched(error)
    handle = request.start(scope)
    for _ in range(2):
        with pytest.raises(kind) as caught:
            handle.wait()
        assert caught.value is error
    assert (request.tasks, request.cleanups, scope.statistics().failed) == (0, 1, 1)
    assert Watched("alive").start(scope).wait() == "alive"


def test_a_scope_of_nothing_but_such_requests_closes_and_leaves_the_loop(scope):
    for _ in range(3):
        Watched("at once").start(scope).wait()
    scope.close()
    assert scope.statistics().finished == 3
    for _ in range(8):  # the host of the group ends some turns of the loop later
        done = threading.Event()
        current_runtime().post(done.set)
        done.wait()
    assert scope not in current_runtime().scopes


async def test_requests_in_both_forms_share_a_scope(scope, make_gate):
    gate = make_gate()
    slow = scope.start(AwaitResult(), gate.hold, 1)
    gate.entered.wait()
    assert await Watched("overtakes").start(scope) == "overtakes"
    assert not slow.done
    gate.open()
    assert await slow == 1
