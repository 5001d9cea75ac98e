"""The state of a run: a pure fold of its events that does not grow with the run."""

import math

import pytest
from helpers.reports import change, write_run

from simic.dashboard import state
from simic.dashboard.state import MAX_UPDATE, RunState, apply, fold
from simic.telemetry.events import (
    Anomaly,
    EpisodeOutcome,
    EpisodeTrace,
    GrowthDecision,
    PhaseTimings,
    Plateau,
    ProcessEvent,
    RunFinished,
    RunStarted,
    Unknown,
    Update,
    WorkerFault,
)
from simic.telemetry.reader import read_events


def started(update=0, **config):
    return RunStarted(
        update=update, command=(), config=config, versions={}, rng_seeds={}, threads=1, pid=1, host="here", time=5.0
    )


def outcome(score, *, update=0, gain=math.nan, parameters=100):
    return EpisodeOutcome(
        update=update,
        group=0,
        env=0,
        task="t",
        decisions=1,
        score=score,
        metric=0.5,
        episode_return=0.0,
        host_parameters=100,
        parameters=parameters,
        gain=gain,
    )


def trace(update, env=0):
    return EpisodeTrace(
        update=update, group=0, env=env, task="t", score=1.0, metric=0.5, host_parameters=3, parameters=4
    )


def metrics(update, **values):
    return Update(update=update, metrics=values)


def test_seeds_and_incidents_are_counted(tmp_path):
    found = fold(read_events(write_run(tmp_path / "run")))
    assert found.rows[0].seeds == {"mlp": [3, 1, 1]}  # germinated, fossilized, pruned
    assert found.rows[3].seeds == {"norm": [1, 0, 0]}
    assert found.incident_counts == {"kl_spike": 1, "rollback: diverged": 1}
    assert [anomaly.name for anomaly in found.rows[2].anomalies] == ["kl_spike"]
    assert found.lost_workers == len(found.faults) == 1
    assert found.gaming == {("overclaiming", "mlp"): 1}
    assert found.last_metrics["score"] == 73.0


def test_folding_in_two_parts_gives_the_same_state(tmp_path):
    events = list(read_events(write_run(tmp_path / "run")))
    for cut in range(len(events) + 1):
        own = fold(events[:cut])
        for event in events[cut:]:
            apply(own, event)
        assert str(own) == str(fold(events))


def test_the_order_between_the_files_does_not_matter(tmp_path):
    events = list(read_events(write_run(tmp_path / "run")))
    process = [event for event in events if isinstance(event, ProcessEvent)]
    others = [event for event in events if not isinstance(event, ProcessEvent)]
    assert process
    assert others
    assert str(fold(process + others)) == str(fold(others + process))


def test_spread_over_hosts_by_hand():
    scores = [outcome(float(score), gain=1.0, parameters=200) for score in range(11)]
    row = fold([*scores, outcome(math.nan), metrics(0, score=5.0)]).rows[0]
    assert row.spread["score"] == pytest.approx([1.0, 5.0, 9.0])
    assert row.spread["gain"] == [1.0, 1.0, 1.0]
    assert row.spread["growth"] == [1.0, 1.0, 1.0]  # doublings; the one host without is below the tenth percentile
    assert fold([outcome(1.0), metrics(0)]).rows[0].spread.keys() == {"score", "growth"}  # no twins


def test_the_traces_of_the_newest_update_are_kept():
    found = fold([trace(0), trace(0, 1), trace(1), trace(1, 1), trace(0, 2)])
    assert [(own.update, own.env) for own in found.traces] == [(1, 0), (1, 1)]


def test_long_runs_are_thinned_out_and_keep_their_seeds(monkeypatch):
    monkeypatch.setattr(state, "MAX_ROWS", 8)
    events = []
    for update in range(100):
        events += [change("mlp", "dormant", "training", "germinate", update), metrics(update, score=float(update))]
        events += [Anomaly(update=update, name="kl_spike", value=1.0, threshold=0.5)]
    found = fold(events)
    assert len(found.rows) <= 9
    assert found.stride == 32
    assert list(found.rows) == [0, 32, 64, 96, 99]
    assert sum(row.seeds["mlp"][0] for row in found.rows.values()) == 100
    assert sum(len(row.anomalies) for row in found.rows.values()) == 100
    assert [(row.first, row.update) for row in found.rows.values()][-2:] == [(65, 96), (97, 99)]
    assert found.rows[32].revision > fold(events[:120]).rows[32].revision  # clients are told what it now stands for
    assert found.last_metrics == {"score": 99.0}


def test_every_table_is_bounded(monkeypatch):
    for name in ("MAX_NAMES", "MAX_TIMES", "MAX_EPISODES", "MAX_TRACES"):
        monkeypatch.setattr(state, name, 3)
    many = range(20)
    events = [change(f"blueprint {i}", "dormant", "training", "germinate") for i in many]
    events += [metrics(0, **{f"metric {i}": 1.0 for i in many})]
    events += [Anomaly(update=0, name=f"anomaly {i}", value=1.0, threshold=0.5) for i in range(300)]
    events += [PhaseTimings(update=i, seconds={f"phase {i}": 1.0}, time=1.0) for i in many]
    events += [WorkerFault(update=0, worker=1, group=0, error="e", time=1.0) for _ in range(300)]
    events += [outcome(1.0, update=1) for _ in many] + [trace(1, env) for env in many]
    found = fold(events)
    assert found.episodes is not None
    assert len(found.episodes.score) == len(found.traces) == 3
    assert len(found.rows[0].seeds) == 4  # with "other"
    assert found.rows[0].seeds["other"][0] == 17
    assert len(found.rows[0].metrics or ()) == 3
    assert len(found.incidents) == len(found.rows[0].anomalies) == len(found.faults) == 200
    assert found.lost_workers == 300
    assert len(found.seconds) == 4
    assert list(found.times) == [17, 18, 19]


def test_updates_out_of_range_are_ignored():
    assert fold([metrics(-1), metrics(MAX_UPDATE), started(-3)]) == RunState()


def test_a_run_that_is_resumed_is_no_longer_finished():
    finished = RunFinished(update=1, status="stopped", exit_code=130, seconds=1.0)
    assert fold([started(), finished]).finished == finished
    found = fold([started(), finished, started(1)])
    assert found.finished is None
    assert found.starts == 2


def test_what_is_told():
    told = [metrics(0), Plateau(update=3, metric="score", best=1.0, best_update=0), Unknown("new", {"x": 1}), started()]
    silent = [trace(0), PhaseTimings(update=0, seconds={}, time=1.0)]
    decision = GrowthDecision(update=0, actions=("wait",), slots={}, parameters=1, val_loss=1.0, val_accuracy=0.5)
    found = fold([*told, *silent, decision])
    assert [entry.event for entry in found.story["events.jsonl"]] == told[:3]
    assert [entry.event for entry in found.story["process.jsonl"]] == told[3:]
    assert list(found.decisions) == [decision]


def test_other_objects_are_ignored():
    assert fold([object(), None]) == RunState()
