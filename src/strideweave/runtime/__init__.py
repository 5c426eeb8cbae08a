"""The only room that knows about threads, loops and cancellation: the one loop and the requests in it."""

from strideweave.runtime.await_result import AwaitResult
from strideweave.runtime.event_loop import EventLoop, RuntimeStatistics, current_runtime, statistics
from strideweave.runtime.lifecycle import install_hooks
from strideweave.runtime.locks import short_lock
from strideweave.runtime.task_scope import ScopeStatistics, TaskScope
from strideweave.runtime.workers import INLINE_BYTES, WorkerPool, run_jobs, worker_count

__all__ = [
    "INLINE_BYTES",
    "AwaitResult",
    "EventLoop",
    "RuntimeStatistics",
    "ScopeStatistics",
    "TaskScope",
    "WorkerPool",
    "current_runtime",
    "run_jobs",
    "short_lock",
    "statistics",
    "worker_count",
]

install_hooks()
