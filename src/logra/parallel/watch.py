# SPDX-License-Identifier: Apache-2.0
"""What each process is doing, noted where the others can read it, so that one that dies or hangs can be named."""

import os
import threading
import time
from datetime import timedelta
from typing import Any

BEAT_SECONDS = 2.0
SILENT_SECONDS = 4 * BEAT_SECONDS


class Watch:
    """Notes of all processes, in a store that outlives each of them.

    Args:
        store: a client of it, for this object alone.
        place: of this process; None to read only.
        count: of processes.
    """

    def __init__(self, store: Any, place: int | None, count: int) -> None:
        self.store, self.place, self.count = store, place, count
        self._done = threading.Event()
        if place is not None:
            threading.Thread(target=self._beat, daemon=True).start()

    def note(self, phase: str) -> None:
        """What this process is about to do."""
        self.store.set(f"logra/phase/{self.place}", f"{time.time():.1f} {phase}")

    def end(self) -> None:
        """Stop the heartbeat."""
        self._done.set()

    def report(self) -> list[str]:
        """In words, what each process was doing and whether it still gives signs of life."""
        return [f"process {place}: {self._of(place)}" for place in range(self.count)]

    def phase_of(self, place: int) -> str:
        """The latest note of a process."""
        return self._read(f"logra/phase/{place}").partition(" ")[2] or "start"

    def _of(self, place: int) -> str:
        now = time.time()
        when, _, phase = self._read(f"logra/phase/{place}").partition(" ")
        if not phase:
            return "has not begun"
        beat = self._read(f"logra/beat/{place}")
        silent = now - float(beat or when)
        alive = "" if silent < SILENT_SECONDS else f", no sign of life for {silent:.0f} s"
        return f"in {phase} for {now - float(when):.0f} s{alive}"

    def _read(self, key: str) -> str:
        try:
            if not self.store.check([key]):
                return ""
            return str(self.store.get(key).decode())
        except RuntimeError:
            return ""

    def _beat(self) -> None:
        while not self._done.wait(BEAT_SECONDS):
            try:
                self.store.set(f"logra/beat/{self.place}", f"{time.time():.1f}")
            except RuntimeError:
                return


def watch_of_run(place: int, count: int) -> Watch:
    """In the store where the processes met."""
    from torch.distributed import TCPStore

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return Watch(TCPStore(address, port, is_master=False, timeout=timedelta(seconds=30)), place, count)
