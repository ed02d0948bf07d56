"""Where ranks stand, asked from outside, of real ranks that hang, are stopped, or don't listen."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from notebook_accel.launching.agent.inspection import Inspection
from notebook_accel.launching.agent.output import Allowance, LogTail, open_log
from notebook_accel.launching.agent.runs import Rank
from notebook_accel.launching.kernel.job import Job
from notebook_accel.payload import memory_files
from notebook_accel.protocol.agent_messages import RankDump
from notebook_accel.protocol.channel import Connection
from tests import kernels, processes
from tests.launching import functions

_HANGING = """%%distributed -n 4 --background --out hanging --view none --name hanging
import threading, torch.distributed as dist
rank = int(os.environ["RANK"])
def evaluate():
    print("here", rank, flush=True)
    time.sleep(300)   # the line that it stands at
if rank == 0:
    dist.init_process_group("gloo")
elif rank == 1:
    threading.Thread(target=evaluate, daemon=True).start()
    evaluate()
elif rank == 2:
    evaluate()
else:
    signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))   # another thread takes the signal
    evaluate()
"""


@pytest.fixture(scope="module")
def hanging(notebook: kernels.Kernel) -> Iterator[kernels.Kernel]:
    """A notebook in which a run hangs: rank 0 in a rendezvous, rank 2 stopped, rank 3 with signals blocked."""
    outcome = notebook.run(_HANGING)
    assert outcome.status == "ok", outcome.traceback
    wait = "deadline = time.monotonic() + 60\nwhile {} and time.monotonic() < deadline: time.sleep(0.05)"
    for missing in (
        "not all('here' in hanging.logs(rank) for rank in (1, 2, 3))",
        "'init_process_group' not in str(hanging.stacks()[0])",
    ):
        waited = notebook.run(wait.format(missing))
        assert waited.status == "ok", waited.traceback
    pids = [int(pid) for pid in re.findall(r"\d+", notebook.value("[info.pid for info in hanging.ranks]"))]
    assert len(pids) == 4
    os.kill(pids[2], signal.SIGSTOP)
    processes.wait_until(lambda: (found := processes.read(pids[2])) and found.state == "T", "rank 2 is stopped")
    yield notebook
    with contextlib.suppress(ProcessLookupError):
        os.kill(pids[2], signal.SIGCONT)
    notebook.run("hanging.kill(); hanging.wait(20)")


def test_every_rank_is_named_with_where_it_stands(hanging: kernels.Kernel) -> None:
    blocks = re.split(r"\n(?=rank )", hanging.run("stacks = hanging.stacks(); print(stacks)").stdout.rstrip())
    assert [block[:6] for block in blocks] == ["rank 0", "rank 1", "rank 2", "rank 3"]
    first = blocks[0]
    assert " is in init_process_group, innermost call first:" in first
    assert re.search(r"^  In\[\d+\], line 8 in <module>:  dist\.init_process_group\(\"gloo\"\)$", first, re.MULTILINE)
    assert "in libraries below:\n    torch/distributed/" in blocks[0]
    lines = blocks[1].splitlines()
    assert re.fullmatch(r"  In\[\d+\], line 6 in evaluate:  time.sleep\(300\)   # the line that it stands at", lines[1])
    assert re.fullmatch(r"  In\[\d+\], line 11 in <module>:  evaluate\(\)", lines[2])
    assert re.fullmatch(r"  another thread: In\[\d+\], line 6 in evaluate", lines[3])
    assert "is stopped" in blocks[2] and "kill -CONT" in blocks[2]
    assert ", line 6 in evaluate:  time.sleep(300)" in blocks[3]
    assert "notebook_accel" not in "".join(blocks)
    assert hanging.value("[stack.condition for stack in stacks]") == "['answered', 'answered', 'stopped', 'answered']"
    assert re.fullmatch(r"'In\[\d+\], line 6 in evaluate'", hanging.value("stacks[1].user_line"))
    assert hanging.value("stacks[0].waits_in, stacks[1].waits_in") == "('init_process_group', '')"
    # Asking again disturbs nobody.
    assert hanging.value("[str(hanging.stacks()[1]) for _ in range(3)].count(str(stacks[1]))") == "3"
    assert hanging.value("hanging.status, {info.state for info in hanging.ranks}") == "('running', {'running'})"


def test_line_magic_shows_it(hanging: kernels.Kernel) -> None:
    shown = hanging.run("%distributed").stdout
    assert re.search(r"^\d+ \(hanging\): running, on 4 CPUs; began .*; logs in /", shown, re.MULTILINE)
    assert len(re.findall(r"^  [0-3]     running  \d+", shown, re.MULTILINE)) == 4
    assert "is stopped" in hanging.run("%distributed stacks --run hanging").stdout
    logged = hanging.run("%distributed logs 1").stdout
    assert re.match(r"rank 1, last lines of /.*/rank_1\.log\nhere 1\nhere 1\n", logged)


@contextlib.contextmanager
def asked(program: str) -> Iterator[Rank]:
    """A process of this program, which is told the descriptor for its stacks and says when it is ready, as a rank."""
    ours, theirs = Connection.pair()
    dump = memory_files.appending_file("stacks")
    command = [sys.executable, "-c", program, str(dump)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, pass_fds=[dump]) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        rank = Rank(0, ours, LogTail(open_log("", 0)[0], Allowance(1), lambda _: None), dump, pid=process.pid)
        try:
            yield rank
            assert process.poll() is None
        finally:
            process.kill()
            rank.close()
            theirs.close()


_DEAF = """
import signal
for n in range(signal.SIGRTMIN, signal.SIGRTMAX): signal.signal(n, lambda *_: None)
signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
print("ready", flush=True)
signal.sigwait([1])
"""


def test_rank_that_does_not_answer_is_named_and_not_waited_for_too_long() -> None:
    """A process of one thread that catches the signal and doesn't let it through."""
    with asked(_DEAF) as rank:
        inspection = Inspection([rank], now_s=100.0)
        assert [inspection.look(now_s) for now_s in (100.1, 102.9)] == [None, None]
        assert inspection.look(103.1) == [RankDump(rank=0, pid=rank.pid, condition="unresponsive")]


_MANY_STACKS = """
import faulthandler, signal, sys, threading, time
from notebook_accel.launching.processes import arm_stacks
arm_stacks(int(sys.argv[1]))
def deep(depth):
    deep(depth - 1) if depth else time.sleep(60)
for _ in range(90): threading.Thread(target=deep, args=(80,), daemon=True).start()
def where_the_main_thread_is():
    print("ready", flush=True)
    time.sleep(60)
where_the_main_thread_is()
"""


def test_answer_is_taken_when_it_is_whole_however_slowly_it_comes() -> None:
    """Writer and reader share one processor, so that the reader looks several times between two lines."""
    allowed = os.sched_getaffinity(0)
    with asked(_MANY_STACKS) as rank:
        assert rank.pid is not None
        os.sched_setaffinity(rank.pid, {min(allowed)})
        os.sched_setaffinity(0, {min(allowed)})
        try:
            inspection = Inspection([rank], now_s=100.0)
            [said] = processes.wait_until(lambda: inspection.look(100.1), "it has answered", poll_s=0)
        finally:
            os.sched_setaffinity(0, allowed)
    assert said.text.count(" in deep\n") == 90 * 81
    assert said.text.splitlines()[-2].endswith(" in where_the_main_thread_is")


_BUSY = """
import sys, threading
from notebook_accel.launching.processes import arm_stacks
arm_stacks(int(sys.argv[1]))
def deep(depth):
    return deep(depth - 1) + 1 if depth else 0
def computes():
    while True:
        deep(50)
        exec("(lambda: [x for x in range(3)])()")
threading.Thread(target=computes, daemon=True).start()
print("ready", flush=True)
computes()
"""
_KEEPS_THE_LOCK = """
import ctypes, sys
from notebook_accel.launching.processes import arm_stacks
arm_stacks(int(sys.argv[1]))
library = ctypes.PyDLL(None)
sys.setswitchinterval(1000)
library.write(1, b"ready\\n", 6)
while True: library.sleep(300)  # which the signal ends
"""


def test_rank_that_runs_python_code_is_asked_often_and_stays_alive() -> None:
    """Python's fault handler, which reads stacks while they change, crashes this process within some hundred times."""
    with asked(_BUSY) as rank:
        for _ in range(200):
            inspection = Inspection([rank], now_s=100.0)
            [said] = processes.wait_until(lambda: inspection.look(100.1), "it has answered", poll_s=0)  # noqa: B023
            assert said.condition == "answered" and " in computes\n" in said.text


_KEEPS_NOTHING = """
import gc, os, sys, time, weakref
from notebook_accel.launching.processes import arm_stacks
class Batch: pass
def step(dump):
    batch = Batch()
    kept = weakref.ref(batch)
    print("ready", flush=True)
    while os.fstat(dump).st_size == 0:  # until the stack has been read
        time.sleep(0.01)
    return kept
def goes_on(batch_is_there):
    while True:
        time.sleep(60)
gc.disable()
dump = int(sys.argv[1])
arm_stacks(dump)
kept = step(dump)
if kept() is None:
    goes_on(False)  # line 20
goes_on(True)  # line 21
"""


def test_variables_of_code_whose_stack_was_read_go_with_it() -> None:
    """A frame that stays until garbage is collected keeps tensors as long, and loaders with their workers."""
    with asked(_KEEPS_NOTHING) as rank:

        def read() -> str:
            inspection = Inspection([rank], now_s=100.0)
            [said] = processes.wait_until(lambda: inspection.look(100.1), "it has answered")
            return str(said.text)

        assert " in step\n" in read()
        processes.wait_until(lambda: " in goes_on\n" in read(), "it goes on")
        assert read().splitlines()[-1].endswith(", line 20 in <module>")


def test_rank_that_keeps_the_interpreters_lock_answers_too() -> None:
    with asked(_KEEPS_THE_LOCK) as rank:
        inspection = Inspection([rank], now_s=100.0)
        assert inspection.look(100.9) is None
        assert inspection.look(101.1) is None  # now the fault handler is asked
        [said] = processes.wait_until(lambda: inspection.look(101.2), "it has answered")
        assert said.condition == "answered"
        # It has said that it is ready, and may not have come to the next line.
        assert re.search(r", line [78] in <module>$", said.text.splitlines()[-1])


def test_rank_that_gives_the_signal_its_default_is_not_killed_by_it(notebook: kernels.Kernel) -> None:
    notebook.run("""%%distributed -n 1 --background --out deaf --view none
for number in range(signal.SIGRTMIN, signal.SIGRTMAX): signal.signal(number, signal.SIG_DFL)
print("set", flush=True)
time.sleep(300)""")
    assert notebook.run("while 'set' not in deaf.logs(0): time.sleep(0.05)").status == "ok"
    assert notebook.value("deaf.stacks()[0].condition, deaf.status") == "('not_ready', 'running')"
    notebook.run("deaf.kill(); deaf.wait(20)")
    assert notebook.value("deaf.stacks()[0].condition, deaf.done") == "('ended', True)"


def test_agent_that_was_stopped_answers_too(hanging: kernels.Kernel) -> None:
    [agent] = processes.children(hanging.pid)
    os.kill(agent.pid, signal.SIGSTOP)
    assert hanging.value("hanging.stacks(timeout_s=60)[1].condition") == "'answered'"


def test_last_collective_of_each_rank_is_named(launch: Callable[..., Job]) -> None:
    job = launch(functions.is_alone_in_a_collective)
    stacks = processes.wait_until(
        lambda: next((found for found in [job.stacks(60)] if found[0].waits_in == "broadcast" and found[1].collective),
                     None), "rank 0 waits", 60, poll_s=0.1,
    )  # fmt: skip
    job.kill()
    alone, other = stacks[0].collective, stacks[1].collective
    assert alone is not None
    assert other is not None
    assert (alone.name, other.name) == ("broadcast", "all_reduce")
    assert alone.number == other.number + 1
    assert f"  its last collective: broadcast, number {alone.number}" in str(stacks[0])
    assert repr(stacks).splitlines()[-1] == (
        "The ranks are not at the same collective. The last one of "
        f"rank 0: broadcast, number {alone.number}; rank 1: all_reduce, number {other.number}."
    )
