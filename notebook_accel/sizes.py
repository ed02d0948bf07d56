"""How sizes and numbers of things are written for people."""

from __future__ import annotations

__all__ = ["counted", "in_words"]

_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20))


def counted(number: int, noun: str) -> str:
    """``1 rank``, ``2 ranks``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def in_words(size_bytes: int) -> str:
    """``1.5 GiB``, ``24 GiB``, ``240 MiB``, ``3 KiB``."""
    for unit, factor in _UNITS:
        if size_bytes >= factor:
            decimals = 1 if size_bytes < 10 * factor else 0
            return f"{size_bytes / factor:.{decimals}f} {unit}"
    return f"{size_bytes / 1024:.0f} KiB"
