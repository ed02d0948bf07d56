"""The agent's record of its templates: one for new runs, and older ones whose last ranks still run."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import time
from collections.abc import Callable

from notebook_accel.launching.agent.runs import Run
from notebook_accel.launching.processes import bootstrap, pidfd_send_signal, resume_if_stopped
from notebook_accel.protocol import agent_messages as messages
from notebook_accel.protocol.channel import ClosedError, Connection, EventLoop, close_all

_READY_DEADLINE_S = 180.0  # even a fork of the kernel may have to import torch
_SEND_DEADLINE_S = 10.0
_LOOK_PERIOD_S = 0.5


@dataclasses.dataclass(eq=False)
class TemplateProcess:
    """The agent's record of one template."""

    connection: Connection
    pid: int
    deadline_s: float = dataclasses.field(default_factory=lambda: time.monotonic() + _READY_DEADLINE_S)  # to be ready
    process: subprocess.Popen[bytes] | None = None  # ``None`` for a template that the kernel has forked and reaps
    pidfd: int = -1  # of a template that the kernel has forked; otherwise -1
    log: int = -1  # to which a template that the agent has started prints; otherwise -1
    is_ready: bool = False  # it can fork ranks
    refusal: str = ""  # why it can't be used; otherwise empty
    error: OSError | None = None  # when the connection couldn't be read
    files: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)  # of the last ``Ready``
    runs: list[Run] = dataclasses.field(default_factory=list)  # whose ranks it forks

    @property
    def is_stale(self) -> bool:
        """True if an imported package was reinstalled, changed or removed since the import."""
        return any(_identity(path) != identity for path, identity in self.files.items())

    def kill(self) -> None:
        """Kill the template. The agent notices its end by the connection's end."""
        with contextlib.suppress(OSError):
            if self.process is not None:
                self.process.kill()
            else:
                pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def close(self) -> None:
        """Kill the template and reap it."""
        self.connection.close()
        self.kill()
        if self.process is not None:
            self.process.wait()
        close_all([self.pidfd, self.log])


def _identity(path: str) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino


@dataclasses.dataclass(kw_only=True)
class Templates:
    """Starts templates, and ends those that no run needs any more."""

    loop: EventLoop
    became_ready: Callable[[], None]  # called when the template for new runs can fork ranks
    not_started: Callable[[OSError], None]  # called when the system refuses the template for new runs
    handle_report: Callable[[messages.Forked | messages.NotForked | messages.Exited], None]
    lost: Callable[[TemplateProcess], None]  # called when a template has gone, before it is dropped
    current: TemplateProcess | None = None  # the one for new runs
    _all: list[TemplateProcess] = dataclasses.field(default_factory=list)  # with those whose last ranks still run
    _prepare: messages.Prepare | None = None
    _next_look_s: float = 0.0

    def start(self, prepare: messages.Prepare) -> None:
        """Start a template for new runs, which replaces the current one."""
        before, self.current = self.current, None
        if before is not None:
            self.drop_if_unused(before)
        self._prepare = prepare
        try:
            self.current = self._started(prepare)
        except OSError as error:
            self.not_started(error)

    def _started(self, prepare: messages.Prepare) -> TemplateProcess:
        with contextlib.ExitStack() as opened:
            log = os.dup(2)  # this process may go on to another file
            opened.callback(os.close, log)
            ours, theirs = Connection.pair()
            opened.callback(ours.close)
            with contextlib.closing(theirs):
                arguments = [str(theirs.fileno()), str(os.getpid()), *prepare.preload]
                command = bootstrap("notebook_accel.launching.template.template", *arguments, sys_path=prepare.sys_path)
                process = subprocess.Popen(
                    command, env=prepare.environment, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
                )
            template = TemplateProcess(ours, process.pid, process=process, log=log)
            opened.pop_all()
        return self._add(template)

    def adopt(self, connection: Connection, pid: int, pidfd: int) -> TemplateProcess:
        """Take over a template that the kernel has forked for one run. It executes its orders once it is ready."""
        return self._add(TemplateProcess(connection, pid, pidfd=pidfd))

    def _add(self, template: TemplateProcess) -> TemplateProcess:
        try:
            template.connection.set_send_deadline(_SEND_DEADLINE_S)
            self.loop.watch(template.connection.fileno(), lambda: self._read(template))
        except OSError:
            template.close()
            raise
        self._all.append(template)
        return template

    def start_if_needed(self) -> None:
        """Start a template like the last one if there is none for new runs, or if its imports are outdated."""
        if self.current is None or self.current.is_stale:
            assert self._prepare is not None, "a kernel prepares before it launches"
            self.start(self._prepare)

    def of(self, run: Run) -> TemplateProcess:
        """Return the template that forks a run's ranks."""
        return next(template for template in self._all if run in template.runs)

    def end_unready_fork_for(self, run: Run) -> None:
        """Kill a run's template if it is a fork of the kernel that isn't ready, and may never be. The run is ending."""
        for template in self._all:
            if run in template.runs and template.pidfd >= 0 and not template.is_ready:
                template.kill()

    def release(self, run: Run) -> None:
        """Remove an ended run from its template, which ends too if no run needs it any more."""
        for template in list(self._all):
            if run in template.runs:
                template.runs.remove(run)
                self.drop_if_unused(template)

    def tick(self, now_s: float) -> None:
        """Resume templates that were stopped by SIGSTOP, and kill those that weren't ready in time."""
        if now_s < self._next_look_s:
            return
        self._next_look_s = now_s + _LOOK_PERIOD_S
        for template in self._all:
            resume_if_stopped(template.pid)
            if not template.is_ready and now_s > template.deadline_s:
                template.kill()

    def close(self) -> None:
        """End all templates."""
        for template in list(self._all):
            self._drop(template)

    def drop_if_unused(self, template: TemplateProcess) -> None:
        """End a template that isn't the one for new runs and whose last run has ended."""
        if template is not self.current and not template.runs and template in self._all:
            self._drop(template)

    def _drop(self, template: TemplateProcess) -> None:
        """End a template. Its ranks die with it, by their parent-death signal."""
        self.loop.unwatch(template.connection.fileno())
        self._all.remove(template)
        if template is self.current:
            self.current = None
        template.close()

    def _read(self, template: TemplateProcess) -> None:
        try:
            frames = template.connection.receive()
        except OSError as error:
            template.error = None if isinstance(error, ClosedError) else error
            if template is self.current:
                self.current = None
            self.lost(template)
            if template in self._all:
                self._drop(template)
            return
        for message in frames:
            said = messages.decode_from_template(message.body)
            if isinstance(said, messages.Ready):
                template.is_ready = True
                template.files = said.files
                if template is self.current:
                    self.became_ready()
            elif isinstance(said, messages.Unusable):
                template.refusal = said.why
            else:
                self.handle_report(said)
