"""A cell's source as plain Python text, without IPython's calls.

The text stays the user's own, character by character. Syntax trees only show where statements are.
"""

from __future__ import annotations

import ast
import builtins
import collections
import dataclasses
import functools
import io
import tokenize
import types
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from notebook_accel.command_text import fields
from notebook_accel.errors import CellError
from notebook_accel.launching.kernel import cell as cells


@dataclasses.dataclass(frozen=True)
class Statement:
    """A top-level statement, or several that share a line."""

    nodes: tuple[ast.stmt, ...]
    text: str  # with the comments that stand directly above
    lines: range  # from the line on which the first one begins, decorators included, to that on which the last one ends
    above: str  # blank lines and comments between the previous statement and the text

    @property
    def only(self) -> ast.stmt | None:
        """The statement; ``None`` if several share the line."""
        return self.nodes[0] if len(self.nodes) == 1 else None


def statements(source: str) -> list[Statement]:
    """Return the statements of a module, in order, without ``pass``, which does nothing there."""
    lines = source.splitlines()
    found: list[Statement] = []
    end = 0
    body = ast.parse(source).body
    for nodes in _sharing_lines(body):
        first, last = _first_line(nodes[0]), max(node.end_lineno or node.lineno for node in nodes)
        begin = first
        while begin - 1 > end and lines[begin - 2].lstrip().startswith("#"):
            begin -= 1
        above = "".join(f"{line}\n" for line in lines[end : begin - 1])
        if not all(isinstance(node, ast.Pass) for node in nodes):
            found.append(Statement(tuple(nodes), "\n".join(lines[begin - 1 : last]), range(first, last + 1), above))
        end = last
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


def run_at_once(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the parts of a statement that run with it, without the bodies of functions."""
    waiting = [node]
    while waiting:
        current = waiting.pop()
        yield current
        if isinstance(current, (ast.FunctionDef, ast.AsyncFunctionDef)):
            waiting += [*current.decorator_list, current.args, *([current.returns] if current.returns else [])]
        elif isinstance(current, ast.Lambda):
            waiting.append(current.args)
        else:
            waiting += ast.iter_child_nodes(current)


def reads_at_once(node: ast.stmt) -> list[str]:
    """Return the names that a statement needs when it runs."""
    return [part.id for part in run_at_once(node) if isinstance(part, ast.Name)]


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
    lines = text.splitlines()
    return "\n".join(
        f"    {line}" if line.strip() and number not in inside else line for number, line in enumerate(lines, 1)
    )


def plain(source: str, label: str, known: Collection[str], first_line: int = 1) -> tuple[str, frozenset[str]]:
    """Return the source with IPython's calls replaced by plain Python, and the modules that this adds.

    ``known`` has the global names, which a command's ``$name`` and ``{expression}`` may use. ``first_line`` is the line
    of the cell on which the source begins. Raises a ``CellError`` for a call without an equivalent.
    """
    lines = [line.encode() for line in source.splitlines(keepends=True)]
    needed: set[str] = set()
    tree = ast.parse(source)
    calls = {call: top for top in tree.body for call, _ in cells.calls_of_shell(top)}
    whole = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for call in sorted(calls, key=lambda call: (call.lineno, call.col_offset), reverse=True):
        assert isinstance(call.func, ast.Attribute) and call.end_lineno is not None
        where = f"{label}, line {first_line - 1 + call.lineno}"
        fill = functools.partial(_filled, known={*known, *vars(builtins), *_local_names(calls[call])}, where=where)
        python = _replacement(call.func.attr, call.args, fill, where, is_statement=call in whole)
        needed.update(module for module in ("os", "subprocess") if f"{module}." in python)
        first, last = call.lineno - 1, call.end_lineno - 1
        text = lines[first][: call.col_offset] + python.encode() + lines[last][call.end_col_offset :]
        lines[first : last + 1] = [text]
    return b"".join(lines).decode(), frozenset(needed)


def _local_names(statement: ast.stmt) -> set[str]:
    """Return the local names of all functions in a statement."""
    names: set[str] = set()
    waiting = [compile(ast.Module([statement], []), "<cell>", "exec", dont_inherit=True)]
    while waiting:
        code = waiting.pop()
        names.update(code.co_varnames, code.co_cellvars)
        waiting += [part for part in code.co_consts if isinstance(part, types.CodeType)]
    return names


def _replacement(
    method: str, arguments: Sequence[ast.expr], fill: Callable[[str], str], where: str, *, is_statement: bool
) -> str:
    """Return the Python text for a shell call, as it works in a rank. ``fill`` returns a command's text as Python."""
    texts = [str(argument.value) for argument in arguments if isinstance(argument, ast.Constant)]
    if len(texts) == len(arguments):
        if method == "system" and is_statement:
            return f"_exit_code = subprocess.run({fill(texts[0])}, shell=True).returncode"
        if method == "getoutput":
            return f"subprocess.getoutput({fill(texts[0])}).splitlines()"
        if method == "run_line_magic":
            python = _line_magic(texts[0], texts[1].strip(), fill)
            if python:
                return python
    shown = f"%{texts[0]}" if method.startswith("run_") and texts else f"get_ipython().{method}"
    raise CellError(
        f"{where}: {shown} is IPython's, and a script has none.",
        fix="write it in plain Python, or take it out of the cell",
    )


def _line_magic(name: str, line: str, fill: Callable[[str], str]) -> str:
    if name == "matplotlib":  # the magic has no effect in a rank
        return "pass"
    if name == "pwd":
        return "os.getcwd()"
    if name == "cd":
        folder = line or "~"
        return f"os.chdir(os.path.expanduser({fill(folder)}))" if folder[0] in "~${" else f"os.chdir({fill(folder)})"
    if name in ("sx", "system"):
        return f"subprocess.getoutput({fill(line)}).splitlines()"
    if name in ("env", "set_env"):
        variable, has_value, value = line.partition("=" if "=" in line else " ")
        if has_value:
            return f"os.environ.update({variable}={fill(value)})" if variable.isidentifier() else ""
        return f"os.environ.get({variable!r})" if variable else "dict(os.environ)"
    return ""


def _filled(command: str, known: Collection[str], where: str) -> str:
    """Return a command's text as Python: an f-string if IPython fills in variables.

    IPython fills in ``{expression}`` and ``$name``, or leaves the text as it is if one of them has no value.
    """
    parts: list[Any] = []
    try:
        for text, expression, conversion in fields(command):
            parts.append(ast.Constant(text))
            if expression is not None:
                value = ast.parse(expression.strip(), mode="eval").body
                if not set(cells.reads(ast.parse(f"({expression})").body)).issubset(known):
                    return repr(command)
                parts.append(ast.FormattedValue(value, ord(conversion) if conversion else -1))
    except (SyntaxError, ValueError):
        return repr(command)
    if not any(isinstance(part, ast.FormattedValue) for part in parts):
        return repr("".join(part.value for part in parts))
    try:
        python = ast.unparse(ast.JoinedStr(parts))
        ast.parse(python)
    except (SyntaxError, ValueError) as error:  # Python before 3.12 limits quotes and backslashes in f-strings
        raise CellError(
            f"{where}: an expression of the command can't be in an f-string: {error}.",
            fix="give its value a name on the line above, and use the name in the command",
        ) from None
    return python


_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class Body:
    """A cell's statements, sorted into imports, definitions and the main program.

    ``calls`` is the name of the function that the cell ends by defining, if it does, and ``args`` has its arguments.
    """

    def __init__(self, source: str, calls: str = "", args: str | None = None) -> None:
        self.imports: list[str] = []  # those at the beginning
        self.definitions: list[str] = []  # texts of functions and classes that can come before the main program
        self.defines: set[str] = set()  # the names of these functions and classes
        self.arguments = [ast.copy_location(ast.Expr(node), node) for node in _arguments(args)]
        parsed = statements(source)
        kept = self._part(parsed)
        names = {name for statement in parsed for name in _binds(statement)}
        parts = [f"{statement.above}{statement.text}" for statement in kept]
        if calls:
            parts.append(_shown(f"{calls}({', '.join(map(ast.unparse, self.arguments))})", names, may_be_none=True))
        elif kept and kept[-1] is parsed[-1]:
            parts[-1] = f"{kept[-1].above}{_with_value_shown(kept[-1], names)}"
        after = source.splitlines()[parsed[-1].lines[-1] :]
        self.guarded = "\n".join([*parts, *after]).strip("\n")  # the main program, not indented

    def _part(self, statements: Sequence[Statement]) -> list[Statement]:
        """Move the imports and definitions that can safely come first, and return the other statements."""
        bound = collections.Counter(name for statement in statements for name in _binds(statement))
        kept: list[Statement] = []
        assigned: set[str] = set()
        read: set[str] = set()
        for statement in statements:
            is_once = all(bound[name] == 1 for name in _binds(statement))
            if all(isinstance(part, (ast.Import, ast.ImportFrom)) for part in statement.nodes) and (
                (is_once and not kept) or getattr(statement.nodes[0], "module", "") == "__future__"
            ):
                self.imports += [ast.unparse(part) for part in statement.nodes]
            elif is_once and _can_stand_first(statement.only, assigned, read, is_first=not kept):
                self.definitions.append(statement.text)
                self.defines |= _binds(statement)
            else:
                kept.append(statement)
                assigned |= _binds(statement)
            read.update(name for part in statement.nodes for name in reads_at_once(part))
        return kept


def _can_stand_first(node: ast.stmt | None, assigned: set[str], read: set[str], *, is_first: bool) -> bool:
    """Return whether a definition is independent of the statements before it, and they of it."""
    if not isinstance(node, _DEFINITIONS) or node.name in read or assigned.intersection(reads_at_once(node)):
        return False
    return is_first or not any(isinstance(part, ast.Call) for part in run_at_once(node))


def _binds(statement: Statement) -> set[str]:
    code = compile(ast.Module(list(statement.nodes), []), "<cell>", "exec", dont_inherit=True)
    return cells.arguments_of(code, "STORE_NAME", "STORE_GLOBAL", "DELETE_NAME", "DELETE_GLOBAL")


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
    """Return a cell's last statement, with ``print`` around it if its value is the cell's result."""
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
        function = node.value.func
        if (function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")) == "print":
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
