"""A session's %pull brings sharded models whole; a rank that is dead is named."""

from __future__ import annotations

import os
import signal

import pytest
import torch

from notebook_accel.errors import RankFailedError, ResultError
from notebook_accel.sessions.kernel.session import Session
from tests import processes

_PREPARE = """
from notebook_accel import Accelerator, FullyShardedDataParallelPlugin
sharding = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin())
model = sharding.prepare(torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 2)))
sums = {name: float(value.sum()) for name, value in sharding.get_state_dict(model).items()}
own = rank
"""


@pytest.fixture
def sharded(session: Session) -> Session:
    session.execute(_PREPARE)
    return session


def test_pulled_model_is_whole(sharded: Session) -> None:
    model, sums, own = sharded.pull("model", "sums", "own")
    assert type(model) is torch.nn.Sequential
    assert {name: float(value.sum()) for name, value in model.state_dict().items()} == pytest.approx(sums)
    assert own == 0
    [of_rank_1] = sharded.pull_all("model", "own", ranks=[1])
    assert of_rank_1["own"] == 1
    assert torch.equal(of_rank_1["model"][1].weight, model[1].weight)
    both = sharded.pull_all("model")
    assert [torch.equal(each["model"][0].weight, model[0].weight) for each in both] == [True, True]


@pytest.mark.parametrize(("code", "note"), [
    ("model", "[its parameters are sharded over the ranks: %pull its name, or accelerator.get_state_dict(...)"),
    ("model[0].weight", "[each rank shows its share of a tensor of shape (6, 6): .full_tensor() on all ranks"),
    ("model.state_dict()", "[each rank shows its share of 4 tensors: .full_tensor() on all ranks"),
    ("[model[0].bias, 3]", "[each rank shows its share of a tensor of shape (6,): .full_tensor()"),
    ("model[0].weight.full_tensor()", ""),
    ("torch.nn.Linear(1, 1)", ""),
])  # fmt: skip
def test_a_shown_share_says_how_to_get_the_whole(sharded: Session, code: str, note: str) -> None:
    text = str(sharded.execute(code))
    assert note in text
    assert ("sharded over the ranks" in text or "its share" in text) is bool(note)


def test_a_name_that_only_one_rank_lacks_keeps_nobody_waiting(sharded: Session) -> None:
    sharded.execute("if rank: del model")
    with pytest.raises(ResultError, match="rank 0 and rank 1 differ, rank 1 has nothing sharded there"):
        sharded.pull("model")
    with pytest.raises(RankFailedError, match="name 'model' is not defined"):
        sharded.pull("model", rank=1)
    assert sharded.pull("own", rank=1) == 1
    sharded.execute(_PREPARE)  # no group was broken
    assert sharded.pull("model")[1].weight.shape == (2, 6)


def test_without_a_rank_a_sharded_model_is_refused(session: Session) -> None:
    with Session(num_processes=2, use_cpu=True, view="none") as own:
        own.execute("import os, torch\nrank = int(os.environ['RANK'])")
        own.execute(_PREPARE)
        pid = own.job.ranks[1].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        processes.wait_until(lambda: own._pool.alive == [0], "the session knows")
        with pytest.raises(ResultError, match="all ranks have to take part, and not all are alive"):
            own.pull("model")
        assert own.pull("own") == 0
