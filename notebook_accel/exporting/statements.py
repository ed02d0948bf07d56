"""The statements of a cell, with the user's own text, and their places in a script."""

from __future__ import annotations

import ast
import collections
import dataclasses
import functools
import io
import tokenize
import types
from collections.abc import Iterator, Sequence
from typing import Any

from notebook_accel.launching.kernel import cell as cells

DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


@dataclasses.dataclass(frozen=True)
class Statement:
    """A top-level statement of a cell, or several that share a line."""

    nodes: tuple[ast.stmt, ...]
    text: str  # with the comments that stand directly above
    above: str  # blank lines and comments between the previous statement and the text
    place: tuple[int, int]  # the cell's number, and the line on which the text begins

    @property
    def only(self) -> ast.stmt | None:
        """The statement; ``None`` if several share the line."""
        return self.nodes[0] if len(self.nodes) == 1 else None

    @functools.cached_property
    def code(self) -> types.CodeType:
        return compile(ast.Module(list(self.nodes), []), "<cell>", "exec", dont_inherit=True)

    @functools.cached_property
    def binds(self) -> set[str]:
        """The names that the statement assigns or deletes."""
        return cells.arguments_of(self.code, "STORE_NAME", "STORE_GLOBAL", "DELETE_NAME", "DELETE_GLOBAL")

    @functools.cached_property
    def parts(self) -> list[ast.AST]:
        """The parts that run with the statement, without the bodies of functions."""
        return [part for node in self.nodes for part in _run_at_once(node)]

    @property
    def reads_at_once(self) -> set[str]:
        """The names that the statement needs when it runs."""
        return {part.id for part in self.parts if isinstance(part, ast.Name)}


def split(source: str, number: int = 0) -> list[Statement]:
    """Return the statements of a cell, in order."""
    lines = source.splitlines()
    found: list[Statement] = []
    end = 0
    for nodes in _sharing_lines(ast.parse(source).body):
        begin = _first_line(nodes[0])
        while begin - 1 > end and lines[begin - 2].lstrip().startswith("#"):
            begin -= 1
        above = "".join(f"{line}\n" for line in lines[end : begin - 1])
        end = max(node.end_lineno or node.lineno for node in nodes)
        found.append(Statement(tuple(nodes), "\n".join(lines[begin - 1 : end]), above, (number, begin)))
    return found


def _sharing_lines(body: Sequence[ast.stmt]) -> Iterator[list[ast.stmt]]:
    group: list[ast.stmt] = []
    for node in body:
        if group and _first_line(node) > (group[-1].end_lineno or 0):
            yield group
            group = []
        group.append(node)
    if group:
        yield group


def _first_line(node: ast.stmt) -> int:
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])


def _run_at_once(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    body: Any = getattr(node, "body", ()) if isinstance(node, _FUNCTIONS) else ()
    for child in ast.iter_child_nodes(node):
        if child is not body and not (isinstance(body, list) and child in body):
            yield from _run_at_once(child)


class Body:
    """A cell's statements, sorted into imports, definitions and the main program.

    ``calls`` is the name of the function that the cell ends by defining, if it does, and ``args`` the expression with
    its arguments. Definitions stand outside of the main program so that processes of a loader find them.
    """

    def __init__(self, source: str, calls: str = "", args: str | None = None) -> None:
        self.imports: list[str] = []  # those at the beginning
        self.definitions: list[str] = []  # texts of functions and classes that can come before the main program
        self.defines: set[str] = set()  # the names of these functions and classes
        statements = split(source)
        kept = self._part(statements)
        parts = [f"{statement.above}{statement.text}" for statement in kept]
        is_taken = any("result" in statement.binds for statement in statements)
        value = "result_of_cell" if is_taken else "result"
        shown = f"if {value} is not None:\n    print({value})"
        if calls and args is None:
            parts += [f"{value} = {calls}()", shown]
        elif calls:  # a tuple has several arguments
            given = "*args_of_cell if isinstance(args_of_cell, tuple) else (args_of_cell,)"
            parts += [f"args_of_cell = {args}", f"{value} = {calls}({given})", shown]
        elif kept and kept[-1] is statements[-1] and (result := _result(kept[-1].only)):
            lines = parts[-1].split("\n")
            first = result.lineno - (result.end_lineno or result.lineno) - 1  # where the expression begins
            lines[first] = f"{value} = {lines[first]}"
            parts[-1:] = ["\n".join(lines), shown]
        self.guarded = "\n".join(parts).strip("\n")  # the main program, not indented

    def _part(self, statements: Sequence[Statement]) -> list[Statement]:
        """Move the imports and definitions that can safely come first, and return the other statements.

        Such a definition is independent of the statements before it, and they of it.
        """
        bound = collections.Counter(name for statement in statements for name in statement.binds)
        kept: list[Statement] = []
        assigned: set[str] = set()
        read: set[str] = set()
        for statement in statements:
            is_once = all(bound[name] == 1 for name in statement.binds)
            is_import = all(isinstance(part, (ast.Import, ast.ImportFrom)) for part in statement.nodes)
            is_free = not (statement.binds & read or statement.reads_at_once & assigned)
            is_free = is_free and not (kept and any(isinstance(part, ast.Call) for part in statement.parts))
            if is_import and ((is_once and not kept) or getattr(statement.nodes[0], "module", "") == "__future__"):
                self.imports += [ast.unparse(part) for part in statement.nodes]
            elif isinstance(statement.only, DEFINITIONS) and is_once and is_free:
                self.definitions.append(statement.text)
                self.defines |= statement.binds
            else:
                kept.append(statement)
                assigned |= statement.binds
            read |= statement.reads_at_once
        return kept


def _result(last: ast.stmt | None) -> ast.Expr | None:
    """Return a cell's last statement if it has a value to print."""
    if not isinstance(last, ast.Expr) or isinstance(last.value, ast.Constant):
        return None
    function = last.value.func if isinstance(last.value, ast.Call) else None
    return None if "print" in (getattr(function, "id", ""), getattr(function, "attr", "")) else last


def indented(text: str) -> str:
    """Return the text one level deeper, with strings unchanged."""
    inside: set[int] = set()
    begun: list[int] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind = tokenize.tok_name[token.type]
        if kind in ("FSTRING_START", "TSTRING_START"):
            begun.append(token.start[0])
        elif kind in ("FSTRING_END", "TSTRING_END"):
            inside.update(range(begun.pop() + 1, token.end[0] + 1))
        elif kind == "STRING":
            inside.update(range(token.start[0] + 1, token.end[0] + 1))
    return "\n".join(
        f"    {line}" if line.strip() and number not in inside else line
        for number, line in enumerate(text.splitlines(), 1)
    )
