"""Helpers for tests of sessions in a real notebook."""

from __future__ import annotations

import contextlib
import pathlib
import re
from collections.abc import Iterator

from tests import kernels

__all__ = ["assert_ready", "error", "opened", "shown"]


@contextlib.contextmanager
def opened(folder: pathlib.Path) -> Iterator[kernels.Kernel]:
    """Run a kernel with a session of two ranks, which know their ``rank``."""
    with kernels.running(folder) as kernel:
        assert kernel.run("%load_ext notebook_accel\nimport os, torch", 120).status == "ok"
        assert_ready(kernel.run("%distributed start -n 2 --use_cpu", 180))
        assert kernel.run("%%distributed\nimport os, time, torch\nrank = int(os.environ['RANK'])").status == "ok"
        yield kernel


def assert_ready(outcome: kernels.Outcome) -> None:
    """Assert that the session has reported its start."""
    assert outcome.stdout.startswith("2 ranks are ready, on 2 CPUs."), outcome


def shown(notebook: kernels.Kernel, code: str) -> str:
    """Run a cell that must not fail, and return the value that it shows."""
    outcome = notebook.run(code)
    assert outcome.status == "ok", outcome.traceback
    return outcome.result


def error(notebook: kernels.Kernel, code: str) -> str:
    """Run a cell that must fail, and return its error without colours."""
    outcome = notebook.run(code)
    assert outcome.status == "error", outcome
    return re.sub(r"\x1b\[[0-9;]*m", "", outcome.traceback + outcome.stderr)
