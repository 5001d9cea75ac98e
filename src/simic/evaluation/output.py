"""Output of an evaluation: cached units, result files and tables."""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from simic.evaluation.groups import Groups
from simic.storage.files import check_directory, write_file, writing
from simic.storage.json_files import read_json
from simic.storage.printable import printable

FORMAT = 2
"""Format version of results.json."""
MAX_PART_BYTES = 64 * 2**20
"""Size limit of the cached results of one controller on one task."""
COLUMNS = (
    *("group", "controller", "task", "rng_seed", "metric", "score", "area"),
    *("parameters", "host_parameters", "flops", "accuracy_per_parameter", "seeds", "fossils"),
)
MAIN_FIGURE = "mean score"
"""The name, in every output, of the figure that controllers are ranked and compared by."""
SHOWN = {
    "score": (MAIN_FIGURE, 1.0, ".2f"),
    "metric": ("test %", 1.0, ".2f"),
    "area": ("area %", 1.0, ".2f"),
    "parameters": ("parameters", 1.0, ",.0f"),
    "flops": ("MFLOP", 1e-6, ",.1f"),
}
"""Columns of the table of means: heading, factor to the displayed unit, format."""


class ResultCache:
    """Results of finished units: in a directory, one file each, or only in memory."""

    def __init__(self, directory: Path | None) -> None:
        self._directory, self._parts = directory, dict[str, Any]()
        if directory is not None:
            check_directory(directory)
            with writing(directory):
                directory.mkdir(parents=True, exist_ok=True)

    def get(self, key: str) -> Any | None:
        """The result of a unit; None if it is missing or its file is damaged."""
        if key not in self._parts and self._directory is not None:
            with suppress(FileNotFoundError, ValueError, KeyError, TypeError, RecursionError):
                kept = read_json(self._directory / f"{key}.json", max_bytes=MAX_PART_BYTES)
                if kept["sha256"] == _digest(json.dumps(kept["part"], allow_nan=False)):
                    self._parts[key] = kept["part"]
        return self._parts.get(key)

    def put(self, key: str, part: Any) -> None:
        """Store a result; a kill at any moment leaves the file whole or absent."""
        text = json.dumps(part, allow_nan=False)
        self._parts[key] = json.loads(text)  # exactly what a later process reads back
        if self._directory is not None:
            write_file(self._directory / f"{key}.json", f'{{"sha256": "{_digest(text)}", "part": {text}}}\n')


def write_results(results: dict[str, Any], timing: dict[str, Any], out: Path) -> None:
    """Write results.json, timing.json and episodes.csv."""
    write_file(out / "results.json", json.dumps(results, indent=1, allow_nan=False) + "\n")
    write_file(out / "timing.json", json.dumps(timing, indent=1, allow_nan=False) + "\n")
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS)
    writer.writeheader()
    writer.writerows(episode_rows(results))
    write_file(out / "episodes.csv", text.getvalue())


def episode_rows(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One flat row of COLUMNS per episode; seeds and fossils are counted."""
    owner, rows = Groups.of_results(results).owner, []
    for episode in results["episodes"]:
        counted = {
            "group": owner.get(episode["controller"], episode["controller"]),
            "seeds": len(episode["seeds"]),
            "fossils": sum(seed["fate"] == "fossilized" for seed in episode["seeds"]),
        }
        rows.append({name: (episode | counted)[name] for name in COLUMNS})
    return rows


def print_tables(results: Mapping[str, Any], console: Console) -> None:
    """Print the means, best score first and members below their group, and what each controller gains over others."""
    _print_means(results, console)
    if curve := results.get("compute_curve"):
        _print_compute_curve(curve, Groups.of_results(results), len(results["tasks"]), console)


def _print_means(results: Mapping[str, Any], console: Console) -> None:
    figures, paired = results["summary"]["controllers"], results["summary"]["paired"]
    groups = Groups.of_results(results)
    order = sorted(figures, key=lambda label: -figures[label]["score"]["mean"])
    rows = groups.rows(order)
    means = _table("means over all hosts", *(heading for heading, _, _ in SHOWN.values()))
    for row in rows:
        for label in (row, *(member for member in order if groups.owner.get(member) == row)):
            cells = (format(factor * figures[label][name]["mean"], spec) for name, (_, factor, spec) in SHOWN.items())
            means.add_row(Text(printable(label if label == row else f"  {label}")), *cells)
    console.print(means)
    learned = groups.learned(rows)
    if not learned or len(rows) < 2:
        return
    differences = _table(f"{MAIN_FIGURE} (95 % interval)", *map(printable, learned))
    for other in rows:
        own = [paired[label].get(other, {}).get("score") for label in learned]
        if any(own):
            cells = (with_interval(f) if f else "" for f in own)
            differences.add_row(Text(printable(f"minus {other}")), *cells)
    console.print(differences)


def _print_compute_curve(curve: Mapping[str, Any], groups: Groups, num_tasks: int, console: Console) -> None:
    """Print the points of the curve, cheapest first, and below them where the comparison is not one of equals."""
    table = _table("by compute", "compute", "test %", "on front", "wider host", "gain at equal compute")
    for point in curve["points"]:
        label = point["controller"]
        name = f"{'  ' * (label in groups.owner)}{label}"
        equal, gain = point["metric_at_equal_compute"], point["gain_at_equal_compute"]
        cells = (f"{2 ** point['log2_compute']['mean']:.2f}x", f"{point['metric']['mean']:.2f}", describe_front(point))
        compared = (f"{equal['mean']:.2f}", with_interval(gain)) if equal else ("", "")
        table.add_row(Text(printable(name)), *cells, *compared)
    console.print(table)
    for line in curve_warnings(curve, num_tasks):
        console.print(Text(printable(line)))


def with_interval(figures: Mapping[str, float]) -> str:
    """A difference in points."""
    return f"{figures['mean']:+.2f} ({figures['low']:+.2f}, {figures['high']:+.2f})"


def describe_front(point: Mapping[str, Any]) -> str:
    """Whether a point of the compute curve is on the front, and how certain that is; empty for members of groups."""
    if point["on_front"] is None:
        return ""
    return f"{'yes' if point['on_front'] else 'no'}, {point['front_share']:.0%}"


def curve_warnings(curve: Mapping[str, Any], num_tasks: int) -> list[str]:
    """Where the comparison at equal compute falls short: tasks that are missing, hosts beyond the curve."""
    left = len(curve["tasks"])
    missing = (
        f"the comparison by compute is of {left} of {num_tasks} tasks: the hosts of the others have one width only"
    )
    return [missing] * (left < num_tasks) + [
        f"{point['controller']}: {point['beyond_curve']:.0%} of its hosts cost more than the largest of the wider "
        "hosts, and are compared with that one; give larger --scales"
        for point in curve["points"]
        if point["beyond_curve"]
    ]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _table(first: str, *others: str) -> Table:
    table = Table(first, box=None)
    for heading in others:
        table.add_column(Text(heading), justify="right")
    return table
