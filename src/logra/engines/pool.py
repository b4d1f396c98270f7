# SPDX-License-Identifier: Apache-2.0
"""All engines of a run as one: prompts are spread over them, each update goes to all, and one that falls out is
started again, brought to the present weights, or left out.

Each engine has a thread, which asks it one thing at a time: to merge the next message, or to draw a part of the
prompts. Weights are read by the main thread alone, in `attend`: it gives the full state to engines that want it, while
it waits for something else anyway. With several trainer processes all of them call `start`, `stepped`, `publish`,
`generate` and `attend`; the first one has the engines.
"""

import bisect
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from logra.engines.engine import Board, Engine, EngineLink, Part, State, Ticket
from logra.engines.places import Kept
from logra.engines.probing import back_at, moved_by
from logra.engines.requests import Request
from logra.parallel.processes import Processes
from logra.rl.batch import Sample
from logra.rollout.engine import Prompt, Sampling
from logra.scale_settings import EngineSettings
from logra.sync.sender import Pending, Sender, Source, SyncLost, SyncReport, Trouble, every

_PAUSE_SECONDS = 5.0  # after which processes that wait for the first one hear of it
_JUDGED_PARTS = 3
_MOST_PENDING = 8  # messages that wait for one engine; beyond them all weights are less


class EnginePool:
    """A `RolloutEngine` of several.

    Args:
        source: of the weights.
        engines: link and place of each; empty but in the first process.
        settings: of the section `engines`.
        processes: that hold the weights.
    """

    def __init__(
        self,
        source: Source,
        engines: Sequence[tuple[EngineLink, Kept]],
        settings: EngineSettings,
        processes: Processes | None = None,
    ) -> None:
        self.source, self.settings, self.processes = source, settings, processes or Processes()
        links = [link for link, _ in engines]
        self.sender = Sender(source, links, settings.sync_timeout, settings.full_every, self.processes)
        self.board, self.places = Board(), [place for _, place in engines]
        common = (self.sender.deliver, self._update_of, settings)
        self.engines = [Engine(link, place.renew, self.board, *common) for link, place in engines]
        self.report = SyncReport(0)
        self._fresh: list[Pending] = []
        self._patch_bytes, self._since = 0, time.perf_counter()
        self._first_update, self._versions = 0, [0]  # after each update from the first on

    # Called by all processes

    def start(self, update: int, prompt_ids: Sequence[int]) -> None:
        """Bring all engines up and to the present weights, and see that a change arrives.

        Args:
            update: updates done so far.
            prompt_ids: some prompt, to look at log-probabilities.

        Raises:
            SyncLost: an engine cannot be started or does not come to the weights; says why.
        """
        self._first_update, self._versions = update, [self.source.version]
        for engine in self.engines:
            engine.start()
        self.attend(self._up)
        self.processes.of_first(self._all_or_none)
        if self.settings.probe:
            forced = self.source.forced()
            before = self.processes.of_first(lambda: self._probed(prompt_ids, forced))
            self.attend(self._up)
            self.processes.of_first(lambda: self._compared(prompt_ids, before))
        self.board.notices.clear()
        self.report, self._since = SyncReport(self.source.version), time.perf_counter()

    def stepped(self) -> None:
        """After each weight change, before the next."""
        pending = self.sender.take()
        if pending is not None:
            self._fresh.append(pending)
            self._patch_bytes += self.source.patch_bytes()

    def publish(self) -> None:
        """After an update: send what changed. Synchronous runs wait until all engines that are up have it."""
        fresh, self._fresh = self._fresh, []
        with self.board.changed:
            self._versions.append(self.source.version)
            self.report.bytes += sum(len(each.data) for each in fresh)
            due = any(self.sender.is_due(each) for each in fresh)
            for engine in self.engines:
                if engine.state == State.READY and (due or len(engine.pending) + len(fresh) > _MOST_PENDING):
                    engine.state, engine.why = State.WANTS, "due" if due else "it is many messages behind"
                    engine.pending.clear()
                elif engine.state == State.READY:
                    engine.pending.extend(fresh)
            self.board.changed.notify_all()
        self.attend(self._settled if self.settings.max_lag == 0 else lambda: True)

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, update: int) -> list[Sample]:
        """All samples of all prompts with the present weights, ordered by sample id."""
        tickets = [self.ask(prompts, sampling, update, self.source.version)] if self.processes.first else []
        self.attend(lambda: tickets[0].done)
        return self.processes.of_first(lambda: self.result(tickets[0]))

    def attend(self, until: Callable[[], bool]) -> None:
        """Give engines that want it the full state, until something is so (asked of the first process alone).

        Raises:
            SyncLost: no engine is left.
        """
        while True:
            places = self.processes.of_first(lambda: self._wanting(until))
            if places is None:
                continue
            if not places:
                return
            wrong = self.sender.give_full(places, self.report)
            if self.processes.first:
                self._enter(places, wrong)

    # Of the first process

    def ask(self, prompts: Sequence[Prompt], sampling: Sampling, update: int, version: int) -> Ticket:
        """Spread prompts over the engines; evaluations come first.

        Args:
            prompts: whole groups.
            sampling: of all of them.
            update: keys random numbers.
            version: that the weights must have at least.
        """
        with self.board.changed:
            live = sum(engine.state != State.RETIRED for engine in self.engines)
            size = -(-len(prompts) // max(1, live))
            groups = [tuple(prompts[first : first + size]) for first in range(0, len(prompts), size)]
            ticket = Ticket(len(groups))
            parts = [Part(Request(each, sampling, update), version, ticket) for each in groups]
            if sampling.purpose == "evaluation":
                self.board.parts.extendleft(reversed(parts))
            else:
                self.board.parts.extend(parts)
            self.board.changed.notify_all()
        return ticket

    def wait_for(self, until: Callable[[], bool]) -> bool:
        """In another thread than the main one: wait until something is so; False once the pool closes."""
        with self.board.changed:
            while not until() and not self.board.closing:
                self.board.changed.wait()
            return not self.board.closing

    def result(self, ticket: Ticket) -> list[Sample]:
        """What came, ordered by sample id.

        Raises:
            ValueError: an engine could not.
        """
        if ticket.error is not None:
            raise ValueError(ticket.error)
        return sorted(ticket.samples, key=lambda sample: sample.sample_id)

    @property
    def updates_published(self) -> int:
        """Updates done, as far as engines were told."""
        return self._first_update + len(self._versions) - 1

    def version_after(self, update: int) -> int:
        """That weights had after an update, or at start for earlier ones."""
        return self._versions[max(0, update - self._first_update)]

    def notices(self) -> list[str]:
        """What happened to engines since the last call, in words."""
        with self.board.changed:
            found, self.board.notices = self.board.notices, []
        return found

    def metrics(self) -> dict[str, Any]:
        """Of the time since the last call; empty but in the first process."""
        if not self.processes.first:
            return {}
        now = time.perf_counter()
        with self.board.changed:
            live = [engine for engine in self.engines if engine.state != State.RETIRED]
            drawing = sum(engine.drawing_seconds for engine in live)
            sync = {
                "message_bytes": self.report.bytes,
                "weights_bytes": self.source.weights_bytes,
                "patch_bytes": self._patch_bytes,
                "full_states": len(self.report.full),
                "full_state_bytes": self.report.full_bytes,
                "merge_seconds": max((engine.merging_seconds for engine in live), default=0.0),
            }
            engines = {
                "live": len(live),
                "utilisation": drawing / max(1e-9, (now - self._since) * len(live)),
                "queue": len(self.board.parts),
            }
            for engine in self.engines:
                engine.drawing_seconds = engine.merging_seconds = 0.0
        self.report, self._patch_bytes, self._since = SyncReport(self.source.version), 0, now
        self._judge()
        return {"sync": sync, "engines": engines}

    def close(self) -> None:
        """End everything that was started."""
        with self.board.changed:
            self.board.closing = True
            self.board.changed.notify_all()
        every(self.places, lambda place: place.end())
        for engine in self.engines:
            engine.link.close()

    def _wanting(self, until: Callable[[], bool]) -> list[int] | None:
        """Engines that want the full state; none once `until` is so; None if neither for a while."""
        deadline = time.monotonic() + _PAUSE_SECONDS
        with self.board.changed:
            while time.monotonic() < deadline:
                wants = [
                    place
                    for place, engine in enumerate(self.engines)
                    if engine.state == State.WANTS and not engine.working
                ]
                if wants:
                    return wants
                if all(engine.state == State.RETIRED for engine in self.engines):
                    raise SyncLost(f"no engine is left. {self._what_happened()}")
                if until():
                    return []
                self.board.changed.wait(_PAUSE_SECONDS)
        return None

    def _enter(self, places: Sequence[int], wrong: dict[int, Trouble]) -> None:
        for place in places:
            engine = self.engines[place]
            self.report.full[engine.link.name] = engine.why
            if place in wrong:
                engine.fails(wrong[place].why, anew=wrong[place].late)
                continue
            with self.board.changed:
                engine.state, engine.version = State.READY, self.source.version
                engine.pending.clear()
                self.board.changed.notify_all()

    def _up(self) -> bool:
        """Whether every engine is ready with the present weights, or left out."""
        return all(engine.state == State.RETIRED or _rests(engine) for engine in self.engines)

    def _settled(self) -> bool:
        """The same, but for those that are started again meanwhile."""
        return all(engine.state in (State.RETIRED, State.STARTING) or _rests(engine) for engine in self.engines)

    def _all_or_none(self) -> None:
        """A run begins with all its engines."""
        if any(engine.state == State.RETIRED for engine in self.engines):
            raise SyncLost(self._what_happened())

    def _what_happened(self) -> str:
        found = [f"{engine.link.name}: {engine.why}" for engine in self.engines if engine.state == State.RETIRED]
        return "Engines were left out: " + "; ".join(found)

    def _probed(self, prompt_ids: Sequence[int], forced: bytes) -> list[list[float]]:
        """Log-probabilities before a change of all weights, which must move them."""
        seconds = self.settings.sync_timeout
        before = every(self.engines, lambda engine: moved_by(engine.link, prompt_ids, forced, seconds))
        for engine in self.engines:
            with self.board.changed:
                engine.state, engine.why = State.WANTS, "the probe"
        return before

    def _compared(self, prompt_ids: Sequence[int], before: list[list[float]]) -> None:
        for engine, logprobs in zip(self.engines, before, strict=True):
            back_at(engine.link, prompt_ids, logprobs, self.settings.sync_timeout)

    def _judge(self) -> None:
        """Leave out an engine that is much slower than the others."""
        judged = [e for e in self.engines if e.state == State.READY and e.parts_drawn >= _JUDGED_PARTS]
        for engine in judged:
            others = [each.speed for each in judged if each is not engine]
            limit = self.settings.retire_below * statistics.median(others) if others else 0.0
            if engine.speed < limit:
                engine.retire(f"it draws {engine.speed:.1f} tokens/s, the others {statistics.median(others):.1f}")
                return

    def _update_of(self, version: int) -> int:
        """The latest update after which a version was current."""
        return self._first_update + max(0, bisect.bisect_right(self._versions, version) - 1)


def _rests(engine: Engine) -> bool:
    return engine.state == State.READY and not engine.pending and not engine.working
