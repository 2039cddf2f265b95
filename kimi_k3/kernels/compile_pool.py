"""Processes that do jobs one at a time, each within a limit: a job that hangs or kills its process is named, not waited
for.

A standard process pool waits for ever when a worker does, and loses every job of a worker that dies.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection, get_context
from typing import Any, Generic, TypeVar

Job = TypeVar("Job")
Result = TypeVar("Result")

START_S = 120.0  #: for a new process's imports, at least

_SPAWN = get_context("spawn")


def _serve(work: Callable[[Any], Any], pipe: connection.Connection) -> None:
    """A process: jobs in, results out, until None. The first message says that its imports are done."""
    pipe.send(None)
    while (job := pipe.recv()) is not None:
        pipe.send(work(job[0]))


@dataclass(eq=False)
class _Worker(Generic[Job]):
    work: Callable[[Job], Any]
    job: Job | None = None  #: None: still importing
    since: float = field(default_factory=time.monotonic)
    process: Any = field(init=False)
    pipe: connection.Connection = field(init=False)

    def __post_init__(self) -> None:
        self.pipe, far = _SPAWN.Pipe()
        self.process = _SPAWN.Process(target=_serve, args=(self.work, far), daemon=True)
        self.process.start()
        far.close()

    def give(self, job: Job) -> None:
        self.job, self.since = job, time.monotonic()
        self.pipe.send((job,))

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def run(
    jobs: Sequence[Job],
    work: Callable[[Job], Result],
    processes: int,
    limit_s: float,
    lost: Callable[[Job, str], Result],
) -> Iterator[tuple[Job, Result]]:
    """(job, ``work(job)``) as they finish; ``lost(job, reason)`` for jobs over ``limit_s`` or whose process died.

    ``work`` must be importable by name in a new process, and should not raise: that ends its process. Raises
    RuntimeError when a process does not even start.
    """
    todo = list(reversed(jobs))
    workers = [_Worker(work) for _ in range(min(processes, len(jobs)))]
    try:
        while workers:
            ready = connection.wait([w.pipe for w in workers], timeout=0.5)
            for worker in list(workers):
                reason = ""
                if worker.pipe in ready:
                    try:
                        result = worker.pipe.recv()
                    except EOFError:
                        worker.process.join()
                        reason = f"its process died, exit code {worker.process.exitcode}"
                    else:
                        if worker.job is not None:
                            yield worker.job, result
                        if todo:
                            worker.give(todo.pop())
                        else:
                            workers.remove(worker)
                            worker.stop()
                elif time.monotonic() - worker.since > (
                    limit := limit_s if worker.job is not None else max(limit_s, START_S)
                ):
                    reason = f"not finished in {limit:g} s"
                if reason:
                    workers.remove(worker)
                    worker.stop()
                    if worker.job is None:
                        raise RuntimeError(f"a process for {work.__module__} cannot start: {reason}")
                    yield worker.job, lost(worker.job, reason)
                    if todo:
                        workers.append(_Worker(work))
    finally:
        for worker in workers:
            worker.stop()
