"""Tests that the last complete checkpoint loads, whenever ranks were killed."""

from __future__ import annotations

import contextlib
import itertools
import os
import pathlib
from typing import Any

import pytest

from tests.training import killed_savers, ranks


def run(folder: pathlib.Path, naming: str, **kind: bool) -> Any:
    meeting = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    with contextlib.closing(ranks.Ranks([meeting])) as parent:
        (result,) = parent.run(killed_savers.run, str(folder), naming, kind, deadline_s=110)
    return result


@pytest.mark.parametrize(("naming", "is_async"), [
    ("numbered", False),
    pytest.param("one name", False, marks=pytest.mark.slow),
    pytest.param("numbered", True, marks=pytest.mark.slow),
])  # fmt: skip
def test_at_every_change_that_saving_makes(tmp_path: pathlib.Path, naming: str, is_async: bool) -> None:
    result = run(tmp_path, naming, is_async=is_async)
    found = result["found"]
    assert result["kills"] >= 20
    assert len(found) == result["kills"] + 1
    assert found[0] == 2
    # No checkpoint is lost, and at most the one that was being written when the rank was killed is new.
    assert all(0 <= following - number <= 1 for number, following in itertools.pairwise(found))
    assert found[-1] > 2
    left = os.listdir(tmp_path / "checkpoints" if naming == "numbered" else tmp_path)
    assert not [name for name in left if name.startswith(".")]
    assert len(left) == (2 if naming == "numbered" else 1)
