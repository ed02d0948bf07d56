"""Messages between a session's kernel and its ranks. Descriptors travel beside a message, as its class states.

kernel -> rank       Welcome, Execute, Call, Push, Pull, CountAsPulled, LookUp, Debug, Input, InspectGroup,
                     RenewGroup, Settle, Detach, Leave
rank -> kernel       Hello, Displayed, Prompt, Reply

Each side unpickles only memory files that the other has sealed. A rank opens nothing before the kernel has
accepted its ``Hello``, and the kernel opens nothing before it has checked the ``Hello``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

import msgspec

from notebook_accel.protocol.events import Display, Failed


class _SessionMessage(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    pass


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of the sealed file beside a message, with the numbers by which later messages refer to them."""

    shared: list[int] = []  # numbers of the objects that are listed in the file, in order
    by_value: list[int] = []  # numbers of the functions and classes in it, in order; -1 for one without later use
    pushed: list[str] = []  # names whose values replace the rank's own
    forgotten: list[int] = []  # numbers of earlier objects that the notebook no longer has
    sources: dict[str, tuple[str, str]] = {}  # texts by the file name in their code, each with a label for tracebacks


class Welcome(_SessionMessage, frozen=True, kw_only=True):
    """Accept a rank into the session. ``renewals`` is the number of process groups given up so far."""

    renewals: int


class _Request(_SessionMessage, frozen=True, kw_only=True):
    """A request, which the rank answers with a ``Reply`` of the same number.

    ``sent_s`` is the time of sending, in seconds of ``time.monotonic()``. Earlier interrupts don't concern the request.
    """

    number: int
    sent_s: float
    import_path: list[str] = []  # the notebook's, whose new folders the rank adds to its own


class Execute(_Request, frozen=True, kw_only=True):
    """Run a cell in the rank's ``__main__``.

    Descriptors: the sealed names that the cell needs, if there is a ``delivery``.
    """

    source: str  # the cell as plain Python
    label: str  # its name in tracebacks; the file name of its code
    wants_value: bool = False  # send back the value of the last expression itself, besides how it is shown
    reloads: bool = False  # first reload the user's modules whose files have changed
    delivery: Delivery | None = None


class Call(_Request, frozen=True, kw_only=True):
    """Call a function and send back its result. Descriptors: the function and its arguments, sealed."""

    delivery: Delivery


class Push(_Request, frozen=True, kw_only=True):
    """Bind names. Descriptors: the names, sealed."""

    delivery: Delivery


class Pull(_Request, frozen=True, kw_only=True):
    """Send back the values of names, whole where they are sharded over the ranks."""

    names: list[str]
    answering: list[int]  # the ranks that send values; all others only help to gather them
    gathers: bool  # all ranks have the request, so that they can gather


class CountAsPulled(_Request, frozen=True, kw_only=True):
    """Give variables the numbers of the notebook's copies of them, which a pull has made."""

    numbers: dict[str, list[int]]  # numbers for the parts of each variable, by its name


class LookUp(_Request, frozen=True, kw_only=True):
    """Complete the end of ``text``; if it ``describes``, describe the value of ``text``. Run no user code."""

    text: str
    describes: bool = False


class Debug(_Request, frozen=True, kw_only=True):
    """Open a debugger at the last error. Until its ``Reply``, the kernel answers each ``Prompt`` with an ``Input``."""


class Input(_SessionMessage, frozen=True, kw_only=True):
    """A line for the debugger, with its newline; empty when there will be no more.

    ``number`` is the number of its ``Debug``.
    """

    number: int
    line: str


class InspectGroup(_Request, frozen=True, kw_only=True):
    """Send back the rank's position in its process groups, after a cell that did not end well."""


class RenewGroup(_Request, frozen=True, kw_only=True):
    """Leave the process group, which is broken."""

    renewals: int  # number of groups given up, with this one: the prefix of the next group's keys in the store
    rejoins: bool = True  # form a new group now; otherwise the next code that needs one forms it


class Settle(_Request, frozen=True, kw_only=True):
    """Tell whether an interrupt came after the user's code had ended.

    By the answer earlier interrupts have arrived, so that they can't hit later requests.
    """


class Detach(_Request, frozen=True, kw_only=True):
    """Outlive this kernel: once it has gone, wait for the next kernel in ``folder``.

    An empty ``folder`` cancels an earlier ``Detach``.
    """

    folder: str


class Leave(_SessionMessage, frozen=True):
    """Exit, since the session is over. Without this message, a detached session's rank waits for another kernel."""


class RetainedState(msgspec.Struct, frozen=True, kw_only=True):
    """State that a rank of a detached session has kept from the kernels that it has served before."""

    own: list[str]  # names that the rank has bound itself
    sent: list[str]  # names that have values from an earlier notebook, without those of modules
    requests: int  # number of its last request
    renewals: int  # number of process groups given up so far
    # ``unchecked``: code has failed since the group was last inspected; ``broken``: it can't be trusted any more.
    group: Literal["sound", "unchecked", "broken"]
    failed: Failed | None  # the failure of its last request, which may have reached no kernel
    title: str  # the last request in words


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's first message."""

    secret: bytes  # the session's secret, from a file in a folder that only this user can open
    rank: int
    kept: RetainedState | None = None  # the state from earlier kernels; ``None`` for a fresh process


class Displayed(_SessionMessage, frozen=True, kw_only=True):
    """A display of the code that runs for the request of this number."""

    number: int
    display: Display


class Prompt(_SessionMessage, frozen=True, kw_only=True):
    """The debugger waits for a line."""

    number: int
    text: str  # the debugger's output since the last line, with the prompt at its end
    log_bytes: int  # length of the rank's log so far


class Reply(_SessionMessage, frozen=True, kw_only=True):
    """The end of a request.

    Descriptors: the sealed value, if there is one.
    """

    number: int
    shown: dict[str, str] = {}  # the value as it is shown, by mime type; empty if there is none
    failed: Failed | None = None  # the exception that ended the request, if any
    lacks_delivery: bool = False  # the rank could not open the delivery of the request
    breaks_group: bool = False  # the process group can't be trusted any more
    own: list[str] = []  # names that the rank has bound itself
    deleted: list[str] = []  # names that the notebook has sent and that the rank no longer has
    released: list[int] = []  # numbers of the notebook's objects that the rank no longer has
    missing: str = ""  # the name that the rank doesn't have, if it failed with a NameError
    log_bytes: int = 0  # length of the rank's log so far
    steps: int = 0  # number of steps that the rank has counted so far
    # For ``InspectGroup``: number of calls in each process group; ``None`` without a group.
    group_calls: list[int] | None = None
    # The answer to a ``LookUp``, the names of a ``CountAsPulled`` that the rank has, the losses of a ``RenewGroup``, a
    # word if the interrupt before a ``Settle`` was late, or the reason why a ``Debug`` is refused.
    lines: list[str] = []


ToRank: TypeAlias = (
    Welcome
    | Execute
    | Call
    | Push
    | Pull
    | CountAsPulled
    | LookUp
    | Debug
    | Input
    | InspectGroup
    | RenewGroup
    | Settle
    | Detach
    | Leave
)
FromRank: TypeAlias = Displayed | Prompt | Reply

encode = msgspec.msgpack.Encoder().encode
decode_for_rank: Callable[[bytes], ToRank] = msgspec.msgpack.Decoder(ToRank).decode
decode_from_rank: Callable[[bytes], FromRank] = msgspec.msgpack.Decoder(FromRank).decode
decode_hello = msgspec.msgpack.Decoder(Hello).decode
