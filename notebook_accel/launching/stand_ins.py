"""What code from a notebook expects around it, in a rank: ``get_ipython()``, ``display()``, tqdm's bars.

Small stand-ins that need no kernel. Which line magics work is stated here once; the others are refused before a launch.
"""

from __future__ import annotations

import builtins
import io
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from notebook_accel import reporting
from notebook_accel.launching import streams

__all__ = ["LINE_MAGICS", "RankShell", "install"]


class RankShell:
    """The ``get_ipython()`` of a rank: shell commands and a few line magics, nothing of a kernel.

    Args:
        namespace: The rank's ``__main__``.
    """

    def __init__(self, namespace: dict[str, Any]) -> None:
        self.user_ns = namespace

    def system(self, command: str) -> None:
        """``!command``: its output is the rank's output."""
        sys.stdout.flush()
        self.user_ns["_exit_code"] = subprocess.run(["/bin/sh", "-c", command], check=False).returncode

    def getoutput(self, command: str, split: bool = True) -> list[str] | str:
        """``x = !command``: its output's lines."""
        done = subprocess.run(
            ["/bin/sh", "-c", command], check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        return done.stdout.splitlines() if split else done.stdout

    def run_line_magic(self, name: str, line: str, _stack_depth: int = 1) -> Any:
        """``%name line``, for the names in ``LINE_MAGICS``."""
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
    name, has_value, value = line.strip().replace(" ", "=", 1).partition("=")
    if not name:
        return dict(os.environ)
    if not has_value:
        return os.environ.get(name)
    os.environ[name] = value
    return None


LINE_MAGICS: dict[str, Callable[[RankShell, str], Any]] = {
    "cd": lambda _shell, line: os.chdir(os.path.expanduser(line.strip() or "~")),
    "env": _env,
    "matplotlib": lambda _shell, _line: None,  # a rank draws to files or through display()
    "pwd": lambda _shell, _line: os.getcwd(),
    "set_env": _env,
    "sx": lambda shell, line: shell.getoutput(line),
    "system": lambda shell, line: shell.getoutput(line),
    "time": _time,
}


def install(namespace: dict[str, Any]) -> None:
    """Puts the stand-ins where notebook code looks for them."""
    shell = RankShell(namespace)
    builtins.get_ipython = lambda: shell  # type: ignore[attr-defined]  # where IPython puts it, too
    builtins.input = _input
    sys.breakpointhook = _breakpoint
    builtins.display = _display  # type: ignore[attr-defined]
    if "tqdm.std" in sys.modules:
        _adopt_tqdm(sys.modules["tqdm.std"].tqdm)


def _input(_prompt: object = "", /) -> str:
    raise EOFError("a rank has no keyboard: ask in another cell, and use the answer here")


def _breakpoint(*_: Any, **__: Any) -> None:
    raise RuntimeError(
        "a rank has no keyboard, so nobody could use a debugger in it: take out breakpoint(), or launch with "
        "start_method='inline' and `import pdb; pdb.set_trace()`"
    )


def _display(*objects: Any, **_: Any) -> None:
    for obj in objects:
        data = {"text/plain": repr(obj)}
        html = getattr(obj, "_repr_html_", lambda: None)()
        if isinstance(html, str):
            data["text/html"] = html
        reporting.reporter().display(data, streams.log_bytes())


def _adopt_tqdm(bar_class: Any) -> None:
    """From now on bars are counted in the rank's row instead of being drawn over its output."""
    original_init, original_close, set_postfix = bar_class.__init__, bar_class.close, bar_class.set_postfix
    open_bars: list[_BarCounter] = []

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if len(args) <= _FILE_POSITION:
            kwargs.setdefault("file", _NOWHERE)
        original_init(self, *args, **kwargs)
        counts_itself = isinstance(getattr(self.iterable, "counter", None), reporting.Counter)
        if self.disable or counts_itself:  # a prepared loader's own count is the better one
            return
        open_bars.append(_BarCounter(self))
        reporting.reporter().show_outer(open_bars[0])
        reporting.reporter().show(open_bars[-1])

    def close(self: Any) -> None:
        for counter in [counter for counter in open_bars if counter.bar is self]:
            open_bars.remove(counter)
            reporting.reporter().show_outer(open_bars[0] if open_bars else None)
        original_close(self)

    def show_postfix(self: Any, ordered_dict: Any = None, refresh: bool = True, **values: Any) -> None:
        reporting.reporter().set_metrics({**dict(ordered_dict or {}), **values})
        set_postfix(self, ordered_dict, refresh, **values)

    bar_class.__init__, bar_class.close, bar_class.set_postfix = init, close, show_postfix


class _BarCounter(reporting.Counter):
    """Reads a bar's own count, so that the loop under it costs what it costs without us."""

    __slots__ = ("bar",)

    def __init__(self, bar: Any) -> None:
        self.bar = bar
        super().__init__(label=str(bar.desc or ""), total=None if bar.total is None else _count(bar.total))

    @property
    def step(self) -> int:  # a plain attribute elsewhere, so that training can increment it
        return _count(self.bar.n)

    @step.setter
    def step(self, value: int) -> None:
        """Counters start at zero; the bar knows better."""


def _count(number: Any) -> int:
    """A bar may count anything; an event has 64 bits."""
    return max(0, min(int(number), _MOST)) if math.isfinite(number) else 0


class _Nowhere(io.StringIO):
    def write(self, text: str) -> int:
        return len(text)


_NOWHERE = _Nowhere()
_FILE_POSITION = 4  # of tqdm's parameter `file`
_MOST = 2**62
