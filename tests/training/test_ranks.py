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


@ranks.on_ranks(2)
def test_body_of_a_test_runs_in_ranks() -> None:
    assert os.environ["WORLD_SIZE"] == "2"


def fail(expected: int) -> None:
    found = int(os.environ["WORLD_SIZE"])
    assert found == expected


def test_assertion_that_fails_in_a_rank_shows_its_variables(
    two_ranks: ranks.Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(AssertionError):
        two_ranks.run(fail, 3)
    assert "found = 2" in capsys.readouterr().out
