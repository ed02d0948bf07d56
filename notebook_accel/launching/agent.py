"""The agent: supervises the ranks of one kernel, and never imports torch.

A kernel can be busy, stopped or killed at any time; whatever must happen to ranks all the same happens here: their
output is read, the others are stopped when one fails, an end is escalated until it is one, and when the kernel has
gone, so has everything that it started.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec

from notebook_accel import events
from notebook_accel.channel import ClosedError, Connection, Message
from notebook_accel.launching import messages
from notebook_accel.launching.output import LineReader
from notebook_accel.launching.processes import bootstrap, die_with_parent
from notebook_accel.launching.runs import Rank, Run, reason_of

__all__ = ["main"]

_TEMPLATE_DEADLINE_S = 180.0
_SEND_DEADLINE_S = 10.0
_TICK_S = 0.1
# What may wait for a kernel that doesn't read. Past it, printed lines are left out and counted; nothing else is.
_MOST_QUEUED_BYTES = 32 << 20
_TEMPLATE_FAILED = "The process that ranks are forked from could not be started."
_TEMPLATE_LOST = "The process that ranks are forked from has died."


@dataclasses.dataclass(eq=False)
class _Template:
    process: subprocess.Popen[bytes]
    connection: Connection
    deadline_s: float
    is_ready: bool = False
    runs: list[Run] = dataclasses.field(default_factory=list)


class Agent:
    """The event loop between one kernel and the templates and ranks that it uses.

    Args:
        kernel: The connection to the kernel.
        kernel_pid: Its process.
    """

    def __init__(self, kernel: Connection, kernel_pid: int) -> None:
        self._kernel = kernel
        self._selector = selectors.DefaultSelector()
        self._runs: dict[str, Run] = {}
        self._waiting: list[Run] = []
        self._template: _Template | None = None  # the one for new runs
        self._templates: list[_Template] = []  # and those whose last ranks still run
        self._prepare: messages.Prepare | None = None
        self._is_quitting = False
        kernel.set_blocking(False)
        self._watch(kernel.fileno(), self._read_kernel)
        # The connection's other end may live on in a process that the kernel forked. Its pidfd can't be fooled.
        self._watch(os.pidfd_open(kernel_pid), self._quit)

    def serve(self) -> None:
        """Until the kernel has gone or says so."""
        try:
            while not self._is_quitting:
                for key, _ in self._selector.select(_TICK_S if self._runs or self._waiting else None):
                    if key.fd in self._selector.get_map():  # a handler before this one may have closed it
                        key.data()
                self._tick(time.monotonic())
                self._flush()
        except ClosedError:
            pass
        finally:
            for run in self._runs.values():
                run.end("kill")
            for template in list(self._templates):
                self._drop(template)

    def _tick(self, now_s: float) -> None:
        for run in list(self._runs.values()):
            run.tick(now_s)
        for template in self._templates:
            if not template.is_ready and now_s > template.deadline_s:
                template.process.kill()

    def _watch(self, descriptor: int, handler: Callable[[], Any]) -> None:
        self._selector.register(descriptor, selectors.EVENT_READ, handler)

    def _unwatch(self, descriptor: int) -> None:
        with contextlib.suppress(KeyError, ValueError):  # it may have ended by itself before
            self._selector.unregister(descriptor)

    # The kernel ----------------------------------------------------------------------------------------------------

    def _read_kernel(self) -> None:
        for message in self._kernel.receive():
            told = messages.decode_for_agent(message.body)
            if isinstance(told, messages.Prepare):
                self._start_template(told)
            elif isinstance(told, messages.Launch):
                self._accept(told, message)
            elif isinstance(told, messages.End):
                self._end(told)
            else:
                self._quit()

    def _tell_kernel(self, message: msgspec.Struct) -> None:
        self._kernel.queue(messages.encode(message))

    def _flush(self) -> None:
        wanted = selectors.EVENT_READ if self._kernel.flush() else selectors.EVENT_READ | selectors.EVENT_WRITE
        if self._selector.get_key(self._kernel.fileno()).events != wanted:
            self._selector.modify(self._kernel.fileno(), wanted, self._read_kernel)

    def _quit(self) -> None:
        self._is_quitting = True

    # Templates -----------------------------------------------------------------------------------------------------

    def _start_template(self, prepare: messages.Prepare) -> None:
        before, self._template = self._template, None
        if before is not None:
            self._drop_if_unused(before)
        self._prepare = prepare
        ours, theirs = Connection.pair()
        command = bootstrap(
            "notebook_accel.launching.template", str(theirs.fileno()), str(os.getpid()), sys_path=prepare.sys_path
        )
        process = subprocess.Popen(
            command, env=prepare.environment, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
        )
        theirs.close()
        ours.set_send_deadline(_SEND_DEADLINE_S)
        template = _Template(process, ours, time.monotonic() + _TEMPLATE_DEADLINE_S)
        self._template = template
        self._templates.append(template)
        self._watch(ours.fileno(), lambda: self._read_template(template))

    def _drop_if_unused(self, template: _Template) -> None:
        """A template that is no longer the one for new runs goes when its last run has ended."""
        if template is not self._template and not template.runs and template in self._templates:
            self._drop(template)

    def _drop(self, template: _Template) -> None:
        """Ends a template. A rank that it may still have dies with it, by the signal that it asked for."""
        self._unwatch(template.connection.fileno())
        template.connection.close()
        self._templates.remove(template)
        if template is self._template:
            self._template = None
        template.process.kill()
        template.process.wait()

    def _read_template(self, template: _Template) -> None:
        try:
            for message in template.connection.receive():
                said = messages.decode_from_template(message.body)
                if isinstance(said, messages.Ready):
                    template.is_ready = True
                    self._start_waiting()
                elif isinstance(said, messages.Forked):
                    self._runs[said.job_id].ranks[said.rank].forked(said.pid)
                else:
                    run = self._runs[said.job_id]
                    self._rank_ended(run, run.ranks[said.rank], said.status)
        except ClosedError:
            self._lost(template)

    def _lost(self, template: _Template) -> None:
        for run in list(template.runs):
            run.end("kill", "template lost")
            for rank in run.alive:
                self._rank_ended(run, rank, -signal.SIGKILL)
        self._drop(template)
        text = _TEMPLATE_LOST if template.is_ready else _TEMPLATE_FAILED
        waiting, self._waiting = self._waiting, []
        for run in waiting:
            self._refuse(run, text)
        if not template.is_ready:
            self._tell_kernel(messages.Broken(text=text))

    # Runs ----------------------------------------------------------------------------------------------------------

    def _accept(self, launch: messages.Launch, message: Message) -> None:
        self._waiting.append(Run(launch, message.descriptors))
        if self._template is None:
            assert self._prepare is not None, "a kernel prepares before it launches"
            self._start_template(self._prepare)
        self._start_waiting()

    def _refuse(self, run: Run, text: str) -> None:
        run.close_descriptors()
        self._tell_kernel(messages.Broken(text=text, job_id=run.launch.job_id))

    def _start_waiting(self) -> None:
        if self._template is None or not self._template.is_ready:
            return
        waiting, self._waiting = self._waiting, []
        for run in waiting:
            self._start(run, self._template)

    def _start(self, run: Run, template: _Template) -> None:
        try:
            store = socket.create_server(("127.0.0.1", run.launch.port), backlog=4096)
        except OSError as error:
            self._refuse(run, f"The port {run.launch.port} for the ranks' store can't be used: {error.strerror}.")
            return
        run.started()
        template.runs.append(run)
        self._runs[run.launch.job_id] = run
        payload, *results = run.descriptors
        try:
            for number, result in enumerate(results):
                self._fork(run, template, number, [payload, result], store)
        except (ClosedError, TimeoutError):
            template.process.kill()  # what follows from its end is done where it is noticed, for all reasons alike
        store.close()
        run.close_descriptors()

    def _fork(self, run: Run, template: _Template, number: int, files: list[int], store: socket.socket) -> None:
        ours, theirs = Connection.pair()
        ours.set_blocking(False)
        rank = Rank(number, ours)
        run.ranks.append(rank)
        self._watch(ours.fileno(), lambda: self._read_rank(run, rank))
        write_ends = [self._open_output(run, rank, "stdout"), self._open_output(run, rank, "stderr")]
        order = messages.Fork(
            job_id=run.launch.job_id,
            rank=number,
            world_size=run.launch.world_size,
            port=store.getsockname()[1],
            listens=number == 0,
        )
        listening = [store.fileno()] if order.listens else []
        try:
            template.connection.send(messages.encode(order), [*files, theirs.fileno(), *write_ends, *listening])
        finally:
            theirs.close()
            for write_end in write_ends:
                os.close(write_end)

    def _open_output(self, run: Run, rank: Rank, stream: events.Stream) -> int:
        """A pipe for one of a rank's streams; its write end."""
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        reader = LineReader(read_end, stream, functools.partial(self._output, run, rank))
        rank.readers.append(reader)
        self._watch(read_end, lambda: self._read_output(reader))
        return write_end

    def _rank_ended(self, run: Run, rank: Rank, status: int) -> None:
        rank.status = status
        self._read_rank(run, rank)
        for reader in rank.readers:
            reader.finish()
            self._unwatch(reader.fileno())
            reader.close()
        self._say_left_out(run, rank)
        self._unwatch(rank.connection.fileno())
        rank.connection.close()
        ended = events.Ended(
            exit_code=status if status >= 0 else None,
            signal=-status if status < 0 else None,
            stopped=rank.was_told_to_end and status != 0,
        )
        self._say(run, rank, ended)
        if not rank.said_finished and not run.reason:
            run.end("stop", "failed")
        if run.is_over:
            self._run_ended(run)

    def _run_ended(self, run: Run) -> None:
        del self._runs[run.launch.job_id]
        self._tell_kernel(messages.RunEnded(job_id=run.launch.job_id, reason=run.reason))
        for template in list(self._templates):
            if run in template.runs:
                template.runs.remove(run)
                self._drop_if_unused(template)

    def _end(self, told: messages.End) -> None:
        for run in [run for run in self._waiting if run.launch.job_id == told.job_id]:
            self._waiting.remove(run)
            run.close_descriptors()
            self._tell_kernel(messages.RunEnded(job_id=told.job_id, reason=reason_of(told.how)))
        if told.job_id in self._runs:
            self._runs[told.job_id].end(told.how)

    # What ranks say ------------------------------------------------------------------------------------------------

    def _read_rank(self, run: Run, rank: Rank) -> None:
        try:
            while frames := rank.connection.receive():
                for frame in frames:
                    self._heard(run, rank, frame.body)
        except ClosedError:
            self._unwatch(rank.connection.fileno())

    def _heard(self, run: Run, rank: Rank, body: bytes) -> None:
        try:
            event = events.decode(body)
        except msgspec.DecodeError:
            return  # what one rank garbles must not end all runs
        if isinstance(event, events.Finished):
            rank.said_finished = True
            if all(other.said_finished for other in run.ranks):
                run.release()
        elif isinstance(event, events.Failed):
            rank.said_failed = True
            if not run.reason:  # not only when it exits: its threads and children may take their time
                run.end("stop", "failed")
        self._tell_kernel(messages.Said(job_id=run.launch.job_id, rank=rank.number, event=msgspec.Raw(body)))

    def _say(self, run: Run, rank: Rank, event: events.Event) -> None:
        raw = msgspec.Raw(events.encode(event))
        self._tell_kernel(messages.Said(job_id=run.launch.job_id, rank=rank.number, event=raw))

    def _read_output(self, reader: LineReader) -> None:
        if not reader.read():
            self._unwatch(reader.fileno())

    def _output(self, run: Run, rank: Rank, event: events.Output) -> None:
        if self._kernel.queued_bytes > _MOST_QUEUED_BYTES:
            rank.left_out_lines += event.text.count("\n") + 1
            return
        self._say_left_out(run, rank)
        self._say(run, rank, event)

    def _say_left_out(self, run: Run, rank: Rank) -> None:
        if rank.left_out_lines:
            text = f"[{rank.left_out_lines:,} lines left out: the notebook could not take them as fast as they came]"
            rank.left_out_lines = 0
            self._say(run, rank, events.Output(stream="stderr", text=text))


def main(kernel_descriptor: str, kernel_pid: str) -> None:
    """Runs the agent. Called in a new interpreter by the kernel."""
    die_with_parent(int(kernel_pid), signal.SIGTERM)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the kernel, which tells us
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    Agent(Connection.from_descriptor(int(kernel_descriptor)), int(kernel_pid)).serve()
