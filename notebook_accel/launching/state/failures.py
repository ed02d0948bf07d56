"""Errors from the state of a run: the rank that failed first, the reason, advice, and the other ranks' ends."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import pathlib
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from notebook_accel import code_places
from notebook_accel.errors import NodeLostError, RankEnd, RankFailedError, RunError, SupervisorLostError, signal_name
from notebook_accel.formatting import OutputWindow, first_line, format_size, plain_lines
from notebook_accel.launching.state.rank import CRASH, RankState
from notebook_accel.launching.state.run import RunState
from notebook_accel.payload import serialization
from notebook_accel.protocol.agent_messages import Failure, Reason
from notebook_accel.protocol.events import REBUILDING, Ended, Failed, Memory, MemoryShortage

_FIRST_TRACEBACK_LINES, _LAST_TRACEBACK_LINES = 50, 250


def in_a_line(state: RunState) -> str:
    """Return the first failure with its rank in one line; empty if no rank has failed."""
    rank = state.first_failed
    if rank is None:
        return ""
    failed = rank.failed
    if failed is not None:
        return f"rank {rank.number}: {failed.in_words}" + (f" at {failed.line}" if failed.line else "")
    assert rank.ended is not None, "a rank that failed has raised or ended"
    return f"rank {rank.number} {_how_it_died(rank.ended)}"


@dataclasses.dataclass(frozen=True)
class RunErrors:
    """Builds errors from the state of a run."""

    start_method: str  # the ranks'
    unsent: Mapping[str, str] = dataclasses.field(default_factory=dict)  # names that couldn't be sent, with the reason
    by_value: Sequence[Any] = ()  # functions and classes that were sent by value, to which exceptions may refer

    def first(self, state: RunState) -> RankFailedError | None:
        """Return the error of the rank that failed first, ``None`` if no rank has failed."""
        rank = state.first_failed
        if rank is None:
            return None
        error = self.of_rank(state, rank)
        error.others = _others(state, rank)
        return error

    def of_rank(self, state: RunState, rank: RankState) -> RankFailedError:
        """Return the error of a rank that has raised an exception or has died."""
        error = self._died(state, rank) if rank.failed is None else self._raised(state, rank, rank.failed)
        error.last_output = tuple(rank.last_lines)
        return error

    def elsewhere(self, state: RunState, failure: Failure) -> RunError:
        """Return the error of a run that has ended because of a failure on another node."""
        if failure.rank is None:
            line = failure.in_a_line
            return NodeLostError(
                line[:1].upper() + line[1:],
                why="A run needs all of its nodes; the ranks here were stopped.",
                fix="launch it again on all nodes; with max_restarts this one waits for the other to come back",
            )
        error = RankFailedError(
            f"rank {failure.rank} of {state.total_ranks} on {failure.where} failed: {failure.what}",
            rank=failure.rank,
            world_size=state.total_ranks,
            exit_code=failure.status if failure.status >= 0 else None,
            signal=-failure.status if failure.status < 0 else None,
            remote_traceback=failure.traceback.rstrip("\n"),
            others=_others(state, None),
        )
        error.restarts = tuple(event.why for event in state.restartings)
        return error

    def _raised(self, state: RunState, rank: RankState, failed: Failed) -> RankFailedError:
        memory = {other.rank: other.memory for other in state.ranks if other.memory is not None}
        error = raised_error(
            failed, rank.number, state.total_ranks, self.by_value, end=rank.ended, memory=memory, unsent=self.unsent
        )
        error.exit_code = 1
        return error

    def _died(self, state: RunState, rank: RankState) -> RankFailedError:
        end = rank.ended
        assert end is not None, "a rank that failed has raised or ended"
        of_what, why, fix = explain_death(end, start_method=self.start_method, ranks=state.total_ranks)
        return RankFailedError(
            f"rank {rank.number} of {state.total_ranks} {_how_it_died(end)}{of_what}.",
            rank=rank.number,
            world_size=state.total_ranks,
            why=why,
            fix=fix,
            remote_traceback=crash_frames(rank.crash),
            exit_code=end.exit_code,
            signal=end.signal,
        )


def _others(state: RunState, reported: RankState | None) -> tuple[RankEnd, ...]:
    return tuple(_end_of(rank, rank.ended) for rank in state.ranks if rank.ended is not None and rank is not reported)


def _end_of(rank: RankState, end: Ended) -> RankEnd:
    raised = "" if rank.failed is None else rank.failed.in_words
    # A rank may fail by itself in the moment after it was told to end. Then its exception counts.
    return RankEnd(rank.number, end.exit_code, end.signal, end.stopped and not raised, raised, rank.has_result)


def _how_it_died(end: Ended) -> str:
    if end.signal is not None:
        return f"was killed by {signal_name(end.signal)}"
    return f"exited with status {end.exit_code} before its function returned"


def _shown(traceback: str) -> str:
    """Return a rank's traceback, shortened for a notebook. Most of the kept lines are from its end."""
    window = OutputWindow[str](_FIRST_TRACEBACK_LINES, _LAST_TRACEBACK_LINES)
    first = window.add(list(plain_lines(traceback.rstrip("\n"))))
    return "\n".join([*first, *(f"  {gap}" for gap in window.gap()), *window.tail])


def raised_error(
    failed: Failed,
    rank: int,
    world_size: int,
    by_value: serialization.Origins,
    *,
    end: Ended | None = None,
    memory: Mapping[int, Memory] = {},
    unsent: Mapping[str, str] = {},
) -> RankFailedError:
    """Return the error of a rank that has raised something.

    The exception may refer to the functions and classes in ``by_value``. ``end`` is the end of the rank's process,
    ``None`` while it lives; ``memory`` has each rank's last report of its memory.
    """
    why, fix = explain_exception(failed, end, memory, unsent)
    where = f" at {failed.line}" if failed.line else ""
    error = RankFailedError(
        f"rank {rank} of {world_size} failed{where}: {failed.in_words}",
        rank=rank,
        world_size=world_size,
        why=why,
        fix=fix,
        remote_traceback=_shown(failed.traceback),
    )
    error.__cause__ = _cause_of(failed, by_value)
    return error


def where_ranks_stood(failed: Mapping[int, Failed | None]) -> list[str]:
    """Return lines such as ``rank 0 was at In[7], line 12``, for ranks that were interrupted."""
    return [f"rank {rank} was at {raised.line}" for rank, raised in failed.items() if raised and raised.line]


def _cause_of(failed: Failed, by_value: serialization.Origins) -> BaseException:
    """Return the rank's exception, or a stand-in of its name and text if it can't be pickled or unpickled."""
    if failed.exception:
        with contextlib.suppress(Exception):
            cause = serialization.loads(failed.exception, origins=by_value)
            if isinstance(cause, BaseException):
                return cause
    stand_in: type[Exception] = type(failed.kind, (Exception,), {})
    return stand_in(failed.message)


_KILLED = "notebook-accel didn't send the signal."
_CRASHED = "Native code has crashed. The lines of Python that had called it are shown here, the innermost first."
_OURS = f'  File "{code_places.OURS}'
_LESS_MEMORY = "fewer ranks, fewer DataLoader workers or smaller batches: each rank holds all the data that it loads"
_BUILD_OUTSIDE = (
    "if the function builds the model, build it in another cell and pass it as an argument: ranks then share it"
)
# torch's messages about a GPU where it has none, as in the first cells of a notebook that was written on a GPU.
_NO_CUDA = re.compile(
    r"Torch not compiled with CUDA enabled|Found no NVIDIA driver|No CUDA GPUs are available|"
    r"has no attribute '_cuda_setDevice'"
)
_NO_NCCL = re.compile(r"doesn't have NCCL built in|ProcessGroupNCCL is only supported with GPUs")
# Python's messages about a name that ``__main__`` lacks, by their kind. The second is pickle's, about a class.
_MISSING_NAME = {
    "NameError": r"name '(\w+)' is not defined",
    "AttributeError": r"(?=.*(?:__main__|__mp_main__|\bworker_main)')(?:Can't get|module .* has no) attribute '(\w+).*",
}
_MAKE_THERE = "make it inside the cell or the function instead, or keep it out of what the ranks use"
_NO_GPU = "The rank has no GPU that its PyTorch can use."
# The message of torch's DataLoader about a worker that was killed.
_LOST_WORKER = re.compile(r"DataLoader worker \(pid.*(killed by signal: Killed|exited unexpectedly)", re.DOTALL)


def explain_death(end: Ended, *, start_method: str, ranks: int) -> tuple[str, str, str]:
    """Return an addition to the description of a rank's death, its likely reason, and advice."""
    peak = f"had used up to {format_size(end.peak_bytes)}" if end.peak_bytes else ""
    if end.signal == signal.SIGKILL and end.shortage is not None:
        used = f"The rank {peak}. " if peak else ""
        fix = f"{_BUILD_OUTSIDE}; or {_LESS_MEMORY}" if start_method == "fork" else _LESS_MEMORY
        return ": out of host memory", used + describe_shortage(end.shortage), fix
    if end.signal in (signal.SIGKILL, signal.SIGXCPU):
        return "", f"{_KILLED}{_after_limit()}", ""
    if end.signal == signal.SIGBUS:
        why = "Most often there is no room left in /dev/shm, through which DataLoader workers send their batches."
        return "", why, "fewer DataLoader workers, or a larger /dev/shm (docker run --shm-size=8g)"
    if end.signal == signal.SIGSEGV and start_method == "fork":
        if end.shortage is not None:
            used = f"This rank {peak}; " if peak else ""
            why = f"{used}{ranks} ranks each built their own model, if the function builds it."
            return ": out of host memory", f"{describe_shortage(end.shortage)} {why}", _BUILD_OUTSIDE
        many = "is 1 rank" if ranks == 1 else f"are {ranks} ranks"
        used = f": this rank {peak}, and there {many}" if peak else ""
        why = f"Or memory was short: under fork, each rank may have built a model for itself{used}."
        return "", f"{_CRASHED} {why}", _BUILD_OUTSIDE
    if end.signal in (signal.SIGSEGV, signal.SIGABRT, signal.SIGILL, signal.SIGFPE):
        return "", _CRASHED, ""
    return "", "", ""


def _after_limit() -> str:
    limit_s = _limit("RLIMIT_CPU")
    return "" if limit_s is None else f" The system does after {limit_s} s of computing (ulimit -t)."


def _limit(name: str) -> int | None:
    """Return this process's limit, which ranks inherit; ``None`` if it has none."""
    with contextlib.suppress(ImportError):  # Windows, where this module can be imported, lacks it
        resource: Any = importlib.import_module("resource")
        soft: int = resource.getrlimit(getattr(resource, name))[0]
        return None if soft == resource.RLIM_INFINITY else soft
    return None


def crash_frames(written: str) -> str:
    """Return the user's lines that had called native code when it crashed, innermost first, from the rank's output."""
    frames = []
    for line in written.partition(CRASH)[2].splitlines():
        if line.startswith(_OURS):
            break  # this frame and all further ones called the user's code
        if line.startswith('  File "'):
            frames.append(line)
    return "\n".join(frames)


def explain_exception(
    failed: Failed, end: Ended | None, memory: Mapping[int, Memory], unsent: Mapping[str, str] = {}
) -> tuple[str, str]:
    """Return the likely reason of a rank's exception, and advice. The arguments are those of ``raised_error``."""
    if failed.kind == "OutOfMemoryError":  # torch's, for every kind of device
        used = [
            f"rank {rank}: {format_size(report.used_bytes)} of {format_size(report.total_bytes)}"
            + (" of the host's" if report.kind == "host" else "")
            for rank, report in sorted(memory.items())
        ]
        fix = "smaller batches with more gradient_accumulation_steps, or mixed_precision='bf16'"
        return f"Memory in use then, {', '.join(used)}." if used else "", fix
    if end is not None and end.shortage is not None and _LOST_WORKER.search(failed.message):
        return f"Out of host memory. {describe_shortage(end.shortage)}", _LESS_MEMORY
    if failed.kind == "MemoryError" and (limit_bytes := _limit("RLIMIT_AS")) is not None:
        fix = "ulimit -v unlimited, where Jupyter or the shell's command is started; or smaller batches"
        return f"A process may have {format_size(limit_bytes)} of addresses here (ulimit -v).", fix
    if failed.kind == "BdbQuit":
        why = "A rank has no keyboard, so a debugger that waits for input in it ends at once."
        return why, "--start_method inline, in which pdb works; in a session, %distributed debug after an error"
    if _NO_NCCL.search(failed.message):
        return _NO_GPU, "init_process_group() without a backend, which takes gloo on a CPU and nccl on GPUs"
    if _NO_CUDA.search(failed.message):
        return _NO_GPU, "accelerator.device, or 'cuda' only if torch.cuda.is_available()"
    otherwise = _MAKE_THERE if failed.line.startswith(REBUILDING) else ""
    return _of_missing_module(failed) or ("", _of_missing_name(failed, unsent) or otherwise)


def _of_missing_module(failed: Failed) -> tuple[str, str] | None:
    """Return the reason and advice for a module that only the notebook has."""
    found = re.fullmatch(r"No module named '(\w+)'", failed.message) if failed.kind == "ModuleNotFoundError" else None
    file = None if found is None else getattr(sys.modules.get(found[1]), "__file__", None)
    if file is None:
        return None
    path = pathlib.Path(file)
    folder = path.parents[path.stem == "__init__"]
    fix = f"sys.path.append({str(folder)!r})" if path.exists() else "restore it, or restart the kernel"
    return f"The notebook has it from {path}, and ranks find no such file on the notebook's sys.path.", fix


def _of_missing_name(failed: Failed, unsent: Mapping[str, str]) -> str:
    """Return advice for a missing variable that the notebook or an earlier run's ranks had."""
    found = re.fullmatch(_MISSING_NAME.get(failed.kind, r"(?!)"), first_line(failed.message))
    if found is None:
        return ""
    name = found[1]
    if name in unsent and name in vars(sys.modules["__main__"]):
        return f"assign {name!r} in the cell before it is used. The notebook's own {unsent[name]}"
    if name in vars(sys.modules["__main__"]):
        how = f"--push {name}, or a line with {name} in the code"
        return f"the notebook has {name!r}, but the launch couldn't see that the code uses it: {how}"
    if not _was_assigned_in_ranks(name):
        return ""
    return (
        f"an earlier cell assigned {name!r} in its ranks, which have ended, and each launch has ranks of its own. Add "
        f"--pull {name} to that cell to get it into the notebook, or keep ranks between cells with %distributed start"
    )


def _was_assigned_in_ranks(name: str) -> bool:
    """Return whether an earlier ``%%distributed`` cell of the notebook assigns a variable."""
    cells = vars(sys.modules["__main__"]).get("In", [])[:-1]  # IPython's list of the cells' translated code
    begin = r"(?:^|, ['\"])"  # of a line; the first one follows the magic's own arguments
    assignment = re.compile(rf"{begin}(?:[\w, ]*\b{name}\b[\w, ]*=(?!=)|(?:class|def) {name}\b)", re.MULTILINE)
    launched = [cell for cell in cells if "run_cell_magic('distributed'" in cell]
    return any(assignment.search(cell.replace("\\n", "\n")) for cell in launched)


def describe_shortage(shortage: MemoryShortage) -> str:
    """Return a description of a memory shortage, one or two sentences."""
    whose = "the machine" if shortage.is_machine else "the container"
    left = f"Of the {format_size(shortage.limit_bytes)} that {whose} has, {format_size(shortage.free_bytes)} were left."
    killer = "The system's out-of-memory killer has ended a process." if shortage.was_seen else ""
    return f"{left} {killer}".rstrip()


def lost_process_error(reason: Reason, shortage: MemoryShortage | None) -> SupervisorLostError:
    """Return the error of a run that has lost its template or its elastic process."""
    if reason == "elastic lost":
        what = "The process that manages this run's restarts has died, and the ranks were stopped."
    else:
        what = "The process that the ranks were forked from has died, and the ranks with it."
    why = f"Out of host memory. {describe_shortage(shortage)}" if shortage else "Something killed it."
    return SupervisorLostError(what, why=why, fix="run the cell again: a new one is started")
