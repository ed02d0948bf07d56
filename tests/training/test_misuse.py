"""Tests of ranks whose calls differ: in time, every rank gets an error that says where each rank was."""

from __future__ import annotations

import contextlib
import datetime
import io
import json
import pathlib
import re
import time
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from notebook_accel import Accelerator, torch_internals
from notebook_accel.errors import CollectiveError
from notebook_accel.reporting import reporter
from notebook_accel.training.backends import torch_group
from notebook_accel.training.backends.watchdog import CollectiveWatchdog
from notebook_accel.training.handlers import InitProcessGroupKwargs
from notebook_accel.utils import gather_object
from tests import kernels
from tests.processes import wait_until
from tests.training import ranks
from tests.training.ranks import on_ranks

# Long enough for a busy machine, short enough to wait for.
DEADLINE_S = 4.0


def accelerator() -> Accelerator:
    """Return an accelerator of a group with that deadline, in place of the group that the ranks have."""
    Accelerator(cpu=True).end_training()
    timeout = datetime.timedelta(seconds=DEADLINE_S)
    return Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(timeout=timeout)])


@contextlib.contextmanager
def told(accelerator: Accelerator) -> Iterator[pytest.ExceptionInfo[CollectiveError]]:
    """Return a rank's error, after which a new group of the same ranks works."""
    with pytest.raises(CollectiveError) as raised:
        yield raised
    accelerator.end_training()
    again = Accelerator(cpu=True)
    assert again.reduce(torch.ones(1)).item() == 2
    again.end_training()


# The one default test that waits for a deadline.
@on_ranks(2)
def test_a_rank_that_leaves_its_loop() -> None:
    own = accelerator()
    data = TensorDataset(torch.randn(40, 2))
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    net, optimizer, loader = own.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), DataLoader(data, batch_size=2))
    with told(own) as raised:
        for step, (x,) in enumerate(loader):
            if own.process_index == 1 and step == 3:
                break
            own.backward(net(x).sum())
            optimizer.step()
            optimizer.zero_grad()
        own.wait_for_everyone()
    message = str(raised.value)
    assert f"waited in vain until the deadline of {DEADLINE_S:g} s" in message
    first, second = [line for line in message.splitlines() if line.startswith("  rank")]
    assert first.startswith("  rank 0: the model's forward pass at ")
    assert "test_misuse.py, line " in first
    assert first.endswith("step 4 of 10, epoch 1")
    assert second.startswith("  rank 1: wait_for_everyone at ")
    assert second.endswith("step 4 of 10, epoch 1")


@pytest.mark.slow
@on_ranks(2)
def test_gradients_of_one_model_never_meet_those_of_another() -> None:
    own = accelerator()
    nets = own.prepare(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    with told(own) as raised:
        for net in reversed(nets) if own.process_index else nets:
            own.backward(net(torch.ones(1, 2)).sum())
    for text in ("rank 0: backward at ", "rank 1: backward at ", "end_training()"):
        assert text in str(raised.value)


def ended_early() -> None:
    own = Accelerator(cpu=True)  # its deadline is half an hour
    if own.process_index == 1:
        reporter().close()  # a launched rank does this when its code has ended
        return
    own.gather(torch.ones(1))


@pytest.mark.slow
def test_a_rank_that_has_ended_is_not_waited_for() -> None:
    with ranks.running(2) as fresh:
        first, second = fresh.replies(ended_early, deadline_s=40)
    assert isinstance(first, CollectiveError)
    assert "rank 0: gather at " in str(first)
    assert "rank 1: has ended" in str(first)
    assert first.lost_peer
    assert second is None


@pytest.mark.slow
@on_ranks(2)
def test_a_rank_that_is_busy_says_where(tmp_path: pathlib.Path) -> None:
    own = accelerator()
    if own.process_index == 0:
        with pytest.raises(CollectiveError) as raised:
            own.reduce(torch.ones(1))
        message = str(raised.value)
        assert f"Rank 0 waited in vain until the deadline of {DEADLINE_S:g} s" in message
        assert "rank 0: reduce at " in message
        assert re.search("^  rank 1: .*processes.py, line ", message, re.MULTILINE)  # where it waits
        (tmp_path / "done").touch()
    else:
        wait_until((tmp_path / "done").exists, "rank 0 has been told", 60)
    own.end_training()


def accelerator_that_warns() -> Accelerator:
    """Return an accelerator that warns as with NCCL, but after seconds: gloo's deadline is half an hour."""

    def watched(*arguments: Any, **_: Any) -> CollectiveWatchdog:
        return CollectiveWatchdog(*arguments, warns_before_s=2.0)

    Accelerator(cpu=True).end_training()  # the ranks have a group whose watchdog is made
    torch_group.CollectiveWatchdog, before = watched, torch_group.CollectiveWatchdog  # type: ignore[assignment, misc]
    try:
        return Accelerator(cpu=True)
    finally:
        torch_group.CollectiveWatchdog = before  # type: ignore[misc]


def work_together(own: Accelerator) -> None:
    """Check that gloo's connections are open with a collective, and end the training."""
    net = own.prepare(torch.nn.Linear(2, 2))
    own.backward(net(torch.ones(1, 2)).sum())
    assert gather_object([own.process_index]) == [0, 1]
    own.end_training()


@pytest.mark.slow
@on_ranks(2)
def test_a_long_call_that_waits_for_nobody_is_not_warned_of_and_frees_nothing() -> None:
    own = accelerator_that_warns()
    with contextlib.redirect_stderr(io.StringIO()) as heard:
        time.sleep(5)  # like a library's long call, this stays at one place of the user's code
    assert heard.getvalue() == ""
    work_together(own)


@pytest.mark.slow
@on_ranks(2)
def test_a_collective_that_takes_long_is_warned_of_and_goes_on(tmp_path: pathlib.Path) -> None:
    own, warning = accelerator_that_warns(), tmp_path / "warning"
    if own.process_index == 0:
        with open(warning, "w", buffering=1) as file, contextlib.redirect_stderr(file):
            own.gather(torch.ones(1))
    else:
        wait_until(lambda: warning.exists() and "\n  rank 1" in warning.read_text(), "rank 0 has warned", 60)
        own.gather(torch.ones(1))
    work_together(own)
    title, *doings = warning.read_text().splitlines()
    assert title == "Rank 0 has been standing still for long. The ranks are here:"
    assert len(doings) == 2
    assert doings[0].startswith("  rank 0: gather at ")
    assert "processes.py, line " in doings[1]


def test_what_nccl_has_not_completed_is_read_off_torchs_flight_recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no GPU, so the test replaces the dump by one of ``FlightRecorder::dump_json`` of torch 2.13."""
    said = {"pg_status": {"0": {"last_enqueued_collective": "7", "last_completed_collective": "6"}}}
    dump = {"_dump_nccl_trace_json": lambda includeCollectives: json.dumps(said).encode()}  # noqa: N803
    monkeypatch.setattr(torch._C, "_distributed_c10d", types.SimpleNamespace(**dump))
    assert torch_internals.nccl_status() == {"0": ("7", "6")}
    said.clear()  # like a recorder that is turned off
    assert torch_internals.nccl_status() == {}


@pytest.mark.parametrize(("other", "text"), [
    ("gather", "rank 1: gather float32 (1,) at "),
    ("prepare", "with weight float32 (4, 2), bias float32 (4,)"),
])  # fmt: skip
@on_ranks(2)
def test_a_model_prepared_on_one_rank_only(other: str, text: str) -> None:
    own = Accelerator(cpu=True)
    with pytest.raises(CollectiveError) as raised:
        if own.process_index and other == "gather":
            own.gather(torch.ones(1))
        else:
            own.prepare(torch.nn.Linear(2, 3 + own.process_index))
    first = "rank 0: prepare a Linear of 2 parameters, with weight float32 (3, 2), bias float32 (3,) at "
    assert first in str(raised.value)
    assert text in str(raised.value)
    assert own.gather(torch.ones(1)).tolist() == [1, 1]


CELL = """%%distributed --num_processes 2
from notebook_accel import Accelerator
accelerator = Accelerator()
if accelerator.process_index == 0:
    accelerator.reduce(torch.ones(1))"""


@pytest.mark.slow
def test_a_cell_in_which_one_rank_ends_early(notebook: kernels.Kernel) -> None:
    outcome = notebook.run(CELL, 60.0)
    assert outcome.error_name == "RankFailedError"
    assert re.search(r"rank 0: reduce at In\[\d+\], line 5", outcome.traceback)
    assert "rank 1: has ended" in outcome.traceback
    assert ".py" not in outcome.traceback


_PREPARED_IN_THE_NOTEBOOK = """
from notebook_accel import Accelerator
import torch
model = torch.nn.Linear(1, 1)
loader = torch.utils.data.DataLoader(torch.ones(8, 1))
model, optimizer, loader = Accelerator(cpu=True).prepare(model, torch.optim.SGD(model.parameters()), loader)
"""


@pytest.mark.slow
def test_cell_with_objects_that_only_the_notebook_has_prepared_is_warned_of(notebook: kernels.Kernel) -> None:
    said = "Warning: Prepared in the notebook: `loader`, `optimizer`. The ranks get the unprepared objects."
    assert notebook.run(_PREPARED_IN_THE_NOTEBOOK, 60).status == "ok"
    for cell, is_warned in (
        ("from notebook_accel import Accelerator\nAccelerator().prepare(loader, optimizer)\nNone", False),
        ("for [x] in loader:\n    model(x).backward()\n    optimizer.step()", True),
    ):
        outcome = notebook.run(f"%%distributed --num_processes 2 --use_cpu --view lines\n{cell}", 60)
        assert outcome.status == "ok", outcome.traceback
        assert (said in outcome.stderr) == is_warned, outcome.stderr
