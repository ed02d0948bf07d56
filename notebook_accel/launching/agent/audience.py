"""The audience of an agent, which gets its messages and sends its orders: one kernel, or all attached to a run."""

from __future__ import annotations

import contextlib
import os
import pathlib
import socket
import time
from collections.abc import Callable
from typing import TypeAlias

import msgspec

from notebook_accel.formatting import clipped, plain_text
from notebook_accel.launching.journal import NO_NUMBER, Journal, numbered
from notebook_accel.launching.processes import outlive_parent, pidfd_open
from notebook_accel.launching.run_folders import JOURNAL, LATEST, RunFolder
from notebook_accel.protocol import agent_messages as messages
from notebook_accel.protocol.channel import (
    ClosedError,
    Connection,
    EventLoop,
    Message,
    close_all,
    peer_of,
    take_frames,
)

_MOST_QUEUED_BYTES = 4 << 20
"""Bytes that wait for a kernel that doesn't read. Past it, output stays in the ranks' logs for now."""

_MOST_MISSED_BYTES = 16 << 20  # for an attached kernel; after it was dropped and is back, it reads them in the journal
_PATIENCE_S = 10.0  # with an attached kernel that reads nothing
_LONGEST_ORDER_BYTES = 1 << 16
_MOST_ATTACHMENTS = 64
_LATEST_PERIOD_S = 1.0

OrderHandler = Callable[[messages.ToAgent, Message, str], None]
"""Takes an order, the frame in which it came, and the sender in words; these are empty for the agent's kernel."""


class Kernel:
    """The audience of an ordinary agent: one kernel, with which the agent ends."""

    is_leaving = False  # true if the agent should end once nothing is queued, since its only run is over

    def __init__(self, connection: Connection, pid: int) -> None:
        self._connection = connection
        self._pid = pid

    def begin(self, loop: EventLoop, handle_order: OrderHandler, quit_now: Callable[[], None]) -> None:
        """Start to call ``handle_order`` for each message, and ``quit_now`` when nobody needs the agent any more."""
        self._loop, self._handle_order = loop, handle_order
        self._connection.set_blocking(False)
        loop.watch(self._connection.fileno(), self._read)
        # The connection's other end may survive in a process that the kernel forked; the kernel's pidfd tells its end.
        self._pidfd = pidfd_open(self._pid)
        loop.watch(self._pidfd, quit_now)

    @property
    def queued_bytes(self) -> int:
        """Number of bytes that are not sent yet."""
        return self._connection.queued_bytes

    @property
    def is_behind(self) -> bool:
        """True if so many bytes are queued that the ranks' output should wait."""
        return self._connection.queued_bytes > _MOST_QUEUED_BYTES

    def tell(self, message: msgspec.Struct, _number: int = NO_NUMBER) -> None:
        """Queue a message, which has this number in the journal of its run."""
        self._connection.queue(messages.encode(message))

    def flush(self) -> None:
        """Write as much of the queued messages as fits.

        Raises:
            ClosedError: The kernel has gone, and the agent must end with it.
        """
        try:
            self._loop.watch_writing(self._connection.fileno(), not self._connection.flush())
        except ClosedError:
            raise
        except OSError:  # the system has no memory at the moment; the next flush sends the rest
            self._loop.watch_writing(self._connection.fileno(), False)

    def leave(self, log: pathlib.Path) -> None:
        """Flush the queue and close the connection. The agent outlives the kernel, and prints to the file ``log``."""
        outlive_parent(log)  # before the kernel reads that the run is detached, and may end
        self._loop.unwatch(self._connection.fileno())
        self._loop.unwatch(self._pidfd)
        with contextlib.suppress(OSError, TimeoutError):
            self._connection.set_blocking(True)
            self._connection.set_send_deadline(_PATIENCE_S)
            self._connection.flush()
        self.close()

    def close(self) -> None:
        """Close all connections, when the agent ends."""
        self._connection.close()
        close_all([self._pidfd])

    def _read(self) -> None:
        for message in self._connection.receive():
            self._handle_order(messages.decode_for_agent(message.body), message, "")


class Attachments:
    """The audience of a detached run: all attached kernels, and a journal for those that attach later.

    The run goes on without any of them. The methods that ``Kernel`` has too do the same here.

    Raises:
        OSError: The folder's files can't be made. The journal goes on as before.
    """

    is_behind = False  # the journal takes all output

    def __init__(self, folder: RunFolder, journal: Journal) -> None:
        self._folder = folder
        self._journal = journal
        self._listening = folder.listen()
        try:
            kept = folder.create(JOURNAL)
            try:
                journal.move_to(kept)
            except OSError:
                os.close(kept)
                raise
        except OSError:
            self._listening.close()
            raise
        self._listening.setblocking(False)
        self._attached: list[_Attachment] = []
        self._latest_due_s = 0.0
        self._has_news = True
        self.is_leaving = False
        folder.publish()

    def begin(self, loop: EventLoop, handle_order: OrderHandler) -> None:
        """Start to take in those who connect, and their orders."""
        self._loop, self._handle_order = loop, handle_order
        loop.watch(self._listening.fileno(), self._accept)

    @property
    def queued_bytes(self) -> int:
        return sum(attachment.connection.queued_bytes for attachment in self._attached)

    def tell(self, message: msgspec.Struct, number: int = NO_NUMBER) -> None:
        body = numbered(number, messages.encode(message))
        for attachment in self._attached:
            if attachment.follows:
                attachment.connection.queue(body)
        if number != NO_NUMBER:
            self._has_news = True
            if isinstance(message, messages.RunEnded | messages.Broken):
                self.is_leaving = True
                self._latest_due_s = 0.0

    def flush(self) -> None:
        now_s = time.monotonic()
        if self._has_news and now_s >= self._latest_due_s:  # first, so that who hears of the end also finds it there
            self._has_news, self._latest_due_s = False, now_s + _LATEST_PERIOD_S
            with contextlib.suppress(OSError):  # a full disk: the journal may have the message, or a later call writes
                self._folder.replace(LATEST, self._journal.latest())
        for attachment in list(self._attached):
            try:
                is_done = attachment.flush(now_s)
            except (OSError, TimeoutError):
                self._drop(attachment)
                continue
            self._loop.watch_writing(attachment.connection.fileno(), not is_done)

    def close(self) -> None:
        """Close all connections and the journal, when the run is over."""
        self._folder.close_socket()
        self._listening.close()
        for attachment in self._attached:
            attachment.connection.close()
        self._journal.close()
        with contextlib.suppress(OSError):
            self._folder.replace(LATEST, self._journal.latest())

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the peer has gone, or there are too many open files
            accepted, _ = self._listening.accept()
            if peer_of(accepted)[1] != os.getuid() or len(self._attached) >= _MOST_ATTACHMENTS:
                accepted.close()
                return
            attachment = _Attachment(accepted)
            self._attached.append(attachment)
            self._loop.watch(accepted.fileno(), lambda: self._read(attachment))

    def _read(self, attachment: _Attachment) -> None:
        try:
            for message in attachment.receive():
                self._take(attachment, message)
        except (OSError, msgspec.MsgspecError, ValueError):
            self._drop(attachment)

    def _take(self, attachment: _Attachment, message: Message) -> None:
        order = messages.decode_for_detached_agent(message.body)
        if isinstance(order, messages.Hello):
            self._greet(attachment, order)
        elif not attachment.who:
            raise ValueError("nobody has said who it is")
        elif order.job_id == self._folder.id:
            self._handle_order(order, message, attachment.who)

    def _greet(self, attachment: _Attachment, hello: messages.Hello) -> None:
        attachment.who = clipped(plain_text(hello.who)) or "somebody"
        attached = messages.encode(messages.Attached(size_bytes=self._journal.size_bytes))
        attachment.connection.send(attached, [self._journal.descriptor] if hello.follows else [])
        if not hello.follows or attachment.follows:
            return
        attachment.follows = True
        for number, body in self._journal.waiting():
            attachment.connection.queue(numbered(number, body))

    def _drop(self, attachment: _Attachment) -> None:
        if attachment in self._attached:
            self._attached.remove(attachment)
            self._loop.unwatch(attachment.connection.fileno())
            attachment.connection.close()


Audience: TypeAlias = Kernel | Attachments


class _Attachment:
    """A peer that is attached to the run, or has connected to send an order."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.connection = Connection(sock)
        self.who = ""  # the peer in words, once it has introduced itself
        self.follows = False  # it gets the run's messages
        self._socket = sock
        self._received = bytearray()
        self._queued_bytes = 0
        self._moved_s = time.monotonic()

    def receive(self) -> list[Message]:
        """Return the complete messages that have come.

        Raises:
            OSError: The peer has gone.
            ValueError: The peer sends something that is no order.
        """
        try:
            data = self._socket.recv(_LONGEST_ORDER_BYTES)  # not ``recvmsg``, so that the system closes any descriptors
        except BlockingIOError:
            return []
        if not data:
            raise ClosedError("the other end has gone")
        self._received += data
        found = [Message(body, []) for body, _ in take_frames(self._received)]
        if len(self._received) > _LONGEST_ORDER_BYTES:
            raise ValueError("this is no order")
        return found

    def flush(self, now_s: float) -> bool:
        """Send as much as the socket takes, and return whether nothing is left.

        Raises:
            OSError: The peer has gone.
            TimeoutError: The peer reads nothing, or is too far behind.
        """
        is_done = self.connection.flush()
        left = self.connection.queued_bytes
        if is_done or left < self._queued_bytes:
            self._moved_s = now_s
        self._queued_bytes = left
        if left > _MOST_MISSED_BYTES or (left and now_s - self._moved_s > _PATIENCE_S):
            raise TimeoutError
        return is_done
