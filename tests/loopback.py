"""A kernel, its agents, templates and ranks in this one process, in simulated time.

Kernel and agents are the real ones: they talk over their real connections, files and folders. Only what waits is
replaced. The agents, and the threads that the kernel starts, take turns with the test: one goes on until it would have
to wait, and the clock moves only while all wait. So a grace period of a minute takes a millisecond, and a test sees the
same order of events each time.

Templates and ranks are scripts: a ``Rank`` holds the rank's end of its connection, log and result file, and does what
the test says. Its pid is higher than Linux allows, and the signals that it is sent are noted.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import itertools
import os
import pathlib
import select
import signal
import socket
import struct
import subprocess
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from notebook_accel import interrupts, notebook_launcher
from notebook_accel.launching.agent import agent, audience, runs, templates
from notebook_accel.launching.kernel import agent_process, detached_link, foreground, local
from notebook_accel.launching.kernel.detached_job import DetachedJob
from notebook_accel.launching.kernel.job import Job
from notebook_accel.launching.ranks.failure import describe
from notebook_accel.launching.remote import run
from notebook_accel.launching.results import write_result_file
from notebook_accel.launching.spec import JobSpec
from notebook_accel.protocol import agent_messages as messages
from notebook_accel.protocol import events
from notebook_accel.protocol.channel import ClosedError, Connection, EventLoop, close_all

_FIRST_PID = (1 << 22) + 1  # Linux has no higher pid than 1 << 22 (PID_MAX_LIMIT)
_TICK_S = 0.05
_LONGEST_WAIT_S = 3600.0
_MOST_TURNS = 10_000


def training() -> None:
    """Stand for the user's code, which no rank runs."""


class Loopback:
    """The simulated time, and who lives in it.

    Attributes:
        now_s: The time, as ``time.monotonic()`` returns it.
        agents: The agents' processes, in the order of their starts.
        templates: The templates, likewise.
        delays_templates: Whether new templates wait for ``Template.get_ready`` before they can fork.
        delays_ranks: Whether new ranks wait for ``Rank.start`` before they reach the user's code.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now_s = time.monotonic()
        self.agents: list[AgentProcess] = []
        self.templates: list[Template] = []
        self.delays_templates = self.delays_ranks = False
        self._pids = itertools.count(_FIRST_PID)
        self._test = threading.get_ident()
        self._actors: list[_Actor] = []
        self._replace_waits(patch)
        self._replace_processes(patch)
        self.engine = local.LocalEngine()
        patch.setattr(local, "_engine", self.engine)

    def close(self) -> None:
        """Let the kernel end in order, and then kill whoever is left."""
        self.settle()
        self.engine.close()
        while self._actors:
            self._actors[-1].kill()

    def launch(self, ranks: int = 2, **options: Any) -> Any:
        """Launch a run in the background and return its job; with ``detach=True``, detached."""
        given = {"name": "night", "use_cpu": True, "view": "none"} | options
        given.setdefault("background", not given.get("detach"))
        job = notebook_launcher(training, (), ranks, **given)
        assert isinstance(job, DetachedJob if given.get("detach") else Job)
        self.settle()
        return job

    def train(self, job: Job, steps: int) -> None:
        """Let each rank of a run do some steps more, and the agent hear of them and note them."""
        for _ in range(steps):
            for rank in self.ranks_of(job):
                rank.step()
            self.advance(0.5)

    def ranks_of(self, job: Job) -> list[Rank]:
        """Return the living processes of a run's ranks, in order."""
        return sorted((rank for rank in self.ranks if rank.job_id == job.id), key=lambda rank: rank.number)

    @property
    def ranks(self) -> list[Rank]:
        """The living processes of all ranks, the oldest first."""
        return [rank for template in self.templates for rank in template.ranks]

    # Time ------------------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Let everybody do what they can do at this time."""
        for _ in range(_MOST_TURNS):
            if not self._take_turns():
                return
        raise AssertionError("somebody goes on for ever though no time passes")

    def advance(self, seconds: float) -> None:
        """Let so much time pass, tick by tick."""
        self.wait_until(lambda: False, seconds)

    def wait_until(self, condition: Callable[[], Any], timeout_s: float | None = None) -> bool:
        """Wait in simulated time, and return whether the condition has become true."""
        due_s = self.now_s + (_LONGEST_WAIT_S if timeout_s is None else timeout_s)
        actor = threading.current_thread()
        if isinstance(actor, _Actor):
            actor.pause(lambda: condition() or self.now_s >= due_s)
            return bool(condition())
        self.settle()
        while not condition():
            if self.now_s >= due_s:
                assert timeout_s is not None, "nobody will ever do what is waited for"
                return False
            self.now_s = min(self.now_s + _TICK_S, due_s)
            self.settle()
        return True

    def _take_turns(self) -> bool:
        """Let each go on who can, and return whether anybody could."""
        ready = [actor for actor in self._actors if actor.condition()]
        for actor in ready:
            actor.go_on()
        acted = [template.act() for template in self.templates]
        return bool(ready) or any(acted)

    def _is_here(self) -> bool:
        """Return whether the calling thread lives in simulated time."""
        return threading.get_ident() == self._test or isinstance(threading.current_thread(), _Actor)

    def _replace_waits(self, patch: pytest.MonkeyPatch) -> None:
        def replace(owner: Any, name: str, substitute: Callable[..., Any]) -> None:
            original = getattr(owner, name)

            @functools.wraps(original)
            def chosen(*args: Any, **kwargs: Any) -> Any:
                if not self._is_here():
                    return original(*args, **kwargs)
                return substitute(original, *args, **kwargs)

            patch.setattr(owner, name, chosen)

        def poll(original: Any, loop: EventLoop, timeout_s: float | None) -> None:
            self.wait_until(lambda: loop._selector.select(0), timeout_s)
            original(loop, 0)

        def receive(original: Any, connection: Connection) -> bytes:
            if connection._socket.gettimeout() is None and not self.wait_until(
                lambda: _can_read(connection), _receive_deadline(connection)
            ):
                return b""
            return bytes(original(connection))

        def result(original: Any, future: concurrent.futures.Future[Any]) -> Any:
            self.wait_until(future.done)
            return original(future)

        replace(time, "monotonic", lambda _: self.now_s)
        replace(time, "sleep", lambda _, seconds: self.advance(seconds))
        replace(EventLoop, "wait", poll)
        replace(Connection, "receive_bytes", receive)
        replace(
            interrupts.Latch, "wait", lambda _, latch, timeout_s=None: self.wait_until(lambda: latch.is_set, timeout_s)
        )
        replace(concurrent.futures.Future, "result", result)
        thread = functools.partial(_Actor, self)
        for module in (agent_process, detached_link, foreground, run):
            patch.setattr(module, "threading", types.SimpleNamespace(**{**vars(threading), "Thread": thread}))

    # Processes -------------------------------------------------------------------------------------------------------

    def _replace_processes(self, patch: pytest.MonkeyPatch) -> None:
        popen = types.SimpleNamespace(**{**vars(subprocess), "Popen": self._start_process})
        for module in (agent_process, templates):
            patch.setattr(module, "subprocess", popen)
        patch.setattr(audience, "outlive_parent", lambda _: None)
        patch.setattr(runs, "state", lambda pid: "S" if self._rank(pid) else "")
        kill, kill_group = os.kill, os.killpg
        patch.setattr(os, "kill", lambda pid, number: self._signal(kill, pid, number))
        patch.setattr(os, "killpg", lambda pid, number: self._signal(kill_group, pid, number))

    def _start_process(self, command: list[str], **_: Any) -> _Process:
        """Start the twin of a process of ours. See ``processes.bootstrap`` for its command line."""
        module, descriptor, _, *options = command[4 + int(command[3]) :]
        connection = Connection.from_descriptor(os.dup(int(descriptor)))
        if module.rpartition(".")[2] == "template":
            self.templates.append(Template(self, connection))
            return self.templates[-1]
        self.agents.append(AgentProcess(self, connection, is_daemon="daemon" in options))
        return self.agents[-1]

    def _rank(self, pid: int) -> Rank | None:
        return next((rank for rank in self.ranks if rank.pid == pid), None)

    def _signal(self, kill: Callable[[int, int], None], pid: int, number: int) -> None:
        rank = self._rank(pid)
        if rank is None:
            kill(pid, number)
        elif number != signal.SIGCONT:
            rank.take_signal(signal.Signals(number))


class _KilledError(BaseException):
    """Ends an actor."""


class _Actor(threading.Thread):
    """A thread that goes on only while the loopback waits for it.

    Attributes:
        condition: What the thread waits for.
    """

    def __init__(self, loopback: Loopback, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._loopback = loopback
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self.condition: Callable[[], Any] = lambda: True
        self._is_killed = False

    def start(self) -> None:
        self._loopback._actors.append(self)
        super().start()

    def run(self) -> None:
        try:
            with contextlib.suppress(_KilledError):
                self._await_turn()
                super().run()
        finally:
            self._loopback._actors.remove(self)
            self._back.release()

    def go_on(self) -> None:
        if self in self._loopback._actors:  # another one may have ended it in the same turn
            self._go.release()
            self._back.acquire()

    def pause(self, condition: Callable[[], Any]) -> None:
        """Wait for a condition. Called by this thread."""
        self.condition = condition
        while not condition():
            self._back.release()
            self._await_turn()

    def _await_turn(self) -> None:
        self._go.acquire()
        if self._is_killed:
            raise _KilledError

    def kill(self) -> None:
        self._is_killed = True
        while self in self._loopback._actors:
            self.go_on()

    def join(self, timeout: float | None = None) -> None:
        self._loopback.wait_until(lambda: self not in self._loopback._actors, timeout)


class _Process:
    """What ``Popen`` returns."""

    def __init__(self, loopback: Loopback) -> None:
        self._loopback = loopback
        self.pid = next(loopback._pids)
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        self._loopback.wait_until(lambda: self.returncode is not None, timeout)
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        raise NotImplementedError


class AgentProcess(_Process):
    """A real agent."""

    def __init__(self, loopback: Loopback, connection: Connection, *, is_daemon: bool) -> None:
        super().__init__(loopback)
        if is_daemon:
            self.returncode = 0  # the parent of a daemon exits at once
        self._connection = connection
        self._actor = _Actor(loopback, target=self._run, name="agent", daemon=True)
        self._actor.start()

    def kill(self) -> None:
        self._actor.kill()

    def _run(self) -> None:
        self.agent = agent.Agent(audience.Kernel(self._connection, os.getpid()))
        try:
            self.agent.serve()
        finally:
            self._close(self.agent)
            self.returncode = 0

    def _close(self, ended: agent.Agent) -> None:
        """Close what the system closes at the end of a process."""
        for part in ended._runs.values():
            part.close_descriptors()
            for rank in part.alive:
                rank.close()
            if part._results is not None:
                close_all(part._results[1])
        if isinstance(ended._audience, audience.Attachments):
            close_all(_descriptors_of(ended._audience._folder.path / "lock"))
        ended._loop._selector.close()


class Template(_Process):
    """A template without a process, and the ranks that it has forked.

    Attributes:
        ranks: The living ones.
        holds_reports: Whether it keeps what it would tell the agent until ``report``.
    """

    def __init__(self, loopback: Loopback, connection: Connection) -> None:
        super().__init__(loopback)
        self.ranks: list[Rank] = []
        self.holds_reports = False
        self._held: list[messages.FromTemplate] = []
        self._connection = connection
        self._connection.set_blocking(False)
        if not loopback.delays_templates:
            self.get_ready()

    def get_ready(self) -> None:
        self._tell(messages.Ready(files={}))

    def refuse(self, why: str) -> None:
        """End, since a module can't be preloaded."""
        self._tell(messages.Unusable(why=why))
        self.kill()

    def kill(self) -> None:
        if self.returncode is None:
            self.returncode = -signal.SIGKILL
            for rank in list(self.ranks):
                rank.exit(-signal.SIGKILL)
            self._connection.close()

    def act(self) -> bool:
        """Follow the agent's orders, and return whether there were any."""
        if self.returncode is not None:
            return False
        try:
            orders = self._connection.receive()
        except ClosedError:
            self.kill()
            return True
        for order in orders:
            fork = messages.decode_for_template(order.body)
            assert isinstance(fork, messages.Fork)
            self.ranks.append(Rank(self, next(self._loopback._pids), fork, order.descriptors))
            self._tell(messages.Forked(job_id=fork.job_id, rank=fork.rank, pid=self.ranks[-1].pid))
            if not self._loopback.delays_ranks:
                self.ranks[-1].start()
        heard = [rank.read() for rank in list(self.ranks)]
        return bool(orders) or any(heard)

    def report_exit(self, rank: Rank, status: int) -> None:
        self.ranks.remove(rank)
        if self.returncode is None:
            self._tell(messages.Exited(job_id=rank.job_id, rank=rank.number, status=status, peak_bytes=0))

    def report(self) -> None:
        """Tell the agent what it was not told so far."""
        self.holds_reports, held, self._held = False, self._held, []
        for message in held:
            self._tell(message)

    def _tell(self, message: messages.FromTemplate) -> None:
        if self.holds_reports:
            self._held.append(message)
        else:
            self._connection.post(messages.encode(message))


class Rank:
    """A rank without a process.

    Attributes:
        number: Its number in the run.
        fork: The order that has made it.
        signals: Those that it was sent.
        ignores: The signals that don't end it.
        told: What the agent has told it.
    """

    def __init__(self, template: Template, pid: int, fork: messages.Fork, descriptors: list[int]) -> None:
        self.pid, self.number, self.job_id, self.fork = pid, fork.rank, fork.job_id, fork
        self.signals: list[signal.Signals] = []
        self.ignores: set[signal.Signals] = set()
        self.steps = 0
        self.told: list[messages.ToRank] = []
        self._template = template
        self._files = messages.RankFiles(*descriptors)
        self._connection = Connection.from_descriptor(self._files.connection)
        self._connection.set_blocking(False)

    def start(self) -> None:
        """Reach the user's code."""
        self.say(events.Started(pid=self.pid))

    def say(self, *said: events.Event) -> None:
        """Send events. An agent that has gone hears nothing."""
        for event in said:
            self._connection.post(events.encode(event))

    def print(self, *lines: str) -> None:
        os.write(self._files.log, "".join(f"{line}\n" for line in lines).encode())

    def step(self) -> None:
        """Do a step, print its number, and report the loss."""
        self.print(f"step {self.steps}")
        loss = events.Metrics(step=self.steps, values={"loss": 1 / (self.steps + 1)})
        self.say(events.Progress(step=self.steps, steps=self.steps), loss)
        self.steps += 1

    def finish(self, value: object = None, **pulled: object) -> None:
        """Return from the user's code. It then waits for its release."""
        write_result_file(self._files.result, {"": value, **pulled}, rank=self.number, advice="")
        self.say(events.Finished())

    def raise_error(self, error: BaseException, **more: Any) -> None:
        """Raise an exception, whose report is what ``describe`` makes of it and ``more`` fields."""
        self.say(msgspec.structs.replace(describe(error, JobSpec(name=""), ()), **more))

    def fail(self, error: BaseException, **more: Any) -> None:
        """Raise an exception, and exit."""
        self.raise_error(error, **more)
        self.exit(1)

    def exit(self, status: int) -> None:
        """End with a status, or by a signal if it is negative."""
        self._connection.close()
        close_all([file for file in self._files if file not in (None, self._files.connection)])
        self._template.report_exit(self, status)

    def take_signal(self, number: signal.Signals) -> None:
        self.signals.append(number)
        if number in self.ignores and number != signal.SIGKILL:
            return
        if number == signal.SIGINT:
            self.fail(KeyboardInterrupt(), line="In[1], line 2")
        else:
            self.exit(-number)

    def read(self) -> bool:
        """Take what the agent has told it, and return whether that was anything. Exit when it is released."""
        try:
            frames = self._connection.receive()
        except ClosedError:
            self.exit(0)
            return True
        self.told += [messages.decode_for_rank(frame.body) for frame in frames]
        return bool(frames)


def _can_read(connection: Connection) -> bool:
    return bool(select.select([connection.fileno()], [], [], 0)[0])


def _receive_deadline(connection: Connection) -> float | None:
    seconds, microseconds = struct.unpack(
        "ll", connection._socket.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16)
    )
    return float(seconds + microseconds / 1e6) or None


def _descriptors_of(path: pathlib.Path) -> list[int]:
    """Return this process's descriptors of a file."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that lists the folder
            if os.readlink(f"/proc/self/fd/{name}") == str(path):
                found.append(int(name))
    return found


@pytest.fixture
def loopback(monkeypatch: pytest.MonkeyPatch, state_home: pathlib.Path) -> Iterator[Loopback]:
    """A kernel that has launched nothing, with a folder of its own for detached runs."""
    made = Loopback(monkeypatch)
    yield made
    made.close()
