"""A kernel that has the extension loaded and its template ready, shared by the tests of a module."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator

import pytest

from tests import kernels

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
