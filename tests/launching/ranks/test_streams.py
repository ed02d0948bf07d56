"""A rank's standard streams keep order and whole lines, and a full disk doesn't end the training."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

_SETUP = """
import ctypes, os, sys
from notebook_accel.launching.ranks import streams
streams.redirect(os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND))
libc = ctypes.CDLL(None)
"""


def run(log: pathlib.Path | str, code: str, before: str = "") -> str:
    """Run code in a process whose streams go to a log, and return what it writes to its old standard output."""
    done = subprocess.run(
        [sys.executable, "-c", f"import os; said = os.fdopen(os.dup(1), 'w')\n{before}\n{_SETUP}\n{code}", str(log)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize(
    "change",
    [
        "sys.stdout = None",
        "del sys.stdout, sys.stderr",
        "sys.stdout.close(); sys.stderr.close()",
        "sys.stdout = type('Odd', (), {'flush': lambda self: 1 / 0})()",
    ],
)
def test_streams_that_the_program_takes_away_are_not_missed(tmp_path: pathlib.Path, change: str) -> None:
    log = tmp_path / "log"
    run(log, f"""
print("before")
{change}
streams.flush()
assert streams.log_bytes() == len("before\\n")
import threading
threading.Thread(target=streams.restore).start()  # a thread needs ``sys.stderr``
while not isinstance(sys.stdout, type(sys.__stdout__)) or sys.stdout.closed: pass
print("after")
""")  # fmt: skip
    assert log.read_text() == "before\nafter\n"


def test_what_python_c_and_a_shell_write_is_in_order(tmp_path: pathlib.Path) -> None:
    log = tmp_path / "log"
    run(log, """
for number in range(3):
    print("python", number)
    libc.printf(b"C %d\\n", number)
    sys.stderr.write(f"error {number}\\n")
    os.system(f"echo shell {number}")
    sys.stdout.buffer.write(b"bytes\\n")
""")  # fmt: skip
    kinds = ("python {}", "C {}", "error {}", "shell {}", "bytes")
    assert log.read_text().splitlines() == [kind.format(number) for number in range(3) for kind in kinds]


def test_a_line_that_one_stream_has_begun_is_not_continued_by_the_other(tmp_path: pathlib.Path) -> None:
    log = tmp_path / "log"
    run(log, """
print("loading ...", end=" ", flush=True)
print("a warning", file=sys.stderr)
print("done")
sys.stderr.write("\\r10 %"); sys.stderr.flush(); sys.stderr.write("\\r20 %"); sys.stderr.flush()
print("beside the bar")
print("more")
""")  # fmt: skip
    assert log.read_bytes().decode() == "loading ... \na warning\ndone\n\r10 %\r20 %\nbeside the bar\nmore\n"


def test_c_output_without_its_end_is_there_after_a_flush(tmp_path: pathlib.Path) -> None:
    log = tmp_path / "log"
    run(log, "libc.printf(b'no end'); streams.flush(); os._exit(0)")
    assert log.read_text() == "no end"


def test_streams_have_what_code_asks_streams_for(tmp_path: pathlib.Path) -> None:
    said = run(tmp_path / "log", """
assert sys.stdout.fileno() == 1 and sys.stderr.fileno() == 2 and not sys.stdout.isatty()
print(sys.stdout.name, sys.stderr.name, sys.stdout.encoding, sys.stdout.writable(), file=said)
print("\\ud800 can't be encoded")
sys.stdout.close()
os.write(1, b"still there\\n")
""")  # fmt: skip
    assert said == "<stdout> <stderr> utf-8 True\n"
    assert (tmp_path / "log").read_text() == "\\ud800 can't be encoded\nstill there\n"


def test_full_disk_loses_output_and_nothing_else() -> None:
    """/dev/full answers every write as a full disk does."""
    said = run("/dev/full", """
from notebook_accel import reporting
from notebook_accel.protocol.channel import Connection
for number in range(1000): print("lost", number)
sys.stderr.write("lost too\\n"); libc.printf(b"lost as well\\n")
print([event.text for event in reporting.reporter()._posted], file=said)
""")  # fmt: skip
    assert said.count("No space left on device") == 2  # once for each stream
    assert "lost from here on" in said


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_room_that_comes_back_is_used_and_the_loss_is_in_the_log(tmp_path: pathlib.Path, stream: str) -> None:
    log = tmp_path / "log"
    run(log, f"""
import resource
print("before", file=sys.{stream})
resource.setrlimit(resource.RLIMIT_FSIZE, (os.fstat(1).st_size, resource.RLIM_INFINITY))
print("x" * 99, file=sys.{stream})
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print("after", file=sys.{stream})
""")  # fmt: skip
    assert log.read_text() == "before\n\n[100 bytes could not be written here and are lost]\nafter\n"


def test_ordinary_errors_stay_errors(tmp_path: pathlib.Path) -> None:
    said = run(tmp_path / "log", """
os.close(1)
try: print("to nobody")
except OSError as error: said.write(error.strerror)
said.flush(); os._exit(0)
""")  # fmt: skip
    assert said == "Bad file descriptor"


def test_lines_of_forked_children_stay_whole(tmp_path: pathlib.Path) -> None:
    log = tmp_path / "log"
    run(log, """
for number in range(5):
    if os.fork() == 0:
        for line in range(200): print(f"child {number} line {line} " + "x" * 200)
        os._exit(0)
for number in range(5): os.wait()
""")  # fmt: skip
    lines = log.read_text().splitlines()
    assert sorted(lines) == sorted(f"child {n} line {line} " + "x" * 200 for n in range(5) for line in range(200))
