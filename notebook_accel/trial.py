"""``doctor --trial``: checks this machine's devices by launches and a session of their own, and makes a report of it.

Nobody needs to trust the report blindly: it has no names and no paths, and is shown before it is written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import getpass
import importlib.metadata
import io
import os
import pathlib
import platform
import re
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from notebook_accel import VERSION, environment
from notebook_accel import config as configuration
from notebook_accel.config import LaunchConfig
from notebook_accel.errors import ConfigError, NotebookAccelError
from notebook_accel.formatting import aligned, json_text
from notebook_accel.launching.kernel import launcher
from notebook_accel.launching.kernel.devices import Machine, open_nvml
from notebook_accel.launching.ranks import device_checks
from notebook_accel.launching.ranks.device_checks import Outcome
from notebook_accel.sessions.kernel.session import Session

REPORT = "notebook-accel-report.json"
_DEADLINE_S = 60.0
_STOP_DEADLINE_S = 30.0
_PACKAGES = (
    *("torch", "torch-xla", "ipython", "ipykernel", "ipywidgets", "jupyterlab", "cloudpickle", "msgspec"),
    *("nvidia-ml-py", "numpy", "accelerate"),
)
_OFF = "set it in the notebook, os.environ[...] = ..., and launch again"
_SHARED, _ALONE, _TOGETHER, _STOP = "on one GPU: ", "each device alone", "all together", "stop in a collective"
_NCCL_FIX = f"NCCL_P2P_DISABLE=1, then NCCL_SHM_DISABLE=1 or NCCL_IB_DISABLE=1; {_OFF}"
# What to try when a check fails. Each switch turns a path off that isn't torch's plain one.
_FIXES = {"workers": "more shared memory (docker run --shm-size=8g), or num_workers=0"}
_FIXES_ON_GPUS = {
    "memory": "see who uses the device (nvidia-smi), or choose another one: CUDA_VISIBLE_DEVICES",
    "loader's copies": f"{environment.COPY_STREAM}=0; {_OFF}",
    **dict.fromkeys(("meeting", "all_reduce", "step together", _TOGETHER), _NCCL_FIX),
    _ALONE: f"{environment.COPY_STREAM}=0, then {environment.CUDA_TELEMETRY}=0 and {environment.NVML}=0; {_OFF}",
    _STOP: f"{environment.NCCL_ABORT}=0: a rank that waits is killed after grace_s instead; {_OFF}",
}
_USUAL_FIX = "send the report (--report)"
_WAITING = """
from notebook_accel import Accelerator
import time, torch
accelerator = Accelerator()
if accelerator.process_index == 0:
    accelerator.reduce(torch.ones(1, device=accelerator.device))
else:
    time.sleep(3600)
"""


@dataclasses.dataclass(frozen=True)
class Check:
    """A check of the trial.

    Attributes:
        name: Its name.
        passed: Whether it went well on all ranks.
        seconds: The longest duration on a rank.
        note: What it found.
        fix: What to try if it failed.
    """

    name: str
    passed: bool
    seconds: float
    note: str
    fix: str = ""

    def __str__(self) -> str:
        fix = f"\n    Fix: {self.fix}" if self.fix else ""
        return f"{'✓' if self.passed else '✗'} {self.name} ({self.seconds:.1f} s): {self.note}{fix}"


@dataclasses.dataclass(frozen=True)
class Trial:
    """The result of a trial: facts about this machine, and the checks."""

    facts: dict[str, str]
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """True if all checks went well."""
        return all(check.passed for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data without names and paths."""
        return {
            "format": 1,
            "date": datetime.date.today().isoformat(),
            "passed": self.passed,
            "facts": self.facts,
            "checks": [{**dataclasses.asdict(check), "seconds": round(check.seconds, 3)} for check in self.checks],
        }


def run(config: LaunchConfig, show: Callable[[str], object] = print) -> Trial:
    """Check each device alone, all together, and a stop in a collective. ``show`` gets each line when it is known.

    Args:
        config: The options; only those that choose devices and engine count.
        show: Prints a line.
    """
    machine = Machine.find()
    on_gpus = machine.devices.kind == "GPU" and not config.use_cpu
    is_cpu = config.use_cpu or machine.devices.kind == "CPU"
    count = config.num_processes or (2 if is_cpu else machine.devices.available)
    plain = LaunchConfig(
        num_processes=count,
        use_cpu=config.use_cpu,
        engine=config.engine,
        engine_options=config.engine_options,
        timeout_s=_DEADLINE_S,
        view="none",
        name="trial",
    )
    facts = {**facts_of(machine), **_driver(), **_switches()}
    show("\n".join(aligned(list(facts.items()))))
    checks = []
    checked = _checks(plain, shares_gpu=on_gpus and machine.devices.available == 1)
    if machine.devices.platform is not None:  # whose ranks are forks of this process, one for each device
        checked = _launched(_TOGETHER, device_checks.together, plain)
    for check in checked:
        checks.append(check if check.passed else dataclasses.replace(check, fix=fix_of(check.name, on_gpus=on_gpus)))
        show(str(checks[-1]))
    return Trial(facts, tuple(checks))


def fix_of(name: str, *, on_gpus: bool) -> str:
    """Return what to try after a check of this name has failed."""
    fixes = {**_FIXES_ON_GPUS, **_FIXES} if on_gpus else _FIXES
    return fixes.get(name.removeprefix(_SHARED), _USUAL_FIX)


def _checks(config: LaunchConfig, *, shares_gpu: bool) -> Iterator[Check]:
    yield from _launched(_ALONE, device_checks.alone, config)
    yield from _launched(_TOGETHER, device_checks.together, config)
    if shares_gpu:  # by gloo, since NCCL takes one rank a GPU
        shared = config.replace(num_processes=2, oversubscribe=True)
        yield from _launched(f"{_SHARED}{_TOGETHER}", device_checks.together, shared, prefix=_SHARED)
    if config.engine == "local":
        yield _stop_in_collective(config.replace(timeout_s=None, num_processes=max(2, config.num_processes or 0),
                                                 oversubscribe=shares_gpu))  # fmt: skip


def _launched(
    what: str, function: Callable[[], Sequence[Outcome]], config: LaunchConfig, prefix: str = ""
) -> Iterator[Check]:
    began_s = time.monotonic()
    try:
        job = launcher.launch_function(function, (), {}, config, show=lambda _: None)
        by_rank = list(job.results(timeout_s=_DEADLINE_S + _STOP_DEADLINE_S))  # the run's own limit comes first
    except (NotebookAccelError, TimeoutError) as error:
        yield Check(what, False, time.monotonic() - began_s, anonymous(_first_line(error)))
        return
    for outcomes in zip(*by_rank, strict=True):
        yield judged(outcomes, prefix)


def judged(outcomes: Sequence[Outcome], prefix: str = "") -> Check:
    """Return the check of what all ranks have found, in order of rank."""
    name, seconds = outcomes[0].name, max(outcome.seconds for outcome in outcomes)
    failed = [(rank, outcome.error) for rank, outcome in enumerate(outcomes) if outcome.error]
    if failed:
        ranks = ", ".join(str(rank) for rank, _ in failed)
        why = anonymous(f"rank {ranks}: {failed[0][1]}")
        return Check(f"{prefix}{name}", False, seconds, why)
    notes = list(dict.fromkeys(outcome.note for outcome in outcomes))
    return Check(f"{prefix}{name}", True, seconds, "; ".join(notes))


def _stop_in_collective(config: LaunchConfig) -> Check:
    began_s = time.monotonic()
    try:
        # A cell in the background says on its own that it was interrupted.
        with contextlib.redirect_stderr(io.StringIO()), Session.from_config(config) as session:
            note = f"it ended after {_stopped_after_s(session):.1f} s, and the next cell ran"
    except (NotebookAccelError, TimeoutError, RuntimeError) as error:
        return Check(_STOP, False, time.monotonic() - began_s, anonymous(_first_line(error)))
    return Check(_STOP, True, time.monotonic() - began_s, note)


def _stopped_after_s(session: Session) -> float:
    """Interrupt a cell in which rank 0 waits for the others, run another one, and return how long the stop took."""
    session.run(device_checks.add_ranks)  # the ranks have a group from here on
    job = session.start(_WAITING)
    waits_until_s = time.monotonic() + _STOP_DEADLINE_S
    while "reduce" not in str(job.stacks()):
        if time.monotonic() > waits_until_s:
            raise TimeoutError(f"rank 0 didn't come to its collective in {_STOP_DEADLINE_S:.0f} s")
        time.sleep(0.1)
    began_s = time.monotonic()
    job.stop()
    if not job.wait(_STOP_DEADLINE_S):
        job.stop()  # kills the ranks
        raise TimeoutError(f"the ranks still waited {_STOP_DEADLINE_S:.0f} s after the stop")
    took_s = time.monotonic() - began_s
    sums = list(session.run(device_checks.add_ranks))
    if sums != [len(sums)] * len(sums):
        raise RuntimeError(f"after the stop, the sum of ones over the ranks is {sums}")
    return took_s


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def facts_of(machine: Machine) -> dict[str, str]:
    """Return the versions and the machine, for a report."""
    versions = {"notebook-accel": VERSION, "python": platform.python_version(), "platform": platform.platform()}
    return {**versions, **{name: _version(name) for name in _PACKAGES}, **dict(machine.facts())}


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _driver() -> dict[str, str]:
    with contextlib.suppress(Exception), open_nvml() as (nvml, _):  # no driver, or no library of it
        return {"NVIDIA driver": os.fsdecode(nvml.nvmlSystemGetDriverVersion())}
    return {}


def _switches() -> dict[str, str]:
    return {name: os.environ[name] for name in environment.SWITCHES if name in os.environ}


def anonymous(text: str) -> str:
    """Return a text without paths, network addresses, and the names of this machine and its user."""
    for folder in _known_folders():  # their names may have spaces or quotes, at which the expression below ends
        text = text.replace(folder, "/folder")
    with_paths_hidden = re.sub(r"(?<![\w.])~?(/[^\s'\",:;()]+)+", "PATH", text)
    with_paths_hidden = re.sub(r"\b\d{1,3}(\.\d{1,3}){3}\b", "ADDRESS", with_paths_hidden)
    # The longest first: a full name begins with the short one.
    for name, stand_in in ((socket.getfqdn(), "HOST"), (socket.gethostname(), "HOST"), (_user(), "USER")):
        if name:
            with_paths_hidden = re.sub(rf"\b{re.escape(name)}\b", stand_in, with_paths_hidden)
    return with_paths_hidden


def _known_folders() -> list[str]:
    """Return the folders in which most files are that errors name, the longest first."""
    found = {os.path.expanduser("~"), sys.prefix}
    for find in (os.getcwd, tempfile.gettempdir):
        with contextlib.suppress(OSError):  # it was deleted, or there is none that can be written to
            found.add(find())
    return sorted((folder for folder in found if len(folder) > 1), key=len, reverse=True)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's number without a name
        return ""


def add_arguments(parser: Any) -> None:
    """Add the flags of ``doctor`` to a parser."""
    parser.add_argument("--trial", action="store_true", help="also check each device, and all together, by launches")
    parser.add_argument(
        "--report", nargs="?", const=REPORT, type=pathlib.Path, metavar="FILE", help="also write the trial as a report"
    )
    parser.add_argument("--json", action="store_true", help="for programs: an object with the findings")


def doctor(given: Mapping[str, Any], flags: Any) -> bool:
    """Print what speaks against a launch here, and the trial if it is asked for. Return True if all is well.

    Args:
        given: The options that were given as flags.
        flags: The flags of ``add_arguments``.
    """
    found = launcher.examine(given)
    shown = found.to_dict()
    say: Callable[[str], object] = print
    if flags.json:
        say = _say_nothing
    say(str(found))
    trial = None
    if (flags.trial or flags.report) and not found.is_refused:
        trial = run(configuration.resolve(given, file=configuration.default_path()), say)
        shown["trial"] = trial.to_dict()
    if trial is not None and flags.report:
        text = json_text(trial.to_dict(), indent=2)
        say(text)
        say(write(trial, flags.report, text))
    if flags.json:
        print(json_text(shown, indent=2))
    return not found.is_refused and (trial is None or trial.passed)


def _say_nothing(_: str) -> None: ...


def write(trial: Trial, path: pathlib.Path, text: str) -> str:
    """Write the report, which has been shown as ``text``, and return a sentence about it.

    Raises:
        ConfigError: The file can't be written.
    """
    try:
        path.write_text(f"{text}\n", encoding="utf-8")
    except OSError as error:
        what = f"The report can't be written to {path}: {error.strerror}."
        raise ConfigError(what, fix="--report FILE, in a folder that you may write to") from None
    outcome = "went well" if trial.passed else "did not all go well"
    return (
        f"The checks {outcome}. Written as it is shown above: {path}. It has no names and no paths. Please attach it "
        "to a bug report, also if all went well: it tells on which devices this package works."
    )
