"""Notebooks as scripts in the percent format: split one into cells, run its cells, write it as .ipynb.

    # %% [markdown]      text: the comment lines below it, in Markdown
    # %%                 code

`python percent.py SCRIPT` runs a script in the working directory and prints its cells with their outputs as JSON: a
process of its own keeps the notebooks of a site apart.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import re
import sys
import time
import traceback
import types
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

MARK = re.compile(r"^# %%(?: \[(markdown)\])?\s*$")
# A grey that can be read on white and on black, and no background: one picture serves light and dark pages.
FIGURE_STYLE = {
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), "#808080"),
    **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor", "legend.facecolor"), "none"),
    "figure.figsize": (7.2, 3.6),
    "axes.spines.top": False,
    "axes.spines.right": False,
}


@dataclass
class Output:
    """What a cell put out: `text` as printed, `html` of a value that has it, or a `png` in base64."""

    kind: str
    data: str


@dataclass
class Cell:
    """A piece of a notebook."""

    kind: str
    """markdown or code."""
    source: str
    outputs: list[Output] = field(default_factory=list)


def split(script: str) -> list[Cell]:
    """The cells of a script; what stands above the first mark (a module docstring) is left out."""
    cells: list[tuple[str, list[str]]] = []
    for line in script.splitlines():
        if mark := MARK.match(line):
            cells.append((mark[1] or "code", []))
        elif cells:
            cells[-1][1].append(line)
    found = []
    for kind, lines in cells:
        if kind == "markdown":
            lines = [re.sub("^# ?", "", line) for line in lines]
        found.append(Cell(kind, "\n".join(lines).strip("\n")))
    return [cell for cell in found if cell.source.strip()]


def run(cells: list[Cell], name: str) -> None:
    """Run the code cells in one namespace, and note what each puts out."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update(FIGURE_STYLE)
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module  # so that worker processes and pickle see a main module without a file
    for number, cell in enumerate(cells):
        if cell.kind == "code":
            _run_cell(cell, module.__dict__, f"{name}, cell {number}")


def _run_cell(cell: Cell, names: dict[str, Any], where: str) -> None:
    tree = ast.parse(cell.source, where)
    last = None
    if tree.body and isinstance(tree.body[-1], ast.Expr):
        last = ast.Expression(tree.body.pop().value)  # pyright: ignore[reportAttributeAccessIssue]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        exec(compile(tree, where, "exec"), names)
        value = None if last is None else eval(compile(last, where, "eval"), names)
    if text := printed.getvalue():
        cell.outputs.append(Output("text", text))
    figures = _figures(value)
    cell.outputs += figures
    if value is not None and not figures:
        html = getattr(value, "_repr_html_", None)
        cell.outputs.append(Output("html", html()) if html else Output("text", repr(value)))


def _figures(value: Any) -> list[Output]:
    """The figures that the cell left open, which are closed, and the one that is its value."""
    import matplotlib.pyplot as plt

    drawn = [plt.figure(number) for number in plt.get_fignums()]
    if hasattr(value, "savefig") and value not in drawn:
        drawn.append(value)
    found = []
    for figure in drawn:
        file = io.BytesIO()
        figure.savefig(file, format="png", dpi=150, bbox_inches="tight")
        found.append(Output("png", base64.b64encode(file.getvalue()).decode()))
    plt.close("all")
    return found


def to_ipynb(cells: list[Cell]) -> dict[str, Any]:
    """The notebook in Jupyter's format, without outputs."""
    code = {"execution_count": None, "outputs": []}
    return {
        "nbformat": 4,
        "nbformat_minor": 4,
        "metadata": {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}},
        "cells": [
            {"cell_type": cell.kind, "metadata": {}, "source": cell.source, **(code if cell.kind == "code" else {})}
            for cell in cells
        ],
    }


def main(path: Path) -> None:
    """Run a script and print its cells with their outputs."""
    cells, start, stdout = split(path.read_text(encoding="utf-8")), time.perf_counter(), sys.stdout
    try:
        run(cells, path.name)
    except BaseException:
        traceback.print_exc()
        sys.exit(1)
    json.dump({"seconds": time.perf_counter() - start, "cells": [asdict(cell) for cell in cells]}, stdout)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
