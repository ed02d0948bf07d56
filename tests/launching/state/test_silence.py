"""Detection of ranks that keep the others waiting."""

from __future__ import annotations

import dataclasses
import io
import itertools
import pathlib
import sysconfig
import threading
import time
import types
from collections.abc import Callable

import pytest
import torch.distributed as dist
from tqdm.auto import tqdm

from notebook_accel.launching.kernel.job import Job
from notebook_accel.launching.ranks import worker
from notebook_accel.launching.spec import Source
from notebook_accel.launching.state.run import RunState
from notebook_accel.launching.state.stacks import Collective, Frame, RankStack, Silence, Stacks, read_dump
from notebook_accel.launching.views.view import LinesView
from notebook_accel.protocol import events
from notebook_accel.protocol.agent_messages import RankDump
from notebook_accel.training.backends import torch_group, watchdog
from tests import processes
from tests.launching import functions

_SOURCES = {"/tmp/ipykernel_1/2.py": Source("In[7]", "\n".join(f"line {n}" for n in range(1, 100)))}
_TORCH = sysconfig.get_paths()["purelib"] + "/torch"


def stack(rank: int, line: int, *below: tuple[str, str]) -> RankStack:
    """A rank in the notebook's function ``train`` at a line, with torch's files and functions below, innermost last."""
    frames = [(f"{_TORCH}/{file}", 5, function) for file, function in reversed(below)]
    frames += [("/tmp/ipykernel_1/2.py", line, "train"), (worker.__file__, 3, "_call")]
    text = "\n".join(
        [
            "Thread 0x00007f00 (most recent call first):",
            f'  File "{threading.__file__}", line 331 in wait',
            "",
            "Current thread 0x00007f01 (most recent call first):",
            *(f'  File "{file}", line {number} in {function}' for file, number, function in frames),
        ]
    )
    return read_dump(RankDump(rank=rank, pid=100 + rank, condition="answered", text=text), _SOURCES)


def in_barrier(rank: int, line: int = 20) -> RankStack:
    return stack(rank, line, ("distributed/c10d_logger.py", "wrapper"), ("distributed/distributed_c10d.py", "barrier"))


class SteppingRun:
    """A run in which all ranks have done ``steps`` steps of ``step_s``, the last one at ``steps * step_s``."""

    def __init__(self, world_size: int, *, steps: int = 10, step_s: float = 1.0) -> None:
        self.state = RunState(world_size)
        self._silence = Silence()
        for step in range(steps + 1):
            for rank in range(world_size):
                self.add(rank, events.Progress(time_s=step * step_s, step=step, steps=step))

    def add(self, rank: int, event: events.Event) -> None:
        self.state.apply(rank, event)

    def give_work(self, ranks: list[int], now_s: float) -> None:
        self.add(0, events.Working(time_s=now_s, ranks=ranks))

    def silent(self, now_s: float) -> list[int]:
        return self._silence.silent(self.state, now_s)

    def is_due(self, now_s: float) -> bool:
        return self._silence.is_due(self.state, now_s)

    def judge(self, *stacks: RankStack, now_s: float = 60.0) -> list[tuple[int, events.Silent]]:
        return self._silence.judge(self.state, Stacks(stacks), now_s)


def judged(run: SteppingRun, *stacks: RankStack, now_s: float = 60.0) -> dict[int, tuple[str, str]]:
    return {rank: (event.at, event.waits_in) for rank, event in run.judge(*stacks, now_s=now_s)}


def test_rank_that_was_judged_before_it_had_nothing_to_do_is_not_marked_after_that() -> None:
    made = SteppingRun(2, steps=0)
    made.give_work([], 20.0)
    for rank, judged_s in ((0, 19.0), (1, 21.0)):
        made.add(rank, events.Silent(time_s=judged_s, since_s=1.0, at="In[7], line 2", waits_in=""))
    assert [rank.silent is not None for rank in made.state.ranks] == [False, True]


def test_forward_pass_waits_for_ranks_as_long_as_it_has_not_called_the_model() -> None:
    ddp = ("nn/parallel/distributed.py", "forward")
    assert stack(0, 20, ddp, ("nn/parallel/distributed.py", "_pre_forward")).waits_in == "forward"
    assert stack(0, 20, ddp, ("nn/modules/linear.py", "forward")).waits_in == ""


def test_dump_is_read_with_the_names_that_the_notebook_has() -> None:
    read = in_barrier(1)
    assert read.user_line == "In[7], line 20 in train"
    assert read.waits_in == "barrier"
    assert (read.frames[-1].source, read.frames[-1].is_user) == ("line 20", True)
    assert str(read).splitlines() == [
        "rank 1 (pid 101) is in barrier, innermost call first:",
        "  In[7], line 20 in train:  line 20",
        "  in libraries below:",
        "    torch/distributed/distributed_c10d.py, line 5 in barrier",
        "    torch/distributed/c10d_logger.py, line 5 in wrapper",
    ]


def test_ranks_agree_on_a_collective_unless_one_is_elsewhere_in_the_same_group() -> None:
    def stacks(*lines: str) -> Stacks:
        dumps = (RankDump(rank=rank, pid=1, condition="answered", text=text) for rank, text in enumerate(lines))
        return Stacks(read_dump(dump, {}) for dump in dumps)

    assert stacks("# collective 7 all_reduce default_pg\n", "# collective 7 all_reduce default_pg\n").disagreement == ""
    assert stacks("# collective 7 all_reduce default_pg\n", "").disagreement == ""
    assert stacks("# collective 7 all_reduce default_pg\n", "# collective 2 all_gather tensor\n").disagreement == ""
    apart = stacks(*["# collective 7 all_reduce default_pg\n"] * 3, "# collective 6 broadcast default_pg\n")
    assert apart.disagreement.endswith("ranks 0-2: all_reduce, number 7; rank 3: broadcast, number 6.")


def test_backward_pass_is_a_place_to_wait_and_the_users_own_code_is_none() -> None:
    backward = stack(0, 9, ("_tensor.py", "backward"), ("autograd/graph.py", "_engine_run_backward"))
    assert backward.waits_in == "backward"
    assert stack(0, 9, ("nn/modules/module.py", "_call_impl")).waits_in == ""
    assert stack(0, 9).waits_in == ""


@pytest.mark.parametrize(("function", "place"), [
    (torch_group._meet, "Accelerator"),
    (watchdog.CollectiveWatchdog.absent_ranks, "a checkpoint"),
])  # fmt: skip
def test_ranks_wait_for_each_other_in_functions_of_ours(function: types.FunctionType, place: str) -> None:
    code = function.__code__
    frames = (Frame(code.co_filename, 3, code.co_name), Frame("In[7]", 2, "<module>", is_user=True))
    assert RankStack(0, 100, "answered", frames).waits_in == place


def test_rank_that_the_others_wait_for_is_named_with_its_line() -> None:
    found = judged(SteppingRun(3), in_barrier(0), stack(1, 12), in_barrier(2))
    assert found == {
        0: ("In[7], line 20 in train", "barrier"),
        1: ("In[7], line 12 in train", ""),
        2: ("In[7], line 20 in train", "barrier"),
    }


def test_ranks_that_are_at_the_same_place_are_left_in_peace() -> None:
    assert judged(SteppingRun(2), stack(0, 12), stack(1, 12)) == {}
    assert judged(SteppingRun(2), in_barrier(0), in_barrier(1)) == {}


def test_ranks_in_different_collectives_are_all_named() -> None:
    assert len(judged(SteppingRun(2), in_barrier(0, 20), in_barrier(1, 30))) == 2


def test_rank_that_takes_its_time_while_the_others_go_on_is_left_in_peace() -> None:
    made = SteppingRun(2)
    made.add(0, events.Progress(time_s=59.0, step=50, steps=50))
    assert made.silent(60.0) == [1]
    assert judged(made, stack(0, 9), stack(1, 12)) == {}


def test_ranks_that_wait_for_one_that_steps_are_named_and_it_is_not() -> None:
    made = SteppingRun(3)
    made.add(0, events.Progress(time_s=59.0, step=50, steps=50))
    assert set(judged(made, stack(0, 12), in_barrier(1), in_barrier(2))) == {1, 2}


def test_wait_that_no_stack_shows_is_seen_where_ranks_are_apart() -> None:
    """With NCCL a rank waits for its own device, in a line such as ``loss.item()``."""
    assert set(judged(SteppingRun(2), stack(0, 12), stack(1, 30))) == {0, 1}
    behind = SteppingRun(2)
    behind.add(0, events.Progress(time_s=10.5, step=11, steps=11))
    assert set(judged(behind, stack(0, 12), stack(1, 12))) == {0, 1}


def test_rank_that_works_alone_after_the_others_have_finished_is_named() -> None:
    made = SteppingRun(2)
    made.add(0, events.Finished())
    assert set(judged(made, RankStack(0, None, "ended"), stack(1, 12))) == {1}


def test_stopped_rank_is_named_as_such() -> None:
    found = judged(SteppingRun(2), in_barrier(0), RankStack(1, 101, "stopped"))
    assert found[1] == ("the process is stopped", "")


@pytest.mark.parametrize(("step_s", "silent_from_s"), [(0.01, 10.0), (0.5, 10.0), (3.0, 30.0)])
def test_silence_is_ten_usual_steps_and_ten_seconds_at_least(step_s: float, silent_from_s: float) -> None:
    made = SteppingRun(2, step_s=step_s)
    last_s = 10 * step_s
    assert made.silent(last_s + silent_from_s - 0.1) == []
    assert made.silent(last_s + silent_from_s + 0.1) == [0, 1]


def test_one_slow_step_does_not_change_what_is_usual() -> None:
    made = SteppingRun(2)
    for step in (11, 12):
        for rank in range(2):
            made.add(rank, events.Progress(time_s=100.0 * (step - 10), step=step, steps=step))
    assert made.silent(211.0) == [0, 1]


def test_run_that_counts_no_steps_is_left_in_peace_and_so_is_a_rank_alone() -> None:
    assert SteppingRun(2, steps=-1).silent(1000.0) == []
    assert SteppingRun(1).silent(1000.0) == []


def test_ranks_that_disagree_before_their_first_step_are_named_once_they_are_seen_to_hang() -> None:
    made = SteppingRun(2, steps=-1)
    made.add(0, events.Started(pid=1, time_s=1.0))
    assert made.silent(30.0) == []
    made.add(1, events.Started(pid=2, time_s=5.0))
    assert (made.silent(14.9), made.silent(15.1)) == ([], [0, 1])
    assert judged(made, in_barrier(0, 20), in_barrier(1, 30)) == {}
    assert judged(made, in_barrier(0, 20), in_barrier(1, 31)) == {}
    for other in (stack(1, 30), in_barrier(1, 20)):  # one loads its data, or all are at the same place
        for _ in range(2):
            assert judged(made, in_barrier(0, 20), other) == {}
    slow = [dataclasses.replace(in_barrier(rank, rank), collective=Collective(3, "barrier", "0")) for rank in (0, 1)]
    for _ in range(2):  # it takes its time, but all are in it
        assert judged(made, *slow) == {}
    judged(made, in_barrier(0, 20), in_barrier(1, 31))
    found = made.judge(in_barrier(0, 20), in_barrier(1, 31))
    assert [(rank, event.at, event.waits_in, event.since_s) for rank, event in found] == [
        (0, "In[7], line 20 in train", "barrier", 5.0),
        (1, "In[7], line 31 in train", "barrier", 5.0),
    ]


def test_rank_that_has_not_begun_to_count_is_silent_when_another_has() -> None:
    made = SteppingRun(2, steps=-1)
    made.add(0, events.Progress(time_s=5.0, step=1, steps=1))
    made.add(0, events.Progress(time_s=25.0, step=2, steps=2))
    assert made.silent(26.0) == [1]


def test_it_asks_when_silence_begins_and_then_more_rarely() -> None:
    made = SteppingRun(2)
    asked = [second for second in range(10, 300) if made.is_due(float(second))]
    gaps = [later - earlier for earlier, later in itertools.pairwise(asked)]
    assert (asked[0], gaps[0]) == (21, 10)
    assert gaps == sorted(gaps) and gaps[-1] == 60
    made.add(0, events.Progress(time_s=300.0, step=11, steps=11))
    made.add(1, events.Progress(time_s=300.0, step=11, steps=11))
    assert next(second for second in range(300, 330) if made.is_due(float(second))) == 311


def keeps_the_other_waiting(folder: str) -> None:
    dist.init_process_group("gloo")
    for _ in tqdm(range(5)):
        time.sleep(0.05)
    if functions.rank() == 1:
        functions.wait_for(folder, "go")  # the line that rank 1 stands at
    dist.barrier()


def test_real_rank_that_keeps_the_other_waiting_is_said(launch: Callable[..., Job], tmp_path: pathlib.Path) -> None:
    job = launch(keeps_the_other_waiting, str(tmp_path))
    job._silence = Silence(shortest_s=1.0)
    lines = io.StringIO()
    view = LinesView(job, lines)

    def is_said() -> bool:
        job.notice_silence(time.monotonic())
        view.refresh()
        return "[rank 1 has done no step for" in lines.getvalue()

    processes.wait_until(is_said, "that rank 1 keeps rank 0 waiting", 60)
    (tmp_path / "go").touch()
    job.results(timeout_s=60)
    view.close()
    [line] = [line for line in lines.getvalue().splitlines() if "done no step" in line]
    assert line.endswith("in wait_for]") and "and others wait: " in line


def test_rank_without_anything_to_do_is_left_in_peace() -> None:
    made = SteppingRun(2)
    made.give_work([], 11.0)
    assert made.silent(60.0) == [] and not made.is_due(60.0)
    made.give_work([0, 1], 55.0)
    assert made.silent(60.0) == []  # its last step was long ago, and this began just now
    assert made.silent(66.0) == [0, 1]
    assert judged(made, stack(0, 12), in_barrier(1), now_s=66.0) == {
        0: ("In[7], line 12 in train", ""),
        1: ("In[7], line 20 in train", "barrier"),
    }
    assert [event.since_s for _, event in made.judge(stack(0, 12), in_barrier(1), now_s=66.0)] == [55.0, 55.0]


def test_rank_that_waits_for_one_without_anything_to_do_is_said() -> None:
    made = SteppingRun(2)
    made.give_work([1], 11.0)
    assert judged(made, stack(0, 12), in_barrier(1)) == {1: ("In[7], line 20 in train", "barrier")}
    assert judged(made, in_barrier(0), stack(1, 12)) == {}
