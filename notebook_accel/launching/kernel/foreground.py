"""The wait of a cell for its run: draws the run's view until the run has ended, and ends the run on an interrupt."""

from __future__ import annotations

import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from notebook_accel.errors import RunError
from notebook_accel.formatting import ranks_in_words
from notebook_accel.interrupts import allowed, held
from notebook_accel.launching.kernel import local
from notebook_accel.launching.kernel.job import Job
from notebook_accel.launching.results import Results
from notebook_accel.launching.views.view import KERNEL_INTERRUPT, NoView, View, open_panel, open_view

_T = TypeVar("_T")
_JobType = TypeVar("_JobType", bound=Job)
_REFRESH_PERIOD_S = 0.2
_DRAWING_SHARE = 0.02  # of one core: a slow view is drawn less often
_LONGEST_PERIOD_S = 1.0
# Drawing a panel takes a whole processor, which starting ranks need. A run that ends within this time looks instant and
# needs no panel.
_DRAWING_DELAY_S = 0.1
_INTERRUPT_DEADLINE_S = 3.0
_ANSWER_DEADLINE_S = 5.0  # the ranks have three seconds to send their stacks


def run_in_foreground(launch: Callable[[], Job]) -> Results:
    """Launch a run, draw its view, wait for its end and return its results.

    An interrupt goes to the ranks, which may end by themselves within the grace period; a second one kills them. If all
    return a value even so, as code does that saves what it has so far, that is the run's result.

    Raises:
        RunError: The run has failed or was stopped.
        KeyboardInterrupt: The kernel was interrupted; every rank is gone.
    """
    job = start_and_show(launch, _follow)
    if job.run_here is not None:
        _run_here(job, job.run_here)
    return job.results()


def _follow(job: Job) -> None:
    """Draw the run's view until its ranks have ended. A rank that is this process runs later, outside ``held``."""
    if job.run_here is not None:
        return
    view: View | None = None
    try:
        with allowed():
            job.wait(_DRAWING_DELAY_S)
            view = _open(job)
            _draw_until_done(job, view)
    except KeyboardInterrupt as interrupt:
        came_late = job.state.have_all_results
        _end_interrupted(job, view)
        if came_late or job.status != "succeeded":  # else the user's code has taken the interrupt, and returned
            _describe(interrupt, job)
            raise


def start_and_show(start: Callable[[], _JobType], show: Callable[[_JobType], object]) -> _JobType:
    """Start a run and show it. What is raised meanwhile, such as an interrupt, ends it: nobody has its handle yet."""
    jobs: list[_JobType] = []
    try:
        with held():
            jobs.append(start())
            show(jobs[0])
        return jobs[0]
    except BaseException:
        with held():
            for job in jobs:
                job.discard()
        raise


def draw_in_background(job: Job) -> None:
    """Draw a job's view in a separate thread until the job has ended."""
    _draw_in_thread(job, _open(job))


def draw_attached(job: Job) -> None:
    """Draw an attached job's view in a thread until the job has ended; directly if it has ended already."""
    view = _open(job, f"Attached to {job.name!r}: {job.status}, on {job.devices}.")
    if job.done:
        _guarded(job, view.close, None)
    else:
        _draw_in_thread(job, view)


def show_panel(job: Job) -> None:
    """Draw a job's panel in a thread. Without a panel draw nothing, since the run's output is shown elsewhere."""
    no_view: View = NoView(job)
    _draw_in_thread(job, _guarded(job, lambda: open_panel(job) or no_view, no_view))


def _draw_in_thread(job: Job, view: View) -> None:
    threading.Thread(
        target=_draw_until_done, args=(job, view), name=f"notebook-accel-view-{job.id}", daemon=True
    ).start()


def _open(job: Job, announcement: str = "") -> View:
    def announce_and_open() -> View:
        precision = "" if job.config.mixed_precision == "no" else f" in {job.config.mixed_precision}"
        print(announcement or f"Launching training on {job.devices}{precision}.")
        return open_view(job)

    no_view: View = NoView(job)
    return _guarded(job, announce_and_open, no_view)


def _draw_until_done(job: Job, view: View) -> None:
    _refresh_until_done(job, view)
    _guarded(job, view.close, None)


def _refresh_until_done(job: Job, view: View, deadline_s: float = float("inf")) -> None:
    period_s = _REFRESH_PERIOD_S
    while not job.wait(period_s) and time.monotonic() < deadline_s:
        job.notice_silence(time.monotonic())
        began_s = time.thread_time()
        _guarded(job, view.refresh, None)
        drawing_s = time.thread_time() - began_s
        period_s = min(max(_REFRESH_PERIOD_S, drawing_s / _DRAWING_SHARE), _LONGEST_PERIOD_S)


def _run_here(job: Job, run: Callable[[], None]) -> None:
    """Run the only rank in this thread, where debuggers and interrupts reach it. Another thread draws the view."""
    view = _open(job)
    drawing = threading.Thread(target=_refresh_until_done, args=(job, view), name=f"notebook-accel-view-{job.id}")
    drawing.start()
    try:
        run()
    except BaseException as error:
        if not job.done:  # a second interrupt, during the clean-up
            job.end_here(None, error)
        if isinstance(error, KeyboardInterrupt):
            _describe(error, job)
        raise
    finally:
        drawing.join()
        _guarded(job, view.close, None)


def _guarded(job: Job, act: Callable[[], _T], otherwise: _T) -> _T:
    """Call a view's function. If it raises, report the error and let the training go on."""
    try:
        return act()
    except Exception as error:
        if _was_raised_by_a_signal(error):
            raise
        print(
            f"The view of {job.name!r} has failed ({type(error).__name__}: {error}); the run goes on.", file=sys.stderr
        )
        return otherwise


def _was_raised_by_a_signal(error: Exception) -> bool:
    """Return whether a user's signal handler raised the error. Python may call handlers at any moment."""
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    codes = {getattr(getattr(handler, "__func__", handler), "__code__", None) for handler in handlers}
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))


def _end_interrupted(job: Job, view: View | None) -> None:
    """Interrupt the ranks and draw the view until they have ended. Kill them on a second interrupt."""
    job.ended_by = job.ended_by if job.done else KERNEL_INTERRUPT
    job.interrupt()
    try:
        with allowed():
            view = view or _open(job)  # show the ranks' output even so
            _refresh_until_done(job, view, time.monotonic() + 3 * job.config.grace_s + _INTERRUPT_DEADLINE_S)
    except KeyboardInterrupt:
        job.kill()
        job.wait(_INTERRUPT_DEADLINE_S)
    if not job.done and not _does_agent_answer(job):
        local.engine().close()  # no process of the agent outlives it
    view = view or _open(job)
    _guarded(job, view.close, None)


def _does_agent_answer(job: Job) -> bool:
    """Return whether the agent answers. If it does, a rank hangs in an unkillable system call, and other runs go on."""
    try:
        job.stacks(_ANSWER_DEADLINE_S)
    except RunError:
        return False
    return True


def _describe(interrupt: KeyboardInterrupt, job: Job) -> None:
    """Have IPython show where the ranks stood and what was saved, in place of a traceback of this package's frames."""
    with allowed():  # unpickling calls the objects' own code
        saved, lost = job.pull_saved()
    text = _interrupted_in_words(job, saved, lost)
    interrupt._render_traceback_ = lambda: [text]  # type: ignore[attr-defined]


def _interrupted_in_words(job: Job, saved: Sequence[str], lost: Mapping[str, str]) -> str:
    left = [f"{info.rank} (pid {info.pid})" for info in job.ranks if info.ended is None]
    ended = "every rank has ended" if job.done else f"the system has not ended all ranks yet: {', '.join(left)}"
    stood = [f"  {line}" for line in job.where_ranks_stood()]
    kept = [f"  {', '.join(saved)}: pulled as it was then in rank 0"] if saved else []
    kept += [f"  not pulled: {why}" for why in lost.values()]
    late = [rank.number for rank in job.ranks if rank.ended is not None and rank.ended.signal == signal.SIGTERM]
    if late:
        went_on = f"{ranks_in_words(late)} went on, and {'was' if len(late) == 1 else 'were'} terminated"
        kept.append(f"  {went_on} after the grace period: --grace_s 30 (grace_s=30) leaves 30 s to save")
    return "\n".join([f"KeyboardInterrupt: {job.name!r} was interrupted, and {ended}.", *stood, *kept])
