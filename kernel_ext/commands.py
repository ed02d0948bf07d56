"""The line magic ``%distributed``: show, stop and inspect runs.

``%distributed status | stop | logs | stacks | why | profile | compare | runs | attach | again | config | doctor``. The
first six take ``--run`` and a run's name or number; ``logs`` and ``stacks`` take a rank too, ``attach`` and ``again`` a
detached run's name, ``compare`` two names.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from IPython.core.error import UsageError
from IPython.core.getipython import get_ipython

from kernel_ext.config_form import ConfigForm
from notebook_accel import config as configuration
from notebook_accel import runs_command
from notebook_accel.errors import NotebookAccelError
from notebook_accel.formatting import aligned, format_count, format_duration, format_size, plain_lines
from notebook_accel.launching import logs
from notebook_accel.launching.kernel import detached, launcher, registry
from notebook_accel.launching.kernel.job import Job
from notebook_accel.launching.state.comparison import Side, compare_sides
from notebook_accel.launching.state.diagnosis import Diagnosis
from notebook_accel.launching.state.profiles import Profile

_LAST_LINES = 20
_STOP_DEADLINE_S = 30.0
_LISTED_RUNS = 10
_COMPARED = 2
_CLEAN = "--clean"
_JSON = "--json"
_STEPS = "--steps"
_MEMORY = "--memory"
_PROFILED_STEPS = 5
_WITH_VALUES = ("--run=", f"{_STEPS}=")


def run(line: str, also: Sequence[str] = ()) -> ConfigForm | Job | Profile | None:
    """Show, stop and inspect runs.

    %distributed status          list the runs in progress, or show how the last one ended
    %distributed stop            stop a run
    %distributed logs [RANK]     print the last lines of all ranks, or of one, and the paths of their log files
    %distributed stacks [RANK]   print the stacks of all ranks, or of one, even of ranks that hang
    %distributed why             print where the time of the ranks' steps goes, and why they are slow
    %distributed profile         profile the next steps of a run that goes on, and show them as a timeline
    %distributed compare [A [B]] print two runs' phases side by side, the last two or those of these names
    %distributed runs            list your detached runs on this machine, also those of other notebooks
    %distributed attach [NAME]   show a detached run here, live or as it ended; the value is its Job
    %distributed again [NAME]    launch a detached run that has ended once more, with what was sent to it then
    %distributed config          open the form that writes a configuration file
    %distributed doctor          check this machine for problems that a launch would meet

    The first six take --run NAME (or its number), to choose among several runs or to name an earlier one.
    why takes --json, which prints the figures as data; profile takes --steps, the number of steps (5 by default), and
    --memory, which shows what holds memory at its peak; runs takes --clean, which removes the runs that have ended.

    Examples:
      %distributed                       the same as %distributed status
      %distributed logs 1                print the last lines of rank 1
      %distributed logs 1 --run first    the same for the run named "first"
      %distributed stacks --run 3        print the stacks of the third run's ranks
      %distributed why --json            the reason and the phases of a step, as JSON
      %distributed compare one two       say why two ranks (the run "two") aren't twice as fast as one
      %distributed profile --steps 3     a timeline of the next three steps of all ranks; the value is the Profile
      %distributed profile --memory      the lines that hold most memory, on each rank
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
    return COMMANDS[command](_read(command, words))


class _Given(NamedTuple):
    """The words after a command.

    Attributes:
        name: A run's name or number, empty for the only one in progress or the last one; one or two names, as a
            shell's words, for ``compare``.
        number: A rank, or a number of steps; ``None`` if there is none.
        flags: The flags.
    """

    name: str
    number: int | None
    flags: frozenset[str]


def _read(command: str, words: list[str]) -> _Given:
    """Parse the words after the command."""
    name, number, flags = "", None, set()
    waiting = [part for word in words for part in (word.split("=", 1) if word.startswith(_WITH_VALUES) else [word])]
    while waiting:
        word = waiting.pop(0)
        if word == "--run" and command in _OF_A_RUN:
            if not waiting:
                raise UsageError(f"%distributed {command}: --run needs a run's name or number.")
            name = waiting.pop(0)
        elif word in _FLAGS.get(command, ()) and word != _STEPS:
            flags.add(word)
        elif word == _STEPS and command == "profile":
            if not (waiting and waiting[0].isdecimal()):
                raise UsageError("%distributed profile: --steps needs a number.")
            number = int(waiting.pop(0))
        elif command == "compare" and word[:1] != "-" and len(shlex.split(name)) < _COMPARED:
            name = shlex.join([*shlex.split(name), word])
        elif word.isdecimal() and command in _OF_A_RANK and number is None:
            number = int(word)
        elif command in _OF_A_DETACHED_RUN and not name and word[:1] != "-":
            name = word
        else:
            hint = f" A run is named with --run {shlex.quote(word)}." if command in _OF_A_RUN else ""
            raise UsageError(f"%distributed {command}: unexpected argument {word!r}.{hint}")
    return _Given(name, number, frozenset(flags))


def _status(given: _Given) -> None:
    entries = [registry.find(given.name)] if given.name else registry.latest()
    if not entries:
        print("No run has been started.")
    for entry in entries:
        _print_run(entry)


def _print_run(entry: registry.Entry) -> None:
    job = entry.job
    where = f"; logs in {entry.log_files[0].parent}" if entry.log_files else ""
    ended = entry.ending.status  # read once, since the run may end meanwhile
    status = ended or ("running" if job is None else job.status)
    began = f"began {time.strftime('%H:%M:%S', time.localtime(entry.began))}"
    took = f", took {format_duration(entry.ending.took_s)}" if ended else ""
    print(f"{entry.number} ({entry.name}): {status}, on {entry.devices}; {began}{took}{where}")
    if ended and entry.ending.why:
        print(f"  {entry.ending.why}")
    if job is None or ended:
        return
    if job.doing():
        print(f"  {job.doing()}")
    rows = [("rank", "state", "pid", "device", "step", "memory")]
    for info in job.ranks:
        used = "" if info.memory_used_bytes is None else format_size(info.memory_used_bytes)
        steps = "" if info.steps is None else f"{info.steps:,}"
        rows.append((str(info.rank), info.word, str(info.pid or ""), info.device, steps, used))
    for line in aligned(rows):
        print(f"  {line}")
    for info in job.ranks:
        if info.silent is not None:
            does = f"waits in {info.silent.waits_in}" if info.silent.waits_in else "keeps the others waiting"
            print(f"  rank {info.rank} {does}" + (f", at {info.silent.at}" if info.silent.at else ""))


def _stop(given: _Given) -> None:
    job = _running(given.name)
    job.stop()
    job.wait(_STOP_DEADLINE_S)
    print(repr(job))


def _running(name: str) -> Job:
    entry = registry.find(name, running=True)
    job = entry.job
    if job is None:  # it ended between the two lines above
        raise NotebookAccelError(f"The run {entry.name!r} has just ended.")
    return job


def _logs(given: _Given) -> None:
    entry = registry.find(given.name)
    if not entry.log_files:
        raise NotebookAccelError(f"The run {entry.name!r} has no log files.")
    job = entry.job  # knows whether a rank hasn't started yet
    for rank in _ranks(given.number, entry.name, len(entry.log_files)):
        text = logs.read(entry.log_files[rank], _LAST_LINES) if job is None else job.logs(rank, _LAST_LINES)
        text = text.rstrip("\n")
        yet = "" if job is None or job.done else " yet"
        about = f"rank {rank}, last lines of" if text else f"rank {rank} has printed nothing{yet}:"
        print(f"{about} {entry.log_files[rank]}")
        print("\n".join(plain_lines(text)), end="\n" if text else "")


def _stacks(given: _Given) -> None:
    job = _running(given.name)
    ranks = _ranks(given.number, job.name, job.world_size)
    stacks = job.stacks()
    print("\n".join(str(stacks[rank]) for rank in ranks))
    if stacks.disagreement:
        print(stacks.disagreement)


def _ranks(chosen: int | None, name: str, world_size: int) -> Sequence[int]:
    if chosen is None:
        return range(world_size)
    if chosen >= world_size:
        has = format_count(world_size, "rank")
        raise NotebookAccelError(f"The run {name!r} has no rank {chosen}: it has {has}.")
    return [chosen]


def _why(given: _Given) -> None:
    found = _diagnosis(registry.find(given.name))
    print(json.dumps(found.to_dict()) if _JSON in given.flags else found)


def _diagnosis(entry: registry.Entry) -> Diagnosis:
    job = entry.job
    return entry.ending.diagnosis if job is None else job.diagnosis()


def _profile(given: _Given) -> Profile:
    steps = _PROFILED_STEPS if given.number is None else given.number
    return _running(given.name).profile(steps, memory=_MEMORY in given.flags)


def _compare(given: _Given) -> None:
    entries = [registry.find(name) for name in shlex.split(given.name)]
    missing = _COMPARED - len(entries)
    if missing:
        others = [entry for entry in registry.latest(_COMPARED) if entry not in entries]
        entries = [*others[-missing:], *entries]
    if len(entries) < _COMPARED:
        raise NotebookAccelError("There are no two runs to compare.", fix="run the cell with -n 1, and with -n 2")
    print(compare_sides(*(Side(entry.name, _diagnosis(entry)) for entry in entries)))


def _runs(given: _Given) -> None:
    print("\n".join(runs_command.table(clean=_CLEAN in given.flags)))


def _attach(given: _Given) -> Job:
    return detached.attach_and_show(given.name, set_variables=_push)


def _again(given: _Given) -> Job:
    return detached.again(given.name, set_variables=_push)


def _push(variables: dict[str, Any]) -> None:
    shell = get_ipython()
    if shell is not None:
        shell.push(variables)


def _doctor(_: _Given) -> None:
    print(launcher.diagnosis(configuration.resolve({}, file=configuration.default_path()))[0])


COMMANDS: dict[str, Callable[[_Given], ConfigForm | Job | Profile | None]] = {
    "status": _status,
    "stop": _stop,
    "logs": _logs,
    "stacks": _stacks,
    "why": _why,
    "profile": _profile,
    "compare": _compare,
    "runs": _runs,
    "attach": _attach,
    "again": _again,
    "config": lambda _: ConfigForm(),
    "doctor": _doctor,
}
"""The commands by name, for completion."""

_OF_A_RUN = ("status", "stop", "logs", "stacks", "why", "profile")
_OF_A_DETACHED_RUN = ("attach", "again")
_OF_A_RANK = ("logs", "stacks")
_FLAGS = {"why": (_JSON,), "profile": (_STEPS, _MEMORY), "runs": (_CLEAN,)}


def options_of(command: str) -> dict[str, list[str]]:
    """Return the options that a command takes, each with its possible values."""
    names = dict.fromkeys(entry.name for entry in registry.latest(_LISTED_RUNS))
    flags: dict[str, list[str]] = {flag: [] for flag in _FLAGS.get(command, ())}
    return flags | ({"--run": list(names)} if command in _OF_A_RUN else {})
