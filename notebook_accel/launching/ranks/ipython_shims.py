"""A rank's stand-ins for ``get_ipython()``, ``input()`` and ``breakpoint()``, which need no kernel.

``LINE_MAGICS`` has the line magics that work in a rank; a launch refuses all others.
"""

from __future__ import annotations

import builtins
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from notebook_accel.command_text import ShellCommands
from notebook_accel.launching.ranks import streams


class RankShell(ShellCommands):
    """The ``get_ipython()`` of a rank, with shell commands and a few line magics."""

    def __init__(self, namespace: dict[str, Any]) -> None:
        self.user_ns = namespace

    def _flush(self) -> None:
        streams.flush()

    def run_line_magic(self, name: str, line: str, _stack_depth: int = 1) -> Any:
        """Run ``%name line`` for a name in ``LINE_MAGICS``."""
        if name in _FILLED_IN:
            line = self.filled_in(line, self.user_ns | sys._getframe(1).f_locals)
        return LINE_MAGICS[name](self, line)


def _time(shell: RankShell, line: str) -> Any:
    started = time.perf_counter()
    try:
        value = eval(compile(line, "<%time>", "eval"), shell.user_ns)
    except SyntaxError:
        value = None
        exec(compile(line, "<%time>", "exec"), shell.user_ns)
    print(f"Wall time: {time.perf_counter() - started:.3g} s")
    return value


def _env(_: RankShell, line: str) -> Any:
    name, has_value, value = line.strip().partition("=" if "=" in line else " ")
    if not name:
        return dict(os.environ)
    if not has_value:
        return os.environ.get(name)
    os.environ[name] = value
    print(f"env: {name}={value}")
    return None


def _cd(_: RankShell, line: str) -> None:
    os.chdir(os.path.expanduser(line.strip() or "~"))
    print(os.getcwd())


LINE_MAGICS: dict[str, Callable[[RankShell, str], Any]] = {
    "cd": _cd,
    "env": _env,
    "matplotlib": lambda _shell, _line: None,  # a rank draws to files or through display()
    "pwd": lambda _shell, _line: os.getcwd(),
    "set_env": _env,
    "sx": lambda shell, line: shell.getoutput(line, depth=2),
    "system": lambda shell, line: shell.getoutput(line, depth=2),
    "time": _time,
}
_FILLED_IN = ("cd", "env", "set_env")  # the others take no variables, or fill them in themselves


def install(namespace: dict[str, Any]) -> None:
    """Install the stand-ins where notebook code looks for them."""
    shell = RankShell(namespace)
    builtins.get_ipython = lambda: shell  # type: ignore[attr-defined]  # where IPython puts it, too
    builtins.input = _input
    sys.breakpointhook = _breakpoint


def _input(_prompt: object = "", /) -> str:
    raise EOFError("a rank has no keyboard: ask before the launch, and use the answer here")


def _breakpoint(*_: Any, **__: Any) -> None:
    raise RuntimeError(
        "a rank has no keyboard, so nobody could use a debugger in it: take out breakpoint(), or launch with "
        "start_method='inline' and `import pdb; pdb.set_trace()`"
    )
