"""Loggers that log on one rank, as in ``accelerate.logging``."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

from notebook_accel.training import collectives, process_group

__all__ = ["MultiProcessAdapter", "RankLogger", "get_logger"]

if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
else:
    _Adapter = logging.LoggerAdapter  # Python 3.10 can't subscript it

_warned: set[tuple[str, object]] = set()


class RankLogger(_Adapter):
    """A logger that logs on rank 0 only, by default.

    Each method takes two more arguments. ``main_process_only=False`` logs on every rank. With ``in_order=True`` the
    ranks log one after the other, and all of them have to call the method.
    """

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        """Log on rank 0, on every rank, or on every rank in order."""
        main_process_only = kwargs.pop("main_process_only", True)
        in_order = kwargs.pop("in_order", False)
        kwargs.setdefault("stacklevel", 2)
        if not self.isEnabledFor(level):
            return
        rank = process_group.rank_place().rank
        if main_process_only or not in_order:
            if rank == 0 or not main_process_only:
                self.logger.log(level, msg, *args, **kwargs)
            return
        backend = process_group.current()
        for turn in range(backend.place.world_size):
            if turn == rank:
                self.logger.log(level, msg, *args, **kwargs)
            collectives.wait_for_everyone(backend)

    def warning_once(self, msg: object, *args: Any, **kwargs: Any) -> None:
        """Log a warning the first time only."""
        if (self.logger.name, msg) not in _warned:
            _warned.add((self.logger.name, msg))
            self.warning(msg, *args, **kwargs)


MultiProcessAdapter = RankLogger  # as Accelerate calls it


def get_logger(name: str, log_level: str | None = None) -> RankLogger:
    """Return a logger that logs on rank 0 only.

    Args:
        name: The name, as for ``logging.getLogger``.
        log_level: The level, such as ``"INFO"``. Default: ``ACCELERATE_LOG_LEVEL``, or the level that ``logging`` has.
    """
    logger = logging.getLogger(name)
    level = log_level or os.environ.get("ACCELERATE_LOG_LEVEL")
    if level:
        logger.setLevel(level.upper())
        logger.root.setLevel(level.upper())
    return RankLogger(logger, {})
