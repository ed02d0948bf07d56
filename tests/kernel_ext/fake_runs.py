"""Fake runs, whose events the tests make up: as a ``RunState``, or as a ``Job`` here or in a kernel (``SETUP``)."""

from __future__ import annotations

import html.parser
import pathlib
import threading
from collections.abc import Callable, Iterable
from typing import Any

from kernel_ext import render
from kernel_ext.output import OutputLog
from kernel_ext.render import RunFacts
from notebook_accel.config import LaunchConfig
from notebook_accel.launching.kernel.job import Job, LaunchRequest
from notebook_accel.launching.ranks.worker import Target
from notebook_accel.launching.spec import JobSpec
from notebook_accel.launching.state.run import RunState
from notebook_accel.protocol import agent_messages as messages
from notebook_accel.protocol import events

__all__ = [
    "ATTACK", "SETUP", "Document", "FakeRun", "finish", "header_of", "make_job", "start", "summary_of", "text_of",
    "training",
]  # fmt: skip

ATTACK = '<script>alert("1")</script><img src=x onerror=alert(1)>'


class Document(html.parser.HTMLParser):
    """Parses HTML into its elements and its text. Fails if elements aren't closed in order."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.source = source
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(source)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open[-1:] != ["style"]:
            self.text += data

    def having(self, **attributes: str) -> list[dict[str, str | None]]:
        return [found for _, found in self.elements if attributes.items() <= found.items()]


class FakeRun:
    """The state and the output of a run, from the same events."""

    def __init__(self, world_size: int, prefix: Callable[[Iterable[int]], str] | None = None) -> None:
        self.state = RunState(world_size)
        self.output = OutputLog(world_size, prefix)

    def apply(self, rank: int, event: events.Event) -> None:
        self.state.apply(rank, event)
        if isinstance(event, events.Output):
            self.output.take(rank, event)


def header_of(run: FakeRun, now_s: float = 5.0, **given: Any) -> Document:
    return Document(render.header_html(_facts(given), run.state, now_s))


def summary_of(run: FakeRun, now_s: float = 5.0, **given: Any) -> Document:
    return Document(render.summary_html(_facts(given), run.state, run.output, now_s))


def text_of(run: FakeRun, now_s: float = 5.0, **given: Any) -> str:
    return render.summary_text(_facts(given), run.state, run.output, now_s)


def _facts(given: dict[str, Any]) -> RunFacts:
    usual = {"name": "digits", "devices": "2 CPUs", "precision": "no", "status": "running", "elapsed_s": 62.5}
    return RunFacts(**(usual | given))


def training(world_size: int = 2, seconds: int = 6) -> FakeRun:
    """Return a run whose ranks do 10 steps a second, of 100 in epoch 2 of 3."""
    run = FakeRun(world_size)
    for rank in range(world_size):
        run.apply(rank, events.Started(time_s=0.0, pid=1))
        for second in range(seconds):
            progress = events.Progress(
                time_s=float(second), step=10 * second, total=100, epoch=2, epochs=3, steps=100 + 10 * second
            )
            run.apply(rank, progress)
            run.apply(rank, events.Metrics(time_s=float(second), step=10 * second, values={"loss": 2.0 / (second + 1)}))
        run.apply(rank, events.Memory(time_s=5.0, used_bytes=9 << 30, total_bytes=16 << 30, kind="device"))
    return run


class Orders:
    """Takes a fake run's orders in place of its agent.

    Attributes:
        names: What was ordered so far.
        profile_number: The number of the last profile that was ordered.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.profile_number = ""
        self.has_come = threading.Event()

    def __call__(self, order: Any) -> None:
        if isinstance(order, messages.Profile):
            self.profile_number = order.number
        is_kept = isinstance(order, messages.Interrupt)
        self.names.append("interrupt and keep" if is_kept else getattr(order, "how", type(order).__name__.lower()))
        self.has_come.set()


def make_job(*, is_background: bool = False, world_size: int = 2, **options: Any) -> Any:
    """Return the job of a fake run, whose orders are its ``send_order``."""
    spec = JobSpec(name="digits", world_size=world_size, environment={}, working_directory="", sys_path=[])
    config = LaunchConfig(**options)
    request = LaunchRequest(Target({}), {}, spec, config, f"{world_size} CPUs", is_background=is_background)
    job = Job(request)
    job.send_order = Orders()
    return job


def start(job: Job) -> None:
    for rank in range(job.world_size):
        job.deliver(rank, events.Started(pid=rank + 1))
        job.deliver(rank, events.Progress(step=1, total=10, steps=1))


def finish(job: Job) -> None:
    for rank in range(job.world_size):
        job.deliver(rank, events.Finished())
        job.deliver(rank, events.Ended(exit_code=0))
    job.end("")


# What makes fake runs in a kernel. This project comes first for a moment: other packages have a folder ``tests``, too.
SETUP = f"""
import sys, threading, time
sys.path.insert(0, {str(pathlib.Path(__file__).parents[2])!r})
from tests.kernel_ext.fake_runs import finish, make_job, start
del sys.path[0]
from kernel_ext.panel import open_view
from notebook_accel.protocol import events
"""
