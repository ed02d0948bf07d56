"""The timeline of a profile."""

from __future__ import annotations

import dataclasses
import pathlib
import re

import pytest

from kernel_ext import timeline
from notebook_accel.launching.state.profiles import Profile, RankProfile
from notebook_accel.protocol.events import OperatorTime, SampledLine, Span
from tests.kernel_ext import fake_runs


def drawn(profile: Profile) -> fake_runs.Document:
    return fake_runs.Document(timeline.profile_html(profile))


def five_steps(world_size: int) -> Profile:
    """Return a profile with everything that a timeline shows, as a GPU would have it."""
    phases = (("data", 0, 800), ("forward", 800, 5000), ("backward", 5800, 9000), ("optimizer", 14_800, 1700))
    spans = []
    for step in range(5):
        at = 16_500 * step
        spans += [Span("step", f"ProfilerStep#{step + 1}", at, 16_500), Span("collective", "nccl", at + 8000, 6000)]
        spans += [Span("phase", name, at + begin, took) for name, begin, took in phases]
        spans += [Span("operator", "aten::conv2d", at + begin, 420) for begin in range(800, 14_800, 500)]
        spans += [Span("kernel", "implicit_gemm", at + begin, 400) for begin in range(860, 14_860, 500)]
    operators = (
        OperatorTime("aten::cudnn_convolution", 265, 21_050.0, False),
        OperatorTime("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 15, 46_000.0, True),
    )
    lines = (
        SampledLine("backward", "", "In[7], line 48", "accelerator.backward(loss)", 480),
        SampledLine("data", "", "In[7], line 44", "for images, <labels> in loader:", 40),
    )
    ranks = (RankProfile(rank, 5, 900.0 * (rank % 3), tuple(spans), operators, lines) for rank in range(world_size))
    return Profile("digits", 5, tuple(ranks), pathlib.Path("/tmp/digits/profile_all_ranks.json"))


def rectangles(document: fake_runs.Document, style: str) -> list[tuple[int, int]]:
    """The begins and widths of the rectangles of a class, in ten-thousandths of the lane."""
    found = [part for tag, part in document.elements if tag == "rect" and part["class"] == style]
    return [(int(part["x"] or 0), int(part["width"] or 0)) for part in found]


def test_lane_has_a_rectangle_for_each_phase_at_its_time() -> None:
    spans = (Span("step", "ProfilerStep#1", 0, 10_000), Span("phase", "forward", 0, 4000),
             Span("phase", "backward", 4000, 6000), Span("collective", "gloo:all_reduce", 6000, 2000))  # fmt: skip
    late = RankProfile(1, 1, 10_000.0, spans)
    document = drawn(Profile("train", 1, (RankProfile(0, 1, 0.0, spans), late)))
    assert rectangles(document, "nba-p-forward") == [(0, 2000), (5000, 2000)]
    assert rectangles(document, "nba-p-backward") == [(2000, 3000), (7000, 3000)]
    assert rectangles(document, "nba-k-collective") == [(3000, 1000), (8000, 1000)]
    assert [part["aria-label"] for part in document.having(role="img")] == [
        "rank 0: 1 steps, 10 ms each",
        "rank 1: 1 steps, 10 ms each",
    ]
    assert "collectives" in document.text
    assert "optimizer" not in document.text  # no rank had any


@pytest.mark.parametrize("world_size", [1, 2, 8, 64])
def test_every_rank_has_a_lane_and_the_tables_say_what_takes_most(world_size: int) -> None:
    document = drawn(five_steps(world_size))
    assert len(document.having(role="img")) == world_size
    for text in ("aten::cudnn_convolution", "ncclDevKernel", "for images, <labels> in loader:", "all_ranks.json"):
        assert text in document.text
    assert ("aten::conv2d: 420 µs" in document.text) is (world_size <= 2)
    assert len(timeline.profile_html(five_steps(world_size))) < 400_000


def test_many_ranks_have_some_labels() -> None:
    text = drawn(five_steps(64)).text
    assert re.findall(r"rank (\d+)", text) == [str(rank) for rank in range(0, 64, 8)]


def test_names_and_reasons_are_escaped() -> None:
    profile = five_steps(2)
    bad = Span("operator", fake_runs.ATTACK, 0, 50_000)
    ranks = (
        dataclasses.replace(profile.ranks[0], spans=(*profile.ranks[0].spans, bad)),
        RankProfile(1, why=fake_runs.ATTACK),
    )
    document = drawn(dataclasses.replace(profile, ranks=ranks, name=fake_runs.ATTACK))
    assert not [tag for tag, _ in document.elements if tag in ("script", "img")]
    assert f"rank 1: {fake_runs.ATTACK}" in document.text


def test_profile_without_phases_has_its_other_strips() -> None:
    profile = five_steps(2)
    ranks = tuple(
        dataclasses.replace(rank, spans=tuple(span for span in rank.spans if span.kind != "phase"))
        for rank in profile.ranks
    )
    document = drawn(dataclasses.replace(profile, ranks=ranks))
    assert not rectangles(document, "nba-p-forward")
    assert rectangles(document, "nba-k-operator")


def test_profile_of_memory_names_the_snapshots() -> None:
    ranks = tuple(RankProfile(rank, 1, snapshot=pathlib.Path(f"<{rank}>.pickle")) for rank in range(2))
    document = drawn(Profile("train", 1, ranks))
    assert not {tag for tag, _ in document.elements} & {"svg", "table"}
    assert "open <0>.pickle and 1 more beside it at pytorch.org/memory_viz" in document.text
