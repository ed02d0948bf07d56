"""Launches on a real Ray cluster of two nodes."""

from __future__ import annotations

import importlib
import os
import pathlib
import re
import signal
import subprocess
import sys
from typing import Any

import nbformat
import pytest
import torch

from notebook_accel import notebook_launcher
from notebook_accel.errors import (
    ConfigError,
    LaunchError,
    PayloadError,
    PreflightError,
    RankFailedError,
    RunStoppedError,
    SupervisorLostError,
)
from notebook_accel.launching.job import Job
from notebook_accel.launching.ray import host
from tests import kernels, processes
from tests.ray import work

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]

_DEADLINE_S = 120.0


def launch(function: Any, *args: Any, **options: Any) -> Job:
    given = {"num_processes": 2, "engine": "ray", "engine_options": {"strategy": "SPREAD"}, "view": "none", **options}
    job = notebook_launcher(function, args, background=True, **given)
    assert isinstance(job, Job)
    return job


def free_cpus() -> float:
    ray = importlib.import_module("ray")
    if not ray.is_initialized():  # no test has launched from this process yet
        ray.init(log_to_driver=False)
    return float(ray.available_resources().get("CPU", 0))


def all_is_free() -> None:
    """The cluster has back what the ranks had."""
    processes.wait_until(lambda: free_cpus() == 2, "the cluster has all of its CPUs back", timeout_s=60)


def have_begun(folder: pathlib.Path) -> list[int]:
    files = [folder / f"{rank}.began" for rank in (0, 1)]
    processes.wait_until(lambda: all(file.exists() for file in files), "both ranks run", timeout_s=60)
    return [int(file.read_text()) for file in files]


def are_gone(pids: list[int]) -> bool:
    return not any(process is not None and process.is_alive for process in map(processes.read, pids))


def test_ranks_of_two_nodes_are_one_group_and_each_has_a_result(
    cluster: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    variables = dict(os.environ)
    model = torch.nn.Linear(512, 512)
    options = {"strategy": "SPREAD"}
    results = notebook_launcher(
        work.place_and_sum, (model,), 2, engine="ray", engine_options=options, view="lines", use_cpu=True
    )
    assert [(found["RANK"], found["LOCAL_RANK"], found["LOCAL_WORLD_SIZE"]) for found in results] == [
        ("0", "0", "1"),
        ("1", "0", "1"),
    ]
    assert [found["total"] for found in results] == [3.0, 3.0]
    assert len({found["template"] for found in results}) == 2
    expected = sum(parameter.sum().item() for parameter in model.parameters())
    assert [found["weights"] for found in results] == pytest.approx([expected, expected])
    assert sorted(re.findall(r"^\d │ rank \d has summed$", capsys.readouterr().out, re.MULTILINE)) == [
        "0 │ rank 0 has summed",
        "1 │ rank 1 has summed",
    ]
    assert {number: signal.getsignal(number) for number in signal.valid_signals()} == before
    assert dict(os.environ) == variables
    all_is_free()


def test_first_failing_rank_is_raised_and_the_cluster_goes_on(cluster: Any) -> None:
    job = launch(work.rank_1_raises)
    with pytest.raises(RankFailedError, match="rank 1 of 2 failed: ValueError: of rank 1") as caught:
        job.results(_DEADLINE_S)
    error = caught.value
    assert type(error.__cause__) is ValueError and "rank_1_raises" in error.remote_traceback
    assert error.last_output == ("about to fail",) and [end.rank for end in error.others] == [0]
    assert job.logs(1) == "about to fail\n"
    all_is_free()


def test_interrupt_reaches_the_ranks_code_on_every_node(cluster: Any, tmp_path: pathlib.Path) -> None:
    job = launch(work.wait_to_be_ended, str(tmp_path))
    pids = have_begun(tmp_path)
    stacks = str(job.stacks())
    assert stacks.count("wait_to_be_ended") == 2
    job.interrupt()
    with pytest.raises(RunStoppedError, match="interrupted"):
        job.results(_DEADLINE_S)
    assert sorted(path.name for path in tmp_path.glob("*.ended")) == ["0.ended", "1.ended"]
    assert are_gone(pids)
    all_is_free()


def test_failed_run_is_started_again(cluster: Any, tmp_path: pathlib.Path) -> None:
    job = launch(work.fails_once, str(tmp_path), max_restarts=1)
    assert job.results(_DEADLINE_S) == [1, 1]
    assert job.restarts == ("rank 1 exited with status 3 before its function returned",)


def test_node_that_goes_takes_the_run_with_it_and_the_next_one_works(cluster: Any, tmp_path: pathlib.Path) -> None:
    third = cluster.add_node(num_cpus=0, resources={"third": 2})
    processes.wait_until(
        lambda: importlib.import_module("ray").cluster_resources().get("third") == 2, "the node is there", timeout_s=60
    )
    options = {"strategy": "PACK", "cpus_per_rank": 0, "resources": {"third": 1}}
    job = launch(work.wait_to_be_ended, str(tmp_path), engine_options=options)
    pids = have_begun(tmp_path)
    cluster.remove_node(third)
    with pytest.raises(SupervisorLostError, match="has gone, and ranks 0 to 1 of 2 with it"):
        job.results(_DEADLINE_S)
    processes.wait_until(lambda: are_gone(pids), "its ranks are gone", timeout_s=30)
    assert launch(work.fails_once, str(tmp_path), max_restarts=1).results(_DEADLINE_S) == [1, 1]


def test_ranks_see_the_gpus_that_ray_has_reserved_for_them(cluster: Any) -> None:
    """The GPUs are Ray's word for it: no such device is there, and no rank uses one."""
    node = cluster.add_node(num_cpus=0, num_gpus=3)
    processes.wait_until(
        lambda: importlib.import_module("ray").cluster_resources().get("GPU") == 3, "the node is there", timeout_s=60
    )
    job = launch(work.visible_gpus, engine_options={})
    assert job.devices == "2 GPUs"
    [(visible, first), (also_visible, second)] = job.results(_DEADLINE_S)
    cluster.remove_node(node)
    assert visible == also_visible and len(set(visible.split(",")) & {"0", "1", "2"}) == 2
    assert (first, second) == ("0", "1")


def test_what_the_cluster_does_not_have_is_said(cluster: Any) -> None:
    with pytest.raises(PreflightError, match="64 ranks need 64 CPU, and the cluster has 2"):
        launch(work.rank_1_raises, num_processes=64)
    asked = [sys.executable, "-m", "notebook_accel", "doctor", "--engine", "ray", "-n"]
    for ranks, said in (("64", "refused: 64 ranks need 64 CPU"), ("2", "Nothing speaks against a launch.")):
        shown = subprocess.run([*asked, ranks], capture_output=True, text=True, check=False, timeout=_DEADLINE_S)
        assert said in shown.stdout and shown.returncode == int(ranks == "64"), shown
    ray = importlib.import_module("ray")

    @ray.remote(num_cpus=1)
    class Occupant:
        def is_there(self) -> bool:
            return True

    occupant = Occupant.remote()
    assert ray.get(occupant.is_there.remote(), timeout=60)
    job = launch(work.rank_1_raises, engine_options={"wait_s": 3})
    with pytest.raises(LaunchError, match="could not reserve what 2 ranks need within 3 s") as caught:
        job.results(_DEADLINE_S)
    assert "2 CPU needed, 1 free" in caught.value.why
    ray.kill(occupant)
    all_is_free()


def test_what_cannot_be_is_refused_before_anything_is_reserved(cluster: Any) -> None:
    with pytest.raises(ConfigError, match="The engine option 'speed=\"high\"' is not known"):
        launch(work.rank_1_raises, engine_options={"speed": "high"})
    with pytest.raises(ConfigError, match="start_method='inline' can't be used with engine='ray'"):
        launch(work.rank_1_raises, num_processes=1, start_method="inline")
    with pytest.raises(PayloadError, match="argument 0"):
        launch(work.wait_to_be_ended, (number for number in range(3)))


def test_script_is_launched_from_a_terminal(cluster: Any, tmp_path: pathlib.Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os, sys\nprint(sys.argv[1:], os.environ['RANK'], os.environ['GROUP_RANK'])\n")
    options = ["--engine", "ray", "-n", "2", "--engine_options", "strategy=SPREAD", "--cpu"]
    command = [sys.executable, "-m", "notebook_accel", "launch", *options, str(script), "--epochs", "3"]
    shown = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_DEADLINE_S)
    assert shown.returncode == 0, shown.stderr
    for rank in (0, 1):
        assert f"{rank} │ ['--epochs', '3'] {rank} {rank}" in shown.stdout
    all_is_free()


def test_stop_ends_it_on_every_node(cluster: Any, tmp_path: pathlib.Path) -> None:
    with kernels.running(tmp_path) as kernel:
        code = f"""
        from notebook_accel import notebook_launcher
        from tests.ray import work
        def launch(folder):
            return notebook_launcher(work.wait_to_be_ended, (folder,), 2, engine="ray", background=True,
                                     engine_options={{"strategy": "SPREAD"}}, use_cpu=True, view="none")
        job = launch({str(tmp_path)!r})
        """
        started = kernel.run(code, _DEADLINE_S)
        assert started.status == "ok", started.traceback
        pids = have_begun(tmp_path)
        assert kernel.value("job.stop(), job.wait(60), job.status", _DEADLINE_S) == "(None, True, 'stopped')"
        assert are_gone(pids)
    all_is_free()


def test_other_versions_on_a_node_are_said_before_anything_runs(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    here = host.versions()
    monkeypatch.setattr(host, "versions", lambda: {**here, "torch": "1.0"})
    with pytest.raises(LaunchError, match=rf"has torch {re.escape(here['torch'])}, the notebook 1\.0"):
        launch(work.rank_1_raises).results(_DEADLINE_S)
    all_is_free()


def test_kernel_that_is_killed_leaves_nothing_on_the_nodes(cluster: Any, tmp_path: pathlib.Path) -> None:
    with kernels.running(tmp_path) as kernel:
        code = f"""
        from notebook_accel import notebook_launcher
        from tests.ray import work
        job = notebook_launcher(work.wait_to_be_ended, ({str(tmp_path)!r},), 2, engine="ray", background=True,
                                engine_options={{"strategy": "SPREAD"}}, use_cpu=True, view="none")
        """
        started = kernel.run(code, _DEADLINE_S)
        assert started.status == "ok", started.traceback
        pids = have_begun(tmp_path)
        kernel.kill()
    processes.wait_until(lambda: are_gone(pids), "the ranks are gone", timeout_s=60)
    all_is_free()


def test_seventh_notebook_trains_on_two_nodes(cluster: Any, tmp_path: pathlib.Path) -> None:
    path = pathlib.Path(__file__).parents[2] / "example_notebooks" / "07_many_machines.ipynb"
    with kernels.running(tmp_path) as kernel:
        outcomes = []
        for cell in nbformat.read(path, as_version=4).cells:
            if cell.cell_type == "code":
                outcomes.append(kernel.run(cell.source, _DEADLINE_S))
                assert outcomes[-1].status == "ok", outcomes[-1].traceback
    assert "trained by 2 ranks, of which 1 here" in outcomes[-2].stdout
    accuracy = re.fullmatch(r"test accuracy: (\d+\.\d) %\n", outcomes[-1].stdout)
    assert accuracy is not None and float(accuracy[1]) >= 95, outcomes[-1].stdout
    all_is_free()
