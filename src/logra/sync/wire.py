# SPDX-License-Identifier: Apache-2.0
"""Messages over a socket: frames of a number, a length and bytes, each answered by a frame of the same number.

A connection on which something did not come in time is closed, so that a late answer is never taken for another's.
"""

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable

from logra.sync.layout import Layout
from logra.sync.replica import Answer, Replica

_FRAME = struct.Struct("<QQ")
_CHUNK = 1 << 20


class SocketLink:
    """The way to a replica behind a socket.

    Args:
        name: of the replica, for messages.
        connect: makes a connection within so many seconds; called again after one was lost, and may start the replica
            anew.
    """

    def __init__(self, name: str, connect: Callable[[float], socket.socket]) -> None:
        self.name, self.connect = name, connect
        self._socket: socket.socket | None = None
        self._number = 0

    def open(self, layout: str, seconds: float) -> None:
        """Connect, and tell the layout.

        Raises:
            OSError: it cannot be reached, or does not answer in time.
            ValueError: it has no use for the layout.
        """
        self.close()
        answer = Answer.from_bytes(self.ask(layout.encode(), seconds))
        if answer.refusal is not None:
            raise ValueError(f"replica {self.name}: {answer.refusal}")

    def ask(self, data: bytes, seconds: float) -> bytes:
        """Send, and wait for the answer.

        Raises:
            OSError: it cannot be reached, or does not answer in time (TimeoutError).
        """
        deadline = time.monotonic() + seconds
        self._number += 1
        try:
            if self._socket is None:
                self._socket = self.connect(seconds)
            for part in (_FRAME.pack(self._number, len(data)), data):
                self._socket.settimeout(max(0.001, deadline - time.monotonic()))
                self._socket.sendall(part)
            number, answer = _received(self._socket, deadline)
        except OSError:
            self.close()
            raise
        if number != self._number:
            self.close()
            raise ConnectionError(f"replica {self.name} answered to {number}, not to {self._number}")
        return answer

    def close(self) -> None:
        """Drop the connection."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def serve(listener: socket.socket, make: Callable[[Layout], Replica]) -> None:
    """Answer trainers, one message at a time, until the process ends; a connection that fell silent hinders no other.

    Args:
        listener: bound and listening.
        make: a replica of a layout, on this engine's weights.
    """
    served = _Served(make)
    while True:
        connection, _ = listener.accept()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        threading.Thread(target=served.answer_all, args=(connection,), daemon=True).start()


class _Served:
    """The replica behind all connections."""

    def __init__(self, make: Callable[[Layout], Replica]) -> None:
        self.make, self.lock = make, threading.Lock()
        self.replica: Replica | None = None

    def answer_all(self, connection: socket.socket) -> None:
        """Until the other side closes."""
        with connection, contextlib.suppress(OSError):
            while True:
                number, data = _received(connection, None)
                with self.lock:
                    out = self.answer(data).to_bytes()
                connection.sendall(_FRAME.pack(number, len(out)) + out)

    def answer(self, data: bytes) -> Answer:
        """To a layout, or to what the replica takes."""
        if data[:1] == b"{":
            try:
                self.replica = self.make(Layout.from_json(data.decode()))
            except (ValueError, TypeError, KeyError) as error:
                return Answer(None, None, f"{type(error).__name__}: {error}")
            return Answer(None, None)
        if self.replica is None:
            return Answer(None, None, "this replica was told of no layout yet")
        return self.replica.handle(data)


def _received(connection: socket.socket, deadline: float | None) -> tuple[int, bytes]:
    number, size = _FRAME.unpack(_exactly(connection, _FRAME.size, deadline))
    return number, _exactly(connection, size, deadline)


def _exactly(connection: socket.socket, size: int, deadline: float | None) -> bytes:
    parts: list[bytes] = []
    while size:
        if deadline is not None:
            connection.settimeout(max(0.001, deadline - time.monotonic()))
        part = connection.recv(min(size, _CHUNK))
        if not part:
            raise ConnectionResetError("the connection was closed")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
