"""Tests of the configuration form as a person uses it: a real JupyterLab, a real browser, a real file."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.browser.lab import Lab, expect, open_with_extension, run_cell, wait_until_done

if TYPE_CHECKING:
    from playwright.sync_api import Page


pytestmark = [pytest.mark.slow, pytest.mark.browser, pytest.mark.timeout(240)]

_FORM = "import notebook_accel\nnotebook_accel.config_widget()"
_PRECISION = "%%distributed\nimport os\nos.environ['ACCELERATE_MIXED_PRECISION']"


def test_a_click_writes_the_file_that_the_next_cell_uses(page: Page, lab: Lab) -> None:
    file = lab.cache / "notebook_accel" / "default_config.yaml"
    lab.use_theme("JupyterLab Dark")
    open_with_extension(page, lab, "config.ipynb", _FORM, _PRECISION)
    form = run_cell(page, 1).locator(".nba-form")
    button = form.get_by_role("button", name="Write basic config")
    expect(button).to_be_enabled()
    expect(form.locator(".nba-header")).to_contain_text("the CPU")

    count = form.get_by_label("num_processes")
    count.fill("two")
    form.get_by_role("alert").get_by_text("num_processes='two' is not a whole number.").wait_for()
    expect(button).to_be_disabled()
    count.fill("2")
    precision = form.get_by_label("mixed_precision")
    expect(precision.locator("option")).to_have_text(["no", "bf16"])  # fp16 needs a GPU
    precision.select_option("bf16")
    form.get_by_text("+ mixed_precision: bf16").wait_for()
    assert not file.exists()
    button.click()
    form.get_by_text("Written.").wait_for()
    assert "mixed_precision: bf16\nnum_processes: 2\n" in file.read_text()

    assert "['bf16', 'bf16']" in _result(page, 2)

    precision.select_option("no")
    form.get_by_text("- mixed_precision: bf16").wait_for()
    expect(button).to_be_disabled()
    form.get_by_label("Replace the file that is there").check()
    button.click()
    form.get_by_text("Written.").wait_for()
    assert "mixed_precision: 'no'\n" in file.read_text()
    file.unlink()  # launches of later tests would read it

    form.get_by_role("button", name=re.compile("Show .* more options")).press("Enter")
    form.get_by_label("grace_s").wait_for()
    labels = form.locator(".widget-label")
    cut_off = "labels => labels.filter(label => label.scrollWidth > label.clientWidth).map(label => label.textContent)"
    assert labels.evaluate_all(cut_off) == []
    page.set_viewport_size({"width": 760, "height": 1000})
    expect(form.get_by_label("name", exact=True)).to_be_visible()


def _result(page: Page, index: int) -> str:
    output = run_cell(page, index)
    wait_until_done(page, index)
    return output.locator(".jp-OutputArea-executeResult").inner_text()
