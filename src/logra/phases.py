# SPDX-License-Identifier: Apache-2.0
"""Seconds and memory of each phase of an update: peak and average, phase by phase.

On a GPU, memory is what torch has allocated there. On a CPU it is the resident memory of the process, read every few
milliseconds by a thread; where the system does not tell, memory is left out.
"""

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

_PAUSE_SECONDS = 0.02
_STATM = Path("/proc/self/statm")


def resident_bytes() -> int | None:
    """Resident memory of this process, or None where /proc is missing."""
    try:
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None


class _Sampler(threading.Thread):
    """Reads a device's memory until told to stop."""

    def __init__(self, device: str) -> None:
        super().__init__(daemon=True)
        self.device, self.peak, self.total, self.count = device, 0, 0, 0
        self._done = threading.Event()

    def read(self) -> int | None:
        return torch.cuda.memory_allocated() if self.device == "cuda" else resident_bytes()

    def run(self) -> None:
        while True:
            if not self._enter() or self._done.wait(_PAUSE_SECONDS):
                return

    def _enter(self) -> bool:
        value = self.read()
        if value is not None:
            self.peak, self.total, self.count = max(self.peak, value), self.total + value, self.count + 1
        return value is not None

    def finish(self) -> None:
        """Stop, with a last reading: a short phase on a busy machine may have had none since its beginning."""
        self._done.set()
        self.join()
        self._enter()


class Phases:
    """Collects what the phases of one update cost.

    Attributes:
        seconds: by phase.
        memory: by phase, {"peak_bytes": ..., "average_bytes": ...}.
    """

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self.seconds: dict[str, float] = {}
        self.memory: dict[str, dict[str, int]] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time and watch a block; a name given again adds to it."""
        on_gpu = self.device == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        sampler = _Sampler(self.device)
        sampler.start()
        start = time.perf_counter()
        try:
            yield
        finally:
            if on_gpu:
                torch.cuda.synchronize()
            spent = time.perf_counter() - start
            sampler.finish()
            peak = torch.cuda.max_memory_allocated() if on_gpu else sampler.peak
            self._enter(name, spent, peak, sampler)

    def merged(self, others: Sequence["Phases"]) -> "Phases":
        """Of several processes: the longest times, the highest peaks, the mean of averages."""
        found = Phases(self.device)
        for name in self.seconds:
            found.seconds[name] = max(each.seconds[name] for each in others)
            memory = [each.memory[name] for each in others if name in each.memory]
            if memory:
                average = sum(each["average_bytes"] for each in memory) // len(memory)
                found.memory[name] = {"peak_bytes": max(e["peak_bytes"] for e in memory), "average_bytes": average}
        return found

    def _enter(self, name: str, spent: float, peak: int, sampler: _Sampler) -> None:
        before = self.seconds.get(name, 0.0)
        self.seconds[name] = before + spent
        if not sampler.count:
            return
        average = sampler.total / sampler.count
        if name in self.memory:
            share = before / max(1e-9, before + spent)
            average = share * self.memory[name]["average_bytes"] + (1 - share) * average
            peak = max(peak, self.memory[name]["peak_bytes"])
        self.memory[name] = {"peak_bytes": peak, "average_bytes": int(average)}
