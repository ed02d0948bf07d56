"""Detached runs whose kernel or server is killed at random moments, for some seconds."""

from __future__ import annotations

import itertools
import os
import pathlib
import random
import signal
import time

import pytest

from notebook_accel.errors import RunStoppedError
from notebook_accel.launching import run_folders
from notebook_accel.launching.kernel import detached, detached_runs
from notebook_accel.launching.run_folders import RunFolder
from notebook_accel.training import checkpoint_folders
from tests import kernels, processes
from tests.browser import lab as labs
from tests.chaos import rounds
from tests.chaos.killed_kernels import MOMENTS, is_clean, is_decided, one_round, printed

_SHARE = 0.15
_LONG_S = 100.0
_CELL = """
%%distributed --num_processes 2 --use_cpu --view none --name night --pull kept {flag}
import pathlib, time, torch
from notebook_accel import Accelerator, report
accelerator = Accelerator()
model = accelerator.prepare(torch.nn.Linear(500, 500))
step = ended = 0
while not ended:
    report(loss=1 / (step + 1))
    print("step", step)
    step += 1
    if step % 5 == 0:
        accelerator.save_state({state!r})
    ended = accelerator.reduce(torch.tensor(float(pathlib.Path({mark!r}).exists()))).item()
    time.sleep(0.01)
kept = step
step
"""
_SERVED_MOMENTS = ("launching", "training", "saving", "ending", "detaching")
_BLOWS = ("kernel", "server", "both", "hangup")


@pytest.mark.chaos
@pytest.mark.usefixtures("state_home")
@pytest.mark.timeout(rounds.DURATION_S + 240)
def test_kernels_that_are_killed_take_nothing_along(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    def play(moment: str, rng: random.Random, number: int) -> str:
        return one_round(moment, tmp_path / f"round-{number}", rng)

    rounds.play("detached", _SHARE, MOMENTS, play, capsys)


@pytest.mark.chaos
@pytest.mark.usefixtures("state_home")
@pytest.mark.timeout(rounds.DURATION_S + 240)
def test_servers_that_are_killed_take_nothing_along(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    def play(kind: tuple[str, str], rng: random.Random, number: int) -> str:
        return _served_round(*kind, tmp_path / f"round-{number}", rng)

    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup, kernels would outlive a hangup
    try:
        kinds = [*itertools.product(_SERVED_MOMENTS, _BLOWS)]
        rounds.play("detached from a server", _SHARE, kinds, play, capsys)
    finally:
        signal.signal(signal.SIGHUP, before)


class _ServedKernel(kernels.Kernel):
    """A kernel that a Jupyter server has started."""

    def __init__(self, lab: labs.Lab) -> None:
        self._cells = {}
        self._client, self.process = lab.start_kernel()
        self._client.start_channels(hb=False)
        self._client.wait_for_ready(timeout=_LONG_S)

    def close(self) -> None:
        self._client.stop_channels()
        self._client.context.term()


def _served_round(moment: str, blow: str, folder: pathlib.Path, rng: random.Random) -> str:
    """Launch in a kernel of a server, strike at that moment, and check all that is promised then."""
    folder.mkdir()
    mark, state = folder / "mark", folder / "state"
    with labs.running(folder) as lab:
        kernel = _ServedKernel(lab)
        try:
            assert kernel.run("%load_ext notebook_accel", _LONG_S).status == "ok"
            _go_to(moment, kernel, mark, state)
            # The random moment itself. A run is detached, or saved, within some hundredths of a second.
            time.sleep(rng.uniform(0.0, {"launching": 1.0, "training": 0.5, "ending": 0.5}.get(moment, 0.05)))
            _strike(blow, lab, kernel, hits_ranks=moment not in ("launching", "detaching"))
        finally:
            kernel.close()
    processes.wait_until(is_decided, "the launch was taken over or is gone", _LONG_S)
    found = run_folders.every()
    assert len(found) == 1 or moment in ("launching", "detaching")
    said = _check(found[0], moment, mark, state, rng) if found else "gone"
    processes.wait_until(lambda: not processes.descendants(os.getpid()), "no process is left", _LONG_S)
    processes.wait_until(is_clean, "no folder is left", _LONG_S)
    return f"{moment}, {blow}: {said}"


def _go_to(moment: str, kernel: kernels.Kernel, mark: pathlib.Path, state: pathlib.Path) -> None:
    flag = "--background" if moment == "detaching" else "--detach"
    cell = kernel.start(_CELL.strip().format(flag=flag, mark=str(mark), state=str(state)))
    if moment == "launching":
        return
    cell.finish(_LONG_S)
    if moment == "detaching":
        kernel.run("import time\nwhile not all(rank.metrics for rank in _.ranks): time.sleep(0.01)", _LONG_S)
        kernel.start("%distributed detach night")
        return
    [folder] = run_folders.every()
    processes.wait_until(lambda: detached_runs.summary(folder).metrics, "the ranks train", _LONG_S)
    if moment == "saving":
        draft = checkpoint_folders.draft_of(state)
        processes.wait_until(draft.exists, "a checkpoint is being written", _LONG_S, poll_s=0.0005)
    elif moment == "ending":
        mark.touch()


def _strike(blow: str, lab: labs.Lab, kernel: kernels.Kernel, *, hits_ranks: bool) -> None:
    """Kill the kernel, its server, or both, or send SIGHUP to all, as when a terminal closes; the kernel then ends."""
    if blow == "hangup":
        struck = processes.descendants(os.getpid()) if hits_ranks else [lab.process, kernel.process]
        for process in struck:
            processes.kill(process, signal.SIGHUP)
    if blow in ("server", "both"):
        processes.kill(lab.process)
    if blow in ("kernel", "both"):
        processes.kill(kernel.process)
    processes.wait_until(lambda: not kernel.process.is_alive, "the kernel is gone", _LONG_S)


def _check(folder: RunFolder, moment: str, mark: pathlib.Path, state: pathlib.Path, rng: random.Random) -> str:
    began_s = time.monotonic()
    job = detached.attach_and_show("night", show=lambda _: None)
    said = f"found within {time.monotonic() - began_s:.2f} s"
    if moment != "ending":
        processes.wait_until(lambda: all(rank.metrics for rank in job.ranks), "both train", _LONG_S)
        assert [stack.rank for stack in job.stacks(_LONG_S)] == [0, 1]
    stops = moment != "ending" and rng.random() < 0.3
    if stops:
        job.stop()
        with pytest.raises(RunStoppedError):
            job.results(_LONG_S)
    else:
        mark.touch()
        results = job.results(_LONG_S)
        assert results == [job.pull("kept")] * 2
        assert [rank.metrics for rank in job.ranks] == [{"loss": 1 / results[0]}] * 2
        assert results[0] < 5 or state.exists()
        assert not checkpoint_folders.draft_of(state).exists()
    for rank, lines in printed(job).items():
        expected = [f"step {number}" for number in range(len(job.logs(rank).splitlines()))]
        assert job.logs(rank).splitlines() == expected
        assert stops or len(expected) == results[rank]
        may_lack = moment == "detaching"  # the lines before the last 64 KiB
        assert lines == (expected[len(expected) - len(lines) :] if may_lack else expected)
    processes.wait_until(lambda: not folder.is_held, "its agent has gone", _LONG_S)
    return f"{said}, {'stopped' if stops else 'ended'}"
