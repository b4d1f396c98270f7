# SPDX-License-Identifier: Apache-2.0
"""One message to each replica after each update, and what follows when an answer is not the expected one.

A replica that missed something, refuses, differs in its digest or does not answer in time gets the full state; one that
still does not come to the trainer's digest is given up, loudly. Nothing waits without a time-out.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

from logra.parallel.processes import Processes
from logra.sync.layout import Layout
from logra.sync.replica import Answer

FULL_TRIES = 3

T = TypeVar("T")
R = TypeVar("R")


class Link(Protocol):
    """The way to one replica.

    Attributes:
        name: for messages.
    """

    name: str

    def ask(self, data: bytes, seconds: float) -> bytes:
        """Send, and wait for the answer to it; never gives the answer to an earlier message.

        Raises:
            TimeoutError: none came in time.
            OSError: the replica is gone.
        """
        ...

    def open(self, layout: str, seconds: float) -> None:
        """Reach the replica, at first or again, and tell it the layout; it has no weights of ours then.

        Raises:
            OSError: that is not possible.
            ValueError: it has no use for this layout.
        """
        ...


class Source(Protocol):
    """The weights to send: `FactorSource` or `WholeSource`.

    Attributes:
        layout: of all messages.
        version: of the present weights.
    """

    layout: Layout
    version: int

    @property
    def weights_bytes(self) -> int:
        """Of what changes, in bf16: what a sender of whole weights would send."""
        ...

    def message(self) -> tuple[bytes, int] | None:
        """Of the latest update, with the digest that must come of it; None if no weight changed."""
        ...

    def forced(self) -> bytes:
        """A message that changes every weight, to see that it arrives."""
        ...

    def patch_bytes(self) -> int:
        """Of a lossless sparse patch of what changed since the last call, estimated."""
        ...

    def digest(self) -> int:
        """Of the weights as they are."""
        ...

    def pieces(self) -> Iterator[bytes]:
        """The weights as they are."""
        ...


class SyncLost(RuntimeError):
    """A replica could not be brought to the trainer's weights."""


@dataclass(frozen=True)
class Trouble:
    """What is wrong with an answer.

    Attributes:
        why: in words.
        late: none came in time, so that the replica may hang.
    """

    why: str
    late: bool = False


@dataclass(frozen=True)
class Pending:
    """A message on its way: what a replica has after it."""

    version: int
    data: bytes
    digest: int


@dataclass
class SyncReport:
    """What a sync was.

    Attributes:
        version: all replicas have it now.
        bytes: sent to each replica in the message; 0 if no weight changed.
        full: replicas that got the full state, with the reason.
        full_bytes: sent for that.
        seconds: from the first byte to the last answer.
    """

    version: int
    bytes: int = 0
    full: dict[str, str] = field(default_factory=dict)
    full_bytes: int = 0
    seconds: float = 0.0


class Sender:
    """Keeps replicas equal to a source.

    Where several processes hold the weights, all of them call `anchor`, `sync`, `take` and `give_full`; the first one
    alone has links and talks to them.

    Args:
        source: of the weights.
        links: to the replicas.
        seconds: to wait for an answer.
        full_every: versions after which everybody gets the full state anyway; 0: never.
        processes: that hold the weights.
    """

    def __init__(
        self,
        source: Source,
        links: Sequence[Link],
        seconds: float = 60.0,
        full_every: int = 0,
        processes: Processes | None = None,
    ) -> None:
        self.source, self.links, self.seconds, self.full_every = source, list(links), seconds, full_every
        self.processes = processes or Processes()

    def anchor(self, why: str = "start") -> SyncReport:
        """Give every replica the full state: at start, on resume.

        Raises:
            SyncLost: a replica does not come to the trainer's digest.
        """
        start, report = time.perf_counter(), SyncReport(self.source.version)
        self._bring(dict.fromkeys(range(len(self.links)), why), report)
        report.seconds = time.perf_counter() - start
        return report

    def sync(self) -> SyncReport:
        """After an update: one message to each replica; all have the trainer's weights afterwards.

        Raises:
            SyncLost: a replica does not come to the trainer's digest.
        """
        pending = self.take()
        start, report = time.perf_counter(), SyncReport(self.source.version)
        if pending is None:
            return report
        report.bytes = len(pending.data)
        due = Trouble("due") if self.is_due(pending) else None
        answers = every(self.links, lambda link: due or self.deliver(link, pending))
        self._bring({place: each.why for place, each in enumerate(answers) if each is not None}, report)
        report.seconds = time.perf_counter() - start
        return report

    def take(self) -> Pending | None:
        """The message of the latest update, in every process; None if no weight changed."""
        found = self.source.message()
        return None if found is None else Pending(self.source.version, *found)

    def is_due(self, pending: Pending) -> bool:
        """Whether everybody gets the full state instead."""
        return self.full_every > 0 and pending.version % self.full_every == 0

    def deliver(self, link: Link, pending: Pending) -> Trouble | None:
        """Send a message; what is wrong with the answer, or None. From any thread; it does not look at weights."""
        try:
            answer = Answer.from_bytes(link.ask(pending.data, self.seconds))
        except Exception as error:  # whatever it is, a full state follows
            return self._no_answer(error)
        return _wrong(answer, pending.version, pending.digest)

    def give_full(self, places: Sequence[int], report: SyncReport) -> dict[int, Trouble]:
        """Give some links the full state, once, side by side; what went wrong with those that did not come right.

        Args:
            places: of the links, the same in every process.
            report: gets the bytes.
        """
        links = [self.links[place] for place in places] if self.processes.first else []
        layout, digest, version = self.source.layout.to_json(), self.source.digest(), self.source.version
        troubles = every(links, lambda link: self._asked(lambda: link.open(layout, self.seconds)))
        answers: list[Answer] = [Answer(None, None)] * len(links)

        def send(piece: bytes, place: int) -> str | None:
            report.full_bytes += len(piece)
            answers[place] = Answer.from_bytes(links[place].ask(piece, self.seconds))
            return answers[place].refusal

        def asked(piece: bytes, place: int) -> Trouble | None:
            return self._asked(partial(send, piece, place))

        for piece in self.source.pieces():
            well = [place for place, trouble in enumerate(troubles) if trouble is None]
            found = every(well, partial(asked, piece))
            for place, trouble in zip(well, found, strict=True):
                troubles[place] = trouble
        wrong = [trouble or _wrong(answer, version, digest) for trouble, answer in zip(troubles, answers, strict=True)]
        return {place: why for place, why in zip(places, wrong, strict=False) if why is not None}

    def _bring(self, why: Mapping[int, str], report: SyncReport) -> None:
        """To the present weights, by full states."""
        why = self.processes.told(dict(why))
        names = self.processes.told([link.name for link in self.links])
        report.full |= {names[place]: reason for place, reason in why.items()}
        left: Mapping[int, Trouble] = {place: Trouble(reason) for place, reason in why.items()}
        for _ in range(FULL_TRIES):
            if not left:
                return
            left = self.processes.told(self.give_full(sorted(left), report))
        if left:
            place, trouble = next(iter(left.items()))
            raise SyncLost(
                f"replica {names[place]} does not come to version {self.source.version} after {FULL_TRIES} full "
                f"states (first: {why[place]}; last: {trouble.why}). Restart it, or leave it out; the trainer's "
                f"weights are as they were."
            )

    def _asked(self, work: Callable[[], str | None]) -> Trouble | None:
        try:
            refusal = work()
            return None if refusal is None else Trouble(refusal)
        except Exception as error:  # whatever it is, a full state follows
            return self._no_answer(error)

    def _no_answer(self, error: Exception) -> Trouble:
        if isinstance(error, TimeoutError):
            return Trouble(f"no answer within {self.seconds:g} s", late=True)
        return Trouble(f"no answer ({error or type(error).__name__})")


def every(items: Sequence[T], work: Callable[[T], R]) -> list[R]:
    """`work` of each, side by side."""
    if len(items) < 2:
        return [work(each) for each in items]
    with ThreadPoolExecutor(len(items)) as threads:
        return list(threads.map(work, items))


def _wrong(answer: Answer, version: int, digest: int) -> Trouble | None:
    if (answer.version, answer.digest) == (version, digest):
        return None  # taken now, or a repeated message that had been taken already
    return Trouble(answer.refusal or f"its weights differ at version {answer.version}")
