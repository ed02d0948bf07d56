"""Parts of the site that the build makes, a Sphinx extension.

They are links that lead out of this folder, the notebooks' links to Colab, the page about commands, a check that the
reference is complete, and ``llms.txt``. Nothing of it is written into the repository.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import pathlib
import re
import types
from collections.abc import Iterator
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective
from sphinx.writers.text import TextTranslator

import notebook_accel
from kernel_ext import commands, magics, session_magics
from notebook_accel import cli, config, errors

_NOTEBOOKS = "example_notebooks/"
_LOGGER = logging.getLogger(__name__)
# Accelerate's modules whose names are here too. Those of ``utils`` are imported from ``notebook_accel.utils``.
_DOORS = (
    *("accelerator", "data_loader", "launchers", "local_sgd", "logging", "optimizer", "scheduler", "state", "tracking"),
    "utils",
)


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect the parts."""
    app.connect("source-read", prepare_source)
    app.connect("autodoc-skip-member", _skip_documented_elsewhere)
    app.connect("env-check-consistency", _check_reference)
    app.connect("build-finished", _write_llms)
    app.add_directive("command-line", CommandLine)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


# Links that lead out of this folder, and the notebooks.


def prepare_source(_app: Sphinx | None, page: str, content: list[str]) -> None:
    """Mend a page's links, and give a notebook its link to Colab."""
    if page.startswith(_NOTEBOOKS):
        content[0] = _with_colab_link(content[0], page)
    content[0] = _with_site_links(content[0])


def _with_site_links(text: str) -> str:
    """Return a page whose links out of ``docs/`` lead to pages of the site, or to the repository where it is known.

    The example notebooks are pages of the site, under the symbolic link ``docs/example_notebooks``.
    """
    text = re.sub(rf"\]\(\.\./({_NOTEBOOKS}\w+)\.ipynb\)", r"](\1)", text)
    repository = _repository()
    link = rf"[\1](https://github.com/{repository}/blob/{_commit()}/\2)" if repository else r"\1"
    return re.sub(r"(?<!!)\[([^]]*)\]\(\.\./([^)]*)\)", link, text)


def _repository() -> str:
    """Return ``OWNER/NAME`` on GitHub, as Read the Docs tells it; empty elsewhere."""
    found = re.search(r"github\.com[:/](.+?)(\.git)?/?$", os.environ.get("READTHEDOCS_GIT_CLONE_URL", ""))
    return found[1] if found else ""


def _commit() -> str:
    return os.environ.get("READTHEDOCS_GIT_COMMIT_HASH", "HEAD")


def _with_colab_link(text: str, page: str) -> str:
    repository = _repository()
    if not repository:
        return text
    notebook = json.loads(text)
    colab = f"https://colab.research.google.com/github/{repository}/blob/{_commit()}/{page}.ipynb"
    install = f"%pip install git+https://github.com/{repository}"
    source = f"[Open this notebook in Colab]({colab}). There, first run `{install}` in a cell of its own."
    notebook["cells"].insert(1, {"cell_type": "markdown", "id": "colab", "metadata": {}, "source": source})
    return json.dumps(notebook)


# The page about commands and magics, from their parsers.


class CommandLine(SphinxDirective):
    """A section for each command of ``notebook-accel`` and for each magic of the notebook."""

    def run(self) -> list[nodes.Node]:
        """Return the sections."""
        return self.parse_text_to_nodes("\n\n".join(_command_line()), allow_section_headings=True)


def _command_line() -> Iterator[str]:
    """Yield the page's blocks, in Markdown."""
    [programs] = [action for action in cli.make_parser()._actions if isinstance(action, argparse._SubParsersAction)]
    summaries = {action.dest: str(action.help) for action in programs._choices_actions}
    for name, parser in programs.choices.items():
        yield from _section(f"notebook-accel {name}", summaries[name], parser)
    yield from _section("%%distributed", "Run the cell in ranks", magics.make_parser())
    yield "## %distributed"
    yield f"```text\n{inspect.cleandoc(f'{commands.run.__doc__}{session_magics.HELP}')}\n```"


def _section(title: str, summary: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield a parser's heading, its usage, and a table of the arguments that aren't options of a launch."""
    options = {option.name for option in config.fields()}
    shown = [action for action in parser._actions if action.dest != "help" and action.help != argparse.SUPPRESS]
    own = [action for action in shown if not action.option_strings or action.dest not in options]
    positional = [_positional(action) for action in own if not action.option_strings]
    flags = ["[flags]"] * (len(shown) > len(positional))
    yield f"## {title}"
    yield _sentence(summary)
    yield f"```text\n{' '.join([title, *flags, *positional])}\n```"
    if own:
        rows = [f"| {_names(action)} | {_sentence(str(action.help).replace('%%', '%'))} |" for action in own]
        yield "\n".join(["| argument | what it does |", "| --- | --- |", *rows])
    if len(own) < len(shown):
        yield "All [options of a launch](options.md#all-options) are flags too."


def _names(action: argparse.Action) -> str:
    return ", ".join(f"`{name}{_value(action)}`" for name in action.option_strings or [action.metavar or action.dest])


def _positional(action: argparse.Action) -> str:
    name = str(action.metavar or action.dest)
    return {"?": f"[{name}]", argparse.REMAINDER: f"[{name} ...]"}.get(str(action.nargs), name)


def _value(action: argparse.Action) -> str:
    return "" if action.nargs == 0 or not action.option_strings else f" {action.metavar or action.dest.upper()}"


def _sentence(text: str) -> str:
    text = re.sub(r"(?<!\S)--[\w-]+", r"`\g<0>`", " ".join(text.split()).replace("|", r"\|"))
    return f"{text[:1].upper()}{text[1:].removesuffix('.')}."


# The reference: each public object once, and none missing.


def _skip_documented_elsewhere(
    _app: Sphinx, what: str, _name: str, member: object, _skip: bool, _options: Any
) -> bool | None:
    """Leave an object of ``notebook_accel`` out of modules that have it too, where it would be a second entry."""
    public = (getattr(notebook_accel, name) for name in notebook_accel.__all__)
    return True if what == "module" and any(member is value for value in public) else None


def _check_reference(_app: Sphinx, environment: BuildEnvironment) -> None:
    """Warn of each public name without an entry, which fails the build.

    A public name is one of ``notebook_accel.__all__``, of the errors or of Accelerate's modules, or a public attribute
    of a class in the first two.
    """
    entries = set(environment.domains.python_domain.objects)
    documented = {id(value) for value in map(_value_of, entries) if value is not None}
    for module in (notebook_accel, errors, *(importlib.import_module(f"notebook_accel.{door}") for door in _DOORS)):
        for name in module.__all__:
            value = getattr(module, name)
            if id(value) not in documented:
                _LOGGER.warning("%s.%s has no entry in the reference", module.__name__, name)
            elif inspect.isclass(value) and module in (notebook_accel, errors):
                for attribute in _public_attributes(value):
                    if not entries & {f"{owner}.{name}.{attribute}" for owner in (module.__name__, value.__module__)}:
                        _LOGGER.warning("%s.%s.%s has no entry in the reference", module.__name__, name, attribute)


def _value_of(entry: str) -> object:
    """Return the object of an entry, ``None`` for one that isn't a module's."""
    module, _, name = entry.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None


def _public_attributes(kind: type) -> Iterator[str]:
    """Yield the names of methods and properties that this package has given to a class."""
    for base in kind.__mro__:
        if base.__module__.startswith("notebook_accel"):
            for name, value in vars(base).items():
                if not name.startswith("_") and isinstance(value, types.FunctionType | property | classmethod):
                    yield name


# The same pages as text, for language models: https://llmstxt.org


def _write_llms(app: Sphinx, error: Exception | None) -> None:
    """Write ``llms.txt``, a list of the pages, and ``llms-full.txt``, all their text."""
    if error or app.builder.format != "html":
        return
    env = app.env
    pages = list(_in_order(env, env.config.root_doc))
    home = env.get_doctree(env.config.root_doc)
    head = [f"# {app.config.project}", f"> {_summary(home)}"]
    links = [
        f"- [{env.titles[page].astext()}]({app.config.html_baseurl}{app.builder.get_target_uri(page)}): "
        f"{_summary(env.get_doctree(page))}"
        for page in pages
    ]
    folder = pathlib.Path(app.outdir)
    (folder / "llms.txt").write_text("\n\n".join([*head, "## Pages", "\n".join(links)]) + "\n", encoding="utf-8")
    texts = [_text(app, page).strip() for page in pages]
    (folder / "llms-full.txt").write_text("\n\n\n".join([*head, *texts]) + "\n", encoding="utf-8")


def _in_order(env: BuildEnvironment, page: str) -> Iterator[str]:
    """Yield the pages below one, as the table of contents has them."""
    for child in env.toctree_includes.get(page, ()):
        yield child
        yield from _in_order(env, child)


def _summary(page: nodes.document) -> str:
    """Return a page's first sentence."""
    paragraph = " ".join(next(page.findall(nodes.paragraph)).astext().split())
    return re.split(r"(?<=\.) ", paragraph, maxsplit=1)[0]


def _text(app: Sphinx, page: str) -> str:
    """Return a page's text: its Markdown, or what the build makes of it."""
    source = pathlib.Path(app.env.doc2path(page)).read_text(encoding="utf-8")
    if page.startswith(_NOTEBOOKS):
        return "\n\n".join(_cell_text(cell) for cell in json.loads(source)["cells"])
    source = source.replace("```{command-line}\n```", "\n\n".join(_command_line()))
    if "```{" not in source:
        # Comments are for the test that runs the blocks.
        return _with_site_links(re.sub(r"^<!-- .*?-->\n+", "", source, flags=re.MULTILINE | re.DOTALL))
    document = app.env.get_and_resolve_doctree(page, app.builder)
    writer = TextTranslator(document, app.builder)
    document.walkabout(writer)
    return writer.body


def _cell_text(cell: dict[str, Any]) -> str:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return source
    shown = [output.get("text") or output["data"].get("text/plain", "") for output in cell["outputs"]]
    printed = "".join("".join(lines).rstrip() + "\n" for lines in shown)
    return f"```python\n{source}\n```" + (f"\n\n```text\n{printed}```" if printed else "")
