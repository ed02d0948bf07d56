"""``Session``: ranks that keep their variables, process group and ``Accelerator`` between cells."""

from __future__ import annotations

import functools
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
from notebook_accel.sessions.kernel import detached_pool
from notebook_accel.sessions.kernel.namespace_sync import Inputs, dependencies_of, with_dependencies
from notebook_accel.sessions.kernel.output import Shown
from notebook_accel.sessions.kernel.rank_pool import RankPool
from notebook_accel.sessions.kernel.session_job import SessionJob

if TYPE_CHECKING:
    from typing_extensions import Self


class Session:
    """Ranks that run until the session is closed, and run code cell by cell.

    Each rank has its own namespace, its ``__main__``. Variables that cells assign stay there, including an
    ``Accelerator`` and its process group. A session never changes the notebook's variables::

        with Session(num_processes=2) as session:
            session.execute("from notebook_accel import Accelerator; accelerator = Accelerator()")
            session.push(x=3)
            session.execute("x += accelerator.process_index")
            session.pull("x", rank=1)  # 4

    Args:
        num_processes: Number of ranks. Default: one for each visible device, one on a machine with only a CPU.
        detach: Let the ranks outlive this process. ``Session.attach`` finds them by the option ``name``.
        options: Further options of ``notebook_launcher``, such as ``use_cpu=True``.

    Raises:
        ConfigError: An option has a value that sessions don't allow.
        LaunchError: The ranks could not be started.
    """

    def __init__(self, num_processes: int | None = None, *, detach: bool = False, **options: Any) -> None:
        config = configuration.resolve_call({"num_processes": num_processes, **options})
        self._pool = _start_pool(config, detach=detach)

    @classmethod
    def from_config(cls, config: LaunchConfig, *, detach: bool = False) -> Session:
        """Start a session with these options."""
        return cls._of(_start_pool(config, detach=detach))

    @classmethod
    def attach(cls, which: str = "") -> Session:
        """Attach to a detached session that goes on. Its ranks have kept their variables.

        Waits for ranks that still run an earlier notebook's code. An interrupt ends only the wait.

        Args:
            which: The session's name or id. Default: the only detached run that goes on.

        Raises:
            RunError: There is no such session, another process is attached, or another version has started it.
        """
        return cls._of(detached_pool.DetachedRankPool(LaunchConfig(), detached_pool.find(which)))

    @classmethod
    def _of(cls, pool: RankPool) -> Session:
        session = cls.__new__(cls)
        session._pool = pool
        return session

    @property
    def job(self) -> Job:
        """The ranks' run, which the panel shows."""
        return self._pool.job

    def execute(self, source: str, *, ranks: Sequence[int] | None = None) -> Shown:
        """Run Python code in the ranks' ``__main__``.

        The code's output is printed here. Variables of this process's ``__main__`` that the code uses, and that no cell
        has assigned, are copied to the ranks first: once, and again after a change. While the ranks are busy, the code
        waits for its turn.

        Args:
            source: The code.
            ranks: The ranks to run on. Default: all.

        Returns:
            The value of the last expression as each rank shows it; empty if there is none. ``run`` and ``pull`` return
            values themselves.

        Raises:
            RankFailedError: A rank raised an error, or died. The others were interrupted and keep their variables.
            KeyboardInterrupt: The kernel and so the ranks were interrupted. All ranks keep their variables.
        """
        main = sys.modules["__main__"].__dict__
        return self.cell_job(_parsed(source), main, ranks=ranks, wants_value=False).run().shown

    def start(self, source: str, *, ranks: Sequence[int] | None = None) -> SessionJob:
        """Run code without waiting for its end: ``session.start("train()").results(timeout_s=60)``."""
        return self.cell_job(_parsed(source), sys.modules["__main__"].__dict__, ranks=ranks).start()

    def cell_job(
        self,
        cell: Cell,
        namespace: Mapping[str, Any],
        *,
        ranks: Sequence[int] | None = None,
        push: Sequence[str] = (),
        wants_value: bool = True,
        reloads: bool = False,
    ) -> SessionJob:
        """Return the job of a cell, to run or to start, with the notebook's present variables.

        ``push`` has names whose values replace the ranks' own. Without ``wants_value``, the results have only the
        display of values. With ``reloads``, the ranks first reload the user's modules whose files have changed.
        """
        captured = cell.captured(namespace, push)
        names = {name: namespace[name] for name in with_dependencies(captured, namespace)}
        inputs = Inputs(names, push, cell.optional_names(names, push), cell.submodules(names))
        lines = cell.source.splitlines(keepends=True)
        linecache.cache[cell.label] = (len(cell.source), None, lines, cell.label)  # for ``stacks``
        fields = {"source": cell.source, "label": cell.label, "wants_value": wants_value, "reloads": reloads}
        return self._job(messages.Execute, cell.label, ranks, inputs, **fields)

    def _job(
        self,
        make: Callable[..., messages.ToRank],
        title: str,
        ranks: Sequence[int] | None = None,
        inputs: Inputs = Inputs(),  # noqa: B008 - it is frozen
        **fields: Any,
    ) -> SessionJob:
        """Create the job of a request to ranks, by default all. See ``RankPool.run_request``."""
        return SessionJob(title, functools.partial(self._pool.run_request, make, ranks, inputs, **fields), self.stacks)

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Results:
        """Call a function on all ranks, and return each rank's value.

        Raises:
            PayloadError: The function or an argument can't be sent.
            RankFailedError: See ``execute``.
        """
        namespace = sys.modules["__main__"].__dict__
        names = {name: namespace[name] for name in dependencies_of(function, namespace)}
        inputs = Inputs({name: value for name, value in names.items() if value is not function},
                          call=(function, args, kwargs))  # fmt: skip
        title = getattr(function, "__name__", "a function")
        return self._job(messages.Call, title, inputs=inputs).run().results()

    def push(self, ranks: Sequence[int] | None = None, /, **names: Any) -> None:
        """Bind variables in the ranks to copies of these values, in place of their own: ``session.push(x=3)``.

        Args:
            ranks: The ranks to copy the values to. Default: all.
            names: The variables.

        Raises:
            PayloadError: A value can't be sent.
        """
        if names:
            self._job(messages.Push, f"push of {', '.join(names)}", ranks, Inputs(names, tuple(names))).run()

    def pull(self, *names: str, rank: int = 0) -> Any:
        """Return a rank's value of a name; a tuple for several names. Tensors arrive on the CPU. Binds no variable.

        Raises:
            RankFailedError: The rank has no such name.
            ResultError: A value can't be sent, or can't be unpickled here. The error carries the others.
        """
        [values] = self.pull_all(*names, ranks=[rank])
        return values[names[0]] if len(names) == 1 else tuple(values[name] for name in names)

    def pull_all(self, *names: str, ranks: Sequence[int] | None = None) -> Results:
        """Return the ranks' values of some names: a dictionary for each rank, in order of rank.

        Sharded tensors and models arrive whole; this needs all ranks to be alive.
        """
        answering = self._pool.chosen(ranks)
        gathers = self._pool.is_whole
        job = self._job(
            messages.Pull,
            f"pull of {', '.join(names)}",
            None if gathers else answering,
            names=list(names),
            answering=answering,
            gathers=gathers,
        ).run()
        return Results([value for value in job.results() if value is not None])

    def restart(self, ranks: Sequence[int] | None = None) -> list[int]:
        """Restart ranks as fresh processes without variables. The others keep theirs. No rank has a process group then.

        Args:
            ranks: The ranks to restart; live ones are killed first. Default: those that have died.

        Returns:
            The restarted ranks.
        """
        return self._pool.restart(ranks)

    def stacks(self, timeout_s: float = 10.0) -> Stacks:
        """Return the stack of every rank, even of one that hangs in a collective."""
        return self.job.stacks(timeout_s)

    def debug(self, rank: int | None = None) -> None:
        """Open pdb at the last error of a rank. Commands are typed here; the other ranks take no part.

        A rank keeps the variables of its last error's frames until its next error, or its end.

        Args:
            rank: The rank to debug. Default: the one that failed last.

        Raises:
            RunError: Nothing has failed on that rank, or nobody can type commands.
        """
        self._pool.debug(rank)

    def complete(self, text: str) -> list[str]:
        """Return completions for the end of some code, from rank 0's variables; none while rank 0 is busy."""
        return self._pool.look_up(text=text, describes=False) or []

    def describe(self, path: str, timeout_s: float | None = None) -> list[str] | None:
        """Return lines that describe a dotted name on rank 0; none if rank 0 has no such name.

        Args:
            path: The name.
            timeout_s: Longest wait for rank 0's answer in seconds. Default: one second, fit for a user who is typing.

        Returns:
            The lines; ``None`` if rank 0 is busy or gone, or hasn't answered in time.
        """
        return self._pool.look_up(text=path, describes=True, timeout_s=timeout_s)

    def close(self) -> None:
        """End the session and its ranks, and wait for their end."""
        self._pool.close()

    def leave(self, name: str = "") -> None:
        """Disconnect this process. The ranks go on, however they were started, for ``Session.attach``.

        Args:
            name: The session's new name, if it wasn't started with ``detach=True``. Default: its present name.

        Raises:
            ConfigError: A session with these options can't be detached, or a detached one has another name.
            LaunchError: A detached run of that name goes on, or the folder can't be made.
            RunError: Some ranks have died, or another run of this process goes on.
        """
        self._pool.leave(name)

    @property
    def is_detached(self) -> bool:
        """True if the ranks outlive this process."""
        return self._pool.outlives_kernel

    @property
    def is_over(self) -> bool:
        """True once the ranks are gone for good, or this process has left them."""
        return self._pool.is_over

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        job = self.job
        state = f"{len(self._pool.alive)} of {job.world_size} ranks are there"
        if self.is_over:
            state = "ended" if job.done and job.status != "detached" else "left"
        return f"<Session {job.name!r}: {state}, on {job.devices}>"


def _parsed(source: str) -> Cell:
    return cells.parse(source, f"session[{zlib.crc32(source.encode()):08x}]")


def _start_pool(config: LaunchConfig, *, detach: bool) -> RankPool:
    if config.start_method not in ("auto", "spawn"):
        raise ConfigError(
            f"start_method={config.start_method!r} can't be used for a session.",
            why="A session's ranks start as clean processes, and stay.",
            fix="leave out start_method",
        )
    return detached_pool.DetachedRankPool(config) if detach else RankPool(config)
