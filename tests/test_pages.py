"""The code blocks of README and docs/*.md run, page by page, as somebody would run them who reads a page."""

from __future__ import annotations

import collections
import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

from kernel_ext import arguments, magics
from notebook_accel import cli
from tests import kernels, pages
from tests.pages import Block

_BLOCK_TIMEOUT_S = 120.0
_PAGE_TIMEOUT_S = 300.0  # some seconds on a quiet machine
_OURS = "notebook-accel"

# The blocks that are compiled only, by the reason in the comment before them. Whoever adds one counts it here.
_NOT_RUN = {
    "needs Ray": 1,
    "needs two machines": 1,
}

_ALL = {page: pages.blocks(page) for page in pages.PAGES}
_EVERY = [block for blocks in _ALL.values() for block in blocks]


def _runs(block: Block) -> bool:
    return not block.why_not_run and _could_run(block)


def _could_run(block: Block) -> bool:
    """Return whether the block is a program, or commands of ours. Those of others, such as pip, would change things."""
    return block.language == "python" or (block.is_shell and all(line.startswith(_OURS) for line in _commands(block)))


def _commands(block: Block) -> list[str]:
    """Return the lines of a shell block that have a command."""
    return [line for line in block.text.replace("\\\n", " ").splitlines() if line and not line.startswith("#")]


_THAT_RUN = [page for page, blocks in _ALL.items() if any(map(_runs, blocks))]
_OF_README = {block.cell for block in _ALL[pages.README]}


@pytest.fixture
def variables(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, state_home: pathlib.Path) -> dict[str, str]:
    """A machine without GPUs and without anything of the user's; ``notebook-accel`` is on its path."""
    found = {
        "CUDA_VISIBLE_DEVICES": "",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "XDG_STATE_HOME": str(state_home),
        "PATH": os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]]),
    }
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    return found


# The pages share a kernel, since the imports take longer than all else. Each finds no name and no run of another one.
_BEGIN = """
%reset -f
import os
os.environ.update({variables!r})
os.chdir({folder!r})
del os
"""
_END = """
from notebook_accel.launching.kernel import registry
for entry in registry.latest():
    if entry.is_running and entry.job is not None:
        entry.job.stop()  # which is no error if it has just ended
"""


# Takes over 3 s for the README, whose program is what everybody runs first.
@pytest.mark.timeout(_PAGE_TIMEOUT_S)
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.front_end if page == pages.README else pytest.mark.slow, id=page.name)
        for page in _THAT_RUN
        if page == pages.README or any(_runs(block) and block.cell not in _OF_README for block in _ALL[page])
    ],
)
def test_blocks_of_a_page_run_in_order(
    page: pathlib.Path, tmp_path: pathlib.Path, variables: dict[str, str], kernel: kernels.Kernel
) -> None:
    begun = kernel.run(_BEGIN.format(variables=variables, folder=str(tmp_path)))
    assert begun.status == "ok", begun.traceback
    shown = ""
    try:
        for block in _ALL[page]:
            if block.is_output:
                assert pages.is_shown(block.text, shown), (
                    f"{block}\nwas not in what the block before it has shown:\n{shown}"
                )
            elif _runs(block):
                shown = _run_shell(block, tmp_path) if block.is_shell else _run_cell(block, kernel)
    finally:
        ended = kernel.run(_END)
    assert ended.status == "ok", ended.traceback


@pytest.mark.parametrize("page", _THAT_RUN, ids=lambda page: page.name)
def test_page_loads_the_extension_before_its_first_magic(page: pathlib.Path) -> None:
    lines = [line for block in _ALL[page] if block.language == "python" for line in block.text.splitlines()]
    ours = [line for line in lines if re.match(r"%load_ext|%%?(distributed|rank|push|pull)\b", line)]
    assert ours[:1] in ([], ["%load_ext notebook_accel"])


def _run_cell(block: Block, kernel: kernels.Kernel) -> str:
    """Run a block, and return everything that it shows."""
    outcome = kernel.run(block.cell, _BLOCK_TIMEOUT_S)
    displays = [str(display["data"].get("text/plain", "")) for display in outcome.displays]
    shown = "\n".join([outcome.stdout, outcome.stderr, *displays, outcome.result, outcome.traceback])
    expected = ("error", block.raises) if block.raises else ("ok", "")
    assert (outcome.status, outcome.error_name) == expected, f"{block}\n{shown}"
    return shown


def _run_shell(block: Block, folder: pathlib.Path) -> str:
    done = subprocess.run(
        ["bash", "-e", "-c", block.text],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_BLOCK_TIMEOUT_S,
        check=False,
    )
    shown = done.stdout + done.stderr
    assert done.returncode == 0, f"{block}\n{shown}"
    return shown


def test_blocks_that_are_not_run_are_counted() -> None:
    """Each has a reason, and there are no more than those that were looked at."""
    found = collections.Counter(block.why_not_run for block in _EVERY if block.why_not_run and _could_run(block))
    assert dict(found) == _NOT_RUN


def test_notes_are_known() -> None:
    """A comment with a spelling mistake would have a block run, or not be looked at."""
    noted = [block for block in _EVERY if block.note]
    assert [
        block for block in noted if not (block.why_not_run or block.raises or block.is_output or block.is_command)
    ] == []


def test_cells_are_marked_as_python() -> None:
    """Nothing runs a block that is marked as text."""
    cells = [block for block in _EVERY if block.language in ("", "text") and re.match(r"%|>>>|\$ ", block.text)]
    assert cells == []


def test_flags_of_a_cell_that_is_not_run_exist() -> None:
    lines = [block.text.splitlines()[0] for block in _EVERY if block.why_not_run and block.text.startswith("%%dist")]
    assert lines
    for line in lines:
        magic, words = line.split(maxsplit=1)
        magics.make_parser().parse(arguments.split(words, magic))  # raises for a flag that isn't there


@pytest.mark.parametrize(
    "block", [block for block in _EVERY if block.is_shell], ids=lambda block: f"{block.page}:{block.line}"
)
def test_shell_block_has_flags_that_exist(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    subprocess.run(["bash", "-n", "-c", block.text], check=True)
    for line in _commands(block):
        if line.startswith(_OURS):
            _, unknown = cli.make_parser().parse_known_args(shlex.split(line, comments=True)[1:])
            assert unknown == [], line
