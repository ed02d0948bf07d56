"""What a session's kernel and its ranks say to each other. Descriptors travel beside a message, as stated.

kernel -> rank       Welcome, Execute, Call, Take, Fetch, Look, Debug, Typed, InspectGroup, Settle, Renew
rank -> kernel       Hello, Displayed, Prompt, Reply

Only what has been sealed by the other side is ever unpickled, and a rank opens nothing before the kernel has taken its
``Hello``, nor the kernel before it has checked it.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from notebook_accel.protocol.events import Display, Failed

__all__ = [
    "Call",
    "Debug",
    "Delivery",
    "Displayed",
    "Execute",
    "Fetch",
    "FromRank",
    "Hello",
    "InspectGroup",
    "Look",
    "Prompt",
    "Renew",
    "Reply",
    "Settle",
    "Take",
    "ToRank",
    "Typed",
    "Welcome",
    "decode_for_rank",
    "decode_from_rank",
    "decode_hello",
    "encode",
]


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    pass


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    """What is in the sealed file beside a message, and what both sides call it from now on.

    Attributes:
        shared: Numbers of the objects that are listed in it, in order.
        by_value: Numbers of the functions and classes that travel in it by value, in order.
        by_force: Names that are bound whatever the rank has under them.
        forgotten: Numbers of earlier objects that the notebook no longer has.
        sources: Source texts by the file name in their code, each with what a traceback calls it.
    """

    shared: list[int] = []
    by_value: list[int] = []
    by_force: list[str] = []
    forgotten: list[int] = []
    sources: dict[str, tuple[str, str]] = {}

    @property
    def numbers(self) -> list[int]:
        """Of all objects in it; -1 for one that nobody refers to later."""
        return [*self.shared, *self.by_value]


class Welcome(_Message, frozen=True, kw_only=True):
    """The rank belongs to the session. ``renewals``: how often the ranks' group has been made anew."""

    renewals: int


class _Asked(_Message, frozen=True, kw_only=True):
    """Something that is answered by a ``Reply`` of the same number.

    ``sent_s`` is when, in seconds of ``time.monotonic()``: an interrupt from before is for something else.
    """

    number: int
    sent_s: float


class Execute(_Asked, frozen=True, kw_only=True):
    """Run a cell in the rank's ``__main__``.

    Descriptors: the sealed names that it needs, if there is a ``delivery``.

    Attributes:
        source: Plain Python.
        label: What a traceback calls it; the file name of its code.
        wants_value: Whether the value of its last expression is sent back, besides how it is shown.
    """

    source: str
    label: str
    wants_value: bool = False
    delivery: Delivery | None = None


class Call(_Asked, frozen=True, kw_only=True):
    """Call a function and send back what it returns. Descriptors: the function and its arguments, sealed."""

    delivery: Delivery


class Take(_Asked, frozen=True, kw_only=True):
    """Bind names. Descriptors: the names, sealed."""

    delivery: Delivery


class Fetch(_Asked, frozen=True, kw_only=True):
    """Send back the values of names."""

    names: list[str]


class Look(_Asked, frozen=True, kw_only=True):
    """What can stand at the end of ``text``; or, if it ``describes``, what its value is. Nothing is computed."""

    text: str
    describes: bool = False


class Debug(_Asked, frozen=True, kw_only=True):
    """Open a debugger at the last error. Until its ``Reply``, each ``Prompt`` of it is answered by a ``Typed``."""


class Typed(_Message, frozen=True, kw_only=True):
    """A line for the debugger, with its end; empty: there will be no more.

    ``number`` is that of the ``Debug`` that it belongs to.
    """

    number: int
    line: str


class InspectGroup(_Asked, frozen=True, kw_only=True):
    """Where the rank stands in its process groups, after a cell that did not end well."""


class Settle(_Asked, frozen=True, kw_only=True):
    """Just answer: interrupts that were sent before are behind the rank then, and no longer meant for what follows."""


class Renew(_Asked, frozen=True, kw_only=True):
    """Leave the process group, which is broken, and make another one.

    Attributes:
        renewals: The how-manieth; keys of it in the store have their own prefix.
        rejoins: Whether to make another one now; otherwise whoever needs one makes it.
    """

    renewals: int
    rejoins: bool = True


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's first word. ``secret`` is the session's, from the payload that only its ranks have."""

    secret: bytes
    rank: int


class Displayed(_Message, frozen=True, kw_only=True):
    """The code that was asked for under this number displays something."""

    number: int
    display: Display


class Prompt(_Message, frozen=True, kw_only=True):
    """The debugger waits for a line.

    Attributes:
        number: Of its ``Debug``.
        text: What it has said since the last one, the prompt at its end.
        log_bytes: How much the rank has written to its log so far.
    """

    number: int
    text: str
    log_bytes: int


class Reply(_Message, frozen=True, kw_only=True):
    """The end of what was asked.

    Descriptors: the value, sealed, if ``has_value``.

    Attributes:
        number: Of what was asked.
        shown: How the value is shown, by mime type; empty if there is none.
        has_value: Whether the value itself comes with it.
        failed: What was raised, if anything.
        lacks_delivery: Whether it could not open what was sent with the question.
        breaks_group: Whether the process group can't be trusted after that.
        bound: Names that the rank has of its own since its last reply, and had not.
        unbound: Names that it had of its own and has no longer.
        missing: A name that it doesn't have, for which it failed.
        log_bytes: How much it has written to its log so far.
        steps: How many steps it has counted so far.
        group_calls: For ``InspectGroup``: calls made in each process group; ``None`` without a group.
        lines: For ``Look``: the answer. For ``Renew``: what could not be kept. For ``Debug``: why not.
    """

    number: int
    shown: dict[str, str] = {}
    has_value: bool = False
    failed: Failed | None = None
    lacks_delivery: bool = False
    breaks_group: bool = False
    bound: list[str] = []
    unbound: list[str] = []
    missing: str = ""
    log_bytes: int = 0
    steps: int = 0
    group_calls: list[int] | None = None
    lines: list[str] = []


ToRank: TypeAlias = Welcome | Execute | Call | Take | Fetch | Look | Debug | Typed | InspectGroup | Settle | Renew
FromRank: TypeAlias = Displayed | Prompt | Reply

_encoder = msgspec.msgpack.Encoder()
_for_rank: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)
_hello = msgspec.msgpack.Decoder(Hello)
_from_rank: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)


def encode(message: msgspec.Struct) -> bytes:
    """The message as bytes."""
    return _encoder.encode(message)


def decode_for_rank(body: bytes) -> ToRank:
    """What the kernel told a rank."""
    return _for_rank.decode(body)


def decode_hello(body: bytes) -> Hello:
    """A rank's first word."""
    return _hello.decode(body)


def decode_from_rank(body: bytes) -> FromRank:
    """What a rank says about a question."""
    return _from_rank.decode(body)
