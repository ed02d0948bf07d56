"""The architecture page: its files and folders exist, and the arrows of its picture are the imports."""

from __future__ import annotations

import pathlib
import re

import grimp
import pytest

_ROOT = pathlib.Path(__file__).parents[1]
_PAGE = (_ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
_PACKAGES = ("kernel_ext", "notebook_accel")


def _rooms() -> list[str]:
    """The rooms of the picture, as modules."""
    names = set(re.findall(r"[\w.]+", _arrows()))
    return [name if name == "kernel_ext" else f"notebook_accel.{name}" for name in names]


def _arrows() -> str:
    return _PAGE.partition("flowchart TD\n")[2].partition("```")[0].replace("-->", " ")


def _room_of(module: str, rooms: list[str]) -> str | None:
    inside = [room for room in rooms if module == room or module.startswith(f"{room}.")]
    return max(inside, key=len, default=None)


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph(*_PACKAGES, exclude_type_checking_imports=True, cache_dir=None)


def test_arrows_are_the_imports(graph: grimp.ImportGraph) -> None:
    rooms = _rooms()
    drawn = {tuple(line.split()) for line in _arrows().splitlines() if line.strip()}
    found = set()
    for module in graph.modules:
        for imported in graph.find_modules_directly_imported_by(module):
            ends = _room_of(module, rooms), _room_of(imported, rooms)
            if None not in ends and ends[0] != ends[1]:
                found.add(tuple(str(end).removeprefix("notebook_accel.") for end in ends))
    assert drawn == found, f"the picture should have these arrows: {sorted(found)}"


def test_every_folder_is_in_the_table() -> None:
    named = set(re.findall(r"`((?:kernel_ext|notebook_accel)/[\w/]*)`", _PAGE))
    folders = {
        f"{folder.parent.relative_to(_ROOT).as_posix()}/"
        for package in _PACKAGES
        for folder in (_ROOT / package).rglob("*.py")
    }
    parents = {name for name in folders if any(other != name and other.startswith(name) for other in folders)}
    missing = folders - parents - named - {"notebook_accel/sessions/ranks/", "notebook_accel/training/backends/"}
    assert not missing


def test_every_file_that_is_named_exists() -> None:
    files = {path.relative_to(_ROOT).as_posix() for package in _PACKAGES for path in (_ROOT / package).rglob("*.py")}
    named = set(re.findall(r"`([\w/]+\.py)`", _PAGE))
    assert named
    assert not [name for name in named if not any(file == name or file.endswith(f"/{name}") for file in files)]
