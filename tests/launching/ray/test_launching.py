"""Launches on a real Ray cluster of two nodes."""

from __future__ import annotations

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
)
from notebook_accel.launching.remote import host
from tests import kernels, processes
from tests.launching.ray import clusters, work
from tests.launching.ray.runs import DEADLINE_S, all_is_free, connected, launch

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]


def test_ranks_of_a_node_map_one_copy_of_what_they_are_sent(cluster: Any, capsys: pytest.CaptureFixture[str]) -> None:
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    variables = dict(os.environ)
    model = torch.zeros(100_000)
    options = {"cpus_per_rank": 0.5, "strategy": "STRICT_PACK", "nodes": 1}
    options["runtime_env"] = {"env_vars": {"COLOUR": "red"}}
    found = notebook_launcher(work.place, (model,), 2, engine="ray", engine_options=options, view="lines", use_cpu=True)
    assert [(at["LOCAL_RANK"], at["LOCAL_WORLD_SIZE"], at["GROUP_RANK"], at["COLOUR"]) for at in found] == [
        ("0", "2", "0", "red"),
        ("1", "2", "0", "red"),
    ]
    assert len({at["template"] for at in found}) == len({at["file"] for at in found}) == 1
    assert [at["value"] for at in found] == [1.0, 2.0] and model.sum() == 0  # each has written to pages of its own
    assert sorted(re.findall(r"^ *(\d │ rank \d has added)$", capsys.readouterr().out, re.MULTILINE)) == [
        "0 │ rank 0 has added",
        "1 │ rank 1 has added",
    ]
    assert {number: signal.getsignal(number) for number in signal.valid_signals()} == before
    assert dict(os.environ) == variables
    all_is_free()


def test_ranks_see_the_gpus_that_ray_has_reserved_for_them(cluster: Any) -> None:
    """The GPUs are Ray's word for it: no such device is there, and no rank uses one."""
    node = clusters.add_node(cluster, num_cpus=0, num_gpus=3)
    has = connected().cluster_resources
    processes.wait_until(lambda: has().get("GPU") == 3, "the node is there", timeout_s=60)
    job = launch(work.visible_gpus, engine_options={})
    assert job.devices == "2 GPUs"
    [(visible, first), (also_visible, second)] = job.results(DEADLINE_S)
    cluster.remove_node(node)
    assert visible == also_visible and len(set(visible.split(",")) & {"0", "1", "2"}) == 2
    assert (first, second) == ("0", "1")


def test_what_the_cluster_does_not_have_is_said(cluster: Any) -> None:
    with pytest.raises(PreflightError, match="64 ranks need 64 CPU, and the cluster has 2"):
        launch(work.attempt, num_processes=64)
    asked = [sys.executable, "-m", "notebook_accel", "doctor", "--engine", "ray", "-n"]
    for ranks, said in (("64", "refused: 64 ranks need 64 CPU"), ("2", "Nothing speaks against a launch.")):
        shown = subprocess.run([*asked, ranks], capture_output=True, text=True, check=False, timeout=DEADLINE_S)
        assert said in shown.stdout and shown.returncode == int(ranks == "64"), shown
    ray = connected()

    @ray.remote(num_cpus=1)
    class Occupant:
        def is_there(self) -> bool:
            return True

    occupant = Occupant.remote()
    assert ray.get(occupant.is_there.remote(), timeout=60)
    job = launch(work.attempt, engine_options={"wait_s": 3})
    with pytest.raises(LaunchError, match="could not reserve what 2 ranks need within 3 s") as caught:
        job.results(DEADLINE_S)
    assert "2 CPU needed, 1 free" in caught.value.why
    ray.kill(occupant)
    all_is_free()


def test_placement_that_cannot_be_is_said(cluster: Any) -> None:
    with pytest.raises(LaunchError, match="The ranks would be on 1 nodes, and nodes=2 was asked for"):
        launch(work.attempt, engine_options={"cpus_per_rank": 0.5, "nodes": 2}).results(DEADLINE_S)
    all_is_free()
    with pytest.raises(LaunchError, match="could not reserve what 2 ranks need within 2 s") as caught:
        launch(work.attempt, engine_options={"strategy": "STRICT_PACK", "wait_s": 2}).results(DEADLINE_S)
    assert caught.value.why == "2 CPU needed, 2 free, but not as strategy='STRICT_PACK' wants it"
    all_is_free()


def test_runtime_environment_that_cannot_be_is_said(cluster: Any) -> None:
    with pytest.raises(ConfigError, match=r"The engine option runtime_env=.* can't be used") as refused:
        launch(work.attempt, engine_options={"runtime_env": {"working_dir": "/nowhere"}}).results(DEADLINE_S)
    assert refused.value.why == "/nowhere is not a valid path."
    there = {"working_dir": "https://127.0.0.1:1/folder.zip"}
    with pytest.raises(LaunchError, match="The runtime environment could not be set up on the node") as caught:
        launch(work.attempt, engine_options={"runtime_env": there}).results(DEADLINE_S)
    assert "Failed to set up runtime environment" in caught.value.why
    assert launch(work.attempt).results(DEADLINE_S) == [0, 0]
    all_is_free()


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1"])
def test_address_where_nobody_is_says_so_at_once(cluster: Any, address: str) -> None:
    command = [sys.executable, "-m", "notebook_accel", "doctor", "--engine", "ray"]
    command += ["--engine_options", f"address={address}"]
    shown = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)  # Ray itself takes 200 s
    assert shown.returncode != 0
    assert f"No Ray cluster was found at '{address}'" in shown.stdout + shown.stderr, shown


def test_what_cannot_be_is_refused_before_anything_is_reserved(cluster: Any) -> None:
    with pytest.raises(ConfigError, match="The engine option 'speed=\"high\"' is not known"):
        launch(work.attempt, engine_options={"speed": "high"})
    with pytest.raises(ConfigError, match="start_method='inline' can't be used with engine='ray'"):
        launch(work.attempt, num_processes=1, start_method="inline")
    with pytest.raises(PayloadError, match="argument 0"):
        launch(work.wait_to_be_ended, (number for number in range(3)))


def test_script_is_launched_from_a_terminal(cluster: Any, tmp_path: pathlib.Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os, sys\nprint(sys.argv[1:], os.environ['RANK'], os.environ['GROUP_RANK'])\n")
    options = ["--engine", "ray", "-n", "2", "--engine_options", "strategy=SPREAD", "--cpu"]
    command = [sys.executable, "-m", "notebook_accel", "launch", *options, str(script), "--epochs", "3"]
    shown = subprocess.run(command, capture_output=True, text=True, check=False, timeout=DEADLINE_S)
    assert shown.returncode == 0, shown.stderr
    for rank in (0, 1):
        assert f"{rank} │ ['--epochs', '3'] {rank} {rank}" in shown.stdout
    all_is_free()


def test_other_versions_on_a_node_are_said_before_anything_runs(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    here = host.versions()
    monkeypatch.setattr(host, "versions", lambda: {**here, "torch": "1.0"})
    with pytest.raises(LaunchError, match=rf"has torch {re.escape(here['torch'])}, the notebook 1\.0"):
        launch(work.attempt).results(DEADLINE_S)
    all_is_free()


def test_seventh_notebook_trains_on_two_nodes(cluster: Any, tmp_path: pathlib.Path) -> None:
    path = pathlib.Path(__file__).parents[3] / "example_notebooks" / "07_many_machines.ipynb"
    with kernels.running(tmp_path) as kernel:
        outcomes = []
        for cell in nbformat.read(path, as_version=4).cells:
            if cell.cell_type == "code":
                outcomes.append(kernel.run(cell.source, DEADLINE_S))
                assert outcomes[-1].status == "ok", outcomes[-1].traceback
    assert "trained by 2 ranks, of which 1 here" in outcomes[-2].stdout
    accuracy = re.fullmatch(r"test accuracy: (\d+\.\d) %\n", outcomes[-1].stdout)
    assert accuracy is not None and float(accuracy[1]) >= 95, outcomes[-1].stdout
    all_is_free()
