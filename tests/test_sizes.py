"""Sizes as people read them."""

from __future__ import annotations

import pytest

from notebook_accel import sizes


@pytest.mark.parametrize(("size_bytes", "words"), [
    (0, "0 KiB"), (3 << 10, "3 KiB"), (1 << 20, "1.0 MiB"), (240 << 20, "240 MiB"), (3 << 29, "1.5 GiB"),
    (80 << 30, "80 GiB"),
])  # fmt: skip
def test_sizes_in_words(size_bytes: int, words: str) -> None:
    assert sizes.in_words(size_bytes) == words
