"""What a step runs: counted evaluations, fewer of them with evaluate_every and max_ablations, and honest judgements."""

import itertools
import math

import numpy as np
import pytest
from helpers.scheduled_growth import Worth, grow, linear_model, scheduled, to_fossil, train
from hypothesis import given
from hypothesis import strategies as st

from simic import Action, HeuristicConfig, HeuristicController, ScriptedController, Stage
from simic.control.plan import Plan, PlanController
from simic.lifecycle.slots import SlotState, to_measure
from simic.scheduler.contributions import forget_earlier_alphas, most_urgent

FOUR = [Action("germinate", str(slot), "mlp") for slot in range(4)]


def make(actions=FOUR, num_slots=4, worth=None, **settings):
    model = linear_model(num_slots)
    evaluate = Worth(model, worth or {str(slot): 1.0 + slot for slot in range(num_slots)})
    scheduler = scheduled(model, actions, lambda: {"val_loss": -evaluate()}, **settings)
    return scheduler, evaluate


def evaluations(scheduler) -> list[int]:
    return [decision.evaluations for decision in scheduler.decisions]


def test_a_step_evaluates_once_and_once_per_live_seed():
    scheduler, evaluate = make()
    grow(scheduler, 7)
    assert evaluations(scheduler) == [1, 2, 3, 4, 5, 5, 5]
    assert evaluate.calls == 25


def test_evaluate_every_measures_at_every_kth_decision_only():
    scheduler, _ = make(evaluate_every=3)
    grow(scheduler, 8)
    assert evaluations(scheduler) == [1, 1, 1, 4, 1, 1, 5, 1]
    ages = scheduler.model.slot_state.contribution_age[0]
    assert ages.tolist() == [2, 2, 2, 2], "measured at the seventh decision; two have passed"


def test_with_metrics_given_nothing_is_evaluated_in_between():
    scheduler, evaluate = make(evaluate_every=2)
    for _ in range(4):
        train(scheduler)
        scheduler.step(1.0)
    # At the third decision: the network as it is and both seeds; without seeds the first needs nothing.
    assert evaluations(scheduler) == [0, 0, 3, 0]
    assert evaluate.calls == 3


def test_max_ablations_measures_seeds_in_turn():
    scheduler, _ = make(max_ablations=2)
    grow(scheduler, 4)
    measured = []
    for _ in range(6):
        train(scheduler)
        scheduler.step()
        ages = scheduler.model.slot_state.contribution_age[0]
        measured.append(np.flatnonzero(ages == 1).tolist())
    assert evaluations(scheduler)[:6] == [1, 2, 3, 3, 3, 3]
    # First the seed that was never measured, then the oldest measurements.
    assert 3 in measured[0]
    assert all(len(own) == 2 for own in measured)
    assert all(sorted(first + second) == [0, 1, 2, 3] for first, second in itertools.pairwise(measured))


def test_an_unmeasured_seed_keeps_its_contribution_and_its_age():
    scheduler, evaluate = make(max_ablations=1, actions=FOUR[:2], num_slots=2)
    grow(scheduler, 6)
    first = scheduler.model.slot_state.contribution[0].copy()
    assert np.isfinite(first).all()
    evaluate.worth = {"0": 50.0, "1": 50.0}
    train(scheduler)
    scheduler.step()
    now, ages = scheduler.model.slot_state.contribution[0], scheduler.model.slot_state.contribution_age[0]
    assert sorted(ages.tolist()) == [1, 2]
    assert now[ages == 1] == pytest.approx([50.0])
    assert now[ages == 2] == pytest.approx(first[ages == 2])


@given(
    seeds=st.lists(st.tuples(st.sampled_from([Stage.BLENDING, Stage.HOLDING]), st.integers(1, 9), st.booleans()),
                   min_size=1, max_size=12),
    limit=st.integers(1, 5),
)  # fmt: skip
def test_every_seed_is_measured_within_its_turn(seeds, limit):
    """With n seeds and m ablations, all are measured within ceil(n / m) decisions, held unmeasured ones first."""
    slots = SlotState.dormant(1, len(seeds))
    for index, (stage, age, known) in enumerate(seeds):
        slots.stage[0, index], slots.contribution_age[0, index] = stage, age
        slots.blueprint[0, index], slots.alpha[0, index] = 0, 1.0
        slots.contribution[0, index] = 0.5 if known else math.nan
    waiting = sum(stage == Stage.HOLDING and not known for stage, _, known in seeds)
    first = most_urgent(slots, to_measure(slots), limit)
    held_unknown = (slots.stage == Stage.HOLDING) & np.isnan(slots.contribution)
    assert (first & held_unknown).sum() == min(waiting, limit)
    seen = np.zeros(len(seeds), dtype=bool)
    for _ in range(math.ceil(len(seeds) / limit)):
        chosen = most_urgent(slots, to_measure(slots), limit)
        assert chosen.sum() == min(limit, len(seeds))
        slots.contribution[chosen], slots.contribution_age[chosen] = 0.5, 0
        slots.contribution_age += 1
        seen |= chosen[0]
    assert seen.all()


# Honest judgements.


def test_a_held_seed_is_not_judged_by_what_was_measured_at_a_lower_alpha():
    slots = SlotState.dormant(1, 3)
    slots.stage[0] = [Stage.HOLDING, Stage.HOLDING, Stage.BLENDING]
    slots.stage_age[0], slots.contribution_age[0] = [2, 2, 2], [2, 3, 3]
    slots.contribution[0] = [0.1, 0.2, 0.3]
    forget_earlier_alphas(slots)
    assert slots.contribution[0] == pytest.approx([0.1, math.nan, 0.3], nan_ok=True)


def test_a_seed_cannot_be_fossilized_before_it_was_measured_at_its_alpha():
    """Measured at decisions 0, 4, 8: at the fifth, before it is held, its ramp has landed; so it can be fossilized."""
    scheduler, _ = make(to_fossil("0"), evaluate_every=4)
    grow(scheduler, 3)
    train(scheduler)
    scheduler.step()  # the advance, at decision 3: the last measurement was at decision 0, without a seed
    scheduler.model.slot_state.contribution[0, 0] = 0.3  # as if it had been measured at decision 2
    scheduler.model.slot_state.contribution_age[0, 0] = 2
    scheduler._next_index += 1  # decision 5 measures nothing
    train(scheduler)
    scheduler.controller = ScriptedController({5: Action("fossilize", "0"), 8: Action("fossilize", "0")})
    with pytest.raises(ValueError, match="contribution must have been measured"):
        scheduler.step()
    scheduler._next_index = 8
    scheduler.step()
    assert scheduler.model.slot_state.stage[0, 0] == Stage.FOSSILIZED


@pytest.mark.parametrize("settings", [{"evaluate_every": 5}, {"max_ablations": 1}])
@pytest.mark.parametrize("controller", ["heuristic", "plan"])
def test_good_seeds_are_kept_and_bad_ones_pruned_although_few_are_measured(controller, settings):
    eager = HeuristicController(HeuristicConfig(min_improvement=100.0, max_live_seeds=4, holding_decisions=1))
    chosen = eager if controller == "heuristic" else PlanController(Plan(interval=1, max_seeds=4))
    scheduler, _ = make(chosen, worth={"0": 1.0, "1": -1.0, "2": 1.0, "3": 1.0}, **settings)
    seen: dict[str, set[Stage]] = {}
    for _ in range(29):
        train(scheduler)
        for change in scheduler.step().changes:
            seen.setdefault(change.slot, set()).add(change.new)
            if change.new in (Stage.FOSSILIZED, Stage.PRUNED):
                assert change.contribution == pytest.approx(-1.0 if change.slot == "1" else 1.0), "measured at alpha 1"
    if controller == "heuristic":
        assert {slot for slot, stages in seen.items() if Stage.PRUNED in stages} == {"1"}
    assert {slot for slot, stages in seen.items() if Stage.FOSSILIZED in stages} >= {"0", "2", "3"}


def test_a_resumed_run_measures_the_same_seeds(tmp_path):
    scheduler, _ = make(max_ablations=2, evaluate_every=2)
    resumed, _ = make(max_ablations=2, evaluate_every=2)
    grow(scheduler, 5)
    scheduler.save(tmp_path / "growth.safetensors")
    resumed.load(tmp_path / "growth.safetensors")
    for own in (scheduler, resumed):
        grow(own, 4)
    assert repr(resumed.model.slot_state.state_dict()) == repr(scheduler.model.slot_state.state_dict())
    assert evaluations(resumed) == evaluations(scheduler)


# Told and checked.


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({}, "once more per live seed and for one fossil\n"),
        ({"max_ablations": 3}, "for one fossil, at most 3 seeds\n"),
        ({"evaluate_every": 4}, "for one fossil, in one of 4 decisions\n"),
    ],
)
def test_the_cost_is_told(settings, told):
    assert told in repr(make(**settings)[0])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"evaluate_every": 0}, "evaluate_every must be a number of decisions, at least 1, got 0"),
        ({"evaluate_every": 1.5}, "got 1.5"),
        ({"max_ablations": 0}, "max_ablations must be a number of seeds, at least 1, or None for all, got 0"),
        ({"max_ablations": "all"}, "got 'all'"),
    ],
)
def test_wrong_costs_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        make(**settings)


def test_several_actions_of_one_decision_do_not_fossilize_what_was_measured_earlier():
    """Decisions 0 and 3 measure; at decision 4 the ramp has landed and the plan would advance and fossilize at once."""
    scheduler, _ = make(PlanController(Plan(max_seeds=1)), evaluate_every=3, actions_per_decision=4)
    grow(scheduler, 6)
    stages = [[str(change.new) for change in decision.changes] for decision in scheduler.decisions]
    assert stages == [["blending"], [], [], ["fossilized"], [], []]
    scheduler, _ = make(PlanController(Plan(max_seeds=1, tempo=5)), evaluate_every=4, actions_per_decision=4)
    grow(scheduler, 9)
    stages = [[str(change.new) for change in decision.changes] for decision in scheduler.decisions]
    # The ramp lands with decision 5, which was measured last at decision 4; decision 8 measures again.
    assert stages == [["blending"], [], [], [], [], ["holding"], [], [], ["fossilized"]]
