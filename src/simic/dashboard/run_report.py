"""The report of a training run: what it learned, how it decided, what it grew. From events to one HTML file."""

from __future__ import annotations

import json
import math
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from simic.dashboard.evaluation_charts import FATES, rows_height
from simic.dashboard.page import (
    INK,
    Html,
    chart,
    charts,
    colours,
    folded,
    label_ends,
    paragraph,
    preformatted,
    section,
    swatch,
    table,
    write_page,
)
from simic.telemetry.events import (
    Anomaly,
    GamingSuspicion,
    GovernorRollback,
    LifecycleChange,
    PhaseTimings,
    RunFinished,
    RunStarted,
    Update,
    WorkerFault,
)
from simic.telemetry.reader import read_events

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CURVES = {
    "score": ("Score, points", ("score",)),
    "gain": ("Score less that of the host alone, points", ("gain",)),
    "episode_return": ("Return of an episode", ("episode_return",)),
    "growth": ("Growth, doublings of the host", ("growth",)),
    "entropy": ("Entropy of an action, nats", ("entropy",)),
    "kl": ("KL of an update, nats", ("kl", "kl_after")),
    "explained_variance": ("Explained variance of returns", ("explained_variance",)),
    "loss": ("Imitation: loss, nats", ("loss",)),
    "head_accuracy/op": ("Imitation: how often the operation is right", ("head_accuracy/op",)),
    "q_loss": ("Offline: losses", ("q_loss", "value_loss")),
}
"""Charts by the figure that a run must have; what they mean is in docs/metrics.md."""
MAX_ANOMALIES = 50
MAX_POINTS = 100_000
"""Of a curve; a run has as many updates, and the longest have some thousands."""


@dataclass
class Story:
    """What a run told so far."""

    updates: dict[int, Mapping[str, float]] = field(default_factory=dict)
    fates: Counter[tuple[int, str, str]] = field(default_factory=Counter)
    """How many seeds (update, blueprint, fate)."""
    incidents: list[tuple[int, str, str, str]] = field(default_factory=list)
    """Update, what, where, details."""
    gaming: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Suspicions by reason and blueprint."""
    timings: dict[int, Mapping[str, float]] = field(default_factory=dict)
    started: list[RunStarted] = field(default_factory=list)
    finished: RunFinished | None = None


def write_run_report(run: Path, path: Path) -> None:
    """One HTML file about a run, which may still be going on."""
    write_page(path, f"Training run {run.resolve().name}", _parts(read_story(run)))


def read_story(run: Path) -> Story:
    """Fold the events of a run."""
    story = Story()
    for event in read_events(run):
        if max(map(len, (story.updates, story.fates, story.incidents, story.gaming, story.timings))) > MAX_POINTS:
            raise ValueError(f"{run} tells of more than {MAX_POINTS:,} updates or incidents: that is no run of simic's")
        match event:
            case Update():
                story.updates[event.update] = event.metrics
            case LifecycleChange():
                fate = "germinated" if event.reason == "germinate" else event.new_stage
                story.fates[event.update, event.blueprint, fate] += 1
            case Anomaly():
                details = f"{event.value:.4g}, limit {event.threshold:.4g}"
                story.incidents.append((event.update, event.name, event.where, details))
            case GovernorRollback():
                where = f"group {event.group}, host {event.env}, decision {event.decision}"
                story.incidents.append(
                    (event.update, f"rollback: {event.verdict}", where, f"loss {event.val_loss:.4g}")
                )
            case WorkerFault():
                story.incidents.append((event.update, "worker fault", f"group {event.group}", event.error))
            case GamingSuspicion():
                story.gaming[event.reason, event.blueprint] += 1
            case PhaseTimings():
                story.timings[event.update] = event.seconds
            case RunStarted():
                story.started.append(event)
                story.finished = None
            case RunFinished():
                story.finished = event
    return story


def _parts(story: Story) -> Iterator[str]:
    yield paragraph(_status(story))
    if story.updates:
        yield section("Learning", charts(*_curves(story.updates)), paragraph(METRICS_NOTE, "note"))
        if any(name.startswith("op/") for name in next(iter(story.updates.values()))):
            yield section(
                "Decisions", charts(chart(partial(_draw_mix, updates=story.updates), "Operations, share of decisions"))
            )
    if story.fates:
        yield from _seeds(story)
    yield section("Anomalies", *_incidents(story))
    if story.timings:
        yield section("Time", _timings(story.timings))
    for start in story.started[-1:]:
        about = {"versions": start.versions, "git_commit": start.git_commit, "rng_seeds": start.rng_seeds}
        yield section("Command", preformatted(shlex.join(start.command)))
        yield folded("Settings", preformatted(json.dumps(start.config, indent=1)))
        yield folded("Versions", preformatted(json.dumps(about | {"threads": start.threads}, indent=1)))


METRICS_NOTE = (
    "Points are single updates, lines their mean over a tenth of the run. docs/metrics.md says what is healthy."
)


def _status(story: Story) -> str:
    done = f"{len(story.updates)} updates are on record"
    if story.started:
        config = story.started[-1].config
        done += f" of {config.get('updates', '?')}; {config.get('algorithm', '?')} on {config.get('task', '?')}"
    if len(story.started) > 1:
        done += f"; {len(story.started)} processes worked on it"
    if story.finished is None:
        return f"{done}. It is still running, or was killed."
    reason = f" ({story.finished.reason})" if story.finished.reason else ""
    return f"{done}. It ended as {story.finished.status}{reason}."


def _curves(updates: Mapping[int, Mapping[str, float]]) -> Iterator[str]:
    for needed, (title, names) in CURVES.items():
        found = {name: _column(updates, name) for name in names}
        if np.isfinite(found[needed][1]).any():
            yield chart(partial(_draw_curves, columns=found), title, size=(5, 2.8))


def _column(updates: Mapping[int, Mapping[str, float]], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Updates, and a figure of each; NaN where it was not measured."""
    values = np.array([updates[update].get(name, math.nan) for update in updates], float)
    return np.array(list(updates)), np.where(np.isfinite(values), values, np.nan)


def _draw_curves(axes: Axes, columns: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> None:
    ends = []
    for (name, (x, y)), colour in zip(columns.items(), colours(list(columns)).values(), strict=True):
        known = np.isfinite(y)
        if not known.any():
            continue
        x, y = x[known], y[known]
        smooth = running_mean(y, max(1, len(y) // 10))
        axes.plot(x, y, "o", color=colour, markersize=3, alpha=0.4)
        axes.plot(x, smooth, color=colour)
        ends.append((float(x[-1]), float(smooth[-1]), f"{smooth[-1]:.3g}" if len(columns) == 1 else name, colour))
    label_ends(axes, ends)
    axes.set_xlabel("update")


def running_mean(values: np.ndarray, width: int) -> np.ndarray:
    """Mean of the last `width` values, of fewer at the start."""
    total = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - width, 0)
    return (total[ends] - total[starts]) / (ends - starts)


def _draw_mix(axes: Axes, updates: Mapping[int, Mapping[str, float]]) -> None:
    names = [name for name in next(iter(updates.values())) if name.startswith("op/")]
    names.sort(key=lambda name: -np.nanmean(_column(updates, name)[1]))
    shares = np.stack([np.nan_to_num(_column(updates, name)[1]) for name in names])
    shades = colours(names)
    x = np.array(list(updates))
    if len(x) == 1:
        x, shares = np.array([x[0] - 0.5, x[0] + 0.5]), shares.repeat(2, 1)
    axes.stackplot(x, shares, colors=list(shades.values()), alpha=0.8, linewidth=0)
    axes.set_ylim(0, 1)
    middles = shares[:, -1].cumsum() - shares[:, -1] / 2
    ops = [f"{name.removeprefix('op/')} {share:.0%}" for name, share in zip(names, shares[:, -1], strict=True)]
    label_ends(axes, list(zip([x[-1]] * len(ops), middles, ops, shades.values(), strict=True)))
    axes.set_xlabel("update")


def _seeds(story: Story) -> Iterator[str]:
    seen = sorted({update for update, _, _ in story.fates})
    half = seen[len(seen) // 2]
    spans: list[tuple[str, Callable[[int], bool]]] = [("All updates", lambda update: True)]
    if len(seen) > 1:
        spans = [
            (f"Updates {seen[0]} to {half - 1}", lambda update: update < half),
            (f"Updates {half} to {seen[-1]}", lambda update: update >= half),
        ]
    order = [blueprint for blueprint, _ in _by_blueprint(story, lambda update: True)]
    drawn = []
    for title, inside in spans:
        rows = dict(_by_blueprint(story, inside))
        bars = [(blueprint, rows.get(blueprint, Counter())) for blueprint in order]
        drawn.append(chart(partial(_draw_fates, rows=bars), title, size=(5, rows_height(len(bars)))))
    legend = "".join(swatch(f"{FATE_NAMES[fate]} ", colour) for fate, colour in FATES.items())
    yield section(
        "Seeds by blueprint", Html(f'<p class="note">Seeds that germinated, by fate: {legend}</p>'), charts(*drawn)
    )
    if story.gaming:
        rows = [(reason, blueprint, count) for (reason, blueprint), count in sorted(story.gaming.items())]
        yield folded("Seeds suspected to look better than they are", table(["reason", "blueprint", "times"], rows))


FATE_NAMES = {"fossilized": "fossilised", "pruned": "pruned", "live": "undecided when the episode ended"}


def _by_blueprint(story: Story, inside: Callable[[int], bool]) -> list[tuple[str, Counter[str]]]:
    """Counts by fate of each blueprint, the commonest last."""
    counts: dict[str, Counter[str]] = {}
    for (update, blueprint, fate), count in story.fates.items():
        if inside(update) and fate in ("germinated", "fossilized", "pruned"):
            counts.setdefault(blueprint, Counter())[fate] += count
    for own in counts.values():
        own["live"] = max(0, own["germinated"] - own["fossilized"] - own["pruned"])
    return sorted(counts.items(), key=lambda item: (item[1]["germinated"], item[0]))


def _draw_fates(axes: Axes, rows: Sequence[tuple[str, Counter[str]]]) -> None:
    left = np.zeros(len(rows))
    for fate, colour in FATES.items():
        widths = np.array([counts[fate] for _, counts in rows], float)
        axes.barh(range(len(rows)), widths, left=left, color=colour, height=0.75)
        left += widths
    for y, (_, counts) in enumerate(rows):
        kept = counts["fossilized"] / max(1, counts["germinated"])
        axes.text(left[y], y, f" {kept:.0%} kept", va="center", fontsize=8, color=INK)
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.margins(x=0.16)
    axes.set_xlabel("seeds")


def _incidents(story: Story) -> Iterator[str]:
    if not story.incidents:
        yield paragraph("None.")
        return
    named = Counter(what for _, what, _, _ in story.incidents)
    yield paragraph(", ".join(f"{what}: {count}" for what, count in named.most_common()))
    last = sorted(story.incidents, key=lambda incident: incident[0])[-MAX_ANOMALIES:]
    yield folded(f"The last {len(last)}", table(["update", "what", "where", "details"], last))


def _timings(timings: Mapping[int, Mapping[str, float]]) -> Html:
    total: Counter[str] = Counter()
    for seconds in timings.values():
        total.update(seconds)
    whole = sum(total.values()) or 1.0
    rows = [(name, f"{s:.1f}", f"{s / len(timings):.3f}", f"{s / whole:.1%}") for name, s in total.most_common()]
    return table(["phase", "seconds", "per update", "share"], rows)
