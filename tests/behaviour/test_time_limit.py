"""Runs that stop before their time limit, with their state saved, and that the next launch resumes."""

from __future__ import annotations

import os
import pathlib
import time

import pytest

from notebook_accel import notebook_launcher, runs_command
from notebook_accel.errors import PreflightError
from notebook_accel.launching.kernel import detached, detached_runs
from notebook_accel.time_limit import SLURM_END
from tests import kernels, processes

_LONG_S = 100.0
_STOPS = "[training stops here, since the time limit is "
_CELL = """
import os, time, torch
from torch.utils.data import DataLoader, TensorDataset
from notebook_accel import Accelerator

accelerator = Accelerator(save_on_end={folder!r})
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
loader = DataLoader(TensorDataset(torch.arange(4e6)[:, None].expand(-1, 2)), batch_size=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
if os.path.isdir({folder!r}):
    accelerator.load_state({folder!r})
steps = 0
for (x,) in loader:
    if steps == 0:
        accelerator.print("begins with sample", int(x[0, 0]))
    accelerator.backward(model(x).sum())
    optimizer.step()
    optimizer.zero_grad()
    steps += 1
    time.sleep(0.01)
"the loop's end"
"""


def _first_samples(output: str) -> list[int]:
    return [int(line.rsplit(" ", 1)[1]) for line in output.splitlines() if "begins with sample" in line]


def test_a_cell_saves_before_the_end_and_goes_on_when_it_is_run_again(
    notebook: kernels.Kernel, tmp_path: pathlib.Path
) -> None:
    cell = "%%distributed --num_processes 2 --use_cpu --end_at 2s --end_margin_s 1" + _CELL.format(
        folder=str(tmp_path / "state")
    )
    first = notebook.run(cell, _LONG_S)
    assert first.status == "ok", first.traceback
    assert _STOPS in first.stdout + first.stderr
    assert f"[its state is in {tmp_path / 'state'}: run it again to go on from there]" in first.stdout
    second = notebook.run(cell, _LONG_S)
    assert second.status == "ok", second.traceback
    assert _first_samples(first.stdout) == [0]
    [resumed_with] = _first_samples(second.stdout)
    assert resumed_with > 0


def counts_until_the_end() -> tuple[int, bool]:
    """Train without anything prepared, until it should stop; the steps, and whether the time had come."""
    from notebook_accel import Accelerator

    accelerator = Accelerator(cpu=True)
    steps = 0
    while not accelerator.should_stop:
        accelerator.wait_for_everyone()
        steps += 1
        time.sleep(0.01)
    return steps, time.time() > float(os.environ["NOTEBOOK_ACCEL_TIME_LIMIT"]) - 1


@pytest.mark.slow
def test_ranks_stop_at_the_same_step_also_in_a_detached_run_and_in_its_second_launch(
    state_home: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = notebook_launcher(
        counts_until_the_end, (), 2, use_cpu=True, view="none", end_at="2s", end_margin_s=1, detach=True
    )
    results = job.results(_LONG_S)
    assert results[0] == results[1]
    assert results[0][1]
    assert _STOPS in job.logs(0)
    assert job.ending.why.startswith("stopped at its time limit (")
    processes.wait_until(lambda: not job.folder.is_held, "the agent has gone", _LONG_S)
    [summary] = detached_runs.summaries()
    assert (summary.status, summary.why) == ("succeeded", job.ending.why)
    runs_command.print_runs(clean=False, as_json=False)
    assert f"{job.name}: {job.ending.why}" in capsys.readouterr().out.splitlines()
    # The end is counted anew, although the payload is that of the first launch.
    again = detached.again(show=lambda _: None)
    assert again.results(_LONG_S)[0][1]
    processes.wait_until(lambda: not again.folder.is_held, "the agent has gone", _LONG_S)


@pytest.mark.slow
def test_the_limit_of_a_slurm_job_is_the_end(template: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SLURM_END, str(int(time.time()) + 3))
    results = notebook_launcher(counts_until_the_end, (), 2, use_cpu=True, view="none", end_margin_s=1)
    assert results[0] == results[1] and results[0][1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"end_at": "2020-01-01T00:00"}, "is past"),
        ({"end_at": "60s"}, "is near"),
        ({"end_at": "2h", "num_nodes": 2}, "is a duration"),
    ],
)
def test_an_end_that_cannot_be_kept_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(PreflightError, match=message):
        notebook_launcher(counts_until_the_end, (), 2, use_cpu=True, **options)  # type: ignore[arg-type]
