"""The notebook's settings of Python's ``logging``, which the ranks take over: they start without any.

So messages appear as in the notebook, or in the file to which it logs. What goes only to a queue in the notebook, where
a thread reads it, ranks write to stderr. Filters, and other handlers that write to neither the standard streams nor a
file, are left out.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import logging.handlers
import sys
import weakref
from typing import Any

import msgspec

_STYLES: dict[type, str] = {logging.PercentStyle: "%", logging.StrFormatStyle: "{", logging.StringTemplateStyle: "$"}
_PLAIN = logging.Formatter(logging.BASIC_FORMAT)
_taken_over: weakref.WeakSet[logging.Handler] = weakref.WeakSet()


class LogHandler(msgspec.Struct, frozen=True):
    """A handler that writes lines.

    Attributes:
        to: ``stdout``, ``stderr``, or the path of a file.
        level: Its level.
        format: The arguments of its ``logging.Formatter``; empty for logging's own format.
        encoding: Encoding of the file, and its handling of errors.
    """

    to: str
    level: int
    format: tuple[str | None, ...] = ()
    encoding: tuple[str | None, str | None] = (None, None)


class LoggerSettings(msgspec.Struct, frozen=True):
    """The level, ``propagate`` and handlers of a logger."""

    level: int
    propagate: bool
    handlers: tuple[LogHandler, ...]


def settings() -> dict[str, LoggerSettings]:
    """Return the settings of this process's loggers, by name; an empty name for the root.

    Handlers are only those of the root and of loggers that belong to no package: a package adds its handlers itself
    when a rank imports it. The kernel's own logger is left out: a rank has no kernel, and setting a level there takes
    1 ms.
    """
    found: dict[str, LoggerSettings] = {}
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    kernels_own = getattr(getattr(shell, "kernel", None), "log", None)
    loggers = {"": logging.getLogger(), **logging.Logger.manager.loggerDict}
    for name, logger in loggers.items():
        if not isinstance(logger, logging.Logger) or (name and logger is kernels_own):  # or a placeholder for a parent
            continue
        if not logger.handlers and logger.level == (logging.NOTSET if name else logging.WARNING):  # nearly all
            continue
        is_package = name.partition(".")[0] in sys.modules and not name.startswith("__main__")
        handlers = () if is_package else tuple(filter(None, map(_described, logger.handlers)))
        queues = [] if is_package else _queues_of(logger)
        if queues and not handlers:
            handlers = (LogHandler("stderr", min(each.level for each in queues)),)
        if handlers or logger.level != (logging.NOTSET if name else logging.WARNING):
            found[name] = LoggerSettings(logger.level, bool(logger.propagate), handlers)
    return found


def take_over(found: dict[str, LoggerSettings]) -> None:
    """Set up this process's loggers. Those that have handlers keep them, except for queues."""
    for name, each in found.items():
        logger = logging.getLogger(name)
        if logger.level != each.level:  # setting a level clears the caches of all loggers, which takes 2 ms in a fork
            logger.setLevel(each.level)
        logger.propagate = each.propagate
        for inherited in _queues_of(logger):  # in a fork of the kernel, without the thread that reads the queue
            logger.removeHandler(inherited)
        for described in () if logger.handlers else each.handlers:
            with contextlib.suppress(OSError):  # another machine may lack the file's folder
                handler = _made(described)
                handler.addFilter(functools.partial(_is_alone, logger, described.to))
                _taken_over.add(handler)
                logger.addHandler(handler)


def _queues_of(logger: logging.Logger) -> list[logging.Handler]:
    return [handler for handler in logger.handlers if isinstance(handler, logging.handlers.QueueHandler)]


def _is_alone(logger: logging.Logger, to: str, _record: logging.LogRecord) -> bool:
    """Return whether no code of the rank, such as a module when it is imported, has added such a handler itself."""
    own = (_described(handler) for handler in logger.handlers if handler not in _taken_over)
    return all(described is None or described.to != to for described in own)


def _described(handler: logging.Handler) -> LogHandler | None:
    console = getattr(handler, "console", None)  # of rich
    stream = getattr(handler, "stream", None) or getattr(console, "file", None)
    encoding: tuple[str | None, str | None] = (None, None)
    if isinstance(handler, logging.FileHandler):
        to, encoding = handler.baseFilename, (handler.encoding, handler.errors)
    elif stream is not None and stream in (sys.stdout, sys.__stdout__):
        to = "stdout"
    elif stream is not None and stream in (sys.stderr, sys.__stderr__):
        to = "stderr"
    else:
        return None
    # A formatter of the user's class may lack these attributes, or have values of other types.
    text, dates = (getattr(handler.formatter, name, None) for name in ("_fmt", "datefmt"))
    style = _STYLES.get(type(getattr(handler.formatter, "_style", None)))
    if style is None or not isinstance(text, str):
        return LogHandler(to, handler.level, (), encoding)
    return LogHandler(to, handler.level, (text, dates if isinstance(dates, str) else None, style), encoding)


def _made(described: LogHandler) -> logging.Handler:
    streams = {"stdout": sys.stdout, "stderr": sys.stderr}
    encoding, errors = described.encoding
    handler = (
        logging.StreamHandler(streams[described.to])
        if described.to in streams
        else _SharedFileHandler(described.to, encoding=encoding, errors=errors)
    )
    handler.setLevel(described.level)
    handler.setFormatter(_Formatter(*described.format))
    return handler


class _SharedFileHandler(logging.handlers.WatchedFileHandler):
    """A handler that appends to a file to which other processes write too. The notebook's may rotate it, not this."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError:  # the file's folder has gone: no error for the code that logs
            self.handleError(record)


class _Formatter(logging.Formatter):
    """A formatter for texts with fields that a class or a filter in the notebook may have added to its records."""

    def __init__(self, text: str | None = None, dates: str | None = None, style: Any = "%") -> None:
        super().__init__(text, dates, style, validate=False)  # a class of the user's may not use its text

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        try:
            return super().formatMessage(record)
        except (TypeError, ValueError):
            return _PLAIN.formatMessage(record)
