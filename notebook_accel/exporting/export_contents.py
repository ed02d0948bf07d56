"""The notebook's objects that a script needs.

Imports and definitions become source, small values become literals, and everything else becomes data.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import inspect
import re
import types
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from notebook_accel.errors import CellError
from notebook_accel.exporting import plain_python, stale_definitions
from notebook_accel.exporting.notebook_sources import Definition, NotebookSources
from notebook_accel.exporting.plain_python import Body
from notebook_accel.launching.kernel import cell as cells
from notebook_accel.launching.kernel.cell import Cell

_LONGEST_LITERAL = 200
_OF_PYTHON_TOO = {"exit", "quit"}


@dataclasses.dataclass
class ScriptContents:
    """The parts of a script besides the cell, which is in plain Python.

    Methods raise a ``CellError`` if a definition has no source, or its source can't be in a script.
    """

    _cell: Cell
    _namespace: Mapping[str, Any]
    _sources: NotebookSources
    _own: Collection[str]  # names that the script defines before the cell runs, so that it doesn't need the notebook's
    _done: set[str] = dataclasses.field(default_factory=set)
    imports: dict[str, None] = dataclasses.field(default_factory=dict)  # statements
    literals: dict[str, str] = dataclasses.field(default_factory=dict)  # the texts of small values by name
    definitions: dict[str, Definition] = dataclasses.field(default_factory=dict)  # functions and classes by name
    aliases: dict[str, str] = dataclasses.field(default_factory=dict)  # other names of functions and classes
    data: dict[str, Any] = dataclasses.field(default_factory=dict)  # values without source by name

    def require(self, name: str) -> None:
        """Add a name of the notebook, and the names that its definition needs."""
        if name in self._done:
            return
        self._done.add(name)
        value = self._namespace[name]
        imported = self._sources.import_statement(name, value)
        if imported:
            self.imports[imported] = None
        elif _is_code(value):
            self._define(name, value)
        elif _is_literal(value) and not self._is_shared(name, value):
            self.literals[name] = repr(value)
        else:
            self.data[name] = value

    def _is_shared(self, name: str, value: Any) -> bool:
        """Return whether a container has another name too, so that both names must keep one object."""
        others = (other for key, other in self._namespace.items() if key != name and not key.startswith("_"))
        return isinstance(value, (list, dict, set)) and any(other is value for other in others)

    def _define(self, name: str, value: Any) -> None:
        found = self._definition(name, value)
        if found is None and "<locals>" in getattr(value, "__qualname__", ""):
            self.data[name] = value  # objects made inside a function go by value
            return
        if found is None:
            raise _without_source(name, value)
        if found.name != name and self._namespace.get(found.name) is value:
            self.require(found.name)
            self.aliases[name] = found.name
            return
        self.definitions[name] = found if found.name == name else _renamed(found, name)
        self.imports.update({f"import {module}": None for module in sorted(found.modules)})
        read = [name for name in cells.reads([found.node]) if name not in found.modules]
        self.require_all(read, found.label, found.lines.start - found.node.lineno, [found.node])
        stale_definitions.check(name, value, found, self._namespace, self._sources.of_assigned(name))
        for decorator in getattr(found.node, "decorator_list", ()):
            base = stale_definitions.base_name(decorator)
            applied = self.definitions.get(self.aliases.get(base, base))
            if applied is not None:
                stale_definitions.check_decorator(name, value, decorator, applied, self._namespace)

    def _definition(self, name: str, value: Any) -> Definition | None:
        if isinstance(value, type):
            found = self._sources.of_class(value)
            later = self._sources.added_later(value, found) if found is not None else []
            if later:
                raise CellError(
                    f"The class {name!r} can't be exported: its {', '.join(later)} was put into it after its "
                    "definition.",
                    fix=f"write it into the class statement of {name}, and run that cell again",
                )
            return found or self._sources.of_assigned(name)
        function = inspect.unwrap(value)
        if isinstance(function, types.FunctionType):
            if hasattr(value, "registry") and hasattr(value, "dispatch"):
                raise CellError(
                    f"The function {name!r} can't be exported: the functions registered for it have no names.",
                    fix="define it and the functions registered for it in the cell",
                )
            return self._sources.of_function(function, name)
        return self._sources.of_assigned(name)

    def require_all(self, names: Sequence[str], label: str, offset: int, nodes: Sequence[ast.stmt]) -> None:
        """Add the names that a piece of source reads. ``label`` and ``offset`` give its cell and line in errors."""
        known_here = self._cell.assigns or frozenset()
        for name in names:
            if name in _MODULE_NAMES or name in self._own:
                continue
            is_notebooks = name in self._namespace and not cells.is_builtin(name, self._namespace[name])
            if is_notebooks and name not in cells.OF_IPYTHON:
                self.require(name)
            elif name == "display" and hasattr(builtins, name):
                self.imports["from IPython.display import display"] = None
            elif name in known_here:
                continue
            elif name == "input":
                raise _refusal(label, offset, nodes, name, "asks at a keyboard, and ranks have none", _ASK_BEFORE)
            elif name in cells.OF_IPYTHON and name not in _OF_PYTHON_TOO:
                raise _refusal(label, offset, nodes, name, "is the notebook's, and a script has none", _USE_A_NAME)
            elif not hasattr(builtins, name) and self._cell.assigns is not None:
                raise _refusal(label, offset, nodes, name, "isn't there in the notebook, or not any more", _DEFINE)

    def import_statements(self) -> list[str]:
        """Return all imports, also those of submodules that code reaches as attributes and of ``__future__``."""
        tree = ast.parse("\n".join([self._cell.source, *(found.text for found in self.definitions.values())]))
        captured = {name: self._namespace[name] for name in self._done}
        reached = dataclasses.replace(self._cell, tree=tree).submodules(captured)
        return [*self.imports, *self._sources.submodules(reached), *self._sources.futures()]

    def name_of(self, obj: Any) -> str:
        """Return the script's name for a function or class of the notebook, empty if it has no source."""
        name: str = obj.__name__
        if name not in self._done and self._definition(name, obj) is None:
            return ""
        self.require(name)
        return name if name in self.definitions else ""

    def in_order(self) -> tuple[list[str], list[str]]:
        """Return the texts of the definitions, each with its aliases and after those that it needs when it runs.

        The second list has the definitions that need data. They come after the data, which may need the first ones.
        """
        ordered: dict[str, bool] = {}

        def visit(name: str) -> bool:
            """Add a definition after those that it needs, and return whether it needs data."""
            if name not in ordered:
                ordered[name] = False  # ends a cycle, since a definition may name itself
                read = [
                    self.aliases.get(other, other) for other in plain_python.reads_at_once(self.definitions[name].node)
                ]
                needs = [other in self.data or (other in self.definitions and visit(other)) for other in read]
                del ordered[name]
                ordered[name] = any(needs)
            return ordered[name]

        for name in sorted(self.definitions, key=lambda name: self.definitions[name].place):
            visit(name)
        before = [self._text(name) for name, is_late in ordered.items() if not is_late]
        return before, [self._text(name) for name, is_late in ordered.items() if is_late]

    def _text(self, name: str) -> str:
        aliases = [f"{alias} = {meant}" for alias, meant in self.aliases.items() if meant == name]
        return "\n\n\n".join([self.definitions[name].text, *(["\n".join(aliases)] if aliases else [])])


_MODULE_NAMES = {"__name__", "__doc__", "__file__", "__spec__", "__loader__", "__package__", "__builtins__"}
_ASK_BEFORE = "ask in a cell of its own, and use the answer here: it is exported then"
_USE_A_NAME = "give the value a name in a cell, and use that"
_DEFINE = "run the cell that makes it, or take it out; %pull it first if only a session's ranks have it"


def collect(
    cell: Cell, body: Body, namespace: Mapping[str, Any], history: Sequence[str], push: Sequence[str] = ()
) -> ScriptContents:
    """Return the parts of a script for a cell in plain Python. ``push`` has further names that the script needs."""
    contents = ScriptContents(cell, namespace, NotebookSources(history, namespace), body.defines)
    statements = cell.tree.body
    contents.require_all(cells.reads(statements), cell.label, 0, statements)
    contents.require_all(cells.reads(body.arguments), "--args", 0, body.arguments)
    for name in cell.captured(namespace, push):
        if name not in body.defines:
            contents.require(name)
    return contents


def _is_code(value: Any) -> bool:
    """Return whether a value has to be defined by source."""
    if isinstance(value, (type, types.FunctionType)) or type(value).__module__ == "typing":
        return True
    return callable(value) and isinstance(getattr(value, "__wrapped__", None), types.FunctionType)


def _is_literal(value: Any) -> bool:
    try:
        return _is_plain(value) and len(repr(value)) <= _LONGEST_LITERAL
    except RecursionError:  # the value contains itself
        return False


_PLAIN = (int, float, complex, str, bytes, bool, type(None))
_CONTAINERS = (list, tuple, dict, set)


def _is_plain(value: Any) -> bool:
    if type(value) in _PLAIN:
        return bool(value == value) and abs(value) != float("inf") if type(value) in (float, complex) else True
    if type(value) is dict:
        return all(_is_plain(part) for item in value.items() for part in item)
    return type(value) in _CONTAINERS and (type(value) is not set or bool(value)) and all(map(_is_plain, value))


def _without_source(name: str, value: Any) -> CellError:
    if getattr(value, "__name__", "") == "<lambda>":
        return CellError(
            f"The lambda {name!r} can't be exported: no statement by itself has assigned it to this name.",
            fix=f"write it as `{name} = lambda ...`, or better with def",
        )
    kind = "class" if isinstance(value, type) else "function"
    return CellError(
        f"The {kind} {name!r} can't be exported: the cell that has defined it is gone.",
        fix="run the cell that defines it again, and export then",
    )


def _renamed(found: Definition, name: str) -> Definition:
    """Return a definition under another name, since its own name now means another object."""
    text = re.sub(rf"^((?:async )?def|class) {found.name}\b", rf"\1 {name}", found.text, count=1, flags=re.MULTILINE)
    return dataclasses.replace(found, name=name, text=text)


def _refusal(label: str, offset: int, nodes: Sequence[ast.stmt], name: str, what: str, fix: str) -> CellError:
    lines = [
        node.lineno + offset
        for top in nodes
        for node in ast.walk(top)
        if isinstance(node, ast.Name) and node.id == name
    ]
    where = f"{label}, line {min(lines)}: " if lines else f"{label}: "
    return CellError(f"{where}{name!r} {what}.", fix=fix)
