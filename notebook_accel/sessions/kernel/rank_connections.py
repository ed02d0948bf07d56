"""The lines between a session and its ranks, and the one thread that writes and reads them.

Not the thread that runs the cell: an interrupt of the kernel can come at any moment there, also between the halves of a
message. What arrives here is kept until who asked for it drops it, so an interrupt loses nothing.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import select
import signal
import threading
from collections.abc import Mapping, Sequence

import msgspec

from notebook_accel.launching.processes import pidfd_send_signal
from notebook_accel.protocol import session_messages as messages
from notebook_accel.protocol.channel import ClosedError, Message
from notebook_accel.sessions.listener import JoinedRank

__all__ = ["RankAnswer", "RankConnections", "RankRequest"]

_SEND_DEADLINE_S = 10.0


@dataclasses.dataclass(frozen=True)
class RankAnswer:
    """What a rank has answered.

    Attributes:
        reply: Its words.
        value: Descriptor of the sealed value, -1 without one.
    """

    reply: messages.Reply
    value: int = -1


@dataclasses.dataclass(eq=False)
class RankRequest:
    """Something that ranks are asked at once, and what they have answered so far.

    Attributes:
        number: Which their replies have.
        orders: What each of them is told, and the descriptors beside it, which this owns.
        answers: What has come, by rank.
        said: What ranks have said before their answers, each with the rank, in order.
        lost: Ranks that have gone, or that couldn't be told.
        was_asked: Whether it was given to the connections.
        was_sent: Whether the ranks have been told, so that they will answer.
    """

    number: int
    orders: Mapping[int, tuple[bytes, Sequence[int]]]
    answers: dict[int, RankAnswer] = dataclasses.field(default_factory=dict)
    said: collections.deque[tuple[int, messages.Displayed | messages.Prompt]] = dataclasses.field(
        default_factory=collections.deque
    )
    lost: set[int] = dataclasses.field(default_factory=set)
    was_asked: bool = False
    was_sent: bool = False
    _news: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._news.acquire()

    @property
    def pending(self) -> list[int]:
        """The ranks that still owe an answer."""
        return [rank for rank in self.orders if rank not in self.answers and rank not in self.lost]

    def wait(self, timeout_s: float) -> None:
        """Waits for news, at most so long; negative: until there are some, such as the end of a rank's process."""
        self._news.acquire(timeout=timeout_s)

    def notify(self) -> None:
        """There are news."""
        with contextlib.suppress(RuntimeError):  # nobody has looked since the last ones
            self._news.release()

    def close_orders(self) -> None:
        """Closes the descriptors that were to be sent. For when they are, or won't be."""
        for descriptor in {number for _, descriptors in self.orders.values() for number in descriptors}:
            os.close(descriptor)

    def close(self) -> None:
        """Closes the descriptors that nobody has taken."""
        for answer in self.answers.values():
            if answer.value >= 0:
                os.close(answer.value)
        self.answers.clear()


@dataclasses.dataclass(frozen=True)
class _Word:
    rank: int
    body: bytes


class RankConnections:
    """Brings requests to ranks and their answers back."""

    def __init__(self) -> None:
        self._lines: dict[int, JoinedRank] = {}
        self._closing = threading.Lock()  # no descriptor is closed while somebody uses its number
        self._outbox: collections.deque[RankRequest | JoinedRank | _Word | None] = collections.deque()
        self._requests: dict[int, RankRequest] = {}
        self._wake_end, self._woken = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)[::-1]
        self._thread = threading.Thread(target=self._run, name="notebook-accel-session", daemon=True)
        self._thread.start()

    def add(self, joined: JoinedRank) -> None:
        """A rank has come. From now on it can be asked."""
        self._put(joined)
        joined.was_taken.wait(_SEND_DEADLINE_S)

    def ask(self, request: RankRequest) -> None:
        """Sends it, without waiting for answers. Asked again after an interrupt, it is sent once all the same."""
        self._put(request)
        request.was_asked = True

    def tell(self, rank: int, word: messages.Typed) -> None:
        """Tells a rank something about the request that it is busy with."""
        self._put(_Word(rank, messages.encode(word)))

    def drop(self, request: RankRequest) -> None:
        """Nobody waits for it any more: answers that still come are thrown away."""
        self._requests.pop(request.number, None)
        request.close()

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Sends a rank a signal. It has it before what is sent to it afterwards, if not at once."""
        with self._closing:
            line = self._lines.get(rank)
            if line is not None:
                with contextlib.suppress(ProcessLookupError):
                    # One that somebody has stopped could take no other.
                    pidfd_send_signal(line.pidfd, signal.SIGCONT)
                    pidfd_send_signal(line.pidfd, number)

    def kill(self, rank: int) -> None:
        """Kills a rank. That it is gone is noticed when its line closes."""
        self.signal(rank, signal.SIGKILL)

    @property
    def ranks(self) -> list[int]:
        """The ranks that there are."""
        return sorted(list(self._lines))  # noqa: C414 - the thread changes it, and a list is made in one step

    def close(self) -> None:
        """Ends the thread and closes the lines. Ranks that wait for a request end by that."""
        if not self._thread.is_alive():
            return
        self._put(None)
        self._thread.join()
        for descriptor in (self._wake_end, self._woken):
            os.close(descriptor)

    def _put(self, thing: RankRequest | JoinedRank | _Word | None) -> None:
        self._outbox.append(thing)
        with contextlib.suppress(BlockingIOError):  # it has been woken often enough
            os.write(self._wake_end, b"x")

    # The thread -----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._woken, select.POLLIN)
        while True:
            by_descriptor = {line.connection.fileno(): rank for rank, line in self._lines.items()}
            for descriptor, _ in poll.poll():
                if descriptor == self._woken:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._woken, 4096)
                elif descriptor in by_descriptor:
                    self._read(poll, by_descriptor[descriptor])
            while self._outbox:
                thing = self._outbox.popleft()
                if thing is None:
                    for rank in list(self._lines):
                        self._lose(poll, rank)
                    return
                if isinstance(thing, JoinedRank):
                    self._lose(poll, thing.rank)
                    thing.connection.set_send_deadline(_SEND_DEADLINE_S)
                    self._lines[thing.rank] = thing
                    poll.register(thing.connection.fileno(), select.POLLIN)
                    thing.was_taken.set()
                elif isinstance(thing, _Word):
                    self._send_to(poll, thing.rank, thing.body)
                elif not thing.was_sent:
                    self._send(poll, thing)

    def _send(self, poll: select.poll, request: RankRequest) -> None:
        self._requests[request.number] = request
        request.was_sent = True
        for rank, (body, descriptors) in request.orders.items():
            if rank not in self._lines:
                request.lost.add(rank)
            self._send_to(poll, rank, body, descriptors)
        request.close_orders()
        request.notify()

    def _send_to(self, poll: select.poll, rank: int, body: bytes, descriptors: Sequence[int] = ()) -> None:
        line = self._lines.get(rank)
        if line is not None:
            try:
                line.connection.send(body, descriptors)
            except (ClosedError, TimeoutError):
                self._lose(poll, rank)

    def _read(self, poll: select.poll, rank: int) -> None:
        try:
            for message in self._lines[rank].connection.receive():
                self._heard(rank, message)
        except (ClosedError, msgspec.DecodeError):
            self._lose(poll, rank)

    def _heard(self, rank: int, message: Message) -> None:
        said = messages.decode_from_rank(message.body)
        request = self._requests.get(said.number)
        if request is None or rank not in request.orders:
            for descriptor in message.descriptors:
                os.close(descriptor)
            return
        if isinstance(said, messages.Reply):
            value, *_ = [*message.descriptors, -1]
            request.answers[rank] = RankAnswer(said, value)
        else:
            request.said.append((rank, said))
        request.notify()

    def _lose(self, poll: select.poll, rank: int) -> None:
        with self._closing:
            line = self._lines.pop(rank, None)
            if line is None:
                return
            poll.unregister(line.connection.fileno())
            line.close()
        for request in list(self._requests.values()):
            if rank in request.pending:
                request.lost.add(rank)
                request.notify()
