# SPDX-License-Identifier: Apache-2.0
"""One message to each replica after each update, and what follows when an answer is not the expected one.

A replica that missed something, refuses, differs in its digest or does not answer in time gets the full state; one that
still does not come to the trainer's digest is given up, loudly. Nothing waits without a time-out.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from logra.sync.layout import Layout
from logra.sync.replica import Answer

FULL_TRIES = 3


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

    def message(self) -> tuple[bytes, int]:
        """Of the latest update, with the digest that must come of it."""
        ...

    def digest(self) -> int:
        """Of the weights as they are."""
        ...

    def pieces(self) -> Iterator[bytes]:
        """The weights as they are."""
        ...


class SyncLost(RuntimeError):
    """A replica could not be brought to the trainer's weights."""


@dataclass
class SyncReport:
    """What a sync was.

    Attributes:
        version: all replicas have it now.
        bytes: sent to each replica in the message.
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

    Args:
        source: of the weights, in one process.
        links: to the replicas.
        seconds: to wait for an answer.
        full_every: versions after which everybody gets the full state anyway; 0: never.
    """

    def __init__(self, source: Source, links: Sequence[Link], seconds: float = 60.0, full_every: int = 0) -> None:
        self.source, self.links, self.seconds, self.full_every = source, list(links), seconds, full_every

    def anchor(self, why: str = "start") -> SyncReport:
        """Give every replica the full state: at start, on resume.

        Raises:
            SyncLost: a replica does not come to the trainer's digest.
        """
        start, report = time.perf_counter(), SyncReport(self.source.version)
        digest = self.source.digest()
        for link in self.links:
            self._full(link, digest, why, report)
        report.seconds = time.perf_counter() - start
        return report

    def sync(self) -> SyncReport:
        """After an update: one message to each replica; all have the trainer's weights afterwards.

        Raises:
            SyncLost: a replica does not come to the trainer's digest.
        """
        data, digest = self.source.message()
        start, report = time.perf_counter(), SyncReport(self.source.version, len(data))
        due = self.full_every > 0 and self.source.version % self.full_every == 0
        for link in self.links:
            why = "due" if due else self._trouble(link, data, digest)
            if why is not None:
                self._full(link, digest, why, report)
        report.seconds = time.perf_counter() - start
        return report

    def _trouble(self, link: Link, data: bytes, digest: int) -> str | None:
        """Send a message; what is wrong with the answer, or None."""
        try:
            answer = Answer.from_bytes(link.ask(data, self.seconds))
        except TimeoutError:
            return f"no answer within {self.seconds:g} s"
        except (OSError, ValueError) as error:
            return f"no answer ({error or type(error).__name__})"
        if (answer.version, answer.digest) == (self.source.version, digest):
            return None  # taken now, or a repeated message that had been taken already
        return answer.refusal or f"its weights differ at version {answer.version}"

    def _full(self, link: Link, digest: int, why: str, report: SyncReport) -> None:
        report.full[link.name] = why
        trouble = why
        for _ in range(FULL_TRIES):
            try:
                link.open(self.source.layout.to_json(), self.seconds)
                answer = Answer(None, None)
                for piece in self.source.pieces():
                    report.full_bytes += len(piece)
                    answer = Answer.from_bytes(link.ask(piece, self.seconds))
                    if answer.refusal is not None:
                        break
                if (answer.version, answer.digest) == (self.source.version, digest):
                    return
                trouble = answer.refusal or f"its weights differ at version {answer.version}"
            except TimeoutError:
                trouble = f"no answer within {self.seconds:g} s"
            except (OSError, ValueError) as error:
                trouble = f"no answer ({error or type(error).__name__})"
        raise SyncLost(
            f"replica {link.name} does not come to version {self.source.version} after {FULL_TRIES} full states "
            f"(first: {why}; last: {trouble}). Restart it, or leave it out; the trainer's weights are as they were."
        )
