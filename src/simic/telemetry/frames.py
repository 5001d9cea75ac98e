"""The events of runs as pandas frames, with the tables and columns of `tables.py`. pandas is imported on use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from simic.storage.run_directory import list_runs
from simic.telemetry.events import FILES
from simic.telemetry.rows import TableRows

if TYPE_CHECKING:
    from pandas import DataFrame  # pyright: ignore[reportMissingImports]

DTYPES = {
    **{"BIGINT": "Int64", "DOUBLE": "float64", "BOOLEAN": "boolean", "TIMESTAMP": "datetime64[us]"},
    **{"VARCHAR": "string", "JSON": "string"},
}
"""Types of pandas by those of SQL; columns of other types hold lists and dicts."""


class RunTables(dict[str, "DataFrame"]):
    """Frames by the name of their table."""

    def __init__(self, frames: Mapping[str, DataFrame], damaged: Mapping[str, int]) -> None:
        super().__init__(frames)
        self.damaged = dict(damaged)
        """Number of lines that are not events, by run; they are left out."""


def read_tables(*runs: str | PathLike[str]) -> RunTables:
    """The events of runs as pandas frames.

    Args:
        runs: Run directories, finished or under way; a directory of runs stands for all of them.

    Returns:
        A mapping from the name of a table to its frame; `simic query RUN` lists the tables and their columns.

    Raises:
        ImportError: pandas is not installed: `pip install 'simic-rl[analysis]'`.
        FileNotFoundError: There is no such run.

    Example::

        tables = simic.read_tables("runs/a", "runs/b")
        tables["updates"].pivot(index="update", columns="run", values="score").plot()
    """
    try:
        import pandas  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ImportError("simic.read_tables needs pandas: pip install 'simic-rl[analysis]'") from None
    rows, frames = TableRows(), {}
    damaged = {name: rows.read(name, path) for name, path in name_runs([Path(run) for run in runs]).items()}
    for name, columns in rows.tables():
        series = {
            column.name: pandas.Series(values, dtype=DTYPES.get(column.type, "object")) for column, values in columns
        }
        frames[name] = pandas.DataFrame(series)
    return RunTables(frames, damaged)


def name_runs(paths: Sequence[Path]) -> dict[str, Path]:
    """The runs at these paths by name: that of the directory, or its path where two have the same name."""
    found: list[Path] = []
    for path in paths:
        if not path.is_dir():
            raise FileNotFoundError(f"there is no run {path}; `simic runs` lists runs")
        inside = [path] if _has_events(path) else [run.path for run in list_runs(path) if _has_events(run.path)]
        if not inside:
            raise ValueError(f"{path} holds no events: it is neither a run nor a directory of runs")
        found += (run for run in inside if run not in found)
    count = Counter(path.resolve().name for path in found)
    return {path.resolve().name if count[path.resolve().name] == 1 else str(path): path for path in found}


def _has_events(path: Path) -> bool:
    return any((path / file).is_file() for file in FILES)
