"""Tests of the magic in a real kernel: loading, help, flags, and errors of bad input."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Iterator

import pytest

from kernel_ext import arguments, magics
from notebook_accel import config
from tests import kernels


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[kernels.Kernel]:
    with kernels.running(tmp_path_factory.mktemp("notebook")) as kernel:
        assert kernel.run("%load_ext notebook_accel\nimport os").status == "ok"
        assert kernel.run("%%distributed -n 1\n1", 120).result == "[1]"
        yield kernel


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


@pytest.mark.front_end
def test_help_has_every_option_with_its_default(notebook: kernels.Kernel) -> None:
    shown = notebook.value("get_ipython().find_cell_magic('distributed').__doc__")
    for option in config.fields():
        assert f"--{option.name}" in shown
        if option.default not in (None, "", ()):
            assert f"Default: {option.default}." in " ".join(shown.replace("\\n", " ").split())
    for flag in ("--args", "--out", "--pull", "--push", "--background", "--no-use_cpu"):
        assert flag in shown
    assert max(map(len, (magics._DESCRIPTION + magics._EXAMPLES).splitlines())) <= 80  # longer ones are broken anywhere


@pytest.mark.parametrize("name", ["notebook_accel", "kernel_ext"])
def test_either_name_loads_and_unloads_it(tmp_path: pathlib.Path, name: str) -> None:
    with kernels.running(tmp_path) as kernel:
        has_it = "'distributed' in get_ipython().magics_manager.magics['cell']"
        assert kernel.run(f"%load_ext {name}").status == "ok"
        assert kernel.value(has_it) == "True"
        assert kernel.run(f"%unload_ext {name}").status == "ok"
        assert kernel.value(has_it) == "False"
        assert kernel.descendants() == []


def test_another_extensions_magic_of_that_name_is_mentioned(tmp_path: pathlib.Path) -> None:
    with kernels.running(tmp_path) as kernel:
        kernel.run("def theirs(line, cell): pass\ntheirs.__module__ = 'nbdistributed.magic'")
        kernel.run("get_ipython().register_magic_function(theirs, 'cell', 'distributed')")
        loaded = kernel.run("%load_ext notebook_accel")
        assert (loaded.status, "nbdistributed.magic" in loaded.stderr) == ("ok", True)


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
    ],
)
def test_bad_flag_is_said_in_a_few_lines_before_anything_runs(notebook: kernels.Kernel, line: str, said: str) -> None:
    outcome = notebook.run(f"%%distributed {line}\nopen('it_ran', 'w')")
    assert outcome.status == "error"
    shown = plain(outcome.traceback + outcome.stderr)
    assert said in shown
    assert len(shown.strip().splitlines()) <= 4
    assert notebook.value("os.path.exists('it_ran')") == "False"


def test_arguments_that_are_no_expression_are_said(notebook: kernels.Kernel) -> None:
    outcome = notebook.run("%%distributed --args 'pear',10\ndef train(fruit, count): pass")
    shown = plain(outcome.traceback)
    assert "--args pear,10 can't be evaluated: NameError: name 'pear' is not defined" in shown
    assert "--args ('pear', 10)" in shown and "magics.py" not in shown


def test_cell_that_only_defines_a_coroutine_is_refused(notebook: kernels.Kernel) -> None:
    outcome = notebook.run("%%distributed -n 2\nimport asyncio\nasync def train(): pass")
    assert "end the cell with asyncio.run(train(...))" in plain(outcome.traceback)
    assert "Launching" not in outcome.stdout


@pytest.mark.front_end
def test_syntax_error_is_shown_as_the_notebook_shows_one(notebook: kernels.Kernel) -> None:
    outcome = notebook.run("%%distributed -n 2\nfine = 1\nx = = 3")
    shown = plain(outcome.traceback)
    assert "SyntaxError: invalid syntax" in shown
    assert "x = = 3" in shown and "^" in shown
    assert re.search(r'In\[\d+\]:3|In\[\d+\]"?, line 3', shown)  # IPython's way to say it differs by version
    assert "magics.py" not in shown
    assert "Launching" not in outcome.stdout


def test_object_that_cannot_be_sent_is_named_before_anything_runs(notebook: kernels.Kernel) -> None:
    notebook.run(
        "import socket\nclass Data:\n    def __init__(self): self.line = socket.socket()\nloader = {'train': Data()}"
    )
    outcome = notebook.run("%%distributed -n 2\nloader")
    assert outcome.error_name == "PayloadError"
    assert """global "loader" -> item 'train' -> attribute "line" """.strip() in outcome.traceback
    assert "Launching" not in outcome.stdout


def test_configuration_file_and_environment_are_read(notebook: kernels.Kernel, tmp_path: pathlib.Path) -> None:
    (tmp_path / "config.yaml").write_text(
        "num_processes: 2\nmixed_precision: bf16\ncompute_environment: LOCAL_MACHINE\n"
    )
    notebook.run(f"os.environ['NOTEBOOK_ACCEL_CONFIG_FILE'] = {str(tmp_path / 'config.yaml')!r}")
    cell = "\nimport os\nos.environ.get('ACCELERATE_MIXED_PRECISION', 'no')"
    assert notebook.run("%%distributed" + cell).result == "['bf16', 'bf16']"
    notebook.run("os.environ['NOTEBOOK_ACCEL_MIXED_PRECISION'] = 'no'")
    assert notebook.run("%%distributed" + cell).result == "['no', 'no']"
    assert notebook.run("%%distributed -n 1 --mixed_precision bf16" + cell).result == "['bf16']"
    notebook.run("del os.environ['NOTEBOOK_ACCEL_MIXED_PRECISION'], os.environ['NOTEBOOK_ACCEL_CONFIG_FILE']")


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


def test_names_may_have_blanks_between_them(notebook: kernels.Kernel) -> None:
    assert notebook.run("%%distributed -n 1 --pull first, second\nfirst, second = 1, 2").status == "ok"
    assert notebook.value("first, second") == "(1, 2)"


def test_cell_without_a_value_shows_none(notebook: kernels.Kernel) -> None:
    assert notebook.run("%%distributed -n 2\nx = 1").result == ""
