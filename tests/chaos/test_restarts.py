"""A training with restarts whose processes are killed at random moments: the same weights, or it says why not."""

from __future__ import annotations

import os
import pathlib
import random
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits

from notebook_accel.config import LaunchConfig
from notebook_accel.errors import RunStoppedError, SupervisorLostError
from notebook_accel.launching.kernel import launcher, local
from notebook_accel.launching.kernel.job import Job
from tests import processes
from tests.chaos import rounds, training

_SHARE = 0.25
_ENDS_S = 90.0  # far longer than any promise: what is looked for here is a hang
_MOST_KILLS = 4


@pytest.fixture
def digits() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    data = load_digits()
    yield torch.tensor(data.images / 16, dtype=torch.float32).flatten(1), torch.tensor(data.target)
    local.engine().close()


def _rank(job: Job, rng: random.Random) -> processes.Process | None:
    return _template_or_rank(rng.choice(job.ranks).pid)


def _elastic(job: Job, _: random.Random) -> processes.Process | None:
    ranks = {info.pid for info in job.ranks}
    others = [process for process in processes.below_template() if process.pid not in ranks]
    return others[0] if len(others) == 1 and None not in ranks else None


def _agent(_: Job, __: random.Random) -> processes.Process | None:
    agents = [process for process in processes.children(os.getpid()) if processes.is_agent(process)]
    return agents[0] if agents else None


def _template(job: Job, rng: random.Random) -> processes.Process | None:
    rank = _rank(job, rng)
    # A rank whose template has gone is the tests' own child until its end.
    return _template_or_rank(rank.parent) if rank is not None else None


def _template_or_rank(pid: int | None) -> processes.Process | None:
    """The process with this pid, unless it has ended and the pid is another's."""
    found = processes.read(pid) if pid is not None else None
    return found if found is not None and processes.is_template(found) else None


_VICTIMS: dict[str, Callable[[Job, random.Random], processes.Process | None]] = {
    "rank": _rank, "elastic process": _elastic, "agent": _agent, "template": _template
}  # fmt: skip


def test_parent_of_a_rank_whose_template_is_gone_is_no_victim() -> None:
    orphan = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()", "notebook_accel.launching.template.template"],
        stdin=subprocess.PIPE,
    )
    with orphan:
        job: Any = types.SimpleNamespace(ranks=[types.SimpleNamespace(pid=orphan.pid)])
        # It has no command line yet when its start has just been heard of.
        rank = processes.wait_until(lambda: _rank(job, random.Random(0)), "it can be seen")
        assert (rank.pid, rank.parent) == (orphan.pid, os.getpid())
        assert _template(job, random.Random(0)) is None


@pytest.mark.chaos
@pytest.mark.timeout(rounds.DURATION_S + 240)
def test_training_that_is_killed_ends_with_the_same_weights_or_says_what_was_lost(
    digits: tuple[torch.Tensor, torch.Tensor], tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def start(folder: str) -> Job:
        config = LaunchConfig(num_processes=2, use_cpu=True, view="none", max_restarts=99)
        return launcher.launch_function(training.train, (*digits, str(tmp_path / folder), 0.02), {}, config)

    wanted = start("whole").results(timeout_s=_ENDS_S)[0][2]

    def play(name: str, rng: random.Random, number: int) -> str:
        job = start(str(number))
        kills, killed_by_s = 0, time.monotonic() + _ENDS_S
        while not job.done and kills < _MOST_KILLS and time.monotonic() < killed_by_s:
            job.wait(rng.uniform(0, 1.5))  # the randomness of it
            victim = None if job.done else _VICTIMS[name](job, rng)
            kills += victim is not None and processes.kill(victim)
        if rng.random() < 0.2:
            job.stop()
        assert job.wait(_ENDS_S), f"{job.status} after {kills} kills, restarts: {job.restarts}"
        if job.error is None:
            weights = job.results()[0][2]
            assert all(torch.equal(weights[key], wanted[key]) for key in wanted)
        else:
            assert isinstance(job.error, RunStoppedError | SupervisorLostError), job.error
        processes.wait_until(lambda: processes.below_template() == [], "nothing is left of it")
        return f"{name}: {kills} kills, {len(job.restarts)} restarts, {job.status}"

    rounds.play("chaos with restarts", _SHARE, sorted(_VICTIMS), play, capsys)
