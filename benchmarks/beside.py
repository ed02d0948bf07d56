"""Measures steps and launches of this checkout beside those of an older commit, in one run.

    python -m benchmarks.beside 836c122 --rounds 10

Rounds alternate between the two. Each step is a ratio to plain PyTorch's in paired blocks of the same process, in CPU
time; each launch is a ratio to a plain fork of a kernel in the same round. The table shows the medians.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_DEADLINE_S = 300.0
_PORT = 29_517

Rows = dict[str, float]


def main() -> int:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", nargs="?", help="the older commit")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--blocks", type=int, default=15, help="paired blocks of a round's steps")
    parser.add_argument("--steps-in", choices=["one process", "two ranks"], help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.steps_in:
        print(json.dumps(_steps_in_two_ranks(given.blocks) if "RANK" in os.environ else _steps_alone(given.blocks)))
        return 0
    if not given.commit:
        parser.error("name a commit")
    found: dict[str, dict[str, list[float]]] = collections.defaultdict(lambda: collections.defaultdict(list))
    with _checkout(given.commit) as older:
        trees = {given.commit: older, "now": _ROOT}
        for number in range(given.rounds):
            floor = _launch_times("os.fork", _ROOT)
            for name, tree in list(trees.items())[:: 1 if number % 2 else -1]:
                times = _launch_times("ours, spawn", tree)
                launches = {f"launch, {what}": times[what] / floor[what] for what in times}
                for row, ratio in (_steps(tree, given.blocks) | launches).items():
                    found[row][name].append(ratio)
            print(f"round {number + 1} of {given.rounds}", file=sys.stderr, flush=True)
    print(f"Python {sys.version.split()[0]}, torch {torch.__version__}, medians of {given.rounds} rounds")
    print(f"{'':44}{given.commit:>12}{'now':>12}{'now / then':>12}")
    for row, by_tree in found.items():
        then, now = (statistics.median(by_tree[name]) for name in trees)
        print(f"{row:44}{then:12.3f}{now:12.3f}{now / then:12.3f}")
    return 0


@contextlib.contextmanager
def _checkout(commit: str) -> Iterator[pathlib.Path]:
    """Check a commit out beside this one, as long as the body runs."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        tree = pathlib.Path(folder, "tree")
        subprocess.run(["git", "-C", _ROOT, "worktree", "add", "-q", "--detach", tree, commit], check=True)
        try:
            yield tree
        finally:
            subprocess.run(["git", "-C", _ROOT, "worktree", "remove", "--force", tree], check=True)


def _steps(tree: pathlib.Path, blocks: int) -> Rows:
    """Return the ratios of steps with the package of a checkout, in one process and on two ranks."""

    def started(where: str, **variables: str) -> subprocess.Popen[str]:
        command = [sys.executable, __file__, "--steps-in", where, "--blocks", str(blocks)]
        environment = {**os.environ, "PYTHONPATH": str(tree), **variables}
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)

    alone = _answer(started("one process"))
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_PORT)}
    ranks = [started("two ranks", RANK=rank, LOCAL_RANK=rank, **place) for rank in "01"]
    together = [_answer(rank) for rank in ranks]
    return alone | {row: statistics.mean(each[row] for each in together) for row in together[0]}


def _answer(process: subprocess.Popen[str]) -> Rows:
    try:
        written, _ = process.communicate(timeout=_DEADLINE_S)
    finally:
        process.kill()
    rows: Rows = json.loads(written.splitlines()[-1])
    return rows


def _launch_times(method: str, tree: pathlib.Path) -> Rows:
    """Return the median times of a kernel's later launches with the package of a checkout, in ms."""
    from benchmarks import launch  # not above: a process that measures steps has another checkout first on its path

    by_name = {each.name: each for each in launch.METHODS}
    times = launch.measure(by_name[method], tree)[0][1:]
    return {
        what: statistics.median(time[index] for time in times) for index, what in enumerate(("first line", "returned"))
    }


def _steps_alone(blocks: int) -> Rows:
    import step_overhead  # beside this file, with the package of ``PYTHONPATH``

    torch.set_num_threads(1)
    setting = step_overhead.Setting("float32", "cpu")
    parts = {"PyTorch": step_overhead.plain(setting), "ours": step_overhead.ours(setting)}
    x, y = torch.randn(step_overhead.BATCH_SIZE, 64), torch.randint(0, 10, (step_overhead.BATCH_SIZE,))
    kinds: dict[str, Callable[[Any], None]] = {
        "full loop": step_overhead.full_loop,
        "step on preloaded data": lambda parts: step_overhead.step_only(parts, x, y),
    }
    rows = {}
    for kind, run in kinds.items():
        runs = {name: (lambda run=run, own=own: run(own)) for name, own in parts.items()}
        rows[f"{kind}, one process"] = step_overhead.ratios(runs, blocks)["ours"][0]
    return rows


def _steps_in_two_ranks(blocks: int) -> Rows:
    import step_overhead

    torch.set_num_threads(1)
    setting = step_overhead.Setting("float32", "cpu", steps=step_overhead.WINDOW)
    ours = step_overhead.ours(setting)  # joins the group
    plain = step_overhead.plain(setting)
    wrapped = torch.nn.parallel.DistributedDataParallel(plain.model)

    def window(number: int) -> contextlib.AbstractContextManager[Any]:
        plain.window(number)
        is_last = (number + 1) % step_overhead.WINDOW == 0
        return contextlib.nullcontext() if is_last else wrapped.no_sync()

    loader = step_overhead.materials()[2]
    half = torch.utils.data.DataLoader(
        loader.dataset, batch_size=step_overhead.BATCH_SIZE,
        sampler=torch.utils.data.DistributedSampler(loader.dataset, shuffle=True),
    )  # fmt: skip
    parts = {"PyTorch": plain._replace(model=wrapped, window=window, loader=half), "ours": ours}
    taken: dict[str, list[float]] = {name: [] for name in parts}
    for block in range(blocks + 1):
        for name in list(parts)[:: 1 if block % 2 else -1]:
            dist.barrier()
            began_s = time.thread_time()
            step_overhead.full_loop(parts[name])
            taken[name].append(time.thread_time() - began_s)
    ratios = [mine / theirs for mine, theirs in zip(taken["ours"][1:], taken["PyTorch"][1:], strict=True)]
    dist.barrier()
    dist.destroy_process_group()
    return {"full loop, two ranks, windows of four": statistics.median(ratios)}


if __name__ == "__main__":
    sys.exit(main())
