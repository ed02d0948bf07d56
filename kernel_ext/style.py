"""The style sheets of the panel and of the configuration form. Every rule is below the class ``nba-panel``.

Colours follow the front end's theme: JupyterLab's variables first, then VS Code's, then a palette of our own, chosen by
the front end's mark on the page or else by the system's preference. The rules are in the folder's CSS files.
"""

from __future__ import annotations

import importlib.resources

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


def _rules(name: str) -> str:
    return importlib.resources.files("kernel_ext").joinpath(f"{name}.css").read_text(encoding="utf-8")


_CURVES = "".join(f".nba-panel .nba-chart .nba-c{n}{{color:var(--nba-c{n})}}" for n in range(8))

STYLE = (
    f".nba-panel{{{_LIGHT}}}@media (prefers-color-scheme:dark){{.nba-panel{{{_DARK}}}}}"
    f"{_LIGHT_MARKS}{{{_LIGHT}}}{_DARK_MARKS}{{{_DARK}}}{_rules('panel')}{_CURVES}"
)
"""The panel's style sheet. Nothing else on the page changes."""

FORM_STYLE = STYLE + _rules("config_form")
"""The panel's style sheet with rules for the fields of the configuration form."""
