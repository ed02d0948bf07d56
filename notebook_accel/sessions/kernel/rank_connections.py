"""The kernel's connections to a session's ranks, and the one thread that reads and writes them.

The thread that runs the cell can't do this: the kernel's interrupt may reach it at any moment, even in the middle of a
message. Answers are kept until the request is dropped, so an interrupt loses nothing.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from notebook_accel.launching.processes import pidfd_send_signal
from notebook_accel.protocol import session_messages as messages
from notebook_accel.protocol.channel import ClosedError, Message
from notebook_accel.protocol.session_messages import Displayed, Prompt
from notebook_accel.sessions.listener import JoinedRank

_SEND_DEADLINE_S = 10.0


@dataclasses.dataclass(eq=False)
class RankRequest:
    """A request to several ranks, and their answers so far. It owns the descriptors of both."""

    number: int  # the replies repeat it
    outgoing: Mapping[int, tuple[bytes, Sequence[int]]]  # the message for each rank, and its descriptors
    replies: dict[int, messages.Reply] = dataclasses.field(default_factory=dict)  # in order of arrival
    values: dict[int, int] = dataclasses.field(default_factory=dict)  # the descriptors that came with the replies
    # Messages that ranks sent before their answers, each with the rank, in order.
    incoming: collections.deque[tuple[int, Displayed | Prompt]] = dataclasses.field(default_factory=collections.deque)
    # Ranks that have died, or that it couldn't reach, with the time when this was noticed, in seconds since the epoch.
    lost: dict[int, float] = dataclasses.field(default_factory=dict)
    was_queued: bool = False  # it was passed to ``RankConnections.send``
    was_sent: bool = False  # the ranks will answer
    _news: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._news.acquire()

    @property
    def pending(self) -> list[int]:
        """The ranks whose answers are still missing."""
        return [rank for rank in self.outgoing if rank not in self.replies and rank not in self.lost]

    def wait(self, timeout_s: float) -> None:
        """Wait for news, such as an answer or a rank's death, for at most ``timeout_s``; without limit if negative."""
        self._news.acquire(timeout=timeout_s)

    def notify(self) -> None:
        with contextlib.suppress(RuntimeError):  # the waiting thread hasn't taken the previous news yet
            self._news.release()


class RankConnections:
    """Sends requests to ranks and receives their answers."""

    def __init__(self) -> None:
        self._joined: dict[int, JoinedRank] = {}
        self._closing = threading.Lock()  # keeps a descriptor open while it is used
        self._outbox: collections.deque[Callable[[], None] | None] = collections.deque()  # for the thread
        self._requests: dict[int, RankRequest] = {}
        self._wake_end, self._woken = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)[::-1]
        self._poll = select.poll()
        self._poll.register(self._woken, select.POLLIN)
        self._thread = threading.Thread(target=self._run, name="notebook-accel-session", daemon=True)
        self._thread.start()

    def add(self, joined: JoinedRank) -> None:
        """Take over a rank's connection. The rank receives requests from now on."""
        self._put(lambda: self._take(joined))
        joined.was_taken.wait(_SEND_DEADLINE_S)

    def send(self, request: RankRequest) -> None:
        """Send a request, without waiting for answers. A second call with the same request does nothing."""
        self._put(lambda: self._deliver(request))
        request.was_queued = True

    def tell(self, rank: int, message: messages.Input | messages.Leave) -> None:
        """Send a rank a message that has no answer."""
        self._put(lambda: self._send_to(rank, messages.encode(message)))

    def drop(self, request: RankRequest) -> None:
        """Forget a request, and close the files of its values. Answers that still arrive are discarded."""
        self._requests.pop(request.number, None)
        for descriptor in request.values.values():
            os.close(descriptor)
        request.values.clear()

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Send a rank a signal. It may arrive late, but always before anything sent to the rank afterwards."""
        with self._closing:
            joined = self._joined.get(rank)
            if joined is not None:
                with contextlib.suppress(ProcessLookupError):
                    # A stopped process would handle no other signal.
                    pidfd_send_signal(joined.pidfd, signal.SIGCONT)
                    pidfd_send_signal(joined.pidfd, number)

    @property
    def ranks(self) -> list[int]:
        return sorted(list(self._joined))  # noqa: C414 - the thread changes it, and list() copies it in one step

    def close(self, farewell: messages.Leave | None = None) -> None:
        """End the thread and close the connections. Idle ranks then exit; a detached session's only on a farewell."""
        if not self._thread.is_alive():
            return
        if farewell is not None:
            for rank in self.ranks:
                self.tell(rank, farewell)
        self._put(None)
        self._thread.join()
        for descriptor in (self._wake_end, self._woken):
            os.close(descriptor)

    def close_in_fork(self) -> None:
        """Close the ranks' connections in a fork of this process, which may outlive it."""
        for joined in list(self._joined.values()):
            joined.close()

    def _put(self, act: Callable[[], None] | None) -> None:
        """Make the thread call ``act``; ``None`` ends the thread."""
        self._outbox.append(act)
        with contextlib.suppress(BlockingIOError):  # enough wake-ups are pending
            os.write(self._wake_end, b"x")

    # The thread -----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            by_descriptor = {joined.connection.fileno(): rank for rank, joined in self._joined.items()}
            for descriptor, _ in self._poll.poll():
                if descriptor == self._woken:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._woken, 4096)
                elif descriptor in by_descriptor:
                    self._read(by_descriptor[descriptor])
            while self._outbox:
                act = self._outbox.popleft()
                if act is None:
                    for rank in list(self._joined):
                        self._lose(rank)
                    return
                act()

    def _take(self, joined: JoinedRank) -> None:
        self._lose(joined.rank)
        joined.connection.set_send_deadline(_SEND_DEADLINE_S)
        self._joined[joined.rank] = joined
        self._poll.register(joined.connection.fileno(), select.POLLIN)
        joined.was_taken.set()

    def _deliver(self, request: RankRequest) -> None:
        if request.was_sent:
            return
        self._requests[request.number] = request
        request.was_sent = True
        for rank, (body, descriptors) in request.outgoing.items():
            if rank not in self._joined:
                request.lost[rank] = time.time()
            self._send_to(rank, body, descriptors)
        for descriptor in {number for _, descriptors in request.outgoing.values() for number in descriptors}:
            os.close(descriptor)
        request.notify()

    def _send_to(self, rank: int, body: bytes, descriptors: Sequence[int] = ()) -> None:
        joined = self._joined.get(rank)
        if joined is not None:
            try:
                joined.connection.send(body, descriptors)
            except (ClosedError, TimeoutError):
                self._lose(rank)

    def _read(self, rank: int) -> None:
        try:
            for message in self._joined[rank].connection.receive():
                self._received(rank, message)
        except (ClosedError, msgspec.DecodeError):
            self._lose(rank)

    def _received(self, rank: int, message: Message) -> None:
        from_rank = messages.decode_from_rank(message.body)
        request = self._requests.get(from_rank.number)
        if request is None or rank not in request.outgoing:
            for descriptor in message.descriptors:
                os.close(descriptor)
            return
        if isinstance(from_rank, messages.Reply):
            request.values.update((rank, descriptor) for descriptor in message.descriptors)
            request.replies[rank] = from_rank
        else:
            request.incoming.append((rank, from_rank))
        request.notify()

    def _lose(self, rank: int) -> None:
        with self._closing:
            joined = self._joined.pop(rank, None)
            if joined is None:
                return
            self._poll.unregister(joined.connection.fileno())
            joined.close()
        for request in list(self._requests.values()):
            if rank in request.pending:
                request.lost[rank] = time.time()
                request.notify()
