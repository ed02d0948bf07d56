"""A launch's payload, made in the kernel: the pickled target, its functions' sources, and the run's files."""

from __future__ import annotations

import contextlib
import dataclasses
import linecache
import os
import sys
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from notebook_accel.errors import PayloadError
from notebook_accel.formatting import format_size
from notebook_accel.interrupts import allowed
from notebook_accel.launching import logs
from notebook_accel.launching.kernel.detached_job import new_detached_job
from notebook_accel.launching.kernel.job import Job, LaunchRequest
from notebook_accel.launching.run_folders import PAYLOAD, RunFolder
from notebook_accel.launching.spec import Source
from notebook_accel.payload import memory_files, serialization

_LISTED_BYTES = 100_000_000


@allowed()  # it calls the objects' own code
def pickle_target(request: LaunchRequest) -> tuple[LaunchRequest, serialization.Pickled]:
    """Pickle the target. Print which objects are large, and which tensors lose their autograd graph.

    Returns:
        The request, whose spec names the optional variables that can't be sent and were left out; and the pickle.

    Raises:
        PayloadError: An object that isn't optional can't be sent.
    """
    target, roots = request.target, request.roots
    try:
        done = _pickle(target, roots)
    except PayloadError:
        unsent = {name: why for name in request.optional_names if (why := _why_not(name, target.names[name]))}
        if not unsent:
            raise
        names = {name: value for name, value in target.names.items() if name not in unsent}
        roots = {label: value for label, value in roots.items() if label not in map(variable_label, unsent)}
        done = _pickle(dataclasses.replace(target, names=names), roots)
        request = dataclasses.replace(request, spec=msgspec.structs.replace(request.spec, unsent=unsent))
    report_large(done.sizes_bytes)
    report_lost_graphs(roots)
    return request, done


def _pickle(value: Any, roots: Mapping[str, Any]) -> serialization.Pickled:
    return serialization.pickle_by_value(value, roots=roots, namespace=sys.modules["__main__"].__dict__)


def _why_not(name: str, value: Any) -> str:
    try:
        _pickle(value, {variable_label(name): value})
    except PayloadError as error:
        return error.what
    return ""


def variable_label(name: str) -> str:
    """Return the label by which messages name a variable of the notebook."""
    return f'global "{name}"'


def call_roots(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the objects of a call by the labels that messages use for them."""
    return {
        f'function "{getattr(function, "__name__", type(function).__name__)}"': function,
        **{f"argument {index}": value for index, value in enumerate(args)},
        **{f'argument "{name}"': value for name, value in kwargs.items()},
    }


def report_large(sizes_bytes: Mapping[str, int]) -> None:
    """Print the large objects of a pickle, since the user may not want to send them."""
    large = {label: size for label, size in sizes_bytes.items() if size >= _LISTED_BYTES}
    if large:
        ordered = sorted(large.items(), key=lambda item: -item[1])
        listed = ", ".join(f"{_variable_name(label)} {format_size(size)}" for label, size in ordered)
        print(f"Sending to the ranks: {listed}")


def report_lost_graphs(roots: Mapping[str, Any]) -> None:
    """Print which tensors lose their autograd graph."""
    tensor_class = getattr(sys.modules.get("torch"), "Tensor", ())
    tensors = {label: value for label, value in roots.items() if isinstance(value, tensor_class)}
    labels = [_variable_name(label) for label, value in tensors.items() if value.grad_fn is not None]
    if labels:
        print(f"Sent without the graph of their gradients: {', '.join(labels)}", file=sys.stderr)


def _variable_name(label: str) -> str:
    return label.removeprefix("global ").strip('"')


def notebook_sources(by_value: Iterable[Any]) -> dict[str, Source]:
    """Return the sources of the cells that define these functions, by the file name in the functions' code."""
    filenames = {obj.__code__.co_filename for obj in by_value if isinstance(obj, types.FunctionType)}
    found: dict[str, Source] = {}
    for filename in filenames:
        lines = [] if os.path.exists(filename) else linecache.getlines(filename)
        if lines:
            found[filename] = Source(_source_label(filename), "".join(lines))
    return found


def _source_label(filename: str) -> str:
    """Return a cell's label such as ``In[7]`` from IPython's compiler; the file name if it knows none."""
    shell = getattr(sys.modules.get("__main__"), "get_ipython", lambda: None)()
    name_of = getattr(getattr(shell, "compile", None), "format_code_name", None)
    named = name_of(filename) if name_of is not None else None
    return str(named[1]) if named else filename


@contextlib.contextmanager
def prepared_run(
    request: LaunchRequest, pickled: serialization.Pickled, *, folder: RunFolder | None = None
) -> Iterator[tuple[Job, int]]:
    """Write the payload and open the run's files. Close the payload on leaving, and kill the job if the start fails.

    Yields the job, and the descriptor of the payload. A detached run has its files in ``folder``. Other runs, which end
    with their kernel, have anonymous memory files.
    """
    sources = notebook_sources(pickled.by_value) | request.spec.sources
    spec = msgspec.structs.replace(request.spec, sources=sources)
    request = dataclasses.replace(request, spec=spec)
    payload = memory_files.memory_file("notebook-accel-payload") if folder is None else folder.create(PAYLOAD)
    try:
        with allowed():  # it copies the tensors
            serialization.dump(payload, pickled, spec.encode())
        job: Job
        if folder is None:
            memory_files.make_unwritable(payload)
            log_folder = logs.make_folder(request.config.log_dir, spec.name)
            results = [memory_files.memory_file(f"notebook-accel-result-{rank}") for rank in range(spec.world_size)]
            job = Job(request, by_value=pickled.by_value, result_files=results, log_folder=log_folder)
        else:
            job = new_detached_job(request, folder, pickled.by_value)
        try:
            yield job, payload
        except BaseException:
            job.kill()
            raise
    finally:
        os.close(payload)
