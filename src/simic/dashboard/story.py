"""The story of a run: its events in words, with a severity."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from simic.storage.printable import printable
from simic.telemetry.events import (
    Anomaly,
    CheckpointSaved,
    EpisodeEvent,
    EpisodeOutcome,
    Event,
    GamingSuspicion,
    GovernorRollback,
    LifecycleChange,
    Plateau,
    ProcessEvent,
    RunFinished,
    RunStarted,
    Unknown,
    Update,
    WorkerFault,
)

Severity = Literal["info", "notice", "warning", "error"]
MAX_TEXT = 300
_ENDED: dict[str, Severity] = {"done": "notice", "stopped": "notice"}


def host_id(event: EpisodeEvent) -> str:
    """The name of a host within its update."""
    return f"g{event.group}-e{event.env}"


def severity(event: Event | Unknown) -> Severity:
    """How much an event asks for attention."""
    match event:
        case RunFinished():
            return _ENDED.get(event.status, "error")
        case Anomaly() | GovernorRollback() | WorkerFault():
            return "warning"
        case Plateau() | GamingSuspicion() | RunStarted():
            return "notice"
    return "info"


def describe_event(event: Event | Unknown) -> str:
    """One line of printable text."""
    words = _WORDS.get(type(event), lambda event: event.kind)(event)
    return printable(words, MAX_TEXT)


def story_entry(index: int, time: float | None, event: Event | Unknown) -> dict[str, Any]:
    """An event as a row of the story."""
    return {
        "index": index,
        "time": event.time if isinstance(event, ProcessEvent) else time,
        "update": getattr(event, "update", 0),
        "kind": printable(event.kind, 40),
        "severity": severity(event),
        "host": host_id(event) if isinstance(event, EpisodeEvent) else None,
        "text": describe_event(event),
        "slot": printable(event.slot, MAX_TEXT) if isinstance(event, (LifecycleChange, GamingSuspicion)) else None,
        "decision": getattr(event, "decision", None),
    }


def _lifecycle(event: LifecycleChange) -> str:
    seed = f"{event.slot}: {event.blueprint}" if event.blueprint else event.slot
    if event.reason == "germinate":
        return f"{seed} germinated ({event.new_stage})"
    cause = "" if event.reason == "time" else f", by {event.reason}"
    return f"{seed} {event.old_stage} -> {event.new_stage}{cause}"


def _episode(event: EpisodeOutcome) -> str:
    kept = event.seeds.get("fossilized", 0)
    return (
        f"episode over: score {event.score:.4g}, {event.host_parameters:,} -> {event.parameters:,} parameters, "
        f"{kept} seeds kept, {event.seeds.get('pruned', 0)} pruned"
    )


def _update(event: Update) -> str:
    shown = [name for name in ("score", "gain", "val_loss", "val_accuracy", "loss", "q_loss") if name in event.metrics]
    # A user's own metrics, such as f1, have any names.
    return ", ".join(f"{name} {event.metrics[name]:.4g}" for name in shown or list(event.metrics)[:3])


def _started(event: RunStarted) -> str:
    how = f"resumed from {event.resumed_from}" if event.resumed_from else "started"
    return f"{how} by process {event.pid} on {event.host}"


def _finished(event: RunFinished) -> str:
    return f"ended as {event.status} after {event.seconds:.0f} s" + (f": {event.reason}" if event.reason else "")


_WORDS: dict[type, Callable[[Any], str]] = {
    LifecycleChange: _lifecycle,
    EpisodeOutcome: _episode,
    Update: _update,
    Anomaly: lambda event: f"{event.name} in {event.where}: {event.value:.4g}, limit {event.threshold:.4g}",
    Plateau: lambda event: (
        f"{event.metric} has not improved for {event.update - event.best_update} updates; its mean was best, "
        f"{event.best:.4g}, at update {event.best_update}"
    ),
    GovernorRollback: lambda event: (
        f"host {event.verdict}, loss {event.val_loss:.4g}: last good weights restored, {event.forfeited:.4g} forfeited"
    ),
    GamingSuspicion: lambda event: (
        f"{event.slot}: {event.blueprint} suspected of {event.reason}: contribution {event.contribution:.4g}, "
        f"the host gained {event.gain:.4g}"
    ),
    WorkerFault: lambda event: f"worker {event.worker} lost with group {event.group}: {event.error}",
    CheckpointSaved: lambda event: f"checkpoint {event.path}",
    RunStarted: _started,
    RunFinished: _finished,
}
