"""The results of a suite, set by set: rows of figures, a table for the terminal, and a leaderboard in Markdown.

Differences are paired: both controllers led the same hosts. Their 95 % intervals are Student's t over the rng seeds of
one set, because a bootstrap of five values is too narrow.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from simic.evaluation.suites import SUITES
from simic.storage.printable import printable

Results = Mapping[str, Any]


class Difference(NamedTuple):
    """A mean paired difference and its interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:+.2f} ({self.low:+.2f}, {self.high:+.2f})"


class SetRow(NamedTuple):
    """A controller on one set: means over rng seeds, and its difference to the rival, None for the rival itself."""

    label: str
    metric: float
    score: float
    parameters: float
    flops: float
    score_difference: Difference | None
    metric_difference: Difference | None

    @property
    def below(self) -> bool:
        """Whether its score is below the rival's by more than the interval."""
        return self.score_difference is not None and self.score_difference.high < 0

    @property
    def above(self) -> bool:
        """Whether its score is above the rival's by more than the interval."""
        return self.score_difference is not None and self.score_difference.low > 0


def paired_interval(mine: Sequence[float], other: Sequence[float]) -> Difference:
    """Mean difference of pairs, with the 95 % interval of Student's t."""
    from scipy.special import stdtrit  # slow to import

    difference = np.asarray(mine, float) - np.asarray(other, float)
    if len(difference) < 2:
        raise ValueError(f"an interval needs at least 2 pairs, got {len(difference)}: give more rng seeds")
    mean = float(difference.mean())
    margin = float(stdtrit(len(difference) - 1, 0.975) * difference.std(ddof=1) / math.sqrt(len(difference)))
    return Difference(mean, mean - margin, mean + margin)


def set_rows(results: Results) -> dict[str, list[SetRow]]:
    """The rows of every set of a suite's results, best score first."""
    rival = SUITES[results["settings"]["suite"]].rival
    found: dict[str, dict[str, dict[int, Mapping[str, Any]]]] = {task: {} for task in results["tasks"]}
    for episode in results["episodes"]:
        found[episode["task"]].setdefault(episode["controller"], {})[episode["rng_seed"]] = episode
    tables = {}
    for task, controllers in found.items():
        rows = [_row(label, own, controllers[rival] if label != rival else None) for label, own in controllers.items()]
        tables[task] = sorted(rows, key=lambda row: -row.score)
    return tables


def print_sets(results: Results, console: Console) -> None:
    """Print a table of every set."""
    rival = SUITES[results["settings"]["suite"]].rival
    for task, rows in set_rows(results).items():
        table = Table(box=None)
        table.add_column(Text(task), overflow="fold")  # a label is wrapped rather than cut
        for heading in ("score", "test %", "parameters", "GFLOP", f"minus {rival}", ""):
            table.add_column(Text(heading), justify="right", no_wrap=True)
        for row in rows:
            table.add_row(Text(printable(row.label)), *_cells(row), "below" if row.below else "")
        console.print(table)


def leaderboard(results: Results) -> str:
    """The leaderboard of a suite's results, as Markdown."""
    name, tables = results["settings"]["suite"], set_rows(results)
    lines = [f"## Leaderboard of the suite {name}", "", "```sh", results["command"], "```", ""]
    lines += [
        f"Means of {len(results['rng_seeds'])} hosts per set, on test data. Differences are paired, with the 95 % "
        "interval of Student's t over rng seeds.",
        "",
    ]
    lines += [*_overview(results, tables), "", *_verdicts(results, tables)]
    for task, rows in tables.items():
        lines += ["", f"### {task}", "", *_set_table(name, rows)]
    return "\n".join([*lines, *(f"\n{note}" for note in results["notes"])]) + "\n"


def _row(label: str, own: Mapping[int, Any], rival: Mapping[int, Any] | None) -> SetRow:
    def values(measure: str, hosts: Mapping[int, Any] = own) -> list[float]:
        return [float(hosts[rng_seed][measure]) for rng_seed in sorted(hosts)]

    def mean(measure: str) -> float:
        return float(np.mean(values(measure)))

    def difference(measure: str) -> Difference | None:
        return None if rival is None else paired_interval(values(measure), values(measure, rival))

    return SetRow(
        label=label,
        metric=mean("metric"),
        score=mean("score"),
        parameters=mean("parameters"),
        flops=mean("flops"),
        score_difference=difference("score"),
        metric_difference=difference("metric"),
    )


def _cells(row: SetRow) -> tuple[str, ...]:
    difference = "" if row.score_difference is None else str(row.score_difference)
    return f"{row.score:.2f}", f"{row.metric:.2f}", f"{row.parameters:,.0f}", f"{row.flops / 1e9:,.1f}", difference


def _overview(results: Results, tables: Mapping[str, Sequence[SetRow]]) -> Iterator[str]:
    """Scores of every controller on every set, best mean first."""
    rival = SUITES[results["settings"]["suite"]].rival
    rows = {label: [row for own in tables.values() for row in own if row.label == label] for label in _labels(tables)}
    yield from _heading(["score", *tables, "mean", f"above / below {rival}"])
    for label in sorted(rows, key=lambda label: -_mean_score(rows[label])):
        own = dict(zip(tables, rows[label], strict=True))
        count = "" if label == rival else f"{sum(r.above for r in own.values())} / {sum(r.below for r in own.values())}"
        cells = [f"{own[task].score:.2f}" for task in tables]
        yield _line([_escaped(label), *cells, f"{_mean_score(rows[label]):.2f}", count])


def _verdicts(results: Results, tables: Mapping[str, Sequence[SetRow]]) -> Iterator[str]:
    """Every learned controller against the rival, set by set."""
    rival = SUITES[results["settings"]["suite"]].rival
    learned = [label for label in _labels(tables) if results["controllers"][label]["kind"] == "learned"]
    if not learned:
        return
    yield from _heading(["learned controller", "set", f"score minus {rival}", f"test % minus {rival}", "below"])
    for label in learned:
        for task, rows in tables.items():
            row = next(row for row in rows if row.label == label)
            verdict = "yes" if row.below else "no"
            yield _line([_escaped(label), task, str(row.score_difference), str(row.metric_difference), verdict])
    yield ""
    yield f"below: the score is below that of {rival} by more than the interval."


def _set_table(suite: str, rows: Sequence[SetRow]) -> Iterator[str]:
    yield from _heading(["controller", "score", "test %", "parameters", "GFLOP", f"score minus {SUITES[suite].rival}"])
    for row in rows:
        yield _line([_escaped(row.label), *_cells(row)])


def _labels(tables: Mapping[str, Sequence[SetRow]]) -> list[str]:
    return list(dict.fromkeys(row.label for rows in tables.values() for row in rows))


def _mean_score(rows: Sequence[SetRow]) -> float:
    return math.fsum(row.score for row in rows) / len(rows)


def _heading(titles: Sequence[str]) -> Iterator[str]:
    yield _line(titles)
    yield "|" + "|".join(["---", *["---:"] * (len(titles) - 1)]) + "|"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _escaped(label: str) -> str:
    """A label that cannot end its cell; the user chose it."""
    return printable(label).replace("|", "\\|")
