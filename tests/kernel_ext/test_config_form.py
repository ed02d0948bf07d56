"""Tests of the form: what its widgets say of the file, and what becomes of it when somebody types and clicks."""

from __future__ import annotations

import html
import pathlib
import re
from typing import Any

import pytest

from kernel_ext.config_form import _FormWidgets
from notebook_accel import config
from notebook_accel.launching.kernel.config_draft import Draft
from tests import kernels

pytestmark = pytest.mark.front_end

_VIEW = "application/vnd.jupyter.widget-view+json"


@pytest.mark.parametrize("code", ["notebook_accel.config_widget()", "%distributed config"])
def test_it_is_the_cells_value_and_text_where_nobody_looks(notebook: kernels.Kernel, code: str) -> None:
    notebook.run("import notebook_accel")
    for is_watched in (True, False):
        cell = notebook.start(code, allow_stdin=is_watched)
        assert cell.finish().status == "ok"
        (shown,) = [message["content"]["data"] for message in cell.messages if message["msg_type"] == "execute_result"]
        assert set(shown) == ({_VIEW, "text/plain"} if is_watched else {"text/plain"})
        assert "notebook-accel config\n" in shown["text/plain"]
        assert 'write_basic_config(mixed_precision="no")' in shown["text/plain"]


@pytest.fixture
def theirs(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """The place of Accelerate's own file, on a machine without a GPU. The file isn't there."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "none"))
    path = tmp_path / "none" / "accelerate" / "default_config.yaml"
    path.parent.mkdir(parents=True)
    return path


@pytest.fixture
def form(file: pathlib.Path, theirs: pathlib.Path) -> _FormWidgets:
    """The widgets of a form for a file that doesn't exist yet."""
    return _FormWidgets(Draft(file))


def field(form: _FormWidgets, name: str) -> Any:
    return form._fields[name].input


def text(widget: Any) -> str:
    return html.unescape(re.sub("<[^>]*>", "", widget.value)).strip()


def test_every_option_is_a_field_with_its_help(form: _FormWidgets) -> None:
    assert [each.input.description for each in form._fields.values()] == [option.name for option in config.fields()]
    for each, option in zip(form._fields.values(), config.fields(), strict=True):
        assert text(each.note).startswith(option.help)


def test_typing_is_checked_and_a_click_writes_what_was_shown(form: _FormWidgets, file: pathlib.Path) -> None:
    field(form, "num_processes").value = "0"
    assert (form._button.disabled, text(form._status)) == (True, "Correct num_processes first.")
    said = text(form._fields["num_processes"].note)
    assert said.startswith("Error: num_processes=0 can't be used: it has to be >= 1.")
    form._button.click()
    assert not file.exists()
    field(form, "num_processes").value = "2"
    field(form, "mixed_precision").value = "bf16"
    assert f"{file} a new file" in text(form._file)
    assert "+ mixed_precision: bf16\n+ num_processes: 2\n" in text(form._file)
    assert (field(form, "mixed_precision").options, form._button.disabled) == (("no", "bf16"), False)
    form._button.click()
    assert "mixed_precision: bf16\nnum_processes: 2\n" in file.read_text()
    assert "Written." in text(form._status)
    assert form._button.disabled  # there is nothing more to write


def test_an_error_in_an_option_that_is_folded_away_unfolds_it(form: _FormWidgets) -> None:
    assert form._rare.layout.display == "none"
    field(form, "grace_s").value = "-1"
    assert form._rare.layout.display == ""
    assert form._more.description == f"Hide {len(config.fields()) - 3} more options"


def test_a_file_that_is_there_is_read_and_replaced_only_when_the_box_is_ticked(
    file: pathlib.Path, theirs: pathlib.Path
) -> None:
    file.parent.mkdir()
    file.write_text("grace_s: 7\nnum_procs: 2\n")
    form = _FormWidgets(Draft(file))
    assert (field(form, "grace_s").value, form._rare.layout.display) == ("7", "")
    assert (form._button.disabled, form._overwrite.layout.display) == (True, "")
    assert text(form._problems) == "Not taken over:line 2: there is no option 'num_procs'; is it num_processes?"
    form._button.click()
    assert file.read_text() == "grace_s: 7\nnum_procs: 2\n"
    form._overwrite.value = True
    form._button.click()
    assert "grace_s: 7.0\n" in file.read_text() and "num_procs:" not in file.read_text()
    # The box is hidden, and the next change of the file needs a new tick.
    assert (form._overwrite.value, form._overwrite.layout.display) == (False, "none")
    field(form, "num_processes").value = "6"
    form._button.click()
    assert form._button.disabled and "num_processes: 6" not in file.read_text()


def test_another_source_fills_the_fields(file: pathlib.Path, theirs: pathlib.Path) -> None:
    theirs.write_text("num_processes: 4\nmixed_precision: fp16\n<b>: 1\n")
    form = _FormWidgets(Draft(file))
    assert [label for label, _ in form._source.options] == ["this machine", f"Accelerate's file, {theirs}"]
    form._source.value = 1
    filled = [field(form, name).value for name in ("num_processes", "mixed_precision", "use_cpu")]
    assert filled == ["4", "fp16", False]
    assert "&lt;b&gt;" in form._problems.value and "<b>'" not in form._problems.value
    assert "mixed_precision='fp16' was asked for, and the ranks run on the CPU." in text(form._file)
