"""Compares a launch on a warm Ray cluster with plain Ray actors: two nodes on this machine, one rank on each.

    python -m benchmarks.ray_launch --rounds 7

A plain actor imports ``torch.distributed`` by itself, as code that uses Ray Core alone would. For the payload, the
floor is the time that Ray takes to bring the bytes to both nodes: one ``ray.put`` and two ``ray.get``.
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from notebook_accel import notebook_launcher
from notebook_accel.protocol import agent_messages, events

_OPTIONS = {"strategy": "SPREAD"}
_MODEL_BYTES = 100_000_000
_RANKS_IN_A_BATCH = 1024


def main() -> int:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    ray: Any = importlib.import_module("ray")
    cluster = importlib.import_module("ray.cluster_utils").Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    try:
        _measure(ray, rounds)
    finally:
        ray.shutdown()
        cluster.shutdown()
    _measure_batches(rounds)
    return 0


def _measure(ray: Any, rounds: int) -> None:
    model = torch.ones(_MODEL_BYTES // 4)
    ways: dict[str, Callable[[], object]] = {
        "ours": lambda: notebook_launcher(_nothing, (), 2, engine="ray", engine_options=_OPTIONS, view="none"),
        "plain Ray actors": lambda: _plain_actors(ray),
        "ours, 100 MB": lambda: notebook_launcher(
            _look, (model,), 2, engine="ray", engine_options=_OPTIONS, view="none"
        ),
        "one put, two gets": lambda: _put_and_get(ray, model),
    }
    ways["ours"]()  # starts the nodes' hosts, as the first run in a notebook does
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        names = list(ways)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            while ray.available_resources().get("CPU", 0) < 2:  # Ray takes a while to free the CPUs of the previous one
                time.sleep(0.05)
            began_s = time.perf_counter()
            ways[name]()
            times[name].append(1e3 * (time.perf_counter() - began_s))
    print(f"\nwarm cluster, 2 nodes, 2 ranks, medians of {rounds}")
    for name, measured in times.items():
        print(f"{name:20} {statistics.median(measured):9.1f} ms")


def _nothing() -> int:
    return int(os.environ["RANK"])


def _look(model: torch.Tensor) -> float:
    return float(model.sum())


def _plain_actors(ray: Any) -> None:
    scheduling = importlib.import_module("ray.util.scheduling_strategies")
    groups = importlib.import_module("ray.util.placement_group")
    group = groups.placement_group([{"CPU": 1}] * 2, strategy="SPREAD")
    actor = ray.remote(_Actor)
    strategies = [scheduling.PlacementGroupSchedulingStrategy(group, bundle) for bundle in (0, 1)]
    actors = [actor.options(num_cpus=1, scheduling_strategy=strategy).remote() for strategy in strategies]
    ray.get([actor.run.remote() for actor in actors])
    for actor in actors:
        ray.kill(actor)
    groups.remove_placement_group(group)


class _Actor:
    def run(self) -> int:
        importlib.import_module("torch.distributed")
        return 1


def _put_and_get(ray: Any, model: torch.Tensor) -> None:
    reference = ray.put(model.numpy())
    reader = ray.remote(_Reader)
    affinity = importlib.import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy
    global _readers
    if not _readers:
        nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
        _readers = [reader.options(num_cpus=0, scheduling_strategy=affinity(node, False)).remote() for node in nodes]
        ray.get([actor.read.remote(reference) for actor in _readers])
        reference = ray.put(model.numpy())
    ray.get([actor.read.remote(reference) for actor in _readers])


_readers: list[Any] = []


class _Reader:
    def read(self, data: Any) -> float:
        return float(data.sum())


def _measure_batches(rounds: int) -> None:
    """Measure the kernel's work on a message with samples of many ranks; it gets five a second."""
    bodies = [
        agent_messages.encode(agent_messages.Said(job_id="1", rank=rank, event=msgspec.Raw(events.encode(event))))
        for rank in range(_RANKS_IN_A_BATCH)
        for event in (
            events.Progress(step=rank, steps=rank, total=1000, epoch=1, epochs=3),
            events.Metrics(step=rank, values={"loss": 0.5, "accuracy": 0.9}),
        )
    ]
    state = importlib.import_module("notebook_accel.launching.state.run").RunState(_RANKS_IN_A_BATCH)
    measured = []
    for _ in range(rounds):
        began_s = time.process_time()
        for body in bodies:
            said = agent_messages.decode_for_kernel(body)
            assert isinstance(said, agent_messages.Said)
            state.apply(said.rank, events.decode(bytes(said.event)))
        measured.append(1e3 * (time.process_time() - began_s))
    taken = statistics.median(measured)
    size_kib = sum(map(len, bodies)) >> 10
    print(f"\n{len(bodies):,} samples of {_RANKS_IN_A_BATCH:,} ranks: {size_kib} KiB, {taken:.1f} ms in the kernel")
    print(f"five such a second: {taken * 5 / 10:.1f} % of a core")


if __name__ == "__main__":
    sys.exit(main())
