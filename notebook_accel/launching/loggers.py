"""The notebook's settings of Python's ``logging``, which the ranks take over: they start without any.

So messages appear as in the notebook, or in the file to which it logs. Filters, and handlers that write to neither the
standard streams nor a file, are left out.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from typing import Any

import msgspec

_STYLES: dict[type, str] = {logging.PercentStyle: "%", logging.StrFormatStyle: "{", logging.StringTemplateStyle: "$"}


class LogHandler(msgspec.Struct, frozen=True):
    """A handler that writes lines.

    Attributes:
        to: ``stdout``, ``stderr``, or the path of a file.
        level: Its level.
        format: The arguments of its ``logging.Formatter``; empty for logging's own format.
    """

    to: str
    level: int
    format: tuple[Any, ...] = ()


class LoggerSettings(msgspec.Struct, frozen=True):
    """The level, ``propagate`` and handlers of a logger."""

    level: int
    propagate: bool
    handlers: tuple[LogHandler, ...]


def settings() -> dict[str, LoggerSettings]:
    """Return the settings of this process's loggers, by name; an empty name for the root.

    Handlers are only those of the root and of loggers that belong to no package: a package adds its handlers itself
    when a rank imports it.
    """
    found: dict[str, LoggerSettings] = {}
    loggers = {"": logging.getLogger(), **logging.Logger.manager.loggerDict}
    for name, logger in loggers.items():
        if not isinstance(logger, logging.Logger):  # a placeholder for the parent of others
            continue
        is_package = name.partition(".")[0] in sys.modules and not name.startswith("__main__")
        handlers = () if is_package else tuple(filter(None, map(_described, logger.handlers)))
        if handlers or logger.level != (logging.NOTSET if name else logging.WARNING):
            found[name] = LoggerSettings(logger.level, bool(logger.propagate), handlers)
    return found


def take_over(found: dict[str, LoggerSettings]) -> None:
    """Set up this process's loggers. Those that have handlers keep them."""
    for name, each in found.items():
        logger = logging.getLogger(name)
        logger.setLevel(each.level)
        logger.propagate = each.propagate
        for described in () if logger.handlers else each.handlers:
            with contextlib.suppress(OSError):  # another machine may lack the file's folder
                logger.addHandler(_made(described))


def _described(handler: logging.Handler) -> LogHandler | None:
    console = getattr(handler, "console", None)  # of rich
    stream = getattr(handler, "stream", None) or getattr(console, "file", None)
    if isinstance(handler, logging.FileHandler):
        to = handler.baseFilename
    elif stream is not None and stream in (sys.stdout, sys.__stdout__):
        to = "stdout"
    elif stream is not None and stream in (sys.stderr, sys.__stderr__):
        to = "stderr"
    else:
        return None
    formatter = handler.formatter
    if not isinstance(formatter, logging.Formatter):
        return LogHandler(to, handler.level)
    style = _STYLES.get(type(getattr(formatter, "_style", None)), "%")
    texts = (getattr(formatter, name, None) for name in ("_fmt", "datefmt"))  # a class of the user's may lack them
    return LogHandler(to, handler.level, (*(text if isinstance(text, str) else None for text in texts), style))


def _made(described: LogHandler) -> logging.Handler:
    streams = {"stdout": sys.stdout, "stderr": sys.stderr}
    handler = (
        logging.StreamHandler(streams[described.to])
        if described.to in streams
        else logging.FileHandler(described.to, encoding="utf-8")  # which appends, as the other ranks do
    )
    handler.setLevel(described.level)
    handler.setFormatter(_formatter(*described.format))
    return handler


def _formatter(text: str | None = None, dates: str | None = None, style: Any = "%") -> logging.Formatter:
    return logging.Formatter(text, dates, style, validate=False)  # a class of the user's may not use its text
