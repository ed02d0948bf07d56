"""The leak checks fail a test that leaves something behind, and name it."""

from __future__ import annotations

import os
import pathlib
import re
import signal
import subprocess
import sys

import pytest

from tests import processes

_LEAKS_EVERYTHING = """
import os, pathlib, subprocess, socket, threading
from tests import conftest

conftest._GRACE_S = 0.5  # what is left here stays for good

def test_leaks():
    global kept
    kept = [socket.socket(), open(os.memfd_create("mine"), "w"), threading.Event()]
    threading.Thread(target=kept[2].wait, name="my thread", daemon=True).start()
    # An orphan: its parent ends at once and it has a session of its own.
    subprocess.run(["sh", "-c", "setsid sleep 47 & exit"], stdout=subprocess.DEVNULL, check=True)
    os.environ["MY_VARIABLE"] = "1"
    pathlib.Path("/dev/shm/{segment}").touch()

def test_is_not_blamed_for_the_one_before():
    assert "MY_VARIABLE" not in os.environ
"""


@pytest.mark.slow
def test_leaks_are_named_and_blamed_on_the_test_that_left_them(tmp_path: pathlib.Path) -> None:
    file, segment = tmp_path / "test_leaks.py", f"notebook-accel-test-{os.getpid()}"
    file.write_text(_LEAKS_EVERYTHING.format(segment=segment))
    try:
        run = subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", str(file)],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
    finally:
        pathlib.Path("/dev/shm", segment).unlink(missing_ok=True)
    assert "2 passed, 1 error" in run.stdout, run.stdout
    for leak in (
        r"process \d+ .*: sleep 47",
        "thread my thread",
        f"/dev/shm/{segment}",
        "environment variable MY_VARIABLE",
        r"descriptor \d+: socket:",
        r"descriptor \d+: /memfd:mine",
    ):
        assert re.search(leak, run.stdout), leak


def test_no_test_kills_the_tests() -> None:
    tests = processes.read(os.getpid())
    assert tests is not None
    with pytest.raises(AssertionError, match=f"about to send SIGURG to itself: {tests.pid} "):
        processes.kill(tests, signal.SIGURG)  # harmless
