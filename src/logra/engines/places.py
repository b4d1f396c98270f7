# SPDX-License-Identifier: Apache-2.0
"""Where an engine's process is: started here and started again when it is gone, or running already elsewhere."""

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

_PAUSE_SECONDS = 0.1
_END_SECONDS = 10.0
_SHOWN_BYTES = 1500


class Kept(Protocol):
    """An engine's process."""

    def renew(self) -> None:
        """It does not answer: the next connection is to a new process, where that is possible."""
        ...

    def end(self) -> None:
        """It is no longer needed."""
        ...


class Place(Kept, Protocol):
    """One that is reached over a socket."""

    def connect(self, seconds: float) -> socket.socket:
        """A connection to it; it is started first where that is possible and it does not run.

        Raises:
            OSError: it cannot be reached in time.
        """
        ...


class Elsewhere:
    """One that others run."""

    def renew(self) -> None:
        """Nothing: it is not ours."""

    def end(self) -> None:
        """Nothing, likewise."""


class Address(Elsewhere):
    """An engine that runs already.

    Args:
        address: HOST:PORT.
    """

    def __init__(self, address: str) -> None:
        self.host, _, port = address.rpartition(":")
        self.port = int(port)

    def connect(self, seconds: float) -> socket.socket:
        """A connection."""
        return socket.create_connection((self.host, self.port), timeout=seconds)


class Local:
    """A process on this machine.

    Args:
        command: starts the engine; it writes HOST:PORT to the file behind `--announce`.
        log: gets what it prints; its address goes to a file beside it.
        environment: variables in addition to those here.
        folder: in which it runs; default: this process's.
    """

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        environment: Mapping[str, str] | None = None,
        folder: str | None = None,
    ) -> None:
        self.announced, self.log = log.with_suffix(".address"), log
        self.command = [*command, "--announce", str(self.announced), "--with-parent", str(os.getpid())]
        self.environment, self.folder = dict(environment or {}), folder
        self.process: subprocess.Popen[bytes] | None = None

    def connect(self, seconds: float) -> socket.socket:
        """A connection; the process is started first if it does not run.

        Raises:
            OSError: it did not come up in time, or ended; with the last lines that it printed.
        """
        deadline = time.monotonic() + seconds
        host, _, port = self.address(seconds).rpartition(":")
        return socket.create_connection((host, int(port)), timeout=max(0.1, deadline - time.monotonic()))

    def address(self, seconds: float) -> str:
        """HOST:PORT of the running process, once it listens.

        Raises:
            OSError: likewise.
        """
        deadline = time.monotonic() + seconds
        if self.process is None or self.process.poll() is not None:
            self._start()
        assert self.process is not None
        while not self.announced.exists():
            if self.process.poll() is not None:
                raise ConnectionError(
                    f"it ended with {self.process.returncode}; the end of {self.log}:\n{self._said()}"
                )
            if time.monotonic() > deadline:
                raise TimeoutError(f"it did not start within {seconds:g} s; the end of {self.log}:\n{self._said()}")
            time.sleep(_PAUSE_SECONDS)
        return self.announced.read_text()

    def _start(self) -> None:
        self._kill_rest()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.announced.unlink(missing_ok=True)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=_without_torchrun() | self.environment,
                cwd=self.folder,
                start_new_session=True,
            )

    def _said(self) -> str:
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - _SHOWN_BYTES))
            return file.read().decode(errors="replace")

    def renew(self) -> None:
        """End the process, at once."""
        self._signal(signal.SIGKILL)

    def end(self) -> None:
        """End the process, in good order if it can."""
        self._signal(signal.SIGTERM)
        if self.process is not None:
            try:
                self.process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                self._signal(signal.SIGKILL)

        self._kill_rest()

    def _kill_rest(self) -> None:
        """What it started may outlive it."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        """To the process and all that it started, be it gone itself."""
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)
        if number == signal.SIGKILL:
            self.process.wait()


def _without_torchrun() -> dict[str, str]:
    """This process's variables, but for those that name its place among trainers."""
    theirs = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_", "GROUP_", "ROLE_", "TORCHELASTIC_")
    return {name: value for name, value in os.environ.items() if not name.startswith(theirs)}
