"""The tables of runs in DuckDB: in memory, closed to files and network, asked by single statements that only read."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

from simic.telemetry.frames import RunTables
from simic.telemetry.tables import schemas

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection  # pyright: ignore[reportMissingImports]
    from pandas import DataFrame  # pyright: ignore[reportMissingImports]

CLOSED = (
    "SET temp_directory = ''",
    "SET autoinstall_known_extensions = false",
    "SET autoload_known_extensions = false",
    "SET python_enable_replacements = false",  # otherwise a table may be any variable of this process
    "SET enable_external_access = false",
    "SET lock_configuration = true",
)
"""Settings under which a statement reaches no file, no network, no extension and nothing of Python. In this order."""
READS = ("SELECT", "EXPLAIN")
"""DuckDB's types of statements that only read."""
WORDS = ("SELECT", "WITH", "FROM", "VALUES", "DESCRIBE", "SUMMARIZE", "SHOW", "EXPLAIN")
"""What such statements begin with."""


class QueryError(ValueError):
    """A statement that is refused; the message is DuckDB's."""


class Answer(NamedTuple):
    """The rows that a statement gave."""

    columns: tuple[str, ...]
    rows: Sequence[tuple[Any, ...]]


class Database:
    """The tables of runs, and nothing else."""

    def __init__(self, tables: RunTables) -> None:
        import duckdb  # pyright: ignore[reportMissingImports]

        self._connection = duckdb.connect(":memory:")
        for name, frame in tables.items():
            _fill(self._connection, name, frame)
        for setting in CLOSED:
            self._connection.execute(setting)

    def ask(self, statement: str) -> Answer:
        """The answer to one statement that only reads. Ctrl-C ends it, however long it would take."""
        import duckdb  # pyright: ignore[reportMissingImports]

        with ThreadPoolExecutor(1) as executor:
            answer = executor.submit(self._ask, statement)
            try:
                return answer.result()
            except KeyboardInterrupt:
                self._connection.interrupt()
                raise
            except duckdb.Error as error:
                raise QueryError(str(error)) from None

    def _ask(self, statement: str) -> Answer:
        parsed = self._connection.extract_statements(statement)
        if len(parsed) != 1 or parsed[0].type.name not in READS:
            # Without its values DuckDB makes several statements of a pivot, of which one creates a type.
            hint = "; PIVOT must name its values: ON run IN ('a', 'b')" if "pivot" in statement.lower() else ""
            raise QueryError(f"a query is one statement that only reads: {', '.join(WORDS)}{hint}")
        answer = self._connection.sql(parsed[0])
        names, types = tuple(answer.columns), [str(kind) for kind in answer.types]
        for name, kind in zip(names, types, strict=True):
            if "WITH TIME ZONE" in kind:  # DuckDB needs another package to make Python's objects of them
                raise QueryError(f'"{name}" is a {kind}: cast it with ::TIMESTAMP or ::VARCHAR')
        is_json = [kind == "JSON" for kind in types]
        rows = answer.fetchall()
        return Answer(names, [tuple(map(_parsed, row, is_json)) for row in rows] if any(is_json) else rows)

    def close(self) -> None:
        """Release the memory."""
        self._connection.close()


def _fill(connection: DuckDBPyConnection, name: str, frame: DataFrame) -> None:
    """Create a table and copy a frame into it; lists and dicts go through JSON."""
    types = {column.name: column.type for column in schemas()[name].columns}
    kinds = {column: types.get(column, "DOUBLE") for column in frame}
    copied = frame.assign(**{c: frame[c].map(_to_json) for c, kind in kinds.items() if kind.endswith((")", "]"))})
    values = (f"TRY_CAST({_quoted(c)}{'::JSON' * kind.endswith((')', ']'))} AS {kind})" for c, kind in kinds.items())
    connection.execute(
        f"CREATE TABLE {_quoted(name)} ({', '.join(f'{_quoted(c)} {kind}' for c, kind in kinds.items())})"
    )
    connection.register("incoming", copied)
    connection.execute(f"INSERT INTO {_quoted(name)} SELECT {', '.join(values)} FROM incoming")
    connection.unregister("incoming")


def _parsed(value: Any, is_json: bool) -> Any:
    return json.loads(value) if is_json and value is not None else value


def _to_json(value: Any) -> str:
    if isinstance(value, dict):
        value = {
            key: None if isinstance(item, float) and not math.isfinite(item) else item for key, item in value.items()
        }
    return json.dumps(value, ensure_ascii=False)


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
