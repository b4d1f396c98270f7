# SPDX-License-Identifier: Apache-2.0
"""`logra train --processes N`: the command N times on this machine; torchrun does the same for several machines.

When one process ends badly, the others get a while to notice and say so, and are ended then.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType

from logra.parallel.watch import Watch

GRACE_SECONDS = 10.0
_PAUSE_SECONDS = 0.1


def launch(count: int, arguments: Sequence[str], program: Sequence[str] = (sys.executable, "-m", "logra")) -> int:
    """Run `logra ARGUMENTS` in `count` processes; the exit code of the first one that failed, else 0.

    Args:
        count: processes.
        arguments: of each of them.
        program: what takes them.
    """
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    common = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is here, not in the first process
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "OMP_NUM_THREADS": threads,
    }
    command = [*program, *arguments]
    children = [
        subprocess.Popen(command, env=common | {"RANK": str(place), "LOCAL_RANK": str(place)}) for place in range(count)
    ]

    def forward(number: int, _: FrameType | None) -> None:
        for child in children:
            if child.poll() is None:
                child.send_signal(number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return _wait(children, Watch(store, None, count))
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
                child.wait()
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(children: list["subprocess.Popen[bytes]"], watch: Watch) -> int:
    failed: tuple[int, int] | None = None
    deadline = float("inf")
    while any(child.poll() is None for child in children) and time.monotonic() < deadline:
        time.sleep(_PAUSE_SECONDS)
        ended = [(place, child.returncode) for place, child in enumerate(children) if child.poll()]
        if ended and failed is None:
            failed, deadline = ended[0], time.monotonic() + GRACE_SECONDS
    ended = [(place, child.returncode) for place, child in enumerate(children) if child.poll()]
    failed = failed or (ended[0] if ended else None)
    left = [place for place, child in enumerate(children) if child.poll() is None]
    for place in left:
        sys.stderr.write(f"logra: process {place} did not end ({watch.phase_of(place)}) and is killed\n")
    if failed is None:
        return 0
    place, code = failed
    if code < 0:
        name = signal.Signals(-code).name
        sys.stderr.write(f"logra: process {place} was ended by {name} in {watch.phase_of(place)}\n")
        return 128 - code
    return code
