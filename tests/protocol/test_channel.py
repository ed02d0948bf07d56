"""Frames and descriptors over real socket pairs."""

from __future__ import annotations

import collections
import os
import resource
import socket
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from notebook_accel.protocol.channel import ClosedError, Connection, Message

_Pair = tuple[Connection, Connection]


@pytest.fixture
def pair() -> Iterator[_Pair]:
    left, right = Connection.pair()
    left.set_send_deadline(10)
    right.set_send_deadline(10)
    yield left, right
    left.close()
    right.close()


def _receive(connection: Connection, count: int) -> list[Message]:
    messages: list[Message] = []
    while len(messages) < count:
        messages += connection.receive()
    return messages


def _fill(sender: Connection) -> int:
    """Sends without a reader until the socket is full; returns how many whole or part frames are on their way."""
    sender.set_send_deadline(0.05)
    for sent in range(1, 10_000):
        try:
            sender.send(b"x" * 50_000)
        except TimeoutError:
            return sent
    raise AssertionError("the socket never filled")


@settings(max_examples=50, deadline=None)
@given(st.lists(st.binary(max_size=2000), min_size=1, max_size=20))
def test_frames_come_out_as_they_went_in(bodies: list[bytes]) -> None:
    left, right = Connection.pair()
    try:
        for body in bodies:
            left.send(body)
        assert [message.body for message in _receive(right, len(bodies))] == bodies
    finally:
        left.close()
        right.close()


def test_frame_larger_than_any_buffer_arrives_whole(pair: _Pair) -> None:
    left, right = pair
    body = os.urandom(5_000_000)
    thread = threading.Thread(target=left.send, args=(body,))
    thread.start()
    assert _receive(right, 1)[0].body == body
    thread.join()


def test_frames_of_several_threads_do_not_mix(pair: _Pair) -> None:
    left, right = pair
    bodies = [bytes([number]) * 100_000 for number in range(8)]
    threads = [threading.Thread(target=left.send, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    assert sorted(message.body for message in _receive(right, len(bodies))) == bodies
    for thread in threads:
        thread.join()


def test_descriptors_come_with_their_own_frame(pair: _Pair, tmp_path) -> None:
    left, right = pair
    for name in ("a", "b", "c"):
        (tmp_path / name).write_text(name)
    opened = [os.open(tmp_path / name, os.O_RDONLY) for name in ("a", "b", "c")]
    left.send(b"none")
    left.send(b"two", opened[:2])
    left.send(b"none again")
    left.send(b"one", opened[2:])
    for descriptor in opened:
        os.close(descriptor)
    messages = _receive(right, 4)
    assert [message.body for message in messages] == [b"none", b"two", b"none again", b"one"]
    contents = collections.defaultdict(list)
    for message in messages:
        for descriptor in message.descriptors:
            assert not os.get_inheritable(descriptor)
            contents[message.body].append(os.read(descriptor, 10))
            os.close(descriptor)
    assert contents == {b"two": [b"a", b"b"], b"one": [b"c"]}


@pytest.mark.parametrize("room", [0, 1])
def test_no_room_for_a_frames_descriptors_costs_that_frame_only(pair: _Pair, room: int) -> None:
    left, right = pair
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    left.send(b"one", [0, 1])
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free + room, limits[1]))
    try:
        [received] = _receive(right, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert (received.body, received.descriptors, received.is_whole) == (b"one", [], False)
    left.send(b"two", [0])
    [received] = _receive(right, 1)
    assert (received.body, received.descriptors, received.is_whole) == (b"two", [lowest_free], True)
    os.close(lowest_free)


def test_closing_closes_descriptors_that_nobody_took() -> None:
    left, right = Connection.pair()
    right.set_blocking(False)
    reader, writer = os.pipe()
    # The header and its descriptor, but not the body: no frame to return yet.
    socket.send_fds(left._socket, [b"\0\0\0\5\0\1"], [writer])
    os.close(writer)
    assert right.receive() == []
    right.close()
    left.close()
    assert os.read(reader, 1) == b""  # every write end is closed
    os.close(reader)


def test_reader_gets_all_that_was_sent_before_the_end(pair: _Pair) -> None:
    left, right = pair
    left.send(b"last words")
    left.close()
    assert [message.body for message in right.receive()] == [b"last words"]
    with pytest.raises(ClosedError):
        right.receive()


def test_writer_learns_that_the_reader_has_gone(pair: _Pair) -> None:
    left, right = pair
    right.close()
    with pytest.raises(ClosedError):
        left.send(b"hello")
    left.queue(b"hello")
    with pytest.raises(ClosedError):
        left.flush()


def test_shutdown_wakes_a_reading_thread(pair: _Pair) -> None:
    left, _ = pair
    ended: list[Exception] = []

    def read() -> None:
        try:
            left.receive()
        except ClosedError as error:
            ended.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    left.shutdown()
    thread.join(10)
    assert len(ended) == 1


def test_frames_stay_whole_after_a_reader_was_too_slow(pair: _Pair) -> None:
    left, right = pair
    count = _fill(left)
    with pytest.raises(TimeoutError):
        left.send(b"never sent: the one before has to go first")
    left.set_send_deadline(10)
    thread = threading.Thread(target=left.send, args=(b"after",))
    thread.start()
    bodies = [message.body for message in _receive(right, count + 1)]
    thread.join()
    assert bodies == [b"x" * 50_000] * count + [b"after"]


def test_queue_keeps_what_does_not_fit_and_never_blocks(pair: _Pair) -> None:
    left, right = pair
    left.set_blocking(False)
    bodies = [bytes([number % 256]) * 10_000 for number in range(500)]
    for body in bodies:
        left.queue(body)
    assert not left.flush()
    assert 0 < left.queued_bytes < 500 * 10_006
    received: list[bytes] = []
    while len(received) < len(bodies):
        received += [message.body for message in right.receive()]
        left.flush()
    assert received == bodies
    assert left.queued_bytes == 0
    assert left.flush()


def test_receive_in_an_event_loop_returns_nothing_when_there_is_nothing(pair: _Pair) -> None:
    left, _ = pair
    left.set_blocking(False)
    assert left.receive() == []


def test_connection_over_an_inherited_descriptor() -> None:
    ours, theirs = socket.socketpair()
    connection = Connection.from_descriptor(theirs.detach())
    other = Connection(ours)
    connection.send(b"hello")
    assert [message.body for message in other.receive()] == [b"hello"]
    connection.close()
    other.close()
