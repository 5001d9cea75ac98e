"""What an evaluation leaves behind: parts to resume from, results, figures for people."""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from simic.evaluation.groups import Groups
from simic.storage.files import check_directory, write_file, writing
from simic.storage.json_files import read_json
from simic.storage.printable import printable
from simic.training.progress import PatientConsole

FORMAT = 2
"""Of results.json."""
MAX_PART_BYTES = 64 * 2**20
"""Of the results of one controller on one task."""
COLUMNS = (
    *("group", "controller", "task", "rng_seed", "metric", "score", "area"),
    *("parameters", "host_parameters", "flops", "accuracy_per_parameter", "seeds", "fossils"),
)
MAIN_FIGURE = "mean score"
"""What controllers are ranked and compared by; its name wherever it stands."""
SHOWN = {
    "score": (MAIN_FIGURE, 1.0, ".2f"),
    "metric": ("test %", 1.0, ".2f"),
    "area": ("area %", 1.0, ".2f"),
    "parameters": ("parameters", 1.0, ",.0f"),
    "flops": ("MFLOP", 1e-6, ",.1f"),
}
"""Measures in the table, all of them means over hosts: heading, factor to the unit, format."""


class ResultCache:
    """Finished units in a directory, one file each; without a directory, in memory."""

    def __init__(self, directory: Path | None) -> None:
        self._directory, self._parts = directory, dict[str, Any]()
        if directory is not None:
            check_directory(directory)
            with writing(directory):
                directory.mkdir(parents=True, exist_ok=True)

    def get(self, key: str) -> Any | None:
        """The unit's part, if it is done."""
        if key not in self._parts and self._directory is not None:
            # What is missing, was torn by a power cut or changed since is done again.
            with suppress(FileNotFoundError, ValueError, KeyError, TypeError, RecursionError):
                kept = read_json(self._directory / f"{key}.json", max_bytes=MAX_PART_BYTES)
                if kept["sha256"] == _digest(json.dumps(kept["part"], allow_nan=False)):
                    self._parts[key] = kept["part"]
        return self._parts.get(key)

    def put(self, key: str, part: Any) -> None:
        """Keep a part; a kill at any moment leaves it whole or absent."""
        text = json.dumps(part, allow_nan=False)
        self._parts[key] = json.loads(text)  # as it will be read
        if self._directory is not None:
            write_file(self._directory / f"{key}.json", f'{{"sha256": "{_digest(text)}", "part": {text}}}\n')


class ProgressReporter:
    """Progress of the units: a bar in a terminal, a line each elsewhere, nothing if quiet."""

    def __init__(self, total: int, *, quiet: bool, console: Console | None = None) -> None:
        self.console = console or PatientConsole(soft_wrap=True, highlight=False, quiet=quiet)
        self._total, self._done = total, 0
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        hidden = quiet or not self.console.is_terminal
        self._bar = Progress(*columns, console=self.console, transient=True, disable=hidden)
        self._task = self._bar.add_task("evaluating", total=total)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """While units run."""
        with self._bar:
            yield

    def done(self, label: str, task: str, part: Any, *, kept: bool) -> None:
        """A unit is done, or was `kept` from before."""
        self._done += 1
        self._bar.update(self._task, completed=self._done, description=escape(printable(label)))
        if self._bar.disable and not kept:
            scores = [episode["score"] for episode in part["episodes"]]
            figure = f"{MAIN_FIGURE} {sum(scores) / len(scores):.2f}" if scores else part["note"]
            line = f"{self._done}/{self._total}  {label} on {task}: {figure}  ({part['seconds']:.1f} s)"
            self.console.print(printable(line), markup=False)

    def say(self, text: str) -> None:
        """A line."""
        self.console.print(printable(text), markup=False)


def write_results(results: dict[str, Any], timing: dict[str, Any], out: Path) -> None:
    """results.json, episodes.csv and timing.json."""
    write_file(out / "results.json", json.dumps(results, indent=1, allow_nan=False) + "\n")
    write_file(out / "timing.json", json.dumps(timing, indent=1, allow_nan=False) + "\n")
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, extrasaction="ignore")
    writer.writeheader()
    owner = Groups.of_results(results).owner
    for episode in results["episodes"]:
        fossils = sum(seed["fate"] == "fossilized" for seed in episode["seeds"])
        group = owner.get(episode["controller"], episode["controller"])
        writer.writerow(episode | {"group": group, "seeds": len(episode["seeds"]), "fossils": fossils})
    write_file(out / "episodes.csv", text.getvalue())


def print_tables(results: dict[str, Any], console: Console) -> None:
    """Means of all rows, best mean score first, members below their group; and how much each learned row is ahead."""
    figures, paired = results["summary"]["controllers"], results["summary"]["paired"]
    groups = Groups.of_results(results)
    order = sorted(figures, key=lambda label: -figures[label]["score"]["mean"])
    rows = groups.rows(order)
    means = _table("means over all hosts", *(heading for heading, _, _ in SHOWN.values()))

    def add(label: str, name: str) -> None:
        cells = (format(factor * figures[label][name]["mean"], spec) for name, (_, factor, spec) in SHOWN.items())
        means.add_row(Text(printable(name)), *cells)

    for row in rows:
        add(row, row)
        for member in order:
            if groups.owner.get(member) == row:
                add(member, f"  {member}")
    console.print(means)
    learned = groups.learned(rows)
    if not learned or len(rows) < 2:
        return
    differences = _table(f"{MAIN_FIGURE} (95 % interval)", *(escape(printable(label)) for label in learned))
    for other in rows:
        own = [paired[label].get(other, {}).get("score") for label in learned]
        if any(own):
            cells = (f"{f['mean']:+.2f} ({f['low']:+.2f}, {f['high']:+.2f})" if f else "" for f in own)
            differences.add_row(Text(printable(f"minus {other}")), *cells)
    console.print(differences)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _table(first: str, *others: str) -> Table:
    table = Table(first, box=None)
    for heading in others:
        table.add_column(Text(heading), justify="right")
    return table
