"""Troubles that can happen to a run: how to cause each, and how the cell may end after it."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator

from tests import kernels, processes

__all__ = ["TROUBLES", "Round", "Trouble", "may_mount", "standing"]

_APPEARS_S = 30.0
_ENDS_S = 40.0  # far longer than any promise: what is looked for here is a hang
_STEPS = 150

_CELL = """%%distributed --num_processes {ranks} --start_method {start_method} --grace_s 0.5 --name chaos {options}
import os, time, torch
from notebook_accel import Accelerator
accelerator = Accelerator()
model = accelerator.prepare(torch.nn.Linear(8, 1))
rank = accelerator.process_index
for step in range({steps}):
    {happens}
    accelerator.backward(model(torch.ones(4, 8)).sum())
    time.sleep(0.004)
rank
"""


@dataclasses.dataclass
class Round:
    """One launch and what happens to it.

    Attributes:
        kernel: Where it is launched.
        ranks: How many.
        start_method: How they come into being.
        victim: The rank that it happens to.
        moment_s: When it happens, counted from the appearance of what it happens to.
        step: When it happens, for what the code itself does.
        folder: For files.
    """

    kernel: kernels.Kernel
    ranks: int
    start_method: str
    victim: int
    moment_s: float
    step: int
    folder: pathlib.Path

    @classmethod
    def draw(cls, rng: random.Random, kernel: kernels.Kernel, folder: pathlib.Path) -> Round:
        """A random one."""
        ranks = rng.randint(1, 3)
        return cls(
            kernel=kernel,
            ranks=ranks,
            start_method=rng.choice(("spawn", "spawn", "fork")),
            victim=rng.randrange(ranks),
            moment_s=rng.uniform(0, 0.8),
            step=rng.randrange(_STEPS // 3),
            folder=folder,
        )

    def __str__(self) -> str:
        ranks = f"{self.ranks} ranks by {self.start_method}"
        return f"{ranks}, rank {self.victim}, after {self.moment_s:.2f} s or at step {self.step}"

    def start(self, happens: str = "pass", options: str = "") -> kernels.Cell:
        """Launches."""
        code = _CELL.format(
            ranks=self.ranks, start_method=self.start_method, steps=_STEPS, happens=happens, options=options
        )
        return self.kernel.start(code)

    def start_and_find(self, who: str) -> tuple[kernels.Cell, processes.Process]:
        """Launches, and at the round's moment gives the process of the ``agent``, the ``template`` or the victim."""
        cell = self.start()
        processes.wait_until(self._ranks, "the ranks are there", _APPEARS_S)
        time.sleep(self.moment_s)  # the randomness of it
        agent, *templates = standing(self.kernel)
        ranks = self._ranks()
        parents = [process for process in self.kernel.descendants() if ranks and process.pid == ranks[0].parent]
        template = [*parents, *templates][0]  # a run that was faster has none any more
        return cell, {"agent": agent, "template": template, "rank": [*ranks[self.victim :], template][0]}[who]

    def _ranks(self) -> list[processes.Process]:
        """Each leads a session of its own, as else only the agent does."""
        agents = {process.pid for process in standing(self.kernel)[:1]}
        below = self.kernel.descendants()
        ranks = [process for process in below if process.session == process.pid and process.pid not in agents]
        return sorted(ranks, key=lambda process: process.pid)


def standing(kernel: kernels.Kernel) -> list[processes.Process]:
    """The kernel's agent and its template, as far as they are there."""
    agents = [process for process in processes.children(kernel.pid) if processes.is_agent(process)]
    templates = [process for agent in agents for process in processes.children(agent.pid)]
    return [process for process in (*agents, *templates) if process.is_alive]


@dataclasses.dataclass(frozen=True)
class Trouble:
    """Something that happens.

    Attributes:
        name: What it is.
        happen: Launches and lets it happen; returns the cell's end, ``None`` if the kernel has died.
        expected: Matches what the cell showed; empty if the run has to succeed.
        may_succeed: Whether the run may have been over before it happened.
        needs_mount: Whether a disk has to be mounted for it, which not every user may.
    """

    name: str
    happen: Callable[[Round], kernels.Outcome | None]
    expected: str = ""
    may_succeed: bool = True
    needs_mount: bool = False

    def check(self, round_: Round, outcome: kernels.Outcome | None) -> str:
        """Asserts that the end was one of the right ones; returns it in a few words."""
        if outcome is None:
            return "the kernel is gone"
        if outcome.status == "ok" and (self.may_succeed or not self.expected):
            assert outcome.result == str(list(range(round_.ranks))), outcome
            return "succeeded"
        shown = re.sub(r"\x1b\[[0-9;]*m", "", outcome.traceback)
        wanted = self.expected.format(victim=round_.victim, ranks=round_.ranks)
        assert wanted, f"the run has to succeed, and showed:\n{shown}"
        assert re.search(wanted, shown), f"{wanted!r} is not in:\n{shown}\nstdout: {outcome.stdout}"
        return outcome.error_name


def _at_its_step(round_: Round, statement: str) -> str:
    return f"if (rank, step) == ({round_.victim}, {round_.step}): {statement}"


def _raises(round_: Round) -> kernels.Outcome:
    return round_.start(f"if (rank, step) == ({round_.victim}, {round_.step}): raise ValueError('chaos')").finish(
        _ENDS_S
    )


def _exits(round_: Round) -> kernels.Outcome:
    return round_.start(_at_its_step(round_, "os._exit(7)")).finish(_ENDS_S)


def _prints(round_: Round) -> kernels.Outcome:
    prints = "print('\\n'.join(f'line {n}' for n in range(1_000_000)))"
    return round_.start(_at_its_step(round_, prints)).finish(2 * _ENDS_S)


def _disk_full(round_: Round) -> kernels.Outcome:
    """Logs go to a disk of 64 KiB."""
    with small_disk(round_.folder / "disk") as disk:
        prints = "print('x' * 2000)"
        return round_.start(prints, f"--log_dir {disk}").finish(_ENDS_S)


@contextlib.contextmanager
def small_disk(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """A disk of 64 KiB."""
    folder.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        # Lazily: the kernel's last run still has its logs open.
        subprocess.run(["umount", "--lazy", folder], check=True)


def may_mount(folder: pathlib.Path) -> bool:
    """Return whether this user may mount filesystems in this container."""
    try:
        with small_disk(folder):
            return True
    except (OSError, subprocess.CalledProcessError):
        return False


def _signalled(who: str, number: signal.Signals) -> Callable[[Round], kernels.Outcome]:
    def happen(round_: Round) -> kernels.Outcome:
        cell, process = round_.start_and_find(who)
        processes.kill(process, number)
        if number == signal.SIGSTOP:  # nothing ends by it: the user notices, and interrupts
            round_.kernel.interrupt()
        return cell.finish(_ENDS_S)

    return happen


def _interrupted(times: int) -> Callable[[Round], kernels.Outcome]:
    def happen(round_: Round) -> kernels.Outcome:
        cell, _ = round_.start_and_find("agent")
        for _ in range(times):
            round_.kernel.interrupt()
        return cell.finish(_ENDS_S)

    return happen


def _kernel_killed(round_: Round) -> None:
    round_.start_and_find("agent")
    round_.kernel.kill()


_LOST = "SupervisorLostError"
_INTERRUPT = "KeyboardInterrupt"

TROUBLES = (
    Trouble("exception", _raises, "rank {victim} of {ranks} failed at .*ValueError: chaos", may_succeed=False),
    Trouble("os._exit", _exits, "rank {victim} of {ranks} exited with status 7", may_succeed=False),
    Trouble("10^6 lines", _prints),
    Trouble("a full log disk", _disk_full, needs_mount=True),
    Trouble("SIGKILL of a rank", _signalled("rank", signal.SIGKILL), r"killed by SIGKILL|" + _LOST),
    Trouble("SIGSEGV of a rank", _signalled("rank", signal.SIGSEGV), r"killed by SIGSEGV|" + _LOST),
    Trouble("SIGSTOP of a rank", _signalled("rank", signal.SIGSTOP), _INTERRUPT),
    *(
        Trouble(f"{number.name} of the {who}", _signalled(who, number), _LOST)
        for who in ("agent", "template")
        for number in (signal.SIGKILL, signal.SIGSEGV)
    ),
    *(
        Trouble(f"SIGSTOP of the {who}", _signalled(who, signal.SIGSTOP), f"{_INTERRUPT}|{_LOST}")
        for who in ("agent", "template")
    ),
    Trouble("interrupt", _interrupted(1), _INTERRUPT),
    Trouble("double interrupt", _interrupted(2), _INTERRUPT),
    Trouble("kernel killed", _kernel_killed),
)
