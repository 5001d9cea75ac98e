"""simic query: SQL over the events of runs."""

from __future__ import annotations

import importlib.util
import shutil
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from simic.commands.answers import as_csv, as_json, as_table
from simic.commands.flags import POSITIONAL
from simic.storage.files import write_file
from simic.storage.printable import printable
from simic.telemetry.database import WORDS
from simic.telemetry.tables import Column, schemas
from simic.training.preflight import check_output_file

if TYPE_CHECKING:
    from simic.telemetry.database import Answer
    from simic.telemetry.frames import RunTables

FORMATS = {"csv": as_csv, "json": as_json}
USAGE_ERROR = 2
INDENT = " " * 4


@dataclass(frozen=True, kw_only=True)
class QueryCommand:
    """Ask the events of runs with SQL (DuckDB); without SQL, list the tables.

      simic query runs/a
      simic query runs/a "select update, score, kl from updates"
      simic query runs/a runs/b "select run, max(score) from updates group by run"
      simic query runs "from settings where name = 'reward.scheme'" --format csv

    Needs pip install 'simic-rl[analysis]'.
    """

    runs: tuple[str, ...] = field(metadata=POSITIONAL | {"metavar": "RUN", "usage": 'RUN... ["select ..."]'})
    """Directories of runs, which may be under way, or of several runs; then the SQL, in quotes."""
    format: Literal["table", "csv", "json"] | None = None
    """How to print the answer. By default what the name of --out ends in, or else table."""
    out: Path | None = None
    """File for the answer; by default it is printed."""

    def run(self) -> int:
        """Print the answer, or write it to a file."""
        _check_packages()
        if self.out is not None:
            check_output_file(self.out)
        paths, statement = split_arguments(self.runs)
        from simic.telemetry.database import Database, QueryError
        from simic.telemetry.frames import read_tables

        tables = read_tables(*paths)
        for run, damaged in tables.damaged.items():
            if damaged:
                print(f"simic: {printable(run)}: {damaged} damaged lines are left out", file=sys.stderr)
        if statement is None:
            self._write(_list_columns(tables), _describe(tables, self._width()))
            return 0
        try:
            self._write(Database(tables).ask(statement))
        except QueryError as error:  # several lines: the last marks the mistake in the one before it
            print("simic:", "\n".join(printable(line) for line in str(error).splitlines() if line), file=sys.stderr)
            return USAGE_ERROR
        return 0

    def _write(self, answer: Answer, table: str | None = None) -> None:
        """Print or save the answer; `table` is its form for readers, if that is not simply a table."""
        suffix = "" if self.out is None else self.out.suffix.lower().removeprefix(".")
        form = self.format or (suffix if suffix in FORMATS else "table")
        text = FORMATS[form](answer) if form in FORMATS else table or as_table(answer, self._width())
        if self.out is None:
            print(text, end="")
        else:
            write_file(self.out, text)
            print(f"{len(answer.rows)} rows: {self.out}")

    def _width(self) -> int | None:
        """Columns of the terminal; None if the answer goes elsewhere, where lines may be long."""
        return shutil.get_terminal_size().columns if self.out is None and sys.stdout.isatty() else None


def _check_packages() -> None:
    missing = [name for name in ("duckdb", "pandas") if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"simic query needs {' and '.join(missing)}: pip install 'simic-rl[analysis]'")


def split_arguments(arguments: Sequence[str]) -> tuple[list[Path], str | None]:
    """The paths of runs, and the statement: the argument with a space in it that is no directory."""
    statements = [text for text in arguments if len(text.split()) > 1 and not _is_directory(text)]
    if len(statements) > 1:
        raise ValueError(f"there are {len(statements)} statements; give one, in quotes: {printable(statements[1], 80)}")
    paths = [Path(text) for text in arguments if text not in statements]
    if words := [text for text in arguments if text.upper() in WORDS and not _is_directory(text)]:
        raise ValueError(f'put the SQL in quotes: simic query RUN "{words[0]} ..."')
    if not paths:
        raise ValueError('name a run before the SQL: simic query RUN "select ..."; `simic runs` lists runs')
    return paths, statements[0] if statements else None


def _is_directory(text: str) -> bool:
    try:
        return Path(text).is_dir()
    except OSError:  # too long for a path
        return False


# What tables there are.


def _list_columns(tables: RunTables) -> Answer:
    """One row per column of all tables."""
    from simic.telemetry.database import Answer

    known, rows = schemas(), list[tuple[Any, ...]]()
    for name, frame in tables.items():
        columns = {column.name: column for column in known[name].columns}
        for column in frame:
            own = columns.get(str(column)) or Column(str(column), "DOUBLE", "A metric: see docs/metrics.md.")
            rows.append((name, len(frame), *own))
    return Answer(("table", "rows", "column", "type", "help"), rows)


def _describe(tables: RunTables, width: int | None) -> str:
    """The same for readers: a paragraph per table."""
    lines, known = list[str](), schemas()
    for name, frame in tables.items():
        columns = known[name].columns
        lines.append(f"{name}, {len(frame)} {'row' if len(frame) == 1 else 'rows'}: {known[name].help}")
        names = max(len(column.name) for column in columns)
        lines += (f"{INDENT}{column.name:{names}s}  {column.type:21s}  {column.help}".rstrip() for column in columns)
        if metrics := ", ".join(printable(column) for column in list(frame)[len(columns) :]):
            lines += textwrap.wrap(
                f"and, as DOUBLE: {metrics}", width or 120, initial_indent=INDENT, subsequent_indent=INDENT
            )
        lines.append("")
    lines.append('SQL needs quotes around "group" and "where", and around names with a slash, such as "op/wait".')
    return "\n".join(lines) + "\n"
