"""The store through which ranks find each other: on loopback only, and good for more than one process group.

Runs in a rank. torch's store has no authentication: whatever process of this machine connects to the port can read and
change keys, though not make a rank run anything.
"""

from __future__ import annotations

import importlib
import itertools
import os
from collections.abc import Iterator
from typing import Any

from notebook_accel.environment import RankPlace

__all__ = ["join", "serve"]


_served: list[Any] = []  # a store serves for as long as it is referred to, and other ranks may need it to their end


def serve(place: RankPlace, listening: int) -> None:
    """Serves the store on a socket that listens already, until this process ends.

    Left to itself, torch's store listens on every interface.
    """
    store = importlib.import_module("torch.distributed").TCPStore(
        place.master_addr,
        place.master_port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listening,
    )
    _served.append(store)


def join() -> None:
    """Has ``init_process_group`` use the store that is served, under keys of their own for each group that is made.

    The variables are torch's own protocol for a store that is there already. It has every group use the same keys, so
    that a group made after one was destroyed finds its predecessor's addresses and waits for ever; hence the prefix.
    """
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0")
    distributed = importlib.import_module("torch.distributed")
    rendezvous = importlib.import_module("torch.distributed.rendezvous")
    from_environment = rendezvous._rendezvous_handlers["env"]
    groups = itertools.count()

    def handler(url: str, **kwargs: Any) -> Iterator[tuple[Any, int, int]]:
        for store, rank, world_size in from_environment(url, **kwargs):
            yield distributed.PrefixStore(f"group_{next(groups)}", store), rank, world_size

    rendezvous._rendezvous_handlers["env"] = handler  # a second registration of a scheme is refused
