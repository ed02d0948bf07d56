"""``%%distributed``: a few lines between IPython and the launcher."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import linecache
import sys
from typing import Any, NoReturn

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from kernel_ext import commands, completion
from kernel_ext.cuda_watch import CudaWatch
from notebook_accel import config as configuration
from notebook_accel import options
from notebook_accel.errors import CellError, CellSyntaxError
from notebook_accel.launching import cell as cells
from notebook_accel.launching import following, launcher, local

__all__ = ["register", "unregister"]

_NAME = "distributed"
_DESCRIPTION = """\
Runs the cell in several processes, each a rank with a device of its own.

The cell is the training function: it runs once in every rank, with the notebook's names that it uses. The value of its
last expression is that rank's result; the cell's own value is all of them. If it ends with a `def`, that function is
also defined in the notebook, and is what is run, with --args. Names that the cell assigns stay in the ranks, unless
they are pulled.
"""
_EXAMPLES = """\
examples:
  %%distributed                                       one rank for each device
  %%distributed -n 2 --pull model,losses              two ranks; rank 0's model and losses come back
  %%distributed --mixed_precision bf16 --out results  results[1] is rank 1's value
  %%distributed --args (5,)                           the cell ends with a function: it is called with 5
  %%distributed --background --name long              goes on while other cells run
"""


class _Parser(argparse.ArgumentParser):
    """Raises instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"%%{_NAME}: {message}{'' if message.endswith('?') else '.'} %%{_NAME}? shows every option.")


def _make_parser() -> _Parser:
    parser = _Parser(prog=f"%%{_NAME}", description=_DESCRIPTION, epilog=_EXAMPLES, add_help=False,
                     allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    options.add_flags(parser)
    parser.add_argument(
        "--args", metavar="EXPRESSION", help="Arguments for the function that the cell ends by defining."
    )
    parser.add_argument("--out", metavar="NAME", type=_name, help="Binds the results, one value a rank, to this name.")
    parser.add_argument(
        "--pull", metavar="NAME,...", type=_names, default=(), help="Binds rank 0's values of these names."
    )
    push = "Sends these names too, for code that reaches them through eval, globals() or a string."
    parser.add_argument("--push", metavar="NAME,...", type=_names, default=(), help=push)
    parser.add_argument("--background", action="store_true", help="Doesn't wait: the cell's value is the Job.")
    return parser


def _name(text: str) -> str:
    if not text.isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r} is no name")
    return text


def _names(text: str) -> tuple[str, ...]:
    """``model,history``, with or without spaces around."""
    return tuple(_name(part.strip()) for part in text.split(",") if part.strip())


class Magics:
    """The magics of one shell."""

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self._parser = _make_parser()
        self.watch = CudaWatch(shell)

    def distributed(self, line: str, cell: str) -> Any:
        given = self._parse(line)
        config = configuration.resolve(options.given(given), file=configuration.default_path())
        parsed = self._read(cell)
        args = self._arguments(given.args, parsed)
        job = launcher.launch_cell(
            parsed,
            config,
            namespace=self._shell.user_ns,
            args=args,
            push=given.push,
            pull=given.pull,
            bind=self._shell.push,
            background=given.background,
        )
        if given.background:
            self._define_here(parsed)
            self._bind(given.out, job)
            return job
        try:
            results = following.follow(job)
        finally:  # not before: an interrupt in it would leave the run to itself
            self._define_here(parsed)
        self._bind(given.out, results)
        return results if any(value is not None for value in results) else None

    def _parse(self, line: str) -> argparse.Namespace:
        words = _split(line)
        given, rest = self._parser.parse_known_args(words)
        if rest:
            close = difflib.get_close_matches(rest[0], self._parser._option_string_actions)
            self._parser.error(f"there is no option {rest[0]}" + (f"; is it {close[0]}?" if close else ""))
        return given

    def _read(self, cell: str) -> cells.Cell:
        try:
            # The line of the magic is the notebook's line 1: keep its place, so that line numbers are the notebook's.
            return cells.parse("\n" + self._shell.transform_cell(cell), self._label())
        except SyntaxError as error:
            shown = self._shell.SyntaxTB.structured_traceback(type(error), error, None)
            raise CellSyntaxError(f"The cell is not Python: {error}", shown=tuple(shown)) from None

    def _label(self) -> str:
        """``In[7]``, of the cell that is running. Whether the shell's counter is ahead of it differs by version."""
        name_of = getattr(self._shell.compile, "format_code_name", lambda _: None)
        frame = sys._getframe()
        while frame.f_back is not None:
            frame = frame.f_back
            named = name_of(frame.f_code.co_filename)
            if named is not None:
                return str(named[1])
        return f"In[{self._shell.execution_count}]"

    def _arguments(self, expression: str | None, parsed: cells.Cell) -> tuple[Any, ...]:
        if expression is None:
            return ()
        if not parsed.calls:
            raise CellError(
                "--args was given, and the cell doesn't end with a `def` that could take them.",
                fix="end the cell with the function, or leave out --args: the cell sees the notebook's names",
            )
        value = self._shell.ev(expression)
        return value if isinstance(value, tuple) else (value,)

    def _define_here(self, cell: cells.Cell) -> None:
        """Defines the function that the cell launches here too, with what it needs.

        Names that the notebook has already stay as they are.
        """
        if not cell.calls:
            return
        lines = cell.source.splitlines(keepends=True)
        linecache.cache[cell.label] = (len(cell.source), None, lines, cell.label)  # for tracebacks
        kept = {name: value for name, value in self._shell.user_ns.items() if name != cell.calls}
        for code in cells.definitions(cell.source, cell.label):
            # What needs a statement that only runs in the ranks can't be had here; the launch doesn't depend on it.
            with contextlib.suppress(Exception):
                self._shell.ex(code)
        self._shell.user_ns.update(kept)

    def _bind(self, name: str | None, value: Any) -> None:
        if name is not None:
            self._shell.push({name: value})


def _split(line: str) -> list[str]:
    """Words as a shell would split them, with less need of quotes: ``--args (x, 1)``, ``--pull model, history``.

    Blanks inside brackets and after commas don't split; quotes outside brackets are taken away; ``#`` ends the line.
    """
    words, word, depth, quote = [""], "", 0, ""
    for character in line.rstrip():
        if quote:
            quote = "" if character == quote else quote
            word += character if quote or depth else ""
        elif character in "'\"":
            quote = character
            word += character if depth else ""
        elif character == "#" and not word:
            break
        elif character.isspace() and not depth and not word.rstrip().endswith(","):
            words.append(word)
            word = ""
        else:
            depth += (character in "([{") - (character in ")]}")
            word += character
    if quote or depth:
        raise UsageError(f"%%{_NAME}: a quote or a bracket is not closed in: {line}")
    return [word for word in [*words, word] if word]


def register(shell: InteractiveShell) -> None:
    """Makes the magics known to a shell, and starts warming the template."""
    owner = shell.magics_manager.magics["cell"].get(_NAME)
    if owner is not None and not isinstance(getattr(owner, "__self__", None), Magics):
        print(
            f"notebook_accel: %%{_NAME} was another extension's ({getattr(owner, '__module__', 'unknown')}); "
            f"from now on it is notebook_accel's. %unload_ext notebook_accel takes it away.",
            file=sys.stderr,
        )
    if isinstance(getattr(owner, "__self__", None), Magics):
        owner.__self__.watch.stop()
    magics = Magics(shell)
    Magics.distributed.__doc__ = magics._parser.format_help()
    shell.magics_manager.register_function(magics.distributed, "cell", _NAME)
    completion.register(shell, f"%%{_NAME}", flags=magics._parser._option_string_actions)
    shell.magics_manager.register_function(commands.run, "line", _NAME)
    completion.register(shell, f"%{_NAME}", commands=commands.COMMANDS, options_of=commands.completions)
    magics.watch.start()
    local.engine().warm()


def unregister(shell: InteractiveShell) -> None:
    """Takes the magics away, stops every run and ends the processes that were kept ready."""
    owner = getattr(shell.magics_manager.magics["cell"].get(_NAME), "__self__", None)
    if isinstance(owner, Magics):
        owner.watch.stop()
    for magic in (f"%%{_NAME}", f"%{_NAME}"):
        completion.unregister(shell, magic)
    for kind in ("cell", "line"):
        shell.magics_manager.magics[kind].pop(_NAME, None)
    local.engine().close()
