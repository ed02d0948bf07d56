"""The notebook's settings of Python's ``logging``, which the ranks take over: they start without any.

A logger keeps its level. One that has a handler in the notebook writes to the rank's output, in the format of that
handler. Files, queues and filters stay with the notebook.
"""

from __future__ import annotations

import logging
import logging.handlers
import sys
from typing import Any

import msgspec

_STYLES: dict[type, str] = {logging.PercentStyle: "%", logging.StrFormatStyle: "{", logging.StringTemplateStyle: "$"}
_PLAIN = logging.Formatter(logging.BASIC_FORMAT)


class LoggerSettings(msgspec.Struct, frozen=True):
    """The settings of a logger.

    Attributes:
        level: Its level.
        propagate: Whether the handlers of its parents get its messages too.
        format: The arguments of the ``logging.Formatter`` of its handler; empty for logging's own format, and ``None``
            if it has no handler.
        handler_level: The level of that handler.
    """

    level: int
    propagate: bool
    format: tuple[str | None, ...] | None = None
    handler_level: int = logging.NOTSET


def settings() -> dict[str, LoggerSettings]:
    """Return the settings of this process's loggers, by name; an empty name for the root.

    Of several handlers, the first that writes to the output counts, or else the first. Handlers of packages are left
    out: a package adds them itself when a rank imports it. The kernel's own logger is left out: a rank has no kernel,
    and setting a level there takes 1 ms.
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
        handlers = [] if is_package else [each for each in logger.handlers if not isinstance(each, logging.NullHandler)]
        described: tuple[Any, ...] = ()
        if handlers:
            shown = next((each for each in handlers if _is_console(each)), handlers[0])
            described = _format_of(shown.formatter), shown.level
        found[name] = LoggerSettings(logger.level, bool(logger.propagate), *described)
    return found


def take_over(found: dict[str, LoggerSettings]) -> None:
    """Set up this process's loggers. Those that have handlers keep them, except for queues."""
    present = logging.Logger.manager.loggerDict
    for name, each in found.items():
        logger = present.get(name)
        if not isinstance(logger, logging.Logger):  # to look up one that is there takes 10 µs in a fork
            logger = logging.getLogger(name)
        if logger.level != each.level:  # setting a level clears the caches of all loggers, which takes 2 ms in a fork
            logger.setLevel(each.level)
        logger.propagate = each.propagate
        for inherited in [*logger.handlers]:  # in a fork of the kernel, without the thread that reads the queue
            if isinstance(inherited, logging.handlers.QueueHandler):
                logger.removeHandler(inherited)
        if each.format is not None and not logger.handlers:
            handler = _ConsoleHandler(logger)
            handler.setLevel(each.handler_level)
            handler.setFormatter(_Formatter(*each.format))
            logger.addHandler(handler)


def _is_console(handler: logging.Handler) -> bool:
    stream = getattr(handler, "stream", None) or getattr(getattr(handler, "console", None), "file", None)  # of rich
    return stream is not None and stream in (sys.stdout, sys.__stdout__, sys.stderr, sys.__stderr__)


def _format_of(formatter: logging.Formatter | None) -> tuple[str | None, ...]:
    # A formatter of the user's class may lack these attributes, or have values of other types.
    text, dates = (getattr(formatter, name, None) for name in ("_fmt", "datefmt"))
    style = _STYLES.get(type(getattr(formatter, "_style", None)))
    if style is None or not isinstance(text, str):
        return ()
    return text, dates if isinstance(dates, str) else None, style


class _ConsoleHandler(logging.StreamHandler[Any]):
    """A handler that is silent once code of the rank, such as a module at its import, has added such a handler."""

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__()
        self._logger = logger

    def emit(self, record: logging.LogRecord) -> None:
        if not any(_is_console(each) for each in self._logger.handlers if each is not self):
            super().emit(record)


class _Formatter(logging.Formatter):
    """A formatter for texts with fields that a class or a filter in the notebook may have added to its records."""

    def __init__(self, text: str | None = None, dates: str | None = None, style: Any = "%") -> None:
        super().__init__(text, dates, style, validate=False)  # a class of the user's may not use its text

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        try:
            return super().formatMessage(record)
        except (TypeError, ValueError):
            return _PLAIN.formatMessage(record)
