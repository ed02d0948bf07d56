"""From what ranks said to the error that is raised: made-up events, which may say anything."""

from __future__ import annotations

import signal

from notebook_accel.errors import RankFailedError
from notebook_accel.events import Ended, Failed, Finished, Output
from notebook_accel.launching.record import Record

_CRASH = """Fatal Python error: Segmentation fault

Current thread 0x00007f (most recent call first):
  File "/lib/ctypes/__init__.py", line 519 in string_at
  File "In[14]", line 4 in <module>

Extension modules: torch._C (total: 1)"""


def failure(record: Record) -> RankFailedError:
    error = record.first_failure(())
    assert error is not None
    return error


def test_text_of_an_exception_can_do_no_harm() -> None:
    record = Record(2, "spawn")
    message = "\x1b[2J\x1b]0;title\x07<script>" + "x" * 1_000_000 + "\nsecond line"
    trace = "".join(f'  File "In[1]", line {n}, in f\n' for n in range(10_000)) + f"ValueError: {message}\n"
    record.add(1, Failed(kind="ValueError", message=message, traceback=trace, line="In[1], line 2"))
    error = failure(record)
    assert error.what.startswith("rank 1 of 2 failed at In[1], line 2: ValueError: <script>xxx")
    assert error.what.endswith("x … and 998,008 more characters")
    assert "\x1b" not in str(error) and len(str(error)) < 30_000
    lines = error.remote_traceback.splitlines()
    assert lines[0].endswith("line 0, in f") and lines[-1] == "second line"
    assert "  [9,702 lines left out]" in lines


def test_others_are_one_line_each() -> None:
    record = Record(3, "spawn")
    for rank in range(3):
        record.add(rank, Failed(time_s=rank, kind="ValueError", message=f"\nof {rank}\nmore", traceback=""))
        record.add(rank, Ended(exit_code=1))
    assert [str(end) for end in failure(record).others] == ["rank 1: ValueError: of 1", "rank 2: ValueError: of 2"]
    assert record.in_a_line == "rank 0: ValueError: of 0"


def test_nothing_is_left_of_ranks_that_are_started_again() -> None:
    record = Record(2, "spawn")
    record.add(0, Output(text="before"))
    record.add(0, Finished(result_bytes=1))
    record.add(1, Failed(kind="ValueError", message="first", traceback=""))
    record.add(1, Ended(exit_code=1))
    record.start_over()
    assert record.first_failed is None and record.finished == set()
    record.add(0, Ended(signal=signal.SIGKILL))
    assert failure(record).what == "rank 0 of 2 was killed by SIGKILL." and failure(record).last_output == ()


def test_last_output_of_a_crash_is_what_came_before_it() -> None:
    record = Record(1, "spawn")
    record.add(0, Output(text=f"training\n{_CRASH[:100]}"))
    record.add(0, Output(text=_CRASH[100:]))
    record.add(0, Ended(signal=signal.SIGSEGV))
    error = failure(record)
    assert error.last_output == ("training",)
    assert '  File "In[14]", line 4 in <module>' in error.remote_traceback
    assert record.in_a_line == "rank 0 was killed by SIGSEGV"


def test_crash_alone_has_no_last_output() -> None:
    record = Record(1, "spawn")
    record.add(0, Output(text=_CRASH))
    record.add(0, Ended(signal=signal.SIGSEGV))
    assert failure(record).last_output == ()
