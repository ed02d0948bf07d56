"""The form that writes a configuration file: a field for each option, and a preview of the file.

Only core ipywidgets, with the interface of 7.7, which Colab has. Without widgets, a text has the commands to type.
"""

from __future__ import annotations

import html
import pathlib
from collections.abc import Iterable
from typing import Any

from kernel_ext import front_end
from kernel_ext.front_end import FORM_STYLE
from kernel_ext.output import faint
from notebook_accel import config, config_file
from notebook_accel.config import Option
from notebook_accel.errors import ConfigError
from notebook_accel.launching.kernel.config_draft import BASIC, Draft, DraftSource

_WRITTEN = '<span role="status"><b>Written.</b> The next %%distributed uses it; notebook_launcher reads no file.</span>'


class ConfigForm:
    """The form as the value of a cell: a notebook shows it, anything else prints it as text.

    By default it edits the values of the file that launches on this machine read.
    """

    def __init__(self, draft: Draft | None = None) -> None:
        self._draft = draft or Draft()
        self._widgets: _FormWidgets | None = None

    def __repr__(self) -> str:
        facts = "\n".join(f"{name}: {text}" for name, text in self._draft.machine.facts())
        exists = "exists" if self._draft.file_exists else "doesn't exist yet"
        return (
            "No form can be shown here. To write the configuration file, type in a terminal\n  notebook-accel config\n"
            'or in Python\n  notebook_accel.write_basic_config(mixed_precision="no")\n'
            f"The file {exists}: {self._draft.path}\n{facts}"
        )

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        del include, exclude
        text = repr(self)
        if not front_end.is_watched(front_end.kernel()):
            return {"text/plain": text}
        try:
            self._widgets = self._widgets or _FormWidgets(self._draft)
        except ImportError:  # no ipywidgets
            return {"text/plain": text}
        return front_end.widget_view(self._widgets.root, text)


class _FormWidgets:
    """The form's widgets. Each change goes into the draft, whose state is then shown."""

    def __init__(self, draft: Draft) -> None:
        import ipywidgets  # not above: this module is imported without ipywidgets too

        self._draft = draft
        self._sources: tuple[DraftSource, ...] = ()
        self._filling = False
        self._source = ipywidgets.Dropdown(description="start from")
        self._problems = ipywidgets.HTML()
        self._fields = {option.name: _Field(option, draft) for option in config.fields()}
        self._more = ipywidgets.ToggleButton(tooltip="Show or hide the options that are rarely needed")
        self._file = ipywidgets.HTML()
        self._overwrite = ipywidgets.Checkbox(description="Replace the file that is there", indent=False)
        self._button = ipywidgets.Button(description="Write basic config", tooltip="Write the file as shown above")
        self._status = ipywidgets.HTML()
        self.root = self._laid_out()
        self._offer_sources()
        self._fill()
        self._source.observe(lambda _: self._on_source(), "value")
        self._more.observe(lambda _: self._show_more(), "value")
        self._overwrite.observe(lambda _: self._show(), "value")
        self._button.on_click(lambda _: self._on_write())
        for field in self._fields.values():
            field.input.observe(lambda _, field=field: self._on_change(field), "value")

    def _laid_out(self) -> Any:
        import ipywidgets

        def box(kind: Any, name: str, *children: Any) -> Any:
            made = kind(children)
            made.add_class(name)
            return made

        self._button.add_class("nba-write")
        self._more.add_class("nba-more")
        rows = {name: box(ipywidgets.HBox, "nba-field", each.input, each.note) for name, each in self._fields.items()}
        self._source_row = box(ipywidgets.HBox, "nba-field", self._source, self._problems)
        self._rare = box(ipywidgets.VBox, "nba-rare", *(row for name, row in rows.items() if name not in BASIC))
        style = box(ipywidgets.Box, "nba-style", ipywidgets.HTML(f"<style>{FORM_STYLE}</style>"))
        facts = faint(" · ".join(text for _, text in self._draft.machine.facts()))
        header = (
            '<div class="nba-header"><span class="nba-name" role="heading" aria-level="3">Configuration</span> '
            f"{facts}</div>"
        )
        top = box(ipywidgets.HBox, "nba-top", ipywidgets.HTML(header))
        basic = (rows[name] for name in BASIC)
        fields = box(ipywidgets.VBox, "nba-fields", self._source_row, *basic, self._more, self._rare)
        write = box(ipywidgets.HBox, "nba-writing", self._overwrite, self._button, self._status)
        root = box(ipywidgets.VBox, "nba-panel", style, top, fields, self._file, write)
        root.add_class("nba-form")
        return root

    def _offer_sources(self) -> None:
        """List the sources that the form can start from. The fields keep their values."""
        self._filling = True
        self._sources = self._draft.sources()
        self._source.options = [(self._label(source), index) for index, source in enumerate(self._sources)]
        current = (index for index, source in enumerate(self._sources) if source.path == self._draft.source.path)
        self._source.value = next(current, 0)
        self._source_row.layout.display = "" if len(self._sources) > 1 else "none"
        self._filling = False

    def _label(self, source: DraftSource) -> str:
        return source.label if source.path in (None, self._draft.path) else f"{source.label}, {_short(source.path)}"

    def _on_source(self) -> None:
        if not self._filling:
            self._draft.fill(self._sources[self._source.value])
            self._fill()

    def _fill(self) -> None:
        self._filling = True
        for field in self._fields.values():
            field.fill()
        self._filling = False
        rare = (option for option in config.fields() if option.name not in BASIC)
        self._more.value = any(self._draft.values[option.name] != option.default for option in rare)
        self._show_more()
        self._show()

    def _on_change(self, field: _Field) -> None:
        if not self._filling:
            field.read()
            self._show()

    def _show_more(self) -> None:
        verb = "Hide" if self._more.value else "Show"
        self._more.description = f"{verb} {len(self._fields) - len(BASIC)} more options"
        self._rare.layout.display = "" if self._more.value else "none"

    def _show(self, said: str = "") -> None:
        """Show the draft's state, with ``said`` about the last write if something was written."""
        self._filling = True  # changing the choices that fit must not count as the user's choice
        wrong = [name for name, field in self._fields.items() if not field.show()]
        self._filling = False
        draft = self._draft
        self._problems.value = _list(draft.source.problems, "Not taken over")
        lines = () if wrong else draft.lines()
        is_replacing = draft.file_exists and not all(line.startswith(" ") for line in lines)
        if wrong:
            state, reason = "is written when every field is right", f"Correct {', '.join(wrong)} first."
            self._more.value = self._more.value or not set(wrong) <= set(BASIC)
        elif is_replacing:
            state, reason = "would change", "" if self._overwrite.value else "Tick the box to replace it."
        else:
            state, reason = ("as it is", "Nothing to write.") if draft.file_exists else ("a new file", "")
        self._file.value = _file_html(draft, state, map(str, lines))
        self._overwrite.layout.display = "" if is_replacing else "none"
        self._button.disabled = bool(reason)
        self._status.value = said or (faint(reason) if reason else "")

    def _on_write(self) -> None:
        try:
            path = self._draft.write(overwrite=bool(self._overwrite.value))
        except ConfigError as error:
            self._show(_error(error))
            return
        self._draft.fill(next(source for source in self._draft.sources() if source.path == path))
        self._overwrite.value = False
        self._offer_sources()
        self._show(_WRITTEN)


class _Field:
    """An option's input, with a note that explains the option or its error."""

    def __init__(self, option: Option, draft: Draft) -> None:
        import ipywidgets

        self._option = option
        self._draft = draft
        self.note = ipywidgets.HTML()
        self.note.add_class("nba-note")
        if option.kind is bool:
            self.input = ipywidgets.Checkbox(description=option.name)
        elif option.choices:
            self.input = ipywidgets.Dropdown(description=option.name, options=option.choices)
        else:
            placeholder = "not set" if option.optional else ""
            self.input = ipywidgets.Text(description=option.name, placeholder=placeholder)

    def fill(self) -> None:
        value = self._draft.values[self._option.name]
        if self._option.choices:
            self.input.options = self._option.choices
        self.input.value = value if self._option.kind is bool else config.to_text(value)

    def read(self) -> None:
        value = self.input.value
        read = value if self._option.kind is bool else config.from_text(self._option, value)
        self._draft.values[self._option.name] = read

    def show(self) -> bool:
        """Show the note and the choices that fit. Return whether the value is allowed."""
        name = self._option.name
        error = self._draft.error(name)
        if error is not None:
            self.note.value = _error(error)
            return False
        unfit = self._draft.unfit(name)
        if self._option.choices:
            chosen = self.input.value
            fitting = tuple(choice for choice in self._option.choices if choice not in unfit or choice == chosen)
            if self.input.options != fitting:
                self.input.options = fitting
                self.input.value = chosen
        note = " ".join([self._option.help, *(f"{choice} {reason}." for choice, reason in unfit.items())])
        self.note.value = faint(note)
        return True


def _short(path: pathlib.Path) -> str:
    """Return the path as a shell accepts it, from the user's home if it is in there."""
    home = config_file.from_home("~")
    return f"~/{path.relative_to(home)}" if path.is_relative_to(home) else str(path)


def _file_html(draft: Draft, state: str, lines: Iterable[str]) -> str:
    marks = {"+": "nba-comes", "-": "nba-goes", " ": "nba-faint"}
    shown = "\n".join(f'<span class="{marks[line[0]]}">{html.escape(line)}</span>' for line in lines)
    body = f'<pre class="nba-output" aria-label="The file as it would be">{shown}</pre>' if shown else ""
    variables = [f"The variable {name} is set, and wins over the file." for name in draft.overriding()]
    findings = [f"{finding.what} {finding.why} Fix: {finding.fix}" for finding in draft.findings()]
    return (
        f'<div class="nba-file"><div class="nba-file-head"><code>{html.escape(_short(draft.path))}</code> '
        f"{faint(state)}</div>{body}"
        f"{_list(findings, 'A launch with this file would report')}{_list(variables, 'Note')}</div>"
    )


def _list(lines: Iterable[str], title: str) -> str:
    items = "".join(f"<li>{html.escape(line)}</li>" for line in lines)
    return f'<div class="nba-told" role="status"><b>{html.escape(title)}:</b><ul>{items}</ul></div>' if items else ""


def _error(error: ConfigError) -> str:
    return f'<span class="nba-error" role="alert"><b>Error:</b> {html.escape(f"{error.what} {error.fix}")}</span>'
