"""The report of an evaluation: who is better, how surely, and what they grew. From results.json to one HTML file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from simic.evaluation import figures
from simic.evaluation.page import (
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
from simic.evaluation.statistics import score_table
from simic.json_files import read_json

FEW_HOSTS = 20
"""Below this the bootstrap has too little to draw from."""
MAX_HOSTS = 4
"""Hosts whose growth is shown."""


MAX_RESULTS_BYTES = 2**26
"""Of results.json; an evaluation of 10,000 hosts stays below."""


def write_evaluation_report(results: dict[str, Any], path: Path) -> None:
    """One HTML file that needs nothing else."""
    try:
        parts = list(_parts(results))
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        what = f"{type(error).__name__}: {error}"
        raise ValueError(f"these are not whole results of simic evaluate ({what}); run it again") from None
    write_page(path, "Comparison of controllers", parts)


def read_results(path: Path) -> dict[str, Any]:
    """What `simic evaluate` left in a file."""
    try:
        results = read_json(path, max_bytes=MAX_RESULTS_BYTES, remedy="run simic evaluate again")
    except ValueError as error:
        raise ValueError(f"{path} is not whole ({error})") from None
    if not isinstance(results, dict) or results.get("format") != 1:
        raise ValueError(f"{path} is not of format 1, which this simic reads; run simic evaluate again")
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
        f"{found}: {figure['mean']:+.2f} points of score (95 % interval {figure['low']:+.2f} to "
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
    judged, members = _judged(results)
    for label in judged:
        if rivals := _rivals(results, label):
            yield listing(verdict(label, other, figure["score"]) for other, figure in rivals.items())
    yield section("Controllers", _headline(results), paragraph(HEADLINE_NOTE, "note"))
    yield from _paired(results, judged, members)
    yield from _charts(results)
    yield section("By task", paragraph("Mean score; the best of each task is bold.", "note"), _by_task(results))
    yield from _growth(results)
    yield from _origin(results)


HEADLINE_NOTE = (
    "Interquartile mean [95 % stratified bootstrap interval], best score first. Score: test metric in points (percent) "
    "minus 1 for every doubling of the host's parameters. Area: mean validation metric over the episode. "
    "Compute: floating-point operations of training."
)


def _headline(results: dict[str, Any]) -> Html:
    summary = results["summary"]["controllers"]
    rows = []
    for label in sorted(summary, key=lambda label: -summary[label]["score"]["iqm"]):
        figure = summary[label]
        points = [_interval(figure[name]) for name in ("score", "metric", "area")]
        costs = (figure["parameters"], figure["flops"])
        sizes = [f"{amount(f['iqm'])} [{amount(f['low'])}, {amount(f['high'])}]" for f in costs]
        about = results["controllers"].get(label, {"description": "all of that kind, judged as one"})
        rows.append([_named(results, label), *points, *sizes, about["description"]])
    return table(["controller", "score", "test metric", "area", "parameters", "compute", "what it is"], rows)


def _interval(figure: Mapping[str, float], middle: str = "iqm", form: str = ".2f") -> str:
    return f"{figure[middle]:{form}} [{figure['low']:{form}}, {figure['high']:{form}}]"


def _kind(results: dict[str, Any], label: str) -> str:
    """Of a controller; a group is named after its kind, or is one of learned ones."""
    if label in results["controllers"]:
        return results["controllers"][label]["kind"]
    return label if label in figures.KINDS else "learned"


def _named(results: dict[str, Any], label: str) -> Html:
    return swatch(label, figures.COLOURS.get(_kind(results, label), figures.PALETTE[0]))


def _judged(results: dict[str, Any]) -> tuple[list[str], list[str]]:
    """The learned controllers: those to judge in full (groups, if there are some), and the others."""
    learned = [label for label in results["summary"]["controllers"] if _kind(results, label) == "learned"]
    groups = [label for label in learned if label not in results["controllers"]]
    return (groups, [label for label in learned if label not in groups]) if groups else (learned, [])


def _rivals(results: dict[str, Any], label: str) -> dict[str, Any]:
    """Whom a learned controller is paired with; a group meets groups rather than their members."""
    paired, known = results["summary"]["paired"].get(label, {}), results["controllers"]
    if label in known:
        return paired
    grouped = {_kind(results, other) for other in results["summary"]["controllers"] if other not in known}
    return {o: figure for o, figure in paired.items() if o not in known or _kind(results, o) not in grouped}


def _paired(results: dict[str, Any], judged: list[str], members: list[str]) -> Iterator[str]:
    drawn = []
    for label in judged:
        rows = [(other, _kind(results, other), f["score"]) for other, f in _rivals(results, label).items()]
        if rows:
            size = (5, figures.rows_height(len(rows)))
            drawn.append(chart(partial(figures.differences, rows=rows), f"Score of {label}", size=size))
    if drawn:
        note = (
            "Differences on the same hosts (same task, initial weights and batches), with an interval that encloses "
            "both 95 % intervals: over other hosts of these tasks, and over other tasks. Clear if it leaves 0 out."
        )
        yield section("Paired differences", paragraph(note, "note"), charts(*drawn), _paired_table(results, judged))
        if members:
            yield folded("Each policy by itself", _paired_table(results, members))


def _paired_table(results: dict[str, Any], labels: list[str]) -> Html:
    header = ["controller", "minus", "score", "better?", "P(score higher)", "test metric", "compute", "parameters"]
    rows = []
    for label in labels:
        for other, figure in _rivals(results, label).items():
            score = figure["score"]
            factors = [figures.times(figure[name]["mean"]) for name in ("log2_flops", "log2_parameters")]
            differences = [_interval(figure[name], "mean", "+.2f") for name in ("score", "metric")]
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
    series, scores = figures.make_series(results), score_table(results["episodes"])
    rows = (5, figures.rows_height(len(series)))
    draw = partial(figures.curves, results=results, series=series)
    yield section(
        "While they learn",
        charts(
            chart(partial(draw, name="val_curve"), "Validation metric, points", "Mean over all hosts."),
            chart(partial(draw, name="parameter_curve"), "Parameters, times the host's", "Mean of the logarithm."),
        ),
    )
    draw = partial(figures.frontier, series=series, table=scores)
    costs = figures.parameter_doublings(results["episodes"]), figures.compute_doublings(scores)
    dotted = "Dotted: those that no other beats in both."
    yield section(
        "What a score costs",
        charts(
            chart(partial(draw, costs=costs[0]), "Score against parameters, times the host's", dotted),
            chart(partial(draw, costs=costs[1]), "Score against training compute, times the least", dotted),
        ),
    )
    yield section(
        "How much chance there is",
        charts(
            chart(
                partial(figures.distribution, series=series, table=scores),
                "Mean score over tasks, by rng seed",
                "One point per rng seed; the bar is their mean.",
                size=rows,
            ),
            chart(
                partial(figures.profile, series=series, table=scores),
                "Share of runs above a score",
                "Performance profile with 95 % bands; names are in the order of mean scores.",
            ),
        ),
    )


def _by_task(results: dict[str, Any]) -> Html:
    scores = score_table(results["episodes"])
    labels = list(scores)
    means = np.concatenate([scores[label]["score"].mean(2) for label in labels])  # (controllers, K)
    rows = []
    for task, column in zip(sorted(set(results["tasks"])), means.T, strict=True):
        cells = [Html(f"<b>{mean:.1f}</b>") if mean == column.max() else f"{mean:.1f}" for mean in column]
        rows.append([task, *cells])
    return table(["task", *labels], rows)


def _growth(results: dict[str, Any]) -> Iterator[str]:
    tasks, rng_seed = results["tasks"], results["rng_seeds"][0]
    chosen = [tasks[i] for i in np.unique(np.linspace(0, len(tasks) - 1, MAX_HOSTS).astype(int))]
    horizon = max(len(episode["val_curve"]) - 1 for episode in results["episodes"])
    drawn = []
    for task in chosen:
        rows = figures.timeline_rows(results, task, rng_seed)
        if rows:
            draw = partial(figures.timeline, rows=rows, horizon=horizon)
            drawn.append(chart(draw, f"{task}, rng seed {rng_seed}", size=(5, figures.rows_height(len(rows)))))
    if drawn:
        fates = [swatch(f"{fate}. ", colour) for fate, colour in figures.FATES.items()]
        note = (
            "Who grew what, in which slot, from germination to its end, with the contribution in points; "
            "darker from fossilisation on. "
        )
        yield section("Growth of some hosts", Html(f'<p class="note">{note}{"".join(fates)}</p>'), charts(*drawn))


def _origin(results: dict[str, Any]) -> Iterator[str]:
    settings = {key: results[key] for key in ("settings", "versions", "tasks", "rng_seeds")}
    yield section("Command", preformatted(results["command"]))
    yield folded("Settings and versions", preformatted(json.dumps(settings, indent=1)))
