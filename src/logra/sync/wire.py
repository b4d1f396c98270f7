# SPDX-License-Identifier: Apache-2.0
"""Messages over a socket: frames of a number, a length and bytes, each answered by a frame of the same number.

A connection on which something did not come in time is closed, so that a late answer is never taken for another's.
"""

import contextlib
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable

from logra.sync.replica import Answer

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

    def reach(self, seconds: float) -> None:
        """Connect; what is there may have to be started first.

        Raises:
            OSError: that is not possible in time.
        """
        self.close()
        self._socket = self.connect(seconds)

    def open(self, layout: str, seconds: float) -> None:
        """Connect, and tell the layout.

        Raises:
            OSError: it cannot be reached, or does not answer in time.
            ValueError: it has no use for the layout.
        """
        self.close()
        Answer.from_bytes(self.ask(layout.encode(), seconds)).accepted(self.name)

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


def serve(listener: socket.socket, answer: Callable[[bytes], bytes]) -> None:
    """Answer trainers, one message at a time in this thread, until the process ends; a connection that fell silent
    hinders no other.

    Args:
        listener: bound and listening.
        answer: to each message.
    """
    asked: queue.Queue[tuple[bytes, queue.Queue[bytes]]] = queue.Queue()
    threading.Thread(target=_accept, args=(listener, asked), daemon=True).start()
    while True:
        data, reply = asked.get()
        reply.put(answer(data))


def _accept(listener: socket.socket, asked: "queue.Queue[tuple[bytes, queue.Queue[bytes]]]") -> None:
    while True:
        connection, _ = listener.accept()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        threading.Thread(target=_pass_on, args=(connection, asked), daemon=True).start()


def _pass_on(connection: socket.socket, asked: "queue.Queue[tuple[bytes, queue.Queue[bytes]]]") -> None:
    """What comes on one connection, until the other side closes it."""
    reply: queue.Queue[bytes] = queue.Queue()
    with connection, contextlib.suppress(OSError):
        while True:
            number, data = _received(connection, None)
            asked.put((data, reply))
            out = reply.get()
            connection.sendall(_FRAME.pack(number, len(out)) + out)


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
