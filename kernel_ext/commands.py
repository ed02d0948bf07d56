"""The line magic ``%distributed``: show, stop and inspect runs. Each command has a parser of its own."""

from __future__ import annotations

import argparse
import shlex
import time
from collections.abc import Callable, Sequence
from typing import Any

from IPython.core.error import UsageError
from IPython.core.getipython import get_ipython

from kernel_ext.arguments import Parser
from kernel_ext.config_form import ConfigForm
from notebook_accel import runs_command, trial
from notebook_accel.errors import NotebookAccelError
from notebook_accel.formatting import aligned, format_count, format_duration, format_size, json_text, plain_lines
from notebook_accel.launching import logs
from notebook_accel.launching.kernel import detached, registry
from notebook_accel.launching.kernel.job import Job
from notebook_accel.launching.state.profiles import DEFAULT_STEPS, Profile
from notebook_accel.launching.state.rank import RankState

_LAST_LINES = 20
_STOP_DEADLINE_S = 30.0
_LISTED_RUNS = 10


def run(line: str, also: Sequence[str] = ()) -> ConfigForm | Job | Profile | None:
    """Show, stop and inspect runs.

    %distributed status          list the runs in progress, or show how the last one ended
    %distributed stop            stop a run
    %distributed interrupt       raise KeyboardInterrupt in a run; the ranks of a session keep their variables
    %distributed logs [RANK]     print the last lines of all ranks, or of one, and the paths of their log files
    %distributed stacks [RANK]   print the stacks of all ranks, or of one, even of ranks that hang
    %distributed why             print where the time of the ranks' steps goes, and why they are slow
    %distributed profile         profile the next steps of a run in progress, and show them as a timeline
    %distributed runs            list your detached runs on this machine, also those of other notebooks
    %distributed attach [NAME]   show a detached run here, live or as it ended; the value is its Job
    %distributed detach [NAME]   let a run in progress outlive the kernel, under this name; the value is its new Job
    %distributed again [NAME]    launch a detached run that has ended once more, with what was sent to it then
    %distributed config          open the form that writes a configuration file
    %distributed doctor          check this machine for problems that a launch would meet

    The first seven, and detach, take --run NAME (or its number), to choose among several runs or an earlier one.
    status, why, runs and doctor take --json, which prints data for programs; profile takes --steps, the number of steps
    (5 by default), and --memory, which writes a snapshot of each GPU's memory; runs takes --clean, which removes the
    runs that have ended; doctor takes --trial, which checks the devices by launches, and --report, which writes that.

    Examples:
      %distributed                       the same as %distributed status
      %distributed logs 1                print the last lines of rank 1
      %distributed logs 1 --run first    the same for the run named "first"
      %distributed stacks --run 3        print the stacks of the third run's ranks
      %distributed why --json            the reason and the phases of a step, as JSON
      %distributed profile --steps 3     a timeline of the next three steps of all ranks; the value is the Profile
      %distributed profile --memory      what holds the memory of each GPU, for pytorch.org/memory_viz
      %distributed stop --run long       stop the run named "long"
      %distributed attach night          attach to the run that %%distributed --detach --name night has started

    The cell magic %%distributed runs a cell on all ranks; %%distributed? explains it.
    """
    try:
        command, *words = shlex.split(line) or ["status"]
    except ValueError:
        raise UsageError(f"%distributed: a quote is not closed in: {line}") from None
    if command not in COMMANDS:
        raise UsageError(
            f"%distributed: there is no command {command!r}; there are {', '.join(dict.fromkeys([*COMMANDS, *also]))}. "
            "%distributed? says what they do."
        )
    return _FUNCTIONS[command](COMMANDS[command].parse(words))


def _status(given: argparse.Namespace) -> None:
    entries = [registry.find(given.run)] if given.run else registry.latest()
    if given.json:
        print(json_text([_facts(entry) for entry in entries]))
        return
    if not entries:
        print("No run has been started.")
    for entry in entries:
        _print_run(entry)


def _facts(entry: registry.Entry) -> dict[str, Any]:
    """Return a run's facts for JSON: durations in seconds, times in seconds since the epoch, memory in bytes."""
    job = entry.job
    ended = entry.ending.status  # read once, since the run may end meanwhile
    return {
        "number": entry.number,
        "name": entry.name,
        "status": ended or ("running" if job is None else job.status),
        "devices": entry.devices,
        "began": entry.began,
        "took_s": entry.ending.took_s if ended else None,
        "why": entry.ending.why,
        "log_files": [str(path) for path in entry.log_files],
        "ranks": [_rank_facts(rank) for rank in (entry.ending.ranks if job is None else job.ranks)],
    }


def _rank_facts(rank: RankState) -> dict[str, Any]:
    return {
        "rank": rank.number,
        "state": rank.word,
        "pid": rank.pid,
        "device": rank.device,
        "step": rank.steps,
        "memory_bytes": rank.memory_used_bytes,
        "metrics": rank.metrics,
        "waits_in": rank.silent.waits_in if rank.silent else None,
        "at": rank.silent.at if rank.silent else None,
    }


def _print_run(entry: registry.Entry) -> None:
    job, run = entry.job, _facts(entry)
    where = f"; logs in {entry.log_files[0].parent}" if entry.log_files else ""
    began = f"began {time.strftime('%H:%M:%S', time.localtime(run['began']))}"
    after = "detached after" if run["status"] == "detached" else "took"
    took = "" if run["took_s"] is None else f", {after} {format_duration(run['took_s'])}"
    print(f"{run['number']} ({run['name']}): {run['status']}, on {run['devices']}; {began}{took}{where}")
    if took and run["why"]:
        print(f"  {run['why']}")
    if job is None or took:
        return
    if job.doing():
        print(f"  {job.doing()}")
    rows = [("rank", "state", "pid", "device", "step", "memory")]
    for rank in run["ranks"]:
        used = "" if rank["memory_bytes"] is None else format_size(rank["memory_bytes"])
        steps = "" if rank["step"] is None else f"{rank['step']:,}"
        rows.append((str(rank["rank"]), rank["state"], str(rank["pid"] or ""), rank["device"], steps, used))
    for line in aligned(rows):
        print(f"  {line}")
    for rank in run["ranks"]:
        if rank["waits_in"] is not None:
            does = f"waits in {rank['waits_in']}" if rank["waits_in"] else "keeps the others waiting"
            print(f"  rank {rank['rank']} {does}" + (f", at {rank['at']}" if rank["at"] else ""))


def _stop(given: argparse.Namespace) -> None:
    job = _running(given.run)
    job.ended_by = "%distributed stop"
    job.stop()
    job.wait(_STOP_DEADLINE_S)
    print(f"{job!r}\n", end="")  # in one piece, since a thread may print how the run has ended


def _interrupt(given: argparse.Namespace) -> None:
    job = _running(given.run)
    ends_it = job.on_death != "keep"  # a session's ranks stay
    if ends_it:
        job.ended_by = "%distributed interrupt"
    job.interrupt(escalate=ends_it)
    print(f"Interrupted: {job!r}")


def _running(name: str) -> Job:
    entry = registry.find(name, running=True)
    job = entry.job
    if job is None:  # the run ended between the two lines above
        raise NotebookAccelError(f"The run {entry.name!r} has just ended.")
    return job


def _logs(given: argparse.Namespace) -> None:
    entry = registry.find(given.run)
    if not entry.log_files:
        raise NotebookAccelError(f"The run {entry.name!r} has no log files.")
    job = entry.job
    first_rank = entry.ending.first_rank if job is None else job.first_rank
    for number in _ranks(given.rank, entry.name, first_rank, len(entry.log_files)):
        file = entry.log_files[number - first_rank]
        text = logs.read(file, _LAST_LINES).rstrip("\n")
        yet = "" if job is None or job.done else " yet"
        about = f"rank {number}, last lines of" if text else f"rank {number} has printed nothing{yet}:"
        print(f"{about} {file}")
        print("\n".join(plain_lines(text)), end="\n" if text else "")


def _stacks(given: argparse.Namespace) -> None:
    job = _running(given.run)
    numbers = _ranks(given.rank, job.name, job.first_rank, job.world_size)
    stacks = job.stacks()
    print("\n".join(str(stack) for stack in stacks if stack.rank in numbers))
    if stacks.disagreement:
        print(stacks.disagreement)


def _ranks(chosen: int | None, name: str, first_rank: int, world_size: int) -> Sequence[int]:
    """Return the number of the chosen rank, or those of all ranks of this node."""
    numbers = range(first_rank, first_rank + world_size)
    if chosen is None:
        return numbers
    if chosen not in numbers:
        here = f"{numbers[0]} to {numbers[-1]} on this node" if first_rank else format_count(world_size, "rank")
        raise NotebookAccelError(f"The run {name!r} has no rank {chosen}: it has {here}.")
    return [chosen]


def _why(given: argparse.Namespace) -> None:
    entry = registry.find(given.run)
    job = entry.job
    found = entry.ending.diagnosis if job is None else job.diagnosis()
    print(json_text(found.to_dict()) if given.json else found)


def _detach(given: argparse.Namespace) -> Job:
    folder = detached.let_go(_running(given.run), given.name)
    return detached.attach_and_show(folder.id, set_variables=_push)


def _push(variables: dict[str, Any]) -> None:
    shell = get_ipython()
    if shell is not None:
        shell.push(variables)


def _doctor(given: argparse.Namespace) -> None:
    trial.doctor({}, given)


_FUNCTIONS: dict[str, Callable[[argparse.Namespace], ConfigForm | Job | Profile | None]] = {
    "status": _status,
    "stop": _stop,
    "interrupt": _interrupt,
    "logs": _logs,
    "stacks": _stacks,
    "why": _why,
    "profile": lambda given: _running(given.run).profile(given.steps, memory=given.memory),
    "runs": lambda given: runs_command.print_runs(clean=given.clean, as_json=given.json),
    "attach": lambda given: detached.attach_and_show(given.name, set_variables=_push),
    "detach": _detach,
    "again": lambda given: detached.again(given.name, set_variables=_push),
    "config": lambda _: ConfigForm(),
    "doctor": _doctor,
}


def _parsers() -> dict[str, Parser]:
    parsers = {name: Parser(f"%distributed {name}") for name in _FUNCTIONS}
    for name in ("status", "stop", "interrupt", "logs", "stacks", "why", "profile", "detach"):
        parsers[name].add_argument("--run", default="", metavar="NAME")
    for name in ("logs", "stacks"):
        parsers[name].add_argument("rank", nargs="?", type=_rank)
    trial.add_arguments(parsers["doctor"])
    for name in ("status", "why", "runs"):
        parsers[name].add_argument("--json", action="store_true")
    for name in ("attach", "again", "detach"):
        parsers[name].add_argument("name", nargs="?", default="")
    parsers["profile"].add_argument("--steps", type=int, default=DEFAULT_STEPS)
    parsers["profile"].add_argument("--memory", action="store_true")
    parsers["runs"].add_argument("--clean", action="store_true")
    return parsers


def _rank(word: str) -> int:
    if not word.isdecimal():
        raise argparse.ArgumentTypeError(f"{word!r} is not a rank; a run is named with --run {shlex.quote(word)}")
    return int(word)


COMMANDS = _parsers()
"""The commands' parsers by name."""


def options_of(command: str) -> dict[str, list[str]]:
    """Return the options that a command takes, each with its possible values."""
    if command not in COMMANDS:
        return {}
    runs = list(dict.fromkeys(entry.name for entry in registry.latest(_LISTED_RUNS)))
    return {flag: runs if flag == "--run" else [] for flag in COMMANDS[command].flags}
