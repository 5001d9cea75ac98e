"""The report of an evaluation: which controller is better, how certain that is, and what grew."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from simic.dashboard import evaluation_charts as charts
from simic.dashboard.charts import FATES, Chart, draw_chart, lines_height, rows_height
from simic.dashboard.page import Cell, Table, format_amount, legend, write_page
from simic.evaluation.groups import Groups
from simic.evaluation.output import FORMAT, MAIN_FIGURE, curve_warnings, describe_front
from simic.evaluation.statistics import score_table
from simic.storage.json_files import read_json

FEW_HOSTS = 20
"""With fewer the bootstrap has too little to draw from."""
MAX_HOSTS = 4
"""Hosts whose growth is shown."""
GREY = "#8A8A8A"
"""Of wider hosts that are left out of other charts, as not every task has them."""
MAX_BYTES, MAX_VALUES = 2**27, 4_000_000
"""Of a results.json: an evaluation of some 25,000 hosts."""

Results = dict[str, Any]


def write_evaluation_report(results: Results, path: Path) -> None:
    """One HTML file that needs nothing else."""
    try:
        settings = {key: results[key] for key in ("settings", "versions", "tasks", "rng_seeds")}
        context = {"command": results["command"], "settings": json.dumps(settings, indent=1), "hosts": ""}
        if results["episodes"]:
            context |= _context(results)
    except (KeyError, TypeError, AttributeError, IndexError, ZeroDivisionError, OverflowError) as error:
        what = f"{type(error).__name__}: {error!s:.80}"
        raise ValueError(f"these are not whole results of simic evaluate ({what}); run it again") from None
    write_page(path, "evaluation.html", "Comparison of controllers", **context)


def read_results(path: Path) -> Results:
    """The results that `simic evaluate` wrote to a file."""
    results = read_json(path, max_bytes=MAX_BYTES, max_values=MAX_VALUES, remedy="run simic evaluate again")
    if not isinstance(results, dict) or results.get("format") != FORMAT:
        raise ValueError(f"{path} is not of format {FORMAT}, which this simic reads; run simic evaluate again")
    return results


def verdict(label: str, other: str, estimate: Mapping[str, float]) -> str:
    """A paired difference in score, in words."""
    if estimate["low"] > 0:
        found = f"{label} is better than {other}"
    elif estimate["high"] < 0:
        found = f"{label} is worse than {other}"
    else:
        found = f"no clear difference between {label} and {other}"
    return (
        f"{found}: {estimate['mean']:+.2f} points of {MAIN_FIGURE} (95 % interval {estimate['low']:+.2f} to "
        f"{estimate['high']:+.2f}); a run of {label} beats one of {other} on the same task with probability "
        f"{estimate['probability']:.2f}."
    )


def _context(results: Results) -> dict[str, Any]:
    """Everything that the template shows of an evaluation with episodes."""
    groups = Groups.of_results(results)
    rows = groups.rows(results["summary"]["controllers"])
    members = [label for label in results["summary"]["controllers"] if label in groups.owner]
    learned = groups.learned(rows)
    verdicts = [
        [verdict(label, other, paired["score"]) for other, paired in _rivals(results, label).items()]
        for label in learned
    ]
    return {
        "hosts": f"{len(results['tasks'])} tasks, {len(results['rng_seeds'])} rng seeds each",
        "few_hosts": len(results["tasks"]) * len(results["rng_seeds"]) < FEW_HOSTS,
        "notes": results.get("notes", ()),
        "main_measure": MAIN_FIGURE,
        "verdicts": [said for said in verdicts if said],
        "controllers": _summary_table(results, rows),
        "members": _summary_table(results, members),
        "paired_charts": list(_paired_charts(results, learned)),
        "paired": _paired_table(results, learned),
        "paired_members": _paired_table(results, groups.learned(members)),
        "compute_curve": _compute_curve(results),
        "chart_sections": _chart_sections(results),
        "by_task": _by_task(results),
        "timelines": list(_timelines(results)),
        "fates": legend(FATES.items()),
    }


def _summary_table(results: Results, labels: Sequence[str]) -> Table:
    """One row per controller or group, best first."""
    summary, groups, rows = results["summary"]["controllers"], Groups.of_results(results), []
    for label in sorted(labels, key=lambda label: -summary[label]["score"]["mean"]):
        own, score = summary[label], summary[label]["score"]
        middle = f"{score['iqm']:.2f} [{score['iqm_low']:.2f}, {score['iqm_high']:.2f}]"
        points = [_interval(score), middle, _interval(own["metric"]), _interval(own["area"])]
        sizes = [
            f"{format_amount(cost['mean'])} [{format_amount(cost['low'])}, {format_amount(cost['high'])}]"
            for cost in (own["parameters"], own["flops"])
        ]
        pooled = label in groups.groups
        what = f"{', '.join(groups.members(label))}, judged as one" if pooled else groups.about(label)["description"]
        rows.append([_named(results, label), *points, *sizes, what])
    columns = ["test metric", "area", "parameters", "compute", "what it is"]
    return Table(["controller", MAIN_FIGURE, "interquartile mean of the score", *columns], rows)


def _interval(estimate: Mapping[str, float], form: str = ".2f") -> str:
    return f"{estimate['mean']:{form}} [{estimate['low']:{form}}, {estimate['high']:{form}}]"


def _named(results: Results, label: str) -> Cell:
    return {"text": label, "colour": charts.row_colours(results)[label]}


def _rivals(results: Results, label: str) -> dict[str, Any]:
    """The paired differences of a learned controller; those of a group leave out members of groups."""
    groups, paired = Groups.of_results(results), results["summary"]["paired"][label]
    alone = label in groups.owner
    return {other: estimates for other, estimates in paired.items() if alone or other not in groups.owner}


def _paired_charts(results: Results, labels: Sequence[str]) -> Iterator[Chart]:
    colours = charts.row_colours(results)
    for label in labels:
        rows = [(other, colours[other], paired["score"]) for other, paired in _rivals(results, label).items()]
        if rows:
            title = f"{MAIN_FIGURE.capitalize()} of {label}"
            yield draw_chart(partial(charts.differences, rows=rows), title, size=(5, rows_height(len(rows))))


def _paired_table(results: Results, labels: Sequence[str]) -> Table:
    header = ["controller", "minus", MAIN_FIGURE, "better?", "P(score higher)", "test metric", "compute", "parameters"]
    rows = []
    for label in labels:
        for other, paired in _rivals(results, label).items():
            score = paired["score"]
            names = [_named(results, label), _named(results, other)]
            factors = [charts.times(paired[name]["mean"]) for name in ("log2_flops", "log2_parameters")]
            probability, metric = f"{score['probability']:.2f}", _interval(paired["metric"], "+.2f")
            rows.append([*names, _interval(score, "+.2f"), _mark(score), probability, metric, *factors])
    return Table(header, rows)


def _mark(estimate: Mapping[str, float]) -> Cell:
    if estimate["low"] > 0:
        return {"text": "better", "kind": "good"}
    return {"text": "worse", "kind": "bad"} if estimate["high"] < 0 else "unclear"


def _compute_curve(results: Results) -> dict[str, Any] | None:
    """Chart, table and sentences of the test metric against training compute, if wider hosts were compared."""
    curve = results.get("compute_curve")
    if curve is None:
        return None
    colours, rows = charts.row_colours(results), []
    colours |= {label: GREY for label in curve["curve"] if label not in colours}  # left out of the other tables
    for point in curve["points"]:
        equal, gain = point["metric_at_equal_compute"], point["gain_at_equal_compute"]
        figures = [_interval(point["metric"]), _interval(point["gain_over_host"], "+.2f"), describe_front(point)]
        figures += [_interval(equal), _interval(gain, "+.2f"), _mark(gain)] if equal else ["", "", ""]
        name: Cell = {"text": point["controller"], "colour": colours[point["controller"]]}
        rows.append([name, charts.times(point["log2_compute"]["mean"]), *figures])
    draw = partial(charts.compute_curve, curve=curve, colours=colours)
    title, size = "Test metric minus the host's, against training compute", (5, lines_height(len(rows)))
    caption = "Line: hosts wider from the start. Ringed: the Pareto front. Bars: 95 % intervals."
    header = ["controller", "compute", "test metric", "minus host", "on the front"]
    header += ["wider host of equal compute", "gain at equal compute", "better?"]
    return {
        "chart": draw_chart(draw, title, caption, size=size),
        "table": Table(header, rows),
        "warnings": curve_warnings(curve, len(results["tasks"])),
    }


def _chart_sections(results: Results) -> list[tuple[str, list[Chart]]]:
    series, scores = charts.make_series(results), score_table(results["episodes"])
    rows, lines = (5, rows_height(len(series))), (5, lines_height(len(series)))
    curves = partial(charts.curves, results=results, series=series)
    frontier = partial(charts.frontier, series=series, table=scores)
    growth, compute = charts.parameter_doublings(results["episodes"]), charts.compute_doublings(scores)
    against, dotted = f"{MAIN_FIGURE.capitalize()} against", "Dotted: the Pareto frontier."
    distribution = partial(charts.distribution, series=series, table=scores)
    profile = partial(charts.profile, series=series, table=scores)
    bands = "Performance profile with 95 % bands; names are in order of mean score."
    mean, logarithm = "Mean over all hosts.", "Mean of the logarithm."
    sections = {
        "Learning curves": [
            (partial(curves, name="val_curve"), "Validation metric, points", mean, lines),
            (partial(curves, name="parameter_curve"), "Parameters, times the host's", logarithm, lines),
        ],
        "Cost of a score": [
            (partial(frontier, costs=growth), f"{against} parameters, times the host's", dotted, lines),
            (partial(frontier, costs=compute), f"{against} training compute, times the least", dotted, lines),
        ],
        "Spread": [
            (distribution, "Mean score over tasks, by rng seed", "One point per rng seed; the bar is the mean.", rows),
            (profile, "Share of runs above a score", bands, lines),
        ],
    }
    return [
        (heading, [draw_chart(draw, title, caption, size=size) for draw, title, caption, size in drawn])
        for heading, drawn in sections.items()
    ]


def _by_task(results: Results) -> Table:
    scores, series, rows = score_table(results["episodes"]), charts.make_series(results), []
    means = np.stack([own.scores(scores).mean((0, 2)) for own in series])  # (rows of the tables, tasks)
    for task, column in zip(sorted(set(results["tasks"])), means.T, strict=True):
        cells = [{"text": f"{mean:.1f}", "kind": "best"} if mean == column.max() else f"{mean:.1f}" for mean in column]
        rows.append([task, *cells])
    return Table(["task", *(own.name for own in series)], rows)


def _timelines(results: Results) -> Iterator[Chart]:
    """The growth of a few hosts, spread over the tasks."""
    tasks, rng_seed = results["tasks"], results["rng_seeds"][0]
    horizon = max(len(episode["val_curve"]) - 1 for episode in results["episodes"])
    for index in np.unique(np.linspace(0, len(tasks) - 1, MAX_HOSTS).astype(int)):
        rows = charts.timeline_rows(results, tasks[index], rng_seed)
        if rows:
            draw = partial(charts.timeline, rows=rows, horizon=horizon)
            yield draw_chart(draw, f"{tasks[index]}, rng seed {rng_seed}", size=(5, rows_height(len(rows))))
