"""Framed messages, and file descriptors with them, over a Unix stream socket.

Kernel, agent, template and ranks exchange messages over these sockets only. Both ends are made by ``socketpair`` and
inherited or passed on, so there is no address to which a stranger could connect.

A frame is a header (body length and number of descriptors), the body, and the descriptors as ancillary data of the
header's first byte.
"""

from __future__ import annotations

import array
import collections
import contextlib
import dataclasses
import os
import selectors
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

_HEADER = struct.Struct("!IH")
_CREDENTIALS = struct.Struct("3i")  # struct ucred of Linux: process, user, group
_READ_BYTES = 1 << 18
_MOST_DESCRIPTORS = 250  # Linux refuses more than 253 in one message (SCM_MAX_FD)
_ANCILLARY_BYTES = socket.CMSG_SPACE(_MOST_DESCRIPTORS * array.array("i").itemsize)

_GONE = "the other end of a connection has gone"


class ClosedError(ConnectionError):
    """The other end has gone."""


@dataclasses.dataclass(slots=True)
class Message:
    """One received frame."""

    body: bytes
    descriptors: list[int]  # which came with it, and now belong to the receiver
    is_whole: bool = True  # false if this process has no room for all descriptors; then there are none


class Connection:
    """One end of a socket pair.

    ``send`` blocks until the frame is written; several threads may call it. ``queue`` and ``flush`` are for an event
    loop that must never block: ``queue`` keeps a frame, ``flush`` writes as much as fits. Frames stay whole and in
    order: the rest of a frame that was written in part goes before the next one.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._received = bytearray()
        self._descriptors: collections.deque[list[int]] = collections.deque()  # one list a frame that has some
        self._outbox: collections.deque[memoryview] = collections.deque()
        self._lock = threading.Lock()
        self.queued_bytes = 0

    @classmethod
    def pair(cls) -> tuple[Connection, Connection]:
        """Return two connected ends."""
        left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return cls(left), cls(right)

    @classmethod
    def from_descriptor(cls, descriptor: int) -> Connection:
        """Return the connection over an inherited descriptor, which it owns from now on."""
        return cls(socket.socket(fileno=descriptor))

    def fileno(self) -> int:
        """Return the socket's descriptor, so that ``select`` takes a connection."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close this end and all received descriptors that nobody has taken."""
        while self._descriptors:
            close_all(self._descriptors.popleft())
        self._socket.close()

    def shutdown(self) -> None:
        """Tell the other end, and every thread that reads here, that nothing more will come."""
        with contextlib.suppress(OSError):  # the other end was first
            self._socket.shutdown(socket.SHUT_RDWR)

    def set_send_deadline(self, seconds: float) -> None:
        """Set how long ``send`` waits for a reader before it raises ``TimeoutError``. Reading isn't affected."""
        self._set_deadline(socket.SO_SNDTIMEO, seconds)

    def set_receive_deadline(self, seconds: float) -> None:
        """Set how long ``receive`` waits before it returns nothing."""
        self._set_deadline(socket.SO_RCVTIMEO, seconds)

    def _set_deadline(self, option: int, seconds: float) -> None:
        whole, part = divmod(seconds, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(whole), int(part * 1e6)))

    def set_blocking(self, blocking: bool) -> None:
        """Set whether calls block. With ``False``, use ``queue`` and ``flush`` instead of ``send``."""
        self._socket.setblocking(blocking)

    def send(self, body: bytes, descriptors: Sequence[int] = ()) -> None:
        """Write one frame.

        Raises:
            ClosedError: The other end has gone.
            TimeoutError: The other end hasn't read for as long as ``set_send_deadline`` allows. The frame may still be
                delivered, before the next one, but never in part.
        """
        assert len(descriptors) <= _MOST_DESCRIPTORS
        header = _HEADER.pack(len(body), len(descriptors))
        with self._lock, _closed_errors():
            try:
                self._write_outbox()
                if descriptors:
                    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
                    header = header[self._socket.sendmsg([header], [rights]) :]
                self._keep(header + body)
                self._write_outbox()
            except BlockingIOError as error:  # SO_SNDTIMEO has run out
                raise TimeoutError("the other end of a connection doesn't read") from error

    def queue(self, body: bytes) -> None:
        """Keep a frame for ``flush``. Frames with descriptors can't be queued."""
        with self._lock:
            self._keep(_HEADER.pack(len(body), 0) + body)

    def flush(self) -> bool:
        """Write as much of the queued frames as fits, and return whether nothing is left.

        Raises:
            ClosedError: The other end has gone.
        """
        with self._lock, _closed_errors():
            try:
                self._write_outbox()
            except BlockingIOError:
                return False
        return True

    def post(self, body: bytes) -> None:
        """Keep a frame, and write as much as fits. Ignores that the other end has gone."""
        self.queue(body)
        with contextlib.suppress(OSError):
            self.flush()

    def _keep(self, data: bytes) -> None:
        self._outbox.append(memoryview(data))
        self.queued_bytes += len(data)

    def _write_outbox(self) -> None:
        while self._outbox:
            data = self._outbox[0]
            sent = self._socket.send(data)
            self.queued_bytes -= sent
            if sent == len(data):
                self._outbox.popleft()
            else:
                self._outbox[0] = data[sent:]

    def receive(self) -> list[Message]:
        """Read until at least one frame is complete, and return all that are; none only if reading would block.

        Raises:
            ClosedError: The other end has gone, and everything that it sent has been returned.
        """
        while not (frames := self._complete_frames()):
            data = self.receive_bytes()
            if not data:
                return []
            self._received += data
        return frames

    def receive_bytes(self) -> bytes:
        """Return the received bytes, to forward them unparsed; none if reading would block.

        Raises:
            ClosedError: The other end has gone and everything that it sent has been returned.
        """
        try:
            with _closed_errors():
                data, ancillary, flags, _ = self._socket.recvmsg(_READ_BYTES, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return b""
        if not data:
            raise ClosedError(_GONE)
        # Linux ends a read after the first byte with descriptors, so these belong to one frame. If the process has too
        # many open files, Linux drops some or all of them.
        numbers = array.array("i")
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                numbers.frombytes(content[: len(content) - len(content) % numbers.itemsize])
        if numbers or flags & socket.MSG_CTRUNC:
            self._descriptors.append(numbers.tolist())
        return data

    def _complete_frames(self) -> list[Message]:
        frames: list[Message] = []
        for body, count in take_frames(self._received):
            descriptors = self._descriptors.popleft() if count else []
            is_whole = len(descriptors) == count
            if not is_whole:
                close_all(descriptors)
            frames.append(Message(body, descriptors if is_whole else [], is_whole=is_whole))
        return frames


def take_frames(received: bytearray) -> list[tuple[bytes, int]]:
    """Remove the complete frames from the start of ``received``; return each one's body and number of descriptors."""
    frames: list[tuple[bytes, int]] = []
    start = 0
    while len(received) - start >= _HEADER.size:
        length, count = _HEADER.unpack_from(received, start)
        end = start + _HEADER.size + length
        if len(received) < end:
            break
        frames.append((bytes(memoryview(received)[start + _HEADER.size : end]), count))
        start = end
    del received[:start]
    return frames


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """Return the process and the user that have connected a Unix socket's other end, or listen there."""
    process, user, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return process, user


class EventLoop:
    """Calls a handler for each watched descriptor that can be read."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def watch(self, descriptor: int, handler: Callable[[], Any]) -> None:
        """Call ``handler`` from now on when the descriptor can be read."""
        self._selector.register(descriptor, selectors.EVENT_READ, handler)

    def unwatch(self, descriptor: int) -> None:
        """Stop watching a descriptor, if it is watched."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(descriptor)

    def watch_writing(self, descriptor: int, wanted: bool) -> None:
        """Set whether the handler of a watched descriptor is also called when it can be written."""
        key = self._selector.get_key(descriptor)
        events = selectors.EVENT_READ | selectors.EVENT_WRITE if wanted else selectors.EVENT_READ
        if key.events != events:
            self._selector.modify(descriptor, events, key.data)

    def wait(self, timeout_s: float | None) -> None:
        """Wait until a descriptor can be read, at most so long, and call the handlers of all that can."""
        for key, _ in self._selector.select(timeout_s):
            if key.fd in self._selector.get_map():  # an earlier handler may have closed it
                key.data()


def close_all(descriptors: Iterable[int]) -> None:
    """Close descriptors. Ignores errors, which mean lost data of a file on a network."""
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)


@contextlib.contextmanager
def _closed_errors() -> Iterator[None]:
    try:
        yield
    except (BrokenPipeError, ConnectionResetError) as error:
        raise ClosedError(_GONE) from error
