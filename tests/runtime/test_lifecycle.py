"""The end of the interpreter and fork, each in a process of its own."""

import textwrap

import pytest

from strideweave.runtime import RuntimeStatistics, lifecycle

METHODS = ["fork", "spawn", "forkserver"]

# How the main thread ends with a request pending: source, exit code, last line of stderr.
ENDINGS = {
    "falls off": ("start(slow, 'finished')", 0, ""),
    "sys.exit": ("start(slow, 'finished'); sys.exit(3)", 3, ""),
    "raises": ("start(slow, 'finished'); raise ValueError('boom')", 1, "ValueError: boom"),
    "Ctrl-C in wait": (
        """
        entered = AwaitResult()
        async def interrupted():
            await anyio.sleep(0.05)  # the main thread is in wait(); too early would only move the interrupt
            os.kill(os.getpid(), signal.SIGINT)
            await slow("finished")
        start(interrupted).wait()
        """,
        -2,
        "KeyboardInterrupt",
    ),
    "non-daemon thread waits": (
        "handle = start(slow, 'finished'); threading.Thread(target=handle.wait).start()",
        0,
        "",
    ),
    "non-daemon thread starts later": (
        """
        scope.start(AwaitResult(), value, 1).wait()  # 3.12.1 starts no thread at the end
        def late():
            threading.main_thread().join()
            start(slow, "finished")
        threading.Thread(target=late).start()
        """,
        0,
        "",
    ),
    "requests start requests": (
        """
        async def parent(generation):
            await anyio.sleep(0.015)
            if generation == 5:  # more than there are hooks
                start(slow, "finished")
            else:
                scope.start(AwaitResult(), parent, generation + 1)  # and does not wait for it
        scope.start(AwaitResult(), parent, 1)
        """,
        0,
        "",
    ),
    "executor of asyncio": (
        """
        import asyncio
        async def foreign():
            await anyio.sleep(0.06)
            await asyncio.get_running_loop().run_in_executor(None, say, "finished")
        async def warm():
            await asyncio.get_running_loop().run_in_executor(None, int)
        scope.start(AwaitResult(), warm).wait()
        start(foreign)
        """,
        0,
        "",
    ),
    "os.fork child": (
        """
        scope.start(AwaitResult(), value, 1).wait()  # the parent has a runtime
        if os.fork():
            os.wait()
        else:
            start(slow, "finished")
        """,
        0,
        "",
    ),
}

# Requests that never end.
STUCK = {
    "in the loop": "start(anyio.sleep_forever)",
    "in a worker": "start(run_jobs, [lambda: time.sleep(1000)])",
    "blocking the loop": """
        async def block():
            time.sleep(1000)
        start(block)
        """,
    "with a daemon thread waiting": """
        handle = start(anyio.sleep_forever)
        threading.Thread(target=handle.wait, daemon=True).start()
        """,
    "with an asyncio daemon thread awaiting": """
        async def wait():
            await start(anyio.sleep_forever)
        threading.Thread(target=anyio.run, args=(wait,), daemon=True).start()
        while not scope.pending:
            time.sleep(0.001)
        """,
    "and swallowing its cancellation": """
        async def stubborn():
            while True:
                try:
                    await anyio.sleep_forever()
                except BaseException:
                    pass
        start(stubborn)
        """,
}


def in_child(method, body):
    """A program whose child process runs ``body``; the parent reports how the child ended."""
    return (
        "def child():\n"
        + textwrap.indent(textwrap.dedent(body), "    ")
        + textwrap.dedent(f"""
        if __name__ == "__main__":
            import multiprocessing
            process = multiprocessing.get_context({method!r}).Process(target=child)
            process.start()
            process.join()
            say("child", process.exitcode)
        """)
    )


def test_unfinished_requests_get_five_seconds():
    """Contract section 6: *at interpreter exit unfinished requests get up to five seconds*."""
    assert lifecycle.EXIT_SECONDS == 5.0


@pytest.mark.parametrize("ending", ENDINGS)
def test_pending_work_finishes_before_the_interpreter_ends(run_program, ending):
    """Issue text: *interpreter exit with work pending is clean and quiet*."""
    source, code, last_error = ENDINGS[ending]
    program = run_program(source)
    assert (program.lines, program.code) == (["finished", "cleanup"], code)
    assert program.errors.rstrip().rpartition("\n")[2] == last_error


@pytest.mark.parametrize("stuck", STUCK)
def test_a_stuck_request_is_dropped_quietly(run_program, stuck):
    """Contract section 6: *then are dropped quietly*; its cleanup runs once all the same."""
    program = run_program("lifecycle.EXIT_SECONDS = 0.05\n" + textwrap.dedent(STUCK[stuck]))
    assert (program.lines, program.errors, program.code) == (["cleanup"], "", 0)


@pytest.mark.parametrize("method", METHODS)
def test_pending_work_finishes_before_a_multiprocessing_child_ends(run_program, method):
    program = run_program(in_child(method, "start(slow, 'finished')"))
    assert (program.lines, program.errors) == (["finished", "cleanup", "child 0"], "")


@pytest.mark.parametrize("method", METHODS)
def test_a_stuck_request_is_dropped_quietly_in_a_multiprocessing_child(run_program, method):
    body = "lifecycle.EXIT_SECONDS = 0.05\nstart(run_jobs, [lambda: time.sleep(1000)])"
    program = run_program(in_child(method, body))
    assert (program.lines, program.errors) == (["cleanup", "child 0"], "")


@pytest.mark.parametrize("method", METHODS)
def test_a_thread_of_a_multiprocessing_child_may_start_work_after_its_main_thread(run_program, method):
    program = run_program(in_child(method, ENDINGS["non-daemon thread starts later"][0]))
    assert (program.lines, program.errors) == (["finished", "cleanup", "child 0"], "")


def test_a_request_that_had_its_time_gets_no_more_at_the_second_hook(run_program):
    """A request that non-daemon threads outlive is not dropped while they may still wait for it."""
    program = run_program(
        """
        lifecycle.EXIT_SECONDS = 0.01
        handle = start(slow, "finished")
        threading.Thread(target=lambda: say(handle.wait())).start()
        """
    )
    assert (program.lines, program.errors, program.code) == (["finished", "cleanup", "None"], "", 0)


def test_ctrl_c_during_the_wait_at_exit_drops_the_rest(run_program):
    program = run_program(
        """
        def interrupt():
            while not exit_hook_waits():
                time.sleep(0.001)
            while exit_hook_waits():  # a signal just before the thread falls asleep is heard only at the next
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.05)
        def exit_hook_waits():
            frame = sys._current_frames()[threading.main_thread().ident]
            while frame is not None:
                if frame.f_code.co_name == "_wait_for_requests":
                    return True
                frame = frame.f_back
            return False
        lifecycle.EXIT_SECONDS = 1000
        start(anyio.sleep_forever)
        threading.Thread(target=interrupt, daemon=True).start()
        """
    )
    assert (program.lines, program.errors, program.code) == (["cleanup"], "", 0)


def test_daemon_threads_that_keep_starting_requests_end_quietly(run_program):
    program = run_program(
        """
        lifecycle.EXIT_SECONDS = 1000  # they get none of it
        running = threading.Event()
        async def until(gate):
            await gate
        def stream():
            gate = AwaitResult()
            handle = scope.start(AwaitResult(), until, gate)
            while True:
                next_gate = AwaitResult()
                following = scope.start(AwaitResult(), until, next_gate)  # one is always pending
                gate._finish()
                handle.wait()
                gate, handle = next_gate, following
                running.set()
        for _ in range(3):
            threading.Thread(target=stream, daemon=True).start()
        running.wait()
        """
    )
    assert (program.lines, program.errors, program.code) == ([], "", 0)


def test_an_idle_runtime_ends_without_a_trace(run_program):
    """The loop is closed, its thread joined, its services closed, the last made first."""
    program = run_program(
        """
        class Service:
            def close(self):
                say("closed", type(self).__name__)
        class Other(Service):
            pass
        start(value, 1).wait()
        current_runtime().service(Service)
        current_runtime().service(Other)
        thread = current_runtime()._thread
        class AtTheVeryEnd:
            def __del__(self, say=say, thread=thread):
                say("thread alive:", thread.is_alive())
        end = AtTheVeryEnd()
        """
    )
    assert program.lines == ["cleanup", "closed Other", "closed Service", "thread alive: False"]
    assert (program.errors, program.code) == ("", 0)


def test_work_after_the_end_is_refused_and_leaves_nothing_pending(run_program):
    program = run_program(
        """
        import atexit
        def after():
            try:
                start(value, 1)
            except RuntimeError as error:
                say(error)
            say(scope.pending, dropped.done)
            try:
                dropped.wait()
            except RuntimeError as error:
                say(error)
        atexit.unregister(lifecycle.HOOKS.interpreter_ends)
        atexit.register(after)
        atexit.register(lifecycle.HOOKS.interpreter_ends)
        lifecycle.EXIT_SECONDS = 0.05
        dropped = start(anyio.sleep_forever)
        """
    )
    assert program.lines == [
        "cleanup",
        "the interpreter is exiting and the StrideWeave runtime has ended; no request can start",
        "0 True",
        "the request was dropped because the interpreter is exiting",
    ]
    assert (program.errors, program.code) == ("", 0)


def test_exit_handlers_registered_after_the_import_still_have_the_runtime(run_program):
    program = run_program(
        """
        import atexit
        scope.start(AwaitResult(), value, 1).wait()
        atexit.register(lambda: say(start(value, "late").wait()))
        """
    )
    assert (program.lines, program.errors, program.code) == (["cleanup", "late"], "", 0)


def test_importing_the_package_starts_nothing(run_program):
    """Issue text: *lazily started (nothing starts at import)*."""
    program = run_program(
        """
        say(threading.active_count(), statistics().running)
        s = TaskScope("idle")
        AwaitResult.completed(1).wait()
        s.close()
        say(threading.active_count(), statistics())
        """
    )
    assert program.lines[0] == "1 False"
    assert program.lines[1].startswith("1 RuntimeStatistics(running=False, scopes=0")
    assert (program.errors, program.code) == ("", 0)


FORK = """
def in_fork(body):
    pid = os.fork()
    if pid == 0:
        body()
        sys.exit()
    say("exit code", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_a_forked_child_fails_inherited_handles_and_starts_its_own_runtime(run_program):
    """Contract and issue: *a forked child starts its own runtime*; the parent's request is not disturbed."""
    program = run_program(
        FORK
        + textwrap.dedent("""
        gate = AwaitResult()
        async def held():
            await gate
            return "parent's value"
        parent = os.getpid()
        def clean_up():
            say("cleanup in", "parent" if os.getpid() == parent else "child")
        handle = scope.start(AwaitResult(), held, cleanup=clean_up)
        def child():
            say(handle.done, scope.pending, statistics())
            for _ in range(2):
                try:
                    handle.wait()
                except RuntimeError as error:
                    say(error)
            say(start(value, "child's value").wait(), statistics().finished)
            scope.close()
        in_fork(child)
        say(handle.done, scope.pending)
        gate._finish()
        say(handle.wait())
        """)
    )
    message = "the request was started before fork() and runs in the parent; start it again in the child"
    assert program.lines == [
        "cleanup in child",
        f"True 0 {RuntimeStatistics()}",
        message,
        message,
        "cleanup",
        "child's value 1",
        "exit code 0",
        "False 1",
        "cleanup in parent",
        "parent's value",
    ]
    assert (program.errors, program.code) == ("", 0)


def test_a_request_may_fork_and_its_child_may_wait(run_program):
    """The child's only thread is a copy of the runtime thread, and an ordinary thread now."""
    program = run_program(
        """
        async def forking():
            pid = os.fork()
            if pid == 0:
                say(start(value, "child").wait())
                os._exit(0)
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        say(scope.start(AwaitResult(), forking).wait())
        """
    )
    assert (program.lines, program.errors, program.code) == (["cleanup", "child", "0"], "", 0)


def test_forks_while_threads_start_requests_never_hang_and_never_disturb_the_parent(run_program):
    program = run_program(
        FORK
        + textwrap.dedent("""
        sys.setswitchinterval(1e-5)
        stop = threading.Event()
        counts = [0, 0]
        def stream(i):
            mine = TaskScope("stream")
            while not stop.is_set():
                mine.start(AwaitResult(), value, 1, cleanup=lambda: None).wait()
                counts[i] += 1
        threads = [threading.Thread(target=stream, args=(i,)) for i in range(len(counts))]
        for thread in threads:
            thread.start()
        for _ in range(12):
            before = list(counts)
            pid = os.fork()
            if pid == 0:
                os._exit(scope.start(AwaitResult(), value, 7).wait())
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
            while any(now == then for now, then in zip(counts, before)):
                time.sleep(0.001)
        stop.set()
        for thread in threads:
            thread.join()
        say(statistics().pending)
        """)
    )
    assert (program.lines, program.errors, program.code) == (["0"], "", 0)


def test_a_signal_handler_that_starts_the_first_request_while_the_loop_starts_leaves_one_loop(run_program):
    program = run_program(
        """
        import signal
        from strideweave.runtime import event_loop
        launch, handles = event_loop.EventLoop.launch, []
        def launch_interrupted(loop):
            if not handles:
                handles.append(AwaitResult())
                signal.raise_signal(signal.SIGUSR1)
            launch(loop)
        def handler(*_):
            scope.start(handles[0], value, "of the handler")
        signal.signal(signal.SIGUSR1, handler)
        event_loop.EventLoop.launch = launch_interrupted
        say(scope.start(AwaitResult(), value, "of the main thread", cleanup=lambda: None).wait(), handles[0].wait())
        def loops():
            return [thread for thread in threading.enumerate() if thread.name == "strideweave-runtime"]
        while len(loops()) > 1:
            time.sleep(0.001)
        say(statistics().finished)
        """
    )
    assert sorted(program.lines) == ["2", "of the main thread of the handler"]
    assert (program.errors, program.code) == ("", 0)


def test_ctrl_c_while_a_fork_waits_for_a_lock_leaves_all_of_them_free_on_both_sides(run_program):
    """What a hook before a fork raises is printed and forgotten, and the fork goes on, without that lock."""
    program = run_program(
        FORK
        + textwrap.dedent("""
        import signal
        from strideweave.runtime.locks import settling_lock, short_lock
        from strideweave.runtime.event_loop import process
        sys.unraisablehook = lambda unraisable: say("forgotten:", unraisable.exc_type.__name__)
        start(value, 0).wait()
        def interrupt(*_):
            raise KeyboardInterrupt
        signal.signal(signal.SIGALRM, interrupt)
        for lock in (settling_lock, short_lock, process.starting):
            held, let_go = threading.Event(), threading.Event()
            def hold():
                with lock:
                    held.set()
                    let_go.wait()
            holder = threading.Thread(target=hold)
            holder.start()
            held.wait()
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            pid = os.fork()
            if pid == 0:
                os._exit(scope.start(AwaitResult(), value, 7, cleanup=lambda: None).wait())
            let_go.set()
            holder.join()
            say(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            def take_all():
                for one in (settling_lock, short_lock, process.starting):
                    with one:
                        pass
                say("all free")
            taker = threading.Thread(target=take_all)
            taker.start()
            taker.join()
            say(scope.start(AwaitResult(), value, 5, cleanup=lambda: None).wait())
        """)
    )
    # A lock that was not taken cannot be given back, on neither side.
    once = ["forgotten: KeyboardInterrupt", *["forgotten: RuntimeError"] * 2, "7", "all free", "5"]
    assert (program.lines, program.errors, program.code) == (["cleanup", *once * 3], "", 0)


def test_a_pool_of_forked_children_uses_inherited_scopes(run_program):
    program = run_program(
        """
        def task(x):
            return scope.start(AwaitResult(), value, x).wait()
        say(task(0))
        import multiprocessing
        with multiprocessing.get_context("fork").Pool(2) as pool:
            say(sum(pool.map(task, range(20))))
        """
    )
    assert (program.lines, program.errors, program.code) == (["0", "190"], "", 0)


def test_services_belong_to_one_process(run_program):
    program = run_program(
        FORK
        + textwrap.dedent("""
        class Service:
            def __init__(self): self.pid = os.getpid()
            def close(self): say("closed by its owner:", self.pid == os.getpid())
        mine = current_runtime().service(Service)
        say(current_runtime().service(Service) is mine)
        in_fork(lambda: say(current_runtime().service(Service).pid == os.getpid()))
        """)
    )
    assert program.lines == [
        "True",
        "True",
        "closed by its owner: True",
        "exit code 0",
        "closed by its owner: True",
    ]
    assert (program.errors, program.code) == ("", 0)
