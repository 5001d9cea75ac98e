"""The report of a training run: learning curves, decisions, seeds, anomalies. From its events to one HTML file."""

from __future__ import annotations

import json
import math
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from simic.dashboard.charts import FATES, INK, Chart, colours, draw_chart, label_ends, rows_height
from simic.dashboard.page import Table, legend, write_page
from simic.dashboard.run_view import RunWatcher
from simic.dashboard.state import FATES as SEED_FATES
from simic.dashboard.state import Row, RunState
from simic.lifecycle.stages import STAGE_COLOURS
from simic.telemetry.events import GrowthDecision

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CURVES = {
    "score": ("Score, points", ("score",)),
    "gain": ("Score minus that of the twin that never grows, points", ("gain",)),
    "episode_return": ("Return of an episode", ("episode_return",)),
    "growth": ("Growth, doublings of the host", ("growth",)),
    "entropy": ("Entropy of an action, nats", ("entropy",)),
    "kl": ("KL divergence of an update, nats", ("kl", "kl_after")),
    "explained_variance": ("Explained variance of returns", ("explained_variance",)),
    "loss": ("Imitation: loss, nats", ("loss",)),
    "head_accuracy/op": ("Imitation: accuracy of the operation", ("head_accuracy/op",)),
    "q_loss": ("Offline: losses", ("q_loss", "value_loss")),
    "val_loss": ("Validation loss", ("val_loss",)),
    "val_accuracy": ("Validation accuracy", ("val_accuracy",)),
    "parameters": ("Parameters of host and seeds", ("parameters",)),
}
"""Charts by the metric that a run must have: title, and the metrics drawn."""
FATE_NAMES = {"fossilized": "fossilised", "pruned": "pruned", "live": "undecided when the episode ended"}
MAX_INCIDENTS, MAX_SLOTS = 50, 40
"""Slots that are still readable as rows of a chart."""


def write_run_report(run: Path, path: Path) -> None:
    """One HTML file about a run, which may still be under way."""
    watcher = RunWatcher(run)
    watcher.refresh()
    state = watcher.state
    incidents = Counter(state.incident_counts)
    if state.lost_workers:
        incidents["worker fault"] = state.lost_workers
    last = sorted((*state.incidents, *state.faults), key=lambda incident: incident.update)[-MAX_INCIDENTS:]
    updates = {row.update: row.metrics for row in state.rows.values() if row.metrics is not None}
    write_page(
        path,
        "run.html",
        f"Training run {run.resolve().name}",
        status=_status(state, watcher.damaged_lines),
        curves=list(_curves(updates, _step(state))),
        step=_step(state),
        slots=_slots(state),
        decisions=_decisions(updates),
        seeds=_seeds(state),
        fates=legend((FATE_NAMES[fate], colour) for fate, colour in FATES.items()),
        gaming=Table(["reason", "blueprint", "times"], [(*key, times) for key, times in sorted(state.gaming.items())]),
        anomalies=", ".join(f"{name}: {times}" for name, times in incidents.most_common()),
        last_anomalies=Table(["update", "what", "where", "details"], last),
        timings=_timings(state),
        **_origin(state),
    )


def _step(state: RunState) -> str:
    """What is counted: a user's own training has decisions."""
    return "decision" if state.decisions else "update"


def _slots(state: RunState) -> list[Chart]:
    """The stages of the slots over the decisions of a user's own training."""
    names = list(dict.fromkeys(name for decision in state.decisions for name in decision.slots))[:MAX_SLOTS]
    if not names:
        return []
    draw = partial(_draw_slots, decisions=state.decisions, names=names)
    return [draw_chart(draw, "Stages of the slots", size=(5, rows_height(len(names))))]


def _draw_slots(axes: Axes, decisions: Sequence[GrowthDecision], names: Sequence[str]) -> None:
    x = np.array([decision.update for decision in decisions])
    for stage, colour in STAGE_COLOURS.items():
        label = str(stage)
        for row, name in enumerate(names):
            held = np.array([_stage(decision, name) == str(stage) for decision in decisions])
            edges = np.flatnonzero(np.diff(np.r_[False, held, False]))  # where each span starts, and behind its end
            if len(edges):
                starts, ends = x[edges[::2]], x[edges[1::2] - 1] + 1
                axes.barh([row] * len(starts), ends - starts, left=starts, color=colour, height=0.75, label=label)
                label = "_"  # each stage once in the legend
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8)
    axes.set_yticks(range(len(names)), names)
    axes.set_xlim(x[0], x[-1] + 1)
    axes.invert_yaxis()
    _label_steps(axes, "decision")


def _stage(decision: GrowthDecision, slot: str) -> str | None:
    known = decision.slots.get(slot)
    return known.get("stage") if isinstance(known, dict) else None  # events may be damaged


def _status(state: RunState, damaged_lines: int) -> str:
    done = f"{state.last_update + 1} {_step(state)}s are recorded"
    if state.started:
        config = state.started.config
        done += f" of {config.get('updates') or '?'}; {config.get('algorithm', '?')} on {config.get('task', '?')}"
    if state.starts > 1:
        done += f"; {state.starts} processes worked on it"
    if damaged_lines:
        done += f"; {damaged_lines} damaged lines of its events were skipped"
    if state.finished is None:
        return f"{done}. It is still running, or was killed."
    reason = f" ({state.finished.reason})" if state.finished.reason else ""
    return f"{done}. It ended as {state.finished.status}{reason}."


def _origin(state: RunState) -> dict[str, str]:
    """Command, settings and versions of the last process; empty before the first has started."""
    start = state.started
    if start is None:
        return dict.fromkeys(("command", "settings", "versions"), "")
    versions = {
        "versions": start.versions,
        "git_commit": start.git_commit,
        "rng_seeds": start.rng_seeds,
        "threads": start.threads,
    }
    return {
        "command": shlex.join(start.command),
        "settings": json.dumps(start.config, indent=1),
        "versions": json.dumps(versions, indent=1),
    }


def _curves(updates: Mapping[int, Mapping[str, float]], step: str) -> Iterator[Chart]:
    for needed, (title, names) in CURVES.items():
        columns = {name: _column(updates, name) for name in names}
        if np.isfinite(columns[needed][1]).any():
            yield draw_chart(partial(_draw_curves, columns=columns, step=step), title, size=(5, 2.8))


def _decisions(updates: Mapping[int, Mapping[str, float]]) -> list[Chart]:
    names = [name for name in next(iter(updates.values()), {}) if name.startswith("op/")]
    draw = partial(_draw_operations, updates=updates, names=names)
    return [draw_chart(draw, "Operations, share of decisions")] if names else []


def _column(updates: Mapping[int, Mapping[str, float]], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Updates, and a metric of each; NaN where it was not measured."""
    values = np.array([updates[update].get(name, math.nan) for update in updates], float)
    return np.array(list(updates)), np.where(np.isfinite(values), values, np.nan)


def _draw_curves(axes: Axes, columns: Mapping[str, tuple[np.ndarray, np.ndarray]], step: str) -> None:
    ends = []
    for (name, (x, y)), colour in zip(columns.items(), colours(list(columns)).values(), strict=True):
        known = np.isfinite(y)
        if not known.any():
            continue
        x, y = x[known], y[known]
        smooth = running_mean(y, max(1, len(y) // 10)) if step == "update" else y
        axes.plot(x, y, "o", color=colour, markersize=3, alpha=0.4)
        axes.plot(x, smooth, color=colour)
        ends.append((float(x[-1]), float(smooth[-1]), f"{smooth[-1]:.3g}" if len(columns) == 1 else name, colour))
    label_ends(axes, ends)
    _label_steps(axes, step)


def _label_steps(axes: Axes, step: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel(step)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def running_mean(values: np.ndarray, width: int) -> np.ndarray:
    """Mean of the last `width` values, of fewer at the start."""
    total = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - width, 0)
    return (total[ends] - total[starts]) / (ends - starts)


def _draw_operations(axes: Axes, updates: Mapping[int, Mapping[str, float]], names: Sequence[str]) -> None:
    names = sorted(names, key=lambda name: -np.nanmean(_column(updates, name)[1]))
    shares = np.stack([np.nan_to_num(_column(updates, name)[1]) for name in names])
    shades, x = colours(names), np.array(list(updates))
    if len(x) == 1:  # an area needs two points
        x, shares = np.array([x[0] - 0.5, x[0] + 0.5]), shares.repeat(2, 1)
    axes.stackplot(x, shares, colors=list(shades.values()), alpha=0.8, linewidth=0)
    axes.set_ylim(0, 1)
    middles = shares[:, -1].cumsum() - shares[:, -1] / 2
    ops = [f"{name.removeprefix('op/')} {share:.0%}" for name, share in zip(names, shares[:, -1], strict=True)]
    label_ends(axes, list(zip([x[-1]] * len(ops), middles, ops, shades.values(), strict=True)))
    _label_steps(axes, "update")


def _seeds(state: RunState) -> list[Chart]:
    """Fates of seeds by blueprint, in both halves of the run; in a user's own training one host lives all along."""
    rows = [row for row in state.rows.values() if row.seeds]
    if not rows:
        return []
    parts = [(f"All {_step(state)}s", rows)]
    if len(rows) > 1 and not state.decisions:
        halves = [rows[: len(rows) // 2], rows[len(rows) // 2 :]]
        parts = [(f"Updates {part[0].first} to {part[-1].update}", part) for part in halves]
    order, drawn = list(_by_blueprint(rows)), []
    for title, part in parts:
        counts = _by_blueprint(part)
        bars = [(blueprint, counts.get(blueprint, Counter())) for blueprint in order]
        drawn.append(draw_chart(partial(_draw_fates, rows=bars), title, size=(5, rows_height(len(bars)))))
    return drawn


def _by_blueprint(rows: Sequence[Row]) -> dict[str, Counter[str]]:
    """Number of seeds by fate for each blueprint, the most common blueprint last."""
    counts: dict[str, Counter[str]] = {}
    for row in rows:
        for blueprint, numbers in row.seeds.items():
            counts.setdefault(blueprint, Counter()).update(dict(zip(SEED_FATES, numbers, strict=True)))
    for own in counts.values():
        own["live"] = max(0, own["germinated"] - own["fossilized"] - own["pruned"])
    return dict(sorted(counts.items(), key=lambda item: (item[1]["germinated"], item[0])))


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


def _timings(state: RunState) -> Table:
    whole, updates = sum(state.seconds.values()) or 1.0, max(state.timed, 1)
    rows = [(name, f"{s:.1f}", f"{s / updates:.3f}", f"{s / whole:.1%}") for name, s in state.seconds.most_common()]
    return Table(["phase", "seconds", f"per {_step(state)}", "share"], rows)
