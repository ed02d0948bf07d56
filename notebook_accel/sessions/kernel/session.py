"""``Session``: ranks that stay, with their names, their process group and their ``Accelerator``, between cells."""

from __future__ import annotations

import linecache
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from notebook_accel import config as configuration
from notebook_accel.config import LaunchConfig
from notebook_accel.errors import ConfigError
from notebook_accel.launching.kernel import cell as cells
from notebook_accel.launching.kernel.cell import Cell
from notebook_accel.launching.kernel.job import Job
from notebook_accel.launching.results import Results
from notebook_accel.launching.state.stacks import Stacks
from notebook_accel.protocol import session_messages as messages
from notebook_accel.sessions.kernel import dependencies
from notebook_accel.sessions.kernel.background import BackgroundCell
from notebook_accel.sessions.kernel.namespace_sync import Request
from notebook_accel.sessions.kernel.rank_pool import Crew
from notebook_accel.sessions.showing import Shown

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Session"]


class Session:
    """Ranks that stay until the session is closed; code runs in them cell by cell.

    Each rank has a namespace of its own, its ``__main__``, in which all that cells have assigned stays, an
    ``Accelerator`` and its process group included. Nothing of the notebook is ever changed by it.

        with Session(num_processes=2) as session:
            session.execute("from notebook_accel import Accelerator; accelerator = Accelerator()")
            session.push(x=3)
            session.execute("x += accelerator.process_index")
            session.pull("x", rank=1)  # 4

    Args:
        num_processes: Number of ranks. Default: one for each visible device, one on a machine with only a CPU.
        options: Further options of a launch, as ``notebook_launcher`` has them, such as ``use_cpu=True``.

    Raises:
        ConfigError: An option has a value that it can't have here.
        LaunchError: The ranks could not be started.
    """

    def __init__(self, num_processes: int | None = None, **options: Any) -> None:
        self._crew = _crew(configuration.resolve({"num_processes": num_processes, **options}, environ={}))

    @classmethod
    def from_config(cls, config: LaunchConfig) -> Session:
        """A session with these options."""
        session = cls.__new__(cls)
        session._crew = _crew(config)
        return session

    @property
    def job(self) -> Job:
        """The run that the ranks belong to, which the panel shows."""
        return self._crew.job

    def execute(self, source: str, *, ranks: Sequence[int] | None = None) -> Shown:
        """Runs Python code in the ranks' ``__main__``.

        What it prints is printed here. Names of this process's ``__main__`` that it uses and that no cell has assigned
        are sent before, once, and again when they have changed. If the ranks are busy, it waits for its turn.

        Args:
            source: The code.
            ranks: Which of them. Default: all.

        Returns:
            The value of its last expression as each rank shows it; nothing if there is none. ``run`` and ``pull`` bring
            values themselves.

        Raises:
            RankFailedError: A rank has raised something, or died. The others were interrupted and keep what they have.
            KeyboardInterrupt: The kernel was interrupted, and so were the ranks; all keep what they have.
        """
        return self.run_cell(_parsed(source), sys.modules["__main__"].__dict__, ranks=ranks)[0]

    def start(self, source: str, *, ranks: Sequence[int] | None = None) -> BackgroundCell:
        """The same without waiting for the end: ``session.start("train()").results(timeout_s=60)``."""
        return self.start_cell(_parsed(source), sys.modules["__main__"].__dict__, ranks=ranks)

    def run_cell(
        self,
        cell: Cell,
        namespace: Mapping[str, Any],
        *,
        ranks: Sequence[int] | None = None,
        push: Sequence[str] = (),
        wants_values: bool = False,
    ) -> tuple[Shown, Results | None]:
        """Runs a cell, as ``execute`` does.

        Args:
            cell: The cell.
            namespace: The notebook's names.
            ranks: Which of them. Default: all.
            push: Names that are sent whatever the ranks have under them.
            wants_values: Whether to bring the values themselves.

        Returns:
            How the values are shown, and the values if they were wanted.
        """
        shown, values = self._run_cell(cell, _request(cell, namespace, push), ranks, wants_values=wants_values)
        return shown, values if wants_values else None

    def start_cell(
        self, cell: Cell, namespace: Mapping[str, Any], *, ranks: Sequence[int] | None = None, push: Sequence[str] = ()
    ) -> BackgroundCell:
        """Runs a cell in the background, with the notebook's names as they are bound now.

        Raises:
            PayloadError: Something that it needs can't be sent.
        """
        request = _request(cell, namespace, push)
        handle = BackgroundCell(cell.label, self.stacks)
        handle.start(lambda: self._run_cell(cell, request, ranks, wants_values=True, background=handle))
        return handle

    def _run_cell(
        self,
        cell: Cell,
        request: Request,
        ranks: Sequence[int] | None,
        *,
        wants_values: bool,
        background: BackgroundCell | None = None,
    ) -> tuple[Shown, Results]:
        lines = cell.source.splitlines(keepends=True)
        linecache.cache[cell.label] = (len(cell.source), None, lines, cell.label)  # for ``stacks``
        what = {"source": cell.source, "label": cell.label, "wants_value": wants_values}
        answers = self._crew.ask(messages.Execute, ranks, request, called=cell.label, background=background, **what)
        shown = Shown({rank: reply.shown for rank, (reply, _) in answers.items() if reply.shown})
        return shown, Results([value for _, value in answers.values()])

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Results:
        """Calls a function on all ranks; what each returned.

        Raises:
            PayloadError: Something in it can't be sent.
            RankFailedError: As ``execute``.
        """
        namespace = sys.modules["__main__"].__dict__
        names = {name: namespace[name] for name in dependencies.used_by(function, namespace)}
        request = Request({name: value for name, value in names.items() if value is not function},
                          call=(function, args, kwargs))  # fmt: skip
        called = getattr(function, "__name__", "a function")
        return Results([value for _, value in self._crew.ask(messages.Call, None, request, called=called).values()])

    def push(self, ranks: Sequence[int] | None = None, /, **names: Any) -> None:
        """Binds names in the ranks, by value, whatever they have under them: ``session.push(x=3)``.

        Args:
            ranks: Which of them. Default: all.
            names: The names and their values.

        Raises:
            PayloadError: Something can't be sent.
        """
        if names:
            self._crew.ask(messages.Take, ranks, Request(names, tuple(names)), called=f"push of {', '.join(names)}")

    def pull(self, *names: str, rank: int = 0) -> Any:
        """A rank's value of a name; a tuple for several. Tensors come on the CPU. Nothing is bound here.

        Raises:
            RankFailedError: The rank has no such name.
            ResultError: A value can't be sent, or not be made again here; the others are in the error.
        """
        [values] = self.pull_all(*names, ranks=[rank])
        return values[names[0]] if len(names) == 1 else tuple(values[name] for name in names)

    def pull_all(self, *names: str, ranks: Sequence[int] | None = None) -> Results:
        """The ranks' values of some names: a dictionary for each rank."""
        answers = self._crew.ask(messages.Fetch, ranks, called=f"pull of {', '.join(names)}", names=list(names))
        return Results([values for _, values in answers.values()])

    def restart(self, ranks: Sequence[int] | None = None) -> list[int]:
        """Starts ranks again, as fresh processes without names; the others keep theirs. There is no group after it.

        Args:
            ranks: Which; those that live are killed first. Default: those that have died.

        Returns:
            The ranks that were started again.
        """
        return self._crew.restart(ranks)

    def stacks(self, timeout_s: float = 10.0) -> Stacks:
        """Where every rank stands, also one that hangs in a collective."""
        return self.job.stacks(timeout_s)

    def debug(self, rank: int | None = None) -> None:
        """Opens pdb where the last error of a rank was raised; commands are typed here, the other ranks have no part.

        A rank keeps what the frames of its last error hold until its next error, or its end.

        Args:
            rank: Which. Default: the one that failed last.

        Raises:
            RunError: Nothing has failed there, or nobody can be asked for commands.
        """
        self._crew.debug(rank)

    def complete(self, text: str) -> list[str]:
        """What could stand at the end of some code, as rank 0 has it; nothing while it is busy."""
        return self._crew.look(text=text, describes=False) or []

    def describe(self, path: str, timeout_s: float | None = None) -> list[str] | None:
        """Lines about a dotted name, as rank 0 has it; none if it hasn't.

        Args:
            path: The name.
            timeout_s: How long rank 0 has to answer. Default: as long as who types would wait, a second.

        Returns:
            The lines; ``None`` if rank 0 is busy or gone, or hasn't answered in time.
        """
        return self._crew.look(text=path, describes=True, timeout_s=timeout_s)

    def close(self) -> None:
        """Ends the session and its ranks, and waits for that."""
        self._crew.close()

    @property
    def is_over(self) -> bool:
        """True if its ranks are gone for good."""
        return self.job.done

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        job = self.job
        state = "ended" if job.done else f"{len(self._crew.alive)} of {job.world_size} ranks are there"
        return f"<Session {job.name!r}: {state}, on {job.devices}>"


def _parsed(source: str) -> Cell:
    return cells.parse(source, f"session[{zlib.crc32(source.encode()):08x}]")


def _request(cell: Cell, namespace: Mapping[str, Any], push: Sequence[str]) -> Request:
    """What a cell needs of the notebook's names."""
    captured = cell.captured(namespace, push)
    names = {name: namespace[name] for name in dependencies.with_what_they_use(captured, namespace)}
    return Request(names, push, cell.optional_names(names, push), cell.submodules(names))


def _crew(config: LaunchConfig) -> Crew:
    if config.start_method not in ("auto", "spawn"):
        raise ConfigError(
            f"start_method={config.start_method!r} can't be used for a session.",
            why="Its ranks are processes that stay, and that start clean.",
            fix="leave out start_method",
        )
    return Crew(config)
