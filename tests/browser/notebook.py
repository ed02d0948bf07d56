"""What a person does in an open notebook, and sees there."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tests import processes
from tests.browser.lab import Lab

if TYPE_CHECKING:
    from playwright.sync_api import Locator, LocatorAssertions, Page

__all__ = ["expect", "open_notebook", "run_cell", "save", "wait_until_done"]


def expect(shown: Locator) -> LocatorAssertions:
    """What a part of the page shows, or soon will: it follows the kernel, also after a cell is done."""
    from playwright import sync_api

    return sync_api.expect(shown)


def open_notebook(page: Page, lab: Lab, name: str) -> None:
    """Opens a notebook and waits until its kernel is there."""
    page.goto(lab.url(f"lab/tree/{name}") + "&reset")  # without the notebooks of earlier tests
    page.locator(".jp-Notebook .jp-CodeCell").first.wait_for()
    page.get_by_text("| Idle").wait_for()  # a cell that is run before the kernel is there is not run


def run_cell(page: Page, index: int) -> Locator:
    """Runs a cell by hand; returns the place where its output appears."""
    cell = page.locator(".jp-Notebook .jp-CodeCell").nth(index)
    cell.locator(".cm-content").click()
    page.keyboard.press("Control+Enter")
    return cell.locator(".jp-OutputArea")


def wait_until_done(page: Page, index: int) -> None:
    """Waits until a cell that was run is done."""
    prompt = page.locator(".jp-Notebook .jp-CodeCell").nth(index).locator(".jp-InputPrompt")
    processes.wait_until(lambda: re.fullmatch(r"\[\d+\]:", prompt.inner_text()), f"cell {index} is done", 60)


def save(page: Page, lab: Lab, name: str, expected: str) -> None:
    """Saves the notebook and waits until the file has a text."""
    page.keyboard.press("Escape")
    page.keyboard.press("Control+s")
    processes.wait_until(lambda: expected in lab.saved_text(name), "the notebook is saved")
