"""From the ranks' events to the error that is raised, and the likely reason in it."""

from __future__ import annotations

import pathlib
import pickle
import resource
import sys
import types
from collections.abc import Callable
from signal import SIGBUS, SIGKILL, SIGSEGV, SIGXCPU

import pytest
import torch
from torch.distributed import HashStore

from notebook_accel.errors import RankFailedError
from notebook_accel.launching.state import failures
from notebook_accel.launching.state.failures import RunErrors, in_a_line
from notebook_accel.launching.state.run import RunState
from notebook_accel.protocol.events import Ended, Failed, Finished, Memory, MemoryShortage, Output, Restarting

_SHORTAGE = MemoryShortage(free_bytes=2**28, limit_bytes=2**34, is_machine=True, was_seen=False)
_CRASH = """Fatal Python error: Segmentation fault

Current thread 0x00007f (most recent call first):
  File "/lib/ctypes/__init__.py", line 519 in string_at
  File "In[14]", line 4 in <module>

Extension modules: torch._C (total: 1)"""


def failure(state: RunState) -> RankFailedError:
    error = RunErrors("spawn").first(state)
    assert error is not None
    return error


def test_text_of_an_exception_can_do_no_harm() -> None:
    state = RunState(2)
    message = "\x1b[2J\x1b]0;title\x07<script>" + "x" * 1_000_000 + "\nsecond line"
    trace = "".join(f'  File "In[1]", line {n}, in f\n' for n in range(10_000)) + f"ValueError: {message}\n"
    state.apply(1, Failed(kind="ValueError", message=message, traceback=trace, line="In[1], line 2"))
    error = failure(state)
    assert error.what.startswith("rank 1 of 2 failed at In[1], line 2: ValueError: <script>xxx")
    assert error.what.endswith("x … and 998,008 more characters")
    assert "\x1b" not in str(error) and len(str(error)) < 30_000
    lines = error.remote_traceback.splitlines()
    assert lines[0].endswith("line 0, in f") and lines[-1] == "second line"
    assert "  [9,702 lines left out here]" in lines


def test_others_are_one_line_each() -> None:
    state = RunState(3)
    for rank in range(3):
        state.apply(rank, Failed(time_s=rank, kind="ValueError", message=f"\nof {rank}\nmore", traceback=""))
        state.apply(rank, Ended(exit_code=1))
    assert [str(end) for end in failure(state).others] == ["rank 1: ValueError: of 1", "rank 2: ValueError: of 2"]
    assert in_a_line(state) == "rank 0: ValueError: of 0"
    state.apply(2, Failed(time_s=3, kind="AssertionError", message="", traceback=""))
    assert str(failure(state).others[1]) == "rank 2: AssertionError"


def test_nothing_is_left_of_ranks_that_are_started_again() -> None:
    state = RunState(2)
    state.apply(0, Output(text="before"))
    state.apply(0, Finished())
    state.apply(1, Failed(kind="ValueError", message="first", traceback=""))
    state.apply(1, Ended(exit_code=1))
    state.apply(1, Restarting(number=1, of=1, why="rank 1: ValueError: first"))
    assert state.first_failed is None and not state.ranks[0].has_result
    state.apply(0, Ended(signal=SIGKILL))
    assert failure(state).what == "rank 0 of 2 was killed by SIGKILL." and failure(state).last_output == ()


def test_last_output_of_a_crash_is_what_came_before_it() -> None:
    state = RunState(1)
    state.apply(0, Output(text=f"training\n{_CRASH[:100]}"))
    state.apply(0, Output(text=_CRASH[100:]))
    state.apply(0, Ended(signal=SIGSEGV))
    error = failure(state)
    assert error.last_output == ("training",)
    assert '  File "In[14]", line 4 in <module>' in error.remote_traceback
    assert in_a_line(state) == "rank 0 was killed by SIGSEGV"
    state = RunState(1)
    state.apply(0, Output(text=_CRASH))
    state.apply(0, Ended(signal=SIGSEGV))
    assert failure(state).last_output == ()


@pytest.mark.parametrize(("end", "start_method", "expected"), [
    (Ended(signal=SIGKILL), "spawn", "notebook-accel didn't send the signal."),
    (Ended(signal=SIGKILL, shortage=_SHORTAGE, peak_bytes=2**33), "spawn", "The rank had used up to 8.0 GiB."),
    (Ended(signal=SIGKILL, shortage=_SHORTAGE), "fork", "pass it as an argument: ranks then share it; or fewer ranks"),
    (Ended(signal=SIGSEGV), "spawn", "Native code has crashed"),
    (Ended(signal=SIGSEGV), "fork", "build it in another cell and pass it as an argument"),
    (Ended(signal=SIGSEGV, peak_bytes=2**33), "fork",
     "a model for itself: this rank had used up to 8.0 GiB, and there are 8 ranks. if the function"),
    (Ended(signal=SIGSEGV, shortage=_SHORTAGE, peak_bytes=2**33), "fork",
     "This rank had used up to 8.0 GiB; 8 ranks each built their own model"),
    (Ended(signal=SIGBUS), "spawn", "no room left in /dev/shm"),
])  # fmt: skip
def test_death_by_a_signal(end: Ended, start_method: str, expected: str) -> None:
    assert expected in " ".join(failures.explain_death(end, start_method=start_method, ranks=8))


def test_exit_status_says_enough() -> None:
    assert failures.explain_death(Ended(exit_code=3), start_method="fork", ranks=8) == ("", "", "")


def test_shortage_has_its_figures() -> None:
    assert failures.describe_shortage(_SHORTAGE).startswith("Of the 16 GiB that the machine has, 256 MiB were left.")


@pytest.mark.parametrize(
    ("end", "expected"), [(Ended(signal=1), ""), (Ended(shortage=_SHORTAGE), "Out of host memory.")]
)
def test_loader_worker_that_was_killed_is_explained_where_memory_was_short(end: Ended, expected: str) -> None:
    failed = Failed(kind="RuntimeError", message="DataLoader worker (pid(s) 7) exited unexpectedly", traceback="")
    why, _ = failures.explain_exception(failed, end, {})
    assert why.startswith(expected) and bool(why) == bool(expected)


def test_debugger_that_nobody_can_answer_is_explained() -> None:
    failed = Failed(kind="BdbQuit", message="", traceback="")
    assert "--start_method inline" in failures.explain_exception(failed, None, {})[1]


@pytest.mark.parametrize(
    ("use", "advice"),
    [
        (lambda: torch.ones(1).cuda(), "accelerator.device"),
        (lambda: torch.cuda.set_device(0), "accelerator.device"),
        (lambda: torch.cuda.synchronize(), "accelerator.device"),
        (lambda: torch.distributed.init_process_group("nccl", rank=0, world_size=1, store=HashStore()), "gloo"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="torch has a GPU here, so nothing fails")
@pytest.mark.filterwarnings("ignore:Attempted to get default timeout for nccl")
def test_program_for_a_gpu_gets_advice_on_the_cpu(use: Callable[[], object], advice: str) -> None:
    with pytest.raises((AssertionError, AttributeError, RuntimeError, ValueError)) as caught:
        use()
    failed = Failed(kind=type(caught.value).__name__, message=str(caught.value), traceback="")
    why, fix = failures.explain_exception(failed, None, {})
    assert "no GPU" in why and advice in fix


@pytest.mark.parametrize("name", ["utils_of_mine", "utils_of_mine/__init__"])
def test_module_that_only_the_notebook_finds_is_explained(
    name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Since the notebook has changed its working directory, or the file was removed."""
    failed = Failed(kind="ModuleNotFoundError", message="No module named 'utils_of_mine'", traceback="")
    assert failures.explain_exception(failed, None, {}) == ("", "")
    path = tmp_path / f"{name}.py"
    path.parent.mkdir(exist_ok=True)
    path.touch()
    module = types.ModuleType("utils_of_mine")
    module.__file__ = str(path)
    monkeypatch.setitem(sys.modules, "utils_of_mine", module)
    why, fix = failures.explain_exception(failed, None, {})
    assert f"from {path}" in why and fix == f"sys.path.append({str(tmp_path)!r})"
    path.unlink()
    assert "restore it" in failures.explain_exception(failed, None, {})[1]


# Of the class Ended, as protocols before and from 4 name a class.
@pytest.mark.parametrize("written", [b"c__main__\nEnded\n.", b"\x80\x04\x8c\x08__main__\x8c\x05Ended\x93."])
def test_pickle_of_a_class_that_only_the_notebook_has_asks_for_push(
    written: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(AttributeError) as caught:
        pickle.loads(written)
    failed = Failed(kind="AttributeError", message=str(caught.value), traceback="")
    assert failures.explain_exception(failed, None, {}) == ("", "")
    monkeypatch.setattr(sys.modules["__main__"], "Ended", Ended, raising=False)
    assert "--push Ended, or a line with Ended" in failures.explain_exception(failed, None, {})[1]
    others = Failed(kind="AttributeError", message="Can't get attribute 'Ended' on <module 'worker'>", traceback="")
    assert failures.explain_exception(others, None, {}) == ("", "")


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


def test_limits_of_the_system_are_likely_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {resource.RLIMIT_CPU: 8, resource.RLIMIT_AS: 2**30}  # real ones would end this process too
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limits[which], -1))
    raised = failures.explain_exception(Failed(kind="MemoryError", message="", traceback=""), None, {})
    assert raised[0] == "A process may have 1.0 GiB of addresses here (ulimit -v)." and "ulimit -v" in raised[1]
    for number in (SIGKILL, SIGXCPU):
        _, why, _ = failures.explain_death(Ended(signal=number), start_method="spawn", ranks=1)
        assert why.endswith("The system does after 8 s of computing (ulimit -t).")
    limits = dict.fromkeys(limits, resource.RLIM_INFINITY)
    assert failures.explain_exception(Failed(kind="MemoryError", message="", traceback=""), None, {}) == ("", "")
