"""The form's looks, which are the panel's, and rules for its fields. Inputs follow the front end's own."""

from __future__ import annotations

from kernel_ext import style

__all__ = ["STYLE"]

# Of two classes, and so above the panel's own rules, also where another panel further down brings those once more.
_RULES = """
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

STYLE = style.STYLE + _RULES
"""The text of a ``style`` element. Every rule is below ``.nba-panel``, so that nothing else on the page changes."""
