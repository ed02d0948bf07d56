"""A session of two ranks for the tests of this folder, in this process, and interrupts at the right moment."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from notebook_accel.launching.kernel import local
from notebook_accel.launching.state.stacks import RankStack
from notebook_accel.sessions.kernel import pending_request
from notebook_accel.sessions.kernel.session import Session

_APPEARS_S = 60.0


@pytest.fixture(scope="package")
def engine() -> local.LocalEngine:
    """The agent and the template of this process."""
    running = local.engine()
    running.warm()
    return running


@pytest.fixture(scope="package")
def session(engine: local.LocalEngine) -> Iterator[Session]:
    with Session(num_processes=2, use_cpu=True, view="none") as running:
        running.execute("import os, sys, time, torch, signal\nrank = int(os.environ['RANK'])")
        yield running


@pytest.fixture
def everybody_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Don't interrupt a rank that fails later than another before it has failed, however slow it is."""
    monkeypatch.setattr(pending_request, "_HEAD_START_S", _APPEARS_S)


@contextlib.contextmanager
def interrupted(
    session: Session,
    stands: Callable[[RankStack], object],
    *,
    only: int | None = None,
    then: Callable[[], object] = lambda: None,
    is_taken: bool = False,
) -> Iterator[None]:
    """Interrupt this process, as a kernel is interrupted, as soon as all ranks, or one, meet a condition.

    Args:
        session: The session.
        stands: Returns whether a rank's stack meets the condition.
        only: The rank to look at. Default: all.
        then: Called after the interrupt.
        is_taken: Whether the ranks' code handles the interrupt, so that it isn't raised here.
    """
    failures: list[str] = []
    has_ended = threading.Event()  # by an error, which an interrupt would hide

    def look() -> None:
        deadline_s = time.monotonic() + _APPEARS_S
        while time.monotonic() < deadline_s and not has_ended.is_set():
            stacks = session.stacks(_APPEARS_S)
            if not has_ended.is_set() and all(stands(stack) for stack in stacks if only in (None, stack.rank)):
                os.kill(os.getpid(), signal.SIGINT)
                then()
                return
        if not has_ended.is_set():
            failures.append(f"not in time:\n{session.stacks()}")
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        with contextlib.nullcontext() if is_taken else pytest.raises(KeyboardInterrupt):
            yield
    finally:
        has_ended.set()
        thread.join()
    assert not failures, failures


def waits(stack: RankStack) -> bool:
    """Return whether it is in a collective, or where torch's data parallel module waits for the others."""
    return bool(stack.waits_in) or any("/torch/nn/parallel/" in frame.file for frame in stack.frames)


def runs(stack: RankStack) -> bool:
    """Return whether it is in the user's code."""
    return bool(stack.user_line)
