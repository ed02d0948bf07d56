"""Preloaded by templates in tests: node 0's elastic process looks around just when its own ranks have ended, too.

It has looked at its ranks before, so that its next order crosses with the word of their end. Only in runs that ask for
it by their ``rdzv_id``, and before their first restart.
"""

from __future__ import annotations

import socket
import time

from notebook_accel.launching.elastic import elastic_agent, nodes

_PATIENCE_S = 10.0  # shorter than the silence after which node 0 is taken to have gone
_look = elastic_agent.ElasticAgent._take_messages


def _look_and_wait(agent: elastic_agent.ElasticAgent) -> None:
    _look(agent)
    around = agent._nodes
    if agent._order.options.run_id != "late looks" or agent._restarts or around is None or around.rank != 0:
        return
    until_s = time.monotonic() + _PATIENCE_S
    while time.monotonic() < until_s and not (_has_other_failed(around) and _is_end_waiting(agent)):
        time.sleep(0.01)


def _has_other_failed(around: nodes.NodeRound) -> bool:
    key = "status/1"
    return around._store.check([key]) and nodes._status.decode(around._store.get(key)).state == "failed"


def _is_end_waiting(agent: elastic_agent.ElasticAgent) -> bool:
    connection = agent._connection
    return connection.has_news and b"RanksEnded" in connection._connection._socket.recv(1 << 16, socket.MSG_PEEK)


elastic_agent.ElasticAgent._take_messages = _look_and_wait  # type: ignore[method-assign]
