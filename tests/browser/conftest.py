"""A JupyterLab server and a Chromium for the tests of this folder."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.browser import lab as labs

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

    from tests.browser.lab import Screenshot

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
def screenshot() -> Screenshot:
    """Return a function that takes a picture of a page or its part, if NOTEBOOK_ACCEL_SCREENSHOTS names a folder."""
    named = os.environ.get("NOTEBOOK_ACCEL_SCREENSHOTS")

    def take(shown: Page | Locator, name: str) -> None:
        if named:
            folder = pathlib.Path(named)
            folder.mkdir(parents=True, exist_ok=True)
            shown.screenshot(path=str(folder / f"{name}.png"))

    return take


@pytest.fixture
def page(browser: Browser, lab: labs.Lab, screenshot: Screenshot, request: pytest.FixtureRequest) -> Iterator[Page]:
    """Open a page. Its kernels end with the test; if the test fails, a picture of the page is taken."""
    from playwright.sync_api import expect

    pictures_are_kept = "NOTEBOOK_ACCEL_SCREENSHOTS" in os.environ
    opened = browser.new_page(
        viewport={"width": 1400, "height": 1000}, device_scale_factor=2 if pictures_are_kept else 1
    )
    opened.set_default_timeout(_DEFAULT_TIMEOUT_MS)
    lab.use_theme("JupyterLab Light")
    expect.set_options(timeout=_DEFAULT_TIMEOUT_MS)
    failures = request.session.testsfailed
    yield opened
    if request.session.testsfailed > failures:
        screenshot(opened, f"failed_{request.node.name}")
    opened.close()
    lab.stop_kernels()
