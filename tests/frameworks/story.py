"""One row in one notebook: trained in a cell, failed, interrupted, launched as a function, and in a session."""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
from typing import Any

from tests import kernels, processes
from tests.frameworks.rows import PRELOAD, Row

VARIABLES = {
    "HF_HUB_OFFLINE": "1",
    "KERAS_BACKEND": "torch",
    "PYTHONPATH": str(pathlib.Path(__file__).parents[2]),
    "TOKENIZERS_PARALLELISM": "false",
}
_TIMEOUT_S = 240.0
_SPY = "__import__('tests.frameworks.spy', fromlist=['*'])"
_MANY_EPOCHS = 100_000
_OPTIONS = f"--num_processes 2 --preload {','.join(PRELOAD)}"

FAULT = "no such digit"
_FAILING_CALL = 20
_CALLS_BEFORE_INTERRUPT = 60


class CannotTrainError(Exception):
    """The program has failed. The text is the cell's traceback."""


@dataclasses.dataclass
class Run:
    """A launch of the row.

    Attributes:
        outcome: How its cell ended.
        folder: Its folder.
        ends: The library's number of ranks and the model's fingerprint, from each rank that has returned.
        rows: What the ranks' rows have shown.
    """

    outcome: kernels.Outcome
    folder: pathlib.Path
    ends: list[tuple[int, str]]
    rows: dict[str, Any]

    def calls(self) -> int:
        """Number of times that rank 0 ran the user's line."""
        file = self.folder / "calls.0"
        return len(file.read_text()) if file.exists() else 0


def prepare(kernel: kernels.Kernel) -> None:
    """Load the extension, and what the tests' cells use."""
    names = "import torch\nfrom notebook_accel import notebook_launcher"
    loaded = kernel.run(f"%load_ext notebook_accel\n{names}", _TIMEOUT_S)
    assert loaded.status == "ok", loaded.traceback
    assert kernel.run("from tests.frameworks import spy\nspy.watch()").status == "ok"


class Story:
    """The launches of a row in one notebook, in their order.

    Args:
        row: The row.
        folder: An empty folder.
        kernel: A kernel that is prepared.

    Raises:
        CannotTrainError: The program has failed at once.
    """

    def __init__(self, row: Row, folder: pathlib.Path, kernel: kernels.Kernel) -> None:
        self.row = row
        self._folder = folder
        self._kernel = kernel
        self._must_run("resume = None")
        self.cell = self._run_cell("cell", f"{_SPY}.call(folder, {row.pause_s})", f"{_OPTIONS} --pull model")
        if self.cell.outcome.status != "ok":
            raise CannotTrainError(self.cell.outcome.traceback)
        self.pulled = self._fingerprint("model")
        self.loaded = self._fingerprint(row.load) if row.load else ""
        self.failed = self._fail()
        self.interrupted = self._interrupt()
        self.left = self._left()
        self.resume = next(iter(self._checkpoints(self.interrupted.folder)), None)
        self.launched = self._launch()
        self.session = self._session()

    @property
    def _failing_call(self) -> int:
        return min(_FAILING_CALL, max(1, self.cell.calls() // 2))

    def _must_run(self, code: str) -> None:
        outcome = self._kernel.run(code, _TIMEOUT_S)
        assert outcome.status == "ok", outcome.traceback

    def _start(self, name: str, epochs: int) -> pathlib.Path:
        folder = self._folder / name
        folder.mkdir()
        self._must_run(f"folder, epochs, ends = {str(folder)!r}, {epochs}, []")
        return folder

    @property
    def _last(self) -> str:
        return f"({self.row.world_size}, {_SPY}.fingerprint(model))"

    def _run_cell(self, name: str, before_users_line: str = f"{_SPY}.call(folder)", options: str = _OPTIONS) -> Run:
        folder = self._start(name, 1)
        cell = self.row.cell(before_users_line, self._last)
        return self._end(folder, self._kernel.run(f"%%distributed {options} --out ends\n{cell}", _TIMEOUT_S))

    def _fail(self, prefix: str = "", options: str = _OPTIONS) -> Run:
        fault = f"if {_SPY}.call(folder) == {self._failing_call}: raise ValueError({FAULT!r})"
        return self._run_cell(f"{prefix}failed", fault, options)

    def _interrupt(self, prefix: str = "", options: str = _OPTIONS) -> Run:
        folder = self._start(f"{prefix}interrupted", _MANY_EPOCHS)
        code = self.row.cell(f"{_SPY}.call(folder)", self._last)
        cell = self._kernel.start(f"%%distributed {options}\n{code}")

        def is_in_the_middle() -> bool:
            # The first of two checkpoints is complete.
            has_saved = not self.row.checkpoints or len(self._checkpoints(folder)) > 1
            file = folder / "calls.0"
            return has_saved and file.exists() and len(file.read_text()) > _CALLS_BEFORE_INTERRUPT

        processes.wait_until(is_in_the_middle, "it trains", _TIMEOUT_S, poll_s=0.05)
        self._kernel.interrupt()
        return self._end(folder, cell.finish(_TIMEOUT_S))

    def _launch(self) -> Run:
        folder = self._start("launched", 1 if self.resume is None else 2)
        function = self.row.function(f"{_SPY}.call(folder)", self._last)
        self._must_run(f"resume = {None if self.resume is None else str(self.resume)!r}\n{function}")
        call = f"ends = notebook_launcher(train, num_processes=2, preload={list(PRELOAD)})"
        return self._end(folder, self._kernel.run(call, _TIMEOUT_S))

    def _session(self) -> list[Run]:
        """Return the runs in a session, the last one if it failed: one, one after a failure, one after an interrupt."""
        self._must_run("resume = None")
        self._must_run(f"%distributed start {_OPTIONS}")
        runs = []
        try:
            for name, disturb in (("session", self._fail), ("again", self._interrupt), ("at_last", None)):
                runs.append(self._run_cell(name, options=""))
                if runs[-1].outcome.status != "ok":
                    break
                if disturb is not None:
                    disturb("session_", "")
        finally:
            self._must_run("%distributed stop")
        return runs

    def _checkpoints(self, folder: pathlib.Path) -> list[pathlib.Path]:
        """Return the checkpoints, the oldest first."""
        found = folder.glob(self.row.checkpoints) if self.row.checkpoints else []
        return sorted(found, key=lambda path: path.stat().st_mtime)

    def _end(self, folder: pathlib.Path, outcome: kernels.Outcome) -> Run:
        ends = ast.literal_eval(self._kernel.value("list(ends)"))
        rows = json.loads(ast.literal_eval(self._kernel.value("spy.rows()")))
        return Run(outcome, folder, ends, rows)

    def _left(self) -> list[processes.Process]:
        """Return the processes below the kernel, other than those that wait for the next launch.

        The ranks of the last run get the time to go.
        """

        def left() -> list[processes.Process]:
            agents = [process for process in processes.children(self._kernel.pid) if processes.is_agent(process)]
            templates = [child for agent in agents for child in processes.children(agent.pid)]
            return [process for process in self._kernel.descendants() if process not in (*agents, *templates)]

        try:
            processes.wait_until(lambda: not left(), "nothing is left")
        except AssertionError:
            return left()
        return []

    def _fingerprint(self, model: str) -> str:
        outcome = self._kernel.run(f"spy.fingerprint({model})", _TIMEOUT_S)
        return str(ast.literal_eval(outcome.result)) if outcome.status == "ok" else outcome.traceback


def ends_by(library: str, row: Row, folder: pathlib.Path, kernel: kernels.Kernel) -> list[str]:
    """Launch a row by a library's ``notebook_launcher``, from a seed; return what each rank has written at its end.

    Accelerate's forks the process that calls it, and its ranks can hang if that process has other threads. So it is
    called in a plain process, ours in a kernel.
    """
    folder.mkdir()
    body = row.function("pass", f"{_SPY}.write_end(folder, {row.world_size}, model)").removeprefix("def train():\n")
    names = f"folder, epochs, resume = {str(folder)!r}, 1, None"
    options = f", preload={list(PRELOAD)}" if library == "notebook_accel" else ""
    call = f"__import__({library!r}).notebook_launcher(train, num_processes=2{options})"
    program = f"{names}\ndef train():\n    {_SPY}.seed()\n{body}\n{call}"
    if library == "notebook_accel":
        outcome = kernel.run(program, _TIMEOUT_S)
        assert outcome.status == "ok", outcome.traceback
    else:
        # Without the variable, it starts no group on a machine that has no GPU, and each rank trains for itself.
        environ = {**os.environ, **VARIABLES, "ACCELERATE_USE_CPU": "true"}
        program = f"import {', '.join(PRELOAD)}\n{program}"  # as in the kernel: imports draw random numbers
        subprocess.run([sys.executable, "-c", program], env=environ, timeout=_TIMEOUT_S, check=True)
    return [(folder / f"end.{rank}").read_text() for rank in range(2)]
