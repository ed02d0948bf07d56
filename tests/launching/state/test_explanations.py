"""What is added to a failure that doesn't explain itself."""

from __future__ import annotations

import signal

import pytest

from notebook_accel.launching.state import failures
from notebook_accel.protocol.events import Ended, Failed, Memory, MemoryShortage

SHORTAGE = MemoryShortage(free_bytes=2**28, limit_bytes=2**34, is_machine=True, was_seen=False)


@pytest.mark.parametrize(
    ("end", "start_method", "expected"),
    [
        (Ended(signal=signal.SIGKILL), "spawn", "Nothing of notebook-accel sent it."),
        (
            Ended(signal=signal.SIGKILL, shortage=SHORTAGE, peak_bytes=2**33),
            "spawn",
            "The rank had used up to 8.0 GiB.",
        ),
        (
            Ended(signal=signal.SIGKILL, shortage=SHORTAGE),
            "fork",
            "pass it as an argument: ranks then share it; or fewer ranks",
        ),
        (Ended(signal=signal.SIGSEGV), "spawn", "Native code has crashed"),
        (Ended(signal=signal.SIGSEGV), "fork", "build it in another cell and pass it as an argument"),
        (
            Ended(signal=signal.SIGSEGV, peak_bytes=2**33),
            "fork",
            "a model for itself: this rank had used up to 8.0 GiB, and there are 8 of them. if the function",
        ),
        (
            Ended(signal=signal.SIGSEGV, shortage=SHORTAGE, peak_bytes=2**33),
            "fork",
            "This rank had used up to 8.0 GiB; 8 ranks each built their own model",
        ),
        (Ended(signal=signal.SIGBUS), "spawn", "no room left in /dev/shm"),
    ],
)
def test_death_by_a_signal(end: Ended, start_method: str, expected: str) -> None:
    assert expected in " ".join(failures.explain_death(end, start_method=start_method, ranks=8))


def test_exit_status_says_enough() -> None:
    assert failures.explain_death(Ended(exit_code=3), start_method="fork", ranks=8) == ("", "", "")


def test_shortage_has_its_figures() -> None:
    assert failures.describe_shortage(SHORTAGE).startswith("Of the 16 GiB that the machine has, 256 MiB were left.")


@pytest.mark.parametrize(
    ("end", "expected"), [(Ended(signal=1), ""), (Ended(shortage=SHORTAGE), "Out of host memory.")]
)
def test_loader_worker_that_was_killed_is_explained_where_memory_was_short(end: Ended, expected: str) -> None:
    failed = Failed(kind="RuntimeError", message="DataLoader worker (pid(s) 7) exited unexpectedly", traceback="")
    why, _ = failures.explain_exception(failed, end, {})
    assert why.startswith(expected) and bool(why) == bool(expected)


def test_debugger_that_nobody_can_answer_is_explained() -> None:
    failed = Failed(kind="BdbQuit", message="", traceback="")
    assert "--start_method inline" in failures.explain_exception(failed, None, {})[1]


def test_device_memory_of_every_rank_that_has_said_it() -> None:
    failed = Failed(kind="OutOfMemoryError", message="CUDA out of memory.", traceback="")
    memory = {rank: Memory(used_bytes=(4 - rank) << 30, total_bytes=4 << 30, kind="device") for rank in (1, 0)}
    why, _ = failures.explain_exception(failed, None, memory)
    assert why == "Memory in use then, rank 0: 4.0 GiB of 4.0 GiB, rank 1: 3.0 GiB of 4.0 GiB."


def test_crash_shows_the_users_frames_only() -> None:
    written = f"""a warning
Fatal Python error: Segmentation fault

Current thread 0x0001 (most recent call first):
  File "/usr/lib/python3/ctypes/__init__.py", line 1 in string_at
  File "In[3]", line 4 in train
  File "{failures.__file__.replace("failures", "worker")}", line 1 in run
  File "<string>", line 1 in <module>

Extension modules: numpy (total: 1)"""
    assert failures.crash_frames(written).splitlines() == [
        '  File "/usr/lib/python3/ctypes/__init__.py", line 1 in string_at',
        '  File "In[3]", line 4 in train',
    ]
    assert failures.crash_frames("") == ""
