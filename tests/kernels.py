"""A real IPython kernel in a process of its own, driven as a front end drives it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import queue
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import KernelManager

from tests import processes

# For kernels that launch nothing on this machine themselves: end the template that the extension has started for the
# first launch, which would import torch and more.
END_TEMPLATE = '__import__("notebook_accel.launching.kernel.local", fromlist=["engine"]).engine().close()'
_START_TIMEOUT_S = 60.0
_POLL_S = 0.1


def unfolded(shown: str) -> list[str]:
    """Lines that ranks print, as if nothing stood once for several of them: ``0 │ up`` and ``1 │ up``, unpadded."""
    lines = []
    for line in shown.splitlines():
        folded = re.fullmatch(r" *(\d+(?:[-,]\d+)*) │ (.*)", line)
        spans = [span.split("-") for span in folded[1].split(",")] if folded else []
        ranks = [rank for span in spans for rank in range(int(span[0]), int(span[-1]) + 1)]
        lines += [f"{rank} │ {folded[2]}" for rank in ranks] if folded else [line]
    return lines


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The end of a cell, and everything that it showed.

    Attributes:
        status: ``ok``, ``error`` or ``aborted``.
        stdout: All that came on that stream.
        stderr: All that came on that stream.
        result: The ``text/plain`` of the cell's last expression, empty without one.
        error_name: The exception's class name, empty without one.
        error_value: The exception's text.
        traceback: What a notebook shows of the exception, without its colours.
        coloured: The same with them.
        displays: The contents of ``display_data`` and ``update_display_data`` messages, in order.
    """

    status: str
    stdout: str
    stderr: str
    result: str
    error_name: str
    error_value: str
    traceback: str
    coloured: str
    displays: tuple[dict[str, Any], ...]


class Cell:
    """A cell that was sent to the kernel and may be running still."""

    def __init__(self, client: BlockingKernelClient, cells: dict[str, Cell], code: str, *, allow_stdin: bool) -> None:
        self._client = client
        self._cells = cells
        self.messages: list[dict[str, Any]] = []
        self._idle = False
        # After a cell that fails, ipykernel 6 aborts what comes within a moment, also from who has waited for its end.
        self._id = client.execute(code, allow_stdin=allow_stdin, stop_on_error=False)
        cells[self._id] = self

    def finish(self, timeout_s: float = 60.0) -> Outcome:
        """Waits until the cell is done."""
        deadline = time.monotonic() + timeout_s
        self._read_until(lambda: self._idle, "the cell is done", deadline)
        reply = self._reply(deadline)
        coloured = "\n".join(line for content in self._contents("error") for line in content["traceback"])
        return Outcome(
            status=reply["status"],
            stdout=self.stream("stdout"),
            stderr=self.stream("stderr"),
            result="".join(content["data"]["text/plain"] for content in self._contents("execute_result")),
            error_name=reply.get("ename", ""),
            error_value=reply.get("evalue", ""),
            traceback=re.sub(r"\x1b\[[0-9;]*m", "", coloured),
            coloured=coloured,
            displays=tuple(self._contents("display_data", "update_display_data")),
        )

    def wait_for_output(self, text: str, timeout_s: float = 60.0) -> None:
        """Waits until the text was printed, on either stream; a cell that fails before that isn't waited for.

        A line such as ``1 │ up`` is also there when it stands once for several ranks.
        """

        def is_there() -> bool:
            shown = self.stream("stdout") + self.stream("stderr")
            return text in shown or text in "\n".join(unfolded(shown))

        deadline = time.monotonic() + timeout_s
        self._read_until(lambda: is_there() or any(self._contents("error")), f"output {text!r}", deadline)
        assert is_there(), f"the cell has failed instead of writing {text!r}:\n{self.finish().traceback}"

    def wait_for_ranks(self, text: str, ranks: int = 2) -> None:
        """Waits until each rank has printed a line that begins so."""
        for rank in range(ranks):
            self.wait_for_output(f"{rank} │ {text}")

    def wait_for_display(self, timeout_s: float = 60.0) -> None:
        """Waits until something was displayed."""
        deadline = time.monotonic() + timeout_s
        self._read_until(lambda: any(self._contents("display_data")), "a display", deadline)

    def answer(self, text: str, timeout_s: float = 60.0) -> str:
        """Waits until the cell asks for input and gives it; returns the question."""
        question = self.wait_for_question(timeout_s)
        self._client.input(text)
        return question

    def wait_for_question(self, timeout_s: float = 60.0) -> str:
        """Waits until the cell asks for input; returns the question."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                request = self._client.get_stdin_msg(timeout=_POLL_S)
            except queue.Empty:
                self._check("a question", deadline)
                continue
            return str(request["content"]["prompt"])

    def stream(self, name: str) -> str:
        """Return the text that has come on ``stdout`` or ``stderr`` so far."""
        return "".join(content["text"] for content in self._contents("stream") if content["name"] == name)

    def _contents(self, *kinds: str) -> Iterator[dict[str, Any]]:
        return (message["content"] for message in self.messages if message["msg_type"] in kinds)

    def _read_until(self, condition: Callable[[], bool], what: str, deadline: float) -> None:
        while not condition():
            if time.monotonic() > deadline:  # also while messages keep coming
                self._check(what, deadline)
            try:
                message = self._client.get_iopub_msg(timeout=_POLL_S)
            except queue.Empty:
                self._check(what, deadline)
                continue
            cell = self._cells.get(message["parent_header"].get("msg_id"))
            if cell is not None:
                cell._take(message)

    def _take(self, message: dict[str, Any]) -> None:
        self.messages.append(message)
        self._idle = self._idle or message["content"].get("execution_state") == "idle"

    def _reply(self, deadline: float) -> dict[str, Any]:
        while True:
            try:
                message = self._client.get_shell_msg(timeout=_POLL_S)
            except queue.Empty:
                self._check("the cell's reply", deadline)
                continue
            if message["parent_header"].get("msg_id") == self._id:
                return dict(message["content"])

    def _check(self, what: str, deadline: float) -> None:
        shown = f"\nstdout so far: {self.stream('stdout')!r}\nstderr so far: {self.stream('stderr')!r}"
        if time.monotonic() > deadline:
            raise AssertionError(f"not in time: {what}{shown}")
        if not self._client.is_alive():
            raise AssertionError(f"the kernel died while waiting: {what}{shown}")


class Kernel:
    """An ipykernel of this very Python, without the user's profile, history or installed kernels.

    Args:
        folder: Where its profile goes, and its working directory.
        variables: Environment variables besides this process's.
    """

    def __init__(self, folder: pathlib.Path, variables: Mapping[str, str] = {}) -> None:
        self._manager = KernelManager(kernel_spec_manager=KernelSpecManager(kernel_dirs=[]))
        self._log = folder / "kernel.log"
        self._cells: dict[str, Cell] = {}  # all of them: one may still show something while another one runs
        with self._log.open("wb") as log:
            self._manager.start_kernel(
                extra_arguments=["--HistoryManager.enabled=False"],
                cwd=str(folder),
                env={**os.environ, "IPYTHONDIR": str(folder / "ipython"), **variables},
                stdout=log,
                stderr=log,
            )
        self._client = self._manager.blocking_client()
        try:
            # Not the heartbeat, which opens another socket whenever a busy machine has missed a beat of a second: the
            # police of what tests leave behind would see it. The manager knows whether the kernel lives.
            self._client.start_channels(hb=False)
            self._client.wait_for_ready(timeout=_START_TIMEOUT_S)
            process = processes.read(self._manager.provisioner.pid)
            assert process is not None
            self.process = process
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def log(self) -> str:
        """Return the text on the real stdout and stderr of the kernel's process, which no cell shows."""
        return self._log.read_text(errors="replace")

    def start(self, code: str, *, allow_stdin: bool = False) -> Cell:
        """Sends a cell and doesn't wait.

        Args:
            code: The cell.
            allow_stdin: Whether somebody could answer ``input()``, as front ends with a user say.
        """
        return Cell(self._client, self._cells, code, allow_stdin=allow_stdin)

    def run(self, code: str, timeout_s: float = 60.0, *, allow_stdin: bool = False) -> Outcome:
        """Runs a cell to its end."""
        return self.start(code, allow_stdin=allow_stdin).finish(timeout_s)

    def value(self, expression: str, timeout_s: float = 60.0) -> str:
        """The representation of an expression's value; fails if it raises."""
        outcome = self.run(expression, timeout_s)
        assert outcome.status == "ok", outcome.traceback
        return outcome.result

    def make_subshell(self, timeout_s: float = 60.0) -> str:
        """Has the kernel make a subshell, as a front end does; its id."""
        request = self._client.session.msg("create_subshell_request", {})
        self._client.control_channel.send(request)
        deadline = time.monotonic() + timeout_s
        while True:
            assert time.monotonic() < deadline, "not in time: a subshell"
            with contextlib.suppress(queue.Empty):
                reply = self._client.get_control_msg(timeout=_POLL_S)
                if reply["parent_header"].get("msg_id") == request["header"]["msg_id"]:
                    return str(reply["content"]["subshell_id"])

    def click(self, comm_id: str, subshell_id: str | None = None) -> None:
        """Click the button of this comm, as a front end does, which may name a subshell."""
        data = {"method": "custom", "content": {"event": "click"}}
        message = self._client.session.msg("comm_msg", {"comm_id": comm_id, "data": data})
        if subshell_id is not None:
            message["header"]["subshell_id"] = subshell_id
        self._client.shell_channel.send(message)

    def descendants(self) -> list[processes.Process]:
        """The living processes below the kernel."""
        return processes.descendants(self.pid)

    def interrupt(self) -> None:
        """Interrupt the kernel, as a front end's stop button does."""
        self._manager.interrupt_kernel()

    def kill(self) -> None:
        """Kills the kernel's process, and it alone, without giving it a chance to clean up."""
        processes.kill(self.process)
        processes.wait_until(lambda: not self.process.is_alive, "the kernel is dead")

    def close(self) -> None:
        """Ends the kernel as closing a notebook does, and closes every socket to it."""
        # A signal that is handled while zmq ends a context interrupts it, and pyzmq gives it up then, with descriptors
        # and threads. DataLoaders with workers, in this process's earlier tests, have torch handle this one.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        try:
            self._client.stop_channels()
            self._manager.shutdown_kernel(now=not self._manager.is_alive())
            self._manager.context.term()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def running(folder: pathlib.Path, variables: Mapping[str, str] = {}) -> Iterator[Kernel]:
    """A kernel for the time of a ``with`` block."""
    kernel = Kernel(folder, variables)
    try:
        yield kernel
    finally:
        kernel.close()
