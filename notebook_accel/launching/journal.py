"""The journal of a run: all messages from its agent to kernels, for kernels that attach later.

A journal is a sequence of frames: a header (length, checksum, number) and the encoded message. Messages are numbered,
so that a kernel that attaches again skips those that it knows. A reader stops at the first incomplete frame, such as
the last one before a power failure.

The agent writes it from the run's start: in memory, and in the run's folder from the moment at which the run is
detached. Until then messages are written in batches, so that a run that is over after a few of them has no file.

The journal is bounded, however long the run is. Samples are written less and less often, since a curve in the panel has
only so many points: in a run of a week, some thousand of each kind, or some hundred for each of many ranks. Step times
in between are added up, so that their sums stay right. Output and displays have an allowance, after which only the
latest is kept. Unwritten messages wait in memory, the latest of each kind, until they may be written.
"""

from __future__ import annotations

import os
import struct
import time
import zlib
from collections.abc import Callable, Iterator

import msgspec

from notebook_accel.payload.memory_files import memory_file
from notebook_accel.protocol import agent_messages as messages
from notebook_accel.protocol import events

NO_NUMBER = 0
"""Precedes a message that is in no journal."""

_HEADER = struct.Struct("!IIQ")
_NUMBER = struct.Struct("!Q")
_READ_BYTES = 1 << 20
# The period between two samples of one kind of a rank, as a part of the run's time so far: its minimum, its growth for
# each rank of the run, and its maximum. More ranks have fewer points each, since an attaching kernel reads all.
_LEAST_PERIOD, _PERIOD_PER_RANK, _LONGEST_PERIOD = 1 / 500, 1 / 4000, 1 / 30
_OUTPUT_BYTES = 32 << 20  # of all ranks together
_LAST_OUTPUT_BYTES = 1 << 16  # kept of a rank that has used up its share
_DISPLAY_BYTES = 64 << 20
_MEMORY_SHARE = 1 / 4  # of both, for the time before the journal has a folder: the notebook's machine may be small
_MOST_MEMORY_BYTES = 40 << 20
_BATCH_MESSAGES, _BATCH_BYTES = 256, 1 << 20
_END_KINDS = (events.TimeLimitReached, events.Failed, events.Finished, events.Ended)
_KEPT_KINDS = (events.Started, *events.SAMPLES, *_END_KINDS)
_NO_MORE_DISPLAYS = (
    "[figures and other displays of this run have reached {limit} MiB: later ones are shown where somebody is "
    "attached, and not kept]"
)
_LOST = "[there was no room: {count:,} messages of this run are missing here]"

_Key = tuple[int, object]  # a rank and the kind of its event


def frame(number: int, body: bytes) -> bytes:
    """Return a message as a frame of the journal."""
    return _HEADER.pack(len(body), _checksum(number, body), number) + body


def numbered(number: int, body: bytes) -> bytes:
    """Return a message as attached kernels get it: preceded by its number in the journal."""
    return _NUMBER.pack(number) + body


def split_number(data: bytes) -> tuple[int, bytes]:
    """Return the number and the message from the bytes of ``numbered``."""
    return _NUMBER.unpack_from(data)[0], data[_NUMBER.size :]


def _checksum(number: int, body: bytes) -> int:
    return zlib.crc32(body, zlib.crc32(_NUMBER.pack(number)))


def read(descriptor: int, size: int | None = None) -> Iterator[tuple[int, bytes]]:
    """Yield each frame's number and message up to a position, by default the end, or the first incomplete frame."""
    position, data, start = 0, b"", 0
    while True:
        wanted = _READ_BYTES if size is None else min(_READ_BYTES, size - position)
        more = os.pread(descriptor, wanted, position) if wanted > 0 else b""
        data, position, start = data[start:] + more, position + len(more), 0
        while len(data) - start >= _HEADER.size:
            length, checksum, number = _HEADER.unpack_from(data, start)
            end = start + _HEADER.size + length
            if end > len(data):
                break
            body = data[start + _HEADER.size : end]
            if checksum != _checksum(number, body):
                return
            yield number, body
            start = end
        if not more:
            return


class Journal:
    """Writes a run's messages to a file of bounded size, which it owns.

    Attributes:
        descriptor: The file, -1 before the first message is written.
        size_bytes: Length of the complete frames.
    """

    def __init__(self, job_id: str, world_size: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.descriptor = -1
        self._job_id = job_id
        self._clock = clock
        self._began_s = self._now_s = clock()
        self._told = 0
        self._batch: list[tuple[int, float, msgspec.Struct]] = []  # with the time of each
        self._batch_bytes = 0
        self._is_in_folder = False
        self._period_share = min(max(world_size * _PERIOD_PER_RANK, _LEAST_PERIOD), _LONGEST_PERIOD)
        self._output_left = [_output_share(world_size, _MEMORY_SHARE)] * world_size
        self._display_bytes = self._display_left = int(_DISPLAY_BYTES * _MEMORY_SHARE)
        self._written_s: dict[_Key, float] = {}
        self._waiting: dict[_Key, tuple[int, messages.Said]] = {}  # the latest messages that may not be written yet
        self._latest: dict[_Key, tuple[int, msgspec.Struct]] = {}
        self._refused: list[bytes] = []  # frames that the journal needs, but the disk had no room for
        self._lost = 0
        self.size_bytes = 0

    def add(self, message: msgspec.Struct) -> int:
        """Add a message of the agent, and return its number."""
        self._told += 1
        self._batch.append((self._told, self._clock(), message))
        self._batch_bytes += len(message.event) if isinstance(message, messages.Said) else 0
        if self._is_in_folder or len(self._batch) >= _BATCH_MESSAGES or self._batch_bytes >= _BATCH_BYTES:
            self._write_batch()
        return self._told

    def move_to(self, descriptor: int) -> None:
        """Go on in a file of the run's folder, which gets all that is written so far.

        Raises:
            OSError: The disk is full. The journal goes on as before.
        """
        self._write_batch()
        position = 0
        while position < self.size_bytes:
            position += os.sendfile(descriptor, self.descriptor, position, self.size_bytes - position)
        self._close_file()
        self.descriptor, self._is_in_folder = descriptor, True
        world_size = len(self._output_left)
        more = _output_share(world_size, 1) - _output_share(world_size, _MEMORY_SHARE)
        self._output_left = [left + more for left in self._output_left]
        self._display_left += _DISPLAY_BYTES - self._display_bytes
        self._display_bytes = _DISPLAY_BYTES

    def _write_batch(self) -> None:
        batch, self._batch, self._batch_bytes = self._batch, [], 0
        for number, told_s, message in batch:
            self._now_s = told_s
            self._take(number, message)

    def _take(self, number: int, message: msgspec.Struct) -> None:
        if not isinstance(message, messages.Said):
            self._write_waiting()
            self._keep_latest((-1, type(message)), number, message)
            self._write(number, message)
            return
        event = events.decode(bytes(message.event))
        if isinstance(event, events.Profiled):
            return  # profiles are large, and only for kernels that are attached now
        self._note(number, message, event)
        if isinstance(event, events.SAMPLES):
            self._add_sample(number, message, event)
        elif isinstance(event, events.Output):
            self._add_output(number, message, event)
        elif isinstance(event, events.Display):
            self._add_display(number, message, event)
        else:
            self._write_waiting(message.rank)
            self._write(number, message)

    def waiting(self) -> list[tuple[int, bytes]]:
        """Return number and message of each unwritten message, for a kernel that has read the journal."""
        return [(number, messages.encode(message)) for number, message in self._waiting.values()]

    def latest(self) -> bytes:
        """Return frames with the latest message of each kind: the run's state without its history."""
        return b"".join(frame(number, messages.encode(message)) for number, message in self._latest.values())

    def close(self) -> None:
        """Close the file. In a folder, write the waiting messages first."""
        if self._is_in_folder:
            self._write_waiting()
        self._close_file()

    def _close_file(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    # The state -------------------------------------------------------------------------------------------------------

    def _note(self, number: int, message: messages.Said, event: events.Event) -> None:
        if isinstance(event, events.Started):
            for kind in _END_KINDS:
                self._latest.pop((message.rank, kind), None)
        if isinstance(event, events.Metrics):
            _, known = self._latest.get((message.rank, events.Metrics), (0, None))
            if isinstance(known, messages.Said):
                message = _merged(known, message)
        if isinstance(event, _KEPT_KINDS):
            self._keep_latest((message.rank, type(event)), number, message)

    def _keep_latest(self, key: _Key, number: int, message: msgspec.Struct) -> None:
        self._latest.pop(key, None)  # moves the key to the end: the order is that of the messages
        self._latest[key] = number, message

    # The bounds ------------------------------------------------------------------------------------------------------

    def _add_sample(self, number: int, message: messages.Said, event: events.Event) -> None:
        key = message.rank, type(event)
        if isinstance(event, (events.Metrics, events.StepTimes)) and key in self._waiting:
            message = _merged(self._waiting[key][1], message)
        self._waiting[key] = number, message
        self._write_if_due(key)

    def _write_if_due(self, key: _Key) -> None:
        period_s = (self._now_s - self._began_s) * self._period_share
        if self._now_s - self._written_s.get(key, float("-inf")) >= period_s:
            self._written_s[key] = self._now_s
            self._write(*self._waiting.pop(key), is_needed=False)

    def _add_output(self, number: int, message: messages.Said, event: events.Output) -> None:
        key, size = (message.rank, events.Output), len(message.event)
        if key not in self._waiting and self._output_left[message.rank] >= size:
            self._output_left[message.rank] -= size
            self._write(number, message, is_needed=False)
            return
        self._output_left[message.rank] = 0
        lines, left_out = event.text.split("\n"), event.left_out
        if key in self._waiting:
            before = events.decode(bytes(self._waiting[key][1].event))
            assert isinstance(before, events.Output)
            lines, left_out = [*before.text.split("\n"), *lines], before.left_out + left_out
        kept = "\n".join(lines)[-_LAST_OUTPUT_BYTES:].split("\n")
        event = msgspec.structs.replace(event, text="\n".join(kept), left_out=left_out + len(lines) - len(kept))
        self._waiting[key] = number, _with_event(message, event)

    def _add_display(self, number: int, message: messages.Said, event: events.Display) -> None:
        size = len(message.event)
        if event.display_id and event.is_update:
            key = message.rank, event.display_id
            self._waiting[key] = number, message
            if self._display_left >= size:
                self._display_left -= size
                self._write_if_due(key)
        elif self._display_left >= size:
            self._display_left -= size
            self._write(number, message, is_needed=False)
        elif self._display_left >= 0:
            self._display_left = -1
            text = _NO_MORE_DISPLAYS.format(limit=self._display_bytes >> 20)
            self._write(number, _with_event(message, events.Output(text=text)), is_needed=False)

    # The file --------------------------------------------------------------------------------------------------------

    def _write_waiting(self, rank: int | None = None) -> None:
        for key in [key for key in self._waiting if rank in (None, key[0])]:
            self._write(*self._waiting.pop(key), is_needed=False)

    def _write(self, number: int, message: msgspec.Struct, *, is_needed: bool = True) -> None:
        data = frame(number, messages.encode(message))
        while self._refused and self._append(self._refused[0]):
            self._refused.pop(0)
        if not self._refused and self._lost:
            notice = events.Output(text=_LOST.format(count=self._lost))
            of_rank = message.rank if isinstance(message, messages.Said) else 0
            said = messages.Said(job_id=self._job_id, rank=of_rank, event=msgspec.Raw(events.encode(notice)))
            if self._append(frame(number, messages.encode(said))):
                self._lost = 0
        if not self._refused and self._append(data):
            return
        if is_needed:
            self._refused.append(data)
        else:
            self._lost += 1

    def _append(self, data: bytes) -> bool:
        """Append a frame, and return whether the disk had room. Removes a partly written frame."""
        rest, position = memoryview(data), self.size_bytes
        if not self._is_in_folder and position + len(data) > _MOST_MEMORY_BYTES:
            return False
        try:
            if self.descriptor < 0:
                self.descriptor = memory_file("notebook-accel-journal")
            while rest:
                written = os.pwrite(self.descriptor, rest, position)
                rest, position = rest[written:], position + written
        except OSError:
            if position > self.size_bytes:
                os.ftruncate(self.descriptor, self.size_bytes)
            return False
        self.size_bytes = position
        return True


def _output_share(world_size: int, share: float) -> int:
    """Return the bytes of output that are kept of each rank, of a share of what is kept of a run."""
    return max(int(_OUTPUT_BYTES * share) // world_size, _LAST_OUTPUT_BYTES)


def _merged(before: messages.Said, now: messages.Said) -> messages.Said:
    """Merge two messages into one: the sum of their step times, or the latest value of each metric."""
    earlier, later = events.decode(bytes(before.event)), events.decode(bytes(now.event))
    if isinstance(earlier, events.StepTimes) and isinstance(later, events.StepTimes):
        return _with_event(now, earlier.followed_by(later))
    assert isinstance(earlier, events.Metrics)
    assert isinstance(later, events.Metrics)
    return _with_event(now, earlier.followed_by(later))


def _with_event(message: messages.Said, event: events.Event) -> messages.Said:
    return msgspec.structs.replace(message, event=msgspec.Raw(events.encode(event)))
