"""The charts of an evaluation. Each function fills axes; a row of the tables has the same colour in all of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from simic.dashboard.charts import FATES, INK, endless_colours, label_ends
from simic.evaluation.groups import Groups
from simic.evaluation.statistics import mean_interval, performance_profile

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

Table = Mapping[str, Mapping[str, np.ndarray]]
"""Scores (1, K, N) by controller and measure, as `score_table` makes it."""
DASHES = ("-", "--", ":", "-.")
MAX_TIMELINES = 4


@dataclass(frozen=True)
class Series:
    """One line of a chart: a row of the tables, which is a controller or a group."""

    name: str
    labels: tuple[str, ...]
    colour: str
    dash: str

    def episodes(self, results: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The episodes of all its controllers."""
        return [episode for episode in results["episodes"] if episode["controller"] in self.labels]

    def scores(self, table: Table, measure: str = "score") -> np.ndarray:
        """(P, K, N), one policy per controller."""
        return np.concatenate([table[label][measure] for label in self.labels])


def make_series(results: Mapping[str, Any]) -> list[Series]:
    """One series per row of the tables."""
    groups, places = Groups.of_results(results), Counter[str]()
    series, colours = [], row_colours(results)
    for row in played_rows(results):
        kind = groups.kind(row)
        series.append(Series(row, groups.members(row), colours[row], DASHES[places[kind] % len(DASHES)]))
        places[kind] += 1
    return series


def played_rows(results: Mapping[str, Any]) -> list[str]:
    """The rows that have episodes; a group takes the place of its first member."""
    owner = Groups.of_results(results).owner
    return list(dict.fromkeys(owner.get(label) or label for label in results["summary"]["controllers"]))


def row_colours(results: Mapping[str, Any]) -> dict[str, str]:
    """The colour of every row, learned controllers first; members of a group have that of the group."""
    groups, rows = Groups.of_results(results), played_rows(results)
    learned = groups.learned(rows)
    chosen = dict(zip([*learned, *(row for row in rows if row not in learned)], endless_colours(), strict=False))
    return chosen | {member: chosen[row] for member, row in groups.owner.items() if row in chosen}


def curves(axes: Axes, results: Mapping[str, Any], series: Sequence[Series], name: str) -> None:
    """Mean validation metric, or growth, after each decision."""
    ends, low = [], math.inf
    for own in series:
        rows = [_curve(episode, name) for episode in own.episodes(results)]
        padded = np.full((len(rows), max(map(len, rows))), np.nan)
        for row, values in zip(padded, rows, strict=True):
            row[: len(values)] = values
        mean = np.nanmean(padded, 0)
        axes.plot(mean, color=own.colour, linestyle=own.dash)
        ends.append((len(mean) - 1, float(mean[-1]), own.name, own.colour))
        low = min(low, float(mean[len(mean) // 6 :].min()))
    if name == "parameter_curve":
        _count_in_factors(axes, axes.yaxis)
    elif low < axes.get_ylim()[1]:
        axes.set_ylim(bottom=low)  # the steep start, before anything is learned, would take most of the chart
    label_ends(axes, ends)
    axes.set_xlabel("decision")


def _curve(episode: Mapping[str, Any], name: str) -> np.ndarray:
    values = np.asarray(episode[name], float)
    return np.log2(values / episode["host_parameters"]) if name == "parameter_curve" else values


def times(doublings: float, _: object = None) -> str:
    """A number of doublings as a factor."""
    return f"{2**doublings:.3g}x"


def frontier(axes: Axes, series: Sequence[Series], table: Table, costs: Mapping[str, float]) -> None:
    """Mean score against cost, and the Pareto frontier as a dotted line."""
    ends, points = [], []
    for own in series:
        cost = float(np.mean([costs[label] for label in own.labels]))
        score = mean_interval(own.scores(table))
        axes.plot((cost, cost), (score.low, score.high), color=own.colour, linewidth=1)
        axes.plot(cost, score.value, "o", color=own.colour, markersize=6)
        points.append((cost, score.value))
        ends.append((cost, score.value, own.name, own.colour))
    best = [p for p in sorted(points) if not any(q[0] <= p[0] and q[1] >= p[1] and q != p for q in points)]
    axes.plot(*zip(*best, strict=True), color=INK, linewidth=0.8, linestyle=":", zorder=0)
    _count_in_factors(axes, axes.xaxis)
    label_ends(axes, ends)


def compute_curve(axes: Axes, curve: Mapping[str, Any], colours: Mapping[str, str]) -> None:
    """Test metric minus that of the host alone against compute: wider hosts joined by a line, rows on the front ringed.

    Differences to the same hosts have narrower intervals than the metrics themselves, which differ from task to task.
    """
    points = [point for point in curve["points"] if point["on_front"] is not None]
    line = [
        (p["log2_compute"]["mean"], p["gain_over_host"]["mean"]) for p in points if p["controller"] in curve["curve"]
    ]
    axes.plot(*zip(*line, strict=True), color=INK, linewidth=0.8, zorder=0)
    ends = []
    for point in points:
        cost, gain, colour = point["log2_compute"], point["gain_over_host"], colours[point["controller"]]
        x, y = cost["mean"], gain["mean"]
        axes.plot((x, x), (gain["low"], gain["high"]), color=colour, linewidth=1)
        axes.plot((cost["low"], cost["high"]), (y, y), color=colour, linewidth=1)
        axes.plot(x, y, "o", color=colour, markersize=6)
        if point["on_front"]:
            axes.plot(x, y, "o", markersize=11, markerfacecolor="none", markeredgecolor=INK, markeredgewidth=0.8)
        ends.append((x, y, point["controller"], colour))
    _count_in_factors(axes, axes.xaxis)
    label_ends(axes, ends)


def distribution(axes: Axes, series: Sequence[Series], table: Table) -> None:
    """Mean score over tasks, one point per rng seed."""
    rows = sorted(series, key=lambda own: own.scores(table).mean())
    for y, own in enumerate(rows):
        points = own.scores(table).mean((0, 1))  # (N,)
        axes.plot(points, y + np.linspace(-0.22, 0.22, len(points)), "o", color=own.colour, alpha=0.6, markersize=4)
        axes.plot([points.mean()] * 2, (y - 0.36, y + 0.36), color=INK, linewidth=1.4)
    _name_rows(axes, [(own.name, own.colour) for own in rows])


def profile(axes: Axes, series: Sequence[Series], table: Table) -> None:
    """Performance profile: share of runs with a score above a threshold, with bands; names in order of mean score."""
    rows = sorted(series, key=lambda own: -own.scores(table).mean())
    everything = np.concatenate([own.scores(table).reshape(-1) for own in rows])
    taus = np.linspace(everything.min() - 1e-9, everything.max(), 81)
    for own in rows:
        share = performance_profile(own.scores(table), taus)
        axes.plot(taus, share.value, color=own.colour, linestyle=own.dash)
        axes.fill_between(taus, share.low, share.high, color=own.colour, alpha=0.12, linewidth=0)
    for own, height in zip(rows, np.linspace(1, 0, max(len(rows), 10)), strict=False):
        axes.text(1.03, height, own.name, color=own.colour, transform=axes.transAxes, va="center")
    axes.set_xlabel("score above")


def differences(axes: Axes, rows: Sequence[tuple[str, str, Mapping[str, float]]]) -> None:
    """Paired differences (other, its colour, estimate) with their intervals, around a line at 0."""
    rows = sorted(rows, key=lambda row: row[2]["mean"])
    axes.axvline(0, color=INK, linewidth=0.8)
    for y, (_, colour, estimate) in enumerate(rows):
        axes.plot((estimate["low"], estimate["high"]), (y, y), color=colour, linewidth=2.4)
        axes.plot(estimate["mean"], y, "o", color=colour, markersize=6)
    _name_rows(axes, [(f"minus {other}", colour) for other, colour, _ in rows])
    axes.set_xlabel("points of mean score")


def timeline(axes: Axes, rows: Sequence[tuple[str, str, list[Mapping[str, Any]]]], horizon: int) -> None:
    """One row (name, colour, seeds) per slot: from germination to its end, with blueprint and contribution."""
    for y, (_, _, seeds) in enumerate(rows):
        ends = [*(seed["germinated"] for seed in seeds[1:]), horizon]
        for seed, following in zip(seeds, ends, strict=False):
            left, kept = seed["germinated"], seed["fate"] == "fossilized"
            decided = horizon if seed["ended"] is None else seed["ended"] + 1
            look = {"height": 0.8, "color": FATES[seed["fate"]], "linewidth": 0}
            axes.barh(y, decided - left, left=left, alpha=0.4, **look)
            axes.barh(y, (horizon - decided) * kept, left=decided, alpha=0.8, **look)
            worth = seed["contribution"]
            text = seed["blueprint"] if worth is None else f"{seed['blueprint']} {worth:+.1f}"
            if following - left > horizon * 0.022 * len(text):
                axes.text(left + horizon * 0.01, y, text, va="center", fontsize=8)
        if not seeds:
            axes.text(horizon * 0.01, y, "grew nothing", va="center", fontsize=8, alpha=0.7)
    axes.set_xlim(0, horizon)
    _name_rows(axes, [(name, colour) for name, colour, _ in rows])
    axes.invert_yaxis()
    axes.set_xlabel("decision")


def timeline_rows(
    results: Mapping[str, Any], task: str, rng_seed: int
) -> list[tuple[str, str, list[Mapping[str, Any]]]]:
    """Seeds of some controllers on one host (name, colour, seeds), one row per controller and slot."""
    colours, rows = row_colours(results), list[tuple[str, str, list[Mapping[str, Any]]]]()
    here = {e["controller"]: e for e in results["episodes"] if (e["task"], e["rng_seed"]) == (task, rng_seed)}
    for label in _shown_in_timelines(results):
        slots: dict[str, list[Mapping[str, Any]]] = {}
        for seed in sorted(here[label]["seeds"], key=lambda seed: seed["germinated"]):
            slots.setdefault(seed["slot"], []).append(seed)
        rows += [(f"{label}: {slot}", colours[label], slots[slot]) for slot in sorted(slots)] or [
            (label, colours[label], [])
        ]
    return rows


def _shown_in_timelines(results: Mapping[str, Any]) -> list[str]:
    """The first controller of every learned row; then others that grew something, while there is room."""
    groups, rows = Groups.of_results(results), played_rows(results)
    learned = groups.learned(rows)
    grown = {episode["controller"] for episode in results["episodes"] if episode["seeds"]}
    others = [row for row in rows if row not in learned and groups.members(row)[0] in grown]
    chosen = [*learned, *others][: max(MAX_TIMELINES, len(learned))]
    return [groups.members(row)[0] for row in chosen]


def _count_in_factors(axes: Axes, axis: Axis) -> None:
    """Label an axis in doublings with factors; whole doublings if several fit."""
    from matplotlib.ticker import MaxNLocator

    low, high = axes.get_xlim() if axis is axes.xaxis else axes.get_ylim()
    axis.set_major_locator(MaxNLocator(5, integer=high - low > 1.5))
    axis.set_major_formatter(times)


def _name_rows(axes: Axes, names: Sequence[tuple[str, str]]) -> None:
    axes.set_yticks(range(len(names)), [name for name, _ in names])
    for tick, (_, colour) in zip(axes.get_yticklabels(), names, strict=True):
        tick.set_color(colour)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(-0.6, len(names) - 0.4)
    axes.spines["left"].set_visible(False)


def parameter_doublings(episodes: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Mean number of doublings of the host's parameters by controller."""
    doublings: dict[str, list[float]] = {}
    for episode in episodes:
        ratio = episode["parameters"] / episode["host_parameters"]
        doublings.setdefault(episode["controller"], []).append(math.log2(ratio))
    return {label: float(np.mean(values)) for label, values in doublings.items()}


def compute_doublings(table: Table) -> dict[str, float]:
    """Mean log2 of each controller's FLOPs relative to the lowest on the same host."""
    least = np.minimum.reduce([columns["flops"] for columns in table.values()])
    return {label: float(np.log2(columns["flops"] / least).mean()) for label, columns in table.items()}
