"""Ranks and kernels with an XLA device: PJRT's on the CPU."""

from __future__ import annotations

import contextlib
import importlib.util
import pathlib
from collections.abc import Iterator

import pytest

from tests import kernels
from tests.training import ranks

PJRT = {"PJRT_DEVICE": "CPU"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("torch_xla") is None:
        for item in items:
            if "xla" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="NOT TESTED: torch_xla isn't installed. .ci/xla does both"))


@contextlib.contextmanager
def one_rank(**variables: str) -> Iterator[ranks.Ranks]:
    """A process that has joined nothing yet."""
    with ranks.running(1, **PJRT, **variables) as running:
        yield running


@pytest.fixture(scope="module")
def rank() -> Iterator[ranks.Ranks]:
    """One rank, which the tests of a module share."""
    with one_rank() as running:
        yield running


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[kernels.Kernel]:
    """A kernel on a machine with an XLA device."""
    with kernels.running(tmp_path_factory.mktemp("notebook")) as kernel:
        loaded = kernel.run(f"%load_ext notebook_accel\nimport os, torch\nos.environ.update({PJRT})", 120)
        assert loaded.status == "ok", loaded.traceback
        yield kernel


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "checkpoint"
