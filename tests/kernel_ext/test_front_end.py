"""Tests of clicks while a cell runs, in a real kernel. CI runs them with several versions of ipykernel."""

from __future__ import annotations

import textwrap

import pytest

from tests import kernels

pytestmark = pytest.mark.front_end

_BLOCKING = """
job = make_job()
view = open_view(job)
start(job)
deadline = time.monotonic() + 60
while not view._is_clickable() and time.monotonic() < {patience_s} + deadline - 60:
    view.refresh()
    time.sleep(0.02)
view.refresh()
print("stop:", view._widgets.stop.comm.comm_id, repr(view._widgets.stop.layout.display))
print("hint:", view._hint())
while not job.send_order.names and not {is_over} and time.monotonic() < deadline:
    view.refresh()
    time.sleep(0.02)
finish(job)
view.close()
print("over:", job.send_order.names)
"""


def _version(kernel: kernels.Kernel) -> tuple[int, int]:
    """Return the version of the kernel's ipykernel, which need not be this process's."""
    major, minor = kernel.value("__import__('ipykernel').version_info[:2]").strip("()").split(", ")
    return int(major), int(minor)


def _start_blocking(kernel: kernels.Kernel, *, patience_s: int = 60, is_over: bool = False) -> tuple[kernels.Cell, str]:
    code = textwrap.dedent(_BLOCKING).format(patience_s=patience_s, is_over=is_over)
    cell = kernel.start(code, allow_stdin=True)
    cell.wait_for_output("hint:")
    line = next(line for line in cell.stream("stdout").splitlines() if line.startswith("stop:"))
    return cell, line.split()[1]


def test_where_no_click_can_arrive_there_is_no_button_and_the_panel_says_what_to_do(faking: kernels.Kernel) -> None:
    if _version(faking) >= (7, 4):
        pytest.skip("from 7.4 on a click always arrives")
    cell, _ = _start_blocking(faking, patience_s=0, is_over=True)
    lines = cell.finish().stdout.splitlines()
    assert lines[0].endswith("'none'")
    assert lines[1:] == ["hint: interrupt the kernel to stop", "over: []"]


def test_a_click_arrives_where_the_front_end_has_none(faking: kernels.Kernel) -> None:
    if _version(faking) < (7, 4):
        pytest.skip("before 7.4, ipykernel lets the front end alone choose the subshell")
    cell, button = _start_blocking(faking)
    faking.click(button)
    assert cell.finish().stdout.splitlines()[-2:] == ["hint: ", "over: ['stop']"]


# The last one: the kernel has that subshell from then on.
def test_a_click_arrives_while_a_cell_runs_where_the_front_end_has_a_subshell(faking: kernels.Kernel) -> None:
    if _version(faking) < (7, 0):
        pytest.skip("ipykernel 6 has no subshells")
    subshell = faking.make_subshell()
    cell, button = _start_blocking(faking)
    faking.click(button, subshell)
    assert cell.finish().stdout.splitlines()[-2:] == ["hint: ", "over: ['stop']"]
