"""Every term against numbers worked by hand, one host and two slots unless said otherwise."""

import math

import numpy as np
import pytest

from simic.lifecycle.actions import Op
from simic.lifecycle.slots import SlotState
from simic.lifecycle.stages import Stage
from simic.rewards import terms
from simic.rewards.transition import Transition

NAN, INF = float("nan"), float("inf")


def slots(num_hosts: int = 1, **figures) -> SlotState:
    """Two slots per host; the first holds what `figures` say."""
    made = SlotState.dormant(num_hosts, 2)
    for name, value in figures.items():
        getattr(made, name)[:, 0] = value
    return made


def seed(stage: Stage = Stage.HOLDING, /, **figures) -> SlotState:
    """A seed that is fully in, in the first slot."""
    return slots(**{"stage": stage, "blueprint": 0, "alpha": 1.0} | figures)


def step(before: SlotState | None = None, after: SlotState | None = None, /, **changes) -> Transition:
    """A decision on one host of 1,000 parameters that stands still at 50 %, with `changes`."""
    figures = {
        "op": Op.WAIT,
        "slot": 0,
        "metric_before": 0.5,
        "metric_after": 0.5,
        "loss_before": 1.0,
        "loss_after": 1.0,
        "parameters_before": 1000,
        "parameters_after": 1000,
        "host_parameters": 1000,
        "final": False,
        "rolled_back": False,
        "decision": 0,
        "horizon": 10,
        "random_guess_loss": 2.0,
        "first_metric": 0.5,
        "first_loss": 1.0,
        "earned": 0.0,
    } | changes
    before = slots() if before is None else before
    per_slot = figures.pop("seed_parameters_after", (0, 0))
    return Transition(
        slots_before=before,
        slots_after=before if after is None else after,
        seed_parameters_after=np.array([per_slot]),
        **{name: np.array([value]) for name, value in figures.items()},
    )


def test_score_change_by_hand():
    # 50 % -> 60 % is +10; 1,000 -> 4,000 parameters is two doublings at half a point.
    facts = step(metric_after=0.6, parameters_after=4000)
    np.testing.assert_allclose(terms.score_change(facts, 0.5), 9.0)
    np.testing.assert_allclose(terms.score_before(facts, 0.5), 50.0)
    np.testing.assert_allclose(terms.score_after(facts, 0.5), 59.0)


def test_without_accuracy_the_score_is_the_share_of_the_random_guess_loss_that_is_gone():
    facts = step(first_metric=NAN, metric_before=NAN, metric_after=NAN, loss_before=1.5, loss_after=0.5)
    np.testing.assert_allclose(terms.score_change(facts, 1.0), 75.0 - 25.0)
    diverged = step(first_metric=NAN, metric_before=NAN, metric_after=NAN, loss_before=0.5, loss_after=INF)
    np.testing.assert_allclose(terms.score_change(diverged, 1.0), -75.0)


def test_contributions_of_tasks_without_accuracy_are_measured_in_random_guess_losses():
    held = seed(contribution=0.5)
    np.testing.assert_allclose(step(held).contribution_after[0, 0], 0.5)
    np.testing.assert_allclose(step(held, first_metric=NAN).contribution_after[0, 0], 0.25)


def test_rent_by_hand():
    facts = step(parameters_before=2000, parameters_after=8000)
    np.testing.assert_allclose(terms.rent(facts), -0.3)  # three doublings, a tenth of an episode
    np.testing.assert_allclose(terms.rent_change(facts), -2.0)
    np.testing.assert_allclose(terms.rent_change(step(parameters_after=10**18)), -16.0)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (1.0, 0.5, 25.0),  # half a nat of two
        (1.0, 2.0, -50.0),
        (1.0, 1e30, -150.0),  # held at twice the random-guess loss
        (1.0, NAN, -150.0),
        (INF, 0.0, 200.0),
    ],
)
def test_loss_change_takes_its_scale_from_the_task(before, after, expected):
    np.testing.assert_allclose(terms.loss_change(step(loss_before=before, loss_after=after)), expected)
    scaled = step(loss_before=1000 * before, loss_after=1000 * after, random_guess_loss=2000.0)
    np.testing.assert_allclose(terms.loss_change(scaled), expected)


@pytest.mark.parametrize(
    ("contribution", "progress", "expected"),
    [
        (0.04, 0.16, 0.4),  # the host gained more than the seed claims: full credit, a tenth of an episode's
        (0.16, 0.04, 0.8),  # it gained less: geometric mean, 8 points
        (0.16, 0.0, 0.0),  # no progress, no credit
        (0.16, -0.1, 0.0),
        (0.0, 0.16, -0.05),  # useless
        (-0.02, 0.16, -0.25),  # harmful: half a point and two more
        (-1.0, 0.16, -1.0),  # bounded
        (NAN, 0.16, 0.0),  # unknown
    ],
)
def test_attribution_by_hand(contribution, progress, expected):
    facts = step(seed(contribution=contribution), first_metric=0.5 - progress)
    np.testing.assert_allclose(terms.attribution(facts), expected, atol=1e-12)


def test_attribution_ignores_seeds_that_do_not_take_part():
    for figures in ({"alpha": 0.0}, {"counterfactual": True}, {"blueprint": -1}):
        facts = step(seed(contribution=0.2, **figures), first_metric=0.1)
        np.testing.assert_array_equal(terms.attribution(facts), 0.0)
    dropped = step(seed(contribution=0.2), first_metric=0.1, final=True)
    np.testing.assert_array_equal(terms.attribution(dropped), 0.0)


def test_hosts_that_got_worse_earn_less_credit_but_owe_as_much():
    worse = {"metric_before": 0.55, "first_metric": 0.1}
    np.testing.assert_allclose(terms.worsening_discount(step(**worse)), math.exp(-1))
    np.testing.assert_allclose(terms.worsening_discount(step(metric_after=0.9)), 1.0)
    np.testing.assert_allclose(terms.attribution(step(seed(contribution=0.1), **worse)), math.exp(-1))
    np.testing.assert_allclose(terms.attribution(step(seed(contribution=-0.02), **worse)), -0.25)


def test_all_seeds_of_a_host_together_are_worth_at_most_the_whole_metric():
    both = seed(contribution=0.9)
    for name, value in {"stage": Stage.HOLDING, "blueprint": 0, "alpha": 1.0, "contribution": 0.6}.items():
        getattr(both, name)[:, 1] = value
    np.testing.assert_allclose(terms.escrow_change(step(slots(), both)), [[60.0, 40.0]])
    facts = step(both, metric_before=1.0, metric_after=1.0, first_metric=0.0, horizon=1)
    np.testing.assert_allclose(terms.attribution(facts), 100.0)


def test_proxy_counts_progress_only_while_contributions_are_unknown():
    better = {"metric_after": 0.53}
    training = seed(Stage.TRAINING, alpha=0.0, contribution=0.1, counterfactual=True)
    np.testing.assert_allclose(terms.proxy(step(training, **better)), 3.0)
    np.testing.assert_allclose(terms.proxy(step(training, metric_after=0.48)), -2.0)
    np.testing.assert_array_equal(terms.proxy(step(slots(), **better)), 0.0)
    np.testing.assert_array_equal(terms.proxy(step(seed(contribution=0.1), **better)), 0.0)
    np.testing.assert_array_equal(terms.proxy(step(training, final=True, **better)), 0.0)


def test_timing_pays_early_fossils_that_help():
    fossil = seed(Stage.FOSSILIZED, contribution=0.1)
    for decision, expected in ((0, 1.0), (4, 0.6), (10, 0.0), (99, 0.0)):
        np.testing.assert_allclose(terms.timing(step(seed(), fossil, op=Op.FOSSILIZE, decision=decision)), expected)
    np.testing.assert_array_equal(terms.timing(step(seed(), fossil)), 0.0)
    harmful = seed(Stage.FOSSILIZED, contribution=-0.1)
    np.testing.assert_array_equal(terms.timing(step(seed(), harmful, op=Op.FOSSILIZE)), 0.0)


def test_stage_bonus_by_hand():
    blending, holding = seed(Stage.BLENDING, stage_age=9), seed(Stage.HOLDING, stage_age=1)
    # Blending 3.5 and five decisions of 0.2, holding 5.5; two slots, so half of it.
    np.testing.assert_allclose(terms.potential(blending, np.array([False])), 2.25)
    np.testing.assert_allclose(terms.stage_bonus(step(blending, holding), 0.9), 0.9 * 2.75 - 2.25)
    for end in ({"final": True}, {"rolled_back": True}):
        np.testing.assert_allclose(terms.stage_bonus(step(blending, holding, **end), 0.9), -2.25)


def test_no_stage_ends_above_the_start_of_the_next():
    way = [Stage.DORMANT, Stage.GERMINATED, Stage.TRAINING, Stage.BLENDING, Stage.HOLDING, Stage.FOSSILIZED]
    ends = [terms.potential(seed(stage, stage_age=10**6), np.array([False]))[0] for stage in way]
    starts = [terms.potential(seed(stage), np.array([False]))[0] for stage in way]
    assert all(end < start for end, start in zip(ends, starts[1:], strict=False))
    assert set(terms.STAGE_POTENTIAL) == set(Stage)


def test_alpha_shock_makes_one_jump_dearer_than_a_ramp():
    def shock(old, new):
        return terms.alpha_shock(step(seed(alpha=old), seed(alpha=new)))[0]

    np.testing.assert_allclose(shock(0.0, 1.0), -1.0)
    np.testing.assert_allclose(shock(1.0, 0.5), -0.25)
    np.testing.assert_allclose(sum(shock(i / 4, (i + 1) / 4) for i in range(4)), -0.25)
    both = slots()
    both.alpha[:] = 1.0
    np.testing.assert_allclose(terms.alpha_shock(step(slots(), both)), -1.0)


def test_holding_penalty_is_free_then_linear_then_bounded():
    ages = [0, 3, 4, 8, 13, 14, 10**9]
    got = [terms.holding(step(seed(stage_age=age)))[0] for age in ages]
    np.testing.assert_allclose(got, [0.0, 0.0, -0.1, -0.5, -1.0, -1.0, -1.0])
    np.testing.assert_array_equal(terms.holding(step(seed(Stage.FOSSILIZED, stage_age=50))), 0.0)


@pytest.mark.parametrize(
    ("contribution", "expected"),
    [(0.01, -1.0), (1.0, -3.0), (-0.002, 0.2), (-1.0, 0.3), (NAN, 0.0), (0.0, 0.0)],
)
def test_prune_shaping_by_hand(contribution, expected):
    facts = step(seed(contribution=contribution), slots(stage=Stage.PRUNED), op=Op.PRUNE)
    np.testing.assert_allclose(terms.prune_shaping(facts), expected, atol=1e-12)
    np.testing.assert_array_equal(terms.prune_shaping(step(seed(contribution=contribution))), 0.0)


def test_growing_bad_seeds_to_prune_them_does_not_pay():
    cost = terms.INTERVENTION_COST[Op.GERMINATE] + terms.INTERVENTION_COST[Op.PRUNE]
    assert cost > terms.MAX_PRUNE_BONUS


def test_every_operation_has_a_cost_and_waiting_is_free():
    assert set(terms.INTERVENTION_COST) == set(Op)
    assert terms.INTERVENTION_COST[Op.WAIT] == 0.0
    assert all(terms.INTERVENTION_COST[op] > 0 for op in Op if op != Op.WAIT)
    for op, cost in terms.INTERVENTION_COST.items():
        np.testing.assert_array_equal(terms.intervention(step(op=op)), -cost)


def test_terminal_bonus_and_sparse_score_by_hand():
    end = {"metric_after": 0.8, "parameters_after": 4000, "first_metric": 0.3}
    np.testing.assert_allclose(terms.terminal_bonus(step(final=True, **end), 1.0), 48.0)
    np.testing.assert_allclose(terms.sparse(step(final=True, **end), 1.0), 78.0)
    np.testing.assert_allclose(terms.sparse(step(final=True, **end), 1000.0), -100.0)
    np.testing.assert_array_equal(terms.terminal_bonus(step(**end), 1.0), 0.0)
    np.testing.assert_array_equal(terms.sparse(step(**end), 1.0), 0.0)


def test_escrow_pays_changes_and_claws_back_what_does_not_stay():
    first, second = seed(contribution=0.1), seed(contribution=0.25)
    np.testing.assert_allclose(terms.escrow(step(slots(), first)), 10.0)
    np.testing.assert_allclose(terms.escrow(step(first, second)), 15.0)
    np.testing.assert_allclose(terms.escrow(step(second, slots(stage=Stage.PRUNED), op=Op.PRUNE)), -25.0)
    np.testing.assert_allclose(terms.escrow(step(second, final=True)), -25.0)  # live at the end: not exported
    fossil = seed(Stage.FOSSILIZED, contribution=0.25)
    np.testing.assert_allclose(terms.escrow(step(second, fossil, final=True)), 0.0)


def test_fossils_are_worth_their_contribution_minus_their_own_rent():
    # 1,000 of 2,000 parameters are the seed's: one doubling. 10 points - 2.
    fossil = seed(Stage.FOSSILIZED, contribution=0.1)
    facts = step(seed(), fossil, op=Op.FOSSILIZE, parameters_after=2000, seed_parameters_after=(1000, 0))
    np.testing.assert_allclose(terms.fossilize_bonus(facts, 2.0), 8.0)
    np.testing.assert_allclose(terms.drip(facts, 2.0), 0.8)
    later = step(fossil, parameters_after=2000, seed_parameters_after=(1000, 0))
    np.testing.assert_array_equal(terms.fossilize_bonus(later, 2.0), 0.0)
    np.testing.assert_allclose(terms.drip(later, 2.0), 0.8)
    np.testing.assert_array_equal(terms.drip(step(seed(contribution=0.1)), 2.0), 0.0)


def test_a_fossil_that_has_become_harmful_is_charged_for_as_long_as_it_is():
    good, bad = (seed(Stage.FOSSILIZED, contribution=c) for c in (0.1, -0.1))
    grown = {"parameters_before": 2000, "parameters_after": 2000, "seed_parameters_after": (1000, 0)}
    np.testing.assert_allclose(terms.drip(step(good, bad, **grown), 2.0), -(10 + 2) / 10)
    np.testing.assert_allclose(terms.attribution(step(good, bad, metric_after=0.7, **grown)), -10 / 10)  # MAX_DEBIT
    np.testing.assert_allclose(terms.escrow(step(good, bad, **grown)), -20.0)  # the credit is taken back, and more
    np.testing.assert_allclose(terms.drip(step(bad, good, **grown), 2.0), (10 - 2) / 10)


@pytest.mark.parametrize(("earned", "expected"), [(30.0, -30.0), (500.0, -200.0), (-30.0, 0.0)])
def test_a_rollback_forfeits_earnings_but_not_debts(earned, expected):
    np.testing.assert_allclose(terms.forfeit(step(earned=earned, rolled_back=True), 200.0), expected)
    np.testing.assert_array_equal(terms.forfeit(step(earned=earned), 200.0), 0.0)
    np.testing.assert_array_equal(terms.rollback(step(rolled_back=True)), -1.0)


def test_facts_refuse_wrong_shapes_and_a_task_without_scale():
    with pytest.raises(ValueError, match=r"op must have shape \(2,\).*got \(1,\)"):
        step(slots(num_hosts=2))
    with pytest.raises(ValueError, match=r"random_guess_loss must be positive and finite, got 0\.0 for host 0"):
        step(random_guess_loss=0.0)
