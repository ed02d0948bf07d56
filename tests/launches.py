"""Fixtures that launch: from a kernel that has the extension loaded, from this process, or on a cluster."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from notebook_accel.config import LaunchConfig
from notebook_accel.launching import run_folders
from notebook_accel.launching.kernel import detached, launcher, local
from notebook_accel.launching.kernel.job import Job
from notebook_accel.protocol import events
from notebook_accel.protocol.agent_messages import OnDeath
from tests import kernels, processes
from tests.launching import functions
from tests.launching.ray import clusters

FIRST_LAUNCH_S = 120.0


RAY = pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.timeout(240)])  # .ci/ray runs what has it


@dataclasses.dataclass(frozen=True)
class Way:
    """A way of starting ranks; its text is the flags of a cell.

    Attributes:
        flags: The flags of a cell.
        keywords: The keyword arguments of ``notebook_launcher`` with the same meaning.
        ranks: The number of ranks.
    """

    flags: str
    keywords: str
    ranks: int = 2

    def __str__(self) -> str:
        return self.flags


@pytest.fixture
def how(request: pytest.FixtureRequest) -> Way:
    """A start method here, or ranks on two nodes of a cluster, by the name that is the parameter."""
    if request.param == "ray":
        options = {"address": request.getfixturevalue("cluster").address, "strategy": "SPREAD"}
        pairs = ",".join(f"{name}={value}" for name, value in options.items())
        way = Way(f"--engine ray --engine_options {pairs}", f"engine='ray', engine_options={options}")
        if "notebook" in request.fixturenames:  # its first launch has the nodes start agents and templates
            first = request.getfixturevalue("notebook").run(f"%%distributed -n 2 {way}\n1", FIRST_LAUNCH_S)
            assert first.result == "[1, 1]", first.traceback
        return way
    ranks = 1 if request.param == "inline" else 2
    return Way(f"--start_method {request.param}", f"start_method={request.param!r}", ranks)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """A Ray cluster of two nodes with one CPU each. Ranks there find this project where this process does."""
    with clusters.running() as made:
        os.environ["RAY_ADDRESS"] = made.address
        try:
            yield made
        finally:
            importlib.import_module("ray").shutdown()
            del os.environ["RAY_ADDRESS"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("ray") is None:
        for item in items:
            if item.get_closest_marker("ray") is not None:
                item.add_marker(pytest.mark.skip(reason="NOT TESTED: Ray isn't installed. .ci/ray does both"))


@pytest.fixture(scope="session")
def _notebooks() -> Iterator[list[kernels.Kernel]]:
    """The kernel that modules share, while none of them uses it."""
    kept: list[kernels.Kernel] = []
    yield kept
    for kernel in kept:
        kernel.close()


@pytest.fixture(scope="module")
def notebook(
    request: pytest.FixtureRequest, _notebooks: list[kernels.Kernel], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[kernels.Kernel]:
    """A kernel after ``%load_ext`` and a first launch: agent and template are there, as they stay between launches.

    Modules share it, since its imports take longer than most tests. Each finds no name of another one, and after a
    failure the next gets a new kernel.
    """
    kernel = _notebooks.pop() if _notebooks else kernels.Kernel(tmp_path_factory.mktemp("notebook"))
    failures = request.session.testsfailed
    with contextlib.ExitStack() as stack:
        stack.callback(kernel.close)
        kernel.run("%reset -f")
        prepare(kernel)
        yield kernel
        if request.session.testsfailed == failures:
            stack.pop_all()
            _notebooks.append(kernel)


@pytest.fixture
def fresh_notebook(tmp_path: pathlib.Path) -> Iterator[kernels.Kernel]:
    """The same, for a test that breaks it."""
    with kernels.running(tmp_path) as kernel:
        prepare(kernel)
        yield kernel


def prepare(kernel: kernels.Kernel) -> None:
    """Loads the extension, launches once, and gives the kernel what the tests' cells use."""
    loaded = kernel.run("%load_ext notebook_accel\nimport os, time, signal, torch", FIRST_LAUNCH_S)
    assert loaded.status == "ok", loaded.traceback
    launched = kernel.run("%%distributed --num_processes 2\nimport os\nint(os.environ['RANK'])", FIRST_LAUNCH_S)
    assert launched.result == "[0, 1]", launched.traceback


@pytest.fixture
def run(notebook: kernels.Kernel) -> Callable[[str], kernels.Outcome]:
    """Runs a cell in the shared notebook."""
    return notebook.run


@pytest.fixture(scope="module")
def template(engine: local.LocalEngine) -> None:
    """The template of this process's agent is ready."""
    config = LaunchConfig(num_processes=1, use_cpu=True, view="none")
    assert launcher.launch_function(functions.rank, (), {}, config).results(timeout_s=FIRST_LAUNCH_S) == [0]


@pytest.fixture
def launch(template: None) -> Iterator[Callable[..., Job]]:
    """Launches a function on two ranks from this process, without a kernel, and stops what a test leaves running."""
    jobs: list[Job] = []

    def start(function: Callable[..., Any], *args: Any, on_death: OnDeath = "stop", **options: Any) -> Job:
        config = LaunchConfig(num_processes=2, use_cpu=True, view="none").replace(**options)
        # None of them is a run in the background, whose events a view takes.
        jobs.append(launcher.launch_function(function, args, {}, config, on_death=on_death, is_background=False))
        return jobs[-1]

    yield start
    for job in jobs:
        job.discard()
        assert job.wait(20)


@pytest.fixture
def state_home(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    """A folder of its own for detached runs, of which none goes on after the test."""
    home = tmp_path / "state"
    monkeypatch.setenv("XDG_STATE_HOME", str(home))
    yield home
    for folder in run_folders.every():
        detached.stop(folder)


def pids_of(job: Job) -> dict[int, int]:
    """The process of each rank, as soon as all have said that they run. Takes the job's events until then."""
    pids: dict[int, int] = {}

    def all_have_started() -> bool:
        pids.update((rank, event.pid) for rank, event in job.events() if isinstance(event, events.Started))
        return len(pids) == job.world_size

    processes.wait_until(all_have_started, "all ranks run")
    return pids
