"""HTML pages from Jinja2 templates: text is escaped, nothing is loaded, the same input gives the same bytes.

A cell of a table is text, or a mapping with `text` and optionally `colour` (a swatch) or `kind` (a CSS class).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined

from simic.storage.files import write_file

Cell = str | int | Mapping[str, str]


class Table(NamedTuple):
    """Rows under a header."""

    header: Sequence[str]
    rows: Sequence[Sequence[Cell]]


def write_page(path: Path, template: str, title: str, **context: Any) -> None:
    """Render a template with autoescape and write the file at once."""
    write_file(path, _environment().get_template(template).render(title=title, **context))


def legend(colours: Iterable[tuple[str, str]]) -> list[Cell]:
    """Names (text, colour) with their colour in the charts."""
    return [{"text": text, "colour": colour} for text, colour in colours]


def format_amount(value: float) -> str:
    """A size in at most four digits: 1,004 or 14.3G."""
    for unit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if abs(value) >= unit:
            return f"{value / unit:.3g}{name}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


@cache
def _environment() -> Environment:
    loader = PackageLoader("simic.dashboard")
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
