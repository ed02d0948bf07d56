"""Losses of a host, a node or the cluster, during a run or its launch: the run ends with an error that names them."""

from __future__ import annotations

import os
import pathlib
import re
import signal
from typing import Any

import psutil
import pytest

from notebook_accel.errors import LaunchError, RunStoppedError, SupervisorLostError
from notebook_accel.protocol import events
from tests import kernels, processes
from tests.launching.ray import clusters, work
from tests.launching.ray.runs import DEADLINE_S, all_is_free, are_gone, connected, have_begun, launch
from tests.launching.ray.test_client import ok

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]

_IN_THE_BACKGROUND = """
from notebook_accel import notebook_launcher
from tests.launching.ray import work
def launch(function, *args, **options):
    options = {{"strategy": "SPREAD", "address": "{address}", **options}}
    return notebook_launcher(function, args, 2, engine="ray", background=True, view="none", engine_options=options)
"""


def test_users_own_connection_is_used_and_its_end_ends_the_run(cluster: Any, tmp_path: pathlib.Path) -> None:
    with kernels.running(tmp_path) as kernel:
        ok(kernel.run(_IN_THE_BACKGROUND.format(address=cluster.address), DEADLINE_S))
        (tmp_path / "sent").mkdir()
        (tmp_path / "sent" / "data.csv").touch()
        sent = f"namespace='mine', runtime_env={{'working_dir': {str(tmp_path / 'sent')!r}}}"
        ok(kernel.run(f"import ray; ray.init({cluster.address!r}, {sent}, log_to_driver=False)", DEADLINE_S))
        asked = "launch(work.attempt, address='nowhere:1').results(100)"  # of no meaning to who is connected
        assert kernel.value(asked, DEADLINE_S) == "[0, 0]"
        assert kernel.value("launch(work.folder).results(100)", DEADLINE_S) == "[['data.csv'], ['data.csv']]"
        assert kernel.value("ray.is_initialized(), ray.get_runtime_context().namespace") == "(True, 'mine')"
        ok(kernel.run(f"job = launch(work.wait_to_be_ended, {str(tmp_path)!r})", DEADLINE_S))
        pids = have_begun(tmp_path)
        ok(kernel.run("ray.shutdown()", DEADLINE_S))
        assert kernel.value("job.wait(20), job.status", DEADLINE_S) == "(True, 'failed')"
        assert "is no longer connected to the cluster" in kernel.value("str(job.error)")
        assert "ray.shutdown() was called" in kernel.value("str(job.error)")
        processes.wait_until(lambda: are_gone(pids), "its ranks are gone", timeout_s=60)
        assert kernel.value("launch(work.attempt).results(100)", DEADLINE_S) == "[0, 0]"
    all_is_free()


def test_notebook_lives_whenever_it_disconnects_from_a_run(cluster: Any, tmp_path: pathlib.Path) -> None:
    """Ray ends a process in which a thread uses it while it is shut down: so runs end first."""
    with kernels.running(tmp_path) as kernel:
        ok(kernel.run(_IN_THE_BACKGROUND.format(address=cluster.address), DEADLINE_S))
        ok(kernel.run("import ray, tempfile, time", DEADLINE_S))
        for round_ in range(10):
            ok(kernel.run("job = launch(work.wait_to_be_ended, tempfile.mkdtemp(dir='.'))", DEADLINE_S))
            ok(kernel.run(f"time.sleep({0.03 * round_**2})\nray.shutdown()", DEADLINE_S))  # at any moment of its start
            assert kernel.value("job.wait(20), job.status", DEADLINE_S) == "(True, 'failed')"
        assert "ray.shutdown() was called" in kernel.value("str(job.error)")
    all_is_free()


@pytest.mark.timeout(400)  # Ray's own minute, on a busy machine
def test_head_that_dies_ends_the_run_and_not_the_notebook(cluster: Any, tmp_path: pathlib.Path) -> None:
    with kernels.running(tmp_path) as kernel:
        with clusters.running() as doomed:
            ok(kernel.run(_IN_THE_BACKGROUND.format(address=doomed.address), DEADLINE_S))
            ok(kernel.run(f"job = launch(work.wait_to_be_ended, {str(tmp_path)!r})", DEADLINE_S))
            pids = have_begun(tmp_path)
            doomed.head_node.kill_all_processes(check_alive=False, allow_graceful=False)
            assert kernel.value("job.wait(60), job.status", DEADLINE_S) == "(True, 'failed')"
            # Those of the other node go when that finds out, a minute after its head: so long the notebook has to live.
            processes.wait_until(lambda: are_gone(pids), "all ranks are gone", timeout_s=120)
            processes.wait_until(
                lambda: kernel.value("__import__('ray').is_initialized()") == "False",
                "it is disconnected",
                timeout_s=60,
            )
        again = f"launch(work.attempt, address={cluster.address!r}).results(100)"
        assert kernel.value(again, DEADLINE_S) == "[0, 0]"
    all_is_free()


def test_host_that_dies_is_named_and_replaced(cluster: Any, tmp_path: pathlib.Path) -> None:
    job = launch(work.wait_to_be_ended, str(tmp_path))
    pids = have_begun(tmp_path)
    template, agent, host = psutil.Process(pids[1]).parents()[:3]
    os.kill(host.pid, signal.SIGKILL)
    with pytest.raises(SupervisorLostError, match=r"What runs rank 1 of 2 on the node .* was ended"):
        job.results(DEADLINE_S)
    processes.wait_until(lambda: are_gone([*pids, agent.pid, template.pid]), "its processes are gone", timeout_s=30)
    assert launch(work.attempt).results(DEADLINE_S) == [0, 0]
    all_is_free()


@pytest.mark.parametrize("when", ["while it is launched", "while it runs"])
def test_node_that_goes_takes_the_run_with_it_and_the_next_one_works(
    cluster: Any, tmp_path: pathlib.Path, when: str
) -> None:
    third = clusters.add_node(cluster, num_cpus=0, resources={"third": 2})
    ray = connected()
    processes.wait_until(lambda: ray.cluster_resources().get("third") == 2, "the node is there", timeout_s=60)
    options = {"strategy": "PACK", "cpus_per_rank": 0, "resources": {"third": 1}, "wait_s": 10}
    job = launch(work.wait_to_be_ended, str(tmp_path), engine_options=options)
    pids = []
    if when == "while it runs":
        pids = have_begun(tmp_path)
    else:
        processes.wait_until(lambda: not ray.available_resources().get("third"), "it is reserved", timeout_s=60)
    cluster.remove_node(third)
    with pytest.raises((SupervisorLostError, LaunchError)) as caught:
        job.results(DEADLINE_S)
    # Ray looks for another node as long as none has ranks.
    said = r"The node .* has gone, and .* with it" if pids else "has gone, and|The cluster could not reserve what"
    assert re.search(said, str(caught.value))
    processes.wait_until(lambda: are_gone(pids), "its ranks are gone", timeout_s=30)
    assert launch(work.attempt).results(DEADLINE_S) == [0, 0]


def test_run_goes_on_by_itself_on_what_is_left(cluster: Any, tmp_path: pathlib.Path) -> None:
    nodes = [clusters.add_node(cluster, num_cpus=0, resources={"fourth": 2}) for _ in range(2)]
    has = connected().cluster_resources
    processes.wait_until(lambda: has().get("fourth") == 4, "the nodes are there", timeout_s=60)
    options = {"strategy": "STRICT_PACK", "cpus_per_rank": 0, "resources": {"fourth": 1}}
    job = launch(work.waits_once, str(tmp_path), max_restarts=1, engine_options=options)
    above = {process.pid for process in psutil.Process(have_begun(tmp_path)[0]).parents()}
    nodes.sort(key=lambda node: node.all_processes["raylet"][0].process.pid in above)
    cluster.remove_node(nodes.pop())
    assert job.results(DEADLINE_S) == [1, 1]
    assert len(job.restarts) == 1 and re.search(r"The node .* has gone, and ranks 0 to 1 of 2 with it", job.restarts[0])
    cluster.remove_node(nodes.pop())
    all_is_free()


def test_run_that_waits_for_the_cluster_can_be_stopped(cluster: Any) -> None:
    job = launch(work.attempt, engine_options={"cpus_per_rank": 1, "strategy": "STRICT_PACK"})

    def waits() -> list[str]:  # which no rank has said, and so isn't among their output
        return [line for _, event in job.events() if isinstance(event, events.Nodes) for line in event.lines]

    said, *_ = processes.wait_until(waits, "it waits", timeout_s=60)
    assert said.startswith("waiting for the cluster: 2 CPU needed")
    job.stop()
    with pytest.raises(RunStoppedError):
        job.results(DEADLINE_S)
    all_is_free()
