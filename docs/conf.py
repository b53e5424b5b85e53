"""Settings of the documentation site; `tools/docs` builds it with Sphinx."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "docs"), str(ROOT), str(ROOT / "converters"), str(ROOT / "tools")]

import shardio  # noqa: E402

project = "shardio"
author = "the shardio developers"
version = release = shardio.__version__
project_copyright = author

extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "myst_parser", "_site"]
root_doc = "index"
smartquotes = False  # options and values of options stay as they are
source_suffix = {".md": "markdown", ".markdown": "markdown", ".rst": "restructuredtext"}

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4  # links to headings are those of a repository's web page

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
python_maximum_signature_line_length = 72
python_use_unqualified_type_names = True
toc_object_entries_show_parents = "hide"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_param = False
napoleon_use_rtype = False

html_theme = "furo"
html_title = f"shardio {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_last_updated_fmt = None
html_theme_options = {"source_edit_link": "", "source_view_link": ""}
pygments_style = "friendly"
pygments_dark_style = "github-dark"
