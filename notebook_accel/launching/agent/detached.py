"""The agent of a detached run: it outlives the kernel, and has a journal and a socket for later kernels."""

from __future__ import annotations

import os
import pathlib
import signal

from notebook_accel.launching.agent.agent import Agent
from notebook_accel.launching.agent.audience import Attachments
from notebook_accel.launching.run_folders import RunFolder
from notebook_accel.protocol.channel import Connection


def main(launcher: str, folder: str, lock: str) -> None:
    """Run the agent in a fork, as a daemon. The launching kernel starts the interpreter that calls this.

    Args:
        launcher: Descriptor of the connection to the launching kernel.
        folder: The run's folder, with the facts of the launch.
        lock: Descriptor that holds the folder's lock until this process ends.
    """
    if os.fork():
        os._exit(0)  # the child is then an orphan, which init reaps
    os.setsid()
    for number in (signal.SIGINT, signal.SIGHUP):  # from a terminal; SIGTERM ends the run, with its grace period
        signal.signal(number, signal.SIG_IGN)
    os.set_inheritable(int(lock), False)
    run_folder = RunFolder(pathlib.Path(folder))
    connection = Connection.from_descriptor(int(launcher))
    os.set_inheritable(connection.fileno(), False)
    attachments = Attachments(run_folder, connection, run_folder.facts.world_size)
    agent = Agent(attachments)
    agent.handle_sigterm()
    agent.serve()
    attachments.close()
    if not attachments.is_launched:  # the kernel has gone before the launch
        run_folder.remove()
