"""The cell magic ``%%distributed``, and the registration of all magics."""

from __future__ import annotations
import __future__

import argparse
import ast
import contextlib
import io
import linecache
import pathlib
import sys
import tokenize
from collections.abc import Callable
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

from kernel_ext import arguments, commands, front_end, session_magics, timeline
from kernel_ext.cuda_watch import CudaWatch
from kernel_ext.session_magics import SessionMagics
from notebook_accel import config as configuration
from notebook_accel.errors import CellError, CellSyntaxError
from notebook_accel.exporting import export
from notebook_accel.launching import run_folders
from notebook_accel.launching.kernel import cell as cells
from notebook_accel.launching.kernel import detached_runs, foreground, launcher, local
from notebook_accel.launching.kernel.job import Job
from notebook_accel.launching.results import Results
from notebook_accel.launching.spec import definitions
from notebook_accel.launching.state.profiles import Profile
from notebook_accel.launching.views import view

_NAME = "distributed"
_DESCRIPTION = """\
Run the cell in several processes (ranks), each with a device of its own.

The cell is the training function: it runs once in every rank, which gets a
copy of the notebook variables that the cell uses. The value of the last
expression is that rank's result; in the notebook, the cell's value is all
results. If the cell ends with a `def`, that function is also defined in the
notebook, and the ranks call it, with --args; if it lacks an argument, it is
only defined. Variables that the cell assigns stay in the ranks; --pull copies
them into the notebook.
"""
_EXAMPLES = """\
examples:
  %%distributed                           one rank for each device
  %%distributed -n 2 --pull model,losses  copies rank 0's model and losses here
  %%distributed --mixed_precision bf16 --out results
                                          results[1] is rank 1's value
  %%distributed --args (5,)               calls the function that the cell ends
                                          with, with 5
  %%distributed --background --name long  lets other cells run meanwhile
  %%distributed --detach --name night     goes on when the kernel ends
  %%distributed --export train.py         writes a script instead of running

In a session (%distributed start), the cell runs in the session's ranks, and
its variables stay there for later cells.
"""


def make_parser() -> arguments.Parser:
    """Return the parser of the cell magic's line."""
    parser = arguments.Parser(f"%%{_NAME}", description=_DESCRIPTION, epilog=_EXAMPLES)
    configuration.add_flags(parser)
    add = parser.add_argument
    add("--args", metavar="EXPRESSION", help="Arguments for the function that the cell ends by defining.")
    add("--out", metavar="NAME", type=arguments.name, help="Binds the results, one value a rank, to this name.")
    add("--pull", metavar="NAME,...", type=arguments.names, default=(), help="Binds rank 0's values of these names.")
    push = "Sends these names too, for code that reaches them through eval, globals() or a string."
    add("--push", metavar="NAME,...", type=arguments.names, default=(), help=push)
    add("--background", action="store_true", help="Doesn't wait: the cell's value is the Job.")
    detach = (
        "The run continues when the kernel ends; the cell's value is the Job. %%distributed attach NAME finds it again."
    )
    add("--detach", action="store_true", help=detach)
    add("--fresh", action="store_true", help="Launches the cell in ranks of its own, also where there is a session.")
    script = (
        "Runs nothing: writes a script that does the same without the notebook, by torchrun or notebook-accel launch."
    )
    add("--export", metavar="FILE", type=pathlib.Path, help=script)
    overwrite = "With --export, replaces a file that an export hasn't written, or that was changed since."
    add("--overwrite", action="store_true", help=overwrite)
    return parser


def _is_silenced(cell: str) -> bool:
    """Return whether a cell ends with a semicolon, which hides its value as in any other cell."""
    last = ""
    with contextlib.suppress(tokenize.TokenError, SyntaxError):  # IPython's own syntax
        for token in tokenize.generate_tokens(io.StringIO(cell).readline):
            if token.type in (tokenize.OP, tokenize.NAME, tokenize.NUMBER, tokenize.STRING):
                last = token.string
    return last == ";"


class Magics:
    """The magics of one shell."""

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self._parser = make_parser()
        self.watch = CudaWatch(shell)
        self.sessions = SessionMagics(shell, self._read, lambda cell: self._define_here(cell, is_told=False))

    def all(self) -> list[tuple[str, str, Callable[..., Any]]]:
        """Return each magic's kind, name and function."""
        return [("cell", _NAME, self.distributed), ("line", _NAME, self.control), *self.sessions.all()]

    def control(self, line: str) -> Any:
        if self.sessions.handles(line):
            return self.sessions.run(line)
        return commands.run(line, also=session_magics.COMMANDS)

    def distributed(self, line: str, cell: str) -> Any:
        given = self._parser.parse(arguments.split(line, f"%%{_NAME}"))
        if given.export is not None:
            return self._export(given, cell)
        if given.overwrite:
            self._parser.error("--overwrite goes with --export")
        if self.sessions.session is not None and not given.fresh:
            if given.detach:
                self._parser.error(
                    "--detach goes with --fresh here: a session's ranks take their cells from this kernel"
                )
            value = self.sessions.cell(given, cell)
            return None if _is_silenced(cell) else value
        config = arguments.options(given, self._shell.user_ns)
        parsed = self._read(cell)
        args = self._arguments(given.args, parsed)
        if given.args is None and any(parsed.without_value()):
            return self._only_define(parsed, config, given)

        is_background = given.background or given.detach
        jobs: list[Job] = []

        def launch() -> Job:
            job = launcher.launch_cell(
                parsed,
                config,
                namespace=self._shell.user_ns,
                args=args,
                push=given.push,
                pull=given.pull,
                set_variables=self._shell.push,
                is_background=is_background,
                detach=given.detach,
            )
            jobs.append(job)
            return job

        try:
            outcome = launch() if is_background else foreground.run_in_foreground(launch)
        finally:  # after the launch: a slow import here would freeze the panel
            if jobs:
                self._define_here(parsed)
        if given.out is not None:
            self._shell.push({given.out: outcome})
        is_empty = isinstance(outcome, Results) and all(value is None for value in outcome)
        return None if is_empty or _is_silenced(cell) else outcome

    def _export(self, given: argparse.Namespace, cell: str) -> None:
        parsed = self._read(cell)
        if given.args is None:
            parsed.refuse_arguments(())
        request = export.ExportRequest(
            path=given.export.expanduser(),
            options=arguments.options(given, self._shell.user_ns),
            given=configuration.given_flags(given),
            args=given.args,
            push=given.push,
            overwrite=given.overwrite,
        )
        print(export.export(parsed, request, self._shell.user_ns, self._earlier_cells(parsed.label)))
        for_notebook = [f"--{name}" for name in ("pull", "out", "background", "detach") if getattr(given, name)]
        if for_notebook:
            print(f"A script has no notebook to come back to, so it does without {' and '.join(for_notebook)}.")

    def _earlier_cells(self, label: str) -> list[str]:
        """Return the sources of the cells before this one as plain Python, also of those under a cell magic."""
        run: list[str] = getattr(self._shell.history_manager, "input_hist_parsed", [])
        sources = run[: int(label.strip("In[]") or len(run))]
        for number, source in enumerate(sources):
            if source.startswith("get_ipython().run_cell_magic("):
                call = ast.parse(source).body[0]
                body = [ast.literal_eval(node) for node in ast.walk(call) if isinstance(node, ast.Constant)][-1]
                sources[number] = f"\n{self._shell.transform_cell(body)}"  # the magic's own line is line 1
        return sources

    def _read(self, cell: str) -> cells.Cell:
        flags = self._shell.compile.flags
        features = [name for name in __future__.all_feature_names if flags & getattr(__future__, name).compiler_flag]
        # The magic's own line is line 1 of the cell. In its place is what earlier cells have imported from the future.
        first = f"from __future__ import {', '.join(features)}" if features else ""
        try:
            return cells.parse(f"{first}\n{self._shell.transform_cell(cell)}", self._label())
        except SyntaxError as error:
            shown = self._shell.SyntaxTB.structured_traceback(type(error), error, None)
            raise CellSyntaxError(f"The cell is not Python: {error}", shown=tuple(shown)) from None

    def _label(self) -> str:
        """Return ``In[7]``, the running cell. IPython versions differ in when they advance the shell's counter."""
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
        try:
            value = self._shell.ev(expression)
        except Exception as error:  # noqa: BLE001 - the user's expression may raise anything
            raise CellError(
                f"--args {expression} can't be evaluated: {type(error).__name__}: {error}",
                fix="--args with a Python expression, in brackets if it has quotes: --args ('pear', 10)",
            ) from None
        return value if isinstance(value, tuple) else (value,)

    def _only_define(self, cell: cells.Cell, config: configuration.LaunchConfig, given: argparse.Namespace) -> None:
        """Define a function that needs arguments in the notebook, and print how to launch it."""
        if given.background or given.detach or given.pull or given.out is not None:
            cell.refuse_arguments(())
        self._define_here(cell)
        needed, keywords = cell.without_value()
        flag = "10" if len(needed) == 1 else f"({', '.join(needed)})"
        call = [cell.calls, *(["(10,)" if len(needed) == 1 else flag] if needed else [])]
        call += [f"kwargs={dict.fromkeys(keywords, 10)}"] if keywords else []
        call += [f"{name}={getattr(config, name)!r}" for name in configuration.given_flags(given)]
        print(
            f"{cell.calls} wasn't launched: {', '.join([*needed, *keywords])} would have no value. To launch it: "
            f"{'' if keywords else f'--args {flag}, or '}notebook_launcher({', '.join(call)})"
        )

    def _define_here(self, cell: cells.Cell, *, is_told: bool = True) -> None:
        """Define the function that the cell ends with in the notebook too, with the imports and definitions beside it.

        A literal constant is defined unless the notebook has a variable of that name: variables that a cell assigns
        stay in the ranks. A failure is printed if ``is_told``.
        """
        if not cell.calls:
            return
        lines = cell.source.splitlines(keepends=True)
        linecache.cache[cell.label] = (len(cell.source), None, lines, cell.label)  # for tracebacks
        assignments = [node for node in cell.tree.body if isinstance(node, (ast.Assign, ast.AnnAssign))]
        assigned = {name for node in assignments for name in cells.names_in(node, ast.Store)}
        kept = {name: value for name, value in self._shell.user_ns.items() if name in assigned - {cell.calls}}
        *others, function = definitions(cell.source, cell.label)
        for code in others:
            # A definition may need a statement that only the ranks run. The launch doesn't depend on it here.
            with contextlib.suppress(Exception):
                self._shell.ex(code)
        try:
            self._shell.ex(function)
        except Exception as error:  # noqa: BLE001 - a default or a decorator may raise anything
            if is_told:
                print(f"{cell.calls} isn't defined in the notebook: {type(error).__name__}: {error}", file=sys.stderr)
        self._shell.user_ns.update(kept)


def register(shell: InteractiveShell) -> None:
    """Register the magics in a shell, start warming the template, and import the view of the first launch."""
    owner = shell.magics_manager.magics["cell"].get(_NAME)
    earlier = getattr(owner, "__self__", None)
    if owner is not None and not isinstance(earlier, Magics):
        print(
            f"notebook_accel: %%{_NAME} was another extension's ({getattr(owner, '__module__', 'unknown')}); "
            f"from now on it is notebook_accel's. %unload_ext notebook_accel takes it away.",
            file=sys.stderr,
        )
    magics = Magics(shell)
    if isinstance(earlier, Magics):
        earlier.watch.stop()
        earlier.sessions.help.stop()
        magics.sessions.session = earlier.sessions.session
    Magics.distributed.__doc__ = magics._parser.format_help()
    Magics.control.__doc__ = f"{commands.run.__doc__}\n{session_magics.HELP}"
    for kind, name, magic in magics.all():
        shell.magics_manager.register_function(magic, kind, name)
    choices = {f"--{option.name}": option.choices for option in configuration.fields()}
    flags = {flag: choices.get(flag, ()) for flag in sorted(magics._parser.flags)}
    arguments.add_completion(shell, f"%%{_NAME}", lambda _: flags)
    every = list(dict.fromkeys([*commands.COMMANDS, *session_magics.COMMANDS]))
    arguments.add_completion(shell, f"%{_NAME}", commands.options_of, every)
    if shell.display_formatter is not None:
        shell.display_formatter.formatters["text/html"].for_type(Profile, timeline.profile_html)
    magics.watch.start()
    magics.sessions.help.start()
    local.engine().warm()
    run_folders.remove_old()
    if going := detached_runs.going_in_words():
        print(f"notebook_accel: {going}")
    if front_end.kernel() is not None:  # meanwhile agent and template start, which takes longer
        view.warm()
        with contextlib.suppress(ImportError):
            import ipywidgets  # noqa: F401


def unregister(shell: InteractiveShell) -> None:
    """Remove the magics, stop every run and end the processes that were kept ready."""
    owner = getattr(shell.magics_manager.magics["cell"].get(_NAME), "__self__", None)
    if isinstance(owner, Magics):
        owner.watch.stop()
        owner.sessions.help.stop()
        owner.sessions.release()
        for kind, name, _ in owner.all():
            shell.magics_manager.magics[kind].pop(name, None)
    for magic in (f"%%{_NAME}", f"%{_NAME}"):
        arguments.remove_completion(shell, magic)
    local.engine().close()
