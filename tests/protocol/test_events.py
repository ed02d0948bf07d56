"""Events arrive as a rank has sent them."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from notebook_accel.protocol import events

_INT = st.integers(min_value=0, max_value=2**63 - 1)
_TEXT = st.text()  # hypothesis leaves lone surrogates out of it
_ANY_EVENT = st.one_of(
    st.builds(events.Started, pid=_INT),
    st.builds(
        events.Progress, step=_INT, total=st.none() | _INT, epoch=st.none() | _INT, epochs=st.none() | _INT,
        steps=_INT, label=_TEXT, device=_TEXT,
    ),
    st.builds(
        events.Metrics, step=_INT, values=st.dictionaries(_TEXT, st.floats(allow_nan=False)),
        earlier=st.dictionaries(_TEXT, _INT),
    ),
    st.builds(events.Output, text=_TEXT, left_out=st.integers(0, 2**60)),
    st.builds(events.Display, data=st.dictionaries(_TEXT, _TEXT)),
    st.builds(events.Memory, used_bytes=_INT, total_bytes=_INT, kind=st.sampled_from(["host", "device"])),
    st.builds(
        events.Failed, kind=_TEXT, message=_TEXT, traceback=_TEXT, line=_TEXT, exception=st.binary(),
        lost_peer=st.booleans(),
    ),
    st.builds(events.Finished),
    st.builds(events.Silent, since_s=st.floats(0, 1e9), at=_TEXT, waits_in=_TEXT),
    st.builds(events.Restarting, number=st.integers(1, 99), of=st.integers(1, 99), why=_TEXT),
    st.builds(events.Ended, exit_code=st.none() | st.integers(0, 255), signal=st.none() | st.integers(1, 64)),
)  # fmt: skip


@given(_ANY_EVENT)
def test_round_trip(event: events.Event) -> None:
    assert events.decode(events.encode(event)) == event


def test_events_are_stamped_when_they_are_made() -> None:
    first, second = events.Started(pid=1), events.Started(pid=1)
    assert 0 < first.time_s <= second.time_s


def test_metric_that_is_not_a_number_arrives() -> None:
    event = events.decode(events.encode(events.Metrics(step=1, values={"loss": float("nan")})))
    assert isinstance(event, events.Metrics)
    assert event.values["loss"] != event.values["loss"]


def test_text_that_utf8_can_not_hold_is_escaped_and_all_else_stays() -> None:
    said = events.Failed(
        kind="OSError", message="no file a\udcff.txt", traceback="", exception=b"\xff\0", lost_peer=True
    )
    heard = events.decode(events.encode(said))
    assert heard == msgspec.structs.replace(said, message="no file a\\udcff.txt")


@pytest.mark.parametrize(
    "data",
    [b"", b"\xc1", events.encode(events.Started(pid=1))[:-1], b"\x81\xa4type\xa3Bad"],
    ids=["nothing", "no map", "cut", "unknown type"],
)
def test_bytes_that_are_no_event(data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        events.decode(data)
