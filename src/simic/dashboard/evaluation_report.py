"""The report of an evaluation: who is better, how surely, and what they grew. From results.json to one HTML file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from simic.dashboard import evaluation_charts
from simic.dashboard.page import (
    Html,
    amount,
    chart,
    charts,
    folded,
    listing,
    paragraph,
    preformatted,
    section,
    swatch,
    table,
    write_page,
)
from simic.evaluation.groups import Groups
from simic.evaluation.output import FORMAT, MAIN_FIGURE
from simic.evaluation.statistics import score_table
from simic.storage.json_files import read_json

FEW_HOSTS = 20
"""Below this the bootstrap has too little to draw from."""
MAX_HOSTS = 4
"""Hosts whose growth is shown."""
MAX_BYTES, MAX_VALUES = 2**27, 4_000_000
"""Of a results.json: an evaluation of some 25,000 hosts."""


def write_evaluation_report(results: dict[str, Any], path: Path) -> None:
    """One HTML file that needs nothing else."""
    try:
        parts = list(_parts(results))
    except (KeyError, TypeError, AttributeError, IndexError, ZeroDivisionError, OverflowError) as error:
        what = f"{type(error).__name__}: {error!s:.80}"
        raise ValueError(f"these are not whole results of simic evaluate ({what}); run it again") from None
    write_page(path, "Comparison of controllers", parts)


def read_results(path: Path) -> dict[str, Any]:
    """What `simic evaluate` left in a file."""
    results = read_json(path, max_bytes=MAX_BYTES, max_values=MAX_VALUES, remedy="run simic evaluate again")
    if not isinstance(results, dict) or results.get("format") != FORMAT:
        raise ValueError(f"{path} is not of format {FORMAT}, which this simic reads; run simic evaluate again")
    return results


def verdict(label: str, other: str, figure: Mapping[str, float]) -> str:
    """What a paired difference in score means, in words."""
    if figure["low"] > 0:
        found = f"{label} is better than {other}"
    elif figure["high"] < 0:
        found = f"{label} is worse than {other}"
    else:
        found = f"no clear difference between {label} and {other}"
    return (
        f"{found}: {figure['mean']:+.2f} points of {MAIN_FIGURE} (95 % interval {figure['low']:+.2f} to "
        f"{figure['high']:+.2f}); a run of {label} beats one of {other} on the same task with probability "
        f"{figure['probability']:.2f}."
    )


def _parts(results: dict[str, Any]) -> Iterator[str]:
    if not results["episodes"]:
        yield paragraph("Nobody was evaluated.")
        yield from _origin(results)
        return
    hosts = f"{len(results['tasks'])} tasks, {len(results['rng_seeds'])} rng seeds each"
    yield paragraph(f"All controllers led the same fresh hosts ({hosts}); figures are of the test split.", "note")
    if len(results["tasks"]) * len(results["rng_seeds"]) < FEW_HOSTS:
        yield paragraph("These are few hosts: intervals are too narrow, and verdicts no more than hints.")
    for note in results.get("notes", ()):
        yield paragraph(note)
    groups = Groups.of_results(results)
    rows = groups.rows(results["summary"]["controllers"])
    for label in groups.learned(rows):
        if rivals := _rivals(results, label):
            yield listing(verdict(label, other, figure["score"]) for other, figure in rivals.items())
    yield section("Controllers", _headline(results, rows), paragraph(HEADLINE_NOTE, "note"))
    members = [label for label in results["summary"]["controllers"] if label in groups.owner]
    if members:
        yield folded("The members of each group", _headline(results, members))
    yield from _paired(results, groups.learned(rows), groups.learned(members))
    yield from _charts(results)
    note = f"{MAIN_FIGURE.capitalize()}; the best of each task is bold."
    yield section("By task", paragraph(note, "note"), _by_task(results))
    yield from _growth(results)
    yield from _origin(results)


HEADLINE_NOTE = (
    f"Means over all hosts [95 % stratified bootstrap interval], best {MAIN_FIGURE} first. Score: test metric in "
    "points (percent) minus 1 for every doubling of the host's parameters. Interquartile mean: of the score, without "
    "the lowest and the highest quarter of hosts; all comparisons are of means. Area: mean validation metric over the "
    "episode. Compute: floating-point operations of training."
)


def _headline(results: dict[str, Any], labels: list[str]) -> Html:
    summary, groups, rows = results["summary"]["controllers"], Groups.of_results(results), []
    for label in sorted(labels, key=lambda label: -summary[label]["score"]["mean"]):
        figure = summary[label]
        score = figure["score"]
        middle = f"{score['iqm']:.2f} [{score['iqm_low']:.2f}, {score['iqm_high']:.2f}]"
        points = [_interval(score), middle, _interval(figure["metric"]), _interval(figure["area"])]
        costs = (figure["parameters"], figure["flops"])
        sizes = [f"{amount(f['mean'])} [{amount(f['low'])}, {amount(f['high'])}]" for f in costs]
        alone = label not in groups.groups
        what = groups.about(label)["description"] if alone else f"{', '.join(groups.members(label))}, judged as one"
        rows.append([_named(results, label), *points, *sizes, what])
    columns = ["test metric", "area", "parameters", "compute", "what it is"]
    return table(["controller", MAIN_FIGURE, "interquartile mean of the score", *columns], rows)


def _interval(figure: Mapping[str, float], form: str = ".2f") -> str:
    return f"{figure['mean']:{form}} [{figure['low']:{form}}, {figure['high']:{form}}]"


def _named(results: dict[str, Any], label: str) -> Html:
    return swatch(label, evaluation_charts.row_colours(results)[label])


def _rivals(results: dict[str, Any], label: str) -> dict[str, Any]:
    """The rows that a learned controller is paired with, and what derives from it."""
    groups, paired = Groups.of_results(results), results["summary"]["paired"][label]
    alone = label in groups.owner
    return {other: figure for other, figure in paired.items() if alone or other not in groups.owner}


def _paired(results: dict[str, Any], judged: list[str], members: list[str]) -> Iterator[str]:
    drawn, colours = [], evaluation_charts.row_colours(results)
    for label in judged:
        rows = [(other, colours[other], f["score"]) for other, f in _rivals(results, label).items()]
        if rows:
            size, title = (5, evaluation_charts.rows_height(len(rows))), f"{MAIN_FIGURE.capitalize()} of {label}"
            drawn.append(chart(partial(evaluation_charts.differences, rows=rows), title, size=size))
    if drawn:
        note = (
            "Mean differences on the same hosts (same task, initial weights and batches), with an interval that "
            "encloses both 95 % intervals: over other hosts of these tasks, and over other tasks. Clear if it leaves "
            "0 out."
        )
        yield section("Paired differences", paragraph(note, "note"), charts(*drawn), _paired_table(results, judged))
        if members:
            yield folded("Each policy by itself", _paired_table(results, members))


def _paired_table(results: dict[str, Any], labels: list[str]) -> Html:
    header = ["controller", "minus", MAIN_FIGURE, "better?", "P(score higher)", "test metric", "compute", "parameters"]
    rows = []
    for label in labels:
        for other, figure in _rivals(results, label).items():
            score = figure["score"]
            factors = [evaluation_charts.times(figure[name]["mean"]) for name in ("log2_flops", "log2_parameters")]
            differences = [_interval(figure[name], "+.2f") for name in ("score", "metric")]
            rows.append(
                [
                    *(_named(results, label), _named(results, other), differences[0], _mark(score)),
                    *(f"{score['probability']:.2f}", differences[1], *factors),
                ]
            )
    return table(header, rows)


def _mark(figure: Mapping[str, float]) -> Html:
    if figure["low"] > 0:
        return Html('<span class="good">better</span>')
    return Html('<span class="bad">worse</span>') if figure["high"] < 0 else Html("unclear")


def _charts(results: dict[str, Any]) -> Iterator[str]:
    series, scores = evaluation_charts.make_series(results), score_table(results["episodes"])
    rows, lines = (5, evaluation_charts.rows_height(len(series))), (5, evaluation_charts.lines_height(len(series)))
    draw = partial(evaluation_charts.curves, results=results, series=series)
    yield section(
        "While they learn",
        charts(
            chart(partial(draw, name="val_curve"), "Validation metric, points", "Mean over all hosts.", size=lines),
            chart(
                partial(draw, name="parameter_curve"),
                "Parameters, times the host's",
                "Mean of the logarithm.",
                size=lines,
            ),
        ),
    )
    draw = partial(evaluation_charts.frontier, series=series, table=scores)
    costs = evaluation_charts.parameter_doublings(results["episodes"]), evaluation_charts.compute_doublings(scores)
    dotted = "Dotted: those that no other beats in both."
    yield section(
        "What a score costs",
        charts(
            chart(
                partial(draw, costs=costs[0]),
                f"{MAIN_FIGURE.capitalize()} against parameters, times the host's",
                dotted,
                size=lines,
            ),
            chart(
                partial(draw, costs=costs[1]),
                f"{MAIN_FIGURE.capitalize()} against training compute, times the least",
                dotted,
                size=lines,
            ),
        ),
    )
    yield section(
        "How much chance there is",
        charts(
            chart(
                partial(evaluation_charts.distribution, series=series, table=scores),
                "Mean score over tasks, by rng seed",
                "One point per rng seed; the bar is their mean.",
                size=rows,
            ),
            chart(
                partial(evaluation_charts.profile, series=series, table=scores),
                "Share of runs above a score",
                "Performance profile with 95 % bands; names are in the order of mean scores.",
                size=lines,
            ),
        ),
    )


def _by_task(results: dict[str, Any]) -> Html:
    scores, series, rows = score_table(results["episodes"]), evaluation_charts.make_series(results), []
    means = np.stack([own.scores(scores).mean((0, 2)) for own in series])  # (rows of the tables, K)
    for task, column in zip(sorted(set(results["tasks"])), means.T, strict=True):
        cells = [Html(f"<b>{mean:.1f}</b>") if mean == column.max() else f"{mean:.1f}" for mean in column]
        rows.append([task, *cells])
    return table(["task", *(own.name for own in series)], rows)


def _growth(results: dict[str, Any]) -> Iterator[str]:
    tasks, rng_seed = results["tasks"], results["rng_seeds"][0]
    chosen = [tasks[i] for i in np.unique(np.linspace(0, len(tasks) - 1, MAX_HOSTS).astype(int))]
    horizon = max(len(episode["val_curve"]) - 1 for episode in results["episodes"])
    drawn = []
    for task in chosen:
        rows = evaluation_charts.timeline_rows(results, task, rng_seed)
        if rows:
            draw = partial(evaluation_charts.timeline, rows=rows, horizon=horizon)
            drawn.append(
                chart(draw, f"{task}, rng seed {rng_seed}", size=(5, evaluation_charts.rows_height(len(rows))))
            )
    if drawn:
        fates = [swatch(f"{fate}. ", colour) for fate, colour in evaluation_charts.FATES.items()]
        note = (
            "Who grew what, in which slot, from germination to its end, with the contribution in points; "
            "darker from fossilisation on. "
        )
        yield section("Growth of some hosts", Html(f'<p class="note">{note}{"".join(fates)}</p>'), charts(*drawn))


def _origin(results: dict[str, Any]) -> Iterator[str]:
    settings = {key: results[key] for key in ("settings", "versions", "tasks", "rng_seeds")}
    yield section("Command", preformatted(results["command"]))
    yield folded("Settings and versions", preformatted(json.dumps(settings, indent=1)))
