"""How sizes are written for people."""

from __future__ import annotations

__all__ = ["in_words"]

_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20))


def in_words(size_bytes: int) -> str:
    """``1.5 GiB``, ``24 GiB``, ``240 MiB``, ``3 KiB``."""
    for unit, factor in _UNITS:
        if size_bytes >= factor:
            decimals = 1 if size_bytes < 10 * factor else 0
            return f"{size_bytes / factor:.{decimals}f} {unit}"
    return f"{size_bytes / 1024:.0f} KiB"
