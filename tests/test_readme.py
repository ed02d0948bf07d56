"""The README and the pages in docs/ agree with the code."""

from __future__ import annotations

import ast
import functools
import importlib
import json
import os
import pathlib
import re
import subprocess
import sys
import typing

import pytest
import yaml

from notebook_accel import config, errors
from notebook_accel.launching.state import rank
from tests import pages
from tests.pages import README as _README
from tests.pages import ROOT as _ROOT

_MOST_LINES = 130
_FIRST_SCREEN_LINES = 70
_MOST_PICTURE_BYTES = 2_000_000

of_each_page = pytest.mark.parametrize("page", pages.PAGES, ids=lambda page: page.name)


def test_readme_is_short() -> None:
    lines = _README.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= _MOST_LINES
    status = next(number for number, line in enumerate(lines, 1) if line.startswith("**Status: "))
    assert status < _FIRST_SCREEN_LINES


def test_every_page_can_be_reached_from_the_readme_by_links() -> None:
    reached, unread = set[pathlib.Path](), [_README]
    while unread:
        page = unread.pop()
        reached.add(page)
        targets = {
            (page.parent / link).resolve() for link in re.findall(r"\]\(([^):#]+\.md)", pages.without_blocks(page))
        }
        unread += [target for target in targets if target not in reached and target.exists()]
    assert [page.name for page in pages.PAGES if page not in reached] == []


def test_two_commands_are_the_only_shell_blocks_and_are_marked() -> None:
    first, second = [block for block in pages.blocks(_README) if block.is_shell]
    assert (first.note, second.note) == ("command 1", "command 2")
    [main_job], [tests] = first.text.splitlines(), second.text.splitlines()
    for command in (main_job, tests):
        assert command.startswith("python3 -m venv .venv && .venv/bin/pip install ")
        assert " -c constraints.txt " in command
    assert main_job.endswith(" && .venv/bin/ipython example_notebooks/01_train_on_every_device.ipynb")
    assert tests.endswith(" && .venv/bin/pytest -n 2 --dist loadfile")


def test_ci_runs_the_two_commands() -> None:
    script = (_ROOT / ".ci/run").read_text(encoding="utf-8")
    [function] = re.findall(r"^readme_command\(\) \{\n.*?^\}\n", script, re.MULTILINE | re.DOTALL)
    for number, block in enumerate([block for block in pages.blocks(_README) if block.is_command], 1):
        shown = subprocess.run(
            ["bash", "-c", f"{function}readme_command {number}"], cwd=_ROOT, capture_output=True, text=True, check=True
        )
        assert shown.stdout == block.text


@pytest.mark.parametrize("page", [_README, _ROOT / "docs/index.md", _ROOT / "docs/first_launch.md"])
def test_pages_begin_with_the_cells_of_the_first_notebook(page: pathlib.Path) -> None:
    notebook = json.loads((_ROOT / "example_notebooks/01_train_on_every_device.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [block.cell.rstrip("\n") for block in pages.python_blocks(page)][: len(cells)] == cells


def test_line_that_installs_is_the_same_everywhere() -> None:
    [line] = re.findall(r"^%pip .*", _README.read_text(encoding="utf-8"), re.MULTILINE)
    assert f"`{line}`" in (_ROOT / "docs/install.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(("version", "is_too_old"), [("2.8.1+cu128", True), ("2.9.0", False), ("2.10.0+cu128", False)])
def test_first_cell_for_kaggle_and_colab_names_a_torch_that_is_too_old(
    version: str, is_too_old: bool, tmp_path: pathlib.Path
) -> None:
    (tmp_path / f"torch-{version}.dist-info").mkdir()
    (tmp_path / f"torch-{version}.dist-info" / "METADATA").write_text(f"Name: torch\nVersion: {version}\n")
    cell = pages.python_blocks(_ROOT / "docs/kaggle_and_colab.md")[0].text
    shown = subprocess.run(
        [sys.executable, "-c", cell], env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True, text=True, timeout=60, check=True,
    ).stdout  # fmt: skip
    assert f"and torch {version}\n" in shown
    assert ("%pip install -U torch" in shown) is is_too_old


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


def test_one_script_makes_every_picture_that_the_pages_show() -> None:
    shown = "".join(page.read_text(encoding="utf-8") for page in pages.PAGES)
    script = (_ROOT / "tests/browser/test_screenshots.py").read_text(encoding="utf-8")
    names = sorted(path.name for path in (_ROOT / "example_notebooks/pictures").iterdir())
    assert sorted(set(re.findall(r"example_notebooks/pictures/(\w+\.\w+)", shown))) == names
    assert sorted(re.findall(r'"(\w+\.(?:png|gif))"', script)) == names


def test_issue_forms_ask_for_the_facts_that_env_prints() -> None:
    forms = [path for path in _ROOT.glob(".github/ISSUE_TEMPLATE/*.yml") if path.name != "config.yml"]
    assert forms
    for form in forms:
        fields = yaml.safe_load(form.read_text(encoding="utf-8"))["body"]
        asked = [field for field in fields if "notebook-accel env" in field["attributes"].get("label", "")]
        assert [field["validations"]["required"] for field in asked] == [True], form.name


def test_contributors_read_of_every_lane() -> None:
    script = (_ROOT / ".ci/run").read_text(encoding="utf-8")
    page = (_ROOT / "docs/contributing.md").read_text(encoding="utf-8")
    always, _, with_all = script.partition("if [[ ${1-} == --all ]]")
    lanes = re.findall(r"^lane '([\w ]+)'", always, re.MULTILINE)
    assert re.findall(r"^\| ([\w ]+) \| ", page, re.MULTILINE)[: len(lanes)] == lanes
    by_hand = re.findall(r"^    lane '[\w ]+' (.*)$", with_all, re.MULTILINE)
    assert by_hand
    assert [command for command in by_hand if f"`{command}`" not in page] == []


def test_table_of_states_has_the_words_of_the_code() -> None:
    text = (_ROOT / "docs/panel.md").read_text(encoding="utf-8")
    _, _, table = text.partition("| word | colour | meaning |\n| --- | --- | --- |\n")
    rows, _, _ = table.partition("\n\n")
    assert re.findall(r"^\| (\w+) ", rows, re.MULTILINE) == list(typing.get_args(rank.StateWord))


def test_every_error_has_a_section_with_its_name() -> None:
    names = [name for name in errors.__all__ if issubclass(getattr(errors, name), errors.NotebookAccelError)]
    headings = re.findall(r"^#+ (\w+)$", pages.without_blocks(_ROOT / "docs/errors.md"), re.MULTILINE)
    assert len(names) > 10
    assert [name for name in names if headings.count(name) != 1] == []


@of_each_page
def test_every_python_block_compiles_and_imports_what_exists(page: pathlib.Path) -> None:
    for block in pages.python_blocks(page):
        tree = ast.parse(block.python, page.name)
        compile(tree, page.name, "exec")
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("notebook_accel"):
                module = importlib.import_module(node.module)
                assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []


_NAMES_FOR_PIP = {"sklearn": "scikit-learn"}
_READERS_HAVE = {"from_accelerate.md": {"accelerate"}}


@of_each_page
def test_reader_has_every_package_that_the_blocks_import(page: pathlib.Path) -> None:
    """The first command of the README installs the package with its extra ``examples``, and nothing else."""
    text = (_ROOT / "pyproject.toml").read_text(encoding="utf-8")
    lists = re.findall(r"^(?:dependencies|examples) = \[\n(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    installed = {*re.findall(r'^ +"([\w-]+)', "".join(lists), re.MULTILINE), *_READERS_HAVE.get(page.name, ())}
    assert "torch" in installed and "scikit-learn" in installed
    nodes = [node for block in pages.python_blocks(page) for node in ast.walk(ast.parse(block.python))]
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    imported = {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {"notebook_accel"}
    assert {_NAMES_FOR_PIP.get(name, name) for name in imported} <= installed


@of_each_page
def test_links_inside_the_repository_lead_somewhere(page: pathlib.Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)]+)\)", pages.without_blocks(page))
    assert links
    for link in links:
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in _anchors(target), link


@functools.cache
def _anchors(page: pathlib.Path) -> set[str]:
    """Return the anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", pages.without_blocks(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
