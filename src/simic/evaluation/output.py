"""What an evaluation leaves behind: parts to resume from, results, figures for people."""

from __future__ import annotations

import csv
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

from simic.files import check_directory, write_file, writing
from simic.terminal import printable
from simic.training.progress import PatientConsole

COLUMNS = ("controller", "task", "rng_seed", "metric", "score", "area", "parameters", "host_parameters", "flops")
SHOWN = {
    "score": ("score", 1.0, ".2f"),
    "metric": ("test %", 1.0, ".2f"),
    "area": ("area %", 1.0, ".2f"),
    "parameters": ("parameters", 1.0, ",.0f"),
    "flops": ("MFLOP", 1e-6, ",.1f"),
}
"""Measures in the table: heading, factor to the unit, format."""


class Parts:
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
            # What is missing, or was torn by a power cut, is done again.
            with suppress(FileNotFoundError, ValueError):
                self._parts[key] = json.loads((self._directory / f"{key}.json").read_text(encoding="utf-8"))
        return self._parts.get(key)

    def put(self, key: str, part: Any) -> None:
        """Keep a part; a kill at any moment leaves it whole or absent."""
        text = json.dumps(part, allow_nan=False)
        self._parts[key] = json.loads(text)  # as it will be read
        if self._directory is not None:
            write_file(self._directory / f"{key}.json", text)


class Teller:
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
            figure = f"score {sum(scores) / len(scores):.2f}" if scores else part["note"]
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
    writer = csv.DictWriter(text, [*COLUMNS, "accuracy_per_parameter", "seeds", "fossils"], extrasaction="ignore")
    writer.writeheader()
    for episode in results["episodes"]:
        fossils = sum(seed["fate"] == "fossilized" for seed in episode["seeds"])
        writer.writerow(episode | {"seeds": len(episode["seeds"]), "fossils": fossils})
    write_file(out / "episodes.csv", text.getvalue())


def print_tables(results: dict[str, Any], console: Console) -> None:
    """Means of all contestants, best score first; and by how much each learned one beats the others in score."""
    figures, paired = results["summary"]["controllers"], results["summary"]["paired"]
    order = sorted(figures, key=lambda label: -figures[label]["score"]["mean"])
    means = _table("controller", *(heading for heading, _, _ in SHOWN.values()))
    for label in order:
        row = (format(factor * figures[label][name]["mean"], spec) for name, (_, factor, spec) in SHOWN.items())
        means.add_row(escape(printable(label)), *row)
    console.print(means)
    kinds = {label: about["kind"] for label, about in results["controllers"].items()}
    learned = [label for label in order if kinds.get(label, label) == "learned"]  # a group is named after its kind
    if not learned or len(order) < 2:
        return
    differences = _table("score, and its 95 % interval", *(escape(printable(label)) for label in learned))
    for other in order:
        own = [paired[label].get(other, {}).get("score") for label in learned]
        row = (f"{f['mean']:+.2f} ({f['low']:+.2f}, {f['high']:+.2f})" if f else "" for f in own)
        differences.add_row(f"minus {escape(printable(other))}", *row)
    console.print(differences)


def _table(first: str, *others: str) -> Table:
    table = Table(first, box=None)
    for heading in others:
        table.add_column(heading, justify="right")
    return table
