"""A cell of the shared notebook that must not fail."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests import kernels


@pytest.fixture
def done(notebook: kernels.Kernel) -> Callable[[str], kernels.Outcome]:
    """Run a cell in the shared notebook to its end, which must be a good one."""

    def run(code: str) -> kernels.Outcome:
        outcome = notebook.run(code, 100)
        assert outcome.status == "ok", outcome.traceback
        return outcome

    return run
