"""The answer to a query as text: an aligned table, CSV or JSON."""

from __future__ import annotations

import csv
import io
import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import date, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len, set_cell_size

from simic.storage.printable import printable

if TYPE_CHECKING:
    from simic.telemetry.database import Answer

MAX_ROWS = 500
"""Rows that are printed to a terminal."""
MAX_CELL = 60
"""Characters of a value in a table."""


def as_table(answer: Answer, width: int | None) -> str:
    """Aligned columns; for a terminal of some width, as many rows and columns as it can show."""
    rows = answer.rows if width is None else answer.rows[:MAX_ROWS]
    cells = [[printable(name, MAX_CELL) for name in answer.columns], *([_shown(v) for v in row] for row in rows)]
    widths = [max(map(cell_len, column)) for column in zip(*cells, strict=True)]
    shown = len(widths)
    while width is not None and shown > 1 and sum(widths[:shown]) + 2 * (shown - 1) > width:
        shown -= 1
    is_number = [all(isinstance(row[i], (int, float, Decimal, type(None))) for row in rows) for i in range(shown)]
    lines = ["  ".join(_aligned(*cell) for cell in zip(row, widths, is_number, strict=False)).rstrip() for row in cells]
    lines.insert(1, "  ".join("-" * own for own in widths[:shown]))
    if shown < len(widths) or len(rows) < len(answer.rows):
        lines.append(
            f"({shown} of {len(widths)} columns, {len(rows)} of {len(answer.rows)} rows; "
            "name the columns you want, or see everything with --format csv)"
        )
    return "\n".join(lines) + "\n"


def _aligned(text: str, width: int, right: bool) -> str:
    return " " * (width - cell_len(text)) + text if right else set_cell_size(text, width)


def _shown(value: Any) -> str:
    if isinstance(value, (float, Decimal)):
        return f"{value:.6g}"
    text = printable(_text(value), 4 * MAX_CELL)
    return text if len(text) <= MAX_CELL else f"{text[: MAX_CELL - 1]}\N{HORIZONTAL ELLIPSIS}"


def as_csv(answer: Answer) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(answer.columns)
    writer.writerows([_text(value) for value in row] for row in answer.rows)
    return text.getvalue()


def as_json(answer: Answer) -> str:
    """A list of objects, one per line."""
    names = list(_distinct(answer.columns))
    rows = (json.dumps(dict(zip(names, map(_plain, row), strict=True)), allow_nan=False) for row in answer.rows)
    return "[" + ",\n ".join(rows) + "]\n"


def _distinct(names: Sequence[str]) -> Iterator[str]:
    """The names, with a number behind those that occur again."""
    seen = Counter[str]()
    for name in names:
        seen[name] += 1
        yield name if seen[name] == 1 else f"{name}_{seen[name]}"


def _text(value: Any) -> str:
    """A value in a cell: nothing for null, lists and tables as JSON."""
    if value is None:
        return ""
    if isinstance(value, (dict, list, tuple, bool)):
        return json.dumps(_plain(value))
    return str(_plain(value))


def _plain(value: Any) -> Any:
    """A value of DuckDB as JSON has it."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, Decimal):
        value = float(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, (date, datetime)):
        return value.isoformat(*[" "] * isinstance(value, datetime))
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)
