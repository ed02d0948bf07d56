"""Tests of the form in a real kernel: its widgets' values, and the effect of a front end's messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from notebook_accel import config
from tests import kernels

pytestmark = pytest.mark.front_end

Values = Callable[..., list[object]]

_VIEW = "application/vnd.jupyter.widget-view+json"
_SETUP = """
import html, os, pathlib, re
variables = dict(os.environ)
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["HF_HOME"] = "none"
from kernel_ext.config_form import ConfigForm
from notebook_accel.launching.kernel.config_draft import Draft

def send(widget, **state):
    # What a front end sends when somebody types, through the kernel's own handler.
    data = {"method": "update", "state": state, "buffer_paths": []}
    widget.comm.handle_msg({"content": {"data": data}, "buffers": []})

def click():
    button = parts._button
    data = {"method": "custom", "content": {"event": "click"}}
    button.comm.handle_msg({"content": {"data": data}, "buffers": []})

def show(widget):
    return html.unescape(re.sub("<[^>]*>", "", widget.value)).strip()

def field(name):
    return parts._fields[name].input

def open_form(file):
    global form, parts, path
    path = pathlib.Path(file)
    form = ConfigForm(Draft(path))
    bundle = form._repr_mimebundle_()
    parts = form._widgets
    return bundle
"""


@pytest.fixture(scope="module")
def kernel(notebook: kernels.Kernel) -> Iterator[kernels.Kernel]:
    """The shared notebook, for this file without a GPU and without Accelerate's file."""
    outcome = notebook.run(_SETUP, allow_stdin=True)
    assert outcome.status == "ok", outcome.traceback
    yield notebook
    assert notebook.run("os.environ.clear(); os.environ.update(variables)").status == "ok"


@pytest.fixture
def values(kernel: kernels.Kernel) -> Values:
    """Run code as a front end with a user would. Return the values of expressions after it."""

    def run(code: str, *expressions: str) -> list[object]:
        outcome = kernel.run(f"{code}\n({', '.join(expressions)},)", allow_stdin=True)
        assert outcome.status == "ok", outcome.traceback
        return list(eval(outcome.result))

    return run


@pytest.mark.parametrize("code", ["notebook_accel.config_widget()", "%distributed config"])
def test_it_is_the_cells_value_and_text_where_nobody_looks(kernel: kernels.Kernel, code: str) -> None:
    kernel.run("import notebook_accel")
    for is_watched in (True, False):
        cell = kernel.start(code, allow_stdin=is_watched)
        assert cell.finish().status == "ok"
        (shown,) = [message["content"]["data"] for message in cell.messages if message["msg_type"] == "execute_result"]
        assert set(shown) == ({_VIEW, "text/plain"} if is_watched else {"text/plain"})
        assert "notebook-accel config\n" in shown["text/plain"]
        assert 'write_basic_config(mixed_precision="no")' in shown["text/plain"]


def test_every_option_is_a_field_with_its_help(values: Values) -> None:
    labels, notes = values(
        "open_form('a/config.yaml')",
        "[field.input.description for field in parts._fields.values()]",
        "[show(field.note) for field in parts._fields.values()]",
    )
    assert labels == [option.name for option in config.fields()]
    for note, option in zip(notes, config.fields(), strict=True):  # type: ignore[call-overload]
        assert note.startswith(option.help)


def test_typing_is_checked_and_a_click_writes_what_was_shown(values: Values) -> None:
    name, note, disabled, status = values(
        "open_form('b/config.yaml'); send(field('num_processes'), value='0')",
        "field('num_processes').value", "show(parts._fields['num_processes'].note)", "parts._button.disabled",
        "show(parts._status)",
    )  # fmt: skip
    assert (name, disabled, status) == ("0", True, "Correct num_processes first.")
    assert str(note).startswith("Error: num_processes=0 can't be used: it has to be >= 1.")
    assert values("click()", "path.exists()") == [False]

    shown, options, disabled = values(
        "send(field('num_processes'), value='2'); send(field('mixed_precision'), index=1)",
        "show(parts._file)", "field('mixed_precision').options", "parts._button.disabled",
    )  # fmt: skip
    assert "b/config.yaml a new file" in str(shown)
    assert "+ mixed_precision: bf16\n+ num_processes: 2\n" in str(shown)
    assert (options, disabled) == (("no", "bf16"), False)
    content, status, disabled = values("click()", "path.read_text()", "show(parts._status)", "parts._button.disabled")
    assert "mixed_precision: bf16\nnum_processes: 2\n" in str(content)
    assert "Written." in str(status)
    assert disabled is True  # there is nothing more to write


def test_an_error_in_an_option_that_is_folded_away_unfolds_it(values: Values) -> None:
    folded, unfolded, words = values(
        "open_form('g/config.yaml'); before = parts._rare.layout.display; send(field('grace_s'), value='-1')",
        "before", "parts._rare.layout.display", "parts._more.description",
    )  # fmt: skip
    assert (folded, unfolded) == ("none", "")
    assert words == f"Hide {len(config.fields()) - 3} more options"


def test_a_file_that_is_there_is_read_and_replaced_only_when_the_box_is_ticked(values: Values) -> None:
    value, more, disabled, display = values(
        "pathlib.Path('c').mkdir(); pathlib.Path('c/config.yaml').write_text('grace_s: 7\\nnum_procs: 2\\n')\n"
        "open_form('c/config.yaml')",
        "field('grace_s').value", "parts._rare.layout.display", "parts._button.disabled",
        "parts._overwrite.layout.display",
    )  # fmt: skip
    assert (value, more, disabled, display) == ("7", "", True, "")
    problems, shown = values("click()", "show(parts._problems)", "path.read_text()")
    assert problems == "Not taken over:line 2: there is no option 'num_procs'; is it num_processes?"
    assert shown == "grace_s: 7\nnum_procs: 2\n"
    (shown,) = values("send(parts._overwrite, value=True); click()", "path.read_text()")
    assert "grace_s: 7.0\n" in str(shown) and "num_procs:" not in str(shown)
    assert values("", "parts._overwrite.value", "parts._overwrite.layout.display") == [False, "none"]


def test_another_source_fills_the_fields(kernel: kernels.Kernel, values: Values) -> None:
    labels, filled = values(
        "theirs = pathlib.Path('none/accelerate/default_config.yaml'); theirs.parent.mkdir(parents=True)\n"
        "theirs.write_text('num_processes: 4\\nmixed_precision: fp16\\n<b>: 1\\n')\n"
        "open_form('e/config.yaml'); send(parts._source, index=1)",
        "[label for label, _ in parts._source.options]",
        "[field(name).value for name in ('num_processes', 'mixed_precision', 'use_cpu')]",
    )
    assert labels == ["this machine", "Accelerate's file, none/accelerate/default_config.yaml"]
    assert filled == ["4", "fp16", False]
    problems, told = values("", "parts._problems.value", "show(parts._file)")
    assert "&lt;b&gt;" in str(problems) and "<b>'" not in str(problems)
    assert "mixed_precision='fp16' was asked for, and the ranks run on the CPU." in str(told)
    assert kernel.value("theirs.unlink()") == ""


def test_the_box_that_is_hidden_does_not_count(kernel: kernels.Kernel, values: Values) -> None:
    """Require a new tick for every change of the file."""
    disabled, ticked = values(
        "open_form('f/config.yaml'); click()\n"
        "send(field('num_processes'), value='5'); send(parts._overwrite, value=True); click()\n"
        "send(field('num_processes'), value='6'); click()",
        "parts._button.disabled", "parts._overwrite.value",
    )  # fmt: skip
    assert (disabled, ticked) == (True, False)
    assert "num_processes: 5" in kernel.value("path.read_text()")
