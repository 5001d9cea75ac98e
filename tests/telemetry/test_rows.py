"""Rows of the tables from events written by hand, without pandas."""

from datetime import datetime
from typing import Any

from simic.telemetry.events import DecisionMade, EpisodeTrace, GrowthDecision, PhaseTimings, RunStarted, Update
from simic.telemetry.recorder import Recorder
from simic.telemetry.rows import TableRows

TRACE: dict[str, Any] = {
    **{"group": 1, "task": "digits", "score": 50.0, "metric": 0.5, "host_parameters": 10, "parameters": 12},
    "slots": {
        "stem": {
            "stage": ["dormant", "blending", "holding"],
            "alpha": [0.0, 0.5, 1.0],
            "contribution": [None, None, 0.25],
            "blueprint": ["", "mlp", "mlp"],
        }
    },
    "steps": {
        "action": ["germinate", "wait"],
        "legal_ops": ["wait germinate", "wait prune"],
        "value": [1.0, 2.0],
        "reward": [0.5, -0.5],
        "val_loss": [0.9, 0.8],
        "val_accuracy": [0.4, 0.5],
    },
    "probabilities": {"op": [0.4, 0.9], "slot": [0.5, None]},
    "reward_terms": {"twin": [-1.0, -2.0]},
}


def tables(path, *events) -> dict[str, list[dict[str, Any]]]:
    """The rows of a run with these events, by table."""
    with Recorder(path, "debug") as recorder:
        for event in events:
            recorder.record(event)
    rows = TableRows()
    assert rows.read("mine", path) == 0
    found = {}
    for name, columns in rows.tables():
        cells = zip(*(values for _, values in columns), strict=True)
        found[name] = [dict(zip((column.name for column, _ in columns), row, strict=True)) for row in cells]
    return found


def test_a_trace_becomes_its_slots_and_decisions(tmp_path):
    found = tables(tmp_path, EpisodeTrace(update=3, env=2, **TRACE))
    place = {"run": "mine", "host": "g1-e2", "update": 3, "group": 1, "env": 2}
    assert found["slots"][2] == place | {
        **{"slot": "stem", "state": 2, "stage": "holding", "blueprint": "mlp", "alpha": 1.0, "contribution": 0.25}
    }
    assert [row["contribution"] for row in found["slots"]] == [None, None, 0.25]
    first, second = found["decisions"]
    assert first == place | {
        **{"decision": 0, "state": {}, "legal_ops": ["wait", "germinate"], "action": "germinate", "value": 1.0},
        **{"probabilities": {"op": 0.4, "slot": 0.5}, "reward": 0.5, "reward_terms": {"twin": -1.0}},
    }
    # What is known before a decision was measured after the one before it.
    assert second["state"] == {"val_accuracy": 0.4, "val_loss": 0.9}
    assert second["probabilities"] == {"op": 0.9}


def test_the_slots_of_a_users_own_training_are_those_after_each_decision(tmp_path):
    slot = {"stage": "blending", "alpha": 0.5, "contribution": None, "blueprint": "mlp", "parameters": 9}
    own = {"actions": ("wait",), "parameters": 20, "val_loss": 1.0, "val_accuracy": 0.5}
    found = tables(tmp_path, GrowthDecision(update=4, slots={"0": slot, "damaged": 1}, **own))
    assert found["slots"] == [
        {
            **{"run": "mine", "host": "g0-e0", "update": 4, "group": 0, "env": 0, "slot": "0", "state": 5},
            **{"stage": "blending", "blueprint": "mlp", "alpha": 0.5, "contribution": None},
        }
    ]
    assert found["growth"][0]["actions"] == ["wait"]


def test_a_host_whose_decisions_are_recorded_has_each_of_them_once(tmp_path):
    own = DecisionMade(
        **{"update": 3, "group": 1, "env": 2, "decision": 0, "state": {"val_loss": 1.0}, "legal_ops": ("wait",)},
        **{"action": "wait", "probabilities": {"op": 1.0}, "value": 0.0, "reward": 0.0, "reward_terms": {}},
    )
    found = tables(tmp_path, EpisodeTrace(update=3, env=2, **TRACE), own, EpisodeTrace(update=3, env=0, **TRACE))
    assert [(row["host"], row["decision"]) for row in found["decisions"]] == [("g1-e2", 0), ("g1-e0", 0), ("g1-e0", 1)]
    assert len(found["slots"]) == 6


def test_timings_are_a_row_per_phase_and_performance_one_per_update(tmp_path):
    event = PhaseTimings(
        update=1,
        time=60.0,
        seconds={"rollout": 2.0, "update": 1.0},
        decisions_per_second=8.0,
        memory_mb={"learner": 5.0},
        workers={"count": 4, "nodes": 2},
    )
    found = tables(tmp_path, event)
    assert [(row["phase"], row["seconds"]) for row in found["timings"]] == [("rollout", 2.0), ("update", 1.0)]
    (row,) = found["performance"]
    assert (row["seconds"], row["decisions_per_second"], row["memory_mb"]) == (3.0, 8.0, {"learner": 5.0})
    assert row["workers"] == {"count": 4, "nodes": 2}
    assert row["time"] == datetime(1970, 1, 1, 0, 1)


def test_settings_are_those_of_the_last_start(tmp_path):
    start = {"command": (), "versions": {}, "rng_seeds": {}, "threads": 1, "pid": 1, "host": "here"}
    configs = ({"updates": 1}, {"updates": 2, "task": "digits", "ppo": {"gamma": 0.5, "head_entropy": {}}})
    found = tables(tmp_path, *(RunStarted(update=0, config=config, **start) for config in configs))
    settings = {row["name"]: row["value"] for row in found["settings"]}
    assert settings == {"updates": "2", "task": "digits", "ppo.gamma": "0.5", "ppo.head_entropy": "{}"}
    assert found["run_started"][0]["config"] == '{"updates": 1}'


def test_an_update_without_a_metric_of_another_has_none(tmp_path):
    found = tables(tmp_path, Update(update=0, metrics={"a": 1.0}), Update(update=1, metrics={"b": float("nan")}))
    assert found["updates"] == [
        {"run": "mine", "update": 0, "a": 1.0, "b": None},
        {"run": "mine", "update": 1, "a": None, "b": None},
    ]
