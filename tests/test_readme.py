"""The README and the pages in docs/ agree with the code."""

from __future__ import annotations

import ast
import functools
import importlib
import pathlib
import re
import typing

import pytest

from notebook_accel import config
from notebook_accel.launching.state import rank

_ROOT = pathlib.Path(__file__).parents[1]
_README = _ROOT / "README.md"
_MOST_LINES = 200
_MOST_PICTURE_BYTES = 2_000_000
_PAGES = [_README, *sorted(_ROOT.glob("docs/*.md"))]

of_each_page = pytest.mark.parametrize("page", _PAGES, ids=lambda page: page.name)


def test_readme_is_short() -> None:
    assert len(_README.read_text(encoding="utf-8").splitlines()) <= _MOST_LINES


def test_readme_lists_every_page() -> None:
    text = _README.read_text(encoding="utf-8")
    pages = [page.relative_to(_ROOT).as_posix() for page in _PAGES if page != _README]
    assert pages
    assert [page for page in pages if f"]({page})" not in text] == []


def test_first_block_is_the_two_commands() -> None:
    main_job, tests = _blocks(_README)[0][1].splitlines()
    for command in (main_job, tests):
        assert command.startswith("python3 -m venv .venv && .venv/bin/pip install ")
        assert " -c constraints.txt " in command
    assert main_job.endswith(" && .venv/bin/ipython example_notebooks/01_train_on_every_device.ipynb")
    assert tests.endswith(" && .venv/bin/pytest -n 2 --dist loadfile")


def test_table_has_every_option_as_it_is() -> None:
    rows = [f"| `{option.name}` | {_default(option)} | {option.help}{_choices(option)} |" for option in config.fields()]
    table = "\n".join(["| option | default | what it does |", "| --- | --- | --- |", *rows, ""])
    text = (_ROOT / "docs/options.md").read_text(encoding="utf-8")
    assert table in text, f"the table of options in docs/options.md should be:\n{table}"


def _default(option: config.Option) -> str:
    return "" if option.default in (None, "", ()) else f"`{option.default}`"


def _choices(option: config.Option) -> str:
    return f" One of {', '.join(f'`{choice}`' for choice in option.choices)}." if option.choices else ""


def test_pictures_of_the_readme_exist_and_are_small() -> None:
    named = re.findall(r'(?:src|srcset)="([^"]+)"', _README.read_text(encoding="utf-8"))
    assert {pathlib.PurePath(name).suffix for name in named} == {".gif", ".png"}
    assert [name for name in named if (_ROOT / name).stat().st_size > _MOST_PICTURE_BYTES] == []


def test_table_of_states_has_the_words_of_the_code() -> None:
    text = (_ROOT / "docs/panel.md").read_text(encoding="utf-8")
    _, _, table = text.partition("| word | colour | meaning |\n| --- | --- | --- |\n")
    rows, _, _ = table.partition("\n\n")
    assert re.findall(r"^\| (\w+) ", rows, re.MULTILINE) == list(typing.get_args(rank.StateWord))


def test_there_are_python_blocks() -> None:
    assert _python_blocks(_README)


@of_each_page
def test_every_python_block_compiles_and_imports_what_exists(page: pathlib.Path) -> None:
    for block in _python_blocks(page):
        source = "\n".join(line for line in block.splitlines() if not line.startswith("%"))
        tree = ast.parse(source, page.name)
        compile(tree, page.name, "exec")
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("notebook_accel"):
                module = importlib.import_module(node.module)
                assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []


@of_each_page
def test_links_inside_the_repository_lead_somewhere(page: pathlib.Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)]+)\)", _without_blocks(page))
    assert links
    for link in links:
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in _anchors(target), link


@functools.cache
def _anchors(page: pathlib.Path) -> set[str]:
    """Return the anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", _without_blocks(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def _blocks(page: pathlib.Path) -> list[tuple[str, str]]:
    """Return the language and the text of each fenced block."""
    return re.findall(r"^```([a-z]*)\n(.*?)^```$", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def _python_blocks(page: pathlib.Path) -> list[str]:
    return [text for language, text in _blocks(page) if language == "python"]


def _without_blocks(page: pathlib.Path) -> str:
    text = page.read_text(encoding="utf-8")
    return re.sub(r"^```[a-z]*\n.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
