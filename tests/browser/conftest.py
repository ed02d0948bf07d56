"""A JupyterLab server and a Chromium for the tests of this folder."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.browser import lab as labs

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

_CHROMIUM_FLAGS = (
    "--no-sandbox",  # it opens only our own pages, and a container has no sandbox
    "--disable-gpu",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)
_DEFAULT_TIMEOUT_MS = 60_000


def pytest_runtest_setup() -> None:
    """Skip all tests if none can run. The summary has one line for all tests that are skipped at one place."""
    missing = [name for name in ("playwright", "jupyterlab") if importlib.util.find_spec(name) is None]
    if shutil.which("chromium") is None:
        missing.append("chromium")
    if missing:
        pytest.skip(f"NOT TESTED IN A BROWSER: {', '.join(missing)} not installed")


@pytest.fixture(scope="package")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[labs.Lab]:
    """Run a JupyterLab server that all tests share."""
    with labs.running(tmp_path_factory.mktemp("lab")) as running:
        yield running
        running.stop_kernels()


@pytest.fixture
def browser() -> Iterator[Browser]:
    """Run a Chromium without a window."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=_CHROMIUM_FLAGS)
        try:
            yield running
        finally:
            running.close()


@pytest.fixture
def page(browser: Browser, lab: labs.Lab, request: pytest.FixtureRequest) -> Iterator[Page]:
    """Open a page. Its kernels end with the test.

    If NOTEBOOK_ACCEL_SCREENSHOTS names a folder, pages are sharp, and that of a test that fails has its picture taken.
    """
    from playwright.sync_api import expect

    pictures = os.environ.get("NOTEBOOK_ACCEL_SCREENSHOTS")
    opened = browser.new_page(viewport={"width": 1400, "height": 1000}, device_scale_factor=2 if pictures else 1)
    opened.set_default_timeout(_DEFAULT_TIMEOUT_MS)
    lab.use_theme("JupyterLab Light")
    expect.set_options(timeout=_DEFAULT_TIMEOUT_MS)
    failures = request.session.testsfailed
    yield opened
    if pictures and request.session.testsfailed > failures:
        opened.screenshot(path=f"{pictures}/failed_{request.node.name}.png")
    opened.close()
    lab.stop_kernels()
