"""Preloaded by templates in tests: node 0's wall clock is a minute ahead for torch elastic's rendezvous.

Only in runs that ask for it by their ``rdzv_id``. A process's own wall clock can't be moved without the machine's.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from notebook_accel.launching.elastic import rendezvous
from notebook_accel.protocol.agent_messages import ElasticOptions

_AHEAD = datetime.timedelta(seconds=60)
_dynamic = rendezvous.dynamic


class _Ahead(datetime.datetime):
    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> Any:
        return datetime.datetime.now(tz) + _AHEAD


def _dynamic_with_clock(options: ElasticOptions, waits: Callable[[str], None]) -> Any:
    if options.run_id == "clocks apart" and options.meeting.node_rank == 0:
        dynamic_rendezvous.datetime = _Ahead  # type: ignore[misc]
    return _dynamic(options, waits)


rendezvous.dynamic = _dynamic_with_clock
