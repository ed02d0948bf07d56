"""The processes that serve as ranks in these tests."""

from __future__ import annotations

import os

import pytest

from tests.training import ranks


def crash(rank: str) -> str:
    if os.environ["RANK"] == rank:
        os.abort()
    return os.environ["RANK"]


def test_rank_that_crashes_fails_its_test_only() -> None:
    with ranks.running(2) as two:
        with pytest.raises(ChildProcessError, match="rank 1 has ended with exit code -6"):
            two.run(crash, "1")
        ranks.Ranks.replace_late()
        assert two.run(crash, "none") == ["0", "1"]
