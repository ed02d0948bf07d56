"""The elastic process of a run: torch elastic, with ranks that our agent starts and stops.

Nothing here forks: it has the threads of torch's stores. It is itself a fork of the template, and ends with it. torch
elastic's own workers, signal handlers and logs stay out of it: the ranks are what they are in every other run.

It, what it runs (``elastic_agent``) and how nodes meet (``rendezvous``) are the only modules of the launching room that
import torch; nothing but the template, by this one's name, imports them.
"""

from __future__ import annotations

import os
import signal
import socket
import traceback

from torch.distributed.elastic.agent.server import api
from torch.distributed.elastic.rendezvous.api import RendezvousHandler

from notebook_accel import environment
from notebook_accel.launching.elastic import rendezvous
from notebook_accel.launching.elastic.elastic_agent import ElasticAgent, LeaveError, Line
from notebook_accel.launching.elastic.nodes import Patience
from notebook_accel.launching.elastic.rendezvous import RefusedError
from notebook_accel.protocol import agent_messages as messages
from notebook_accel.protocol import elastic_messages
from notebook_accel.protocol.channel import ClosedError, Connection

__all__ = ["run"]

_ROLE = "default_role"  # as torch elastic's launcher calls it
_SHORTEST_S = 1e-3


def run(order: messages.ForkElastic, descriptors: list[int]) -> int:
    """The process; its exit status. The descriptors are those of the order."""
    signal.signal(signal.SIGCONT, signal.SIG_DFL)
    # SIGTERM stays ignored, as in the template: the agent ends this process when it has stopped the ranks.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    # Where torch elastic shares its own store with ranks, as here they have another one, a node that comes later waits
    # for ever for an address that is said in the first round only (seen with torch 2.13).
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    api._get_fq_hostname = socket.gethostname  # its events have a full name, and to ask for that can take long
    line = Line(Connection.from_descriptor(descriptors[0]), order)
    try:
        line.say(_run(order, line, descriptors[1:]))
    except (ClosedError, LeaveError):  # the agent has gone, and ends its ranks so; or it ends them itself
        return 1
    return 0


def _run(order: messages.ForkElastic, line: Line, results: list[int]) -> elastic_messages.Over:
    agent: ElasticAgent | None = None
    try:
        agent = ElasticAgent(_spec(order, line), line, order, results)
        result = agent.run()
        has_succeeded = result is not None and not result.is_failed()
        return elastic_messages.Over(has_succeeded=has_succeeded, failure=agent.elsewhere)
    except RefusedError as refused:
        return elastic_messages.Over(refusal=refused.broken)
    except (ClosedError, LeaveError):
        raise
    except Exception as error:  # noqa: BLE001 - of torch elastic, which has many
        text = f"The process that decides about this run's restarts has failed: {type(error).__name__}: {error}"
        return elastic_messages.Over(refusal=messages.Broken(text=text, why=traceback.format_exc()))
    finally:
        if agent is not None:
            agent.leave()


def _spec(order: messages.ForkElastic, line: Line) -> api.WorkerSpec:
    options, meeting = order.options, order.options.meeting
    if meeting is None:
        handler: RendezvousHandler = rendezvous.Alone(options.run_id)
    elif meeting.backend == "static":
        handler = rendezvous.Static(options, meeting, Patience(), line.say_that_it_waits)
    else:
        line.say_that_it_waits(f"waiting for {meeting.num_nodes} nodes at {meeting.host}:{meeting.port}")
        handler = rendezvous.dynamic(options, meeting, environment.address_towards(meeting.host, meeting.port))
    return api.WorkerSpec(
        role=_ROLE,
        local_world_size=order.world_size,
        rdzv_handler=handler,
        entrypoint="ranks",  # in events that nobody takes
        max_restarts=options.max_restarts,
        # It sleeps so long before each look; the look itself waits for what the agent says.
        monitor_interval=_SHORTEST_S,
    )
