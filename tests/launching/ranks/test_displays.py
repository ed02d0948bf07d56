"""Displays of ranks, and progress bars that are counted instead of drawn, in a kernel without a front end."""

from __future__ import annotations

import base64
import re
import struct
from collections.abc import Callable
from typing import Any

import pytest

from tests import kernels
from tests.launches import FIRST_LAUNCH_S

Run = Callable[[str], kernels.Outcome]


@pytest.fixture(scope="module")
def notebook(notebook: kernels.Kernel) -> kernels.Kernel:
    """A notebook that has imported the names the cells here use. In a rank they are replaced."""
    imported = notebook.run(
        """
import matplotlib.pyplot as plt
from IPython.display import HTML, Image, Markdown, clear_output, update_display
from IPython.display import display as show
from tqdm.auto import tqdm
from tqdm.notebook import tqdm as notebook_bar
""",
        FIRST_LAUNCH_S,
    )
    assert imported.status == "ok", imported.traceback
    return notebook


def bundles(outcome: kernels.Outcome) -> list[dict[str, Any]]:
    assert outcome.status == "ok", outcome.traceback
    return [content["data"] for content in outcome.displays]


def width_px(bundle: dict[str, Any]) -> int:
    """Return a PNG's width from its header."""
    data = base64.b64decode(bundle["image/png"])
    assert data.startswith(b"\x89PNG")
    return int(struct.unpack(">I", data[16:20])[0])


@pytest.mark.parametrize("method", ["spawn", pytest.param("fork", marks=pytest.mark.slow)])
def test_rank_0_shows_objects_and_figures_and_another_rank_names_them(run: Run, method: str) -> None:
    outcome = run(f"""%%distributed -n 2 --start_method {method}
print("before")
show(HTML("<b>bold</b>"), Markdown("# head"))
figure = plt.figure(figsize=(3, 2), dpi=100)
plt.plot([1, 2]); plt.show()
print("between")
_ = plt.figure(figsize=(5, 2), dpi=100), plt.plot([2, 1])
print("last")""")
    html, markdown, shown, left_open = bundles(outcome)
    assert (html["text/html"], markdown["text/markdown"]) == ("<b>bold</b>", "# head")
    assert 200 < width_px(shown) < 330 < width_px(left_open) < 550
    lines = [line[4:] for line in kernels.unfolded(outcome.stdout) if line.startswith("1 │ ")]
    named = ["<IPython.core.display.HTML object>", "<IPython.core.display.Markdown object>"]
    figures = ["<Figure size 300x200 with 1 Axes>", "<Figure size 500x200 with 1 Axes>"]
    assert lines == ["before", *named, figures[0], "between", "last", figures[1]]


def test_figure_in_a_result_is_not_shown_once_more(run: Run) -> None:
    outcome = run("%%distributed -n 1\nplt.plot([1, 2])")
    assert [list(bundle) for bundle in bundles(outcome)] == [["text/plain", "image/png"]]
    assert "Line2D" in outcome.result


def test_live_figure_takes_the_place_of_the_one_before(run: Run) -> None:
    outcome = run("""%%distributed -n 1
for number in range(3):
    clear_output(wait=True)
    show(HTML(f"<i>{number}</i>"))
    plt.plot([number]); plt.show()
clear_output()
show(HTML("the end"))""")
    assert outcome.status == "ok", outcome.traceback
    places: dict[str, dict[str, Any]] = {}
    for content in outcome.displays:
        places[content["transient"]["display_id"]] = content["data"]
    first, second = places.values()
    assert first["text/html"] == "the end"
    assert second == {"text/plain": "", "text/html": ""}


def test_handle_changes_what_it_has_displayed(run: Run) -> None:
    outcome = run("""%%distributed -n 1
handle = show(HTML("one"), display_id="mine")
handle.update(HTML("two"))
update_display(HTML("three"), display_id="mine")
later = show(display_id=True)
later.update(HTML("four"))
display(HTML("five"), metadata={"isolated": True})""")
    shown = [(content["data"].get("text/html"), content["transient"]["display_id"]) for content in outcome.displays]
    assert shown[:3] == [("one", "mine"), ("two", "mine"), ("three", "mine")]
    assert [html for html, _ in shown[3:]] == ["four", "five"]
    assert outcome.displays[4]["metadata"] == {"isolated": True}


def test_every_form_that_an_object_has_is_shown_and_one_that_fails_is_left_out(run: Run) -> None:
    outcome = run("""%%distributed -n 1
class Rich:
    def __repr__(self): return "plain"
    def _repr_html_(self): raise ValueError("no html today")
    def _repr_svg_(self): return "<svg/>", {"width": 7}
    def _repr_mimebundle_(self, include, exclude):
        return {"application/json": {"deep": [1, None]}, "image/gif": b"GIF", "text/plain": "from the bundle"}
class Widget:
    def _repr_mimebundle_(self, **_): return {"application/vnd.jupyter.widget-view+json": {"model_id": "x"}}
    def __repr__(self): return "a widget"
display(Rich(), Rich, Widget(), exclude=["text/latex"])""")
    (bundle,) = bundles(outcome)
    assert bundle == {
        "text/plain": "from the bundle",
        "image/svg+xml": "<svg/>",
        "application/json": {"deep": [1, None]},
        "image/gif": base64.b64encode(b"GIF").decode(),
    }
    assert outcome.displays[0]["metadata"] == {"image/svg+xml": {"width": 7}}
    assert "ValueError: no html today" in outcome.stdout
    assert "0 │ <class '__main__.Rich'>" in outcome.stdout
    assert "0 │ a widget" in outcome.stdout


@pytest.mark.slow
def test_large_image_arrives_whole_and_one_too_large_for_a_notebook_is_named(run: Run) -> None:
    outcome = run("""%%distributed -n 1
show(Image(data=b"\\x89PNG\\r\\n\\x1a\\n" + b"\\0" * 20_000_000, format="png"))
show(Image(data=b"\\0" * 80_000_000, format="png"))
print("trained on")""")
    (large,) = bundles(outcome)
    assert len(base64.b64decode(large["image/png"])) == 20_000_008
    assert "0 │ <IPython.core.display.Image object> [not shown here: it has 102 MiB]" in outcome.stdout
    assert outcome.stdout.index("not shown here") < outcome.stdout.index("trained on")


@pytest.mark.parametrize("method", ["spawn", pytest.param("fork", marks=pytest.mark.slow)])
def test_bars_of_every_kind_are_counted_and_none_is_drawn(run: Run, method: str) -> None:
    outcome = run(f"""%%distributed -n 1 --start_method {method}
import sys
for epoch in tqdm(range(2), desc="epochs"):
    for step in notebook_bar(range(3), leave=False): pass
    for step in tqdm(range(5), file=sys.stdout): pass
for step in tqdm(range(100), disable=True): pass
bar = notebook_bar(total=4)
bar.reset(total=7)
bar.update(7)
bar.close()
tqdm.write("beside the bars")""")
    assert bundles(outcome) == []
    assert "0 │ beside the bars\n" in outcome.stdout
    assert "rank 0  finished  step 7/7" in outcome.stdout
    assert not any(sign in outcome.stdout + outcome.stderr for sign in ("it/s", "%|", "HBox"))


@pytest.mark.slow
def test_bars_of_a_pools_process_are_drawn_when_they_end(run: Run) -> None:
    outcome = run("""%%distributed -n 1
from multiprocessing import Pool
def work(number):
    for _ in tqdm(range(3), desc=f"bar {number}", position=number, mininterval=0): pass
with Pool(1) as pool:
    for _ in tqdm(pool.imap(work, range(2)), total=2): pass""")
    ends = re.findall(r"^0 │ (bar \d): 100%\|.*\| 3/3 ", outcome.stdout, re.MULTILINE)
    assert ends == ["bar 0", "bar 1"], outcome.stdout
    assert "1/3" not in outcome.stdout
    assert "rank 0  finished  step 2/2" in outcome.stdout


def test_bar_of_rich_is_counted_and_not_drawn(run: Run) -> None:
    outcome = run("""%%distributed -n 1
from rich.progress import Progress, track
for step in track(range(20), description="rich"): pass
with Progress() as progress:
    task = progress.add_task("by hand", total=8)
    progress.update(task, advance=8)
    progress.console.print("beside it")""")
    assert [line for line in outcome.stdout.splitlines() if line.startswith("0 │ ") and line != "0 │ "] == [
        "0 │ beside it"
    ]
    assert "rank 0  finished  step 8/8" in outcome.stdout, outcome.traceback


def test_last_bar_of_a_failed_rank_stays_and_so_does_its_open_figure(run: Run) -> None:
    outcome = run("""%%distributed -n 1
_ = plt.plot([1, 2])
for step in tqdm(range(9)):
    if step == 4: raise ValueError("here")""")
    assert [list(content["data"]) for content in outcome.displays] == [["text/plain", "image/png"]]
    assert "rank 0  failed  step 4/9" in outcome.stdout
