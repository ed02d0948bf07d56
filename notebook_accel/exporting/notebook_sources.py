"""The statements in the notebook's cells that imported or defined its objects.

A function's code has the name of its cell, so its text is right even if cells were edited or run since. A
class is found through its methods. An import counts if it yields the object that the notebook has.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import linecache
import os
import re
import sys
import types
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from notebook_accel.exporting import plain_python
from notebook_accel.exporting.plain_python import Statement
from notebook_accel.payload import definitions, unpicklable


@dataclasses.dataclass(frozen=True)
class Definition:
    """A statement of a cell that defines a function or a class, or assigns one to a name."""

    name: str  # the name that the statement assigns
    text: str  # with the comments above it
    node: ast.stmt
    label: str  # the cell, as ``In[3]``
    number: int  # of the cell
    lines: range  # the statement's lines in the cell
    modules: frozenset[str] = frozenset()  # modules that the text needs in addition

    @property
    def place(self) -> tuple[int, int]:
        """Sort key: the order in which the notebook ran the definitions."""
        return self.number, self.lines.start


@dataclasses.dataclass(frozen=True)
class _SourceCell:
    number: int
    label: str
    source: str

    @property
    def offset(self) -> int:
        """Number of lines of a cell magic above the source."""
        return int(self.source.startswith(_MAGIC_LINE))

    @functools.cached_property
    def statements(self) -> list[Statement]:
        try:
            return plain_python.statements(self.source)
        except SyntaxError:
            return []


class NotebookSources:
    """The sources of the cells that were run, in order, from number 0, with IPython's syntax translated.

    ``names`` has the notebook's names.
    """

    def __init__(self, cells: Sequence[str], names: Collection[str]) -> None:
        self._names = names
        self._cells = [
            _SourceCell(number, f"In[{number}]", _under_magic(source)) for number, source in enumerate(cells)
        ]
        self._by_text = {cell.source.strip(): cell for cell in self._cells}

    # Imports --------------------------------------------------------------------------------------------------------

    def import_statement(self, name: str, value: Any) -> str:
        """Return the statement that imports this object under this name, empty if there is none."""
        for node in self._imports():
            for alias in node.names:
                if (alias.asname or alias.name.partition(".")[0]) == name and _imports_value(node, alias, value):
                    return ast.unparse(_single_import(node, alias))
        if isinstance(value, types.ModuleType) and sys.modules.get(value.__name__) is value:
            package, _, last = value.__name__.rpartition(".")
            if package and last == name:
                return f"from {package} import {last}"
            return f"import {value.__name__}" + (f" as {name}" if name != value.__name__ else "")
        if definitions.can_be_imported(value) and "." not in value.__qualname__:
            imported = value.__qualname__
            return f"from {value.__module__} import {imported}" + (f" as {name}" if name != imported else "")
        return ""

    def submodules(self, reached: Sequence[str]) -> Iterator[str]:
        """Yield the statements that import these modules, which code reaches as attributes of packages."""
        for node in self._imports():
            for alias in node.names if isinstance(node, ast.Import) else ():
                if alias.asname is None and "." in alias.name and alias.name in reached:
                    yield f"import {alias.name}"

    def futures(self) -> Iterator[str]:
        """Yield the ``__future__`` imports."""
        for node in self._imports():
            if isinstance(node, ast.ImportFrom) and node.module == "__future__":
                yield ast.unparse(node)

    def _imports(self) -> Iterator[ast.Import | ast.ImportFrom]:
        """Yield all imports at the top level of cells, the latest first."""
        for cell in reversed(self._cells):
            for statement in cell.statements:
                for top in statement.nodes:
                    nodes = ast.walk(top) if isinstance(top, (ast.If, ast.Try, ast.With)) else (top,)
                    yield from (node for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom)))

    # Definitions ----------------------------------------------------------------------------------------------------

    def _definition(self, cell: _SourceCell, statement: Statement, name: str) -> Definition:
        first = statement.lines[-1] - statement.text.count("\n")
        text, modules = plain_python.plain(statement.text, cell.label, self._names, first)
        return Definition(name, text, ast.parse(text).body[0], cell.label, cell.number, statement.lines, modules)

    def of_function(self, function: types.FunctionType, name: str) -> Definition | None:
        """Return the statement that defined a function, or assigned a lambda to a name."""
        code = function.__code__
        cell = self._cell_of(code) or self._cell_with_code(code)
        if cell is None:
            return None
        for statement in cell.statements:
            node = statement.only
            begins = node.value.lineno if isinstance(node, ast.Assign) else statement.lines.start
            if begins - cell.offset != code.co_firstlineno:
                continue
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Lambda) and _is_assigned(node, name):
                return self._definition(cell, statement, name)
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == code.co_name:
                return self._definition(cell, statement, node.name)
        return None

    def _cell_with_code(self, code: types.CodeType) -> _SourceCell | None:
        """Return the latest cell under a magic that compiles to the same code. Such code doesn't know its cell."""
        for cell in reversed(self._cells):
            for statement in cell.statements if cell.offset else ():
                made = compile(ast.Module(list(statement.nodes), []), "<cell>", "exec", dont_inherit=True)
                functions = [part for part in made.co_consts if isinstance(part, types.CodeType)]
                if any(_is_same_code(part, code, cell.offset) for part in functions):
                    return cell
        return None

    def of_class(self, kind: type) -> Definition | None:
        """Return the statement that defined a class."""
        own = [each.__code__ for each in _methods(kind) if each.__qualname__.startswith(f"{kind.__qualname__}.")]
        found = {code: cell for code in own if (cell := self._cell_of(code)) is not None}
        for cell in list(found.values())[:1] or reversed(self._cells):
            for statement in reversed(cell.statements):
                node = statement.only
                if not (isinstance(node, ast.ClassDef) and node.name == kind.__name__ and _matches(node, kind)):
                    continue
                if all(code.co_firstlineno in statement.lines for code in found):
                    return self._definition(cell, statement, node.name)
        return None

    def of_assigned(self, name: str) -> Definition | None:
        """Return the latest statement that assigned a call's value to this name."""
        for cell in reversed(self._cells):
            for statement in reversed(cell.statements):
                if isinstance(statement.only, ast.Assign) and _is_assigned(statement.only, name):
                    return self._definition(cell, statement, name)
        return None

    def added_later(self, kind: type, definition: Definition) -> list[str]:
        """Return the methods that were added to a class after its definition."""
        return [
            function.__name__
            for function in _methods(kind)
            if (cell := self._cell_of(function.__code__)) is not None
            and not (cell.label == definition.label and function.__code__.co_firstlineno in definition.lines)
        ]

    def _cell_of(self, code: types.CodeType) -> _SourceCell | None:
        if os.path.exists(code.co_filename):
            return None
        source = "".join(linecache.getlines(code.co_filename))
        if not source:
            return None
        known = self._by_text.get(source.strip())
        if known is not None:
            return dataclasses.replace(known, source=source)
        number = re.fullmatch(r"In\[(\d+)\]", code.co_filename)  # defined by a cell under %%distributed
        return _SourceCell(int(number[1]) if number else -1, code.co_filename, source)


_MAGIC_LINE = "#%%\n"


def _under_magic(source: str) -> str:
    """Return a cell's source. Under a magic such as ``%%time``, a comment replaces the magic's own line."""
    if not source.startswith("get_ipython().run_cell_magic("):
        return source
    call = ast.parse(source).body[0]
    assert isinstance(call, ast.Expr) and isinstance(call.value, ast.Call)
    body = call.value.args[-1]
    is_text = isinstance(body, ast.Constant) and isinstance(body.value, str)
    return f"{_MAGIC_LINE}{ast.literal_eval(body)}" if is_text else source


def _is_same_code(one: types.CodeType, other: types.CodeType, offset: int) -> bool:
    return (one.co_name, one.co_code, one.co_names, one.co_varnames, one.co_firstlineno - offset) == (
        other.co_name, other.co_code, other.co_names, other.co_varnames, other.co_firstlineno,
    )  # fmt: skip


def _imports_value(node: ast.Import | ast.ImportFrom, alias: ast.alias, value: Any) -> bool:
    """Return whether one name of an import statement stands for this value."""
    if isinstance(node, ast.Import):
        return sys.modules.get(alias.name if alias.asname else alias.name.partition(".")[0]) is value
    module = sys.modules.get(node.module or "")
    found = vars(module).get(alias.name) if module is not None else None
    module = sys.modules.get(f"{node.module}.{alias.name}")
    return node.level == 0 and value is not None and (value is found or value is module)


def _single_import(node: ast.Import | ast.ImportFrom, alias: ast.alias) -> ast.stmt:
    if isinstance(node, ast.Import):
        return ast.Import([alias if alias.asname else ast.alias(alias.name.partition(".")[0])])
    return ast.ImportFrom(node.module, [alias], 0)


def _is_assigned(node: ast.Assign, name: str) -> bool:
    target = node.targets[0]
    return len(node.targets) == 1 and isinstance(target, ast.Name) and target.id == name


def _methods(kind: type) -> Iterator[types.FunctionType]:
    """Yield the functions in a class, unwrapped."""
    for member in unpicklable.class_members(kind):
        function = inspect.unwrap(member) if callable(member) else member
        if isinstance(function, types.FunctionType):
            yield function


def _matches(node: ast.ClassDef, kind: type) -> bool:
    """Return whether a class has all names that a class statement binds."""
    bound = {child.name for child in node.body if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))}
    bound |= {
        child.target.id
        for child in node.body
        if isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name) and child.value is None
    }
    return bound <= {*vars(kind), *vars(kind).get("__annotations__", ()), *getattr(kind, "__annotations__", ())}
