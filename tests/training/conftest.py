"""Ranks that all tests of training share. They last for the session, since files of other folders come in between."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator

import pytest

from tests.training import ranks


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Before the fixtures, one of which records the processes that are there."""
    ranks.Ranks.replace_late()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run the body of a test with the mark ``on_ranks`` in the ranks of that fixture."""
    mark = pyfuncitem.get_closest_marker("on_ranks")
    if mark is None:
        return None
    arguments = [pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters]
    pyfuncitem.funcargs[mark.args[0]].run(pyfuncitem.obj, *arguments)
    return True


@pytest.fixture(scope="session", autouse=True)
def _nursery() -> Iterator[None]:
    with contextlib.closing(ranks.Nursery()) as nursery:
        ranks.Nursery.shared = nursery
        yield
        ranks.Nursery.shared = None


@pytest.fixture(scope="session")
def one_rank() -> Iterator[ranks.Ranks]:
    with ranks.running(1) as running:
        yield running


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[ranks.Ranks]:
    with ranks.running(2) as running:
        yield running


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[ranks.Ranks]:
    with ranks.running(4) as running:
        yield running


@pytest.fixture(scope="session")
def three_ranks() -> Iterator[ranks.Ranks]:
    with ranks.running(3) as running:
        yield running


@pytest.fixture
def groups(
    one_rank: ranks.Ranks, two_ranks: ranks.Ranks, three_ranks: ranks.Ranks, four_ranks: ranks.Ranks
) -> dict[int, ranks.Ranks]:
    """Return the shared ranks by their number."""
    return {1: one_rank, 2: two_ranks, 3: three_ranks, 4: four_ranks}
