# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C and SIGTERM: a run stops where nothing is half done, saves, and says how to go on.

Between steps the signal is raised at once, and the update that was begun is forgotten. From an update's first weight
change until it is written down the signal waits. With several processes it always waits, until all of them agree at the
end of what they do together.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from logra.parallel.processes import Processes

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(BaseException):
    """A signal asked the run to end.

    Not an `Exception`, so that no handler of rewards or models swallows it.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number

    @property
    def exit_code(self) -> int:
        """As a shell reports a process that a signal ended."""
        return 128 + self.number


class Interruption:
    """Turns signals into `Interrupted`, at once or when it is allowed again."""

    def __init__(self, processes: Processes | None = None) -> None:
        self.processes = processes or Processes()
        self._deferring = False
        self._pending: int | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Take the signals over for a block; does nothing outside the main thread, where Python allows no handlers."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def defer(self) -> None:
        """From here on nothing may be left half done."""
        self._deferring = True

    def allow(self) -> None:
        """Everything is whole again; raises if a signal came meanwhile."""
        self._deferring = False
        if self.processes.count > 1:
            numbers = [each for each in self.processes.gathered(self._pending) if each is not None]
            self._pending = numbers[0] if numbers else None
        if self._pending is not None:
            number, self._pending = self._pending, None
            raise Interrupted(number)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._deferring or self.processes.count > 1:
            self._pending = number
            return
        self._deferring = True  # a second signal does not disturb the saving
        raise Interrupted(number)
