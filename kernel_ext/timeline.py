"""Draw a profile: a lane with phases, collectives and operators for each rank, and below it tables of what takes most.

Pure functions of a ``Profile``. The text is complete without the style sheet, as in ``render``.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from kernel_ext.charts import ticks
from kernel_ext.front_end import STYLE
from kernel_ext.output import faint
from notebook_accel.formatting import format_milliseconds
from notebook_accel.launching.state.profiles import Profile, RankProfile
from notebook_accel.protocol.events import PHASES, Span, SpanKind

_WIDTH = 10_000  # of a lane, in units that stretch with it
_LEAST_UNITS = 4
_FEW_RANKS, _MOST_TITLED = 4, 16
_LABELLED_EVERY = 8
_TICKS = 8
_Strip = tuple[SpanKind, int]
# The strips of a lane from top to bottom, with their heights in pixels, for few, some and many ranks.
_STRIPS: dict[int, tuple[_Strip, ...]] = {
    _FEW_RANKS: (("phase", 16), ("collective", 7), ("operator", 7), ("kernel", 7)),
    _MOST_TITLED: (("phase", 12), ("collective", 6), ("kernel", 6)),
}
_DENSE: tuple[_Strip, ...] = (("phase", 6), ("collective", 3))
_STRIP_NAMES: dict[SpanKind, str] = {"collective": "collectives", "operator": "operators", "kernel": "kernels"}


def profile_html(profile: Profile) -> str:
    """Return a profile as HTML that needs nothing else on the page."""
    took = f"{format_milliseconds(profile.step_s)} each" if profile.step_s else ""
    head = (
        f'<div class="nba-top"><div class="nba-header"><span class="nba-name">{html.escape(profile.title)}</span> '
        f"{faint(took)}</div></div>"
    )
    return f'<div class="nba-panel"><style>{STYLE}</style>{head}{body_html(profile)}</div>'


def latest_html(profile: Profile | None, said: str) -> str:
    """Return the panel's latest profile, below a line of text about a profile that is being made or has failed."""
    above = f'<p class="nba-said" role="status">{html.escape(said)}</p>' if said else ""
    return above + ("" if profile is None else body_html(profile))


def body_html(profile: Profile) -> str:
    """Return the timeline, the tables and the paths of the files, for an element of class ``nba-panel``."""
    notes = "".join(f'<p class="nba-said">{html.escape(note)}</p>' for note in profile.notes)
    trace = ""
    if profile.trace is not None:
        path = f"<code>{html.escape(str(profile.trace))}</code>"
        trace = f'<p class="nba-said">All of it: open {path} at ui.perfetto.dev or chrome://tracing.</p>'
    if profile.snapshots:
        paths = f"<code>{html.escape(profile.snapshots)}</code>"
        trace += f'<p class="nba-said">What holds memory: open {paths} at pytorch.org/memory_viz.</p>'
    return f'<div class="nba-profile">{notes}{_timeline_html(profile)}{_tables_html(profile)}{trace}</div>'


def _timeline_html(profile: Profile) -> str:
    ranks, end_us = profile.measured, profile.end_us
    strips = next((strips for most, strips in _STRIPS.items() if len(ranks) <= most), _DENSE)
    there = {span.kind for rank in ranks for span in rank.spans}
    strips = tuple((kind, height) for kind, height in strips if kind in there)
    if not strips or not end_us:
        return ""
    are_few = len(ranks) <= _MOST_TITLED
    labels = [f"rank {rank.rank}" if are_few or not index % _LABELLED_EVERY else "" for index, rank in enumerate(ranks)]
    lanes = zip(ranks, labels, strict=True)
    rows = "".join(_lane_html(rank, end_us, strips, label, is_titled=are_few) for rank, label in lanes)
    dense = "" if are_few else " nba-dense"
    return (
        f'{_key_html(ranks, [kind for kind, _ in strips])}<div class="nba-lanes{dense}">'
        f'<span></span><div class="nba-ticks">{_ticks_html(end_us)}</div>{rows}</div>'
    )


def _key_html(ranks: Iterable[RankProfile], kinds: Sequence[SpanKind]) -> str:
    """Return a legend of the colours and strips that occur."""
    phases = {span.name for rank in ranks for span in rank.of_kind("phase")}
    colours = [(f"nba-p-{name}", name) for name in PHASES if name in phases and "phase" in kinds]
    colours += [(f"nba-k-{kind}", _STRIP_NAMES[kind]) for kind in kinds if kind in _STRIP_NAMES]
    items = "".join(f'<span><i class="nba-key {style}"></i>{name}</span> ' for style, name in colours)
    return f'<p class="nba-said nba-keys">{items}</p>'


def _ticks_html(end_us: float) -> str:
    """Return the labels of the time axis, at round times."""
    end_ms = end_us / 1000
    return "".join(
        f'<span style="left:{time_ms / end_ms:.2%}">{time_ms:,.12g}{" ms" if time_ms else ""}</span>'
        for time_ms in ticks(0.0, end_ms, _TICKS)
        if time_ms < 0.95 * end_ms
    )


def _lane_html(rank: RankProfile, end_us: float, strips: Sequence[_Strip], label: str, *, is_titled: bool) -> str:
    height = sum(height for _, height in strips)
    top, parts = 0, []
    for kind, strip_height in strips:
        for span in rank.of_kind(kind):
            parts.append(_bar(rank.begin_us + span.begin_us, span, end_us, top, strip_height, is_titled=is_titled))
        top += strip_height
    begins = [(rank.begin_us + span.begin_us) / end_us * _WIDTH for span in rank.of_kind("step")]
    lines = "".join(f"M{begin:.0f} 0V{height}" for begin in begins)
    about = f"rank {rank.rank}: {rank.steps} steps, {format_milliseconds(rank.took_us / rank.steps / 1e6)} each"
    return (
        f'<span class="nba-lane-label">{label}</span><svg viewBox="0 0 {_WIDTH} {height}" style="height:{height}px" '
        f'preserveAspectRatio="none" role="img" aria-label="{about}">{"".join(parts)}'
        f'<path class="nba-step-line" d="{lines}" vector-effect="non-scaling-stroke"/></svg>'
    )


def _bar(begin_us: float, span: Span, end_us: float, top: int, height: int, *, is_titled: bool) -> str:
    """Return a span as a rectangle; empty if the span is too narrow to see."""
    width = span.took_us / end_us * _WIDTH
    if width < _LEAST_UNITS:
        return ""
    style = f"nba-p-{span.name}" if span.kind == "phase" and span.name in PHASES else f"nba-k-{span.kind}"
    title = f"<title>{html.escape(span.name)}: {_time(span.took_us)}</title>" if is_titled else ""
    gap = 0 if span.kind == "phase" else 1
    return (
        f'<rect class="{style}" x="{begin_us / end_us * _WIDTH:.0f}" y="{top + gap}" width="{width:.0f}" '
        f'height="{height - gap}">{title}</rect>'
    )


def _tables_html(profile: Profile) -> str:
    tables = []
    for kernels, head in ((False, "operator"), (True, "kernel of the device")):
        rows = [(_time(each.self_us), f"{each.calls:,}", each.name) for each in profile.costliest(kernels=kernels)]
        tables.append(_table_html(("a step", "calls", head), rows))
    lines = [(f"{line.share:.0%}", line.place, line.text) for line in profile.lines]
    tables.append(_table_html(("of the time", "line", ""), lines))
    return f'<div class="nba-costliest">{"".join(tables)}</div>'


def _table_html(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table whose first column has numbers; empty without rows."""
    if not rows:
        return ""
    kinds = [' class="nba-number"' if index == 0 else "" for index in range(len(heads))]
    head = "".join(f'<th scope="col"{kind}>{name}</th>' for kind, name in zip(kinds, heads, strict=True))
    body = "".join(
        f"<tr>{''.join(f'<td{kind}>{html.escape(cell)}</td>' for kind, cell in zip(kinds, row, strict=True))}</tr>"
        for row in rows
    )
    return (
        f'<div class="nba-scroll"><table class="nba-ranks nba-steps"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _time(time_us: float) -> str:
    return format_milliseconds(time_us / 1e6) if time_us >= 1000 else f"{time_us:,.0f} µs"
