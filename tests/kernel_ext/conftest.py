"""A shell in the test process, a session in the shared notebook, and what a cell in them shows."""

from __future__ import annotations

import atexit
import builtins
import collections
import contextlib
import io
import pathlib
import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from notebook_accel.launching.kernel import registry
from tests import kernels
from tests.kernel_ext import fake_runs

_SESSION_START_S = 180.0


class Shell:
    """A real IPython shell of this process with the extension: what a notebook has, but for its front end.

    Attributes:
        ipython: The shell.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        config = Config({"HistoryManager": {"enabled": False}})
        self.ipython = InteractiveShell.instance(config=config, ipython_dir=str(folder))
        self._given = set(self.ipython.user_ns)
        self._traceback: list[str] = []
        self.ipython._showtraceback = lambda kind, error, lines: self._traceback.extend(lines)

    def run(self, code: str) -> kernels.Outcome:
        """Run a cell to its end."""
        self._traceback.clear()
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
            done = self.ipython.run_cell(code, store_history=True)
        error = done.error_before_exec or done.error_in_exec
        text = "\n".join(self._traceback)
        return kernels.Outcome(
            status="ok" if error is None else "error",
            stdout=out.getvalue(),
            stderr=err.getvalue(),
            result="" if done.result is None else repr(done.result),
            error_name="" if error is None else type(error).__name__,
            error_value="" if error is None else str(error),
            traceback=re.sub(r"\x1b\[[0-9;]*m", "", text),
            coloured=text,
            displays=(),
        )

    def forget(self) -> None:
        """Delete the variables of earlier cells, and what they have imported from the future."""
        for name in self.ipython.user_ns.keys() - self._given:
            del self.ipython.user_ns[name]
        self.ipython.compile.reset_compiler_flags()

    def close(self) -> None:
        """Put back what a shell changes in its process."""
        self.ipython.run_line_magic("unload_ext", "notebook_accel")
        atexit.unregister(self.ipython.atexit_operations)
        self.ipython.atexit_operations()
        InteractiveShell.clear_instance()
        del builtins.display, builtins.__IPYTHON__  # type: ignore[attr-defined]


@pytest.fixture(scope="package")
def _shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    main = sys.modules["__main__"]
    shell = Shell(tmp_path_factory.mktemp("ipython"))
    try:
        assert shell.run("%load_ext notebook_accel").status == "ok"
        yield shell
    finally:
        shell.close()
        sys.modules["__main__"] = main


@pytest.fixture
def shell(_shell: Shell, no_runs: None) -> Shell:
    """The shell, which has launched nothing."""
    _shell.forget()
    return _shell


@pytest.fixture(scope="module")
def faking(notebook: kernels.Kernel) -> kernels.Kernel:
    """The shared notebook, with what makes fake runs."""
    outcome = notebook.run(fake_runs.SETUP)
    assert outcome.status == "ok", outcome.traceback
    return notebook


@pytest.fixture
def no_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the runs of earlier tests."""
    monkeypatch.setattr(registry, "_entries", collections.deque())


@pytest.fixture(scope="module")
def session(notebook: kernels.Kernel) -> Iterator[None]:
    """A session of two ranks in the shared notebook, which know their ``rank``."""
    assert_ready(notebook.run("%distributed start -n 2 --use_cpu", _SESSION_START_S))
    assert notebook.run("%%distributed\nimport os, time, torch\nrank = int(os.environ['RANK'])").status == "ok"
    yield
    assert notebook.run("%distributed stop").status == "ok"


def assert_ready(outcome: kernels.Outcome) -> None:
    """Assert that the session has reported its start."""
    assert outcome.stdout.startswith("2 ranks are ready, on 2 CPUs."), outcome


def shown(notebook: Any, code: str) -> str:
    """Run a cell that must not fail, and return the value that it shows."""
    outcome = notebook.run(code)
    assert outcome.status == "ok", outcome.traceback
    return str(outcome.result)


def error(notebook: Any, code: str) -> str:
    """Run a cell that must fail, and return its error without colours."""
    outcome = notebook.run(code)
    assert outcome.status == "error", outcome
    return re.sub(r"\x1b\[[0-9;]*m", "", outcome.traceback + outcome.stderr)
