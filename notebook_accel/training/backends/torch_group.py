"""torch's default process group: its creation, the backends that use it, and explanations of its errors.

The first backend that needs the group creates it. A group of the user's code is used as it is and never destroyed.
"""

from __future__ import annotations

import atexit
import collections
import dataclasses
import datetime
import itertools
import os
import time
import warnings
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # documented, not listed in __all__
from torch.distributed.rendezvous import rendezvous

from notebook_accel import environment, torch_internals
from notebook_accel.environment import RankPlace
from notebook_accel.errors import ConfigError, TrainingError
from notebook_accel.peer_sockets import PeerSockets
from notebook_accel.reporting import reporter
from notebook_accel.training.backends.backend import Backend
from notebook_accel.training.backends.watchdog import CollectiveWatchdog
from notebook_accel.training.handlers import InitProcessGroupKwargs

# Ranks arrive at different times when one of them downloads or unpacks something first.
JOIN_DEADLINE_S = 600.0
_CLOSED = ("Failed to recv", "reset by peer", "Broken pipe")  # torch's errors when a store has ended
_RETRY_PERIOD = datetime.timedelta(seconds=0.2)
_COLLECTIVE_DEADLINE_S = {"cpu": 1800.0, "cuda": 600.0}  # torch's defaults for gloo and NCCL
BACKGROUND = "notebook_accel: in the background"  # the description of the group that background threads use
_MAX_GRADIENT_GROUPS = 4  # each has connections and threads of its own

# A store can outlive a group and keep its keys, or those of an earlier start of these ranks. So each group has its own
# prefix. Ranks run the same program and count alike, from 0 after each restart.
_group_numbers: dict[str, Iterator[int]] = collections.defaultdict(itertools.count)


class Member(Backend, Protocol):
    """A backend that uses the default group."""

    def rejoin(self) -> None:
        """Join the current default group, or create it with the previous one's options if there is none."""


class Group:
    """The default group of this process.

    The last three arguments are given if this package created the group: the deadline of a collective (gloo's, if the
    group has gloo), NCCL's deadline if it has NCCL, and the group's options.

    Attributes:
        members: The backends that use the group.
        gradient_groups: Groups for the gradients of models.
        mesh_groups: Number of groups that meshes have created.
        calls: Number of collectives that backends of this package have begun in the default group.
    """

    def __init__(
        self,
        place: RankPlace,
        sockets: PeerSockets,
        store: Store,
        deadline: datetime.timedelta | None = None,
        nccl_deadline: datetime.timedelta | None = None,
        options: InitProcessGroupKwargs | None = None,
    ) -> None:
        self.options = options
        self.process_group = dist.group.WORLD
        self.members: weakref.WeakSet[Member] = weakref.WeakSet()
        self.gradient_groups: list[dist.ProcessGroup] = []
        self.mesh_groups = 0
        self.calls = 0
        self._background: dist.ProcessGroup | None = None
        self._meshes: dict[tuple[tuple[str, int], ...], Any] = {}
        self._sockets = sockets
        self._deadline = deadline
        self._models = 0
        self._watchdog: CollectiveWatchdog | None = None
        if place.world_size > 1:
            self._watchdog = CollectiveWatchdog(
                PrefixStore("notebook_accel", store),
                place,
                sockets.shut_down,
                None if deadline is None else deadline.total_seconds(),
                warns_before_s=None if nccl_deadline is None else nccl_deadline.total_seconds(),
                progress=self._progress,
            )
            reporter().at_close.append(self._watchdog.close)
            atexit.register(self._watchdog.close)

    def _progress(self) -> list[int]:
        """Return counts that never decrease and are equal on all ranks wherever these have come to the same call.

        Torch's own count of the default group isn't: it has messages between two ranks too.
        """
        gradients = [number for group in self.gradient_groups for number in torch_internals.call_counts(group)]
        return [reporter().stage, self.calls, *gradients]

    def absent_ranks(self) -> list[int]:
        """Return the ranks that will never make this call; see ``CollectiveWatchdog.absent_ranks``."""
        return [] if self._watchdog is None else self._watchdog.absent_ranks()

    def has_gloo_for(self, device: torch.device) -> bool:
        """Return whether gloo transfers tensors on ``device``."""
        return f"{device.type}:gloo" in dist.get_backend_config()

    @property
    def is_current(self) -> bool:
        """True while this is torch's default group."""
        return dist.group.WORLD is self.process_group

    @property
    def was_made_here(self) -> bool:
        """True if this package created the group, False if the user's code did."""
        return self._deadline is not None

    def remove(self, member: Member) -> None:
        """Remove a member. If it was the last one and this package created the group, destroy the group."""
        self.members.discard(member)
        if self.members:
            return
        self.stop_watchdog()
        if self.was_made_here and self.is_current:
            dist.destroy_process_group()

    def has_memory_run_out(self) -> bool:
        """Return whether memory has run out on another rank, which has given up the group."""
        return self._watchdog is not None and self._watchdog.has_memory_run_out()

    def give_up(self) -> None:
        """Give up the group on all ranks, since memory has run out; see ``CollectiveWatchdog.give_up``."""
        if self._watchdog is not None:
            self._watchdog.give_up()

    def stop_watchdog(self) -> None:
        """Stop the watchdog, which tells the other ranks that this one has left."""
        if self._watchdog is not None:
            atexit.unregister(self._watchdog.close)
            reporter().at_close.remove(self._watchdog.close)
            self._watchdog.close()
            self._watchdog = None

    def for_gradients(self, device: torch.device) -> dist.ProcessGroup | None:
        """Return a group for the gradients of one more model, ``None`` for the default group. All ranks call this.

        If gloo matches two unrelated collectives, the process ends if their sizes differ, and the numbers are wrong if
        not. In their own group, gradients can't be matched with another model's or with the calls of a rank that has
        left its loop: the other ranks wait for that rank, and the watchdog can name it.

        A group lives as long as this object: after a backward pass gloo's thread may still need the GIL to release
        Python objects, and destroying its group then would wait for the thread while holding the GIL. So the number of
        groups is limited, and further models share them in turn.
        """
        if not self.has_gloo_for(device):
            return None
        number = self._models % _MAX_GRADIENT_GROUPS
        self._models += 1
        if number == len(self.gradient_groups):
            self.gradient_groups.append(self._new_gloo_group())
        return self.gradient_groups[number]

    def mesh(self, device: torch.device, sizes: Mapping[str, int], joint: Mapping[str, tuple[str, ...]]) -> Any:
        """Return the ``DeviceMesh`` of all ranks with these named dimensions. All ranks call this.

        torch caches results by mesh, and considers meshes with the same ranks and names equal, even if the group of one
        of them was destroyed. So its caches for earlier meshes are cleared.
        """
        key = tuple(sizes.items())
        if key not in self._meshes:
            from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

            torch_internals.forget_meshes()
            names = tuple(sizes)
            group = self.for_gradients(device) or self.process_group if len(sizes) == 1 else None
            before = len(torch_internals.process_groups())
            with self._sockets.opened_inside():
                if group is not None:  # torch itself would use the default group
                    mesh = DeviceMesh.from_group(group, device.type, mesh_dim_names=names)
                else:
                    mesh = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=names)
                for name, dimensions in joint.items():
                    torch_internals.flatten_mesh(mesh, dimensions, name)
            self._meshes[key] = mesh
            self.mesh_groups += len(torch_internals.process_groups()) - before
        return self._meshes[key]

    def for_background(self) -> dist.ProcessGroup:
        """Return the group over which the ranks' background threads exchange objects. All ranks call this."""
        if self._background is None:
            self._background = self._new_gloo_group(BACKGROUND)
        return self._background

    def _new_gloo_group(self, description: str | None = None) -> dist.ProcessGroup:
        with self._sockets.opened_inside():
            made = dist.new_group(timeout=self._deadline, backend="gloo", group_desc=description)
        assert isinstance(made, dist.ProcessGroup)
        return made

    def explain(self, error: RuntimeError) -> None:
        """Raise a better error if ``error`` comes from waiting for other ranks.

        Raises:
            CollectiveError: A wait for other ranks failed. The message says what every rank was doing.
        """
        text = str(error)
        if self._watchdog is not None and (
            isinstance(error, dist.DistError) or "gloo/transport" in text or "pair closure" in text
        ):
            raise self._watchdog.explanation(timed_out="Timed out" in text or "timeout" in text) from error


_current: Group | None = None
_broken: Group | None = None


def enter(place: RankPlace, device: torch.device, options: InitProcessGroupKwargs) -> Group:
    """Return the group of this process; create it if there is none.

    Raises:
        ConfigError: ``MASTER_PORT`` isn't set.
        TrainingError: The other ranks, or their store, weren't there in time.
    """
    global _current
    if _current is not None and not _current.is_current:  # the user's code has destroyed it
        _current.stop_watchdog()
        _current = None
    if not dist.is_initialized():
        _current = _make(place, device, options)
    elif _current is None:
        store = torch_internals.default_store()
        _current = Group(place, PeerSockets(_port_of(store)), store)
    elif options not in (InitProcessGroupKwargs(), _current.options):
        warnings.warn(
            f"{options} has no effect: this process has already joined its group, with other options. "
            "Fix: give it to the first Accelerator or PartialState, or call end_training() before",
            stacklevel=2,
        )
    return _current


def made_here() -> Group | None:
    """Return the default group if this package created it, else ``None``."""
    return _current if _current is not None and _current.is_current and _current.was_made_here else None


def own_calls() -> int:
    """Return the number of collectives that backends of this package have begun in the default group."""
    return _current.calls if _current is not None and _current.is_current else 0


def is_ours() -> bool:
    """Return whether backends of this package use the current default group."""
    return _current is not None and _current.is_current and bool(_current.members)


def break_up() -> tuple[list[Member], int]:
    """Destroy the default group and every other group, even while they are in use.

    The ``Group`` object is kept until the next call, because destroying its gradient groups at once could deadlock, as
    ``Group.for_gradients`` explains.

    Returns:
        The members of the group, and the number of torch's groups that this package didn't create.
    """
    global _broken, _current
    _broken, _current = _current, None
    members: list[Member] = []
    known = 1
    if _broken is not None:
        if _broken.is_current:
            members = list(_broken.members)
            known += len(_broken.gradient_groups) + _broken.mesh_groups + (_broken._background is not None)
        _broken.stop_watchdog()
    others = len(torch_internals.process_groups()) - known
    aborts = environment.is_on(environment.NCCL_ABORT)
    if aborts and "nccl" in dist.get_backend_config():  # destroying waits for the GPU, which waits for other ranks
        torch_internals.abort_process_groups()
    else:
        dist.destroy_process_group()
    return members, others


def current_place() -> RankPlace | None:
    """Return this rank's place in the current group, ``None`` if there is none."""
    if not dist.is_initialized():
        return None
    place = RankPlace.from_environment()
    rank = dist.get_rank()
    local_rank = place.local_rank if "LOCAL_RANK" in os.environ else rank
    return dataclasses.replace(place, rank=rank, world_size=dist.get_world_size(), local_rank=local_rank)


def _make(place: RankPlace, device: torch.device, options: InitProcessGroupKwargs) -> Group:
    if not place.master_port:
        raise ConfigError(
            f"WORLD_SIZE is {place.world_size}, but MASTER_PORT isn't set.",
            why="Ranks find each other through a store at MASTER_ADDR:MASTER_PORT.",
            fix="unset RANK and WORLD_SIZE, or set MASTER_ADDR and MASTER_PORT to the same values on every rank",
        )
    timeout = options.timeout or datetime.timedelta(seconds=JOIN_DEADLINE_S)
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    prefix = f"notebook_accel/{restarts}/{next(_group_numbers[restarts])}"
    try:
        own_store = _meet(place, prefix, timeout)
    except dist.DistError as error:
        raise TrainingError(
            f"Rank {place.rank} of {place.world_size} could not meet the others at "
            f"{place.master_addr}:{place.master_port} within {timeout.total_seconds():g} s.",
            why=str(error),
            fix="check that every rank is running and that all have the same MASTER_ADDR and MASTER_PORT",
        ) from error
    backend = options.backend or ("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    deadline = options.timeout or datetime.timedelta(seconds=_COLLECTIVE_DEADLINE_S[device.type])
    sockets = PeerSockets(_port_of(own_store))
    with sockets.opened_inside():
        dist.init_process_group(
            backend, store=own_store, rank=place.rank, world_size=place.world_size, timeout=deadline
        )
    nccl_deadline = deadline if "nccl" in dist.get_backend_config() else None
    if nccl_deadline is not None and options.timeout is None:
        deadline = _lengthen_gloo() or deadline
    return Group(place, sockets, own_store, deadline, nccl_deadline, options)


def _lengthen_gloo() -> datetime.timedelta | None:
    """Set gloo's deadline to the longer one of CPUs instead of NCCL's; return it, or ``None`` without gloo.

    Calls of the host, such as waiting for a rank that prepares the data, go through gloo.
    """
    try:
        gloo = torch_internals.backend_for(dist.group.WORLD, "cpu")
    except RuntimeError:  # NCCL alone was asked for
        return None
    deadline = datetime.timedelta(seconds=_COLLECTIVE_DEADLINE_S["cpu"])
    torch_internals.set_deadline(gloo, deadline)
    return deadline


def _meet(place: RankPlace, prefix: str, timeout: datetime.timedelta) -> Store:
    """Return the store that rank 0 serves, once all ranks have connected to it.

    A rank retries if it connected to the previous group's store, which closes a moment later with that group.
    """
    deadline_s = time.monotonic() + timeout.total_seconds()
    while True:
        left = datetime.timedelta(seconds=deadline_s - time.monotonic())
        try:
            store = PrefixStore(prefix, next(rendezvous("env://", timeout=left))[0])
            _wait_for_all(store, place, left)
        except dist.DistNetworkError as error:
            was_closed = any(words in str(error) for words in _CLOSED)
            if place.rank == 0 or left < _RETRY_PERIOD or not was_closed:
                raise
            time.sleep(_RETRY_PERIOD.total_seconds())
        else:
            return store


def _wait_for_all(store: Store, place: RankPlace, timeout: datetime.timedelta) -> None:
    """Wait until every rank has connected to the store; the error names the missing ranks."""
    keys = [f"rank {rank}" for rank in range(place.world_size)]
    store.set(keys[place.rank], "here")
    try:
        store.wait(keys, timeout)
    except dist.DistStoreError:
        missing = [key for key in keys if not store.check([key])]
        raise TrainingError(
            f"Rank {place.rank} waited {timeout.total_seconds():.0f} s for the others; missing: {', '.join(missing)}.",
            why="They have ended, or haven't come to their Accelerator yet.",
            fix="make the Accelerator on every rank, before work that takes some ranks longer than others",
        ) from None


def _port_of(store: Store) -> int:
    """Return the port at which a store is served, whatever ``MASTER_PORT`` is by now; 0 for a store in a file."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return int(getattr(store, "port", 0))
