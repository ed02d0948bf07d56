"""A cell's source as plain Python text: its statements with their comments, without IPython's calls, indented.

Text stays the user's own, to the blank: syntax trees say where statements are, and no more.
"""

from __future__ import annotations

import ast
import dataclasses
import io
import tokenize
from collections.abc import Iterator, Sequence

from notebook_accel.errors import CellError

__all__ = ["Statement", "indented", "plain", "reads_at_once", "run_at_once", "statements"]


@dataclasses.dataclass(frozen=True)
class Statement:
    """A statement at the top level, or several that share a line.

    Attributes:
        nodes: Their trees.
        text: Their text, with the comments that stand directly above.
        first_line: The line on which the first one begins, decorators included; from 1.
        last_line: That on which the last one ends.
        above: What stands between the statement before and the text: blank lines and other comments.
    """

    nodes: tuple[ast.stmt, ...]
    text: str
    first_line: int
    last_line: int
    above: str


def statements(source: str) -> list[Statement]:
    """The statements of a module, in order. A ``pass`` isn't one: at the top level it does nothing."""
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
            found.append(Statement(tuple(nodes), "\n".join(lines[begin - 1 : last]), first, last, above))
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
    """The parts of a statement that are run when it is, which the bodies of its functions aren't."""
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
    """The names that a statement needs when it is run."""
    return [part.id for part in run_at_once(node) if isinstance(part, ast.Name)]


def indented(text: str) -> str:
    """The text one level deeper. What is inside strings stays as it is."""
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


def plain(source: str, label: str, first_line: int = 1) -> tuple[str, frozenset[str]]:
    """The source without what only IPython has, where the same can be said in Python.

    Args:
        source: The source.
        label: What the cell is called.
        first_line: Where the source begins in it.

    Returns:
        The source, and the modules that it needs besides.

    Raises:
        CellError: Something in it can't.
    """
    lines = [line.encode() for line in source.splitlines(keepends=True)]
    needed: set[str] = set()
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call) and _is_of_shell(node)]
    for call in sorted(calls, key=lambda call: (call.lineno, call.col_offset), reverse=True):
        assert isinstance(call.func, ast.Attribute) and call.end_lineno is not None
        said = _said(call.func.attr, call.args, f"{label}, line {first_line - 1 + call.lineno}")
        needed.update(module for module in ("os", "subprocess") if f"{module}." in said)
        first, last = call.lineno - 1, call.end_lineno - 1
        text = lines[first][: call.col_offset] + said.encode() + lines[last][call.end_col_offset :]
        lines[first : last + 1] = [text]
    return b"".join(lines).decode(), frozenset(needed)


def _is_of_shell(call: ast.Call) -> bool:
    """Return whether it is ``get_ipython().something(...)``."""
    shell = call.func.value if isinstance(call.func, ast.Attribute) else None
    return isinstance(shell, ast.Call) and getattr(shell.func, "id", "") == "get_ipython"


def _said(method: str, arguments: Sequence[ast.expr], where: str) -> str:
    """In Python what a call of the shell does in a rank."""
    texts = [str(argument.value) for argument in arguments if isinstance(argument, ast.Constant)]
    if len(texts) == len(arguments):
        if method == "system":
            return f"subprocess.run({texts[0]!r}, shell=True)"
        if method == "getoutput":
            return f"subprocess.getoutput({texts[0]!r}).splitlines()"
        if method == "run_line_magic":
            said = _line_magic(texts[0], texts[1].strip())
            if said:
                return said
    shown = f"%{texts[0]}" if method.startswith("run_") and texts else f"get_ipython().{method}"
    raise CellError(
        f"{where}: {shown} is IPython's, and a script has none.",
        fix="write it in plain Python, or take it out of the cell",
    )


def _line_magic(name: str, line: str) -> str:
    if name == "matplotlib":  # where figures are drawn, which is nowhere in a rank
        return "pass"
    if name == "pwd":
        return "os.getcwd()"
    if name == "cd":
        folder = line or "~"
        return f"os.chdir(os.path.expanduser({folder!r}))" if folder.startswith("~") else f"os.chdir({folder!r})"
    if name in ("sx", "system"):
        return f"subprocess.getoutput({line!r}).splitlines()"
    if name in ("env", "set_env"):
        variable, has_value, value = line.partition("=" if "=" in line else " ")
        if has_value:
            return f"os.environ.update({variable}={value!r})" if variable.isidentifier() else ""
        return f"os.environ.get({variable!r})" if variable else "dict(os.environ)"
    return ""
