"""A training with restarts whose processes are killed at random moments: its weights are the same, or it says why not.

Runs for a quarter of the chaos lane's time, from the same seed.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import random
import signal
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from sklearn.datasets import load_digits

from notebook_accel.config import LaunchConfig
from notebook_accel.errors import RunStoppedError, SupervisorLostError
from notebook_accel.launching import launcher, local
from notebook_accel.launching.job import Job
from tests import processes
from tests.chaos.test_launching import DURATION_S, SEED
from tests.launching import training
from tests.launching.test_elastic import below_template

_SHARE_S = DURATION_S / 4
_ENDS_S = 90.0  # far longer than any promise: what is looked for here is a hang
_MOST_KILLS = 4


@pytest.fixture
def digits() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    data = load_digits()
    yield torch.tensor(data.images / 16, dtype=torch.float32).flatten(1), torch.tensor(data.target)
    local.engine().close()


def _rank(job: Job, rng: random.Random) -> int | None:
    return rng.choice(job.ranks).pid


def _elastic(job: Job, _: random.Random) -> int | None:
    ranks = {info.pid for info in job.ranks}
    others = [process.pid for process in below_template() if process.pid not in ranks]
    return others[0] if len(others) == 1 and None not in ranks else None


def _agent(_: Job, __: random.Random) -> int | None:
    agents = [process.pid for process in processes.children(os.getpid()) if processes.is_agent(process)]
    return agents[0] if agents else None


def _template(job: Job, rng: random.Random) -> int | None:
    pid = _rank(job, rng)
    found = processes.read(pid) if pid is not None else None
    return found.parent if found is not None else None


_VICTIMS: dict[str, Callable[[Job, random.Random], int | None]] = {
    "rank": _rank, "elastic process": _elastic, "agent": _agent, "template": _template
}  # fmt: skip


@pytest.mark.chaos
@pytest.mark.timeout(_SHARE_S + 240)
def test_training_that_is_killed_ends_with_the_same_weights_or_says_what_was_lost(
    digits: tuple[torch.Tensor, torch.Tensor], tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def start(folder: str) -> Job:
        config = LaunchConfig(num_processes=2, use_cpu=True, view="none", max_restarts=99)
        return launcher.launch_function(training.train, (*digits, str(tmp_path / folder), 0.02), {}, config)

    wanted = start("whole").results(timeout_s=_ENDS_S)[0][2]
    order: list[str] = []
    rounds, ends_s = 0, time.monotonic() + _SHARE_S
    while time.monotonic() < ends_s:
        rng = random.Random(f"restarts-{SEED}-{rounds}")
        order = order or rng.sample(sorted(_VICTIMS), len(_VICTIMS))
        name = order.pop()
        job = start(str(rounds))
        kills = 0
        while not job.done and kills < _MOST_KILLS:
            job.wait(rng.uniform(0, 1.5))  # the randomness of it
            pid = None if job.done else _VICTIMS[name](job, rng)
            if pid is not None:
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    os.kill(pid, signal.SIGKILL)
                    kills += 1
        if rng.random() < 0.2:
            job.stop()
        assert job.wait(_ENDS_S), f"seed {SEED}, round {rounds}: {name}"
        if job.error is None:
            weights = job.results()[0][2]
            assert all(torch.equal(weights[key], wanted[key]) for key in wanted), f"seed {SEED}, round {rounds}"
        else:
            assert isinstance(job.error, RunStoppedError | SupervisorLostError), job.error
        processes.wait_until(lambda: below_template() == [], "nothing is left of it")
        rounds += 1
        with capsys.disabled():
            said = f"{kills} kills, {len(job.restarts)} restarts, {job.status}"
            print(f"\nchaos with restarts, seed {SEED}, round {rounds}: {name}: {said}", end="")
    assert rounds >= 1
