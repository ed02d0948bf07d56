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
    "installs": 1,
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


of_each_page_that_runs = pytest.mark.parametrize(
    "page", [page for page, blocks in _ALL.items() if any(map(_runs, blocks))], ids=lambda page: page.name
)


@pytest.fixture
def variables(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, state_home: pathlib.Path) -> None:
    """A machine without GPUs and without anything of the user's; ``notebook-accel`` is on its path."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "none"))
    monkeypatch.delenv("NOTEBOOK_ACCEL_CONFIG_FILE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]]))


@pytest.mark.timeout(_PAGE_TIMEOUT_S)
@of_each_page_that_runs
def test_blocks_of_a_page_run_in_order(page: pathlib.Path, tmp_path: pathlib.Path, variables: None) -> None:
    with kernels.running(tmp_path) as kernel:
        shown = ""
        for block in _ALL[page]:
            if block.is_output:
                assert pages.is_shown(block.text, shown), (
                    f"{block}\nwas not in what the block before it has shown:\n{shown}"
                )
            elif _runs(block):
                shown = _run_shell(block, tmp_path) if block.is_shell else _run_cell(block, kernel)


def _run_cell(block: Block, kernel: kernels.Kernel) -> str:
    """Run a block, and return everything that it shows."""
    outcome = kernel.run(block.text, _BLOCK_TIMEOUT_S)
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
    unknown = [block for block in _EVERY if block.note and not (block.why_not_run or block.raises or block.is_output)]
    assert unknown == []


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


def test_block_has_the_comment_before_it_and_no_other(tmp_path: pathlib.Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("""\
<!-- run first
x = 1
-->

<!-- raises KeyError -->
```python
{}[x]
```

<!-- output -->
```text
KeyError: 1
```

<!-- not run: needs two GPUs -->
Some text.

```sh
ls
```
""")
    first, second, third, fourth = pages.blocks(page)
    assert (first.text, first.line, first.language) == ("x = 1\n", 2, "python")
    assert (second.text, second.line, second.raises) == ("{}[x]\n", 7, "KeyError")
    assert third.is_output
    assert (fourth.note, fourth.is_shell) == ("", True)
    assert pages.without_blocks(page).split() == ["Some", "text."]


@pytest.mark.parametrize(
    ("expected", "shown", "agree"),
    [
        ("loss 0.25\nsaved /tmp/a/b.log", "before loss 1 saved /home/me/c after", True),
        ("first ... last", "first, and others, last", True),
        ("last ... first", "first, and others, last", False),
        ("    call(1)\nValueError: no", "    call(2)\n    ^^^^^^^\nValueError: no", True),
        ("ValueError: no", "ValueError: yes", False),
    ],
)
def test_output_is_compared_apart_from_details(expected: str, shown: str, agree: bool) -> None:
    assert pages.is_shown(expected, shown) is agree
