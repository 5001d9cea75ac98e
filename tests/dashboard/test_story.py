"""Events in words."""

import pytest
from helpers.recorded import finished, process_events, started, update_events

from simic.dashboard.story import describe_event, severity, story_entry
from simic.telemetry.events import KINDS, LifecycleChange, RunFinished, Unknown


def test_every_event_of_a_run_has_its_words():
    events = {event.kind: event for event in [started(2), *update_events(3), *process_events(3), finished(4)]}
    texts = {kind: describe_event(event) for kind, event in events.items()}
    assert texts["lifecycle"] == "stem: mlp germinated (training)"
    assert texts["anomaly"] == "kl_spike in op: 0.5, limit 0.2"
    assert texts["plateau"] == "score has not improved for 3 updates; its mean was best, 70, at update 0"
    assert texts["episode"] == "episode over: score 73, 100 -> 150 parameters, 0 seeds kept, 0 pruned"
    assert texts["update"] == "score 73, gain 1.5"
    assert texts["run_started"] == "resumed from update_2 by process 1 on here"
    assert texts["run_finished"] == "ended as done after 9 s"
    assert texts["worker_fault"] == "worker 7 lost with group 0: exit code -9"
    for kind, text in texts.items():
        assert text not in KINDS or kind in ("trace", "timings"), kind


@pytest.mark.parametrize(("status", "expected"), [("done", "notice"), ("stopped", "notice"), ("diverged", "error")])
def test_how_a_run_ended_sets_the_severity(status, expected):
    assert severity(RunFinished(update=1, status=status, exit_code=0, seconds=1.0)) == expected


def test_severities():
    found = {event.kind: severity(event) for event in [*update_events(0), *process_events(0)]}
    assert {kind for kind, own in found.items() if own == "warning"} == {"anomaly", "rollback", "worker_fault"}
    assert {kind for kind, own in found.items() if own == "notice"} == {"gaming", "plateau"}


def test_unknown_kinds_and_strange_names_are_shown_as_text():
    entry = story_entry(5, None, Unknown("later\x1b[2J", {"update": 3}))
    assert (entry["kind"], entry["text"]) == ("later\\x1b[2J",) * 2
    change = LifecycleChange(
        update=0,
        group=1,
        env=2,
        decision=3,
        slot="<b>\n",
        blueprint="x" * 999,
        old_stage="a",
        new_stage="b",
        reason="prune",
    )
    entry = story_entry(0, 7.0, change)
    assert entry["text"].startswith("<b> : xxx")
    assert len(entry["text"]) < 400
    assert (entry["host"], entry["slot"], entry["decision"], entry["time"]) == ("g1-e2", "<b> ", 3, 7.0)
