"""Analysis of a cell's source in the kernel: the names that it uses and assigns, and the function defined at its end.

The source is plain Python: IPython's own syntax has been translated before.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import difflib
import dis
import itertools
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from notebook_accel.command_text import variables_in
from notebook_accel.errors import CellError
from notebook_accel.launching.ranks.ipython_shims import LINE_MAGICS
from notebook_accel.payload import definitions

# IPython's own names in a notebook's namespace, which are not sent to ranks.
OF_IPYTHON = {"In", "Out", "_", "__", "___", "_dh", "_ih", "_oh", "_i", "_ii", "_iii", "exit", "quit", "get_ipython"}
OF_MODULES = {"__name__", "__doc__", "__file__", "__spec__", "__loader__", "__package__", "__builtins__", "__main__"}
# The magics into which IPython translates `x?`, `x??` and `*x*?`. Nobody types their names.
_HELP_MARKS = {"pinfo": "?", "pinfo2": "??", "psearch": "?"}


@dataclasses.dataclass(frozen=True)
class Cell:
    """A cell that can be launched.

    Attributes:
        source: The Python source, with the line numbers that the notebook shows.
        label: The cell's name in tracebacks, such as ``In[7]``; the file name of its code.
        uses: Names that the cell reads before it assigns them, so that they must come from the notebook.
        calls: The name of the function that the cell's last statement defines; empty if that is no definition.
        assigns: Names that the cell may assign; ``None`` if they aren't known, as after ``from x import *``.
        tree: The parsed source.
    """

    source: str
    label: str
    uses: tuple[str, ...]
    calls: str
    assigns: frozenset[str] | None
    tree: ast.Module = dataclasses.field(repr=False)

    def captured(self, namespace: Mapping[str, Any], push: Sequence[str] = ()) -> dict[str, Any]:
        """Return the notebook's variables to send: those that the cell uses, and those of ``push``.

        Raises:
            CellError: The notebook has no variable of a name in ``push``.
        """
        missing = [name for name in push if name not in namespace]
        if missing:
            raise CellError(
                f"--push {','.join(missing)}: the notebook has no name {', '.join(map(repr, missing))}.",
                fix="run the cell that makes it first, or take it out of --push",
            )
        values = {name: namespace[name] for name in (*self.uses, *push) if name in namespace}
        # A rank has its own builtins. A variable that replaces one, such as `input` or `id`, is sent.
        return {name: value for name, value in values.items() if not is_builtin(name, value)}

    def optional_names(self, names: Iterable[str], push: Sequence[str] = ()) -> tuple[str, ...]:
        """Return the captured names that the cell may assign before it reads them, so that it may not need them."""
        return tuple(name for name in names if (self.assigns is None or name in self.assigns) and name not in push)

    def submodules(self, names: Mapping[str, Any]) -> tuple[str, ...]:
        """Return modules that the cell uses as attributes of captured modules: ``import a.b`` binds only ``a``."""
        tokens = {node.attr for node in ast.walk(self.tree) if isinstance(node, ast.Attribute)}
        return definitions.submodules(tokens, names.values())

    def refuse_async_end(self) -> None:
        """Raise ``CellError`` if the cell ends with an ``async def``, which a rank would define and not run."""
        last = self.tree.body[-1]
        if isinstance(last, ast.AsyncFunctionDef):
            raise CellError(
                f"The cell ends with `async def {last.name}`, which a rank doesn't call: it runs no event loop.",
                fix=f"end the cell with asyncio.run({last.name}(...))",
            )

    def without_value(self, args: Sequence[Any] = ()) -> tuple[list[str], list[str]]:
        """Return the positional and the keyword-only parameters that a call of the final function leaves without value.

        Returns none if the function is decorated, since a decorator may give it any arguments.
        """
        last = self.tree.body[-1]
        if not isinstance(last, ast.FunctionDef) or last.decorator_list:
            return [], []
        given = last.args
        positional = [*given.posonlyargs, *given.args]
        needed = positional[len(args) : len(positional) - len(given.defaults)]
        keywords = zip(given.kwonlyargs, given.kw_defaults, strict=True)
        return [each.arg for each in needed], [each.arg for each, default in keywords if default is None]

    def refuse_arguments(self, args: Sequence[Any]) -> None:
        """Raise ``CellError`` if the function that the cell ends by defining can't be called with these arguments."""
        last = self.tree.body[-1]
        if not isinstance(last, ast.FunctionDef) or last.decorator_list:
            return
        given, missing = last.args, ", ".join(itertools.chain(*self.without_value(args)))
        if not missing and (len(args) <= len(given.posonlyargs) + len(given.args) or given.vararg):
            return
        problem = f"{missing} would have no value" if missing else f"{len(args)} arguments are too many"
        raise CellError(
            f"The cell ends with `def {last.name}({ast.unparse(given)})`, so each rank calls {last.name}: {problem}.",
            fix=f"--args with its arguments; or end the cell with another line, such as {last.name}(...)",
        )

    def refuse_unknown(self, pull: Sequence[str], push: Sequence[str]) -> None:
        """Raise ``CellError`` before the training for a name in ``pull`` that the cell neither assigns nor uses."""
        if self.assigns is None:
            return
        known = {*self.assigns, *self.uses, *push}
        unknown = [name for name in pull if name not in known]
        if unknown:
            similar = difflib.get_close_matches(unknown[0], known) or ["a name that the cell assigns"]
            raise CellError(
                f"--pull {','.join(unknown)}: the cell neither assigns nor uses {', '.join(map(repr, unknown))}.",
                fix=f"pull {' or '.join(similar)}",
            )


def parse(source: str, label: str) -> Cell:
    """Analyse a cell's source.

    Raises:
        SyntaxError: The source is not Python. The error's file name is the label.
        CellError: The cell is empty, or uses a magic that a rank doesn't have.
    """
    tree = ast.parse(source, label)
    code = _compiled(source, label)
    if not tree.body:
        raise CellError("The cell is empty.", fix="write the training code under the %%distributed line")
    _refuse_magics(tree, label)
    uses, _ = _scan(with_variables_of_commands(source).body, frozenset())
    last = tree.body[-1]
    return Cell(
        source=source,
        label=label,
        uses=tuple(name for name in dict.fromkeys(uses) if name not in OF_IPYTHON | OF_MODULES),
        calls=last.name if isinstance(last, ast.FunctionDef) else "",
        assigns=_assigned_names(tree, code),
        tree=tree,
    )


def _compiled(source: str, label: str) -> types.CodeType:
    """Compile a cell, which also finds errors that parsing doesn't find, such as ``return`` outside a function."""
    try:
        code: types.CodeType = compile(source, label, "exec", dont_inherit=True)
    except SyntaxError as error:
        if error.text is None and error.lineno is not None:  # Python found no file with the label's name
            error.text = source.splitlines()[error.lineno - 1]
        if error.msg.startswith("'await' outside"):
            error.msg += ": a rank runs no event loop, so write asyncio.run(...) instead of await"
        raise
    return code


def _assigned_names(tree: ast.Module, code: types.CodeType) -> frozenset[str] | None:
    if any(isinstance(node, ast.ImportFrom) and node.names[0].name == "*" for node in tree.body):
        return None
    found: set[str] = set()
    waiting = [code]
    while waiting:
        part = waiting.pop()
        found |= arguments_of(part, "STORE_NAME", "STORE_GLOBAL")  # a function may declare a name global
        waiting += [const for const in part.co_consts if isinstance(const, types.CodeType)]
    return frozenset(found)


def arguments_of(code: types.CodeType, *instructions: str) -> set[str]:
    """Return the names in these instructions of some code, such as ``STORE_NAME``."""
    return {item.argval for item in dis.get_instructions(code) if item.opname in instructions}


def is_builtin(name: str, value: Any) -> bool:
    """Return whether a variable is Python's own builtin, or IPython's replacement of one."""
    if not hasattr(builtins, name):
        return False
    # IPython replaces `open` by a function that refuses the descriptors of the standard streams.
    return value is getattr(builtins, name) or getattr(value, "__module__", "") == "IPython.core.interactiveshell"


def calls_of_shell(tree: ast.AST) -> Iterator[tuple[ast.Call, str]]:
    """Yield calls such as ``get_ipython().system(...)``, the translation of ``!``, with the method's name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value
            if isinstance(owner, ast.Call) and getattr(owner.func, "id", "") == "get_ipython":
                yield node, node.func.attr


def with_variables_of_commands(source: str) -> ast.Module:
    """Return the source's tree in which commands and magics read the variables that their text names."""
    tree = ast.parse(source)
    for node, _ in calls_of_shell(tree):
        texts = [part.value for part in node.args if isinstance(part, ast.Constant) and isinstance(part.value, str)]
        names = [ast.Name(name, ast.Load()) for text in texts for name in variables_in(text)]
        node.args += [ast.copy_location(name, node) for name in names]
    return tree


def _refuse_magics(tree: ast.Module, label: str) -> None:
    for node, method in calls_of_shell(tree):
        if method == "show_usage":  # IPython's translation of a lone `?`
            raise CellError(
                f"{label}, line {node.lineno}: ? alone explains IPython, which a rank doesn't have.",
                fix="put a name before it, such as model?, in a cell of its own; %%distributed? explains this magic",
            )
        if method not in ("run_line_magic", "run_cell_magic"):
            continue
        name = str(node.args[0].value) if node.args and isinstance(node.args[0], ast.Constant) else "?"
        if method == "run_cell_magic":
            raise CellError(
                f"{label}, line {node.lineno}: %%{name} can't be used inside the cell.",
                fix=f"put it above %%distributed to apply it to the whole run, or leave out %%{name}",
            )
        if name not in LINE_MAGICS:
            texts = [str(part.value) for part in node.args if isinstance(part, ast.Constant)]
            mark = _HELP_MARKS.get(name)
            typed = f"{texts[1]}{mark}" if mark and texts[1:] else f"%{name}"
            what = f"the magic {typed}" if typed.startswith("%") else typed
            raise CellError(
                f"{label}, line {node.lineno}: {what} needs the kernel, and a rank has none.",
                why=f"Ranks have: {', '.join(f'%{known}' for known in sorted(LINE_MAGICS))}, and !commands.",
                fix=f"run {typed} in a cell of its own, before this one",
            )


# --- Names that are read before they are assigned ---------------------------------------------------------------------
#
# The scan goes from statement to statement, with the set of names that are surely assigned by then. A name assigned
# only on some paths counts as not assigned: one name too many costs time, one too few breaks the cell. The exception is
# a for loop, which counts as having run, so that `loss` after a training loop isn't taken from the notebook.

_Scan = tuple[list[str], frozenset[str]]


def reads(statements: Sequence[ast.stmt]) -> list[str]:
    """Return the names, builtins included, that statements read before they have assigned them."""
    return list(dict.fromkeys(_scan(statements, frozenset())[0]))


def _scan(statements: Sequence[ast.stmt], assigned: frozenset[str]) -> _Scan:
    """Return the names read before they are assigned, and the names surely assigned afterwards."""
    needed: list[str] = []
    for statement in statements:
        scan = _SCANS.get(type(statement), _scan_simple)
        more, assigned = scan(statement, assigned)
        needed += more
    return needed, assigned


def _scan_simple(statement: ast.stmt, assigned: frozenset[str]) -> _Scan:
    code = compile(ast.Module([statement], []), "<cell>", "exec", dont_inherit=True)
    needed = [name for name in _global_reads(code) if name not in assigned]
    stores = arguments_of(code, "STORE_NAME", "STORE_GLOBAL")
    deletes = arguments_of(code, "DELETE_NAME", "DELETE_GLOBAL")
    return [*needed, *(name for name in deletes if name not in assigned)], (assigned | stores) - deletes


def _global_reads(code: types.CodeType) -> Iterator[str]:
    for item in dis.get_instructions(code):
        if item.opname in ("LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS", "LOAD_CLASSDEREF"):
            yield item.argval
        elif isinstance(item.argval, types.CodeType):
            yield from _global_reads(item.argval)


def _expression_reads(expression: ast.expr, assigned: frozenset[str]) -> list[str]:
    return _scan_simple(ast.copy_location(ast.Expr(expression), expression), assigned)[0]


def names_in(target: ast.AST, context: type[ast.expr_context]) -> list[str]:
    """Return the names that a target assigns (``ast.Store``) or reads: ``for x[i] in ...`` reads x and i."""
    return [node.id for node in ast.walk(target) if isinstance(node, ast.Name) and isinstance(node.ctx, context)]


def _scan_if(node: ast.If, assigned: frozenset[str]) -> _Scan:
    body, after_body = _scan(node.body, assigned)
    other, after_other = _scan(node.orelse, assigned)
    return [*_expression_reads(node.test, assigned), *body, *other], after_body & after_other


def _scan_for(node: ast.For, assigned: frozenset[str]) -> _Scan:
    target_reads = [name for name in names_in(node.target, ast.Load) if name not in assigned]
    body, after = _scan(node.body, assigned.union(names_in(node.target, ast.Store)))
    other, _ = _scan(node.orelse, after)
    return [*_expression_reads(node.iter, assigned), *target_reads, *body, *other], after


def _scan_while(node: ast.While, assigned: frozenset[str]) -> _Scan:
    body, _ = _scan(node.body, assigned)
    other, _ = _scan(node.orelse, assigned)
    return [*_expression_reads(node.test, assigned), *body, *other], assigned


def _scan_with(node: ast.With, assigned: frozenset[str]) -> _Scan:
    needed: list[str] = []
    for item in node.items:
        needed += _expression_reads(item.context_expr, assigned)
        if item.optional_vars is not None:
            assigned = assigned.union(names_in(item.optional_vars, ast.Store))
    body, after = _scan(node.body, assigned)
    may_stop = any(_is_suppress(item.context_expr) for item in node.items)
    return [*needed, *body], after & assigned if may_stop else after


def _is_suppress(expression: ast.expr) -> bool:
    """Return whether an expression is a call of ``contextlib.suppress``, whose body may stop at any statement."""
    called = expression.func if isinstance(expression, ast.Call) else None
    return "suppress" in (getattr(called, "id", ""), getattr(called, "attr", ""))


def _scan_try(node: ast.Try, assigned: frozenset[str]) -> _Scan:
    needed, after = _scan([*node.body, *node.orelse], assigned)
    for handler in node.handlers:
        caught = assigned | ({handler.name} if handler.name else set())
        more, after_handler = _scan(handler.body, caught)
        needed += [*(_expression_reads(handler.type, assigned) if handler.type else []), *more]
        after &= after_handler
    more, after_final = _scan(node.finalbody, assigned)
    return [*needed, *more], after | (after_final - assigned)


def _scan_match(node: ast.Match, assigned: frozenset[str]) -> _Scan:
    needed = _expression_reads(node.subject, assigned)
    for case in node.cases:
        bound = {child.name for child in ast.walk(case.pattern) if isinstance(child, (ast.MatchAs, ast.MatchStar))}
        pattern_reads = [child.id for child in ast.walk(case.pattern) if isinstance(child, ast.Name)]
        inside = assigned | {name for name in bound if name}
        guard = _expression_reads(case.guard, inside) if case.guard else []
        needed += [*(name for name in pattern_reads if name not in assigned), *guard, *_scan(case.body, inside)[0]]
    return needed, assigned


_SCANS: dict[type, Any] = {
    ast.Break: lambda _, assigned: ([], assigned),  # not compilable outside of its loop
    ast.Continue: lambda _, assigned: ([], assigned),
    ast.If: _scan_if,
    ast.For: _scan_for,
    ast.While: _scan_while,
    ast.With: _scan_with,
    ast.Try: _scan_try,
    getattr(ast, "TryStar", ast.Try): _scan_try,  # Python 3.11
    ast.Match: _scan_match,
}
