# SPDX-License-Identifier: Apache-2.0
"""Grading in processes that can be killed: as many as cores, each with one request at a time.

The clock of a request starts when it is handed to an idle process, so neither waiting in line nor starting a process
counts as grading. A process that does not answer in time is killed and another is started when needed.
"""

import contextlib
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, Literal

START_SECONDS = 120.0


@dataclass(frozen=True)
class Limits:
    """Of one request, but for memory, which is of the process.

    Attributes:
        wall_seconds: until it is killed.
        cpu_seconds: of processor time, likewise.
        memory_bytes: address space; 0 means no limit.
    """

    wall_seconds: float = 10.0
    cpu_seconds: int = 10
    memory_bytes: int = 4 << 30


@dataclass(frozen=True)
class Answer:
    """What became of a request.

    Attributes:
        status: "done", "raised" (its function did), "timed_out", or "crashed" (memory, a signal, exit).
        value: of a request that is done.
        message: why not.
        trace: of what was raised.
    """

    status: Literal["done", "raised", "timed_out", "crashed"]
    value: Any = None
    message: str = ""
    trace: str = ""


class _Worker:
    """One process and the pipe to it."""

    def __init__(self, job: str, limits: Limits) -> None:
        self.pipe, theirs = Pipe()
        arguments = [str(theirs.fileno()), job, str(limits.memory_bytes), str(limits.cpu_seconds)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "logra.tasks.worker", *arguments],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        theirs.close()
        self.deadline = time.monotonic() + START_SECONDS
        self.is_ready = False
        self.request = -1

    def kill(self) -> int:
        """End it; returns its exit code."""
        self.process.kill()
        self.pipe.close()
        return self.process.wait()


class WorkerPool:
    """Answers requests in processes; usable from any thread, one call at a time.

    Args:
        job: what the processes do; see `logra.tasks.worker.make_handler`.
        limits: of each request.
        workers: at most so many processes; 0: as many as cores, divided among the processes of a run.

    Raises:
        ValueError: the job cannot be loaded; the message says why.
    """

    def __init__(self, job: str, limits: Limits | None = None, workers: int = 0) -> None:
        self.job, self.limits = job, limits or Limits()
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.workers = workers or max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        self.killed = 0
        self._idle: list[_Worker] = []
        self._lock = threading.Lock()
        self._finalizer = weakref.finalize(self, _end, self._idle)

    def start(self) -> None:
        """Start one process now, so that a job that cannot be loaded is found out."""
        with self._lock:
            if not self._idle:
                worker = _Worker(self.job, self.limits)
                try:
                    self._await_start(worker)
                except BaseException:
                    worker.kill()
                    raise
                self._idle.append(worker)

    def map(self, requests: Sequence[Any]) -> list[Answer]:
        """One answer for each request, in their order."""
        with self._lock:
            answers: dict[int, Answer] = {}
            waiting = list(range(len(requests)))[::-1]
            busy: dict[Connection, _Worker] = {}
            try:
                while len(answers) < len(requests):
                    while waiting and len(busy) < self.workers:
                        worker = self._take()
                        busy[worker.pipe] = worker
                        worker.request = waiting.pop()
                        if worker.is_ready:
                            self._hand(worker, requests)
                    self._gather(busy, requests, answers)
            finally:
                # Only if something was raised here, such as Ctrl-C: their answers would come to the wrong request.
                for worker in busy.values():
                    worker.kill()
            return [answers[index] for index in range(len(requests))]

    def close(self) -> None:
        """End all processes; the next call starts others."""
        with self._lock:
            _end(self._idle)

    def _take(self) -> _Worker:
        """A process that is alive, or a new one, which says when it is ready."""
        while self._idle:
            worker = self._idle.pop()
            if worker.process.poll() is None:
                return worker
            worker.kill()  # ended from outside while it was idle
        return _Worker(self.job, self.limits)

    def _hand(self, worker: _Worker, requests: Sequence[Any]) -> None:
        """The clock of a request starts here."""
        worker.deadline = time.monotonic() + self.limits.wall_seconds
        with contextlib.suppress(OSError):  # it ended meanwhile: `_gather` sees the end of its pipe
            worker.pipe.send(requests[worker.request])

    def _gather(self, busy: dict[Connection, _Worker], requests: Sequence[Any], answers: dict[int, Answer]) -> None:
        """Take what has been answered, hand requests to processes that have started, kill what is late."""
        soonest = min(worker.deadline for worker in busy.values())
        ready = wait(list(busy), timeout=max(0.0, soonest - time.monotonic()))
        for pipe in [each for each in ready if isinstance(each, Connection)]:
            worker = busy[pipe]
            if not worker.is_ready:
                self._await_start(worker)
                self._hand(worker, requests)
                continue
            del busy[pipe]
            try:
                status, *rest = pipe.recv()
            except (EOFError, OSError):
                answers[worker.request] = self._ended(worker)
                continue
            if status == "done":
                answers[worker.request] = Answer("done", rest[0])
            elif status == "raised":
                answers[worker.request] = Answer("raised", None, *rest)
            else:
                answers[worker.request] = Answer("crashed", None, rest[0])
            self._idle.append(worker)
        for pipe, worker in list(busy.items()):
            if time.monotonic() >= worker.deadline and not pipe.poll():
                if not worker.is_ready:
                    raise ValueError(f"a grading process did not start within {START_SECONDS:.0f} s")
                del busy[pipe]
                worker.kill()
                self.killed += 1
                answers[worker.request] = Answer("timed_out", None, f"no answer in {self.limits.wall_seconds} s")

    def _await_start(self, worker: _Worker) -> None:
        """Take a process's first word.

        Raises:
            ValueError: it could not load its job, ended, or says nothing.
        """
        if not worker.pipe.poll(max(0.0, worker.deadline - time.monotonic())):
            raise ValueError(f"a grading process did not start within {START_SECONDS:.0f} s")
        try:
            status, message = worker.pipe.recv()
        except (EOFError, OSError) as error:
            raise ValueError(f"a grading process ended with exit code {worker.kill()} while it started") from error
        if status != "ready":
            raise ValueError(message)
        worker.is_ready = True

    def _ended(self, worker: _Worker) -> Answer:
        try:
            code = worker.process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            code = 0
        worker.kill()
        self.killed += 1
        if code == -24:  # SIGXCPU
            return Answer("timed_out", None, f"more than {self.limits.cpu_seconds} s of CPU time")
        return Answer("crashed", None, f"the process ended with exit code {code}")


def _end(workers: list[_Worker]) -> None:
    while workers:
        workers.pop().kill()
