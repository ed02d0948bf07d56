"""What a rank is forked with: its line to the agent, its log, and a file for its stacks. Runs in the agent."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

from notebook_accel.launching.agent.output import Allowance, LogTail, open_log
from notebook_accel.launching.agent.runs import Rank, Run
from notebook_accel.launching.stack_dumps import dump_file
from notebook_accel.protocol import agent_messages as messages
from notebook_accel.protocol.channel import Connection
from notebook_accel.protocol.events import Output

__all__ = ["open_rank", "order"]


def open_rank(launch: messages.Launch, number: int, say: Callable[[Output], None]) -> tuple[Rank, Connection, str]:
    """Opens what the agent and a rank share.

    Args:
        launch: The run's.
        number: The rank.
        say: Takes what it prints.

    Returns:
        The rank, which owns the agent's ends; its own end of the line, for the caller to close; and what to tell the
        user about its log, empty if it is as it should be.

    Raises:
        OSError: There is no room for it. Nothing is left open.
    """
    with contextlib.ExitStack() as opened:
        ours, theirs = Connection.pair()
        opened.callback(ours.close)
        opened.callback(theirs.close)
        ours.set_blocking(False)
        log, complaint = open_log(launch.log_folder, number)
        opened.callback(os.close, log)
        rank = Rank(number, ours, LogTail(log, Allowance(launch.world_size), say), dump_file(number))
        opened.pop_all()
    return rank, theirs, complaint


def order(run: Run, rank: Rank, theirs: Connection) -> tuple[bytes, list[int]]:
    """The message to the template, and the descriptors that go with it."""
    payload, *results = run.descriptors
    place, variables = run.place_of(rank.number)
    listening = [run.store.fileno()] if run.store is not None and place.rank == 0 else []
    fork = messages.Fork(
        job_id=run.launch.job_id, rank=rank.number, place=place, listens=bool(listening), variables=variables
    )
    files = [payload, results[rank.number], theirs.fileno(), rank.log.descriptor, rank.dump, *listening]
    return messages.encode(fork), files
