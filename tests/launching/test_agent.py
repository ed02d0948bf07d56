"""The agent between what a template says of a rank and what the rank says itself, which come in any order."""

from __future__ import annotations

import signal
import subprocess
import sys

_RANK_SAYS_IT_FIRST = """
import os, subprocess
from notebook_accel import events
from notebook_accel.channel import Connection
from notebook_accel.launching import messages
from notebook_accel.launching.supervision import agent, forking, runs

launch = messages.Launch(
    job_id="1", world_size=1, port=0, grace_s=60.0, timeout_s=None, log_folder="", idle_timeout_s=1
)
kernel, theirs = Connection.pair()
made = agent.Agent(theirs, os.getpid())
run = runs.Run(launch, [])
rank, line, _ = forking.open_rank(launch, 0, lambda _: None)
run.put(rank)
process = subprocess.Popen(["sleep", "60"])
line.send(events.encode(events.Started(pid=process.pid)))
made._read_rank(run, rank)
run.end("interrupt")
print(process.wait(20))
"""


def test_rank_is_interrupted_in_its_code_also_if_its_template_has_not_said_yet_that_it_is_there() -> None:
    command = [sys.executable, "-c", _RANK_SAYS_IT_FIRST]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == f"{-signal.SIGINT}\n", done.stderr
