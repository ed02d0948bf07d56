"""Lines from pipes: whole, in order, complete, however the writes were cut."""

from __future__ import annotations

import os

from hypothesis import given
from hypothesis import strategies as st

from notebook_accel import events
from notebook_accel.launching.output import LineReader


def read_lines(chunks: list[bytes]) -> list[str]:
    read_end, write_end = os.pipe()
    said: list[events.Output] = []
    reader = LineReader(read_end, "stdout", said.append)
    try:
        for chunk in chunks:
            os.write(write_end, chunk)
            assert reader.read()
    finally:
        os.close(write_end)
    reader.finish()
    reader.close()
    return [line for event in said for line in event.text.split("\n")]


@given(st.lists(st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=20)), st.data())
def test_lines_survive_any_cut(lines: list[str], data: st.DataObject) -> None:
    whole = "".join(line + "\n" for line in lines).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=5)))
    chunks = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    assert read_lines([chunk for chunk in chunks if chunk]) == lines


def test_carriage_return_starts_the_line_over() -> None:
    assert read_lines([b"10%\r50%\r100%\nnext\r\n"]) == ["100%", "next"]


def test_last_line_without_its_end_is_said() -> None:
    assert read_lines([b"a\nb"]) == ["a", "b"]


def test_bytes_that_are_no_text_are_shown_as_such() -> None:
    assert read_lines([b"\xff\xfe ok\n"]) == ["\ufffd\ufffd ok"]


def test_endless_line_is_cut_into_pieces() -> None:
    read_end, write_end = os.pipe()
    said: list[events.Output] = []
    reader = LineReader(read_end, "stdout", said.append)
    for _ in range(40):
        os.write(write_end, b"x" * 60_000)
        reader.read()
    assert len(said) == 2  # pieces of a MiB, and the rest is waiting
    os.close(write_end)
    reader.finish()
    reader.close()
    assert sum(len(event.text) for event in said) == 40 * 60_000
