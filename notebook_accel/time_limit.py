"""The time limit of a run: the time that ``end_at`` states, or the limit of a Slurm job.

At that time the machine or the notebook goes away. Before it, in time for a checkpoint, ``Accelerator.should_stop``
becomes true. The kernel works out the time, and its ranks get it in an environment variable.
"""

from __future__ import annotations

import datetime
import os
import re
import time
from collections.abc import Mapping

from notebook_accel.errors import ConfigError

TIME_LIMIT = "NOTEBOOK_ACCEL_TIME_LIMIT"  # seconds since the epoch; empty: there is none
END_MARGIN = "NOTEBOOK_ACCEL_END_MARGIN_S"
SLURM_END = "SLURM_JOB_END_TIME"  # seconds since the epoch (https://slurm.schedmd.com/sbatch.html)
DEFAULT_MARGIN_S = 120.0
_UNITS_S = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0}
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?[dhms])+")
_PART = re.compile(r"(\d+(?:\.\d+)?)([dhms])")
_HOURS_AND_MINUTES = re.compile(r"(\d+):([0-5]\d)h")
_CLOCK = re.compile(r"(\d{1,2}):(\d{2})(?::(\d{2}))?")


def parse(text: str, now_s: float | None = None) -> float:
    """Return the time that a text states, in seconds since the epoch. Raise a ``ConfigError`` if it states none.

    The text is a time of day (``23:30``), which is the next one; a duration from now (``11.5h``, ``11:30h``, ``90m``,
    ``1h30m``); or a date with a time in ISO 8601 (``2026-05-01T08:00``, in local time unless it has a zone).
    """
    now_s = time.time() if now_s is None else now_s
    if is_duration(text):
        parts = _PART.findall(_HOURS_AND_MINUTES.sub(r"\1h\2m", text))
        return now_s + sum(float(number) * _UNITS_S[unit] for number, unit in parts)
    try:
        if clock := _CLOCK.fullmatch(text):
            hour, minute, second = (int(part or 0) for part in clock.groups())
            now = datetime.datetime.fromtimestamp(now_s)
            today = now.replace(hour=hour, minute=minute, second=second, microsecond=0)
            return (today if today > now else today + datetime.timedelta(days=1)).timestamp()
        if ":" in text:
            return datetime.datetime.fromisoformat(re.sub("Z$", "+00:00", text)).timestamp()
    except (ValueError, OverflowError):
        pass
    raise ConfigError(
        f"end_at={text!r} isn't a time.",
        fix="a time of day such as 23:30, a duration from now such as 11.5h, 90m or 1h30m, or a date with a time such "
        "as 2026-05-01T08:00",
    )


def is_duration(text: str) -> bool:
    """Return whether a text states a duration from now."""
    return bool(_DURATION.fullmatch(text) or _HOURS_AND_MINUTES.fullmatch(text))


def end_of(end_at: str, environ: Mapping[str, str] = os.environ) -> float | None:
    """Return a launch's time limit in seconds since the epoch: the option's or the environment's; ``None`` if none."""
    if end_at:
        return parse(end_at)
    told = environ.get(TIME_LIMIT, environ.get(SLURM_END, ""))
    try:
        return float(told) if told else None
    except ValueError:
        return None


def variables(end_at: str, margin_s: float) -> dict[str, str]:
    """Return the environment variables that tell ranks the time limit."""
    end_s = end_of(end_at)
    return {TIME_LIMIT: "" if end_s is None else f"{end_s:.3f}", END_MARGIN: f"{margin_s:g}"}


def margin_of(environ: Mapping[str, str] = os.environ) -> float:
    """Return how many seconds before the time limit a rank should stop."""
    try:
        return float(environ.get(END_MARGIN) or DEFAULT_MARGIN_S)
    except ValueError:
        return DEFAULT_MARGIN_S


def in_words(end_s: float) -> str:
    """Return a time as ``23:30``, with the date unless it is today's."""
    end = datetime.datetime.fromtimestamp(end_s)
    return end.strftime("%H:%M" if end.date() == datetime.date.today() else "%Y-%m-%d %H:%M")
