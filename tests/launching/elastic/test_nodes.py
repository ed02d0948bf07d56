"""Runs of several nodes. Here all nodes are launched from one process, and know nothing of that."""

from __future__ import annotations

import contextlib
import io
import os
import pathlib
import signal
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from notebook_accel.errors import (
    NodeLostError,
    NotebookAccelError,
    ProcessStartError,
    RankFailedError,
    RunStoppedError,
    SupervisorLostError,
)
from notebook_accel.launching.kernel import local
from notebook_accel.launching.kernel.job import Job
from notebook_accel.launching.views.view import LinesView
from tests import processes
from tests.launching.elastic import restarted
from tests.training.ranks import free_port

Launch = Callable[..., Job]
_WAIT_S = 90.0


def all_run(folder: pathlib.Path) -> None:
    marks = [folder / f"{rank} runs in attempt 0" for rank in range(4)]
    processes.wait_until(lambda: all(mark.exists() for mark in marks), "all four ranks run", timeout_s=60)


@pytest.fixture(scope="module")
def engine(engine: local.LocalEngine) -> Iterator[local.LocalEngine]:
    """No other module gets the template, which has imported what only these tests want."""
    yield engine
    engine.close()


@pytest.fixture
def nodes(launch: Launch) -> Callable[..., list[Job]]:
    """Launches a function on two nodes, each with the options of both and its own."""

    def start(
        function: Callable[..., Any], *args: Any, own: tuple[dict[str, Any], ...] = ({}, {}), **options: Any
    ) -> list[Job]:
        options = {"num_nodes": 2, "main_process_port": free_port(), **options}
        return [launch(function, *args, **{**options, "node_rank": rank, **its}) for rank, its in enumerate(own)]

    return start


def error(job: Job) -> NotebookAccelError:
    with pytest.raises(NotebookAccelError) as caught:
        job.results(timeout_s=_WAIT_S)
    return caught.value


def shown(job: Job) -> str:
    """Wait for the end of a run and return its plain lines."""
    lines = io.StringIO()
    view = LinesView(job, lines)
    assert job.wait(_WAIT_S)
    view.close()
    return lines.getvalue()


def test_two_nodes_form_one_group(nodes: Callable[..., list[Job]]) -> None:
    first, second = nodes(restarted.on_two_nodes)
    assert first.results(timeout_s=_WAIT_S) == [(0, 0, 16.0, "lo"), (1, 0, 16.0, "lo")]
    assert second.results(timeout_s=_WAIT_S) == [(2, 0, 16.0, "lo"), (3, 0, 16.0, "lo")]
    lines = shown(second)
    assert "  2 │ rank 2 of node 1" in lines and "  3 │ rank 3 of node 1" in lines
    assert f"[node 0 ({socket.gethostname()}): 2 ranks finished" in lines
    assert (first.first_rank, second.first_rank, second.total_ranks) == (0, 2, 4)


def test_failure_on_one_node_is_named_on_all(nodes: Callable[..., list[Job]]) -> None:
    here, there = map(error, nodes(restarted.on_two_nodes, 1))
    assert isinstance(here, RankFailedError) and isinstance(there, RankFailedError), (str(here), str(there))
    assert here.what == f"rank 3 of 4 on node 1 ({socket.gethostname()}) failed: ValueError: failure 0"
    assert there.what == "rank 3 of 4 failed: ValueError: failure 0"
    assert (here.rank, there.rank) == (3, 3) and here.exit_code == there.exit_code == 1
    assert "on_two_nodes" in here.remote_traceback and here.remote_traceback == there.remote_traceback
    assert {end.rank for end in here.others} == {0, 1} and {end.rank for end in there.others} == {2}
    assert type(there.__cause__) is ValueError and "rank_1.log" in there.log_file


@pytest.mark.parametrize("backend", ["static", pytest.param("c10d", marks=pytest.mark.slow)])
def test_all_nodes_restart_together(nodes: Callable[..., list[Job]], backend: str) -> None:
    where = {"rdzv_backend": "c10d", "rdzv_endpoint": f"127.0.0.1:{free_port()}"} if backend == "c10d" else {}
    jobs = nodes(restarted.on_two_nodes, 2, max_restarts=2, **where)
    results = [result[:3] for job in jobs for result in job.results(timeout_s=_WAIT_S)]
    assert sorted(results) == [(rank, 2, 16.0) for rank in range(4)]
    first, second = sorted(jobs, key=lambda job: job.first_rank)  # c10d numbers the nodes itself
    node = f"node 1 ({socket.gethostname()})"
    assert first.restarts == tuple(f"rank 3 on {node}: ValueError: failure {attempt}" for attempt in range(2))
    assert second.restarts == tuple(f"rank 3: ValueError: failure {attempt}" for attempt in range(2))
    assert "[restart 1 of 2: rank 3" in shown(first)


@pytest.mark.slow
def test_nodes_whose_clocks_are_apart_never_train_each_for_itself(launch: Launch) -> None:
    port = free_port()
    options: dict[str, Any] = {
        "num_nodes": 2, "rdzv_backend": "c10d", "rdzv_endpoint": f"127.0.0.1:{port}", "rdzv_id": "clocks apart",
        "preload": ("tests.launching.elastic.apart_clocks",),
    }  # fmt: skip
    ahead = launch(restarted.on_two_nodes, node_rank=0, **options)

    def is_answered() -> bool:
        with socket.socket() as dialled:
            return dialled.connect_ex(("127.0.0.1", port)) == 0

    processes.wait_until(is_answered, "the first one waits there")
    other = launch(restarted.on_two_nodes, node_rank=1, **options)
    assert error(ahead).what == f"1 of 2 nodes are left at 127.0.0.1:{port}: the others seem to have gone."
    assert "clocks are more than 15 s apart" in error(ahead).why
    assert isinstance(error(other), ProcessStartError)


@pytest.mark.parametrize(
    ("own", "differs"),
    [
        (({}, {"num_processes": 1}), "num_processes is {} here and {} there"),
        pytest.param(
            ({"mixed_precision": "no"}, {"mixed_precision": "bf16"}),
            "mixed_precision is {} here and {} there",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_nodes_that_do_not_fit_say_so_on_both_sides(
    nodes: Callable[..., list[Job]], own: tuple[dict[str, Any], ...], differs: str
) -> None:
    here, there = map(error, nodes(restarted.on_two_nodes, own=own))
    (name,) = own[1]
    values = own[0].get(name, 2), own[1][name]
    assert differs.format(*values) in here.what and "node 1" in here.what
    assert differs.format(*reversed(values)) in there.what and "node 0" in there.what


def test_node_that_waits_in_vain_says_for_whom_and_can_be_stopped(launch: Launch) -> None:
    ports = [free_port(), free_port()]
    *jobs, stopped = [
        launch(
            restarted.on_two_nodes,
            num_nodes=2,
            node_rank=rank,
            main_process_port=port,
            rdzv_conf=(f"timeout={wait_s}",),
        )
        for rank, port, wait_s in ((0, ports[0], 1), (1, ports[1], 1), (0, free_port(), 60))
    ]
    for rank, job in enumerate(jobs):
        other = 1 - rank
        assert f"[waiting for node {other} at 127.0.0.1:{ports[rank]}]" in shown(job)
        assert error(job).what == f"Node {other} has not come to 127.0.0.1:{ports[rank]} within 1 s."
        assert f"This is node {rank} of 2" in error(job).why and "node_rank" in error(job).fix
    stopped.stop()
    assert isinstance(error(stopped), RunStoppedError)
    processes.wait_until(lambda: processes.below_template() == [], "nothing is left of it")


class _Loud(socketserver.BaseRequestHandler):
    """Answers whatever it is sent, as a web server does."""

    def handle(self) -> None:
        with contextlib.suppress(OSError):
            while self.request.recv(1000):
                self.request.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


@pytest.mark.slow
def test_what_is_no_meeting_place_is_said(launch: Launch) -> None:
    options: dict[str, Any] = {"num_nodes": 2, "rdzv_conf": ("timeout=30",)}
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Loud) as server, socket.create_server(("", 0)) as silent:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        loud, mute = server.server_address[1], silent.getsockname()[1]
        strangers = [
            launch(restarted.on_two_nodes, **options, node_rank=1, main_process_port=port) for port in (loud, mute)
        ]
        taken = launch(restarted.on_two_nodes, **options, main_process_port=loud)
        elsewhere = launch(restarted.on_two_nodes, **options, master_addr="203.0.113.7")
        unknown = launch(restarted.on_two_nodes, **options, node_rank=1, master_addr="no-such-host.invalid")
        dynamic = launch(
            restarted.on_two_nodes, **options, rdzv_backend="c10d", rdzv_endpoint="no-such-host.invalid:29500"
        )
        for job, port in zip(strangers, (loud, mute), strict=True):
            assert f"The program at 127.0.0.1:{port} isn't a node of a run." in str(error(job))
        assert f"The port {loud} where the nodes meet can't be used: Address already in use." in str(error(taken))
        assert "203.0.113.7 isn't an address of this machine" in str(error(elsewhere)) and error(elsewhere).fix
        for job in (unknown, dynamic):
            assert "The name 'no-such-host.invalid' of the node where all meet is not known" in str(error(job))
        server.shutdown()
        serving.join()
    assert all(isinstance(error(job), ProcessStartError) for job in (*strangers, taken, elsewhere, unknown, dynamic))


def test_stop_on_one_node_ends_all(nodes: Callable[..., list[Job]], tmp_path: pathlib.Path) -> None:
    first, second = nodes(restarted.runs_until_it_is_ended, str(tmp_path), max_restarts=5)
    all_run(tmp_path)
    second.stop()
    assert isinstance(error(second), RunStoppedError)
    assert isinstance(error(first), NodeLostError)
    assert error(first).what == f"Node 1 ({socket.gethostname()}): The run was ended there (stopped)."
    assert first.restarts == () and processes.below_template() == []


@pytest.mark.slow
def test_node_that_vanishes_is_waited_for_where_there_are_restarts(
    launch: Launch, nodes: Callable[..., list[Job]], tmp_path: pathlib.Path
) -> None:
    gone, port = 1, free_port()
    options: dict[str, Any] = {
        "rdzv_conf": ("keep_alive_interval=3", "timeout=60"), "max_restarts": 1, "main_process_port": port
    }  # fmt: skip
    jobs = nodes(restarted.goes_on_after_a_restart, str(tmp_path), **options)
    all_run(tmp_path)
    for process in elastic_processes(jobs):
        if not listens(process, port):
            os.kill(process.pid, signal.SIGKILL)
    left = jobs[1 - gone]
    assert isinstance(error(jobs[gone]), SupervisorLostError)
    assert "manages this run's restarts has died" in str(error(jobs[gone]))
    again = launch(restarted.goes_on_after_a_restart, str(tmp_path), num_nodes=2, node_rank=gone, **options)
    assert [left.results(timeout_s=_WAIT_S), again.results(timeout_s=_WAIT_S)] == 2 * [[(1, 4), (1, 4)]]
    assert len(left.restarts) == 1 and "has gone" in left.restarts[0]


def pids_of(jobs: list[Job]) -> set[int | None]:
    return {info.pid for job in jobs for info in job.ranks}


def elastic_processes(jobs: list[Job]) -> list[processes.Process]:
    processes.wait_until(lambda: None not in pids_of(jobs), "the ranks have said who they are")
    pids = pids_of(jobs)
    return [process for process in processes.below_template() if process.pid not in pids]


def listens(process: processes.Process, port: int) -> bool:
    """Return whether a process listens on a port."""
    rows = [line.split() for line in pathlib.Path("/proc/net/tcp").read_text().splitlines()[1:]]
    inodes = {row[9] for row in rows if row[1].endswith(f":{port:04X}") and row[3] == "0A"}
    links = [os.readlink(path) for path in pathlib.Path(f"/proc/{process.pid}/fd").iterdir()]
    return any(f"socket:[{inode}]" in links for inode in inodes)


def test_agent_that_is_killed_takes_the_elastic_processes_with_it(
    nodes: Callable[..., list[Job]], tmp_path: pathlib.Path
) -> None:
    jobs = nodes(restarted.runs_until_it_is_ended, str(tmp_path), max_restarts=3)
    all_run(tmp_path)
    all_of_it = processes.below_template()
    assert len(all_of_it) == 6
    agent = next(process for process in processes.children(os.getpid()) if processes.is_agent(process))
    os.kill(agent.pid, signal.SIGKILL)
    assert all(isinstance(error(job), SupervisorLostError) for job in jobs)
    processes.wait_until(lambda: not any(process.is_alive for process in all_of_it), "all of it is gone")
    local.engine().close()  # which is why this is the last test
