"""The error tree: every error can be pickled, and its text has what, why and what to type."""

from __future__ import annotations

import copy
import inspect
import os
import pathlib
import pickle
import signal
import subprocess
import sys

import cloudpickle
import pytest

from notebook_accel import errors

_FINDING = errors.Finding(what="CUDA is in use here.", why="A fork can't have it.", fix="restart the kernel")
_WARNING = errors.Finding(what="This machine is slow.", why="It has one core.", fix="buy another", refuses=False)
_FAILED = errors.RankFailedError(
    "Rank 1 of 2 raised ValueError: boom.",
    rank=1,
    world_size=2,
    why="It was asked to.",
    exit_code=1,
    remote_traceback='  File "In[3]", line 2\nValueError: boom\n',
    last_output=("epoch 1", "epoch 2"),
    others=(errors.RankEnd(0, signal=signal.SIGTERM, stopped=True),),
)

_FAILED.restarts = ("rank 0: ValueError: boom", "rank 1 was killed by SIGKILL")

_ONE_OF_EACH = [
    errors.NotebookAccelError("what", why="why", fix="fix"),
    errors.NodeLostError("Node 1 (host) has gone.", why="why", fix="fix"),
    errors.ConfigError("num_processes=0 can't be used.", fix="give it 1"),
    errors.LaunchError("It didn't start."),
    errors.PreflightError((_FINDING, _WARNING)),
    errors.CellError("This magic needs the kernel.", fix="take it out"),
    errors.CellSyntaxError("The cell is not Python.", shown=("line 1", "SyntaxError: invalid syntax")),
    errors.PayloadError("A socket can't be sent.", path='global "loader" -> attribute "file"', why="It is open here."),
    errors.ProcessStartError("The agent did not start."),
    errors.RunError("It did not end well."),
    _FAILED,
    errors.ResultError("Rank 1's value can't be had.", path="the result of rank 1", values={0: 2}, reasons={"a": "b"}),
    errors.RunStoppedError("The run was stopped."),
    errors.RunTimeoutError("The run took longer than 5 s."),
    errors.SupervisorLostError("The agent has gone."),
    errors.TrainingError("prepare() was not called."),
    errors.CheckpointError("There is no such folder."),
    errors.CollectiveError("The shapes differ."),
]


def test_several_findings_are_a_numbered_list_and_one_is_none() -> None:
    second = errors.Finding(what="The port is taken.", why="By another.", fix="take another")
    assert str(errors.PreflightError((_FINDING, _WARNING, second))).splitlines() == [
        "2 problems prevent this launch:",
        "1. CUDA is in use here.",
        "  Why: A fork can't have it.",
        "  Fix: restart the kernel",
        "2. The port is taken.",
        "  Why: By another.",
        "  Fix: take another",
    ]
    one = errors.PreflightError((_FINDING, _WARNING))
    assert str(one).startswith("CUDA is in use here.\n  Why:")
    assert one.findings == (_FINDING, _WARNING)


def test_every_error_has_an_example_here() -> None:
    kinds = {
        kind for kind in vars(errors).values() if inspect.isclass(kind) and issubclass(kind, errors.NotebookAccelError)
    }
    assert {type(error) for error in _ONE_OF_EACH} == kinds


@pytest.mark.parametrize("error", _ONE_OF_EACH, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("copied", [
    lambda error: pickle.loads(pickle.dumps(error)),
    lambda error: cloudpickle.loads(cloudpickle.dumps(error)),
    copy.copy,
], ids=["pickle", "cloudpickle", "copy"])  # fmt: skip
def test_every_error_pickles(error: errors.NotebookAccelError, copied) -> None:
    error.add_note("a note that somebody added") if hasattr(error, "add_note") else None
    again = copied(error)
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert again.args == error.args
    assert vars(again) == vars(error)


@pytest.mark.parametrize("error", _ONE_OF_EACH, ids=lambda error: type(error).__name__)
def test_every_error_is_exported_and_in_the_tree_that_the_module_draws(error: errors.NotebookAccelError) -> None:
    name = type(error).__name__
    assert name in errors.__all__
    assert name in (errors.__doc__ or "")


def test_message_has_what_why_and_fix_one_a_line() -> None:
    assert str(errors.ConfigError("what", why="why", fix="fix")) == "what\nwhy\nFix: fix"
    assert str(errors.ConfigError("what")) == "what"


def test_builtin_kinds_can_be_caught() -> None:
    with pytest.raises(ValueError, match="what"):
        raise errors.ConfigError("what")
    with pytest.raises(TimeoutError):
        raise errors.RunTimeoutError("what")


def test_failed_rank_shows_traceback_output_and_the_others() -> None:
    shown = str(_FAILED)
    for part in ("Rank 1 of 2", 'File "In[3]", line 2', "epoch 1\n  epoch 2", "rank 0: stopped"):
        assert part in shown
    assert _FAILED._render_traceback_() == [f"RankFailedError: {shown}"]


@pytest.mark.parametrize("url", ["", "Project-URL: Documentation, https://docs.example/en/latest/\n"])
def test_error_gives_the_address_of_its_section_where_the_package_names_its_documentation(
    tmp_path: pathlib.Path, url: str
) -> None:
    folder = tmp_path / "notebook_accel-1.0.dist-info"
    folder.mkdir()
    folder.joinpath("METADATA").write_text(f"Metadata-Version: 2.1\nName: notebook-accel\nVersion: 1.0\n{url}")
    code = "from notebook_accel import errors; print(errors.ConfigError('Wrong.')._render_traceback_()[0])"
    environment = {**os.environ, "PYTHONPATH": str(pathlib.Path(errors.__file__).parents[1])}
    launch = ["-m", "notebook_accel", "launch", "missing.py"]
    for command, what in ((["-c", code], "ConfigError: Wrong."), (launch, "There is no file 'missing.py'")):
        ended = subprocess.run(
            [sys.executable, *command],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        said = ended.stdout + ended.stderr
        assert what in said
        assert ("More: https://docs.example/en/latest/errors.html#configerror\n" in said) == bool(url)


@pytest.mark.parametrize(("end", "text"), [
    (errors.RankEnd(3, error="ValueError: boom", exit_code=1), "rank 3: ValueError: boom"),
    (errors.RankEnd(3, error="KeyboardInterrupt", stopped=True), "rank 3: stopped"),
    (errors.RankEnd(3, signal=15, stopped=True, finished=True), "rank 3: had finished"),
    (errors.RankEnd(3, signal=9), "rank 3: killed by SIGKILL"),
    (errors.RankEnd(3, signal=99), "rank 3: killed by signal 99"),
    (errors.RankEnd(3, exit_code=7), "rank 3: exited with status 7"),
])  # fmt: skip
def test_end_of_a_rank_in_words(end: errors.RankEnd, text: str) -> None:
    assert str(end) == text
