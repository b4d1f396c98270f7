# SPDX-License-Identifier: Apache-2.0
"""One engine as the pool sees it: a thread that asks it one thing at a time, and what it went through."""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Protocol

from logra.engines.requests import Completions, Request
from logra.rl.batch import Sample
from logra.scale_settings import EngineSettings
from logra.sync.sender import Link, Pending, Trouble

PART_TRIES = 4
_PAUSE_SECONDS = 1.0


class EngineLink(Link, Protocol):
    """A link that can wait for an engine to come up, and drop it."""

    def reach(self, seconds: float) -> None:
        """Connect; what is there may have to be started first.

        Raises:
            OSError: that is not possible in time.
        """
        ...

    def close(self) -> None:
        """Drop the connection."""
        ...


class State(Enum):
    """Of an engine."""

    STARTING = "starting"
    WANTS = "waiting for the full state"
    READY = "ready"
    RETIRED = "left out"


@dataclass
class Ticket:
    """Prompts that were asked for, and what has come of them.

    Attributes:
        left: parts that are not done.
        samples: of those that are.
        error: why they will never be, or None.
    """

    left: int
    samples: list[Sample] = field(default_factory=list)
    error: str | None = None

    @property
    def done(self) -> bool:
        """Whether nothing more will come."""
        return self.left == 0 or self.error is not None


@dataclass(frozen=True)
class Part:
    """Some prompts for one engine.

    Attributes:
        request: what it is asked.
        version: that its weights must have at least.
        ticket: that it is a part of.
        tries: engines that failed on it.
    """

    request: Request
    version: int
    ticket: Ticket
    tries: int = 0


class Board:
    """What engines and pool share; everything on it, and every engine's fields, change under `changed`.

    Attributes:
        changed: told of every change.
        parts: that wait for an engine.
        notices: for the user.
        closing: whether all is over.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.parts: deque[Part] = deque()
        self.notices: list[str] = []
        self.closing = False


class Engine(threading.Thread):
    """Asks one engine.

    Args:
        link: to it.
        renew: gives up its process, so that the next connection is to a new one.
        board: of all engines.
        deliver: sends it a message; what is wrong, or None.
        update_of: the update after which a version was current.
        settings: time-outs, and how often it may fail.
    """

    def __init__(
        self,
        link: EngineLink,
        renew: Callable[[], None],
        board: Board,
        deliver: Callable[[Link, Pending], Trouble | None],
        update_of: Callable[[int], int],
        settings: EngineSettings,
    ) -> None:
        super().__init__(name=f"engine {link.name}", daemon=True)
        self.link, self.renew, self.board, self.deliver = link, renew, board, deliver
        self.update_of, self.settings = update_of, settings
        self.state, self.why, self.working = State.STARTING, "start", False
        self.version: int | None = None
        self.pending: deque[Pending] = deque()
        self.failures = 0
        self.drawing_seconds, self.merging_seconds = 0.0, 0.0  # since the pool last asked
        self.parts_drawn, self.tokens, self.seconds = 0, 0, 0.0  # in all

    @property
    def speed(self) -> float:
        """Tokens a second while it draws."""
        return self.tokens / max(1e-9, self.seconds)

    def run(self) -> None:
        """Until the pool closes, or it is left out."""
        while (job := self._next()) is not None:
            try:
                job()
            except Exception as error:  # an engine's nonsense must not end the thread that would bring it back
                self.fails(f"{type(error).__name__}: {error}")
            with self.board.changed:
                self.working = False
                self.board.changed.notify_all()

    def _next(self) -> Callable[[], None] | None:
        with self.board.changed:
            while not self.board.closing and self.state != State.RETIRED:
                job = self._job()
                if job is not None:
                    self.working = True
                    return job
                self.board.changed.wait()
        return None

    def _job(self) -> Callable[[], None] | None:
        if self.state == State.STARTING:
            return self._reach
        if self.state == State.READY and self.pending:
            return self._merge
        if self.state == State.READY:
            for place, part in enumerate(self.board.parts):
                if self.version is not None and part.version <= self.version:
                    del self.board.parts[place]
                    return lambda: self._draw(part)
        return None

    def _reach(self) -> None:
        """Once at first; after a failure that came at once, again and again until the time to start is over."""
        deadline = time.monotonic() + self.settings.start_timeout
        while True:
            begun = time.monotonic()
            try:
                self.link.reach(max(0.1, deadline - begun))
                break
            except (OSError, ValueError) as error:
                refused = isinstance(error, ConnectionRefusedError)  # nobody listens yet, or a moment ago it ended
                if not refused or time.monotonic() + _PAUSE_SECONDS > deadline or self.board.closing:
                    self.fails(str(error) or type(error).__name__)
                    return
            time.sleep(_PAUSE_SECONDS)
        with self.board.changed:
            if self.state == State.STARTING:
                self.state = State.WANTS

    def _merge(self) -> None:
        start = time.perf_counter()
        with self.board.changed:
            pending = self.pending.popleft()
        trouble = self.deliver(self.link, pending)
        with self.board.changed:
            self.merging_seconds += time.perf_counter() - start
            if trouble is None:
                self.version = pending.version
                return
        self.fails(trouble.why, anew=trouble.late)

    def _draw(self, part: Part) -> None:
        start = time.perf_counter()
        try:
            answer = self.link.ask(part.request.to_bytes(), self.settings.rollout_timeout)
            found = Completions.from_bytes(answer)
        except Exception as error:  # whatever it is, others draw the part
            self._give_back(part, str(error) or type(error).__name__)
            late = isinstance(error, TimeoutError)
            said = f"no completions within {self.settings.rollout_timeout:g} s" if late else f"no completions ({error})"
            self.fails(said, anew=late)
            return
        spent = time.perf_counter() - start
        if found.version is None:
            self._give_back(part, found.error or "")
            self.fails(found.error or "it has no version")
            return
        with self.board.changed:
            self.drawing_seconds += spent
            if found.error is not None:
                part.ticket.error = f"engine {self.link.name}: {found.error}"
                return
            self.failures, self.parts_drawn, self.seconds = 0, self.parts_drawn + 1, self.seconds + spent
            self.tokens += sum(len(each.completion_ids) for each in found.samples)
            drawn_with = self.update_of(found.version)
            part.ticket.samples += [replace(each, policy_update=drawn_with) for each in found.samples]
            part.ticket.left -= 1

    def _give_back(self, part: Part, why: str) -> None:
        with self.board.changed:
            if part.tries + 1 >= PART_TRIES:
                part.ticket.error = f"{PART_TRIES} engines in turn failed on the same prompts; the last one: {why}"
                return
            self.board.parts.appendleft(replace(part, tries=part.tries + 1))

    def fails(self, why: str, anew: bool = False) -> None:
        """It is reached again, in a new process if that is asked for and possible, and then given the full state; after
        too many failures in a row it is left out.
        """
        if anew:
            self.renew()
        with self.board.changed:
            if self.board.closing or self.state == State.RETIRED:
                return
            self.failures += 1
            self.version, self.why = None, why
            self.pending.clear()
            out = self.failures > self.settings.restarts
            self.state = State.RETIRED if out else State.STARTING
            what = "left out" if out else "reached again"
            self.board.notices.append(f"engine {self.link.name}: {why}; it is {what}")
            self.board.changed.notify_all()

    def retire(self, why: str) -> None:
        """Leave it out."""
        with self.board.changed:
            self.state, self.why = State.RETIRED, why
            self.board.notices.append(f"engine {self.link.name}: {why}; it is left out")
            self.board.changed.notify_all()
