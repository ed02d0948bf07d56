"""A rank that waits for one that has finished fails soon, says for whom it waited, and no right program is ended."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from notebook_accel.errors import CollectiveError, RankFailedError
from notebook_accel.launching.kernel.job import Job
from notebook_accel.launching.ranks import finished_peers
from tests import processes

Launch = Callable[..., Job]


def waits_in(how: str) -> int:
    """Rank 1 returns; the others wait for it."""
    import torch.distributed as dist
    from torch import nn, ones

    finished_peers._PATIENCE_S = 0.5
    rank = int(os.environ["RANK"])
    if how in ("barrier", "backward"):
        dist.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))
        for _ in range(2 if rank == 1 else 4):
            if how == "backward":
                model(ones(2, 4)).sum().backward()
            else:
                dist.barrier()
    elif rank != 1:
        dist.init_process_group("gloo")
    return rank


def waits_long(how: str, looked: str) -> float:
    """Rank 2 returns. Rank 0 waits for rank 1, which comes once rank 0 has looked often whether it waits in vain."""
    import torch
    import torch.distributed as dist

    finished_peers._PATIENCE_S = 0.5
    dist.init_process_group("gloo")
    pair = dist.new_group([0, 1])
    rank, number = dist.get_rank(), torch.ones(1)
    judge, looks = finished_peers._is_in_a_collective, []

    def judge_and_count(frame: Any) -> bool:
        looks.append(judge(frame))
        pathlib.Path(looked).write_text(str(len(looks)))
        return looks[-1]

    if rank == 0:
        finished_peers._is_in_a_collective = judge_and_count
        dist.all_reduce(number, group=pair) if how == "subgroup" else dist.recv(number, src=1)
        assert any(looks) == (how == "subgroup")
    elif rank == 1:
        file = pathlib.Path(looked)
        processes.wait_until(lambda: file.exists() and int(file.read_text() or 0) > 2, "rank 0 has looked", 60)
        dist.all_reduce(number, group=pair) if how == "subgroup" else dist.send(number + 1, dst=0)
    return number.item()


@pytest.mark.parametrize(
    ("how", "ranks", "method"),
    [
        ("barrier", 2, "spawn"),
        *(
            pytest.param(*slow, marks=pytest.mark.slow)
            for slow in (("backward", 3, "spawn"), ("making a group", 2, "fork"))
        ),
    ],
)
def test_rank_that_waits_for_one_that_has_finished_says_so(launch: Launch, how: str, ranks: int, method: str) -> None:
    job = launch(waits_in, how, num_processes=ranks, start_method=method)
    with pytest.raises(RankFailedError) as raised:
        job.results(timeout_s=60)
    error = raised.value
    assert error.rank != 1
    assert isinstance(error.__cause__, CollectiveError)
    call = "init_process_group" if how == "making a group" else how
    assert f"waited for rank 1, which had finished: {call} at " in str(error)
    assert "rank 1: had finished" in map(str, error.others)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["subgroup", "recv"])
def test_rank_that_waits_for_one_that_goes_on_is_left(launch: Launch, tmp_path: pathlib.Path, how: str) -> None:
    job = launch(waits_long, how, str(tmp_path / "looked"), num_processes=3)
    assert job.results(timeout_s=90) == [2.0, 2.0 if how == "subgroup" else 1.0, 1.0]
