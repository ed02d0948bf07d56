"""Tests of the cell magic, in a shell of this process: help, flags, and errors of bad input."""

from __future__ import annotations

import pathlib
import re
import sys
import types

import pytest

from kernel_ext import arguments, magics
from tests.kernel_ext.conftest import Shell, error
from tests.test_formatting import marked


@pytest.mark.front_end
def test_help_has_the_flags_of_the_options_and_those_of_the_magic(shell: Shell) -> None:
    help_text = shell.ipython.find_cell_magic("distributed").__doc__
    for flag in ("--num_processes", "--args", "--out", "--pull", "--push", "--background", "--no-use_cpu"):
        assert flag in help_text
    assert max(map(len, (magics._DESCRIPTION + magics._EXAMPLES).splitlines())) <= 80  # longer ones are broken anywhere


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("-n 0", "num_processes=0 can't be used: it has to be >= 1."),
        ("-n -1", "num_processes=-1 can't be used"),
        ("-n two", "num_processes='two' is not a whole number."),
        ("-n os.cpu_count()", "Fix: -n {os.cpu_count()}, with braces"),
        ("--timeout_s os", "Fix: --timeout_s {os}, with braces"),
        ("--mixed_precision fp4", "mixed_precision='fp4' is not known."),
        ("--timeout_s soon", "timeout_s='soon' is not a number."),
        ("--nonsense 3", "there is no option --nonsense"),
        ("--num_proceses 3", "there is no option --num_proceses; is it --num_processes? %%distributed?"),
        ("--cpu", "there is no option --cpu; is it --use_cpu? %%distributed?"),
        ("--nproc_per_node 2", "there is no option --nproc_per_node; is it --num_processes? %%distributed?"),
        ("--quiet", "there is no option --quiet. %%distributed?"),  # not "is it --view?"
        ("--pull modle", "the cell neither assigns nor uses 'modle'"),
        ("--num_processes", "expected one argument"),
        ("--pull a-b", "'a-b' is not a valid name"),
        ("--pull open os", "unexpected argument 'os'; names have commas between them: --pull open,os."),
        ("--push nowhere", "the notebook has no name 'nowhere'"),
        ("--out 3x", "'3x' is not a valid name"),
        ("--args (1, 2", "a quote or a bracket is not closed"),
        ("--args (1,)", "the cell doesn't end with a `def`"),
        ("--mixed_precision fp16", "the ranks run on the CPU"),
        ("-n 2 --start_method inline", "2 processes were asked for, and start_method='inline'"),
        ("--start_method inline --timeout_s 3", "timeout_s=3 was given, and start_method='inline'"),
    ],
)
def test_bad_flag_is_said_in_a_few_lines_before_anything_runs(
    shell: Shell, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, line: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    shell.run("import os")
    text = error(shell, f"%%distributed {line}\nopen('it_ran', 'w')")
    assert said in text
    assert len(text.strip().splitlines()) <= 4
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (
            "--args 'pear',10\ndef train(fruit, count): pass",
            "--args pear,10 can't be evaluated: NameError: name 'pear' is not defined",
        ),
        ("--args 'pear',10\ndef train(fruit, count): pass", "--args ('pear', 10)"),
        ("\nimport asyncio\nasync def train(): pass", "end the cell with asyncio.run(train(...))"),
    ],
)
def test_cell_that_cannot_be_called_is_refused(shell: Shell, code: str, said: str) -> None:
    outcome = shell.run(f"%%distributed -n 2 {code}")
    assert said in outcome.traceback and "magics.py" not in outcome.traceback
    assert "Launching" not in outcome.stdout


def test_fork_is_refused_when_xla_is_initialised(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    xla = types.SimpleNamespace(_backends={"cpu": object()})
    monkeypatch.setitem(sys.modules, "jax._src.xla_bridge", xla)
    said = error(shell, "%%distributed -n 2 --start_method fork\n1")
    assert "XLA is initialised" in said and "restart the kernel" in said


@pytest.mark.filterwarnings("ignore:.*is now lowercase since IPython 9:DeprecationWarning")
def test_errors_have_colours_unless_the_notebook_was_told_not_to(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "from notebook_accel.errors import ConfigError\nraise ConfigError('no', fix='yes')"
    assert marked(shell.run(code).coloured) == ["31ConfigError", "1Fix:"]
    monkeypatch.setattr(shell.ipython, "colors", "NoColor")  # as %colors does
    assert shell.run(code).coloured == "ConfigError: no\nFix: yes"


@pytest.mark.front_end
def test_syntax_error_is_shown_as_the_notebook_shows_one(shell: Shell) -> None:
    outcome = shell.run("%%distributed -n 2\nfine = 1\nx = = 3")
    shown = outcome.traceback
    assert "SyntaxError: invalid syntax" in shown
    assert "x = = 3" in shown and "^" in shown
    assert re.search(r'In\[\d+\]:3|In\[\d+\]"?, line 3', shown)  # IPython's way to say it differs by version
    assert "magics.py" not in shown
    assert "Launching" not in outcome.stdout


def test_configuration_file_and_environment_are_read(
    shell: Shell, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.yaml").write_text(
        "num_processes: 2\nmixed_precision: bf16\ncompute_environment: LOCAL_MACHINE\n"
    )
    monkeypatch.setenv("NOTEBOOK_ACCEL_CONFIG_FILE", str(tmp_path / "config.yaml"))
    cell = "\nimport os\nos.environ.get('ACCELERATE_MIXED_PRECISION', 'no')"
    assert shell.run("%%distributed" + cell).result == "['bf16', 'bf16']"
    monkeypatch.setenv("NOTEBOOK_ACCEL_MIXED_PRECISION", "no")
    assert shell.run("%%distributed" + cell).result == "['no', 'no']"
    assert shell.run("%%distributed -n 1 --mixed_precision bf16" + cell).result == "['bf16']"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("-n 2 --pull model, history", ["-n", "2", "--pull", "model, history"]),
        ("--args dict(a=1) -n 2", ["--args", "dict(a=1)", "-n", "2"]),
        ("--args [1, [2, 3], 4]", ["--args", "[1, [2, 3], 4]"]),
        ("--args=({'a': 'b c'}, model[0])", ["--args=({'a': 'b c'}, model[0])"]),
        ("--name 'my run'  # a comment", ["--name", "my run"]),
        ('--name="my run"', ["--name=my run"]),
        ("--log_line_prefix_template '[${rank}] '", ["--log_line_prefix_template", "[${rank}] "]),
        ("--pull model, ", ["--pull", "model,"]),
    ],
)
def test_line_is_split_as_people_write_it(line: str, words: list[str]) -> None:
    assert arguments.split(line, "%%distributed") == words


def test_names_may_have_blanks_between_them_and_a_cell_without_a_value_shows_none(shell: Shell) -> None:
    outcome = shell.run("%%distributed -n 1 --pull first, second\nfirst, second = 1, 2")
    assert (outcome.status, outcome.result) == ("ok", "")
    assert shell.run("first, second").result == "(1, 2)"


def test_what_earlier_cells_have_imported_from_the_future_holds_in_cells(shell: Shell) -> None:
    shell.run("from __future__ import annotations")
    cell = "%%distributed -n 1\ndef half(x: NotThere) -> NorThis:\n    return x / 2 / 0"
    said = error(shell, f"{cell}\nhalf(3)")
    assert re.search(r"In\[\d+\], line 3", said) and "ZeroDivisionError" in said
    defined = shell.run(cell.replace(" / 0", "").replace("(x: NotThere)", "(x: NotThere = 3)"))
    assert defined.status == "ok", defined.traceback
    assert shell.run("half(5)").result == "2.5"
