"""Why a rank has failed, and what to do about it, where the failure itself doesn't say so."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Mapping

from notebook_accel import code_places
from notebook_accel.errors import SupervisorLostError
from notebook_accel.formatting import format_size
from notebook_accel.launching.state.rank import CRASH
from notebook_accel.protocol.agent_messages import Reason
from notebook_accel.protocol.events import Ended, Failed, Memory, MemoryShortage

__all__ = ["of_crash", "of_death", "of_exception", "of_lost_process", "of_shortage"]

_KILLED = "Nothing of notebook-accel sent it."
_CRASHED = "Native code has crashed, below the first of the lines of Python that are shown here, the innermost first."
_OURS = f'  File "{code_places.OURS}'
_LESS_MEMORY = "fewer ranks, fewer DataLoader workers or smaller batches: each rank holds all that it loads"
_LESS_DEVICE_MEMORY = "smaller batches with more gradient_accumulation_steps, or mixed_precision='bf16'"
_NO_SHARED_MEMORY = "Most often there is no room left in /dev/shm, through which DataLoader workers send their batches."
_MORE_SHARED_MEMORY = "fewer DataLoader workers, or a larger /dev/shm (docker run --shm-size=8g)"
_BUILT_IN_THE_FUNCTION = "Or memory was short: under fork, each rank may have built a model for itself"
_EACH_ITS_OWN = "{ranks} ranks each built their own model, if the function builds it."
_BUILD_OUTSIDE = (
    "if the function builds the model, build it in another cell and pass it as an argument: ranks then share it"
)
_NO_DEBUGGER = "A rank has no keyboard, so a debugger that asks in it ends at once."
_DEBUG_ELSEWHERE = "--start_method inline, in which pdb works; in a session, %distributed debug after an error"
# What torch's DataLoader says of a worker that was killed.
_LOST_WORKER = re.compile(r"DataLoader worker \(pid.*(killed by signal: Killed|exited unexpectedly)", re.DOTALL)


def of_death(end: Ended, *, start_method: str, ranks: int) -> tuple[str, str, str]:
    """What to add to how a rank died, why it may have, and what to do.

    Args:
        end: How it died.
        start_method: How the ranks came into being.
        ranks: How many there are.
    """
    if end.signal == signal.SIGKILL:
        if end.shortage is None:
            return "", _KILLED, ""
        used = f"The rank had used up to {format_size(end.peak_bytes)}. " if end.peak_bytes else ""
        fix = f"{_BUILD_OUTSIDE}; or {_LESS_MEMORY}" if start_method == "fork" else _LESS_MEMORY
        return ": out of host memory", used + of_shortage(end.shortage), fix
    if end.signal == signal.SIGBUS:
        return "", _NO_SHARED_MEMORY, _MORE_SHARED_MEMORY
    if end.signal == signal.SIGSEGV and start_method == "fork":
        if end.shortage is None:
            many = "is one of them" if ranks == 1 else f"are {ranks} of them"
            used = (
                f": this rank had used up to {format_size(end.peak_bytes)}, and there {many}" if end.peak_bytes else ""
            )
            return "", f"{_CRASHED} {_BUILT_IN_THE_FUNCTION}{used}.", _BUILD_OUTSIDE
        used = f"This rank had used up to {format_size(end.peak_bytes)}; " if end.peak_bytes else ""
        why = used + _EACH_ITS_OWN.format(ranks=ranks)
        return ": out of host memory", f"{of_shortage(end.shortage)} {why}", _BUILD_OUTSIDE
    if end.signal in (signal.SIGSEGV, signal.SIGABRT, signal.SIGILL, signal.SIGFPE):
        return "", _CRASHED, ""
    return "", "", ""


def of_crash(written: str) -> str:
    """The lines of the user's that had called native code when it crashed, the innermost first; empty if not known.

    Args:
        written: What the rank wrote to its standard error from its crash on.
    """
    frames = []
    for line in written.partition(CRASH)[2].splitlines():
        if line.startswith(_OURS):
            break  # who has called the user's code
        if line.startswith('  File "'):
            frames.append(line)
    return "\n".join(frames)


def of_exception(
    failed: Failed, end: Ended | None, memory: Mapping[int, Memory], left_out: Mapping[str, str] = {}
) -> tuple[str, str]:
    """Why a rank may have raised what it did, and what to do.

    Args:
        failed: What it raised.
        end: How its process ended, if it has.
        memory: What each rank had last said of its memory.
        left_out: Names that couldn't be sent, with the reason.
    """
    if failed.kind == "OutOfMemoryError":  # torch's, for every kind of device
        used = [
            f"rank {rank}: {format_size(said.used_bytes)} of {format_size(said.total_bytes)}"
            + (" of the host's" if said.kind == "host" else "")
            for rank, said in sorted(memory.items())
        ]
        return f"Memory in use then, {', '.join(used)}." if used else "", _LESS_DEVICE_MEMORY
    if end is not None and end.shortage is not None and _LOST_WORKER.search(failed.message):
        return f"Out of host memory. {of_shortage(end.shortage)}", _LESS_MEMORY
    if failed.kind == "BdbQuit":
        return _NO_DEBUGGER, _DEBUG_ELSEWHERE
    return "", _of_missing_name(failed, left_out)


def _of_missing_name(failed: Failed, left_out: Mapping[str, str]) -> str:
    """A name that the notebook has and the rank doesn't couldn't be sent, or can't be seen in the source."""
    found = re.fullmatch(r"name '(\w+)' is not defined", failed.message) if failed.kind == "NameError" else None
    if found is None or found[1] not in vars(sys.modules["__main__"]):
        return ""
    if found[1] in left_out:
        return f"assign {found[1]!r} in the cell before it is used. The notebook's own {left_out[found[1]]}"
    return f"the notebook has {found[1]!r}, but the code doesn't name it in a way that can be seen: --push {found[1]}"


def of_shortage(shortage: MemoryShortage) -> str:
    """How short of memory the machine was, in a sentence or two."""
    whose = "the machine" if shortage.is_machine else "the container"
    left = f"Of the {format_size(shortage.limit_bytes)} that {whose} has, {format_size(shortage.free_bytes)} were left."
    killer = "The system's out-of-memory killer has ended a process." if shortage.was_seen else "Nobody else says why."
    return f"{left} {killer}"


def of_lost_process(reason: Reason, shortage: MemoryShortage | None) -> SupervisorLostError:
    """The error of a run that has lost the process that its ranks were forked from, or its elastic process."""
    if reason == "elastic lost":
        what = "The process that decides about this run's restarts has died, and the ranks were stopped."
    else:
        what = "The process that the ranks were forked from has died, and the ranks with it."
    why = f"Out of host memory. {of_shortage(shortage)}" if shortage else "Something killed it."
    return SupervisorLostError(what, why=why, fix="run the cell again: a new one is started")
