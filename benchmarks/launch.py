"""How long it takes from a cell to the first line of the user's function on the last rank, and back.

    python -m benchmarks.launch --rounds 7

Every way to start ranks is measured in a fresh kernel with torch imported, in every round, in turn. The first launch of
a kernel and later ones are told apart. Ratios are to a plain ``os.fork`` of the same kernel, the floor.
"""

from __future__ import annotations

import argparse
import collections
import importlib.util
import os
import pathlib
import shutil
import statistics
import sys
import tempfile
import time

from benchmarks.launch_methods import METHODS, RANKS, Method, code
from tests import kernels, processes

_READING_S = 5.0  # between the first launch and the later ones: the user reads what came of it
_DEADLINE_S = 180.0
_LAUNCH = "import time\nstarted = time.monotonic_ns()\nlaunch()\nreturned = time.monotonic_ns()"

Times = tuple[float, float]  # to the first line on the last rank, and to the return, in ms


def main() -> int:
    """Measures and prints the table."""
    chosen, rounds = _read_arguments()
    first: dict[str, list[Times]] = collections.defaultdict(list)
    later: dict[str, list[Times]] = collections.defaultdict(list)
    memory: dict[str, int] = {}
    for number in range(rounds):
        for method in chosen[number % len(chosen) :] + chosen[: number % len(chosen)]:  # no place is the best one
            try:
                launches, memory_now = _measure(method)
            except AssertionError as error:
                print(f"!!! {method.name} FAILED in this round: {error}", file=sys.stderr)
                continue
            memory = memory_now or memory
            first[method.name].append(launches[0])
            later[method.name].append(_medians(launches[1:]))
            print(
                f"round {number + 1} of {rounds}: {method.name}: first {_in_words(launches[0])}, "
                f"later {_in_words(later[method.name][-1])}",
                file=sys.stderr,
                flush=True,
            )
    _print_table("first launch of a kernel", chosen, first)
    _print_table("later launches", chosen, later)
    for name, size_bytes in memory.items():
        print(f"kept ready, {name}: {size_bytes / 2**20:.0f} MiB that nobody shares")
    return 0


def _read_arguments() -> tuple[list[Method], int]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--methods", default="", help="parts of their names, with commas between; default: all")
    given = parser.parse_args()
    parts = [part.strip() for part in given.methods.split(",") if part.strip()]
    chosen = [method for method in METHODS if not parts or any(part in method.name for part in parts)]
    for method in [method for method in chosen if importlib.util.find_spec(method.needs) is None]:
        print(f"!!! {method.name} is NOT measured: {method.needs} can't be imported.", file=sys.stderr)
        chosen.remove(method)
    if not chosen:
        parser.error("nothing to measure; there are: " + ", ".join(method.name for method in METHODS))
    return chosen, given.rounds


def _measure(method: Method) -> tuple[list[Times], dict[str, int]]:
    folder = pathlib.Path(tempfile.mkdtemp(prefix="benchmark-launch-"))
    said = folder / "said"
    said.mkdir()
    try:
        with kernels.running(folder, _environment(said)) as kernel:
            prepared = kernel.run(code(method), _DEADLINE_S)
            assert prepared.status == "ok", prepared.traceback
            time.sleep(method.typing_s)
            launches = [_launch(kernel, said)]
            time.sleep(_READING_S)
            launches += [_launch(kernel, said) for _ in range(method.later)]
            return launches, _memory(kernel) if "ours, spawn" in method.name else {}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _environment(said: pathlib.Path) -> dict[str, str]:
    root = str(pathlib.Path(__file__).parents[1])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"BENCHMARK_FOLDER": str(said), "PYTHONPATH": path}


def _launch(kernel: kernels.Kernel, said: pathlib.Path) -> Times:
    for file in said.iterdir():
        file.unlink()
    launched = kernel.run(_LAUNCH, _DEADLINE_S)
    assert launched.status == "ok", launched.traceback
    started, returned = (int(kernel.value(name)) for name in ("started", "returned"))
    lines = [int(file.read_text()) for file in said.iterdir()]
    assert len(lines) == RANKS, f"{len(lines)} ranks have run"
    return (max(lines) - started) / 1e6, (returned - started) / 1e6


def _memory(kernel: kernels.Kernel) -> dict[str, int]:
    """What agent and template cost when nothing runs: their own pages, which go when they go."""
    found = {}
    for process in kernel.descendants():
        name = "agent" if processes.is_agent(process) else "template" if processes.is_template(process) else ""
        lines = pathlib.Path(f"/proc/{process.pid}/smaps_rollup").read_text(encoding="utf-8").splitlines()[1:]
        sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
        found[name] = sizes["Private_Clean"] + sizes["Private_Dirty"]
    return found


def _medians(launches: list[Times]) -> Times:
    return statistics.median(line for line, _ in launches), statistics.median(end for _, end in launches)


def _in_words(times: Times) -> str:
    return f"{times[0]:.1f} / {times[1]:.1f} ms"


def _print_table(title: str, chosen: list[Method], times: dict[str, list[Times]]) -> None:
    floor = _medians(times[METHODS[0].name]) if times[METHODS[0].name] else None
    print(f"\n{title}, {RANKS} ranks, medians of {max(map(len, times.values()), default=0)} kernels")
    print(f"{'':30} {'first line':>12} {'x floor':>8} {'returned':>12} {'x floor':>8}")
    for method in chosen:
        if not times[method.name]:
            print(f"{method.name:30} failed")
            continue
        line, end = _medians(times[method.name])
        ratios = (f"{line / floor[0]:8.2f}", f"{end / floor[1]:8.2f}") if floor else ("", "")
        print(f"{method.name:30} {line:9.1f} ms {ratios[0]:>8} {end:9.1f} ms {ratios[1]:>8}")


if __name__ == "__main__":
    sys.exit(main())
