"""Tests of ranks that die: errors name them and the reason, restarts replace them, others keep their variables."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Iterator

import pytest

from notebook_accel.errors import RankFailedError, RunError
from notebook_accel.launching.kernel import local
from notebook_accel.sessions.kernel.session import Session
from tests import processes

_SUM = """
from notebook_accel import Accelerator
accelerator = Accelerator()
int(accelerator.gather(torch.tensor([accelerator.process_index + 1])).sum())
"""
_STUBBORN = "while True:\n    try: time.sleep(100)\n    except KeyboardInterrupt: pass"


@pytest.fixture
def whole(engine: local.LocalEngine) -> Iterator[Session]:
    """A session of the test's own, with a variable in each rank."""
    with Session(num_processes=2, use_cpu=True, view="none") as running:
        running.execute("import os, time, torch\nrank = int(os.environ['RANK'])\nkept = [rank]")
        yield running


def pid_of(session: Session, rank: int) -> int:
    pid = session.job.ranks[rank].pid
    assert pid is not None
    return pid


@pytest.mark.parametrize("who", [0, pytest.param(1, marks=pytest.mark.slow)])  # rank 0 serves the store
def test_rank_that_dies_in_a_cell(whole: Session, who: int) -> None:
    assert repr(whole.execute(_SUM)) == "ranks 0-1: 3"
    other = 1 - who
    before = whole.execute("kept.append('still here')\nid(kept)", ranks=[other])[other]
    with pytest.raises(RankFailedError, match=f"rank {who} of 2 exited with status 7") as raised:
        whole.execute(f"if rank == {who}: os._exit(7)\naccelerator.wait_for_everyone()")
    assert "%distributed restart" in raised.value.fix
    with pytest.raises(RankFailedError, match=f"rank {who} of 2 exited with status 7"):
        whole.execute("rank")
    assert whole.execute("rank", ranks=[other])[other] == str(other)
    assert whole.restart() == [who]
    assert whole.execute("id(kept)", ranks=[other])[other] == before
    with pytest.raises(RankFailedError, match="name 'kept' is not defined"):
        whole.execute("kept", ranks=[who])
    assert repr(whole.execute("import torch\n" + _SUM)) == "ranks 0-1: 3"


def test_rank_that_is_killed_while_nothing_runs(whole: Session) -> None:
    os.kill(pid_of(whole, 1), signal.SIGKILL)
    processes.wait_until(lambda: whole._pool.alive == [0], "its end is noticed")
    with pytest.raises(RankFailedError, match="rank 1 of 2 was killed by SIGKILL"):
        whole.execute("1")
    assert whole.restart() == [1]
    assert repr(whole.execute("1")) == "ranks 0-1: 1"
    cell = whole.start(f"import time\n{_STUBBORN}", ranks=[1])
    cell.interrupt()
    cell.interrupt()
    for ask in (cell.results, lambda: whole.execute("1")):  # the cell itself, and those after it
        with pytest.raises(RankFailedError, match="rank 1 of 2 went on although it was interrupted, and was killed"):
            ask()
    assert whole.restart() == [1]


@pytest.mark.slow
def test_rank_that_dies_after_another_has_failed(whole: Session, capsys: pytest.CaptureFixture[str]) -> None:
    fails = "if rank == 0: raise ValueError('the cause')\n"
    with pytest.raises(RankFailedError, match=r"rank 0 of 2 failed .*ValueError: the cause") as raised:
        whole.execute(f"{fails}try: time.sleep(100)\nfinally: os._exit(7)")
    assert [str(end) for end in raised.value.others] == ["rank 1: exited with status 7"]
    assert "%distributed restart" in raised.value.fix
    assert whole.restart() == [1]
    whole.job.config = whole.job.config.replace(grace_s=0)
    cell = whole.start("import os, time\nrank = int(os.environ['RANK'])\n" + fails + _STUBBORN)
    processes.wait_until(lambda: "Interrupt once more to kill" in capsys.readouterr().err, "rank 1 goes on", 60.0)
    cell.interrupt()
    with pytest.raises(RankFailedError, match=r"rank 0 of 2 failed .*ValueError: the cause") as raised:
        cell.results(60)
    assert str(raised.value.others[0]).startswith("rank 1: stopped by SIGKILL")


def test_living_ranks_can_be_started_again_too(whole: Session) -> None:
    before = pid_of(whole, 0)
    assert whole.restart() == []
    assert whole.restart([0]) == [0]
    assert whole.execute("import os\nos.getpid()", ranks=[0])[0] != str(before)
    assert repr(whole.execute("'kept' in globals()")) == "rank 0: False\nrank 1: True"
    assert whole.restart([0, 1]) == [0, 1]
    assert repr(whole.execute("'kept' in globals()")) == "ranks 0-1: False"


@pytest.mark.slow
def test_rank_that_dies_in_its_debugger(
    whole: Session, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RankFailedError, match="ZeroDivisionError"):
        whole.execute("rank / (1 - rank)")
    monkeypatch.setattr(sys, "stdin", io.StringIO("p kept\nos._exit(3)\n"))
    with pytest.raises(RankFailedError, match="rank 1 of 2 exited with status 3"):
        whole.debug()
    assert "rank 1 (Pdb) [1]\n" in capsys.readouterr().out
    assert repr(whole.execute("kept", ranks=[0])) == "rank 0: [0]"
    assert whole.restart() == [1]
    with pytest.raises(RunError, match="Nothing has failed on rank 1 yet"):
        whole.debug(1)
    with pytest.raises(RankFailedError, match="ZeroDivisionError"):
        whole.execute("1 / 0", ranks=[1])
    monkeypatch.setattr(sys, "stdin", io.StringIO("typed = 1\nq\n"))
    whole.debug(1)
    monkeypatch.setattr(sys.modules["__main__"], "typed", 2, raising=False)
    with pytest.raises(RankFailedError, match=r"rank 0 of 2 .*name 'typed' is not defined"):
        whole.execute("typed")  # rank 1 has its own, so the notebook's isn't sent to rank 0


def test_session_that_was_stopped_says_so(engine: local.LocalEngine) -> None:
    session = Session(num_processes=1, use_cpu=True, view="none")
    folder = session._pool._listener.folder
    assert folder.stat().st_mode & 0o077 == 0
    session.job.stop()
    assert session.job.wait(20)
    with pytest.raises(RunError, match="was stopped") as raised:
        session.execute("1")
    assert "%distributed start" in raised.value.fix
    session.close()
    assert not folder.exists()


def test_nobody_without_the_secret_gets_in(whole: Session) -> None:
    from notebook_accel.protocol import session_messages as messages
    from notebook_accel.protocol.channel import ClosedError
    from notebook_accel.sessions import listener

    stranger = listener.join_session(str(whole._pool._listener.folder), messages.Hello(secret=b"guessed", rank=1))
    whole.restart([1])
    with pytest.raises(ClosedError):
        stranger.receive()
    stranger.close()
    assert repr(whole.execute("1")) == "ranks 0-1: 1"
