"""The magics of a session: ``%distributed start | stop | restart | debug``, its cells, ``%push`` and ``%pull``.

``%distributed attach`` and ``detach`` are here too where they concern a session that outlives its kernel. In a
session's cells, rank 0 answers completion and ``?``.
"""

from __future__ import annotations

import argparse
import itertools
import re
import shlex
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from kernel_ext import commands
from kernel_ext.arguments import Parser, names, options, split
from notebook_accel import config as configuration
from notebook_accel.errors import CellError, ResultError, RunError
from notebook_accel.formatting import ranks_in_words
from notebook_accel.interrupts import held
from notebook_accel.launching import run_folders
from notebook_accel.launching.kernel import registry
from notebook_accel.launching.kernel.cell import Cell
from notebook_accel.sessions.kernel.output import Shown

if TYPE_CHECKING:
    from notebook_accel.sessions.kernel.session import Session
    from notebook_accel.sessions.kernel.session_job import SessionJob

COMMANDS = ("start", "stop", "restart", "debug")
"""The commands of ``%distributed`` that concern a session."""

HELP = """\
    A session keeps its ranks between cells. While there is one, %%distributed cells run in its ranks:

    %distributed start -n 2        start a session, with the options of %%distributed
    %distributed start --detach --name lab   start one that outlives the kernel
    %distributed attach lab        take over that session, with its ranks' variables, in another kernel
    %distributed detach [NAME]     leave it, for another notebook to attach by that name
    %distributed restart [RANKS]   restart ranks that have died, or these (such as 0,2-3), or all
    %distributed debug [RANK]      open pdb at the last error, or at the last error of a rank
    %distributed stop              end the session
"""

_HINT = (
    "%%distributed runs a cell on all of them, %%rank 0 on one; %push and %pull copy variables; %distributed stop ends "
    "the session."
)
_ASKED_DEADLINE_S = 30.0  # for the answer to a cell such as `model?`; an interrupt ends it earlier


class SessionMagics:
    """The notebook's session, if it has one, and its magics.

    ``read`` parses a cell. ``define`` defines the function that a cell ends with, if it does, in the notebook.
    """

    def __init__(self, shell: InteractiveShell, read: Callable[[str], Cell], define: Callable[[Cell], None]) -> None:
        self._shell = shell
        self._read = read
        self._define = define
        self._start_parser = Parser("%distributed start")
        configuration.add_flags(self._start_parser)
        detach = "The ranks outlive the kernel. %%distributed attach NAME finds them again."
        self._start_parser.add_argument("--detach", action="store_true", help=detach)
        self._names_parsers = {magic: _names_parser(magic) for magic in ("%push", "%pull")}
        self.session: Session | None = None
        self.help = _CellHelp(shell, lambda: self.session)

    def all(self) -> list[tuple[str, str, Callable[..., Any]]]:
        return [("cell", "rank", self.rank), ("line", "push", self.push), ("line", "pull", self.pull)]

    # %distributed start | stop | restart | debug --------------------------------------------------------------------

    def handles(self, line: str) -> bool:
        """Return whether a ``%distributed`` line is for the session.

        ``stop`` and ``detach`` are, unless they name another run; ``attach`` is if it names a detached session.
        ``detach`` may also rename the session.
        """
        try:
            command, *arguments = shlex.split(line) or [""]
        except ValueError:  # a quote is not closed, which the command itself reports
            command, *arguments = line.split()
        if command == "attach":
            return len(arguments) <= 1 and run_folders.find_session(*arguments) is not None
        if command not in ("stop", "detach"):
            return command in COMMANDS
        if self.session is None or (command == "detach" and self.session.is_over):
            return False
        running = [entry for entry in registry.latest() if entry.is_running]
        mine = next((entry for entry in running if entry.job is self.session.job), None)
        if mine is None:  # the session has already ended
            return not arguments
        names_of_mine = (str(mine.number), mine.name)
        if command == "detach":
            given = commands.COMMANDS["detach"].parse(arguments)
            return given.run in names_of_mine if given.run else given.name == mine.name or running == [mine]
        if not arguments:
            return running == [mine]
        return arguments[-1].removeprefix("--run=") in names_of_mine

    def run(self, line: str) -> None:
        """Run ``%distributed start``, ``stop``, ``restart``, ``debug``, ``attach`` or ``detach``."""
        command, *_ = line.split()
        rest = line.strip().removeprefix(command)
        if command == "start":
            self._start(rest)
        elif command == "attach":
            self._attach(*shlex.split(rest))
        elif command == "detach":
            self._leave(commands.COMMANDS["detach"].parse(split(rest, "%distributed detach")).name)
        elif command == "restart":
            self._restart(rest.split())
        elif command == "debug":
            ranks = parse_ranks(rest) if rest.strip() else [None]
            if len(ranks) > 1:
                raise UsageError("%distributed debug takes one rank at a time, such as %distributed debug 1.")
            self._needed("%distributed debug").debug(ranks[0])
        else:
            self.close()
            print("The session has ended.")

    def _start(self, line: str) -> None:
        self._refuse_second()
        # Not at the top: this import works on Linux only.
        from notebook_accel.sessions.kernel.session import Session

        given = self._start_parser.parse(split(line, "%distributed start"))
        self.release()
        config = options(given, self._shell.user_ns)
        with held():  # an interrupt before the assignment would leave ranks that nobody could end
            self.session = Session.from_config(config, detach=given.detach)
        job = self.session.job
        ready = "1 rank is" if job.world_size == 1 else f"{job.world_size} ranks are"
        print(f"{ready} ready, on {job.devices}.\n{_HINT}")
        if given.detach:
            print(f"They outlive this kernel: %distributed attach {shlex.quote(job.name)} finds them again.")

    def _attach(self, name: str = "") -> None:
        self._refuse_second()
        from notebook_accel.sessions.kernel.session import Session

        self.release()
        with held():
            self.session = Session.attach(name)
        print(f"{self.session!r}\n{_HINT}")

    def _leave(self, name: str) -> None:
        """Detach the session from this kernel."""
        with held():
            session = self._needed("%distributed detach")
            session.leave(name)
            self.session = None
            name = shlex.quote(run_folders.find(session.job.id).facts.name)
            print(f"This notebook has left the session, which goes on. %distributed attach {name} finds it again.")

    def _refuse_second(self) -> None:
        if self.session is not None and not self.session.is_over:
            raise RunError(
                "There is a session already.",
                why=repr(self.session),
                fix="%distributed stop ends it; %distributed detach leaves it",
            )

    def _restart(self, arguments: list[str]) -> None:
        session = self._needed("%distributed restart")
        if arguments == ["all"]:
            chosen = session.restart(range(session.job.world_size))
        else:
            chosen = session.restart(parse_ranks("".join(arguments)) if arguments else None)
        if not chosen:
            print("No rank has died. `%distributed restart 1` starts that one again, `%distributed restart all` all.")
            return
        has = "has" if len(chosen) == 1 else "have"
        who = ranks_in_words(chosen).capitalize()
        print(f"{who} {has} restarted, without variables. The process group is gone: make a new Accelerator() on all "
              "ranks, and prepare again.")  # fmt: skip

    def close(self) -> None:
        """End the session, if there is one."""
        with held():
            session, self.session = self.session, None
            if session is not None:
                session.close()

    def release(self) -> None:
        """End the session, or leave it if it was detached and can go on."""
        with held():
            session = self.session
            if session is not None and session.is_detached and not session.is_over:
                self.session = None
                session.leave()
            else:
                self.close()

    def _needed(self, magic: str) -> Session:
        if self.session is None:
            raise RunError(f"{magic} needs a session, and there is none.", fix="%distributed start -n 2")
        return self.session

    # Cells ------------------------------------------------------------------------------------------------------------

    def cell(self, given: argparse.Namespace, cell: str) -> Shown | SessionJob | None:
        """Run a ``%%distributed`` cell in the session."""
        refused = [f"--{name}" for name in (*configuration.given_flags(given), "args") if getattr(given, name)]
        if refused:
            raise UsageError(
                f"%%distributed: {', '.join(refused)} can't be used with a cell in a session. Options belong to "
                "%distributed start; --fresh launches this cell by itself."
            )
        session = self._needed("%%distributed")
        if asked := _asked_about(cell):
            print(_describe(session, asked))
            return None
        wants_value = given.background or given.out is not None
        parsed = self._read(cell)
        job = session.cell_job(
            parsed,
            self._shell.user_ns,
            push=given.push,
            wants_value=wants_value,
            reloads=self._reloads(),
        )
        try:
            if given.background:
                return self._start_job(job, given)
            job.run()
        except ResultError:  # a value for --out can't be sent; pull the names all the same
            if given.pull:
                self._bind(session, given.pull, 0)
            raise
        finally:
            self._define(parsed)
        needed, keywords = parsed.without_value()
        if arguments := ", ".join([*needed, *(f"{name}=..." for name in keywords)]):
            print(
                f"{parsed.calls} wasn't called: {parsed.calls}({arguments}) in a cell like this calls it in the ranks."
            )
        if given.pull:
            self._bind(session, given.pull, 0)
        if given.out is not None:
            self._shell.push({given.out: job.results()})
        return job.shown or None

    def _start_job(self, job: SessionJob, given: argparse.Namespace) -> SessionJob:
        if given.pull:
            raise UsageError(
                "%%distributed: --pull can't be used with a cell in the background. "
                f"%pull {' '.join(given.pull)} in the next cell waits for its end."
            )
        with held():
            job.start()
            if given.out is not None:
                self._shell.push({given.out: job})
        return job

    def rank(self, line: str, cell: str) -> Shown | None:
        """Run a cell on some ranks of the session only.

        %%rank 0        on rank 0
        %%rank 0,2-3    on ranks 0, 2 and 3

        The cell must not do anything that all ranks do together, such as a training step: it would wait for the others.
        """
        session = self._needed("%%rank")
        if not line.strip():
            raise UsageError("%%rank needs ranks: %%rank 0, or %%rank 0,2-3.")
        ranks = parse_ranks(line)
        if asked := _asked_about(cell):
            if ranks != [0]:
                raise UsageError(f"%%rank: only rank 0 can be asked for {asked}?, in a cell with %%rank 0.")
            print(_describe(session, asked))
            return None
        job = session.cell_job(
            self._read(cell), self._shell.user_ns, ranks=ranks, wants_value=False, reloads=self._reloads()
        )
        return job.run().shown or None

    def _reloads(self) -> bool:
        """Return whether the notebook reloads all modules that change, as ``%autoreload 2`` says."""
        reloader = getattr(self._shell.magics_manager.registry.get("AutoreloadMagics"), "_reloader", None)
        return bool(getattr(reloader, "enabled", False) and getattr(reloader, "check_all", False))

    # Names ------------------------------------------------------------------------------------------------------------

    def push(self, line: str) -> None:
        """Copy notebook variables to the session's ranks, replacing what they have under these names.

        %push model lr         on all ranks; also model,lr
        %push lr --rank 1      on rank 1; also 0,2-3
        """
        session = self._needed("%push")
        given, wanted = self._read_names("%push", line)
        missing = [name for name in wanted if name not in self._shell.user_ns]
        if missing:
            raise CellError(
                f"The notebook has no name {', '.join(map(repr, missing))}.", fix="run the cell that assigns it first"
            )
        session.push(given.rank, **{name: self._shell.user_ns[name] for name in wanted})

    def pull(self, line: str) -> None:
        """Copy variables of one of the session's ranks into the notebook.

        %pull losses           rank 0's
        %pull losses --rank 1
        """
        session = self._needed("%pull")
        given, wanted = self._read_names("%pull", line)
        ranks = given.rank or [0]
        if len(ranks) > 1:
            raise UsageError("%pull copies from one rank. session.pull_all returns the values of several.")
        self._bind(session, wanted, ranks[0])

    def _read_names(self, magic: str, line: str) -> tuple[argparse.Namespace, tuple[str, ...]]:
        """Parse the line of ``%push`` or ``%pull``; return it and its names, which blanks or commas separate."""
        given = self._names_parsers[magic].parse(split(line, magic))
        return given, tuple(itertools.chain.from_iterable(given.names))

    def _bind(self, session: Session, wanted: tuple[str, ...], rank: int) -> None:
        try:
            [values] = session.pull_all(*wanted, ranks=[rank])
        except ResultError as error:
            found = error.values.get(rank, {})
            self._shell.push(found)
            error.values, error.pulled = {}, tuple(found)
            raise
        self._shell.push(values)


def _describe(session: Session, asked: str) -> str:
    """Return rank 0's description of a name, or the reason why there is none."""
    lines = session.describe(asked, _ASKED_DEADLINE_S)
    if lines:
        return "\n".join(lines)
    if lines is not None:
        return f"Rank 0 has no name {asked!r}."
    if session.job.ranks[0].has_ended:
        return "Rank 0 has died. %distributed restart starts it again."
    doing = session.job.doing()
    # The ranks may be idle again by now.
    why = "rank 0 didn't answer; run the cell again" if doing == "idle" else doing
    return f"The ranks can't be asked just now: {why}."


def _names_parser(magic: str) -> Parser:
    parser = Parser(magic)
    parser.add_argument("names", nargs="+", type=names)
    parser.add_argument("--rank", type=parse_ranks)
    return parser


def parse_ranks(text: str) -> list[int]:
    """Parse ``0,2-3`` into a list.

    Raises:
        UsageError: The text names no ranks.
    """
    ranks: list[int] = []
    for part in text.replace(" ", "").split(","):
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if found is None:
            raise UsageError(f"{text.strip()!r} names no ranks. Write 0, or 0,2-3.")
        ranks += range(int(found[1]), int(found[2] or found[1]) + 1)
    return sorted(set(ranks))


# Completion and ? in cells --------------------------------------------------------------------------------------------

_CELL = re.compile(r"%%(distributed(?!.*--fresh)|rank)\b[^\n]*\n")
_BEFORE = re.compile(r"(?:[^\W\d]\w*\.)*(?:[^\W\d]\w*)?$")
_AFTER = re.compile(r"\w*")
_ASKED = re.compile(r"\s*(?:\?\s*([\w.]+)|([\w.]+)\s*\?)\s*")


class _CellHelp:
    """Answers a kernel's completion and inspection requests in cells of a session.

    The kernel's two methods are wrapped, since IPython's own completers don't get the cell's text. In a shell without
    a kernel, such as a terminal's, nothing is wrapped.
    """

    def __init__(self, shell: InteractiveShell, session: Callable[[], Session | None]) -> None:
        self._kernel = getattr(shell, "kernel", None)
        self._session = session

    def start(self) -> None:
        if self._kernel is not None:
            self._complete, self._inspect = self._kernel.do_complete, self._kernel.do_inspect
            self._kernel.do_complete, self._kernel.do_inspect = self.complete, self.inspect

    def stop(self) -> None:
        if self._kernel is not None:
            del self._kernel.do_complete, self._kernel.do_inspect

    def complete(self, code: str, cursor_pos: int) -> Any:
        """Answer a completion request, with rank 0's names first."""
        reply = self._complete(code, cursor_pos)
        session = self._session_of(code, cursor_pos)
        begun = _BEFORE.findall(code[:cursor_pos])[0]
        matches = [] if session is None else session.complete(begun)
        if not matches or not isinstance(reply, dict):
            return reply
        start = cursor_pos - len(begun)
        others = reply["matches"] if reply.get("cursor_start") == start else []
        shown = {"matches": list(dict.fromkeys([*matches, *others])), "cursor_start": start, "cursor_end": cursor_pos}
        return {**shown, "metadata": {}, "status": "ok"}

    def inspect(self, code: str, cursor_pos: int, detail_level: int = 0, omit_sections: Any = ()) -> Any:
        """Answer an inspection request, from rank 0 if it knows the name."""
        session = self._session_of(code, cursor_pos)
        name = _BEFORE.findall(code[:cursor_pos])[0] + _AFTER.findall(code, cursor_pos)[0]
        lines = None if session is None or not name else session.describe(name)
        if lines:
            return {"status": "ok", "found": True, "data": {"text/plain": "\n".join(lines)}, "metadata": {}}
        return self._inspect(code, cursor_pos, detail_level, omit_sections)

    def _session_of(self, code: str, cursor_pos: int) -> Session | None:
        """Return the session, if the cursor is in the body of a cell that runs in it."""
        cell = _CELL.match(code)
        return self._session() if cell is not None and cursor_pos >= cell.end() else None


def _asked_about(cell: str) -> str:
    """Return the name in a cell that is nothing but ``name?`` or ``?name``; empty for any other cell."""
    found = _ASKED.fullmatch(cell)
    return "" if found is None else found[1] or found[2]
