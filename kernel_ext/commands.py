"""``%distributed``: what goes on, and the few things that one does with it.

``%distributed status | stop | logs | stacks | config | doctor``; the first four take a run's name or number where
several go on.
"""

from __future__ import annotations

from collections.abc import Callable

from IPython.core.error import UsageError

from kernel_ext.config_form import ConfigForm
from notebook_accel import config as configuration
from notebook_accel.errors import NotebookAccelError
from notebook_accel.launching import logs, preflight, registry
from notebook_accel.launching.job import Job

__all__ = ["COMMANDS", "run"]

_LAST_LINES = 20
_STOP_DEADLINE_S = 30.0
_MIB = 1 << 20
_MOST_ARGUMENTS = {"status": 1, "stop": 1, "logs": 2, "stacks": 1, "config": 0, "doctor": 0}


def run(line: str) -> ConfigForm | None:
    """``%distributed``: what goes on, and the few things that one does with it.

    %distributed status [RUN]      the runs that go on, and the last one that has ended
    %distributed stop [RUN]        ends a run
    %distributed logs [RUN] [R]    the last lines of all ranks, or of rank R, and where all of them are
    %distributed stacks [RUN]      where every rank stands, also if it hangs
    %distributed config            the form that writes a configuration file
    %distributed doctor            what speaks against a launch here

    RUN is a run's name or number, and needed only where several go on. As a cell magic, %%distributed runs the cell.
    """
    command, *arguments = line.split() or ["status"]
    if command not in COMMANDS:
        raise UsageError(f"%distributed: there is no command {command!r}; there are {', '.join(COMMANDS)}.")
    surplus = arguments[_MOST_ARGUMENTS[command] :]
    if surplus:
        raise UsageError(f"%distributed {command}: there is no use for {' '.join(surplus)!r}.")
    return COMMANDS[command](arguments)


def _status(arguments: list[str]) -> None:
    entries = [registry.find(arguments[0])] if arguments else registry.latest()
    if not entries:
        print("No run has been started.")
    for entry in entries:
        _print_run(entry)


def _print_run(entry: registry.Entry) -> None:
    job = entry.job
    where = f"; logs in {entry.log_files[0].parent}" if entry.log_files else ""
    print(f"{entry.number} ({entry.name}): {'ended' if job is None else f'{job.status}, {job.devices}'}{where}")
    if job is None or job.done:
        return
    rows = [("rank", "state", "pid", "device", "step", "memory")]
    for info in job.ranks:
        used = "" if info.memory_used_bytes is None else f"{info.memory_used_bytes / _MIB:,.0f} MiB"
        step = "" if info.step is None else f"{info.step:,}"
        rows.append((str(info.rank), info.state, str(info.pid or ""), info.device, step, used))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    for info in job.ranks:
        if info.silent is not None:
            does = f"waits in {info.silent.waits_in}" if info.silent.waits_in else "keeps the others waiting"
            print(f"  rank {info.rank} {does}" + (f", at {info.silent.at}" if info.silent.at else ""))


def _stop(arguments: list[str]) -> None:
    job = _running(arguments)
    job.stop()
    job.wait(_STOP_DEADLINE_S)
    print(repr(job))


def _running(arguments: list[str]) -> Job:
    entry = registry.find(*arguments[:1], running=True)
    job = entry.job
    if job is None:  # between the two lines above
        raise NotebookAccelError(f"The run {entry.name!r} has just ended.")
    return job


def _logs(arguments: list[str]) -> None:
    *which, rank = arguments if arguments and arguments[-1].isdigit() else [*arguments, ""]
    entry = registry.find(*which[:1])
    if not entry.log_files:
        raise NotebookAccelError(f"The run {entry.name!r} has no log files.")
    if rank and int(rank) >= len(entry.log_files):
        raise NotebookAccelError(f"The run {entry.name!r} has no rank {rank}: it has {len(entry.log_files)} ranks.")
    for number, path in enumerate(entry.log_files):
        if rank in ("", str(number)):
            print(f"rank {number}, last lines of {path}")
            print(logs.read(path, _LAST_LINES).rstrip("\n"))


def _stacks(arguments: list[str]) -> None:
    print(_running(arguments).stacks())


def _config(_: list[str]) -> ConfigForm:
    return ConfigForm()


def _doctor(_: list[str]) -> None:
    findings = preflight.check(configuration.resolve({}, file=configuration.default_path()))
    for finding in findings:
        print(f"{'refused' if finding.refuses else 'warning'}: {finding}")
    if not findings:
        print("Nothing speaks against a launch.")


COMMANDS: dict[str, Callable[[list[str]], ConfigForm | None]] = {
    "status": _status,
    "stop": _stop,
    "logs": _logs,
    "stacks": _stacks,
    "config": _config,
    "doctor": _doctor,
}
"""The commands by name, for completion."""
