"""A run that meets a limit of the system fails alone: no other run of the kernel suffers."""

from __future__ import annotations

import contextlib
import itertools
import os
import pathlib
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from notebook_accel import host_memory
from notebook_accel.errors import ProcessStartError, RankFailedError
from notebook_accel.launching.kernel.job import Job
from notebook_accel.protocol import events
from tests import processes
from tests.launching import functions

pytestmark = pytest.mark.slow
Launch = Callable[..., Job]


def supervisor(who: str) -> int:
    [agent] = [child for child in processes.children(os.getpid()) if processes.is_agent(child)]
    # The newest template: an earlier one may still be there, on its way to its end.
    return agent.pid if who == "agent" else max(processes.children(agent.pid), key=lambda child: child.started).pid


def allow_open_files(pid: int, more: int) -> None:
    """So many more than the process has now."""
    taken = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
    free = (number for number in itertools.count() if number not in taken)
    _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (next(itertools.islice(free, more, None)), hard))


# Without room for what comes with a launch; for a rank's line; for its log; for what comes with a rank; for its pidfd.
@pytest.mark.parametrize(("who", "more"), [("agent", 1), ("agent", 4), ("agent", 6), ("template", 0), ("template", 6)])
def test_too_many_open_files_end_the_run_that_needs_more(
    launch: Launch, tmp_path: pathlib.Path, who: str, more: int
) -> None:
    other = launch(functions.waits, str(tmp_path))
    processes.wait_until(lambda: len(os.listdir(tmp_path)) == 2, "the other run is there")
    pid = supervisor(who)
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    allow_open_files(pid, more)
    try:
        job = launch(functions.rank)
        assert job.wait(60)
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
    assert isinstance(job.error, ProcessStartError), job.error
    assert "Too many open files" in str(job.error) and "ulimit -n" in job.error.fix
    assert other.status == "running"
    assert launch(functions.rank).results(timeout_s=60) == [0, 1]
    assert supervisor(who) == pid


def test_process_that_a_rank_leaves_behind_delays_nothing_and_no_line_is_lost(
    launch: Launch, tmp_path: pathlib.Path
) -> None:
    job = launch(functions.leaves_a_daemon_behind, str(tmp_path), num_processes=1)
    assert job.results(timeout_s=60) == [None]
    assert os.listdir(tmp_path) == ["0 daemon writes"]  # and goes on with it
    (tmp_path / "end").touch()
    lines = [line for _, event in job.events() if isinstance(event, events.Output) for line in event.text.split("\n")]
    assert [line for line in lines if line != "from the daemon"] == [f"line {number}" for number in range(1000)]


@contextlib.contextmanager
def control_group(controller: str, limits: dict[str, str]) -> Iterator[pathlib.Path]:
    """A control group with limits, by the names of either version, and the agent and the template in it."""
    root = pathlib.Path("/sys/fs/cgroup")
    is_v1 = (root / controller).is_dir()
    folder = (root / controller if is_v1 else root) / f"notebook-accel-test-{os.getpid()}"
    agent, template = supervisor("agent"), supervisor("template")
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"NOT TESTED: no control group can be made here ({error.strerror})")
    try:
        try:
            for name, value in limits.items():
                if (folder / name).exists():
                    (folder / name).write_text(value)
        except OSError as error:
            pytest.skip(f"NOT TESTED: no control group can have a limit here ({error.strerror})")
        groups = [row.split(":") for row in pathlib.Path(f"/proc/{agent}/cgroup").read_text().splitlines()]
        [path] = [
            path
            for _, controllers, path in groups
            if (controller in controllers.split(",") if is_v1 else not controllers)
        ]
        before = folder.parent / path.lstrip("/")
        for pid in (agent, template):
            (folder / "cgroup.procs").write_text(str(pid))
        try:
            yield folder
        finally:
            for pid in (folder / "cgroup.procs").read_text().split():
                (before / "cgroup.procs").write_text(pid)
    finally:
        processes.wait_until(lambda: not (folder / "cgroup.procs").read_text(), "the control group is empty")
        folder.rmdir()


# No room for a rank; for a template; what a program is started with is too much.
@pytest.mark.parametrize(("who", "said"), [
    ("template", "Resource temporarily unavailable"),
    ("agent", "Resource temporarily unavailable"),
    ("variable", "Argument list too long"),
])  # fmt: skip
def test_process_that_cannot_be_started_ends_the_run_that_needs_it(
    launch: Launch, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, who: str, said: str
) -> None:
    other = launch(functions.waits, str(tmp_path))
    processes.wait_until(lambda: len(os.listdir(tmp_path)) == 2, "the other run is there")
    pid = supervisor("agent")
    with contextlib.ExitStack() as limits:
        if who != "variable":
            folder = limits.enter_context(control_group("pids", {"pids.max": "max"}))
            (folder / "pids.max").write_text((folder / "pids.current").read_text())
        with monkeypatch.context() as variables:
            if who != "template":  # a new one is needed
                variables.setenv("TORCH_OF_THIS_TEST", "x" * (200_000 if who == "variable" else 1))
            job = launch(functions.rank)
            assert job.wait(60)
    assert isinstance(job.error, ProcessStartError), job.error
    assert said in str(job.error)
    assert ("environment variables" if who == "variable" else "ulimit -u") in job.error.fix
    assert other.status == "running"
    assert launch(functions.rank).results(timeout_s=60) == [0, 1]
    assert supervisor("agent") == pid


@pytest.fixture
def little_memory(engine: object) -> Iterator[int]:
    """A control group with little memory, and the template in it; its limit in bytes."""
    limit_bytes = 512 << 20
    with control_group("memory", dict.fromkeys(("memory.limit_in_bytes", "memory.max"), str(limit_bytes))):
        yield limit_bytes


def test_ranks_share_the_processors(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    each = max(1, host_memory.cores() // 2)
    for torchs, blas, variables in launch(functions.threads).results(timeout_s=60):
        assert (torchs, blas, set(variables.values())) == (each, each, {str(each)})
    monkeypatch.setenv("MKL_NUM_THREADS", "3")
    for _, _, variables in launch(functions.threads).results(timeout_s=60):
        assert list(variables.values()) == [str(each), str(each), "3"]


def test_a_rank_alone_computes_as_a_process_without_a_launch(launch: Launch) -> None:
    if host_memory.cores() < (os.cpu_count() or 1):
        pytest.skip("NOT TESTED: this process may not use the whole machine")
    [(_, blas, variables)] = launch(functions.threads, num_processes=1).results(timeout_s=60)
    code = "from tests.launching import functions; print(functions.threads()[1])"
    alone = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert (blas, set(variables.values())) == (int(alone.stdout), {None})


def test_rank_that_the_system_kills_for_want_of_memory(launch: Launch, little_memory: int) -> None:
    job = launch(functions.takes_memory, 4 * little_memory)
    with pytest.raises(RankFailedError) as caught:
        job.results(timeout_s=60)
    error = caught.value
    assert (error.rank, error.signal) == (1, signal.SIGKILL)
    assert "was killed by SIGKILL: out of host memory" in error.what
    assert "512 MiB that the container has" in error.why and "out-of-memory killer has ended a process" in error.why
    assert re.search(r"The rank had used up to \d\d\d MiB", error.why)


def test_ranks_are_killed_first_if_memory_runs_out(launch: Launch) -> None:
    [score] = launch(functions.oom_score, num_processes=1).results(timeout_s=60)
    assert score == functions.oom_score() + 100
