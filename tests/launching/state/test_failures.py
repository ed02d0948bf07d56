"""From what ranks said to the error that is raised: made-up events, which may say anything."""

from __future__ import annotations

import signal

from notebook_accel.errors import RankFailedError
from notebook_accel.launching.state.failures import Failures, in_a_line
from notebook_accel.launching.state.run import RunState
from notebook_accel.protocol.events import Ended, Failed, Finished, Output, Restarting

_CRASH = """Fatal Python error: Segmentation fault

Current thread 0x00007f (most recent call first):
  File "/lib/ctypes/__init__.py", line 519 in string_at
  File "In[14]", line 4 in <module>

Extension modules: torch._C (total: 1)"""


def failure(state: RunState) -> RankFailedError:
    error = Failures("spawn").first(state)
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
    assert "  [9,702 lines left out]" in lines


def test_others_are_one_line_each() -> None:
    state = RunState(3)
    for rank in range(3):
        state.apply(rank, Failed(time_s=rank, kind="ValueError", message=f"\nof {rank}\nmore", traceback=""))
        state.apply(rank, Ended(exit_code=1))
    assert [str(end) for end in failure(state).others] == ["rank 1: ValueError: of 1", "rank 2: ValueError: of 2"]
    assert in_a_line(state) == "rank 0: ValueError: of 0"


def test_nothing_is_left_of_ranks_that_are_started_again() -> None:
    state = RunState(2)
    state.apply(0, Output(text="before"))
    state.apply(0, Finished(result_bytes=1))
    state.apply(1, Failed(kind="ValueError", message="first", traceback=""))
    state.apply(1, Ended(exit_code=1))
    state.apply(1, Restarting(number=1, of=1, why="rank 1: ValueError: first"))
    assert state.first_failed is None and not state.ranks[0].has_result
    state.apply(0, Ended(signal=signal.SIGKILL))
    assert failure(state).what == "rank 0 of 2 was killed by SIGKILL." and failure(state).last_output == ()


def test_last_output_of_a_crash_is_what_came_before_it() -> None:
    state = RunState(1)
    state.apply(0, Output(text=f"training\n{_CRASH[:100]}"))
    state.apply(0, Output(text=_CRASH[100:]))
    state.apply(0, Ended(signal=signal.SIGSEGV))
    error = failure(state)
    assert error.last_output == ("training",)
    assert '  File "In[14]", line 4 in <module>' in error.remote_traceback
    assert in_a_line(state) == "rank 0 was killed by SIGSEGV"


def test_crash_alone_has_no_last_output() -> None:
    state = RunState(1)
    state.apply(0, Output(text=_CRASH))
    state.apply(0, Ended(signal=signal.SIGSEGV))
    assert failure(state).last_output == ()
