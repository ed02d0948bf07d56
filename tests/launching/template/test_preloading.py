"""A template is prepared: moved memory stays what it is, and what its forks need is imported."""

from __future__ import annotations

import ctypes
import mmap
import os
import pathlib
import subprocess
import sys

import pytest

from notebook_accel.launching.template import preloading

HUGE_BYTES = 2 << 20


def huge_bytes() -> int:
    with open("/proc/self/smaps_rollup") as file:
        return sum(int(line.split()[1]) * 1024 for line in file if line.startswith("AnonHugePages"))


def test_memory_blocks_are_whole_huge_pages_of_this_processs_own_memory() -> None:
    found = list(preloading.memory_blocks())
    assert found
    for address, length in found:
        assert (address % HUGE_BYTES, length % HUGE_BYTES) == (0, 0)
        assert 0 < length <= 8 * HUGE_BYTES


def test_content_stays_and_forks_write_to_pages_of_their_own() -> None:
    with mmap.mmap(-1, 8 * HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory[:] = bytes(range(256)) * (len(memory) // 256)
        before = huge_bytes()
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        aligned = -(-start // HUGE_BYTES) * HUGE_BYTES
        preloading.collapse(aligned, 6 * HUGE_BYTES)
        # Where the system has no huge pages to give, nothing changes, which is as good.
        assert huge_bytes() - before in (0, *range(HUGE_BYTES, 7 * HUGE_BYTES, HUGE_BYTES))
        pid = os.fork()
        if pid == 0:
            memory[aligned - start] = 99
            os._exit(memory[aligned - start] != 99)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert memory[:] == bytes(range(256)) * (len(memory) // 256)


def test_memory_that_cannot_be_moved_is_left() -> None:
    before = huge_bytes()
    preloading.collapse(HUGE_BYTES, HUGE_BYTES)  # nothing is mapped there
    assert huge_bytes() == before


def test_module_that_cannot_be_imported_is_named() -> None:
    named = "^no_such_module can't be imported: ModuleNotFoundError: No module named 'no_such_module'$"
    with pytest.raises(preloading.PreloadError, match=named):
        preloading.import_named(["no_such_module"])


@pytest.mark.slow
def test_end_of_a_process_that_has_everything_preloaded_imports_nothing(tmp_path: pathlib.Path) -> None:
    # torch._dynamo imports it at the end, where it is installed. An import of the real one takes 20 ms.
    (tmp_path / "tabulate.py").write_text("def tabulate(rows, headers): return str(rows)")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    code = """
import atexit, contextlib, importlib, sys
from notebook_accel.launching.template import preloading
preloading.import_needed()
preloading.import_welcome()
for name in preloading.LATER:
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
before = set(sys.modules)
atexit._run_exitfuncs()
print(sorted(set(sys.modules) - before))
"""
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120, env=environment)
    assert run.stdout.strip() == "[]"
