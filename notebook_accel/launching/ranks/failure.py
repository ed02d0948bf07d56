"""Reports of a rank's exceptions to the notebook."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import re
import sys
import traceback
import types
from collections.abc import Sequence
from typing import NoReturn

from notebook_accel import code_places, environment
from notebook_accel.errors import CollectiveError, ConfigError, NotebookAccelError
from notebook_accel.launching.ranks import streams
from notebook_accel.launching.spec import JobSpec
from notebook_accel.payload import serialization
from notebook_accel.protocol import events

# torch's messages in a rank whose peer has gone. The peer's own failure explains more.
_LOST_PEER = re.compile(
    r"connection (closed|reset) by|connection reset|broken pipe|recvvalue failed|failed to recv|unexpected eof|"
    r"remote process exited|socket timeout|wait timeout after|nccl.*(abort|remote)|process group.*abort",
    re.IGNORECASE,
)
# The file name, in a traceback, of a frame that replaces several.
_FOLDED = "<folded>"
_FOLDED_LINE = re.compile(rf'^  File "{_FOLDED}", line (\d+), in (.*)$', re.MULTILINE)
_FEWEST_FOLDED = 3
# torch's message for an exception of a DataLoader worker or of another thread: torch._utils.ExceptionWrapper.reraise.
_FORWARDED = re.compile(r"Caught \w+ (.+)\.\nOriginal (Traceback \(most recent call last\):\n.+)", re.DOTALL)
_CHAINED = re.compile(
    r"\n\n(?:During handling of the above exception, another exception occurred"
    r"|The above exception was the direct cause of the following exception):\n\n"
)
_FRAME = re.compile(r'^  File "(.+)", line (\d+), in (.+)$', re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class _Forwarded:
    """An exception that torch raises again in the rank, with a worker's traceback as its message.

    Attributes:
        message: The original message, and a line about the place where it was raised.
        frames: The worker's frames.
    """

    message: str
    frames: Sequence[traceback.FrameSummary]

    @classmethod
    def read(cls, error: BaseException) -> _Forwarded | None:
        """Return the worker's exception that torch has raised again as ``error``; ``None`` for any other error."""
        found = _FORWARDED.fullmatch(_message(error))
        if found is None:
            return None
        where, text = found.groups()
        *causes, last = _CHAINED.split(text.rstrip("\n"))
        frames = list(_FRAME.finditer(last))
        if not frames:
            return None
        own = re.search(r"^\S.*", last[frames[-1].end() :], re.MULTILINE | re.DOTALL)
        # The class's name stays in the message where torch couldn't make an exception of that class.
        said = own[0].removeprefix(f"{type(error).__name__}: ") if own else ""
        summaries = [
            traceback.FrameSummary(file, int(line), name, lookup_line=False)
            for file, line, name in (frame.groups() for frame in frames)
        ]
        return cls("\n\n".join([f"{said}\nIt was raised {where}.", *causes]), summaries)

    def stand_in(self, error: BaseException) -> BaseException:
        """Return an exception that a traceback shows like ``error``, but with the original message."""
        stand_in = _stand_in(error, self.message)
        stand_in.__cause__, stand_in.__context__ = error.__cause__, error.__context__
        stand_in.__suppress_context__ = error.__suppress_context__
        return stand_in


def _stand_in(error: BaseException, message: str) -> Exception:
    """Return an exception with the name of this one's class, but without its methods."""
    kind = type(error)
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    stand_in: Exception = type(kind.__name__, (Exception,), names)(message)
    return stand_in


def readable(error: BaseException) -> BaseException:
    """Return an exception of the user's code, or a plain one with its name and text if a look at it raises."""
    try:
        isinstance(error, SystemExit)  # looks at ``__class__``
        traceback.TracebackException(type(error), error, error.__traceback__, lookup_lines=False)
    except BaseException:  # noqa: BLE001 - its own methods, or those of an exception before it, may raise anything
        if type(error).__module__ == "builtins":  # an interrupt stays one
            error.__cause__ = error.__context__ = None
            return error
        return _stand_in(error, _message(error)).with_traceback(vars(BaseException)["__traceback__"].__get__(error))
    return error


def describe(
    error: BaseException, spec: JobSpec, by_value: serialization.Origins, *, saved: bool = False
) -> events.Failed:
    """Return the event that reports an exception of the user's code.

    ``by_value`` are the notebook's functions and classes; ``saved`` tells whether the names for ``--pull`` were saved.
    """
    forwarded = _Forwarded.read(error)
    text = _user_traceback(error, forwarded)
    message = _message(error) if forwarded is None else forwarded.message
    return events.Failed(
        kind=type(error).__name__,
        message=message,
        traceback=_formatted(_with_cell_names(text, spec)),
        line=_place(error, _innermost_line(text, spec)),
        exception=_pickled(error, by_value),
        saved=saved,
        lost_peer=_is_lost_peer(error, message),
    )


def end_fork(error: BaseException | None, spec: JobSpec) -> NoReturn:
    """Exit from a process that the user's code has forked and not ended, since it must not report for its rank.

    As at the end of any Python process, its error goes to standard error and into the exit status.
    """
    status = 0
    if isinstance(error, SystemExit) and isinstance(error.code, int | None):
        status = error.code or 0
    elif error is not None:
        status = 1
        with contextlib.suppress(Exception):  # the user's code may have closed it
            if isinstance(error, SystemExit):
                sys.stderr.write(f"{error.code}\n")
            else:
                sys.stderr.write(_formatted(_with_cell_names(_user_traceback(error, _Forwarded.read(error)), spec)))
    streams.flush()
    os._exit(status & 0xFF)


def _user_traceback(error: BaseException, forwarded: _Forwarded | None) -> traceback.TracebackException:
    shown = error if forwarded is None else forwarded.stand_in(error)
    text = traceback.TracebackException(type(shown), shown, without_our_frames(error.__traceback__))
    if forwarded is not None:
        text.stack += forwarded.frames
    if isinstance(error, NotebookAccelError) or _is_raised_by_us(text):
        _end_at_the_users_line(text)
    is_debugging = False
    with contextlib.suppress(ConfigError):  # the user's code may have set the variable to anything
        is_debugging = environment.is_debugging()
    if not is_debugging:
        _fold_our_frames(text)
        _fold_calls_between_users_lines(text)
    return text


def _fold_calls_between_users_lines(text: traceback.TracebackException) -> None:
    """Replace the frames through which a library called the user's code by one that counts them.

    A trainer has dozens of them between the user's call and the user's callback or dataset. The frames below the
    user's last line stay, since the library has failed there.
    """
    for part in _chain(text):
        folded: list[traceback.FrameSummary] = []
        for is_users, group in itertools.groupby(part.stack, lambda frame: code_places.is_the_users(frame.filename)):
            frames = list(group)
            is_between = bool(folded) and frames[-1] is not part.stack[-1]
            if is_users or not is_between or len(frames) < _FEWEST_FOLDED:
                folded += frames
            else:
                names = ", ".join(dict.fromkeys(code_places.package_of(frame.filename) for frame in frames))
                folded.append(traceback.FrameSummary(_FOLDED, len(frames), names, lookup_line=False, line=""))
        part.stack[:] = folded


def _formatted(text: traceback.TracebackException) -> str:
    return _FOLDED_LINE.sub(r"  [\1 lines of \2]", "".join(text.format()))


def _is_lost_peer(error: BaseException, message: str) -> bool:
    if isinstance(error, CollectiveError):
        return error.lost_peer
    return isinstance(error, (RuntimeError, ConnectionError)) and _LOST_PEER.search(message) is not None


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException as broken:  # noqa: BLE001 - the user's __str__ may raise anything, and the error is still theirs
        return f"(its text can't be read: {type(broken).__name__})"


def without_our_frames(tb: types.TracebackType | None) -> types.TracebackType | None:
    """Return a traceback without the frames of this package that called the user's code."""
    while tb is not None and _is_ours(tb.tb_frame.f_code.co_filename):
        tb = tb.tb_next
    return tb


def _is_raised_by_us(text: traceback.TracebackException) -> bool:
    """Return whether a ``raise`` statement of this package raised the error, and not code that it called."""
    return bool(text.stack) and _is_ours(text.stack[-1].filename) and (text.stack[-1].line or "").startswith("raise ")


def _end_at_the_users_line(text: traceback.TracebackException) -> None:
    """Cut the traceback of this package's error at the user's line: our frames add nothing to the message."""
    text.__cause__ = text.__context__ = None
    while text.stack and (_is_ours(text.stack[-1].filename) or text.stack[-1].filename == contextlib.__file__):
        text.stack.pop()


def _fold_our_frames(text: traceback.TracebackException) -> None:
    """Leave out this package's frames between the user's line and the library's line that failed."""
    for part in _chain(text):
        last = len(part.stack) - 1
        while last >= 0 and _is_ours(part.stack[last].filename):  # the place where the error was raised stays
            last -= 1
        if last > 0:
            part.stack[:last] = [frame for frame in part.stack[:last] if not _is_ours(frame.filename)]


def _is_ours(filename: str) -> bool:
    return filename.startswith(code_places.OURS)


def _with_cell_names(text: traceback.TracebackException, spec: JobSpec) -> traceback.TracebackException:
    """Replace the file names that the kernel gave the cells' code by the cells' names."""
    for part in _chain(text):
        for frame in part.stack:
            frame.line  # noqa: B018 - loads the source line, which linecache has under the present file name
            source = spec.sources.get(frame.filename)
            if source is not None:
                frame.filename = source.label
    return text


def _chain(text: traceback.TracebackException | None) -> list[traceback.TracebackException]:
    parts: list[traceback.TracebackException] = []
    waiting = [text]
    while waiting:
        part = waiting.pop()
        if part is not None and part not in parts:
            parts.append(part)
            waiting += [part.__cause__, part.__context__, *(getattr(part, "exceptions", None) or [])]
    return parts


def _innermost_line(text: traceback.TracebackException, spec: JobSpec) -> str:
    labels = {source.label for source in spec.sources.values()}
    for frame in reversed(text.stack):
        if frame.filename in labels:
            return f"{frame.filename}, line {frame.lineno}"
    return ""


def _place(error: BaseException, line: str) -> str:
    """Return where an error was raised: in the user's ``line``, or while a variable was rebuilt."""
    root = vars(error).get(serialization.ROOT_ATTRIBUTE)
    return line if not root else f"{events.REBUILDING} {root}" + (f" ({line})" if line else "")


def _pickled(error: BaseException, by_value: serialization.Origins) -> bytes:
    """Return the pickled exception, empty if it can't be pickled: the notebook gets its text anyway."""
    with contextlib.suppress(BaseException):  # of the user's ``__reduce__``
        pickled = serialization.pickle_by_value(
            error, roots={"the exception": error}, origins=by_value, device_tensors_to_cpu=True
        )
        if not pickled.buffers:
            return bytes(pickled.data)
    return b""
