"""Launches through Ray Client, whose server is beside the head of a real cluster of two nodes."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from tests import kernels, processes
from tests.launching.ray.runs import DEADLINE_S, all_is_free, are_gone, have_begun

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]

_PREPARE = """
%load_ext notebook_accel
import torch
from notebook_accel import notebook_launcher
from tests.launching.ray import work
def launch(function, *args, **options):
    options = {{"engine_options": {{"strategy": "SPREAD", "address": "{address}"}}, "view": "lines", **options}}
    return notebook_launcher(function, args, 2, engine="ray", **options)
"""


@pytest.fixture
def notebook(cluster: Any, tmp_path: pathlib.Path) -> Iterator[kernels.Kernel]:
    """A kernel that launches through Ray Client."""
    host, _, port = cluster.client_address.removeprefix("ray://").partition(":")

    def answers() -> bool:
        with socket.socket() as dialled:
            return dialled.connect_ex((host, int(port))) == 0

    processes.wait_until(answers, "Ray Client's server is there", timeout_s=60)
    with kernels.running(tmp_path) as kernel:
        ok(kernel.run(_PREPARE.format(address=cluster.client_address), DEADLINE_S))
        yield kernel
    all_is_free()


def ok(outcome: kernels.Outcome) -> kernels.Outcome:
    assert outcome.status == "ok", outcome.traceback
    return outcome


def server_of_a_notebook() -> psutil.Process:
    """Return the process that does in the cluster what the notebook asks for."""
    servers = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has just ended
            if "--mode=specific-server" in process.cmdline():
                servers.append(process)
    return max(servers, key=psutil.Process.create_time)


def test_everything_that_is_seen_of_a_run_is_as_without_it(notebook: kernels.Kernel, tmp_path: pathlib.Path) -> None:
    shown = ok(notebook.run("launch(work.place, torch.zeros(1_000_000))", DEADLINE_S))
    assert "'GROUP_RANK': '1'" in shown.result and "'value': 1.0" in shown.result and "'value': 2.0" in shown.result
    assert "0 │ rank 0 has added\n" in shown.stdout and "1 │ rank 1 has added\n" in shown.stdout
    # Nothing of Ray's own between it.
    assert sorted(shown.stdout.splitlines())[:2] == ["  0 │ rank 0 has added", "  1 │ rank 1 has added"]
    assert not shown.stderr

    failed = notebook.run("def fails():\n    raise ValueError('no images')\nlaunch(fails)", DEADLINE_S)
    assert failed.error_name == "RankFailedError" and "raise ValueError('no images')" in failed.traceback

    cell = notebook.start(f"launch(work.wait_to_be_ended, {str(tmp_path)!r})")
    pids = have_begun(tmp_path)
    notebook.interrupt()
    assert cell.finish(DEADLINE_S).error_name == "KeyboardInterrupt"
    assert sorted(path.name for path in tmp_path.glob("*.ended")) == ["0.ended", "1.ended"] and are_gone(pids)
    assert notebook.value("launch(work.fails_once, max_restarts=1)", DEADLINE_S) == "[1, 1]"


def test_connection_that_ends_is_said_and_made_again(notebook: kernels.Kernel, tmp_path: pathlib.Path) -> None:
    ok(notebook.run(f"job = launch(work.wait_to_be_ended, {str(tmp_path)!r}, background=True)", DEADLINE_S))
    pids = have_begun(tmp_path)
    os.kill(server_of_a_notebook().pid, signal.SIGKILL)
    assert notebook.value("job.wait(100), job.status", DEADLINE_S) == "(True, 'failed')"
    assert "is no longer connected to the cluster" in notebook.value("str(job.error)")
    processes.wait_until(lambda: are_gone(pids), "its ranks are gone", timeout_s=60)

    assert notebook.value("launch(work.attempt)", DEADLINE_S) == "[0, 0]"


def test_kernel_that_is_killed_takes_its_ranks_with_it(notebook: kernels.Kernel, tmp_path: pathlib.Path) -> None:
    ok(notebook.run(f"job = launch(work.wait_to_be_ended, {str(tmp_path)!r}, background=True)", DEADLINE_S))
    pids = have_begun(tmp_path)
    notebook.kill()
    # Ray waits half a minute for it to come back.
    assert processes.wait_until(lambda: are_gone(pids), "its ranks are gone", timeout_s=100)


def test_without_grpc_the_error_names_the_extra(cluster: Any, tmp_path: pathlib.Path) -> None:
    (tmp_path / "grpc.py").write_text("raise ImportError('not here')\n")
    command = [sys.executable, "-m", "notebook_accel", "doctor", "--engine", "ray"]
    command += ["--engine_options", f"address={cluster.client_address}"]
    path = f"{tmp_path}:{os.environ['PYTHONPATH']}"
    shown = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=60, env={**os.environ, "PYTHONPATH": path}
    )
    assert shown.returncode != 0
    assert "needs grpcio, and that isn't installed here" in shown.stdout + shown.stderr, shown
    assert "pip install -e '.[ray]'" in shown.stdout + shown.stderr
