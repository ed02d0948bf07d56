"""A real JupyterLab server in a process group of its own, without the user's settings, and its user's actions."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import secrets
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from jupyter_client.blocking.client import BlockingKernelClient

from tests import processes

if TYPE_CHECKING:
    from playwright.sync_api import Locator, LocatorAssertions, Page

__all__ = ["Lab", "expect", "open_notebook", "open_with_extension", "run_cell", "running", "save", "wait_until_done"]

_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 20.0


class Lab:
    """A running JupyterLab.

    Args:
        folder: The folder of its notebooks, its settings and everything else that it writes.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder
        self._token = secrets.token_hex(16)
        self._notebooks = folder / "notebooks"
        self._notebooks.mkdir()
        self._runtime = folder / "runtime"
        self._set("apputils-extension/notification", {"fetchNews": "false", "checkForUpdates": False})
        self._log = (folder / "server.log").open("wb")
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"),
                *("--ServerApp.ip=127.0.0.1", "--ServerApp.port=0", f"--IdentityProvider.token={self._token}"),
                *(f"--ServerApp.root_dir={self._notebooks}", "--LabApp.extension_manager=readonly"),
            ],
            env=self._environment(),
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )
        try:
            self._port = processes.wait_until(self._find_port, "the server has a port", _START_TIMEOUT_S)
            processes.wait_until(self._is_ready, "the server answers", _START_TIMEOUT_S)
        except BaseException:
            self.close()
            raise

    def _environment(self) -> dict[str, str]:
        places = {
            "HOME": "home",
            "IPYTHONDIR": "ipython",
            "JUPYTER_CONFIG_DIR": "config",
            "JUPYTER_DATA_DIR": "data",
            "JUPYTER_RUNTIME_DIR": "runtime",
            "JUPYTERLAB_SETTINGS_DIR": "settings",
            "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
            "XDG_CACHE_HOME": "home/.cache",
            "XDG_CONFIG_HOME": "config",
            "XDG_DATA_HOME": "data",
        }
        for name in places.values():
            (self._folder / name).mkdir(parents=True, exist_ok=True)
        return {**os.environ, **{name: str(self._folder / place) for name, place in places.items()}}

    def _set(self, plugin: str, settings: dict[str, Any]) -> None:
        path = self._folder / "settings" / "@jupyterlab" / f"{plugin}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(settings))

    def use_theme(self, name: str) -> None:
        """Set the theme of pages that are opened from now on, such as ``JupyterLab Dark``."""
        self._set("apputils-extension/themes", {"theme": name})

    def write_notebook(self, name: str, cells: list[str]) -> None:
        """Write a notebook of these code cells into the server's folder."""
        code: dict[str, Any] = {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": []}
        notebook = {
            "cells": [{**code, "id": f"cell-{index}", "source": source} for index, source in enumerate(cells)],
            "metadata": {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}},
            "nbformat": 4,
            "nbformat_minor": 5,
        }
        (self._notebooks / name).write_text(json.dumps(notebook))

    @property
    def cache(self) -> pathlib.Path:
        """The cache folder of the server's kernels."""
        return self._folder / "home" / ".cache"

    def put_file(self, name: str) -> None:
        """Create an empty file next to the notebooks, in the working directory of their kernels."""
        (self._notebooks / name).touch()

    def saved_text(self, name: str) -> str:
        """Return the text of the notebook's file, which may be half written."""
        return (self._notebooks / name).read_text()

    def as_html(self, name: str) -> pathlib.Path:
        """Convert the saved notebook to HTML with nbconvert. Return the file."""
        command = [sys.executable, "-m", "nbconvert", "--to", "html", "--log-level", "ERROR", name]
        subprocess.run(command, cwd=self._notebooks, env=self._environment(), check=True, timeout=_START_TIMEOUT_S)
        return (self._notebooks / name).with_suffix(".html")

    def url(self, path: str) -> str:
        """Return the address of a page, with the token that opens it."""
        return f"http://127.0.0.1:{self._port}/{path}?token={self._token}"

    @property
    def process(self) -> processes.Process:
        """The server's process."""
        found = processes.read(self._process.pid)
        assert found is not None
        return found

    def start_kernel(self) -> tuple[BlockingKernelClient, processes.Process]:
        """Start a kernel. Return a client of it, which hasn't connected yet, and its process."""
        connection = str(self._runtime / f"kernel-{self._ask('POST', 'api/kernels')['id']}.json")
        client = BlockingKernelClient()
        client.load_connection_file(connection)

        def find() -> processes.Process | None:
            below = processes.children(self._process.pid)
            return next((process for process in below if connection in process.command), None)

        return client, processes.wait_until(find, "the kernel's process is there", _START_TIMEOUT_S)

    def stop_kernels(self) -> None:
        """Shut down every kernel."""
        for session in self._ask("GET", "api/sessions"):
            self._ask("DELETE", f"api/sessions/{session['id']}")

    def _ask(self, method: str, path: str) -> Any:
        request = urllib.request.Request(self.url(path), method=method)
        with urllib.request.urlopen(request, timeout=_STOP_TIMEOUT_S) as response:
            body = response.read()
        return json.loads(body) if body else None

    def _find_port(self) -> int:
        """Return the server's port, 0 as long as it has none."""
        assert self._process.poll() is None, (self._folder / "server.log").read_text()
        for path in self._runtime.glob("jpserver-*.json"):
            with contextlib.suppress(json.JSONDecodeError):  # half written
                return int(json.loads(path.read_text())["port"])
        return 0

    def _is_ready(self) -> bool:
        with contextlib.suppress(urllib.error.URLError):
            return "version" in self._ask("GET", "api")
        return False

    def kill(self) -> None:
        """Kill the server and its kernels, and wait until all that they have started is gone."""
        below = processes.descendants(self._process.pid)
        self._process.kill()
        self._process.wait(_STOP_TIMEOUT_S)
        for process in below:
            if "ipykernel" in process.command:
                processes.kill(process)
        processes.wait_until(lambda: not any(process.is_alive for process in below), "nothing of the server is left")

    def close(self) -> None:
        """End the server and its kernels."""
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError):  # nothing of the group is left, as it should be
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()


@contextlib.contextmanager
def running(folder: pathlib.Path) -> Iterator[Lab]:
    """Run a server for the time of a ``with`` block."""
    lab = Lab(folder)
    try:
        yield lab
    finally:
        lab.close()


def expect(shown: Locator) -> LocatorAssertions:
    """Check what a part of the page shows, or soon will: it follows the kernel, also after a cell is done."""
    from playwright import sync_api

    return sync_api.expect(shown)


def open_notebook(page: Page, lab: Lab, name: str) -> None:
    """Open a notebook and wait until its kernel is there."""
    page.goto(lab.url(f"lab/tree/{name}") + "&reset")  # without the notebooks of earlier tests
    page.locator(".jp-Notebook .jp-CodeCell").first.wait_for()
    page.get_by_text("| Idle").wait_for()  # a cell that is run before the kernel is there is not run


def open_with_extension(page: Page, lab: Lab, name: str, *cells: str) -> None:
    """Open a new notebook whose first cell, before these, has loaded the extension."""
    lab.write_notebook(name, ["%load_ext notebook_accel", *(cell.strip() for cell in cells)])
    open_notebook(page, lab, name)
    run_cell(page, 0)
    wait_until_done(page, 0)


def run_cell(page: Page, index: int) -> Locator:
    """Run a cell by hand. Return the place where its output appears."""
    cell = page.locator(".jp-Notebook .jp-CodeCell").nth(index)
    cell.locator(".cm-content").click()
    page.keyboard.press("Control+Enter")
    return cell.locator(".jp-OutputArea")


def wait_until_done(page: Page, index: int) -> None:
    """Wait until a cell that was run is done."""
    prompt = page.locator(".jp-Notebook .jp-CodeCell").nth(index).locator(".jp-InputPrompt")
    processes.wait_until(lambda: re.fullmatch(r"\[\d+\]:", prompt.inner_text()), f"cell {index} is done", 60)


def save(page: Page, lab: Lab, name: str, expected: str) -> None:
    """Save the notebook and wait until the file contains a text."""
    page.keyboard.press("Escape")
    page.keyboard.press("Control+s")
    processes.wait_until(lambda: expected in lab.saved_text(name), "the notebook is saved")
