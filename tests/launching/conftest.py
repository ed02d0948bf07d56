"""A kernel that has the extension loaded and its template ready, shared by the tests of a module."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from notebook_accel import events
from notebook_accel.config import LaunchConfig
from notebook_accel.launching import launcher, local
from notebook_accel.launching.job import Job
from notebook_accel.launching.messages import OnDeath
from tests import kernels, processes
from tests.launching import ranks

FIRST_LAUNCH_S = 120.0


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[kernels.Kernel]:
    """A kernel after ``%load_ext`` and a first launch: agent and template are there, as they stay between launches."""
    with kernels.running(tmp_path_factory.mktemp("notebook")) as kernel:
        prepare(kernel)
        yield kernel


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
    assert launcher.launch_function(ranks.rank, (), {}, config).results(timeout_s=FIRST_LAUNCH_S) == [0]


@pytest.fixture
def launch(template: None) -> Iterator[Callable[..., Job]]:
    """Launches a function on two ranks from this process, without a kernel, and stops what a test leaves running."""
    jobs: list[Job] = []

    def start(function: Callable[..., Any], *args: Any, on_death: OnDeath = "stop", **options: Any) -> Job:
        config = LaunchConfig(num_processes=2, use_cpu=True, view="none").replace(**options)
        jobs.append(launcher.launch_function(function, args, {}, config, on_death=on_death))
        return jobs[-1]

    yield start
    for job in jobs:
        job.kill()
        assert job.wait(20)


def pids_of(job: Job) -> dict[int, int]:
    """The process of each rank, as soon as all have said that they run. Takes the job's events until then."""
    pids: dict[int, int] = {}

    def all_have_started() -> bool:
        pids.update((rank, event.pid) for rank, event in job.events() if isinstance(event, events.Started))
        return len(pids) == job.world_size

    processes.wait_until(all_have_started, "all ranks run")
    return pids
