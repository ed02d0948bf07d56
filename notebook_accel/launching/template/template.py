"""The template: a fresh process that has imported torch and forks ranks on request.

It has one thread and has touched no device, so its forks are as clean as a fresh interpreter and start a thousand times
faster. It also forks the elastic process of a run on several nodes. It does nothing else, so that errors happen in
ranks and not here.
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
import traceback
from collections.abc import Iterator

from notebook_accel.launching.processes import die_with_parent, end_with_parent, kill_group, pidfd_open
from notebook_accel.launching.ranks import interruption, leaving, worker
from notebook_accel.launching.template import preloading
from notebook_accel.protocol import agent_messages as messages
from notebook_accel.protocol.channel import ClosedError, Connection, Message

_PAUSE_S = 0.2  # before optional work: a launch often follows the start or the last run at once
_ELASTIC_PROCESS = "notebook_accel.launching.elastic.elastic_agent"


class Template:
    """Forks ranks for one agent and reports their exits. When the agent's connection closes, every rank is killed.

    A fork of the kernel has ``inherited`` the ranks' function or cell. The steps of ``later`` are done while no
    rank runs and no order waits, after a pause.
    """

    def __init__(
        self, agent: Connection, inherited: worker.Inherited | None = None, later: Iterator[object] | None = None
    ) -> None:
        self._agent = agent
        self._inherited = inherited
        self._later = later
        self._selector = selectors.DefaultSelector()
        self._selector.register(agent.fileno(), selectors.EVENT_READ)
        self._ranks: dict[int, tuple[str, int, int]] = {}  # pidfd -> job, rank, pid

    def serve(self) -> None:
        """Fork and reap ranks until the agent has gone."""
        gc.disable()
        try:
            self._send_ready()
            pause_s = _PAUSE_S
            while True:
                is_free = self._later is not None and not self._ranks  # running ranks need the processors
                ready = self._selector.select(pause_s if is_free else None)
                pause_s = _PAUSE_S if ready else 0
                if is_free and not ready:
                    self._do_next()
                for key, _ in ready:
                    if key.fd == self._agent.fileno():
                        for message in self._agent.receive():
                            self._fork(message)
                    else:
                        self._reap(key.fd)
        except ClosedError:
            pass
        finally:
            # The agent's end has two signs: its connection closes, and SIGCONT comes, which must not cut this short.
            try:
                self._kill_ranks()
            except SystemExit:
                self._kill_ranks()
                raise

    def _kill_ranks(self) -> None:
        """Kill the ranks and the processes that they have started."""
        signal.signal(signal.SIGCONT, signal.SIG_IGN)
        for _, _, pid in self._ranks.values():
            kill_group(pid)

    def _send_ready(self) -> None:
        leaving.forget_exits()
        gc.freeze()  # a collection in a rank must not write to every page that it shares with the template
        # A fork of the kernel serves one run only, so its imports can't become outdated.
        files = preloading.files() if self._inherited is None else {}
        self._agent.send(messages.encode(messages.Ready(files=files)))

    def _do_next(self) -> None:
        assert self._later is not None
        if next(self._later, self._later) is self._later:  # no step is left
            self._later = None
            self._send_ready()
        gc.freeze()

    def _fork(self, message: Message) -> None:
        order = messages.decode_for_template(message.body)
        rank = order.rank if isinstance(order, messages.Fork) else messages.ELASTIC
        try:
            pid = self._forked(order, rank, message)
        except OSError as error:  # too many processes or open files: only this rank is refused
            said: messages.FromTemplate = messages.NotForked(job_id=order.job_id, rank=rank, why=str(error))
        else:
            said = messages.Forked(job_id=order.job_id, rank=rank, pid=pid)
        for descriptor in message.descriptors:
            os.close(descriptor)
        self._agent.send(messages.encode(said))

    def _forked(self, order: messages.ToTemplate, rank: int, message: Message) -> int:
        if not message.is_whole:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        template_pid = os.getpid()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # stays pending until the rank handles it
        try:
            pid = os.fork()
            if pid == 0:
                self._become(order, message.descriptors, template_pid)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        try:
            watch = pidfd_open(pid)
        except OSError:
            kill_group(pid)
            os.waitpid(pid, 0)
            raise
        self._ranks[watch] = (order.job_id, rank, pid)
        self._selector.register(watch, selectors.EVENT_READ)
        return pid

    def _become(self, order: messages.ToTemplate, descriptors: list[int], template_pid: int) -> None:
        """Run the rank, or the elastic process, in the child. Never returns."""
        status = 1
        try:
            os.setsid()
            die_with_parent(template_pid, signal.SIGKILL)
            self._selector.close()
            self._agent.close()
            for watch in self._ranks:
                os.close(watch)
            gc.enable()
            if isinstance(order, messages.Fork):
                status = worker.run(order, descriptors, self._inherited)
            else:  # imported by name, since this module must not import torch
                status = importlib.import_module(_ELASTIC_PROCESS).run(order, descriptors)
        except BaseException:  # noqa: BLE001 - the worker catches the user's errors, so this is an internal error
            os.write(2, traceback.format_exc().encode())  # sys.stderr leads nowhere in a fork of the kernel
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)

    def _reap(self, watch: int) -> None:
        job_id, rank, pid = self._ranks.pop(watch)
        self._selector.unregister(watch)
        os.close(watch)
        # The rank is a zombie, which keeps its pid, so this kills its own workers only.
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        kill_group(pid, has_tidied_up=ended is not None and ended.si_status == 0)
        _, status, usage = os.wait4(pid, 0)
        exited = messages.Exited(
            job_id=job_id,
            rank=rank,
            status=os.waitstatus_to_exitcode(status),
            peak_bytes=1024 * usage.ru_maxrss,
        )
        self._agent.send(messages.encode(exited))


def come_under(parent_pid: int) -> None:
    """Make this process end with its parent, and ignore SIGINT and SIGTERM."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    interruption.block()  # a rank inherits this, so that an interrupt during its setup isn't lost
    end_with_parent(parent_pid)  # by SystemExit, so that ``serve`` kills the ranks


def _make_better() -> Iterator[object]:
    """Do one optional step at a time that makes ranks start faster."""
    for name in preloading.LATER:
        with contextlib.suppress(ImportError):  # torch's version lacks the module, or it isn't installed
            importlib.import_module(name)
        yield name
    for address, length in preloading.memory_blocks():
        preloading.collapse(address, length)
        yield address


def main(agent_descriptor: str, agent_pid: str, *preload: str) -> None:
    """Run the template. The agent starts a new interpreter that calls this. ``preload`` names the user's modules."""
    come_under(int(agent_pid))
    # When a peer dies, torch's C++ code logs 30 lines of addresses. The rank's exception is clearer.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # A preloaded module may ask for GPUs. This must not initialise the driver, which forks couldn't use then.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # ranks get the notebook's variables instead
    agent = Connection.from_descriptor(int(agent_descriptor))
    gc.disable()  # collections while torch is imported free next to nothing, and take a tenth of the time
    preloading.import_needed()
    preloading.import_welcome()
    worker.prepare_for_forks()
    try:
        preloading.import_named(preload)
    except preloading.PreloadError as error:
        agent.send(messages.encode(messages.Unusable(why=str(error))))
        os._exit(1)
    gc.collect()
    Template(agent, later=_make_better()).serve()
    os._exit(0)  # a normal exit takes long with torch loaded, and nothing here needs it
