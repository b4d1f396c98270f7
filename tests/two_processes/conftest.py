"""Real processes that wait for functions to call: started once for all tests of a number of them."""

import os
import queue
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.multiprocessing as multiprocessing
from torch.distributed import TCPStore

SECONDS = 900.0  # a machine may be slow; what hangs ends by its own time-out


class Workers:
    """`count` processes of one group; a function called through it runs in all of them at the same time."""

    def __init__(self, count: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.count, self.results = count, context.Queue()
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.calls = [context.Queue() for _ in range(count)]
        self.processes = [
            context.Process(
                target=_serve, args=(place, count, self.store.port, self.calls[place], self.results), daemon=True
            )
            for place in range(count)
        ]
        for process in self.processes:
            process.start()

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What it gave in each process; its first parameter is this process's `Processes`."""
        for calls in self.calls:
            calls.put((function, arguments))
        found: dict[int, Any] = {}
        while len(found) < self.count:
            try:
                place, result, trouble = self.results.get(timeout=SECONDS)
            except queue.Empty:
                raise AssertionError(
                    f"processes {sorted(set(range(self.count)) - set(found))} gave no answer"
                ) from None
            assert trouble is None, f"process {place}:\n{trouble}"
            found[place] = result
        return [found[place] for place in range(self.count)]

    def end(self) -> None:
        for calls in self.calls:
            calls.put(None)
        for process in self.processes:
            process.join(20)
            process.kill()


def _serve(place: int, count: int, port: int, calls: Any, results: Any) -> None:
    import torch

    from logra.parallel.processes import join

    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(place), "LOCAL_RANK": str(place), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    processes = join("cpu", 600)
    while (call := calls.get()) is not None:
        function, arguments = call
        try:
            results.put((place, function(processes, *arguments), None))
        except BaseException:
            results.put((place, None, traceback.format_exc()))


@pytest.fixture(scope="session")
def two() -> Iterator[Workers]:
    workers = Workers(2)
    yield workers
    workers.end()


@pytest.fixture(scope="session")
def four() -> Iterator[Workers]:
    workers = Workers(4)
    yield workers
    workers.end()
