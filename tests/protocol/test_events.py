"""Events arrive as a rank has sent them."""

from __future__ import annotations

import typing

import msgspec
import pytest
from hypothesis import given

from notebook_accel.protocol import events
from tests.launching.state import strategies


def test_every_event_can_be_decoded() -> None:
    assert set(typing.get_args(events.Event)) == set(events._Event.__subclasses__())


@given(strategies.any_event)
def test_round_trip(event: events.Event) -> None:
    assert repr(events.decode(events.encode(event))) == repr(event)  # as text, in which nan is equal to itself


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
