"""The notebook's objects that a script needs.

Imports and definitions become source, small values become literals, and everything else becomes data. A definition is
the latest statement of the notebook's cells that binds the name, if it makes what the notebook has.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import inspect
import os
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any

from notebook_accel.errors import CellError
from notebook_accel.exporting import statements
from notebook_accel.exporting.statements import Body, Statement
from notebook_accel.launching.kernel import cell as cells
from notebook_accel.launching.kernel.cell import Cell
from notebook_accel.payload import definitions, unpicklable

_LONGEST_LITERAL = 200
_PLAIN = (int, float, complex, str, bytes, bool, type(None), tuple)
_CONTAINERS = (list, dict, set)
_OF_SHELL = ("system", "getoutput")  # what `!command` and `x = !command` become


@dataclasses.dataclass
class ScriptContents:
    """The parts of a script besides the cell.

    Methods raise a ``CellError`` if source can't be in a script.
    """

    _cell: Cell
    _namespace: Mapping[str, Any]
    _history: Sequence[Statement]  # of the notebook's cells, the latest first
    _own: set[str]  # names that the script has, or is about to have
    imports: dict[str, None] = dataclasses.field(default_factory=dict)  # statements
    literals: dict[str, str] = dataclasses.field(default_factory=dict)  # the texts of small values by name
    definitions: dict[str, Statement] = dataclasses.field(default_factory=dict)  # of functions and classes by name
    data: dict[str, Any] = dataclasses.field(default_factory=dict)  # values without source by name
    uses_shell: bool = False  # the source has shell commands

    def require(self, name: str) -> None:
        """Add a name of the notebook, and the names that its definition needs."""
        if name in self._own:
            return
        self._own.add(name)
        value = self._namespace[name]
        if imports := self._imports(name, value):
            self.imports.update(dict.fromkeys(imports))
        elif statement := self._definition(name, value):
            self.definitions[name] = statement
            number, line = statement.place
            self.require_source(statement.text, f"In[{number}]", line)
        elif _is_literal(value) and not self._is_shared(name, value):
            self.literals[name] = repr(value)
        else:
            self.data[name] = value

    def require_source(self, source: str, label: str, first_line: int = 1) -> None:
        """Add the names that a piece of source reads. ``label`` and ``first_line`` give its place in errors."""
        tree = ast.parse(source)
        names = set(cells.reads(cells.with_variables_of_commands(source).body))
        of_shell: set[Any] = set()
        for call, method in cells.calls_of_shell(tree):
            of_shell.update(ast.walk(call.func))
            if method not in _OF_SHELL:
                magic = f"%{ast.literal_eval(call.args[0])}" if method.startswith("run_") else f"get_ipython().{method}"
                raise CellError(
                    f"{label}, line {first_line - 1 + call.lineno}: {magic} is IPython's, and a script has none.",
                    fix="write it in plain Python, or take it out of the cell",
                )
        self.uses_shell = self.uses_shell or bool(of_shell)
        is_here = names & self._namespace.keys() - cells.OF_IPYTHON - cells.OF_MODULES
        is_here = {name for name in is_here if not cells.is_builtin(name, self._namespace[name])}
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and node.id in names - is_here and node not in of_shell:
                self._require_other(node.id, f"{label}, line {first_line - 1 + node.lineno}")
        for name in sorted(is_here):
            self.require(name)

    def _require_other(self, name: str, where: str) -> None:
        """Refuse a name that neither the notebook nor Python has, or that a script can't use."""
        if name == "display":
            self.imports["from IPython.display import display"] = None
            return
        known = self._own | cells.OF_MODULES | ({"_exit_code"} if self.uses_shell else set())  # which a command sets
        if self._cell.assigns is None or name in self._cell.assigns | known:
            return
        if name == "input":
            what, fix = "asks at a keyboard, and ranks have none", "ask in an earlier cell, and use the answer here"
        elif name in cells.OF_IPYTHON - {"exit", "quit"}:
            what, fix = "is the notebook's, and a script has none", "give the value a name in a cell, and use that"
        elif not hasattr(builtins, name):
            what = "isn't there in the notebook, or not any more"
            fix = "run the cell that makes it, or take it out; %pull it first if only a session's ranks have it"
        else:
            return
        raise CellError(f"{where}: {name!r} {what}.", fix=fix)

    def name_of(self, obj: Any) -> str:
        """Return the script's name for a function or class of the notebook, empty if it has no source."""
        name: str = obj.__name__
        if name not in self._own and self._definition(name, obj) is not None:
            self.require(name)
        return name if name in self.definitions else ""

    def in_order(self) -> tuple[list[str], list[str]]:
        """Return the texts of the definitions, each after those that it needs when it runs.

        The second list has the definitions that need data. They come after the data, which may need the first ones.
        """
        ordered: dict[str, bool] = {}

        def needs_data(name: str) -> bool:
            """Add a definition after those that it needs, and return whether it needs data."""
            if name in self.definitions and name not in ordered:
                ordered[name] = False  # ends a cycle, since a definition may name itself
                needs = [needs_data(other) for other in sorted(self.definitions[name].reads_at_once)]
                del ordered[name]
                ordered[name] = any(needs)
            return ordered.get(name, name in self.data)

        for name in sorted(self.definitions, key=lambda name: self.definitions[name].place):
            needs_data(name)
        early, late = (
            [self.definitions[name].text for name in ordered if ordered[name] is is_late] for is_late in (False, True)
        )
        return early, late

    def _imports(self, name: str, value: Any) -> list[str]:
        """Return the statement that imports this object under this name, and those of submodules that it brings."""
        found = [
            (node, alias)
            for statement in self._history
            for node in statement.parts
            if isinstance(node, (ast.Import, ast.ImportFrom))
            for alias in node.names
            if (alias.asname or alias.name.partition(".")[0]) == name and _imports_value(node, alias, value)
        ]
        submodules = [(node, alias) for node, alias in found if isinstance(node, ast.Import) and not alias.asname]
        if found:
            return [_single_import(node, alias) for node, alias in [found[0], *submodules]]
        if isinstance(value, types.ModuleType) and sys.modules.get(value.__name__) is value:
            return [f"import {value.__name__}" + (f" as {name}" if name != value.__name__ else "")]
        if definitions.can_be_imported(value) and "." not in value.__qualname__:
            imported = value.__qualname__
            return [f"from {value.__module__} import {imported}" + (f" as {name}" if name != imported else "")]
        return []

    def _definition(self, name: str, value: Any) -> Statement | None:
        """Return the latest statement that binds a name, if it defines this function or class."""
        own = _codes_of(value)
        if not (own or isinstance(value, type) or type(value).__module__ == "typing"):
            return None
        statement = next((each for each in self._history if name in each.binds), None)
        node = None if statement is None else statement.only
        assigned = node.value if isinstance(node, ast.Assign) and isinstance(node.targets[-1], ast.Name) else None
        if statement is None or statement.binds != {name}:
            return None
        if isinstance(assigned, ast.Name):  # another name of it
            is_made = self._namespace.get(assigned.id) is value
        elif isinstance(assigned, ast.Lambda) or isinstance(node, statements.DEFINITIONS):
            # The functions registered for a generic one are in statements of their own.
            is_made = own <= _codes_in(statement.code) and not hasattr(value, "registry")
        else:  # such as a namedtuple
            is_made = assigned is not None and not own
        return statement if is_made else None

    def _is_shared(self, name: str, value: Any) -> bool:
        """Return whether a container has another name too, so that both names must keep one object."""
        others = (other for key, other in self._namespace.items() if key != name and not key.startswith("_"))
        return isinstance(value, _CONTAINERS) and any(other is value for other in others)


def collect(
    cell: Cell, body: Body, namespace: Mapping[str, Any], history: Sequence[str], args: str | None, push: Sequence[str]
) -> ScriptContents:
    """Return the parts of a script for a cell. ``push`` has further names that the script needs."""
    run = [statement for number, source in enumerate(history) for statement in _statements(source, number)]
    contents = ScriptContents(cell, namespace, run[::-1], set(body.defines), dict.fromkeys(body.imports))
    contents.require_source(cell.source, cell.label)
    try:
        contents.require_source(args or "()", "--args")
    except SyntaxError as error:
        raise CellError(f"--args {args}: it is not Python: {error.msg}.") from None
    for name in cell.captured(namespace, push):
        contents.require(name)
    return contents


def _statements(source: str, number: int) -> list[Statement]:
    try:
        return statements.split(source, number)
    except SyntaxError:
        return []


def _is_literal(value: Any) -> bool:
    if type(value) not in (*_PLAIN, *_CONTAINERS):
        return False
    text = repr(value)
    try:
        return len(text) <= _LONGEST_LITERAL and bool(ast.literal_eval(text) == value)
    except (SyntaxError, ValueError):  # objects inside, or nan
        return False


def _imports_value(node: ast.Import | ast.ImportFrom, alias: ast.alias, value: Any) -> bool:
    """Return whether one name of an import statement stands for this value."""
    if isinstance(node, ast.Import):
        return sys.modules.get(alias.name if alias.asname else alias.name.partition(".")[0]) is value
    module = sys.modules.get(node.module or "")
    found = vars(module).get(alias.name) if module is not None else None
    return node.level == 0 and value is not None and (found or sys.modules.get(f"{node.module}.{alias.name}")) is value


def _single_import(node: ast.Import | ast.ImportFrom, alias: ast.alias) -> str:
    single = ast.Import([alias]) if isinstance(node, ast.Import) else ast.ImportFrom(node.module, [alias], 0)
    return ast.unparse(single)


def _codes_of(value: Any) -> set[object]:
    """Return the code of a function, or of the methods of a class, that is in no file."""
    members = unpicklable.class_members(value) if isinstance(value, type) else [value]
    functions = [inspect.unwrap(member) for member in members if callable(member)]
    codes = [function.__code__ for function in functions if isinstance(function, types.FunctionType)]
    # Generated methods, such as those of dataclasses, are in "<string>".
    return {_key(code) for code in codes if code.co_filename != "<string>" and not os.path.exists(code.co_filename)}


def _codes_in(code: types.CodeType) -> set[object]:
    inner = [part for part in code.co_consts if isinstance(part, types.CodeType)]
    return {_key(code)}.union(*map(_codes_in, inner))


def _key(code: types.CodeType) -> object:
    """Return a value that is equal for two pieces of code that do the same."""
    constants = tuple(part for part in code.co_consts if not isinstance(part, types.CodeType))
    return code.co_name, code.co_code, code.co_names, code.co_varnames, repr(constants)
