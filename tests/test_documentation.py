"""The site has every page, every public name and every notebook. Those marked ``site`` look at the built one."""

from __future__ import annotations

import importlib
import json
import pathlib
import re
import types

import nbformat
import pytest

import notebook_accel
from notebook_accel import errors

_ROOT = pathlib.Path(__file__).parents[1]
_DOCS = _ROOT / "docs"
_BUILT = _ROOT / "build" / "docs"
_NOTEBOOKS = sorted(path.stem for path in (_ROOT / "example_notebooks").glob("*.ipynb"))
_LISTED = re.findall(r"^[\w/*]+$", (_DOCS / "index.md").read_text(encoding="utf-8"), re.MULTILINE)


def test_every_page_is_in_the_contents() -> None:
    pages = {
        path.relative_to(_DOCS).with_suffix("").as_posix() for path in [*_DOCS.glob("*.md"), *_DOCS.glob("api/*.md")]
    }
    assert set(_LISTED) == pages - {"index"} | {"example_notebooks/*"}
    assert len(_LISTED) == len(set(_LISTED))
    assert sorted(path.stem for path in _DOCS.glob("example_notebooks/*.ipynb")) == _NOTEBOOKS


def test_every_public_name_has_an_entry_in_the_reference() -> None:
    text = "\n".join(path.read_text(encoding="utf-8") for path in _DOCS.glob("api/*.md"))
    entries = set(re.findall(r"^\.\. auto(?:function|class|exception):: (\S+)$", text, re.MULTILINE))
    assert [name for name in notebook_accel.__all__ if f"notebook_accel.{name}" not in entries] == []
    named = {entry.rpartition(".")[2] for entry in entries}
    assert [name for name in errors.__all__ if name not in named] == []
    for entry in entries:
        module, _, name = entry.rpartition(".")
        assert hasattr(importlib.import_module(module), name), entry


@pytest.mark.parametrize("path", sorted(_ROOT.glob("example_notebooks/*.ipynb")), ids=lambda path: path.name)
def test_notebook_is_committed_with_the_outputs_of_one_whole_run(path: pathlib.Path) -> None:
    """``docs/save_outputs.py`` saves them."""
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    counts, shown = [], []
    for cell in notebook.cells:
        if "restart-kernel" in cell.metadata.get("tags", ()):
            counts.clear()
        if cell.cell_type == "code":
            counts.append(cell.execution_count)
            assert counts[-1] == len(counts)
            assert all(output.output_type in ("stream", "execute_result") for output in cell.outputs)
            shown += [output.get("text") or output.data["text/plain"] for output in cell.outputs]
    assert any(text.startswith("Launching training on ") for text in shown) or "2 ranks are ready" in shown[0]
    assert not re.search(r"^\[\d\d:\d\d\]", "\n".join(shown), re.MULTILINE)  # the speed of one machine
    assert path.stat().st_size < 20_000


@pytest.fixture
def site_parts(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """The site's own extension, which needs Sphinx."""
    monkeypatch.syspath_prepend(str(_DOCS))
    return importlib.import_module("site_parts")


@pytest.mark.site
def test_notebook_gets_its_colab_link_where_the_repository_is_known(
    site_parts: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = _NOTEBOOKS[0]
    source = (_ROOT / "example_notebooks" / f"{name}.ipynb").read_text(encoding="utf-8")
    content = [source]
    site_parts.prepare_source(None, f"example_notebooks/{name}", content)
    assert json.loads(content[0]) == json.loads(source)

    monkeypatch.setenv("READTHEDOCS_GIT_CLONE_URL", "https://github.com/someone/notebook-accel.git")
    monkeypatch.setenv("READTHEDOCS_GIT_COMMIT_HASH", "abc123")
    site_parts.prepare_source(None, f"example_notebooks/{name}", content)
    title, link, *_ = json.loads(content[0])["cells"]
    assert "".join(title["source"]).startswith("# ")
    address = (
        f"https://colab.research.google.com/github/someone/notebook-accel/blob/abc123/example_notebooks/{name}.ipynb"
    )
    assert f"]({address})" in link["source"]


@pytest.mark.site
def test_links_out_of_the_folder_lead_to_pages_or_to_the_repository(
    site_parts: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    notebook, file = "[a](../example_notebooks/04_tpu.ipynb)", "[b](../tests/xla/two_threads.py)"
    page = f"{notebook} {file} ![c](../example_notebooks/pictures/c.png)"
    content = [page]
    site_parts.prepare_source(None, "limits", content)
    assert content == ["[a](example_notebooks/04_tpu) b ![c](../example_notebooks/pictures/c.png)"]
    monkeypatch.setenv("READTHEDOCS_GIT_CLONE_URL", "git@github.com:someone/notebook-accel.git")
    content = [page]
    site_parts.prepare_source(None, "limits", content)
    assert "[b](https://github.com/someone/notebook-accel/blob/HEAD/tests/xla/two_threads.py)" in content[0]


@pytest.mark.site
def test_built_notebooks_show_their_outputs() -> None:
    text = (_BUILT / "example_notebooks" / f"{_NOTEBOOKS[0]}.html").read_text(encoding="utf-8")
    assert re.search(r"test accuracy: \d\d\.\d %", text)


@pytest.mark.site
def test_text_for_language_models_has_every_page_in_order() -> None:
    short, full = ((_BUILT / name).read_text(encoding="utf-8") for name in ("llms.txt", "llms-full.txt"))
    pages = re.findall(r"^- \[[^]]+\]\(([^)]+)\.html\): \S", short, re.MULTILINE)
    notebooks = [f"example_notebooks/{name}" for name in _NOTEBOOKS]
    assert pages == [page for listed in _LISTED for page in (notebooks if "*" in listed else [listed])]
    for shown in (
        "# Commands and magics",
        "notebook-accel launch [flags] script [arguments ...]",
        "notebook_accel.notebook_launcher(",
        "%%distributed",
    ):
        assert shown in full, shown
    assert "<!-- run first" not in full  # the blocks' hidden parts
