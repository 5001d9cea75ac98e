"""Sphinx: the pages of this directory, and references made from the source, as a site in build/docs (`make docs`)."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "extensions"), str(HERE.parent / "src")]

import simic  # noqa: E402

project = "simic"
author = "the simic authors"
project_copyright = "the simic authors, MIT licence"
version = release = simic.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton"]
extensions += ["references", "notebooks", "mermaid"]  # docs/extensions
source_suffix = {".md": "markdown", ".py": "notebook"}
exclude_patterns = ["conf.py", "extensions", "images", "static"]
nitpicky = True  # a name in a docstring or page that leads nowhere is an error
default_role = "code"  # `name` in docstrings, as in the pages

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
myst_fence_as_directive = ["mermaid"]

# Signatures carry the types; those of torch are named there as in the source, without links.
autodoc_typehints = "none"
autodoc_member_order = "bysource"
autodoc_class_signature = "mixed"
autodoc_inherit_docstrings = False  # those of torch are not written for this page

html_theme = "furo"
html_title = f"simic {release}"
html_static_path = ["static"]
html_css_files = ["simic.css"]
html_show_sourcelink = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#1f6f43", "color-brand-content": "#1f6f43"},
    "dark_css_variables": {"color-brand-primary": "#7bd3a0", "color-brand-content": "#7bd3a0"},
}
copybutton_exclude = ".linenos, .gp, .go"
pygments_style, pygments_dark_style = "friendly", "github-dark"
smartquotes = False  # --flags stay flags
