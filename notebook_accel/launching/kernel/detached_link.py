"""The kernel's connection to the agent of a detached run: following the run, sending orders."""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import threading
import time
from collections.abc import Collection, Iterable, Sequence

import msgspec

from notebook_accel import interrupts
from notebook_accel.errors import NotebookAccelError, RunError, SupervisorLostError
from notebook_accel.formatting import clipped, plain_text
from notebook_accel.launching import journal, logs, processes, run_folders
from notebook_accel.launching.kernel.agent_process import AgentLink
from notebook_accel.launching.kernel.detached_job import DetachedJob
from notebook_accel.launching.run_folders import AGENT_LOG, JOURNAL, LATEST, RunFolder
from notebook_accel.protocol import agent_messages as messages
from notebook_accel.protocol.channel import ClosedError, Connection, Message, peer_of

_DEADLINE_S = 10.0
_START_DEADLINE_S = 60.0  # a busy machine starts a new interpreter slowly
_LOOK_PERIOD_S = 0.5
_PAUSE_S = 0.1
_SHORT_PAUSE_S = 0.005


class Link(AgentLink[DetachedJob]):
    """Follows one detached run, and sends the job's orders to its agent."""

    def __init__(self, job: DetachedJob) -> None:
        super().__init__()
        self._job = job
        self._folder = job.folder
        self._connection: Connection | None = None  # once this kernel has introduced itself
        self._agent_pid = 0
        self._seen = 0  # the highest number of the messages read so far
        self._known = 0  # the value of ``_seen`` when the present connection began
        self.expect(job)
        job.leave = self.leave

    @property
    def _is_over(self) -> bool:
        return self._job.id not in self._jobs

    def attach(self) -> None:
        """Read the journal, and follow the run if it goes on.

        Raises:
            RunError: The agent lives but doesn't answer.
        """
        self._job.send_order = self.tell
        try:
            self._reconnect()
        except BaseException:
            self._close()
            raise
        if self._is_over:
            self._close()
        else:
            self._start_thread()

    def leave(self) -> None:
        """Stop following the run, which goes on. The job ends with the status ``detached``, unless it has ended."""
        if self._jobs.pop(self._job.id, None) is not None:
            self._job.end_detached(self._job.name)

    def replay(self, name: str) -> Collection[int]:
        """Process the unread messages of a file of the folder. Return the numbers of all in it."""
        self._known = self._seen
        return self._take_file(self._folder.open(name))

    def replay_to_its_end(self) -> None:
        """Process all messages of a run whose agent has gone, and end the job if the run was lost."""
        written = self.replay(JOURNAL)
        if not self._is_over:
            # The journal may lack some of the latest messages, and have later ones.
            with contextlib.suppress(FileNotFoundError):
                self._take_file(self._folder.open(LATEST), but=written)
        self._end_if_lost()

    def _take_file(self, descriptor: int, size_bytes: int | None = None, but: Collection[int] = ()) -> Collection[int]:
        """Process the unread messages in a file of the folder, up to ``size_bytes``, and close it.

        Leaves out the numbers ``but``. Returns the numbers of all messages in the file.
        """
        self._job.is_live = False
        try:
            found = list(journal.read(descriptor, size_bytes))
        finally:
            os.close(descriptor)
        for body in self._unknown((number, body) for number, body in found if number not in but):
            self._take(body)
        return {number for number, _ in found}

    def tell(self, message: messages.RunOrder) -> None:
        """Send an order: over the connection that is followed, or over another one if that is broken."""
        try:
            self._send(message)
        except OSError:
            send_order(self._folder, message)

    # What depends on where the agent is -----------------------------------------------------------------------------

    def _send(self, message: messages.ToAgent, descriptors: Sequence[int] = ()) -> None:
        connection = self._connection
        if connection is None:
            raise ClosedError("there is no connection at the moment")
        processes.resume_if_stopped(self._agent_pid)
        connection.send(messages.encode(message), descriptors)

    def _receive(self) -> Sequence[bytes]:
        assert self._connection is not None
        return self._unknown(journal.split_number(frame.body) for frame in self._connection.receive())

    def _unknown(self, numbered: Iterable[tuple[int, bytes]]) -> list[bytes]:
        """Return the messages that had not been read when this connection began."""
        unknown = [(number, body) for number, body in numbered if number > self._known or number == journal.NO_NUMBER]
        self._seen = max([self._seen, *(number for number, _ in unknown)])
        return [body for _, body in unknown]

    def _last_words(self) -> str:
        with contextlib.suppress(OSError), (self._folder.path / AGENT_LOG).open("rb") as log:
            return logs.last_words(log.fileno())
        return ""

    def _take(self, body: bytes) -> bool:
        with contextlib.suppress(msgspec.DecodeError):  # another version's message or event
            return super()._take(body)
        return False

    def _handle(self, said: messages.ToKernel) -> bool:
        if isinstance(said, messages.RunEnded):
            self._job.ended_by = self._job.ended_by or said.by
        return super()._handle(said)

    # Following -------------------------------------------------------------------------------------------------------

    def _start_thread(self) -> None:
        threading.Thread(target=self._run, name=f"notebook-accel-attached-{self._job.id}", daemon=True).start()

    def _run(self) -> None:
        """Follow the run to its end. The thread's function."""
        try:
            while not self._is_over:
                with contextlib.suppress(ClosedError, OSError):  # an agent drops a kernel that reads nothing for long
                    while not self._is_over:
                        self._read()
                if not self._is_over:
                    self._reconnect()
        except BaseException as error:  # noqa: BLE001 - after any error, nobody may wait for ever
            if not self._is_over:
                text = f"The run {self._job.name!r} can't be followed any more; it may go on."
                self._end(
                    RunError(text, why=f"{type(error).__name__}: {error}", fix=f"%distributed attach {self._folder.id}")
                )
        finally:
            self._close()

    def _reconnect(self) -> None:
        """Connect to the agent and read the unread messages. If it has gone, read the rest of the journal to the end.

        Raises:
            RunError: The agent lives but doesn't answer.
        """
        self._close()
        deadline_s = time.monotonic() + _DEADLINE_S
        while self._folder.is_held:
            with contextlib.suppress(OSError, msgspec.MsgspecError):  # the agent may be starting or exiting
                self._follow(*_connect(self._folder))
                return
            self._close()
            if time.monotonic() > deadline_s:
                raise _no_answer(self._folder)
            interrupts.check()
            time.sleep(_PAUSE_S)
        self.replay_to_its_end()

    def _follow(self, connection: Connection, agent_pid: int) -> None:
        """Introduce this kernel to the agent and read the journal. Later messages come over the connection.

        The agent's process is resumed if it was stopped by SIGSTOP.
        """
        try:
            frames = _introduce(connection, agent_pid, _START_DEADLINE_S, follows=True)
        except BaseException:
            connection.close()
            raise
        self._connection, self._agent_pid = connection, agent_pid
        self._known = self._seen
        [descriptor] = frames[0].descriptors
        self._take_file(descriptor, messages.decode_attached(frames[0].body).size_bytes)
        self._job.is_live = True
        for body in self._unknown(journal.split_number(frame.body) for frame in frames[1:]):
            self._take(body)

    def _close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _end_if_lost(self) -> None:
        """End the job of a run whose agent has gone, unless the messages have ended it."""
        if self._is_over:
            return
        facts = self._folder.facts
        self._job.is_live = False
        at = time.strftime("%Y-%m-%d %H:%M", time.localtime(self._folder.changed))
        steps = max((rank.steps or 0 for rank in self._job.ranks), default=0)
        last = f" Its last known step is {steps:,}." if steps else ""
        if checkpoint := self._job.state.checkpoint:
            last += f" Its last checkpoint is in {clipped(plain_text(checkpoint))}."
        name = shlex.quote(self._job.name)
        fix = f"%distributed again {name}: it continues from the checkpoint that it loads, if it loads one"
        if facts.is_session:
            fix = f"%distributed start --detach --name {name}, and run the cells again"
        if facts.boot_id != run_folders.boot_id():
            what = f"The run {self._job.name!r} was lost with the machine at {at}.{last}"
            error = SupervisorLostError(what, fix=fix)
        else:
            what = f"The agent process of the run {self._job.name!r} has gone at {at}, and the ranks with it.{last}"
            error = SupervisorLostError(what, why=self._last_words(), fix=fix)
        self._end(error)

    def _end(self, error: NotebookAccelError) -> None:
        if self._jobs.pop(self._job.id, None) is not None:  # it wasn't left meanwhile
            self._job.end("", error)


def send_order(folder: RunFolder, message: messages.RunOrder) -> None:
    """Send a message to the agent of a run. If the agent has gone, or is exiting, the message is lost.

    Raises:
        RunError: The agent lives but doesn't answer.
    """
    deadline_s = time.monotonic() + _DEADLINE_S
    while folder.is_held:
        with contextlib.suppress(OSError):
            connection, agent_pid = _connect(folder)
            with contextlib.closing(connection):
                _introduce(connection, agent_pid, _DEADLINE_S, follows=False)
                connection.send(messages.encode(message))
                return
        if time.monotonic() > deadline_s:
            raise _no_answer(folder)
        interrupts.check()
        time.sleep(_PAUSE_S)


def _no_answer(folder: RunFolder) -> RunError:
    return RunError(
        f"The agent of the run {folder.facts.name!r} doesn't answer.",
        why="The agent, the process that supervises the ranks, lives. It may be stopped or very busy.",
        fix="try again",
    )


def _connect(folder: RunFolder) -> tuple[Connection, int]:
    """Connect to the agent of a run. Return the connection and the agent's pid.

    Raises:
        OSError: Nobody listens, or another user's process does.
    """
    connected = folder.connect()
    pid, user = peer_of(connected)
    if user != os.getuid():
        connected.close()
        raise PermissionError(errno.EPERM, "another user listens there", str(folder.path))
    return Connection(connected), pid


def _introduce(connection: Connection, agent_pid: int, patience_s: float, *, follows: bool) -> list[Message]:
    """Send a Hello, and return the agent's answer and the messages that follow it.

    Raises:
        OSError: The agent has gone, refuses, or doesn't answer.
    """
    connection.set_send_deadline(_DEADLINE_S)
    connection.set_receive_deadline(_LOOK_PERIOD_S)
    connection.send(messages.encode(messages.Hello(who=run_folders.this_process(), follows=follows)))
    deadline_s = time.monotonic() + patience_s
    while not (frames := connection.receive()):
        interrupts.check()
        if time.monotonic() > deadline_s:
            raise TimeoutError("the agent doesn't answer")
        processes.resume_if_stopped(agent_pid)
    return frames
