"""Pages from scripts in the percent format: each is run when its page is read, and shown with what it put out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import percent
from docutils import nodes
from myst_parser.parsers.sphinx_ import MystParser
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

logger = logging.getLogger(__name__)
FENCE = "``````"
"""Longer than any fence inside a cell."""


class NotebookParser(MystParser):
    """Turns a script into Markdown, with outputs, and parses that."""

    supported = ("notebook",)

    def parse(self, inputstring: str, document: nodes.document) -> None:
        """Run the script; the page is its text, code and output."""
        path = Path(document["source"])
        super().parse(to_markdown(execute(path), path), document)


def execute(path: Path) -> list[percent.Cell]:
    """Run a script in an empty directory and a process of its own."""
    source = str(Path(__file__).parents[2] / "src")
    # Networks this small train fastest in one thread, above all on a machine that is busy.
    settings = {"PYTHONPATH": source, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "112"}
    environment = {**os.environ, **settings}
    with tempfile.TemporaryDirectory(prefix="simic-docs-") as directory:
        command = [sys.executable, percent.__file__, str(path)]
        result = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True)
    if result.returncode:
        raise ExtensionError(f"{path.name} failed:\n{result.stderr}")
    found = json.loads(result.stdout)
    logger.info("%s ran in %.0f s", path.name, found["seconds"])
    cells = [percent.Cell(cell["kind"], cell["source"]) for cell in found["cells"]]
    for cell, told in zip(cells, found["cells"], strict=True):
        cell.outputs = [percent.Output(**output) for output in told["outputs"]]
    return cells


def to_markdown(cells: list[percent.Cell], path: Path) -> str:
    """The page; the links to script and notebook stand under its title."""
    parts = []
    for cell in cells:
        if cell.kind == "markdown":
            parts.append(cell.source)
        else:
            parts.append(f"{FENCE}python\n{cell.source}\n{FENCE}")
            parts += [_show(output, path) for output in cell.outputs]
    title, _, rest = parts[0].partition("\n")
    links = f"This page is a script, run when the page was built. Take it along: {{download}}`{path.name}`,\n"
    links += f"{FENCE}{{notebook-link}} {path.stem}.ipynb\n{FENCE}"
    return "\n\n".join([title, links, rest, *parts[1:]])


def _show(output: percent.Output, path: Path) -> str:
    if output.kind == "png":
        return f"![What the code above draws](data:image/png;base64,{output.data})"
    if output.kind == "html":
        return f'{FENCE}{{raw}} html\n<div class="notebook-output">{output.data}</div>\n{FENCE}'
    return f"{FENCE}{{code-block}} text\n:class: notebook-output\n\n{output.data.rstrip()}\n{FENCE}"


class NotebookLink(SphinxDirective):
    """A link to the notebook that is written beside the page."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """The link as HTML: Sphinx itself knows only files that are among its sources."""
        name = self.arguments[0]
        return [nodes.raw("", f'<p>or as a notebook: <a download href="{name}">{name}</a></p>', format="html")]


def write_notebooks(app: Sphinx, error: Exception | None) -> None:
    """Write every script as .ipynb beside its page."""
    if error is not None:
        return
    for name in app.env.found_docs:
        path = Path(app.env.doc2path(name))
        if path.suffix == ".py":
            notebook = percent.to_ipynb(percent.split(path.read_text(encoding="utf-8")))
            target = Path(app.outdir) / f"{name}.ipynb"
            target.write_text(json.dumps(notebook, indent=1), encoding="utf-8")


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.add_source_parser(NotebookParser)
    app.add_directive("notebook-link", NotebookLink)
    app.connect("build-finished", write_notebooks)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
