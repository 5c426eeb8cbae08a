"""Run sessions of nox side by side, as many at a time as there are processors: side_by_side.py tests lint types.

Each session of a name (``tests`` has one for every Python) is a nox of its own. What it says is kept in ``.nox``
and printed when it has ended. Exits with 1 where any has failed; an interruption ends all of them.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

NOX = (sys.executable, "-m", "nox")
KEPT = Path(".nox")
GRACE = 10  # seconds in which an interrupted session may put things away


async def run(session: str, free: asyncio.Semaphore) -> str:
    """Run one session when a processor is free for it, and print what it said.

    Returns:
        nox's word for how it ended: success, skipped, failed or aborted.
    """
    output, report = KEPT / f"{session}.log", KEPT / f"{session}.json"
    async with free:
        print(f"{session}: started, see {output}", flush=True)
        report.unlink(missing_ok=True)
        started = time.monotonic()
        with output.open("wb") as file:
            process = await asyncio.create_subprocess_exec(
                *NOX, "-s", session, "--report", str(report), stdout=file, stderr=file, start_new_session=True
            )
            try:
                await process.wait()
            finally:
                await end(process)
        took = time.monotonic() - started
    reported = json.loads(report.read_text("utf-8"))["sessions"] if report.exists() else []
    how = reported[0]["result"] if reported else "failed"
    print(f"\n===== {session} =====\n{output.read_text('utf-8', 'replace')}", flush=True)
    return f"{how} after {took:.0f} s"


async def end(process: asyncio.subprocess.Process) -> None:
    """End a session that is running still, with all that it has started."""
    if process.returncode is not None:
        return
    os.killpg(process.pid, signal.SIGINT)
    with suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), GRACE)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


async def list_sessions(names: list[str]) -> list[str]:
    """Every session of these names, in the order in which nox would run them."""
    listing = await asyncio.create_subprocess_exec(
        *NOX, "--list", "--json", "-s", *names, stdout=subprocess.PIPE
    )
    said, _ = await listing.communicate()
    if listing.returncode:
        sys.exit(listing.returncode)
    return [entry["session"] for entry in json.loads(said)]


async def main(names: list[str]) -> int:
    """Run every session of these names and print how each ended."""
    this = asyncio.current_task()
    assert this is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this.cancel)
    sessions = await list_sessions(names)
    free = asyncio.Semaphore(os.cpu_count() or 1)
    async with asyncio.TaskGroup() as group:
        running = [group.create_task(run(session, free)) for session in sessions]
    ends = [task.result() for task in running]
    print("===== all =====")
    for session, how in zip(sessions, ends, strict=True):
        print(f"{session}: {how}")
    return int(not all(how.startswith(("success", "skipped")) for how in ends))


if __name__ == "__main__":
    try:
        sys.exit(asyncio.run(main(sys.argv[1:])))
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.exit("interrupted: every session has been ended")
