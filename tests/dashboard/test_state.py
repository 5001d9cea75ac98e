"""The state of a run: a pure fold of its events."""

import pytest
from helpers.reports import write_run

from simic.dashboard import state
from simic.dashboard.state import RunState, apply, fold, read_state
from simic.telemetry.events import RunFinished, RunStarted, Update
from simic.telemetry.reader import read_events


def test_fates_and_incidents_are_counted(tmp_path):
    found = read_state(write_run(tmp_path / "run"))
    assert found.fates[0, "mlp", "germinated"] == 3
    assert found.fates[0, "mlp", "fossilized"] == found.fates[0, "mlp", "pruned"] == 1
    assert found.fates[3, "norm", "germinated"] == 1
    assert [incident.update for incident in sorted(found.incidents)] == [1, 1, 2]
    assert found.gaming == {("overclaiming", "mlp"): 1}


def test_folding_in_two_parts_gives_the_same_state(tmp_path):
    events = list(read_events(write_run(tmp_path / "run")))
    for cut in range(len(events) + 1):
        state = fold(events[:cut])
        for event in events[cut:]:
            apply(state, event)
        assert state == fold(events)


def test_a_run_that_is_resumed_is_no_longer_finished():
    started = RunStarted(
        update=0, command=(), config={}, versions={}, rng_seeds={}, threads=1, pid=1, host="here", time=0.0
    )
    finished = RunFinished(update=1, status="stopped", exit_code=130, seconds=1.0)
    assert fold([started, finished]).finished == finished
    assert fold([started, finished, started]).finished is None


def test_other_objects_are_ignored():
    assert fold([object(), None]) == RunState()


def test_a_table_that_is_too_long_is_refused(monkeypatch):
    monkeypatch.setattr(state, "MAX_ENTRIES", 2)
    with pytest.raises(ValueError, match="the run has more than 2 updates or incidents"):
        fold(Update(update=i, metrics={}) for i in range(3))
