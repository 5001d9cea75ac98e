"""Events of hand-made episode records: every event with its numbers, reasons and names."""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest
from helpers import tiny_run

from simic.environment.episodes import EpisodeRecord
from simic.lifecycle.actions import HEADS, Action, Op
from simic.lifecycle.stages import Stage
from simic.telemetry.events import (
    DecisionMade,
    EpisodeOutcome,
    EpisodeTrace,
    GamingSuspicion,
    GovernorRollback,
    LifecycleChange,
)
from simic.telemetry.recorder import Recorder
from simic.training.episode_events import (
    EVENTS_OF,
    TRACED_HOSTS,
    debug_events,
    decision_events,
    episode_events,
    gaming_events,
    lifecycle_events,
    rollback_events,
    trace_events,
)

D, G, T, B, H, F, P, E, R = Stage


def stages(*rows: Sequence[float]) -> np.ndarray:
    """The stages (or blueprints and numbers) of one host's slots over time: (T + 1, 1, S)."""
    return np.array(rows)[:, None]


def actions(*rows: Action) -> np.ndarray:
    """What was done to one host (T, 1, H)."""
    return np.stack([row.encode("ab", ("small", "large")) for row in rows])[:, None]


def lifecycle_changes(record: EpisodeRecord) -> list[LifecycleChange]:
    events = list(lifecycle_events(record, 7, 2))
    assert all(isinstance(event, LifecycleChange) for event in events)
    return cast(list[LifecycleChange], events)


def reasons(record: EpisodeRecord) -> list[tuple[int, str, str, str, str, str]]:
    return [(e.decision, e.slot, e.blueprint, e.old_stage, e.new_stage, e.reason) for e in lifecycle_changes(record)]


# Lifecycle changes.


def test_changes_are_told_with_who_caused_them():
    record = tiny_run.make_record(
        steps=5,
        slots=2,
        action=actions(
            Action("germinate", 0, "large"),
            Action("advance", 0),
            Action("wait"),
            Action("fossilize", 0),
            Action("germinate", 1, "small"),
        ),
        stage=stages([D, P], [B, E], [H, E], [H, R], [F, D], [F, B]),
        blueprint=stages([-1, -1], [1, -1], [1, -1], [1, -1], [1, -1], [1, 0]),
    )
    assert reasons(record) == [
        (0, "a", "large", "dormant", "blending", "germinate"),
        (0, "b", "", "pruned", "embargoed", "time"),
        (1, "a", "large", "blending", "holding", "advance"),
        (2, "b", "", "embargoed", "resetting", "time"),
        (3, "a", "large", "holding", "fossilized", "fossilize"),
        (3, "b", "", "resetting", "dormant", "time"),
        (4, "b", "small", "dormant", "blending", "germinate"),
    ]


def test_a_seed_that_fades_out_is_pruned_by_the_controller_first_and_by_time_last():
    record = tiny_run.make_record(
        steps=2,
        action=actions(Action("prune", 0, alpha_speed=3), Action("wait")),
        stage=stages([H], [B], [P]),
        blueprint=stages([1], [1], [-1]),
    )
    assert reasons(record) == [
        (0, "a", "large", "holding", "blending", "prune"),
        (1, "a", "large", "blending", "pruned", "time"),
    ]


def test_the_governor_prunes_live_seeds_and_nothing_else():
    record = tiny_run.make_record(
        steps=1,
        slots=4,
        action=np.array([[[Op.FOSSILIZE, 1, *[0] * 6]]]),
        verdict=np.array([[1]]),
        stage=stages([B, H, E, F], [P, F, R, F]),
        blueprint=stages([0, 1, -1, 1], [-1, 1, -1, 1]),
    )
    assert reasons(record) == [
        (0, "a", "small", "blending", "pruned", "governor"),
        (0, "b", "large", "holding", "fossilized", "fossilize"),
        (0, "c", "", "embargoed", "resetting", "time"),
    ]


def test_a_change_comes_with_the_figures_it_was_decided_on():
    def over_time(first: float) -> np.ndarray:
        return np.array([first, -99.0]).reshape(2, 1, 1)

    record = tiny_run.make_record(
        steps=1,
        action=actions(Action("fossilize", 0)),
        stage=stages([H], [F]),
        blueprint=stages([1], [1]),
        age=over_time(9),
        alpha=over_time(0.7),
        contribution=over_time(0.25),
        contribution_age=over_time(2),
        gradient_norm=over_time(0.5),
    )
    (event,) = lifecycle_changes(record)
    assert (event.update, event.group, event.env) == (7, 2, 0)
    expected = {"age": 9, "alpha": 0.7, "contribution": 0.25, "contribution_age": 2, "gradient_norm": 0.5}
    assert event.readiness == expected


def test_what_happens_after_an_episode_is_not_told():
    record = tiny_run.make_record(
        steps=2,
        valid=np.array([[True], [False]]),
        verdict=np.array([[1], [1]]),
        gaming={"overclaiming": np.ones((2, 1, 1), dtype=bool)},
        stage=stages([B], [P], [E]),
        blueprint=stages([0], [-1], [-1]),
    )
    for events_of in (lifecycle_events, rollback_events, gaming_events, decision_events):
        events: list[Any] = list(events_of(record, 0, 0))
        assert [event.decision for event in events] == [0], events_of.__name__


# How episodes end.


def test_the_outcome_of_an_episode_by_hand():
    rows = [Action("germinate", 0), Action("germinate", 1), Action("wait"), Action("prune", 0), Action("wait")]
    record = tiny_run.make_record(
        steps=5,
        slots=2,
        action=actions(*rows),
        stage=stages([D, D], [B, D], [B, B], [B, B], [P, B], [E, H]),
        reward=np.array([[1.0], [-0.5], [0.0], [0.25], [2.0]]),
        val_accuracy=np.array([[0.1], [0.2], [0.3], [0.4], [0.5], [0.6]]),
        score=np.array([58.5]),
        twin_score=np.array([57.0]),
        exported_parameters=np.array([130]),
    )
    (event,) = episode_events(record, 7, 2)
    assert event == EpisodeOutcome(
        update=7,
        group=2,
        env=0,
        task="tiny",
        decisions=5,
        score=58.5,
        metric=0.6,
        episode_return=2.75,
        host_parameters=100,
        parameters=130,
        operations={"wait": 2, "germinate": 2, "set_alpha_target": 0, "prune": 1, "fossilize": 0, "advance": 0},
        seeds={"fossilized": 0, "pruned": 1, "dropped": 1},
        rolled_back=False,
        gain=1.5,
    )


def test_a_host_that_was_rolled_back_is_judged_at_its_own_end():
    valid = np.array([[True, True], [True, False], [True, False]])
    action = np.zeros((3, 2, len(HEADS)), dtype=np.int64)
    action[0, :, 0] = Op.GERMINATE
    stage = np.array([[[D], [D]], [[B], [P]], [[H], [E]], [[F], [R]]])
    record = tiny_run.make_record(
        steps=3,
        hosts=2,
        action=action,
        valid=valid,
        stage=stage,
        verdict=np.array([[0, 3], [0, 0], [0, 0]]),
        val_accuracy=np.array([[0.1, 0.1], [0.2, 0.25], [0.3, 0.9], [0.4, 0.9]]),
    )
    whole, broken = episode_events(record, 0, 0)
    assert isinstance(whole, EpisodeOutcome)
    assert isinstance(broken, EpisodeOutcome)
    assert (whole.decisions, whole.metric, whole.rolled_back) == (3, 0.4, False)
    assert whole.seeds == {"fossilized": 1, "pruned": 0, "dropped": 0}
    assert (broken.decisions, broken.metric, broken.rolled_back) == (1, 0.25, True)
    assert broken.seeds == {"fossilized": 0, "pruned": 1, "dropped": 0}
    assert sum(broken.operations.values()) == 1  # the waits of a host that waits for the others are no decisions


def test_the_fates_of_real_seeds_add_up(tmp_path, tiny_task):
    tiny_run.play_run(tmp_path, updates=1, num_groups=2, group_size=4, episode={"horizon": 8})
    outcomes, changes = tiny_run.told(tmp_path, EpisodeOutcome), tiny_run.told(tmp_path, LifecycleChange)
    assert sum(outcome.operations["germinate"] for outcome in outcomes) > 8
    for outcome in outcomes:
        mine = [c for c in changes if (c.group, c.env) == (outcome.group, outcome.env)]
        assert sum(outcome.seeds.values()) == outcome.operations["germinate"]
        assert outcome.operations["germinate"] == sum(c.old_stage == "dormant" for c in mine)
        assert outcome.seeds["pruned"] == sum(c.new_stage == "pruned" for c in mine)
        assert outcome.seeds["fossilized"] == sum(c.new_stage == "fossilized" for c in mine)
        assert sum(outcome.operations.values()) == outcome.decisions == 8


# The governor, gaming, decisions.


def test_a_rollback_says_why_and_what_was_forfeited():
    record = tiny_run.make_record(
        steps=2,
        verdict=np.array([[0], [2]]),
        val_loss=np.array([[1.0], [2.0], [9.0]]),
        reward_terms={"forfeit": np.array([[0.0], [-12.5]])},
    )
    assert list(rollback_events(record, 7, 2)) == [
        GovernorRollback(update=7, group=2, env=0, decision=1, verdict="collapsed", val_loss=9.0, forfeited=12.5)
    ]


def test_a_suspicion_names_the_seed_and_the_reason():
    flags = np.zeros((2, 1, 2), dtype=bool)
    flags[1, 0, 1] = True
    record = tiny_run.make_record(
        steps=2,
        slots=2,
        gaming={"overclaiming": np.zeros_like(flags), "indispensable": flags},
        blueprint=stages([-1, -1], [-1, -1], [-1, 1]),
        contribution=np.array([[[0.0, 0.0]], [[0.0, 0.0]], [[0.0, 0.4]]]),
        val_accuracy=np.array([[0.1], [0.2], [0.5]]),
        twin_accuracy=np.array([[0.1], [0.2], [0.75]]),
    )
    expected = {"decision": 1, "slot": "b", "blueprint": "large", "reason": "indispensable", "contribution": 0.4}
    expected |= {"gain": -0.25}
    assert list(gaming_events(record, 7, 2)) == [GamingSuspicion(update=7, group=2, env=0, **expected)]


def test_a_decision_is_told_in_words_with_the_probabilities_that_matter():
    legal = np.zeros((1, 1, len(Op)), dtype=bool)
    legal[0, 0, [Op.WAIT, Op.PRUNE]] = True
    record = tiny_run.make_record(
        steps=1,
        slots=2,
        action=actions(Action("prune", 1, alpha_speed=5, alpha_curve="cosine")),
        probability=np.arange(1.0, 9.0).reshape(1, 1, 8) / 10,
        legal_ops=legal,
        reward=np.array([[1.5]]),
        value=np.array([[-0.25]]),
        reward_terms={"score": np.array([[2.0]]), "rent": np.array([[-0.5]])},
        val_loss=np.array([[0.7], [9.0]]),
        val_accuracy=np.array([[0.6], [9.0]]),
        train_loss=np.array([[0.5], [9.0]]),
        host_gradient=np.array([[0.4], [9.0]]),
    )
    (event,) = decision_events(record, 7, 2)
    assert event == DecisionMade(
        update=7,
        group=2,
        env=0,
        decision=0,
        state={"val_loss": 0.7, "val_accuracy": 0.6, "train_loss": 0.5, "host_gradient": 0.4},
        legal_ops=("wait", "prune"),
        action="prune slot=b alpha_speed=5 alpha_curve=cosine",
        probabilities={"op": 0.1, "slot": 0.2, "alpha_speed": 0.7, "alpha_curve": 0.8},
        value=-0.25,
        reward=1.5,
        reward_terms={"score": 2.0, "rent": -0.5},
    )


# Traces.


def test_a_trace_by_hand():
    record = tiny_run.make_record(
        steps=3,
        slots=1,
        action=np.stack([row.encode("a", ("small", "large")) for row in TRACED_ACTIONS])[:, None],
        stage=stages([D], [T], [B], [P]),
        blueprint=stages([-1], [1], [1], [-1]),
        alpha=stages([0.0], [0.0], [1 / 3], [0.0]),
        contribution=stages([np.nan], [np.nan], [0.123456], [np.nan]),
        seed_parameters=stages([0], [12], [12], [0]),
        legal_ops=np.arange(6)[None, None] < np.array([2, 1, 3])[:, None, None],
        valid=np.array([[True], [True], [False]]),
        verdict=np.array([[0], [1], [0]]),
        probability=np.full((3, 1, len(HEADS)), 0.123456),
        value=np.array([[0.5], [-0.25], [9.0]]),
        reward=np.array([[1.0], [-2.0], [0.0]]),
        reward_terms={"score": np.array([[1.0], [-0.0], [0.0]])},
        val_loss=np.array([[2.0], [1.0], [np.inf], [9.0]]),
        val_accuracy=np.array([[0.1], [0.2], [0.3], [0.9]]),
        score=np.array([63.0]),
        exported_parameters=np.array([112]),
    )
    (trace,) = trace_events(record, 7, 2)
    assert trace == EpisodeTrace(
        update=7,
        group=2,
        env=0,
        task="tiny",
        score=63.0,
        metric=0.3,
        host_parameters=100,
        parameters=112,
        rolled_back=True,
        segments=(("stem", 60), ("head", 40)),
        seed_parameters=(("a", 12),),
        slots={  # until the host broke, in state 2
            "a": {
                "stage": ["dormant", "training", "blending"],
                "alpha": [0.0, 0.0, 0.3333],
                "contribution": [None, None, 0.1235],
                "blueprint": ["", "large", "large"],
            }
        },
        steps={
            "action": ["germinate slot=a blueprint=large style=linear-add tempo=3 alpha_target=1.0", "wait"],
            "legal_ops": ["wait germinate", "wait"],
            "val_loss": [1.0, None],
            "val_accuracy": [0.2, 0.3],
            "reward": [1.0, -2.0],
            "value": [0.5, -0.25],
        },
        probabilities={
            "op": [0.1235, 0.1235],
            **{head: [0.1235, None] for head in ("slot", "blueprint", "style", "tempo", "alpha_target")},
        },
        reward_terms={"score": [1.0, 0.0]},
    )


TRACED_ACTIONS = (Action("germinate", 0, "large"), Action("wait"), Action("wait"))


def test_some_hosts_are_traced_at_level_normal_and_the_others_at_debug():
    record = tiny_run.make_record(steps=2, hosts=TRACED_HOSTS + 3)
    normal = [event.env for event in trace_events(record, 0, 0) if isinstance(event, EpisodeTrace)]
    debug = [event.env for event in debug_events(record, 0, 0) if isinstance(event, EpisodeTrace)]
    assert normal == list(range(TRACED_HOSTS))
    assert debug == list(range(TRACED_HOSTS, TRACED_HOSTS + 3))
    decisions = list(decision_events(record, 0, 0))
    assert [event for event in debug_events(record, 0, 0) if isinstance(event, DecisionMade)] == decisions
    assert len(list(trace_events(tiny_run.make_record(steps=1, hosts=1), 0, 0))) == 1


def test_an_episode_that_no_event_can_hold_is_not_traced(monkeypatch):
    monkeypatch.setattr("simic.training.episode_events.MAX_VALUES", 32)
    fits, too_long = tiny_run.make_record(steps=3), tiny_run.make_record(steps=4)  # 4 and 5 states of 8 heads
    assert len(list(trace_events(fits, 0, 0))) == 1
    assert list(trace_events(too_long, 0, 0)) == []


@pytest.mark.parametrize(
    ("level", "kinds"),
    [
        ("off", set()),
        ("minimal", {GovernorRollback}),
        ("normal", {GovernorRollback, EpisodeOutcome, EpisodeTrace, LifecycleChange, GamingSuspicion}),
        ("debug", set(EVENTS_OF)),
    ],
)
def test_what_a_level_does_not_record_is_not_told(tmp_path, level, kinds):
    with Recorder(tmp_path, level) as recorder:
        assert {kind for kind in EVENTS_OF if recorder.wants(kind)} == kinds
