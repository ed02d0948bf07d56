"""The cell itself in a script: what worker processes need stands free, all else under ``if __name__ == "__main__"``."""

from __future__ import annotations

import ast
import collections
import dis
from collections.abc import Sequence

from notebook_accel.errors import CellError
from notebook_accel.exporting import plain_python
from notebook_accel.exporting.plain_python import Statement

__all__ = ["Body"]

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class Body:
    """A cell's statements, each in its place.

    Args:
        source: The cell, in plain Python.
        calls: The function that it ends by defining, empty if it doesn't.
        args: The expression with that function's arguments, ``None`` without one.

    Attributes:
        imports: Statements with which it begins, or would.
        definitions: Text of functions and classes that can stand before all else.
        defines: Their names.
        guarded: The text of the main program, not indented.
        arguments: What the function that the cell ends by defining is called with.

    Raises:
        CellError: The arguments can't be read without being computed.
    """

    def __init__(self, source: str, calls: str = "", args: str | None = None) -> None:
        self.imports: list[str] = []
        self.definitions: list[str] = []
        self.defines: set[str] = set()
        self.arguments = [ast.copy_location(ast.Expr(node), node) for node in _arguments(args)]
        statements = plain_python.statements(source)
        kept = self._part(statements)
        names = {name for statement in statements for name in _binds(statement)}
        parts = [f"{statement.above}{statement.text}" for statement in kept]
        if calls:
            parts.append(_shown(f"{calls}({', '.join(map(ast.unparse, self.arguments))})", names, may_be_none=True))
        elif kept and kept[-1] is statements[-1]:
            parts[-1] = f"{kept[-1].above}{_with_value_shown(kept[-1], names)}"
        after = source.splitlines()[statements[-1].last_line :]
        self.guarded = "\n".join([*parts, *after]).strip("\n")

    def _part(self, statements: Sequence[Statement]) -> list[Statement]:
        """Takes out what can stand before all else without becoming something else; what is left."""
        bound = collections.Counter(name for statement in statements for name in _binds(statement))
        kept: list[Statement] = []
        assigned: set[str] = set()
        read: set[str] = set()
        for statement in statements:
            node = statement.nodes[0]
            is_once = all(bound[name] == 1 for name in _binds(statement))
            if all(isinstance(part, (ast.Import, ast.ImportFrom)) for part in statement.nodes) and (
                (is_once and not kept) or getattr(node, "module", "") == "__future__"
            ):
                self.imports += [ast.unparse(part) for part in statement.nodes]
            elif is_once and len(statement.nodes) == 1 and _can_stand_first(node, assigned, read, is_first=not kept):
                self.definitions.append(statement.text)
                self.defines |= _binds(statement)
            else:
                kept.append(statement)
                assigned |= _binds(statement)
            read.update(name for part in statement.nodes for name in plain_python.reads_at_once(part))
        return kept


def _can_stand_first(node: ast.stmt, assigned: set[str], read: set[str], *, is_first: bool) -> bool:
    """Return whether it is a definition that needs nothing of the statements before it, nor they what it replaces."""
    if (
        not isinstance(node, _DEFINITIONS)
        or node.name in read
        or assigned.intersection(plain_python.reads_at_once(node))
    ):
        return False
    return is_first or not any(isinstance(part, ast.Call) for part in plain_python.run_at_once(node))


def _binds(statement: Statement) -> set[str]:
    code = compile(ast.Module(list(statement.nodes), []), "<cell>", "exec", dont_inherit=True)
    changing = ("STORE_NAME", "STORE_GLOBAL", "DELETE_NAME", "DELETE_GLOBAL")
    return {item.argval for item in dis.get_instructions(code) if item.opname in changing}


def _arguments(expression: str | None) -> list[ast.expr]:
    if expression is None:
        return []
    try:
        tree = ast.parse(expression.strip(), mode="eval").body
    except SyntaxError as error:
        raise CellError(f"--args {expression}: it is not Python: {error.msg}.") from None
    if isinstance(tree, ast.Tuple):
        return list(tree.elts)
    if isinstance(tree, (ast.Constant, ast.List, ast.Dict, ast.Set, ast.JoinedStr)):
        return [tree]
    raise CellError(
        f"--args {expression}: whether that is one argument or several is only known when it is computed.",
        why="--export runs nothing.",
        fix=f"--args ({expression},) for one argument, or a tuple with each of them",
    )


def _with_value_shown(statement: Statement, names: set[str]) -> str:
    """The last statement of a cell whose value is its result: the script prints it."""
    text = statement.text
    node = statement.nodes[-1]
    if len(statement.nodes) > 1 or not isinstance(node, ast.Expr):
        return text
    again = ast.parse(text).body[0]
    assert isinstance(again, ast.Expr) and again.end_col_offset is not None
    lines = text.splitlines()
    above = lines[: again.lineno - 1]
    expression = ast.get_source_segment(text, again) or ""
    rest = lines[-1].encode()[again.end_col_offset :].decode()
    if isinstance(node.value, ast.Call):
        name = (
            node.value.func.attr if isinstance(node.value.func, ast.Attribute) else getattr(node.value.func, "id", "")
        )
        if name == "print":
            return text
    elif isinstance(node.value, ast.Constant):
        return text
    is_bare = isinstance(node.value, ast.Tuple) and not expression.startswith("(")
    shown = _shown(f"({expression})" if is_bare else expression, names, may_be_none=isinstance(node.value, ast.Call))
    first, *more = shown.split("\n")
    return "\n".join([*above, first + rest, *more]) if "\n" not in expression else "\n".join([*above, shown + rest])


def _shown(expression: str, names: set[str], *, may_be_none: bool) -> str:
    if not may_be_none:
        return f"print({expression})"
    value = "result" if "result" not in names else "result_of_cell"
    return f"{value} = {expression}\nif {value} is not None:\n    print({value})"
