"""Reasons why a definition, run again in a script, would make something else than the notebook has."""

from __future__ import annotations

import ast
import inspect
import reprlib
import types
from collections.abc import Iterator, Mapping
from typing import Any

from notebook_accel.errors import CellError
from notebook_accel.exporting import plain_python
from notebook_accel.exporting.notebook_sources import Definition
from notebook_accel.launching.kernel import cell as cells


def check(name: str, value: Any, found: Definition, namespace: Mapping[str, Any], assigned: Definition | None) -> None:
    """Raise a ``CellError`` if a definition no longer makes the function or class that the notebook has.

    ``name`` and ``value`` are the notebook's, and ``found`` is the definition. ``assigned`` is the latest statement
    that has assigned the name, if there is one.
    """
    kind = "class" if isinstance(value, type) else "function"
    for reason, fix in (
        (_wrapped_later(value, found, assigned), "make the wrapper a decorator above its def, and run that again"),
        (_attributes(value, found), "keep that in a variable, and run the cell that defines the function again"),
        (_default(value, found, namespace), f"run the cell that defines the {kind} again, or write the value there"),
    ):
        if reason:
            raise CellError(f"The {kind} {name!r} can't be exported: {reason}.", fix=fix)


def check_decorator(
    name: str, value: Any, decorator: ast.expr, found: Definition, namespace: Mapping[str, Any]
) -> None:
    """Raise a ``CellError`` if a decorator changes a variable that the script keeps, and would change a second time.

    ``name`` and ``value`` are of the decorated object, and ``found`` is the decorator's definition.
    """
    for changed in _changes(found.node, is_wrapper=hasattr(value, "__wrapped__")):
        if isinstance(namespace.get(changed), (list, dict, set, int)):
            raise CellError(
                f"{name!r} can't be exported: its decorator `{ast.unparse(decorator)}` changes {changed!r}.",
                why="The script keeps that as it is now, and would change it a second time.",
                fix=f"define {changed}, the decorator and what it decorates in the cell",
            )


def _wrapped_later(value: Any, found: Definition, assigned: Definition | None) -> str:
    if not hasattr(value, "__wrapped__"):
        return ""
    is_decorated = bool(getattr(found.node, "decorator_list", None))
    is_replaced = (
        assigned is not None
        and assigned.place > found.place
        and not isinstance(getattr(assigned.node, "value", None), ast.Name)
    )
    return "it was wrapped after its definition" if is_replaced or not is_decorated else ""


def _attributes(value: Any, found: Definition) -> str:
    """Return a message about attributes of a function that no decorator can have made."""
    if not isinstance(value, types.FunctionType) or getattr(found.node, "decorator_list", None):
        return ""
    names = [name for name in vars(value) if not name.startswith("_")]
    return f"its {', '.join(names)} was put on it after its definition" if names else ""


def _default(value: Any, found: Definition, namespace: Mapping[str, Any]) -> str:
    for what, expression, before in _defaults(found.node, value):
        now = _value_now(expression, {**namespace, **(vars(value) if isinstance(value, type) else {})})
        if now is not _UNKNOWN and not _is_equal(now, before):
            text = ast.unparse(expression)
            return f"the default of {what} is {reprlib.repr(before)}, but `{text}` is {reprlib.repr(now)} now"
    return ""


def _defaults(node: ast.stmt, value: Any) -> Iterator[tuple[str, ast.expr, Any]]:
    """Yield a parameter, its default's expression and value, for each one of a function or of a class's methods."""
    if isinstance(node, ast.ClassDef):
        functions = (ast.FunctionDef, ast.AsyncFunctionDef)
        methods = {child.name: child for child in node.body if isinstance(child, functions)}  # the last of each name
        for name, method in methods.items():
            member = vars(value).get(name)
            for what, expression, default in _defaults(method, getattr(member, "__func__", member)):
                yield f"{what} in {name}", expression, default
        return
    function = inspect.unwrap(value) if callable(value) else value
    definition = node.value if isinstance(node, ast.Assign) else node
    if not isinstance(function, types.FunctionType) or not hasattr(definition, "args"):
        return
    given: ast.arguments = definition.args
    positional = [*given.posonlyargs, *given.args]
    named = [*positional[len(positional) - len(given.defaults) :], *given.kwonlyargs]
    values = {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()}
    for argument, written in zip(named, [*given.defaults, *given.kw_defaults], strict=True):
        if written is not None and argument.arg in values:  # a wrapper without functools.wraps has other parameters
            yield repr(argument.arg), written, values[argument.arg]


_UNKNOWN = object()
_RUN_CODE = (ast.Call, ast.Lambda, ast.NamedExpr, ast.GeneratorExp)


def _value_now(expression: ast.expr, names: dict[str, Any]) -> Any:
    """Return an expression's value, or ``_UNKNOWN`` if only the script can compute it."""
    if any(isinstance(part, _RUN_CODE) for part in ast.walk(expression)):
        return _UNKNOWN
    try:
        return eval(compile(ast.Expression(expression), "<default>", "eval", dont_inherit=True), names)
    except Exception:  # noqa: BLE001 - the script fails in the same way
        return _UNKNOWN


def _is_equal(one: Any, other: Any) -> bool:
    try:
        return one is other or (type(one) is type(other) and bool(one == other))
    except Exception:  # noqa: BLE001 - arrays can't be compared as a whole
        return False


def _changes(decorator: ast.stmt, *, is_wrapper: bool) -> Iterator[str]:
    """Yield the global variables that a decorator changes: by a method called for its effect, or by an assignment.

    What the function inside a wrapping decorator does is left out, since it runs later.
    """
    parts = (
        (part for statement in getattr(decorator, "body", ()) for part in plain_python.run_at_once(statement))
        if is_wrapper
        else ast.walk(decorator)
    )
    used = cells.reads([decorator])
    changed: Any
    for part in parts:
        if isinstance(part, ast.AugAssign):
            changed = part.target
        elif isinstance(part, ast.Subscript) and isinstance(part.ctx, ast.Store):
            changed = part
        elif isinstance(part, ast.Expr) and isinstance(getattr(part.value, "func", None), ast.Attribute):
            changed = part.value
        else:
            continue
        if base_name(changed) in used:
            yield base_name(changed)


def base_name(expression: ast.expr) -> str:
    """Return the name that an expression such as ``name.attribute[0](...)`` begins with, empty if it has none."""
    base: Any = expression
    while base is not None and not isinstance(base, ast.Name):
        base = getattr(base, "func", None) or getattr(base, "value", None)
    return base.id if base is not None else ""
