"""Tests of group recovery: ranks that were interrupted in a collective go on in step."""

from __future__ import annotations

import os
import pathlib
import re
import signal
import sys
import threading
import time
from typing import Any

import pytest
import torch

from notebook_accel import nccl
from notebook_accel.errors import RankFailedError, RunStoppedError
from notebook_accel.launching.kernel import local
from notebook_accel.launching.state.stacks import RankStack, Silence
from notebook_accel.protocol import session_messages as messages
from notebook_accel.sessions.kernel import pending_request
from notebook_accel.sessions.kernel.session import Session
from notebook_accel.training import process_group
from notebook_accel.training.backends import group_recovery
from tests import processes
from tests.sessions.conftest import interrupted, runs, waits
from tests.training import ranks

_PREPARE = """
from notebook_accel import Accelerator
accelerator = Accelerator()
torch.manual_seed(0)
net = torch.nn.Linear(4, 2)
optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
model, optimizer, scheduler = accelerator.prepare(net, optimizer, scheduler)
same_model = model

def loss_of(module, which):
    return (module(torch.full((1, 4), which + 1.0)) ** 2).sum()

def step():
    accelerator.backward(loss_of(model, rank))
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
"""
# The gradient that the prepared model has after a backward pass, against the mean of both ranks' by one process.
_GRADIENT_IS_RIGHT = """
optimizer.zero_grad()
accelerator.backward(loss_of(model, rank))
alone = torch.nn.Linear(4, 2)
alone.load_state_dict(net.state_dict())
((loss_of(alone, 0) + loss_of(alone, 1)) / 2).backward()
same_model is model and torch.allclose(net.weight.grad, alone.weight.grad)
"""
_STATE = """
weights = accelerator.gather(net.weight.detach().sum().reshape(1))
moments = accelerator.gather(optimizer.state_dict()["state"][0]["exp_avg"].sum().reshape(1))
rates = accelerator.gather(torch.tensor([optimizer.param_groups[0]["lr"], float(scheduler.last_epoch)]).reshape(1, 2))
all(bool((of_ranks == of_ranks[0]).all()) for of_ranks in (weights, moments, rates))
"""


@pytest.fixture(scope="package")
def prepared(session: Session) -> Session:
    """A session with an Accelerator and its prepared objects, as after the first cells of a notebook."""
    session.execute(_PREPARE)
    session.execute("step()")
    return session


def goes_on(session: Session) -> bool:
    """Return whether the ranks train together, and are in the same state before and after."""
    return all(
        session.execute(source)[rank] == "True"
        for source in (_STATE, _GRADIENT_IS_RIGHT, "step()\n" + _STATE)
        for rank in range(2)
    )


@pytest.mark.slow
def test_library_that_exits_at_an_interrupt_leaves_a_group_that_goes_on(prepared: Session) -> None:
    source = (
        "import sys\ntry:\n    torch.distributed.recv(torch.ones(1), 1 - rank)\n"
        "except KeyboardInterrupt:\n    signal.signal(signal.SIGINT, signal.SIG_IGN)\n    sys.exit(1)"
    )
    for _ in range(2):  # with the cell's handler, the second interrupt would do nothing
        with interrupted(prepared, waits):
            prepared.execute(source)
    assert goes_on(prepared)


def test_interrupt_brings_ranks_out_of_collectives_and_the_model_goes_on(prepared: Session) -> None:
    source = "step() if rank == 0 else torch.distributed.recv(torch.ones(1), 0)"  # in a backward pass, and outside
    with interrupted(prepared, waits):
        prepared.execute(f"reached = {source!r}\n{source}")
    assert prepared.execute("reached")[0] == repr(source)  # what cells have assigned is there
    assert goes_on(prepared)


def test_interrupt_in_the_middle_of_training(prepared: Session) -> None:
    with interrupted(prepared, runs):
        prepared.execute("while True: step()")
    assert goes_on(prepared)


def test_ranks_that_were_a_step_apart_are_together_again(prepared: Session) -> None:
    with interrupted(prepared, runs, only=1):
        prepared.execute(
            "accelerator.backward(loss_of(model, rank))\n"
            "if rank == 0:\n    optimizer.step()\n    scheduler.step()\n"
            "while True: time.sleep(1)"
        )
    assert goes_on(prepared)


def test_error_of_one_rank_brings_the_other_out_of_its_collective(prepared: Session) -> None:
    with pytest.raises(RankFailedError, match=r"rank 1 of 2 failed.*ValueError: mine") as raised:
        prepared.execute("if rank == 1:\n    raise ValueError('mine')\nstep()")
    assert [end.stopped for end in raised.value.others] == [True]
    assert goes_on(prepared)


@pytest.mark.usefixtures("everybody_fails_alone")
def test_error_of_all_ranks_at_one_place_leaves_their_group_alone(prepared: Session) -> None:
    prepared.execute("group = torch.distributed.group.WORLD")
    with pytest.raises(RankFailedError, match="NameError"):
        prepared.execute("misspelt")
    assert repr(prepared.execute("group is torch.distributed.group.WORLD")) == "ranks 0-1: True"
    with pytest.raises(RankFailedError, match="NameError"):
        prepared.execute("torch.distributed.all_reduce(torch.ones(1))\nmisspelt")
    assert repr(prepared.execute("group is torch.distributed.group.WORLD")) == "ranks 0-1: True"
    with pytest.raises(RankFailedError, match="NameError"):  # one has called it, and the other has not
        prepared.execute("torch.distributed.all_reduce(torch.ones(1), async_op=True) if rank == 0 else None\nmisspelt")
    assert repr(prepared.execute("group is torch.distributed.group.WORLD")) == "ranks 0-1: False"
    assert goes_on(prepared)


@pytest.mark.slow
def test_interrupt_in_the_middle_of_a_contexts_end_leaves_no_mode_behind(prepared: Session) -> None:
    modes = "torch.is_grad_enabled(), torch.is_autocast_enabled('cpu'), torch.autocast_increment_nesting()"
    begin = "torch.no_grad().__enter__(), torch.autocast('cpu').__enter__()"
    with pytest.raises(RunStoppedError, match=r"interrupted in the ranks(.|\n)*rank 0 was at session\[\w+\], line 2"):
        prepared.execute(f"{begin}\nraise KeyboardInterrupt")
    assert repr(prepared.execute(modes)) == "ranks 0-1: (True, False, 1)"
    prepared.execute("torch.autocast_decrement_nesting(), torch.set_grad_enabled(False)")
    assert repr(prepared.execute(modes)) == "ranks 0-1: (False, False, 1)"  # which a cell may want
    prepared.execute("torch.autocast_decrement_nesting(), torch.set_grad_enabled(True)")
    assert goes_on(prepared)


def _wait_until_said(expected: str, capsys: pytest.CaptureFixture[str]) -> str:
    said = ""

    def is_said() -> bool:
        nonlocal said
        said += capsys.readouterr().err
        return expected in said

    processes.wait_until(is_said, f"a message with {expected!r}")
    return said


def test_rank_that_waits_for_ranks_that_have_ended_the_cell_is_named(
    prepared: Session, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pending_request, "_ALONE_S", 0.1)
    prepared.execute("time.sleep(0.5)", ranks=[0])  # which waits for nobody
    cell = prepared.start("if rank == 1: accelerator.wait_for_everyone()")
    said = _wait_until_said("nothing runs on", capsys)
    cell.interrupt()
    assert cell.wait(60)
    assert re.fullmatch(
        r"\[rank 1 waits for others at session\[\w+\], line 1 in <module>, and nothing runs on rank 0: .*\n", said
    )
    assert goes_on(prepared)


@pytest.mark.slow
def test_rank_0_saves_alone_in_a_cell_that_the_others_have_ended(prepared: Session, tmp_path: pathlib.Path) -> None:
    for number in range(2):
        folder = str(tmp_path / f"alone {number}")
        prepared.execute(f"if rank == 0: accelerator.save_state({folder!r})")
        assert "checkpoint.json" in os.listdir(folder)
    folder = str(tmp_path / "together")
    prepared.execute(f"accelerator.save_state({folder!r})")
    assert {"rank_0.bin", "rank_1.bin"} <= set(os.listdir(folder))
    assert goes_on(prepared)


def test_ranks_that_all_wait_in_different_collectives_are_named(
    prepared: Session, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(pending_request.PendingRequest.__init__.__kwdefaults__, "_next_look_s", 0.1)
    receive = "torch.distributed.recv(torch.ones(1), 1 - rank)"
    cell = prepared.start(f"if rank == 0:\n    {receive}\nelse:\n    {receive}")
    said = _wait_until_said("An interrupt ends that", capsys)
    cell.interrupt()
    assert cell.wait(60)
    where = [rf"rank {rank} in recv at session\[\w+\], line {line} in <module>" for rank, line in ((0, 2), (1, 4))]
    assert re.fullmatch(rf"\[All ranks wait for each other: {'; '.join(where)}. An interrupt ends that\]\n", said)
    assert goes_on(prepared)


def test_what_the_code_made_itself_is_named_when_it_is_lost(
    prepared: Session, capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    prepared.execute(f"accelerator.save_state({str(tmp_path)!r} + '/state', async_=True)")  # with a group of our own
    prepared.execute("own = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))")
    prepared.execute("subgroup = torch.distributed.new_group()")
    with interrupted(prepared, runs):
        prepared.execute("time.sleep(100)")
    said = capsys.readouterr().err
    assert "own, which averages gradients and wasn't made by prepare: wrap own.module again" in said
    assert "a process group that the code has made itself" in said
    prepared.execute("del own, subgroup")
    assert goes_on(prepared)


_SHARDED = """
from notebook_accel import FullyShardedDataParallelPlugin
sharding = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin())
whole = torch.nn.Linear(4, 4)
shards, shards_adam = sharding.prepare(whole, torch.optim.Adam(whole.parameters()))
def step_shards():
    sharding.backward(shards(torch.ones(2, 4)).sum())
    shards_adam.step()
    shards_adam.zero_grad()
step_shards()
"""


@pytest.mark.slow
def test_sharded_model_is_named_and_can_be_made_again(prepared: Session, capsys: pytest.CaptureFixture[str]) -> None:
    prepared.execute(_SHARDED)
    with interrupted(prepared, runs):
        prepared.execute("time.sleep(100)")
    assert "shards, which is sharded over the ranks: make it, prepare it and load" in capsys.readouterr().err
    prepared.execute(_SHARDED)
    prepared.execute("del sharding, whole, shards, shards_adam, step_shards")
    assert goes_on(prepared)


_OWN_GROUP = """
import torch.distributed as dist
dist.init_process_group("gloo"{by})
parallel = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
parallel(torch.full((1, 4), rank + 1.0)).sum().backward()
parallel.module.weight.grad[0, 0].item(), dist.get_backend()
"""


@pytest.mark.slow
@pytest.mark.parametrize("by", ["", ", init_method='tcp://localhost:23456', rank=rank, world_size=2"])
def test_cell_that_makes_the_group_runs_again(engine: local.LocalEngine, by: str) -> None:
    making = _OWN_GROUP.format(by=by)
    with Session(num_processes=2, use_cpu=True, view="none") as session:
        session.execute("import datetime, os, torch\nrank = int(os.environ['RANK'])")
        for _ in range(2):
            assert str(session.execute(making)) == "ranks 0-1: (1.5, 'gloo')"
        with interrupted(session, waits):
            session.execute(f"{making}\ndist.recv(torch.ones(1), 1 - rank)")
        assert str(session.execute(making)) == "ranks 0-1: (1.5, 'gloo')"
        with pytest.raises(RankFailedError, match="default process group twice"):
            session.execute("dist.init_process_group('gloo', timeout=datetime.timedelta(seconds=5))")


@pytest.mark.slow
def test_interrupts_between_cells_are_not_taken_for_one_of_a_later_cell_that_sleeps(prepared: Session) -> None:
    for _ in range(2):  # a rank looks for half a second what one has to end, and hears of the other after that
        for info in prepared.job.ranks:
            assert info.pid is not None
            os.kill(info.pid, signal.SIGINT)
        prepared._pool._ask(messages.InspectGroup, [0, 1])
    assert repr(prepared.execute("time.sleep(1)\n'not interrupted'")) == "ranks 0-1: 'not interrupted'"
    assert goes_on(prepared)


@pytest.mark.slow
def test_loader_whose_workers_were_running_goes_on_and_leaves_none(prepared: Session) -> None:
    loading = "rows = accelerator.prepare(torch.utils.data.DataLoader(torch.arange(64.), batch_size=2, num_workers=1))"
    prepared.execute(f"import multiprocessing\n{loading}")
    with interrupted(prepared, sleeps):
        prepared.execute("for row in rows:\n    time.sleep(100)")
    if sys.version_info < (3, 11):  # contextlib leaves a cycle there, which holds the loader's workers
        prepared.execute("import gc; gc.collect(); None")
    counted = "counted = sum(row.numel() for row in rows)\ncounted, len(multiprocessing.active_children())"
    assert repr(prepared.execute(counted)) == "ranks 0-1: (32, 0)"
    assert goes_on(prepared)


@pytest.mark.slow
def test_whatever_ends_the_waiting_ends_the_cell(prepared: Session, capsys: pytest.CaptureFixture[str]) -> None:
    def handle(*_: object) -> None:
        raise LookupError("a handler of the user's")

    before = signal.signal(signal.SIGUSR1, handle)
    timer = threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGUSR1))
    timer.start()
    try:
        with pytest.raises(LookupError, match="a handler of the user's"):
            prepared.execute("if rank == 0: step()\ntime.sleep(100)")
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)
    assert goes_on(prepared)


def test_rank_that_catches_the_interrupt_has_ended_its_cell(prepared: Session) -> None:
    with interrupted(prepared, runs, is_taken=True):
        prepared.execute("try:\n    time.sleep(100)\nexcept KeyboardInterrupt:\n    caught = True")
    assert repr(prepared.execute("caught")) == "ranks 0-1: True"
    assert goes_on(prepared)


_WINDOWS = """
windowed = Accelerator(gradient_accumulation_steps=3)
small = torch.nn.Linear(4, 2)
summing, sgd = windowed.prepare(small, torch.optim.SGD(small.parameters(), lr=0.1))
def micro_step():
    with windowed.accumulate(summing):
        windowed.backward(loss_of(summing, rank))
"""


@pytest.mark.slow
def test_ranks_that_were_in_the_middle_of_different_windows_begin_one_together(
    prepared: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    prepared.execute(_WINDOWS)
    with interrupted(prepared, sleeps):
        prepared.execute("for _ in range(1 + rank): micro_step()\ntime.sleep(100)")
    assert "gradients of an accumulation window that had begun" in capsys.readouterr().err
    ends = "ends = []\nfor _ in range(3):\n    micro_step()\n    ends.append(windowed.sync_gradients)\nends"
    assert repr(prepared.execute(ends)) == "ranks 0-1: [False, False, True]"
    prepared.execute("del windowed, summing, small, sgd")
    assert goes_on(prepared)


@pytest.mark.slow
def test_ranks_that_were_in_different_epochs_are_in_the_same_one(prepared: Session) -> None:
    prepared.execute("loader = accelerator.prepare(torch.utils.data.DataLoader(torch.arange(8.), batch_size=2))")
    with interrupted(prepared, sleeps):
        prepared.execute("loader.set_epoch(7 - rank)\nfor _ in loader: time.sleep(100)")
    # What its traceback holds is not taken for a pass that goes on.
    state = "loader.epoch, accelerator.gradient_state.in_dataloader"
    assert repr(prepared.execute(state)) == "ranks 0-1: (8, False)"
    assert goes_on(prepared)


def sleeps(stack: RankStack) -> bool:
    return "time.sleep" in next((frame.source for frame in stack.frames if frame.is_user), "")


@pytest.mark.slow
def test_rank_that_keeps_another_waiting_in_a_cell_is_marked(prepared: Session) -> None:
    prepared.job._silence = Silence(shortest_s=0.3)
    background = prepared.start(
        "for _ in loader: pass\nif rank == 0:\n    accelerator.wait_for_everyone()\ntime.sleep(100)"
    )

    def are_marked() -> bool:
        waiting, awaited = (info.silent for info in prepared.job.ranks)
        does_wait = waiting is not None and waiting.waits_in and ", line 3 in" in waiting.at
        return bool(does_wait and awaited is not None and not awaited.waits_in and ", line 4 in" in awaited.at)

    processes.wait_until(are_marked, "both are marked")
    background.interrupt()
    assert background.wait(60)
    assert [info.silent for info in prepared.job.ranks] == [None, None]
    prepared.job._silence = Silence()
    assert goes_on(prepared)


_NCCL_NOTED = """
from notebook_accel import reporting
from notebook_accel import nccl
done, reporter = [], reporting.reporter()
catch_up = reporter.catch_up
nccl.can_abort, nccl.abort = lambda: True, lambda: done.append("abort")
reporter.catch_up = lambda: done.append("catch up") or catch_up()
"""


def test_nccl_is_given_up_before_anything_of_a_broken_cell_is_read(engine: local.LocalEngine) -> None:
    """A stand-in replaces NCCL's communicators, which need GPUs."""
    with Session(num_processes=1, use_cpu=True, view="none") as own:
        own.execute(_NCCL_NOTED)
        interrupt = ("KeyboardInterrupt", RunStoppedError, "['abort', 'catch up']")
        for error, kind, expected in (("ValueError", RankFailedError, "['catch up']"), interrupt):
            with pytest.raises(kind):
                own.execute(f"done.clear()\nraise {error}")
            assert own.execute("done[: 1 + done.count('abort')]")[0] == expected


def test_ranks_do_not_wait_for_an_abort_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    hangs = threading.Event()
    monkeypatch.setattr(nccl, "can_abort", lambda: True)
    monkeypatch.setattr(nccl, "abort", lambda: hangs.wait(60))
    nccl.abort_soon(0.1)
    assert "notebook-accel-abort" in [thread.name for thread in threading.enumerate()]
    hangs.set()


_WATCHED_AS_WITH_NCCL = """
import io
from notebook_accel import Accelerator
from notebook_accel.training.backends import torch_group, watchdog
torch_group.CollectiveWatchdog = lambda *arguments, **_: watchdog.CollectiveWatchdog(*arguments, warns_before_s=1.0)
sys.stderr = heard = io.StringIO()
accelerator = Accelerator()
"""


@pytest.mark.slow
def test_ranks_that_idle_between_cells_do_not_stand_still(engine: local.LocalEngine) -> None:
    """Use gloo instead of NCCL, and a deadline of one second instead of ten minutes."""
    with Session(num_processes=2, use_cpu=True, view="none") as idle:
        idle.execute("import sys, torch")
        idle.execute(_WATCHED_AS_WITH_NCCL)
        time.sleep(4)  # nothing else is meant by idleness
        assert repr(idle.execute("heard.getvalue()")) == "ranks 0-1: ''"
        together = """net = accelerator.prepare(torch.nn.Linear(2, 2))
accelerator.backward(net(torch.ones(1, 2)).sum())
accelerator.gather_for_metrics([accelerator.process_index], use_gather_object=True)"""
        assert repr(idle.execute(together)) == "ranks 0-1: [0, 1]"


def calls_of_each_backend() -> Any:
    """Make unequal calls by gloo in a group in which torch asks NCCL, as in a group of CPUs and GPUs."""
    process_group.join(cpu=True)
    group: Any = torch.distributed.group.WORLD
    group._set_default_backend(torch.distributed.ProcessGroup.BackendType.NCCL)
    if torch.distributed.get_rank() == 0:
        torch.distributed.all_reduce(torch.ones(1), async_op=True)
    return group_recovery.collective_counts()


@pytest.mark.slow
def test_unequal_calls_are_seen_whichever_backend_they_went_through() -> None:
    with ranks.running(2) as both:
        first, second = both.run(calls_of_each_backend)
    assert [mine - others for mine, others in zip(first, second, strict=True)] == [0, 1, 1, 0]
