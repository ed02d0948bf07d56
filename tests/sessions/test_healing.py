"""Ranks that were stopped in the middle of what they do together go on, together."""

from __future__ import annotations

import os
import signal

import pytest

from notebook_accel.errors import RankFailedError
from notebook_accel.sessions import messages
from notebook_accel.sessions.session import Session
from tests.sessions.conftest import interrupted, runs, waits

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
    """With an Accelerator and what it has prepared, as after the first cells of a notebook."""
    session.execute(_PREPARE)
    session.execute("step()")
    return session


def goes_on(session: Session) -> bool:
    """Whether ranks train together, and are in the same state before and after."""
    return all(
        session.execute(source)[rank] == "True"
        for source in (_STATE, _GRADIENT_IS_RIGHT, "step()\n" + _STATE)
        for rank in range(2)
    )


@pytest.mark.parametrize(
    "source",
    [
        "step() if rank == 0 else torch.distributed.recv(torch.ones(1), 0)",  # in a backward pass, and outside
        "torch.distributed.all_reduce(torch.ones(3 + rank)) if rank == 0 else accelerator.wait_for_everyone()",
    ],
)
def test_interrupt_brings_ranks_out_of_collectives_and_the_model_goes_on(prepared: Session, source: str) -> None:
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


def test_what_the_code_made_itself_is_named_when_it_is_lost(
    prepared: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    prepared.execute("own = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))")
    prepared.execute("subgroup = torch.distributed.new_group()")
    with interrupted(prepared, runs):
        prepared.execute("time.sleep(100)")
    said = capsys.readouterr().err
    assert "own, which averages gradients and wasn't made by prepare: wrap own.module again" in said
    assert "1 process groups that the code has made itself" in said
    prepared.execute("del own, subgroup")
    assert goes_on(prepared)


def test_interrupt_that_comes_while_nothing_runs_is_forgotten(prepared: Session) -> None:
    for info in prepared.job.ranks:
        assert info.pid is not None
        os.kill(info.pid, signal.SIGINT)
    prepared._crew._ask_quietly(messages.Standing, [0, 1])  # when this has been answered, they have had it
    assert repr(prepared.execute("'not interrupted'")) == "ranks 0-1: 'not interrupted'"


def test_interrupts_between_cells_are_not_taken_for_one_of_a_later_cell_that_sleeps(prepared: Session) -> None:
    for _ in range(2):  # a rank looks for half a second what one has to end, and hears of the other after that
        for info in prepared.job.ranks:
            assert info.pid is not None
            os.kill(info.pid, signal.SIGINT)
        prepared._crew._ask_quietly(messages.Standing, [0, 1])
    prepared.execute("time.sleep(1)")
    assert goes_on(prepared)


def test_rank_that_catches_the_interrupt_has_ended_its_cell(prepared: Session) -> None:
    with interrupted(prepared, runs):
        prepared.execute("try:\n    time.sleep(100)\nexcept KeyboardInterrupt:\n    caught = True")
    assert repr(prepared.execute("caught")) == "ranks 0-1: True"
    assert goes_on(prepared)
