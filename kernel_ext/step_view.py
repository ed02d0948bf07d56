"""Draw where the time of the ranks' steps goes: a thin bar in a rank's row, and the tab with all phases.

Pure functions of a ``Diagnosis``. The text is complete without the style sheet, as in ``render``.
"""

from __future__ import annotations

import html
from collections.abc import Mapping

from kernel_ext.charts import stacked_html
from kernel_ext.output import faint
from notebook_accel.formatting import format_milliseconds
from notebook_accel.launching.state.diagnosis import Diagnosis
from notebook_accel.launching.state.step_times import Phases, mean_of, shown_ranks
from notebook_accel.protocol.events import PHASES

_LEAST_SHARE = 0.01
_NAMED_SHARE = 0.1
# A chart ends above the usual steps, so that a rare peak doesn't flatten all others.
_USUAL_SHARE, _HIGHEST, _ABOVE_USUAL = 0.9, 2.0, 1.5


def step_text(phases: Phases | None) -> str:
    """Return a step's time and its largest phases; an en dash without a measurement."""
    if not phases:
        return "\N{EN DASH}"
    step_s = sum(phases.values())
    largest = sorted(phases.items(), key=lambda item: -item[1])
    parts = [f"{name} {seconds / step_s:.0%}" for name, seconds in largest if seconds >= _NAMED_SHARE * step_s]
    return f"{format_milliseconds(step_s)}: {', '.join(parts)}"


def bar_html(phases: Phases | None) -> str:
    """Return a thin bar with a part for each phase, and the time of a step."""
    if not phases:
        return "\N{EN DASH}"
    step_s = sum(phases.values())
    parts = "".join(
        f'<i class="nba-p-{name}" style="width:{phases[name] / step_s:.1%}"></i>'
        for name in PHASES
        if phases.get(name, 0.0) >= _LEAST_SHARE * step_s
    )
    about = html.escape(step_text(phases))
    bar = f'<span class="nba-phases" role="img" aria-label="{about}" title="{about}">{parts}</span>'
    return f"{bar}{format_milliseconds(step_s)}"


def verdict_html(diagnosis: Diagnosis) -> str:
    """Return the first reason and its fix in one line; empty if nothing stands out."""
    if not diagnosis.verdicts:
        return ""
    first = diagnosis.verdicts[0]
    fix = faint(f"{first.fix} {diagnosis.cost}".rstrip())
    return f'<p class="nba-said nba-why"><b>Why slow</b> {html.escape(first.what)} {fix}</p>'


def step_html(diagnosis: Diagnosis) -> str:
    """Return the tab: the reasons, and the phases of a step of each rank, or of the mean and the last to arrive."""
    if not diagnosis.steps:
        return '<p class="nba-empty">Too few steps have been measured yet.</p>'
    verdicts = "".join(f"<li>{html.escape(each.what)} {faint(each.fix)}</li>" for each in diagnosis.verdicts)
    said = f'<ul class="nba-verdicts">{verdicts}</ul>' if verdicts else f'<p class="nba-empty">{diagnosis.nothing}</p>'
    columns = _columns(diagnosis.steps)
    heads = "".join(f'<th scope="col" class="nba-number">{html.escape(name)}</th>' for name in columns)
    bars = "".join(f'<td class="nba-number">{bar_html(phases)}</td>' for phases in columns.values())
    rows = "".join(_row_html(name, columns) for name in PHASES if any(phases.get(name) for phases in columns.values()))
    return (
        f'{said}<div class="nba-step"><div class="nba-scroll"><table class="nba-ranks nba-steps">'
        f'<caption>A step</caption><thead><tr><th scope="col">phase</th>{heads}</tr></thead><tbody>'
        f'<tr><th scope="row">step</th>{bars}</tr>{rows}</tbody></table></div>{_over_time_html(diagnosis)}</div>'
    )


def _columns(steps: Mapping[int, Phases]) -> dict[str, Phases]:
    """Return the columns of the tab: one for each rank, or the mean of many and the rank that waits least."""
    ranks = {f"rank {rank}": steps[rank] for rank in shown_ranks(steps)}
    mean = mean_of(list(steps.values())) if len(ranks) < len(steps) else None
    return ranks if mean is None else {f"mean of {len(steps)} ranks": mean, **ranks}


def _over_time_html(diagnosis: Diagnosis) -> str:
    """Return a chart over time for each column, all on one scale; empty until there are measurements."""
    moments = diagnosis.over_time
    shown = shown_ranks(diagnosis.steps)
    charts = {
        f"rank {rank}": [(moment.begin_s, moment.end_s, moment.ranks.get(rank)) for moment in moments] for rank in shown
    }
    if len(shown) < len(diagnosis.steps):
        means = [(moment.begin_s, moment.end_s, moment.mean) for moment in moments]
        charts = {f"mean of {len(diagnosis.steps)} ranks": means, **charts}
    totals = sorted(sum(phases.values()) for chart in charts.values() for *_, phases in chart if phases)
    if not totals or not totals[-1]:
        return ""
    usual_s, highest_s = totals[int(_USUAL_SHARE * (len(totals) - 1))], totals[-1]
    is_cut = highest_s > _HIGHEST * usual_s > 0
    limit_s = _ABOVE_USUAL * usual_s if is_cut else highest_s
    drawn = "".join(stacked_html(name, PHASES, chart, limit_s) for name, chart in charts.items())
    cut = f", cut off at the top: the highest is {format_milliseconds(highest_s)}" if is_cut else ""
    return f'<div class="nba-course"><p>A step in the course of the run{cut}</p>{drawn}</div>'


def _row_html(name: str, columns: Mapping[str, Phases]) -> str:
    cells = "".join(
        f'<td class="nba-number">{format_milliseconds(phases.get(name, 0.0))} '
        f'<span class="nba-faint nba-share">{phases.get(name, 0.0) / sum(phases.values()):.0%}</span></td>'
        for phases in columns.values()
    )
    return f'<tr><th scope="row"><i class="nba-key nba-p-{name}"></i>{name}</th>{cells}</tr>'
