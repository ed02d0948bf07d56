"""The architecture page: its files, folders and names exist, and the arrows of its picture are the imports."""

from __future__ import annotations

import pathlib
import re

import grimp
import pytest

_ROOT = pathlib.Path(__file__).parents[1]
_PAGE = (_ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
_PACKAGES = ("kernel_ext", "notebook_accel")


def _folders() -> list[str]:
    """The folders of the picture, as modules."""
    names = set(re.findall(r"[\w.]+", _arrows()))
    return [name if name == "kernel_ext" else f"notebook_accel.{name}" for name in names]


def _arrows() -> str:
    return _PAGE.partition("flowchart TD\n")[2].partition("```")[0].replace("-->", " ")


def _folder_of(module: str, folders: list[str]) -> str | None:
    inside = [folder for folder in folders if module == folder or module.startswith(f"{folder}.")]
    return max(inside, key=len, default=None)


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph(*_PACKAGES, exclude_type_checking_imports=True, cache_dir=None)


def test_arrows_are_the_imports(graph: grimp.ImportGraph) -> None:
    folders = _folders()
    drawn = {tuple(line.split()) for line in _arrows().splitlines() if line.strip()}
    found = set()
    for module in graph.modules:
        for imported in graph.find_modules_directly_imported_by(module):
            ends = _folder_of(module, folders), _folder_of(imported, folders)
            if None not in ends and ends[0] != ends[1]:
                found.add(tuple(str(end).removeprefix("notebook_accel.") for end in ends))
    assert drawn == found, f"the picture should have these arrows: {sorted(found)}"


def test_no_two_modules_import_each_other() -> None:
    """Not even for types. The package is the door to a module that reads its version."""
    graph = grimp.build_graph(*_PACKAGES, cache_dir=None)
    imports = {(module, each) for module in graph.modules for each in graph.find_modules_directly_imported_by(module)}
    assert {pair for pair in imports if pair[0] < pair[1] and pair[::-1] in imports} == {
        ("notebook_accel", "notebook_accel.launching.kernel.detached")
    }


def test_table_has_the_folders_that_there_are() -> None:
    rows = re.findall(r"^\| `((?:kernel_ext|notebook_accel)/[\w/]*)` \|", _PAGE, flags=re.MULTILINE)
    modules = (path for package in _PACKAGES for path in (_ROOT / package).rglob("*.py"))
    assert sorted(rows) == sorted({f"{path.parent.relative_to(_ROOT).as_posix()}/" for path in modules})


def test_every_file_and_folder_that_is_named_exists() -> None:
    here = {path.relative_to(_ROOT).as_posix() + "/" * path.is_dir() for path in _files()}
    named = set(re.findall(r"`([\w./-]+(?:\.(?:py|txt|toml)|/))`", _PAGE))
    assert len(named) > len(_PACKAGES)
    assert [name for name in named if not any(f"/{path}".endswith(f"/{name}") for path in here)] == []


def test_every_name_of_the_code_is_in_the_code() -> None:
    classes_and_functions = re.findall(r"`(?:\w+\.)*([A-Z]\w+|_[A-Za-z]\w+|\w+(?=\())[^`/]*`", _PAGE)
    sources = "\n".join(path.read_text(encoding="utf-8") for path in _files() if path.suffix == ".py")
    defined = set(re.findall(r"^ *(?:class|def) (\w+)|^(\w+)(?:: .*)? = ", sources, flags=re.MULTILINE))
    known = {name for pair in defined for name in pair if name}
    assert "RunState" in classes_and_functions
    assert [name for name in classes_and_functions if name not in known | {"None"}] == []


def _files() -> list[pathlib.Path]:
    """Return the project's files, and its folders."""
    folders = [_ROOT / name for name in (*_PACKAGES, ".ci", "benchmarks", "docs", "example_notebooks", "tests")]
    return [*folders, *_ROOT.glob("*.*"), *(path for folder in folders for path in folder.rglob("*"))]
