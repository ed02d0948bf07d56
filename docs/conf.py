"""Settings of the site. ``.ci/run`` builds it; by hand: ``.venv/bin/sphinx-build -W -n docs build/docs``."""

import os
import pathlib
import sys

import notebook_accel

sys.path.insert(0, str(pathlib.Path(__file__).parent))

project = "notebook-accel"
release = version = notebook_accel.VERSION
extensions = [
    "myst_nb",               # pages in Markdown, and the example notebooks
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",   # docstrings in Google's style
    "sphinx_copybutton",
    "sphinxcontrib.mermaid", # the pictures that GitHub draws from text
    "site_parts",            # beside this file
]  # fmt: skip
exclude_patterns = ["example_notebooks/pictures", "**/.ipynb_checkpoints"]

# Pages: the same Markdown that GitHub shows.
myst_heading_anchors = 4  # as on GitHub, so that panel.md#states leads to the same place
myst_fence_as_directive = ["mermaid"]
mermaid_fullscreen = False
nb_execution_mode = "off"  # the notebooks have their outputs

# The reference: from the docstrings, under the names that users import.
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
python_use_unqualified_type_names = True
# What signatures name and this reference doesn't have: other manuals' names, and objects that users only pass on.
nitpick_ignore_regex = [
    (r"py:.*", r"(collections|contextlib|datetime|importlib|os|pathlib|torch)\..*|DataLoader|LRScheduler"),
    (r"py:class", r"notebook_accel\.(protocol|launching\.state)\..*|notebook_accel\.launching\.kernel\.cell\.Cell"),
    (r"py:class", r"(.*\.)?(Answer|Feed|LaunchRequest|LoaderPosition|LossScaler|ResultFiles|Tail|_Path)"),
]

# The looks.
html_theme = "furo"
html_title = project
html_baseurl = os.environ.get("READTHEDOCS_CANONICAL_URL", "")
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_copyright = False
