"""The ranks' results: the memory files in which ranks write them, and the notebook's side, which reads them.

Each object has its own pickle, so that a failure loses that object only. A part that several objects share, such as the
parameters of a model and its optimizer, is pickled once, and their pickles refer to it. So objects that share parts in
the rank share them in the notebook too, and an object fails only if one of its own parts does.
"""

from __future__ import annotations

import gc
import os
import pickle
import types
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec

from notebook_accel.errors import PayloadError, ResultError
from notebook_accel.payload import memory_files, serialization
from notebook_accel.payload.serialization import Pickled, SharedPickling
from notebook_accel.payload.tensor_memory import Blocks
from notebook_accel.protocol.channel import close_all


class Results(list[Any]):
    """The values that the ranks returned; ``results[0]`` is rank 0's."""


_Keys = tuple[str, ...]


class _PickleEntry(msgspec.Struct, frozen=True):
    """One pickle of a file.

    Attributes:
        keys: Names of the objects that need the pickle. With one name the pickle holds that object; with several, the
            list of the parts that exactly those objects share.
        pickle_bytes: The pickle's length. The pickles follow each other.
        buffers: Indices of the file's buffers that the pickle uses, in order.
    """

    keys: _Keys
    pickle_bytes: int
    buffers: tuple[int, ...]


class _Refused(msgspec.Struct, frozen=True):
    """The reason why an object isn't in the file: the fields of a ``PayloadError``."""

    what: str
    path: str
    why: str = ""
    fix: str = ""


class _Index(msgspec.Struct, frozen=True):
    """The head of a file."""

    entries: list[_PickleEntry]
    refused: dict[str, _Refused]


_decoder = msgspec.msgpack.Decoder(_Index)


def _label(key: str, rank: int) -> str:
    return f'name "{key}" of rank {rank}' if key else f"the result of rank {rank}"


# In a rank ------------------------------------------------------------------------------------------------------------


def write_result_file(
    descriptor: int,
    values: Mapping[str, Any],
    *,
    rank: int,
    advice: str,
    origins: serialization.Origins = (),
    wholes: Mapping[int, Any] | None = None,
    refused: Mapping[str, PayloadError] | None = None,
) -> int:
    """Overwrite a memory file with objects, and the reason for each object that can't be pickled.

    Args:
        descriptor: The file.
        values: The objects by name; the empty name is for the value that the rank's code returned.
        rank: The rank's number, for messages.
        advice: Advice in errors about what to send instead.
        origins: See ``serialization.pickle_by_value``.
        wholes: See ``serialization.pickle_by_value``.
        refused: Errors for names whose objects aren't written.

    Returns:
        The file's length in bytes.

    Raises:
        PayloadError: There is not enough memory even for a file without objects.
    """
    left_out = {key: _refused(error, error.path) for key, error in (refused or {}).items()}
    roots = {key: (_label(key, rank), obj) for key, obj in values.items() if key not in left_out}
    while True:
        pickling = _Pickling(roots, origins, advice, wholes)
        entries, pickled = pickling.all_entries()
        left_out |= pickling.refused
        os.ftruncate(descriptor, 0)
        try:
            return serialization.dump(descriptor, pickled, msgspec.msgpack.encode(_Index(entries, left_out)))
        except PayloadError as error:  # too large: without the largest object the others may fit
            sizes_bytes = {key: pickled.sizes_bytes[label] for key, (label, _) in roots.items() if key not in left_out}
            if not sizes_bytes:
                raise
            largest = max(sizes_bytes, key=lambda key: sizes_bytes[key])
            left_out[largest] = _refused(error, roots[largest][0])
            roots = {key: root for key, root in roots.items() if key not in left_out}


def _refused(error: PayloadError, label: str) -> _Refused:
    return _Refused(error.what, label, error.why, error.fix)


class _Pickling:
    """Pickles objects, each with its label, and the parts that they share.

    Attributes:
        refused: The objects that can't be pickled.
    """

    def __init__(
        self,
        roots: Mapping[str, tuple[str, Any]],
        origins: serialization.Origins,
        advice: str,
        wholes: Mapping[int, Any] | None,
    ) -> None:
        self._roots = roots
        self._origins = origins
        self._advice = advice
        self._wholes = wholes
        has_several = sum(obj is not None for _, obj in roots.values()) > 1
        self._shared = SharedPickling(device_tensors_to_cpu=True, keeps_memo=has_several)
        self.refused: dict[str, _Refused] = {}
        self._alone: dict[str, Pickled] = {}  # kept, so that the ids of the pickled parts stay valid
        for key, (label, obj) in roots.items():
            try:
                self._alone[key] = self._pickled(label, obj)
            except PayloadError as error:
                self.refused[key] = _refused(error, label)

    def _pickled(self, label: str, obj: Any) -> Pickled:
        return serialization.pickle_by_value(
            obj,
            roots={label: obj},
            origins=self._origins,
            device_tensors_to_cpu=True,
            shared=self._shared,
            wholes=self._wholes,
            advice=self._advice,
        )

    def all_entries(self) -> tuple[list[_PickleEntry], Pickled]:
        """Return the index's entries, and all pickles as one. Pickles that others refer to come first."""
        common = _shared_parts(self._alone)
        links = {id(obj): (keys, place) for keys, objs in common.items() for place, obj in enumerate(objs)}
        pickles: dict[_Keys, Pickled] = {}
        self._shared.keeps_memo = False
        for keys in sorted([*common, *((key,) for key in self._alone)], key=len, reverse=True):
            self._shared.links = {number: link for number, link in links.items() if {*keys} < {*link[0]}}
            if len(keys) == 1 and not self._shared.links:
                pickles[keys] = self._alone[keys[0]]
                continue
            label, obj = self._roots[keys[0]]
            try:
                pickles[keys] = self._pickled(label, common[keys] if len(keys) > 1 else obj)
            except PayloadError as error:  # a second pickling may fail although the first did not
                self.refused |= {key: _refused(error, self._roots[key][0]) for key in keys}
        buffers = list({id(buffer): buffer for pickled in pickles.values() for buffer in pickled.buffers}.values())
        numbers = {id(buffer): number for number, buffer in enumerate(buffers)}
        entries = [
            _PickleEntry(keys, len(pickled.data), tuple(numbers[id(buffer)] for buffer in pickled.buffers))
            for keys, pickled in pickles.items()
        ]
        datas = [pickled.data for pickled in pickles.values()]
        data = datas[0] if len(datas) == 1 else memoryview(b"".join(datas))
        sizes = {label: size for pickled in self._alone.values() for label, size in pickled.sizes_bytes.items()}
        return entries, Pickled(data, tuple(buffers), (), sizes)


def _shared_parts(alone: Mapping[str, Pickled]) -> dict[_Keys, list[Any]]:
    """Return the parts that several pickles share, by the keys of exactly those pickles.

    A pickle that has a part also has everything that the part refers to. So references between these lists go in one
    direction only: from lists of fewer pickles to lists of more.
    """
    found: dict[int, tuple[Any, list[str]]] = {}
    for key, pickled in alone.items():
        by_value = {id(obj) for obj in pickled.by_value}
        for obj in pickled.memoized:
            if _has_identity(obj, by_value):
                found.setdefault(id(obj), (obj, []))[1].append(key)
    common: dict[_Keys, list[Any]] = {}
    for obj, keys in found.values():
        if len(keys) > 1:
            common.setdefault(tuple(keys), []).append(obj)
    return common


def _has_identity(obj: Any, by_value: Collection[int]) -> bool:
    """Return whether sharing the object matters: a constant, or an object that is sent by name, may become two."""
    if isinstance(obj, (type, types.FunctionType, types.BuiltinFunctionType)):
        return id(obj) in by_value
    if isinstance(obj, pickle.PickleBuffer) or Blocks.is_storage(obj):
        return False
    return gc.is_tracked(obj) or type(obj).__hash__ is None


# In the notebook ------------------------------------------------------------------------------------------------------


class ResultFile:
    """The objects of one file.

    Args:
        descriptor: The file, which the caller closes.
        rank: The number of the rank that has written it, for messages.
        has_variables: Whether to read the pulled variables too. Each machine's first rank writes them, and only those
            of the run's first rank are used.

    Attributes:
        values: The objects read so far, by name.
        problems: The errors of unreadable objects, by name.
    """

    def __init__(self, descriptor: int, rank: int, *, has_variables: bool = True) -> None:
        self.values: dict[str, Any] = {}
        self.problems: dict[str, PayloadError] = {}
        self._descriptor = descriptor
        self._rank = rank
        self._has_variables = has_variables
        self._open: dict[_Keys, Any] = {}

    def unpickle(self, origins: serialization.Origins) -> None:
        """Unpickle the remaining objects. A later call may succeed for more, such as when a module can be imported."""
        try:
            index = _decoder.decode(memory_files.read_head(self._descriptor))
            contents = memory_files.read(self._descriptor)
        except Exception as error:  # noqa: BLE001 - a truncated file can fail in any way
            self.problems = {"": self._problem("", error)}
            return
        self.problems = {
            key: PayloadError(refused.what, path=refused.path, why=refused.why, fix=refused.fix)
            for key, refused in index.refused.items()
            if self._has_variables or not key
        }
        start, failed = 0, list[_Keys]()
        for entry in index.entries:
            data, start = contents.pickle[start : start + entry.pickle_bytes], start + entry.pickle_bytes
            is_wanted = self._has_variables or "" in entry.keys
            if not is_wanted or entry.keys in self._open or any({*entry.keys} < {*keys} for keys in failed):
                continue
            try:
                buffers = [contents.buffers[number] for number in entry.buffers]
                opened = serialization.loads_linked(data, buffers, self._resolve, origins=origins)
            except Exception as error:  # noqa: BLE001 - unpickling runs code of the user's classes
                failed.append(entry.keys)
                wanted = [key for key in entry.keys if self._has_variables or not key]
                self.problems = {key: self._problem(key, error) for key in wanted} | self.problems
                continue
            self._open[entry.keys] = opened
            if len(entry.keys) == 1:
                self.values[entry.keys[0]] = opened

    @property
    def outcome(self) -> Any:
        """The value that the rank's code returned, ``None`` if unreadable; in a file of variables, a dict of them."""
        return self.values.get("") if "" in self.values or "" in self.problems else self.values

    @property
    def has_outcome(self) -> bool:
        """True if at least a part of ``outcome`` could be read."""
        return "" in self.values or ("" not in self.problems and bool(self.values))

    def _resolve(self, link: tuple[_Keys, int]) -> Any:
        keys, place = link
        return self._open[keys][place]

    def _problem(self, key: str, error: Exception) -> PayloadError:
        label = _label(key, self._rank)
        problem = PayloadError(
            f"{label} can't be unpickled here: {type(error).__name__}: {error}",
            path=label,
            why="It was pickled in its rank, and its class, or a module that it needs, fails to unpickle it here.",
            fix="send something else, such as numbers, tensors or a state_dict()",
        )
        problem.__cause__ = error
        return problem


def result_error(files: Mapping[int, ResultFile], *, pulled: Sequence[str] = (), again: str = "") -> ResultError | None:
    """Return the error that names all unreadable objects of these ranks' files, ``None`` if there are none.

    ``pulled`` are the variables that were set, and ``again`` is advice for a second attempt.
    """
    problems = [problem for file in files.values() for problem in file.problems.values()]
    if not problems:
        return None
    first = problems[0]
    what, why = first.what, first.why
    if len(problems) > 1:
        what = "\n".join(
            [f"{len(problems)} of the ranks' values can't be read:", *(f"  {each.what}" for each in problems)]
        )
        why = "\n".join(dict.fromkeys(each.why for each in problems if each.why))
    fixes = dict.fromkeys(each.fix for each in problems if each.fix)
    can_succeed = any(problem.__cause__ is not None for problem in problems)
    error = ResultError(
        what,
        path=first.path,
        why=why,
        fix="; or ".join([*([again] if again and can_succeed else []), *fixes]),
        values={rank: file.outcome for rank, file in sorted(files.items()) if file.has_outcome},
        reasons={problem.path: problem.what for problem in problems},
        pulled=tuple(pulled),
    )
    error.__cause__ = first.__cause__
    return error


class ResultFiles:
    """The memory files of this node's ranks, closed when all objects were read or the last reference is gone.

    Attributes:
        descriptors: The files, in the order of the ranks.
        by_value: Functions and classes that the payload holds by value. Results refer to them instead of copying them.
    """

    def __init__(
        self,
        descriptors: Sequence[int],
        by_value: Sequence[Any],
        set_variables: Callable[[dict[str, Any]], object] | None,
    ) -> None:
        self.descriptors = descriptors
        self.by_value = by_value
        self._set_variables = set_variables
        self._bound: dict[str, None] = {}  # in order
        self._opened: dict[int, ResultFile] = {}
        self._close = weakref.finalize(self, close_all, tuple(descriptors))

    @property
    def are_open(self) -> bool:
        """True until the files are closed."""
        return self._close.alive

    def read(self, first_rank: int) -> Results:
        """Return every rank's result and set the pulled variables. A second call retries unreadable objects only.

        ``first_rank`` is the number of this node's first rank among all.

        Raises:
            ResultError: An object can't be read. The readable variables are set, and the error carries the readable
                results.
        """
        for rank, descriptor in enumerate(self.descriptors, first_rank):
            self._unpickle(rank, descriptor, has_variables=rank == first_rank)
        self._set_variables_of(first_rank)
        again = "make that possible, and read again: job.results(), or sys.last_value.job.results()"
        error = result_error(self._opened, pulled=tuple(self._bound), again=again)
        if error is not None:
            raise error
        self.close()
        return Results([self._opened[rank].outcome for rank in sorted(self._opened)])

    def set_saved_variables(self, first_rank: int) -> tuple[tuple[str, ...], dict[str, str]]:
        """Set the pulled variables to their values in the first rank when it failed or was interrupted.

        Returns:
            The names that were set, and the reasons for those that can't be unpickled.
        """
        # The second happens if the result was lost on its way from another machine.
        if self._set_variables is None or not os.fstat(self.descriptors[0]).st_size:
            self.close()
            return (), {}
        file = self._unpickle(first_rank, self.descriptors[0])
        self._set_variables_of(first_rank)
        reasons = {key: problem.what for key, problem in file.problems.items() if key}
        if not reasons:
            self.close()
        return tuple(self._bound), reasons

    def _unpickle(self, rank: int, descriptor: int, *, has_variables: bool = True) -> ResultFile:
        file = self._opened.setdefault(rank, ResultFile(descriptor, rank, has_variables=has_variables))
        file.unpickle(self.by_value)
        return file

    def _set_variables_of(self, rank: int) -> None:
        """Set a rank's variables. Each is set only once, since the notebook may reassign it afterwards."""
        values = self._opened[rank].values
        new = {key: obj for key, obj in values.items() if key and key not in self._bound}
        if self._set_variables is not None:
            self._set_variables(new)
            self._bound |= dict.fromkeys(new)

    def close(self) -> None:
        """Close the files. Closing twice does no harm."""
        self._close()
