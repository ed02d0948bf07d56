"""How durations are written for people."""

from __future__ import annotations

__all__ = ["in_minutes", "in_words"]

_SHORT_S = 10.0


def in_minutes(seconds: float) -> str:
    """``02:05``, or ``1:02:05`` with hours: of one that goes on, or that need not be known exactly."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute:02}:{second:02}"


def in_words(seconds: float) -> str:
    """How long something took: ``0.04 s``, ``3.2 s``, ``02:05``."""
    if seconds >= _SHORT_S:
        return in_minutes(seconds)
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds:.2f} s"
