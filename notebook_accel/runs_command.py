"""The commands for detached runs: ``notebook-accel runs | attach | logs | stop | interrupt``.

Notebooks print the same list.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import signal
import sys
import time
from collections.abc import Callable

from notebook_accel.errors import NotebookAccelError
from notebook_accel.formatting import aligned, clipped, format_count, json_text, plain_lines
from notebook_accel.launching import logs, run_folders
from notebook_accel.launching.kernel import detached, detached_runs
from notebook_accel.launching.kernel.detached_runs import RunSummary
from notebook_accel.launching.kernel.job import Job
from notebook_accel.launching.views.view import LinesView

_REFRESH_PERIOD_S = 0.2
_SHOWN_METRICS = 3
_NAME = "The run's name or id."
_ENDED = {"stop": "stopped", "interrupt": "interrupted, and has ended"}


def add_commands(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the commands' parsers with ``add``, which is as ``add_parser``."""
    runs = add("runs", help="list your detached runs on this machine")
    runs.add_argument("--json", action="store_true", help="for programs: a list of objects")
    runs.add_argument("--clean", action="store_true", help="remove the runs that have ended, with results and logs")
    runs.set_defaults(run=_runs, parser=runs)
    attach = add("attach", help="show a detached run until it ends; Ctrl-C leaves it, and the run continues")
    attach.set_defaults(run=_attach, parser=attach)
    shown = add("logs", help="print what a detached run has printed")
    shown.add_argument("--rank", type=int, help="Default: all.")
    shown.add_argument("--tail", type=int, metavar="LINES", help="Only so many last lines of each rank.")
    shown.set_defaults(run=_logs, parser=shown)
    stop = add("stop", help="stop a detached run, as the panel's Stop does")
    stop.set_defaults(run=_stop, parser=stop, how="stop")
    interrupt = add("interrupt", help="interrupt a detached run, which keeps what --pull names, and wait for its end")
    interrupt.set_defaults(run=_stop, parser=interrupt, how="interrupt")
    for parser in (attach, shown):
        parser.add_argument("name", nargs="?", default="", help=f"{_NAME} Default: the one in progress, or the latest.")
    for parser in (stop, interrupt):
        parser.add_argument("name", help=_NAME)


def print_runs(*, clean: bool = False, as_json: bool = False) -> None:
    """Print this user's detached runs on this machine. With ``clean``, first remove those that have ended."""
    removed = run_folders.remove_old(all_ended=clean)
    found = detached_runs.summaries()
    if as_json:
        print(json_text([dataclasses.asdict(summary) for summary in found], indent=2))
        return
    if clean and removed:
        print(f"Removed: {', '.join(removed)}")
    rows = [("name", "state", "since", "step", "metrics", "folder"), *map(_row, found)]
    lines = aligned(rows) if found else ["You have no detached run on this machine."]
    print("\n".join([*lines, *(f"{summary.name}: {_reason(summary)}" for summary in found if summary.why)]))


def _reason(summary: RunSummary) -> str:
    return f"stopped {summary.why}" if summary.status == "stopped" else summary.why  # "stopped by process 7"


def _row(summary: RunSummary) -> tuple[str, ...]:
    metrics = ", ".join(f"{name} {value:.4g}" for name, value in list(summary.metrics.items())[:_SHOWN_METRICS])
    step = "" if summary.step is None else f"{summary.step:,}"
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(summary.since))
    return clipped(summary.name), summary.state, when, step, metrics, summary.folder


def _runs(parsed: argparse.Namespace) -> int:
    print_runs(clean=parsed.clean, as_json=parsed.json)
    return 0


def _attach(parsed: argparse.Namespace) -> int:
    """Show a run until it ends. Return 1 if it hasn't ended well."""
    job = detached.attach_and_show(parsed.name, show=lambda _: None)
    try:
        _draw(job)
    except KeyboardInterrupt:
        sys.stderr.write(f"\nLeft: {job.name!r} goes on. notebook-accel stop {shlex.quote(job.name)} stops it.\n")
        return 128 + signal.SIGINT
    return 0 if job.status == "succeeded" else 1


def _draw(job: Job) -> None:
    view = LinesView(job, sys.stdout)
    while not job.wait(_REFRESH_PERIOD_S):
        view.refresh()
    view.close()


def _logs(parsed: argparse.Namespace) -> int:
    facts = run_folders.find(parsed.name).facts
    if not facts.log_folder:
        raise NotebookAccelError(f"The run {facts.name!r} has no logs.")
    if parsed.rank is not None and not 0 <= parsed.rank < facts.world_size:
        raise NotebookAccelError(
            f"The run {facts.name!r} has no rank {parsed.rank}: it has {format_count(facts.world_size, 'rank')}."
        )
    for rank in range(facts.world_size) if parsed.rank is None else [parsed.rank]:
        path = logs.log_file(facts.log_folder, rank)
        text = logs.read(path, parsed.tail).rstrip("\n")
        print(f"rank {rank}: {path}" if text else f"rank {rank} has printed nothing: {path}")
        print("\n".join(plain_lines(text)), end="\n" if text else "")
    return 0


def _stop(parsed: argparse.Namespace) -> int:
    if not parsed.name:  # such as an unset variable of a shell; ``find`` would take the run that goes on
        raise NotebookAccelError("The run to stop has no name.", fix="notebook-accel runs lists them")
    folder = run_folders.find(parsed.name)
    was_held = folder.is_held
    detached.stop(folder, parsed.how)
    how = f"is {_ENDED[parsed.how]}" if was_held else "had ended already"
    print(f"The run {folder.facts.name!r} {how}. Its results and logs are in {folder.path}.")
    names = detached.pulled_names(folder)
    if names and was_held and parsed.how == "stop":
        print(f"It has left no {', '.join(names)}: notebook-accel interrupt would have kept what --pull names.")
    return 0
