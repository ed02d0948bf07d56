"""The template: a process that was started clean, has imported torch, and forks ranks on request.

It has one thread and has touched no device, so a fork of it is as good as a fresh interpreter and a thousand times
faster. It does nothing else: what can go wrong in a rank goes wrong in the rank.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import importlib
import os
import selectors
import signal
import sys
import time
import traceback
import weakref

from notebook_accel.channel import ClosedError, Connection, Message
from notebook_accel.launching import interruption, messages, worker
from notebook_accel.launching.processes import die_with_parent, end_with_parent, kill_group

__all__ = ["main"]

# What a training function nearly always needs. torch must be there; the others are imported where they are installed.
_REQUIRED = ("torch", "torch.distributed", "torch.utils.data")
# torch._dynamo is what the first optimizer of a process imports, which takes as long as torch itself.
_WELCOME = ("numpy.random", "tqdm.auto", "torch.nn.parallel", "torch._dynamo", "notebook_accel.training.accelerator")


class Template:
    """Forks ranks for one agent and tells it when they end.

    Args:
        agent: The connection to the agent. When it closes, every rank is killed.
    """

    def __init__(self, agent: Connection) -> None:
        self._agent = agent
        self._selector = selectors.DefaultSelector()
        self._selector.register(agent.fileno(), selectors.EVENT_READ)
        self._ranks: dict[int, tuple[str, int, int]] = {}  # pidfd -> job, rank, pid

    def serve(self) -> None:
        """Until the agent has gone."""
        try:
            while True:
                for key, _ in self._selector.select():
                    if key.fd == self._agent.fileno():
                        for message in self._agent.receive():
                            self._fork(message)
                    else:
                        self._reap(key.fd)
        except ClosedError:
            pass
        finally:
            for _, _, pid in self._ranks.values():
                kill_group(pid)

    def _fork(self, message: Message) -> None:
        order = messages.decode_for_template(message.body)
        try:
            pid = self._forked(order, message)
        except OSError as error:  # no more processes or open files: this rank can't be, others still are
            said: messages.FromTemplate = messages.NotForked(job_id=order.job_id, rank=order.rank, why=str(error))
        else:
            said = messages.Forked(job_id=order.job_id, rank=order.rank, pid=pid)
        for descriptor in message.descriptors:
            os.close(descriptor)
        self._agent.send(messages.encode(said))

    def _forked(self, order: messages.Fork, message: Message) -> int:
        if not message.is_whole:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        template_pid = os.getpid()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # a rank has no use for this process's handler
        try:
            pid = os.fork()
            if pid == 0:
                self._become_rank(order, message.descriptors, template_pid)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        try:
            watch = os.pidfd_open(pid)
        except OSError:
            kill_group(pid)
            os.waitpid(pid, 0)
            raise
        self._ranks[watch] = (order.job_id, order.rank, pid)
        self._selector.register(watch, selectors.EVENT_READ)
        return pid

    def _become_rank(self, order: messages.Fork, descriptors: list[int], template_pid: int) -> None:
        """In the child. Never returns."""
        status = 1
        try:
            os.setsid()
            die_with_parent(template_pid, signal.SIGKILL)
            self._selector.close()
            self._agent.close()
            for watch in self._ranks:
                os.close(watch)
            gc.enable()
            status = worker.run(order, descriptors)
        except BaseException:  # noqa: BLE001 - the worker catches the user's, so this is ours: say it where it is seen
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)

    def _reap(self, watch: int) -> None:
        job_id, rank, pid = self._ranks.pop(watch)
        self._selector.unregister(watch)
        os.close(watch)
        # The rank is a zombie: its number is still its own, so this reaches its workers and nobody else's.
        kill_group(pid)
        _, status, usage = os.wait4(pid, 0)
        exited = messages.Exited(
            job_id=job_id,
            rank=rank,
            status=os.waitstatus_to_exitcode(status),
            peak_bytes=1024 * usage.ru_maxrss,
        )
        self._agent.send(messages.encode(exited))


def _leave_nothing_to_undo() -> None:
    """What libraries have set up here is not a rank's to take down at its exit: torch's operators alone take 40 ms."""
    for finalizer in list(getattr(weakref.finalize, "_registry", ())):
        finalizer.atexit = False


def main(agent_descriptor: str, agent_pid: str) -> None:
    """Runs the template. Called in a new interpreter by the agent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    interruption.hold_back()  # of a rank too, as long as it isn't set up: an interrupt then is not lost
    end_with_parent(int(agent_pid))  # through the `finally` that ends what ranks have started
    # What torch's C++ code logs when a peer goes, 30 lines of addresses, the rank's exception says better.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    started = time.monotonic()
    for name in _REQUIRED:
        importlib.import_module(name)
    for name in _WELCOME:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    _leave_nothing_to_undo()
    gc.collect()
    gc.disable()
    gc.freeze()  # a collection in a rank must not write to every page that it shares with the template
    agent = Connection.from_descriptor(int(agent_descriptor))
    agent.send(messages.encode(messages.Ready(seconds=time.monotonic() - started)))
    Template(agent).serve()
    os._exit(0)  # nothing here needs an interpreter's end, and with torch loaded that takes a while
