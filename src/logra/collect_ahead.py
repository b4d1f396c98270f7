# SPDX-License-Identifier: Apache-2.0
"""Batches drawn and graded while earlier ones are learned from, with weights that may lag by so many updates."""

import copy
import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from logra.collect import Batch, Collector, Group
from logra.engines.pool import EnginePool
from logra.parallel.processes import Processes
from logra.phases import Phases
from logra.rl.batch import Sample
from logra.rollout.engine import Prompt, Sampling


class Closed(RuntimeError):
    """The pool was closed while something waited for it."""


class AheadEngine:
    """Draws with weights that are at most `max_lag` updates older than those that the batch will train; in another
    thread than the main one.
    """

    def __init__(self, pool: EnginePool) -> None:
        self.pool = pool

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, update: int) -> list[Sample]:
        """All samples of all prompts, ordered by sample id.

        Raises:
            Closed: the run is over.
        """
        pool = self.pool
        ticket = pool.ask(prompts, sampling, update, pool.version_after(oldest(pool, update)))
        if not pool.wait_for(lambda: ticket.done):
            raise Closed
        return pool.result(ticket)


def oldest(pool: EnginePool, update: int) -> int:
    """The update after which the weights that draw a batch may have been current at the earliest."""
    return update - 1 - pool.settings.max_lag


@dataclass(frozen=True)
class _Ready:
    """A batch, or what went wrong; the state of the problems after it."""

    batch: Batch | None
    phases: Phases
    mixture: dict[str, Any]
    error: Exception | None = None


class AheadCollector:
    """Gives batches in order, one for each update, as `Collector` does.

    Args:
        collector: on an `AheadEngine`, of one process.
        pool: its engines.
        updates: how many batches there will be.
        processes: all get the batches; the first one draws them.
    """

    def __init__(self, collector: Collector, pool: EnginePool, updates: int, processes: Processes) -> None:
        self.collector, self.pool, self.updates, self.processes = collector, pool, updates, processes
        self._ready: queue.SimpleQueue[_Ready] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._groups: list[Group] = []
        self._mixture = copy.deepcopy(collector.mixture.state())

    def __call__(self, update: int, phases: Phases) -> Batch:
        """The batch of one update; its seconds of rollout and grading were spent meanwhile, those of waiting here."""
        if self._thread is None and self.processes.first:
            self._thread = threading.Thread(target=self._draw_all, args=(update,), daemon=True)
            self._thread.start()
        self.processes.notes(f"waiting for the batch of update {update}")
        with phases.phase("waiting"):
            self.pool.attend(lambda: not self._ready.empty())
        found = self.processes.of_first(self._next)
        self._mixture = found.mixture
        phases.seconds |= found.phases.seconds
        assert found.batch is not None
        return found.batch if not self._groups else replace(found.batch, groups=self._groups)

    def state(self) -> dict[str, Any]:
        """Of the problems, after the latest batch that was given."""
        return self._mixture

    def load(self, state: dict[str, Any]) -> None:
        """Go on from `state`; before the first batch."""
        if self._thread is None:
            self.collector.mixture.load(state)
        self._mixture = copy.deepcopy(state)

    def _next(self) -> _Ready:
        found = self._ready.get()
        if found.error is not None:
            raise found.error
        assert found.batch is not None
        if self.processes.count > 1:
            self._groups = found.batch.groups  # tasks and problems stay here
            return replace(found, batch=replace(found.batch, groups=[]))
        return found

    def _draw_all(self, first: int) -> None:
        for update in range(first, self.updates + 1):
            phases = Phases("cpu")  # the device's peaks are the main thread's
            if not self.pool.wait_for(partial(self._may_begin, update)):
                return
            try:
                batch = self.collector(update, phases)
            except Closed:
                return
            except Exception as error:
                self._enter(_Ready(None, phases, {}, error))
                return
            self._enter(_Ready(batch, phases, copy.deepcopy(self.collector.mixture.state())))

    def _may_begin(self, update: int) -> bool:
        return self.pool.updates_published >= oldest(self.pool, update)

    def _enter(self, found: _Ready) -> None:
        with self.pool.board.changed:
            self._ready.put(found)
            self.pool.board.changed.notify_all()
