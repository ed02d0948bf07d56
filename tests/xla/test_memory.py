"""The host's memory that a model takes before it is on the devices and on its way there."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator

import pytest

from tests import kernels, processes
from tests.training import ranks
from tests.xla import work
from tests.xla.conftest import PJRT

pytestmark = [pytest.mark.xla, pytest.mark.timeout(300)]
_DEADLINE_S = 200.0
_CELL_S = 200.0


@pytest.fixture
def two_of_one_machine() -> Iterator[ranks.Ranks]:
    """Two processes that have a device of their own each, and count as the ranks of one machine."""
    places = [{"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": str(number)} for number in range(2)]
    with contextlib.closing(ranks.Ranks([{**PJRT, **place} for place in places])) as running:
        yield running


def test_model_goes_to_the_device_one_rank_at_a_time_where_memory_is_short(
    two_of_one_machine: ranks.Ranks, tmp_path: pathlib.Path
) -> None:
    for available_bytes, others in ((0, ["waiting", "gone"]), (1 << 40, ["moving", "moving"])):
        folder = tmp_path / str(available_bytes)
        folder.mkdir()
        found = two_of_one_machine.run(work.move_beside_another, folder, available_bytes, deadline_s=_DEADLINE_S)
        assert sorted(other for other, _ in found) == sorted(others)
        assert [device for _, device in found] == ["xla:0", "xla:0"]


def test_model_of_a_gigabyte_is_there_once_for_eight_ranks(tmp_path: pathlib.Path) -> None:
    with kernels.running(tmp_path) as kernel:
        assert kernel.run("%load_ext notebook_accel\nimport os, time, torch", _CELL_S).status == "ok"
        assert kernel.run("%%distributed -n 8 --use_cpu --start_method fork\ntorch.ones(3).sum()", _CELL_S).result
        processes.wait_until(lambda: len(processes.children(kernel.pid)) == 1, "the fork for that run is gone")
        before_bytes = processes.memory_bytes([kernel.process, *kernel.descendants()])
        # In layers, and initialised: memory that nobody has written to is none.
        made = kernel.run(
            "model = torch.nn.Sequential(*[torch.nn.Linear(4096, 4096, bias=False) for _ in range(16)])\n"
            "sum(parameter.nbytes for parameter in model.parameters())"
        )
        assert made.result == str(1 << 30)
        cell = kernel.start("""%%distributed -n 8 --use_cpu --start_method fork
sum(float(parameter.detach()[:, ::1024].sum()) for parameter in model.parameters())
print("has read", flush=True)
time.sleep(250)""")
        for rank in range(8):
            cell.wait_for_output(f"{rank} │ has read", _CELL_S)
        cost_bytes = processes.memory_bytes([kernel.process, *kernel.descendants()]) - before_bytes
        kernel.interrupt()
        assert cell.finish().error_name == "KeyboardInterrupt"
    assert 1 << 30 <= cost_bytes < 3 << 29  # 1.5 GiB: model, ranks and what forks them
