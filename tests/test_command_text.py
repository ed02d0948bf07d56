"""Tests of the variables in shell commands and line magics, beside IPython's own formatter."""

from __future__ import annotations

import types
from typing import Any

import pytest
from IPython.utils.text import DollarFormatter

from notebook_accel.command_text import ShellCommands, variables_in

_VARIABLES: dict[str, Any] = {"out": "runs", "x": 3, "o": types.SimpleNamespace(a=5)}


@pytest.mark.parametrize(("line", "names"), [
    ("rm -rf $out/* {out}", ["out", "out"]),
    ("echo '$out' $x", ["x"]),
    ("echo $$HOME $x", ["x"]),
    ("echo {x!r} {x + 1} {\", \".join([out])}", ["x", "x", "out"]),
    ("echo $o.a {o.a}", ["o", "o"]),
    ("echo a{{b}} $x", ["x"]),
    ("echo {out[1:3]} { x }", ["out", "x"]),
    ("echo", []),
])  # fmt: skip
def test_variables_are_filled_in_as_ipython_does(line: str, names: list[str]) -> None:
    assert ShellCommands.filled_in(line, _VARIABLES) == DollarFormatter().vformat(line, [], _VARIABLES) != ""
    assert variables_in(line) == names


@pytest.mark.parametrize(
    "line", ["awk '{print $1}' $out", "echo $nothing $x", "echo {1 / 0} $x", "echo {x", "echo {x:q}"]
)
def test_command_is_left_alone_where_something_has_no_value(line: str) -> None:
    assert ShellCommands.filled_in(line, _VARIABLES) == line
