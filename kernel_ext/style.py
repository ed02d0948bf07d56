"""The style sheets of the panel and of the configuration form. Every rule is below the class ``nba-panel``.

Colours follow the front end's theme: JupyterLab's variables first, then VS Code's, then a palette of our own, chosen by
the front end's mark on the page or else by the system's preference.
"""

from __future__ import annotations

_LIGHT = (
    "--nba-good:#1a7f4b;--nba-bad:#b3261e;--nba-busy:#1f5fc9;--nba-warn:#8a5a00;"
    "--nba-bar:#2563c9;--nba-memory:#636c78;"
    "--nba-c0:#1f5fc9;--nba-c1:#b5480f;--nba-c2:#1a7f4b;--nba-c3:#8a3fb0;"
    "--nba-c4:#8a6a00;--nba-c5:#0b7a86;--nba-c6:#b3266e;--nba-c7:#5d6672;"
    "--nba-own-page:#fff;--nba-own-text:#1b1f24;--nba-own-faint:#5d6672;--nba-own-line:#dfe2e7;"
)
_DARK = (
    "--nba-good:#57c794;--nba-bad:#f28b82;--nba-busy:#8ab4f8;--nba-warn:#e3a94a;"
    "--nba-bar:#79a9f7;--nba-memory:#9aa3b0;"
    "--nba-c0:#8ab4f8;--nba-c1:#f0a070;--nba-c2:#57c794;--nba-c3:#c79af0;"
    "--nba-c4:#d9b84a;--nba-c5:#5fc9d4;--nba-c6:#f28bbd;--nba-c7:#a9b2be;"
    "--nba-own-page:#16191f;--nba-own-text:#e8eaed;--nba-own-faint:#9aa3b0;--nba-own-line:#2c323b;"
)
_LIGHT_MARKS = '[data-jp-theme-light="true"] .nba-panel,.vscode-light .nba-panel,html[theme="light"] .nba-panel'
_DARK_MARKS = '[data-jp-theme-light="false"] .nba-panel,.vscode-dark .nba-panel,html[theme="dark"] .nba-panel'

_RULES = """
.nba-panel {
  --nba-page: var(--jp-layout-color1, var(--vscode-editor-background, var(--nba-own-page)));
  --nba-shade: color-mix(in srgb, var(--nba-text) 5%, var(--nba-page));
  --nba-rail: color-mix(in srgb, var(--nba-text) 12%, var(--nba-page));
  --nba-text: var(--jp-ui-font-color1, var(--vscode-foreground, var(--nba-own-text)));
  --nba-faint: var(--jp-ui-font-color2, var(--vscode-descriptionForeground, var(--nba-own-faint)));
  --nba-line: var(--jp-border-color2, var(--vscode-panel-border, var(--nba-own-line)));
  container-type: inline-size; box-sizing: border-box; max-width: 1180px; margin: 4px 0; overflow: hidden;
  border: 1px solid var(--nba-line); border-radius: 8px;
  background: var(--nba-page); color: var(--nba-text);
  font: 13px/1.5 var(--jp-ui-font-family, system-ui, sans-serif); font-variant-numeric: tabular-nums;
}
.jp-RenderedHTMLCommon > .nba-panel { margin-right: -20px; } /* its padding, which widgets don't have around them */
.nba-panel .widget-box, .nba-panel .widget-html, .nba-panel .widget-html-content {
  margin: 0; padding: 0; min-width: 0; height: auto; overflow: visible; font: inherit; color: inherit;
}
.nba-panel .widget-html-content { flex: 1 1 auto; width: 100%; }
.nba-panel .nba-style { display: none; }

.nba-panel.jupyter-widgets-disconnected::before, .nba-panel .jupyter-widgets-disconnected::before { content: none; }
.nba-panel.jupyter-widgets-disconnected .nba-top.widget-box::before { content: "kernel gone"; align-self: center;
  height: auto; padding: 0 7px; border: 1px solid currentColor; border-radius: 4px; font: inherit; font-size: 12px;
  line-height: 18px; color: var(--nba-warn); white-space: nowrap; }
.nba-panel.jupyter-widgets-disconnected:not(.nba-ended) :is(.nba-badge, .nba-bar, .nba-seen, .nba-times) {
  opacity: .45; }
.nba-panel.jupyter-widgets-disconnected:not(.nba-ended) :is(.nba-header > .nba-badge, .nba-button, .nba-tools) {
  display: none; }

.nba-panel .nba-top { display: flex; align-items: center; gap: 12px; padding: 6px 14px;
  min-height: 46px; box-sizing: border-box; border-bottom: 1px solid var(--nba-line); }
.nba-panel .nba-top > .widget-html, .nba-panel .nba-header { flex: 1 1 auto; }
.nba-panel .nba-header { display: flex; flex-wrap: wrap; align-items: center; gap: 2px 12px; }
.nba-panel .nba-name { font-weight: 600; overflow-wrap: anywhere; }
.nba-panel .nba-faint { color: var(--nba-faint); }
.nba-panel .nba-times { margin-left: auto; display: flex; gap: 12px; }
.nba-panel button.nba-button { flex: none; width: auto; height: 28px; margin: 0; padding: 0 12px; line-height: 26px;
  border: 1px solid var(--nba-line); border-radius: 6px; background: var(--nba-shade); color: var(--nba-text);
  font: inherit; box-shadow: none; }
.nba-panel button.nba-button:hover:enabled { background: var(--nba-rail); box-shadow: none; }
.nba-panel button.nba-stop { border-color: var(--nba-bad); background: transparent; color: var(--nba-bad); }
.nba-panel button.nba-stop:hover:enabled { background: var(--nba-bad); color: var(--nba-page); }
.nba-panel button.nba-small { height: 24px; padding: 0 10px; line-height: 22px; font-size: 12px; }
.nba-panel button.nba-fold { align-self: flex-start; margin: 0 14px 10px; }
.nba-panel button:disabled { opacity: .55; }
.nba-panel :is(button, select, input, [tabindex], summary):focus-visible { outline: 2px solid var(--nba-bar);
  outline-offset: 1px; }
.nba-panel .nba-scrollback:focus-visible, .nba-panel .nba-scroll:focus-visible { outline-offset: -2px; }

.nba-panel .nba-tools { display: flex; flex-wrap: wrap; align-items: center; gap: 0 10px; padding: 0 14px;
  min-height: 36px; box-sizing: border-box; border-bottom: 1px solid var(--nba-line); background: var(--nba-page); }
.nba-panel .nba-tools > * { width: auto; margin: 0; height: auto; }
.nba-panel .nba-tools .widget-label { position: absolute; width: 1px; height: 1px; overflow: hidden;
  clip-path: inset(50%); white-space: nowrap; }
.nba-panel .nba-tabs button { width: auto; height: 35px; margin: 0 14px 0 0; padding: 0 1px; line-height: 33px;
  border: 0; border-bottom: 2px solid transparent; border-radius: 0; background: none; color: var(--nba-faint);
  font: inherit; font-size: 12px; box-shadow: none; }
.nba-panel .nba-tabs button:last-child { margin-right: 0; }
.nba-panel .nba-tabs button:hover { color: var(--nba-text); background: none; box-shadow: none; }
.nba-panel .nba-tabs button.mod-active { border-bottom-color: var(--nba-bar); background: none; color: var(--nba-text);
  box-shadow: none; }
.nba-panel .nba-tools :is(select, input) { height: 24px; padding: 0 7px; border: 1px solid var(--nba-line);
  border-radius: 6px; background-color: var(--nba-page); color: var(--nba-text); font: inherit; font-size: 12px; }
.nba-panel .nba-tools select { width: auto; max-width: 130px; padding: 0 22px 0 7px; line-height: 22px;
  text-overflow: ellipsis;
  background-repeat: no-repeat; background-image: linear-gradient(45deg, transparent 50%, var(--nba-faint) 50%),
    linear-gradient(135deg, var(--nba-faint) 50%, transparent 50%);
  background-position: right 12px center, right 7px center; background-size: 5px 5px; }
.nba-panel .nba-tools input { width: 150px; }
.nba-panel .nba-output-pane > .nba-tools > .widget-text { margin-left: auto; }
.nba-panel .nba-chart-pane > .nba-tools { justify-content: space-between; }

.nba-panel .nba-badge { display: inline-block; padding: 0 7px; border: 1px solid currentColor; border-radius: 4px;
  font-size: 12px; line-height: 18px; color: var(--nba-faint); white-space: nowrap; }
.nba-panel table.nba-ranks .nba-badge { display: block; width: fit-content; min-width: 44px; text-align: center; }
.nba-panel .nba-running { color: var(--nba-busy); }
.nba-panel .nba-finished { color: var(--nba-good); }
.nba-panel .nba-failed, .nba-panel .nba-killed { color: var(--nba-bad); }
.nba-panel :is(.nba-stopped, .nba-silent, .nba-behind) { color: var(--nba-warn); }
.nba-panel :is(.nba-silent, .nba-behind, .nba-failed, .nba-killed).nba-badge { font-weight: 600; }
.nba-panel table.nba-ranks :is(.nba-silent-row, .nba-behind-row) { --nba-bar: var(--nba-warn);
  background: color-mix(in srgb, var(--nba-warn) 9%, transparent); box-shadow: inset 3px 0 var(--nba-warn); }
.nba-panel table.nba-ranks :is(.nba-failed-row, .nba-killed-row) { --nba-bar: var(--nba-bad);
  background: color-mix(in srgb, var(--nba-bad) 8%, transparent); box-shadow: inset 3px 0 var(--nba-bad); }

.nba-panel .nba-scroll { overflow-x: auto; padding: 5px 0; }
.nba-panel table.nba-ranks { width: 100%; margin: 0; border: 0; border-collapse: collapse; table-layout: auto;
  font-size: 13px; color: inherit; }
.nba-panel table.nba-ranks caption { position: absolute; width: 1px; height: 1px; overflow: hidden;
  clip-path: inset(50%); white-space: nowrap; }
.nba-panel table.nba-ranks :is(thead, tbody, tr, tr:hover) { border: 0; }
.nba-panel table.nba-ranks :is(thead, tbody, tr:not([class])) { background: none; }
.nba-panel table.nba-ranks :is(th, td) { padding: 4px 18px 4px 0; border: 0; vertical-align: middle;
  text-align: left; white-space: nowrap; font-weight: 400; max-width: none; }
.nba-panel table.nba-ranks :is(th, td):first-child { padding-left: 14px; }
.nba-panel table.nba-ranks thead th { color: var(--nba-faint); font-size: 12px; }
.nba-panel table.nba-ranks .nba-number { text-align: right; min-width: 6ch; } /* a value may lose its last digit */
.nba-panel table.nba-ranks .nba-last { width: 100%; max-width: 0; padding-right: 14px; overflow: hidden;
  text-overflow: ellipsis; }
.nba-panel table.nba-ranks td.nba-last { color: var(--nba-faint);
  font-family: var(--jp-code-font-family, var(--vscode-editor-font-family, monospace)); font-size: 12px; }
.nba-panel table.nba-ranks td.nba-note { padding-top: 0; white-space: normal; overflow-wrap: anywhere; }
.nba-panel .nba-count { display: inline-block; text-align: right; }
.nba-panel .nba-bar { display: inline-block; width: 130px; height: 7px; margin-right: 9px; border-radius: 4px;
  background: var(--nba-rail); overflow: hidden; vertical-align: 1px; }
.nba-panel .nba-bar > div { height: 100%; border-radius: 4px; background: var(--nba-bar); }
.nba-panel .nba-bar.nba-memory { width: 48px; }
.nba-panel .nba-bar.nba-memory > div { background: var(--nba-memory); }

.nba-panel ul.nba-cells { display: grid; grid-template-columns: repeat(auto-fill, minmax(62px, 1fr)); gap: 5px;
  margin: 0; padding: 4px 14px 12px; list-style: none; }
.nba-panel li.nba-cell { position: relative; display: flex; justify-content: space-between; margin: 0;
  padding: 0 7px 3px; overflow: hidden; border: 1px solid var(--nba-line); border-radius: 4px; font-size: 12px;
  line-height: 20px; color: var(--nba-text); }
.nba-panel li.nba-finished span { color: var(--nba-good); }
.nba-panel li.nba-cell b { font-weight: 400; }
.nba-panel li.nba-cell i { position: absolute; left: 0; bottom: 0; height: 3px; background: var(--nba-bar); }
.nba-panel li:is(.nba-silent, .nba-behind) { --nba-bar: var(--nba-warn); border-color: var(--nba-warn);
  color: var(--nba-warn); }
.nba-panel li:is(.nba-failed, .nba-killed) { --nba-bar: var(--nba-bad); border-color: var(--nba-bad);
  color: var(--nba-bad); }
.nba-panel li:is(.nba-silent, .nba-behind, .nba-failed, .nba-killed) b { font-weight: 600; }
.nba-panel .nba-every-rank { padding: 0 0 10px; }
.nba-panel .nba-every-rank > summary { padding: 0 14px; }

.nba-panel .nba-bottom { display: flex; align-items: stretch; border-top: 1px solid var(--nba-line); }
.nba-panel .nba-bottom > .nba-output-pane { flex: 1 1 auto; min-width: 0; background: var(--nba-shade); }
.nba-panel .nba-bottom > .nba-chart-pane { flex: none; }
.nba-panel .nba-scrollback { display: flex; flex-direction: column-reverse; max-height: 236px; min-height: 100px;
  overflow: auto; }
.nba-panel .nba-scrollback.widget-box { flex-direction: column-reverse; max-height: 236px; min-height: 100px;
  overflow: auto; }
.nba-panel .nba-scrollback.widget-box > .widget-html { flex: none; margin: 0 0 auto; }
.nba-panel .nba-errors { margin: 0; padding: 8px 14px; border-bottom: 1px solid var(--nba-line);
  box-shadow: inset 3px 0 var(--nba-bad); font-size: 12px; }
.nba-panel .nba-errors b { color: var(--nba-bad); font-weight: 600; }
.nba-panel .nba-errors pre.nba-output { padding: 4px 0 0; }
.nba-panel .nba-said { margin: 0; padding: 8px 14px 0; font-size: 12px; color: var(--nba-faint); }
.nba-panel .nba-header > .nba-said { flex: 1 0 100%; padding: 0; }
.nba-panel mark { background: color-mix(in srgb, var(--nba-warn) 35%, transparent); color: inherit; }
.nba-panel pre.nba-output { margin: 0 0 auto; padding: 10px 14px; border: 0; background: none; color: inherit;
  font: 12px/1.6 var(--jp-code-font-family, var(--vscode-editor-font-family, monospace));
  white-space: pre-wrap; overflow-wrap: anywhere; }
.nba-panel details { padding: 8px 14px 0; }
.nba-panel details > pre.nba-output { padding: 6px 0 0; }
.nba-panel .nba-traceback { padding-bottom: 8px; border-top: 1px solid var(--nba-line); }
.nba-panel .nba-traceback > .nba-scrollback { min-height: 0; }
.nba-panel .nba-traceback pre.nba-output { padding: 6px 0 0; }
.nba-panel summary { cursor: pointer; color: var(--nba-faint); font-size: 12px; }
.nba-panel .nba-chart-pane { border-left: 1px solid var(--nba-line); }
.nba-panel .nba-chart-pane:not(:has(svg)) { display: none; }
.nba-panel .nba-chart { padding: 8px 14px 4px; width: 280px; box-sizing: content-box; }
.nba-panel .nba-chart-title { display: flex; justify-content: space-between; font-size: 12px; color: var(--nba-faint); }
.nba-panel .nba-chart svg { display: block; max-width: 100%; color: var(--nba-faint); }
.nba-panel .nba-chart .nba-curve { color: var(--nba-bar); }
.nba-panel .nba-chart .nba-rank-curve { opacity: .75; }
.nba-panel .nba-chart .nba-rank-curve ~ .nba-curve { color: var(--nba-text); }
.nba-panel .nba-chart text { fill: currentColor; }

@container (max-width: 1000px) {
  .nba-panel table.nba-ranks :is(th, td) { padding-right: 14px; }
  .nba-panel .nba-bar { width: 90px; }
}
@container (max-width: 680px) {
  .nba-panel table.nba-ranks :is(th, td) { padding-right: 12px; }
  .nba-panel .nba-bar { width: 48px; }
  .nba-panel .nba-bar.nba-memory { display: none; }
  .nba-panel table.nba-ranks .nba-last { min-width: 120px; max-width: 120px; }
  .nba-panel .nba-bottom { flex-wrap: wrap; }
  .nba-panel .nba-bottom > .nba-output-pane { flex-basis: 100%; }
  .nba-panel .nba-bottom > .nba-chart-pane { flex: 1 1 100%; border-left: 0; border-top: 1px solid var(--nba-line); }
}
"""

_CURVES = "".join(f".nba-panel .nba-chart .nba-c{n}{{color:var(--nba-c{n})}}" for n in range(8))

STYLE = (
    f".nba-panel{{{_LIGHT}}}@media (prefers-color-scheme:dark){{.nba-panel{{{_DARK}}}}}"
    f"{_LIGHT_MARKS}{{{_LIGHT}}}{_DARK_MARKS}{{{_DARK}}}{_RULES}{_CURVES}"
)
"""The panel's style sheet. Nothing else on the page changes."""

# Selectors with two classes win over the panel's own rules, even where a panel further down repeats those.
_FORM_RULES = """
.nba-panel.nba-form .nba-top > .widget-html { min-width: 0; }
.nba-panel.nba-form .nba-fields { padding: 10px 14px 12px; border-bottom: 1px solid var(--nba-line); gap: 6px; }
.nba-panel.nba-form .nba-field { display: flex; flex-wrap: wrap; align-items: flex-start; gap: 2px 18px; }
.nba-panel.nba-form .nba-field > :is(.widget-text, .widget-dropdown, .widget-checkbox) { flex: 0 0 390px;
  width: 390px; max-width: 100%; margin: 0; }
.nba-panel.nba-form .nba-field > .widget-html { flex: 1 1 300px; padding-top: 4px; font-size: 12px; line-height: 1.55; }
.nba-panel.nba-form .nba-fields > .nba-field:first-child > .widget-dropdown { flex: 1 1 390px; }
.nba-panel.nba-form .widget-label { width: 170px; color: var(--nba-text); font: inherit; text-align: left; }
.nba-panel.nba-form .widget-checkbox { color: var(--nba-text); font: inherit; }
.nba-panel.nba-form :is(.widget-text input, .widget-dropdown select) { height: 28px;
  padding: 0 8px; border: 1px solid var(--nba-line); border-radius: 6px;
  background-color: var(--nba-page); color: var(--nba-text); font: inherit; }
.nba-panel.nba-form :is(input, select, button):focus-visible { outline: 2px solid var(--nba-bar); outline-offset: 1px; }
.nba-panel.nba-form .widget-dropdown select { padding-right: 26px; text-overflow: ellipsis;
  background-repeat: no-repeat; background-image: linear-gradient(45deg, transparent 50%, var(--nba-faint) 50%),
    linear-gradient(135deg, var(--nba-faint) 50%, transparent 50%);
  background-position: right 14px center, right 9px center; background-size: 5px 5px; }
.nba-panel.nba-form .nba-rare { gap: 6px; }
.nba-panel.nba-form button.nba-more { width: auto; align-self: flex-start; height: 26px; margin: 2px 0; padding: 0 10px;
  line-height: 24px; border: 1px solid var(--nba-line); border-radius: 6px; background: transparent;
  color: var(--nba-faint); font: inherit; font-size: 12px; box-shadow: none; }
.nba-panel.nba-form .nba-error { color: var(--nba-bad); }
.nba-panel.nba-form .nba-told { padding: 4px 0; font-size: 12px; }
.nba-panel.nba-form .nba-told ul { margin: 2px 0 0; padding-left: 18px; }
.nba-panel.nba-form .nba-file { padding: 10px 14px; background: var(--nba-shade); }
.nba-panel.nba-form .nba-file-head { display: flex; flex-wrap: wrap; gap: 2px 12px; }
.nba-panel.nba-form .nba-file-head code { background: none; color: inherit; overflow-wrap: anywhere; padding: 0; }
.nba-panel.nba-form pre.nba-output { padding: 8px 0 0; }
.nba-panel.nba-form .nba-comes { color: var(--nba-good); }
.nba-panel.nba-form .nba-goes { color: var(--nba-bad); }
.nba-panel.nba-form .nba-writing { display: flex; flex-wrap: wrap; align-items: center; gap: 8px 14px;
  padding: 10px 14px; border-top: 1px solid var(--nba-line); }
.nba-panel.nba-form .nba-writing .widget-checkbox { width: auto; margin: 0; }
.nba-panel.nba-form button.nba-write { flex: none; width: auto; height: 30px; margin: 0; padding: 0 16px;
  line-height: 28px; border: 1px solid var(--nba-bar); border-radius: 6px; background: var(--nba-bar);
  color: var(--nba-page); font: inherit; }
.nba-panel.nba-form button.nba-write:disabled { background: transparent; color: var(--nba-faint);
  border-color: var(--nba-line); opacity: 1; }
.nba-panel.nba-form.jupyter-widgets-disconnected :is(.nba-writing, .nba-more) { display: none; }
"""

FORM_STYLE = STYLE + _FORM_RULES
"""The panel's style sheet with rules for the fields of the configuration form."""
