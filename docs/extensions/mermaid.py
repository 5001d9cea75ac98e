"""Diagrams in mermaid, which the browser draws.

The script is build/mermaid.min.js, which `make docs` fetches with npm; without it the page asks a public server for it.
"""

from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from sphinx.util.fileutil import copy_asset

VERSION = "11.17.2"
LOCAL = Path(__file__).parents[2] / "build" / "mermaid.min.js"
PUBLIC = f"https://cdn.jsdelivr.net/npm/mermaid@{VERSION}/dist/mermaid.min.js"


class Diagram(nodes.General, nodes.Element):
    """A diagram; `code` is its source."""


class MermaidDirective(SphinxDirective):
    """A block of mermaid."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        """The diagram as a node."""
        return [Diagram(code="\n".join(self.content))]


def visit_html(translator: Any, node: Diagram) -> None:
    """Write the source for the script; without the script it can still be read."""
    translator.body.append(f'<pre class="mermaid">{translator.encode(node["code"])}</pre>')
    raise nodes.SkipNode


def visit_text(translator: Any, node: Diagram) -> None:
    """Other formats leave diagrams out."""
    raise nodes.SkipNode


def add_scripts(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: nodes.document | None) -> None:
    """Only pages with a diagram load the script, which is large."""
    if doctree is not None and next(doctree.findall(Diagram), None) is not None:
        app.add_js_file("mermaid.min.js" if LOCAL.is_file() else PUBLIC)
        app.add_js_file("diagrams.js")


def copy_script(app: Sphinx, error: Exception | None) -> None:
    """Put the script beside the pages."""
    if error is None and LOCAL.is_file():
        copy_asset(LOCAL, Path(app.outdir) / "_static")


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.add_node(Diagram, html=(visit_html, None), text=(visit_text, None), latex=(visit_text, None))
    app.add_directive("mermaid", MermaidDirective)
    app.connect("html-page-context", add_scripts)
    app.connect("build-finished", copy_script)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
