"""Schemes: what they add up to over whole lives, and that nothing breaks or unbounds them.

N hosts, S slots; lives are random but legal, played with the real lifecycle.
"""

import re
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simic.lifecycle.actions import HEAD_VALUES, HEADS, Op
from simic.lifecycle.slots import SlotState, execute, legal_ops, tick
from simic.lifecycle.stages import INCUBATIONS, LifecycleConfig, Stage
from simic.rewards import terms
from simic.rewards.schemes import FORFEIT_LIMIT, SCHEMES, TERMS, RewardConfig, compute_reward, reward, reward_term
from simic.rewards.transition import Transition

N, S = 6, 3
NAN, INF = float("nan"), float("inf")
random_life = given(rng_seed=st.integers(0, 2**32 - 1))
quickly = settings(max_examples=30, deadline=None)


def legal_actions(rng: np.random.Generator, slots: SlotState, config: LifecycleConfig) -> np.ndarray:
    """One legal action per host; operations are drawn first, so that late stages are reached."""
    sizes = [{"slot": S, "blueprint": 2}.get(head) or len(HEAD_VALUES[head]) for head in HEADS]
    actions = rng.integers(0, sizes, size=(N, len(HEADS)))
    legal = legal_ops(slots, config)
    odds = (rng.random((N, len(Op))) + 1e-6) * legal.any(2)
    actions[:, 0] = odds.argmax(1)
    chosen = legal[np.arange(N), actions[:, 0]]
    actions[:, 1] = (rng.random((N, S)) * chosen).argmax(1)
    return actions


def measure(rng: np.random.Generator, slots: SlotState) -> None:
    """Contributions of the seeds, some left out; counterfactual ones where alpha is 0."""
    contribution = rng.uniform(-1.0, 1.0, (N, S))
    contribution[rng.random((N, S)) < 0.1] = NAN
    slots.contribution[:] = np.where(slots.occupied, contribution, NAN)
    slots.counterfactual[:] = slots.occupied & (slots.alpha == 0)
    slots.gradient_norm[:] = np.where(slots.occupied, 1.0, NAN)


def live(rng_seed: int, length: int = 25, rollbacks: bool = False) -> list[Transition]:
    """The decisions of N episodes; with rollbacks, half of the hosts end early (and what follows does not count)."""
    rng = np.random.default_rng(rng_seed)
    config = LifecycleConfig(incubation=INCUBATIONS[rng_seed % 3], min_training_decisions=1, embargo_decisions=1)
    slots, metric, loss = SlotState.dormant(N, S), rng.random(N), rng.uniform(0, 5, N)
    first_metric = metric = np.where(rng.random(N) < 0.2, NAN, metric)
    first_loss, host_parameters = loss, rng.integers(10, 1000, N)
    parameters = host_parameters.copy()
    end = np.where(rng.random(N) < 0.5 * rollbacks, rng.integers(0, length, N), length)
    path = []
    for decision in range(length):
        before = slots.copy()
        actions = legal_actions(rng, slots, config)
        execute(slots, actions, config)
        tick(slots, config)
        measure(rng, slots)
        seed_parameters = np.where(slots.occupied, 100 * (slots.blueprint + 1), 0)
        state = (metric, loss, parameters)
        metric, loss = np.where(np.isnan(first_metric), NAN, rng.random(N)), rng.uniform(0, 5, N)
        parameters = host_parameters + seed_parameters.sum(1)
        path.append(
            Transition(
                op=actions[:, 0],
                slot=actions[:, 1],
                slots_before=before,
                slots_after=slots.copy(),
                metric_before=state[0],
                metric_after=metric,
                loss_before=state[1],
                loss_after=loss,
                parameters_before=state[2],
                parameters_after=parameters,
                host_parameters=host_parameters,
                seed_parameters_after=seed_parameters,
                final=np.full(N, decision == length - 1),
                rolled_back=end == decision,
                decision=np.full(N, decision),
                horizon=np.full(N, length),
                random_guess_loss=np.full(N, 2.3),
                first_metric=first_metric,
                first_loss=first_loss,
                earned=rng.normal(0, 100, N),
            )
        )
    return path


def take(facts: Transition, hosts: np.ndarray) -> Transition:
    """The same decision of some hosts, in the order asked for."""

    def pick(value: Any) -> Any:
        if isinstance(value, SlotState):
            return SlotState(**{f.name: getattr(value, f.name)[hosts] for f in fields(SlotState)})
        return value[hosts]

    return Transition(**{f.name: pick(getattr(facts, f.name)) for f in fields(Transition)})


def extreme(rng: np.random.Generator) -> Transition:
    """A decision in which everything that can go wrong has."""

    def draw(*values, shape=(N,)):
        return rng.choice(np.array(values, dtype=float), size=shape)

    def slots() -> SlotState:
        made = SlotState.dormant(N, S)
        made.stage[:] = rng.integers(0, len(Stage), (N, S))
        made.stage_age[:] = rng.choice([0, 1, 10**15], (N, S))
        made.blueprint[:] = rng.integers(-1, 2, (N, S))
        made.alpha[:] = draw(0.0, 0.5, 1.0, shape=(N, S))
        made.contribution[:] = draw(NAN, 0.0, -0.0, 1.0, -1.0, 1e-300, 1e300, -1e300, INF, -INF, shape=(N, S))
        made.counterfactual[:] = rng.random((N, S)) < 0.3
        return made

    metric, loss, parameters = (NAN, 0.0, 0.5, 1.0), (0.0, -5.0, 1e-300, 1e30, 1e308, INF, NAN), (0, 1, 1e9, 1e300)
    return Transition(
        op=rng.integers(0, len(Op), N),
        slot=rng.integers(0, S, N),
        slots_before=slots(),
        slots_after=slots(),
        metric_before=draw(*metric),
        metric_after=draw(*metric),
        loss_before=draw(*loss),
        loss_after=draw(*loss),
        parameters_before=draw(*parameters),
        parameters_after=draw(*parameters),
        host_parameters=draw(*parameters),
        seed_parameters_after=draw(*parameters, shape=(N, S)),
        final=rng.random(N) < 0.5,
        rolled_back=rng.random(N) < 0.3,
        decision=rng.choice([0, 1, 10**9], N),
        horizon=rng.choice([0, 1, 25], N),
        random_guess_loss=draw(1e-308, 1e-3, 2.3, 1e308),
        first_metric=draw(*metric),
        first_loss=draw(*loss),
        earned=draw(0.0, 1e30, -1e30, NAN),
    )


# What schemes add up to.


def test_lives_reach_every_stage_and_operation():
    paths = [facts for rng_seed in range(6) for facts in live(rng_seed)]
    assert {stage for facts in paths for stage in facts.slots_after.stage.flat} == set(Stage)
    assert {op for facts in paths for op in facts.op} == set(Op)


@quickly
@random_life
def test_score_sums_to_the_objective(rng_seed):
    path = live(rng_seed)
    first, last = path[0], path[-1]
    total = sum(compute_reward(facts, RewardConfig(rent_weight=2.0)).total for facts in path)

    def quality(metric, loss):
        return np.where(np.isnan(metric), 1 - np.minimum(loss / 2.3, 1), metric)

    rent = 2.0 * np.log2(last.parameters_after / last.host_parameters)
    gain = quality(last.metric_after, last.loss_after) - quality(first.metric_before, first.loss_before)
    np.testing.assert_allclose(total, 100 * gain - rent, atol=1e-9)


@quickly
@random_life
def test_compute_is_paid_for_as_long_as_it_lasts(rng_seed):
    path = live(rng_seed)
    paid = sum(
        compute_reward(facts, RewardConfig(compute_weight=0.5)).total - compute_reward(facts, RewardConfig()).total
        for facts in path
    )
    size = np.stack([facts.parameters_after for facts in path])
    np.testing.assert_allclose(paid, -0.5 * np.log2(size / path[0].host_parameters).mean(0), atol=1e-9)


@quickly
@given(
    rng_seed=st.integers(0, 2**32 - 1), gamma=st.sampled_from([0.5, 0.9, 0.99, 1.0]), start=st.sampled_from([0, 5, 12])
)
def test_shaping_telescopes_through_any_stages_prunes_and_rollbacks(rng_seed, gamma, start):
    path = live(rng_seed, rollbacks=True)
    total, counts = np.zeros(N), np.ones(N, dtype=bool)
    for facts in path[:start]:
        counts &= ~facts.rolled_back
    first = terms.potential(path[start].slots_before, np.zeros(N, dtype=bool))
    config = RewardConfig(scheme="simplified", gamma=gamma)
    for t, facts in enumerate(path[start:]):
        total += np.where(counts, gamma**t * compute_reward(facts, config).terms["stage"], 0.0)
        expected = gamma ** (t + 1) * terms.potential(facts.slots_after, facts.terminal) - first
        np.testing.assert_allclose(total[counts], expected[counts], atol=1e-9)
        # What the end of an episode leaves does not depend on the way there.
        np.testing.assert_allclose(total[counts & facts.terminal], -first[counts & facts.terminal], atol=1e-9)
        counts &= ~facts.rolled_back


@quickly
@random_life
def test_escrow_leaves_each_seed_with_its_credit_and_removed_seeds_with_nothing(rng_seed):
    paid, path = np.zeros((N, S)), live(rng_seed)
    for facts in path:
        paid += terms.escrow_change(facts)
        np.testing.assert_allclose(terms.escrow(facts), terms.escrow_change(facts).sum(1), atol=1e-9)
        np.testing.assert_allclose(paid[~facts.slots_after.occupied], 0.0, atol=1e-9)
        alone = (facts.counted_after.sum(1) == 1)[:, None] & facts.counted_after
        np.testing.assert_allclose(paid[alone], 100 * facts.contribution_after[alone], atol=1e-9)
    last = path[-1].slots_after
    np.testing.assert_allclose(paid[last.stage != Stage.FOSSILIZED], 0.0, atol=1e-9)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_episode_that_was_rolled_back_is_worth_its_penalty(scheme):
    facts = live(3)[12]
    broken = replace(facts, rolled_back=np.ones(N, dtype=bool), earned=np.full(N, 40.0))
    got = compute_reward(broken, RewardConfig(scheme=scheme, rollback_penalty=7.0))
    stage = got.terms.get("stage", 0.0)  # the potential goes back to 0
    np.testing.assert_allclose(got.total, -7.0 - 40.0 + stage)
    rich = replace(broken, earned=np.full(N, 1e9))
    np.testing.assert_allclose(compute_reward(rich, RewardConfig(scale=0.1)).terms["forfeit"], -0.1 * FORFEIT_LIMIT)


def test_sparse_is_clamped_then_scaled():
    last = live(1)[-1]
    score = np.clip(terms.score_after(last, 1e6), -100, 100)
    assert (score == -100).any()
    got = compute_reward(last, RewardConfig(scheme="sparse", rent_weight=1e6, scale=0.01))
    np.testing.assert_allclose(got.total, 0.01 * score)


# What holds for every scheme.


@settings(max_examples=40, deadline=None)
@given(rng_seed=st.integers(0, 2**32 - 1), scale=st.sampled_from([1.0, 0.01]), rent_weight=st.sampled_from([0.0, 1e3]))
def test_rewards_are_finite_bounded_and_the_sum_of_their_terms(rng_seed, scale, rent_weight):
    facts = extreme(np.random.default_rng(rng_seed))
    for scheme in SCHEMES:
        config = RewardConfig(scheme=scheme, scale=scale, rent_weight=rent_weight, compute_weight=rent_weight)
        got = compute_reward(facts, config)
        assert np.isfinite(got.total).all()
        assert (np.abs(got.total) <= config.bound * (1 + 1e-12)).all()
        expected = np.zeros(N)
        for points in got.terms.values():
            expected = expected + points
        np.testing.assert_array_equal(got.total, expected)
        assert set(got.terms) == set(SCHEMES[scheme]()) | {"rollback", "forfeit"}


@settings(max_examples=150, deadline=None)
@random_life
def test_each_term_keeps_its_own_bound(rng_seed):
    facts, config = extreme(np.random.default_rng(rng_seed)), RewardConfig(compute_weight=2.0)
    for name, term in TERMS.items():
        points = term.points(facts, config)
        assert points.shape == (N,), name
        assert np.isfinite(points).all(), name
        assert (np.abs(points) <= term.bound(config) * (1 + 1e-12)).all(), name


@settings(max_examples=10, deadline=None)
@random_life
def test_a_host_is_paid_the_same_in_any_company(rng_seed):
    order = np.random.default_rng(rng_seed).permutation(N)
    for facts in live(rng_seed, length=8, rollbacks=True):
        for scheme in SCHEMES:
            config = RewardConfig(scheme=scheme)
            together = compute_reward(facts, config).total
            np.testing.assert_array_equal(compute_reward(take(facts, order), config).total, together[order])
            np.testing.assert_array_equal(compute_reward(take(facts, order[:1]), config).total, together[order[:1]])


# The config.


def test_schemes_are_those_promised_and_use_known_terms():
    promised = "score score_with_costs shaped simplified sparse minimal escrow drip loss"
    assert list(SCHEMES) == promised.split()
    assert {name for weights in SCHEMES.values() for name in weights()} | {"rollback"} == set(TERMS)


def test_the_proxy_weight_follows_the_contribution_weight():
    assert RewardConfig(contribution_weight=2.0).proxy_weight == pytest.approx(2 * RewardConfig().proxy_weight)
    assert 0 < RewardConfig().proxy_weight < RewardConfig().contribution_weight


def test_another_gamma_is_refused_with_both_values():
    RewardConfig(gamma=0.97).check_gamma(0.97)
    with pytest.raises(ValueError, match=r"gamma is 0\.97, the learner's is 0\.99"):
        RewardConfig(gamma=0.97).check_gamma(0.99)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("gamma", 0.0),
        ("gamma", 1.1),
        ("scale", 0.0),
        ("scale", INF),
        ("rent_weight", -1.0),
        ("compute_weight", -1.0),
        ("contribution_weight", NAN),
        ("rollback_penalty", INF),
    ],
)
def test_wrong_settings_are_refused_by_name(field, value):
    with pytest.raises(ValueError, match=f"{field} must be .*got"):
        RewardConfig(**{field: value})


def test_thrifty_is_the_score_less_what_interventions_cost():
    for facts in live(rng_seed=3):
        score, score_with_costs = (
            compute_reward(facts, RewardConfig(scheme=scheme, compute_weight=1.0))
            for scheme in ("score", "score_with_costs")
        )
        costs = [-terms.INTERVENTION_COST[Op(op)] for op in facts.op]
        np.testing.assert_allclose(score_with_costs.total - score.total, costs, atol=1e-9)


# What users bring.


def test_a_scheme_of_one_s_own_pays_its_terms_clamped_to_their_bound(own_names):
    @reward_term("frugality", bound=10.0)
    def frugality(transition, config):
        return np.array([-3.0, 25.0, -INF, NAN, 0.0, 10.0])

    @reward("mine")
    def mine():
        return {"score": 1.0, "frugality": 0.5}

    facts, config = live(0)[2], RewardConfig(scheme="mine", scale=0.1)
    got = compute_reward(facts, config)
    # What is not a number counts as the worst.
    np.testing.assert_allclose(got.terms["frugality"], 0.1 * 0.5 * np.array([-3.0, 10.0, -10.0, -10.0, 0.0, 10.0]))
    score = compute_reward(facts, RewardConfig(scale=0.1)).terms["score"]
    np.testing.assert_array_equal(got.terms["score"], score)
    assert config.bound == RewardConfig(scale=0.1).bound + 0.1 * 0.5 * 10.0


def test_a_term_must_return_one_number_per_host(own_names):
    reward_term("short", bound=1.0)(lambda transition, config: np.zeros(2))
    with pytest.raises(
        ValueError, match=r"reward term short must return one number per host, shape \(6,\), got shape \(2,\)"
    ):
        compute_reward(live(0)[0], RewardConfig(weights={"short": 1.0}))
    with pytest.raises(ValueError, match="bound of reward term endless must be positive and finite, got inf"):
        reward_term("endless", bound=INF)


def test_weights_replace_those_of_the_scheme_one_by_one():
    facts = live(1)[5]
    whole = compute_reward(facts, RewardConfig(scheme="shaped"))
    assert np.abs(whole.terms["stage"]).max() > 0
    for name in SCHEMES["shaped"]():
        off = compute_reward(facts, RewardConfig(scheme="shaped", weights={name: 0.0}))
        assert off.terms.keys() == whole.terms.keys()
        assert not off.terms[name].any()
        np.testing.assert_allclose(off.total, whole.total - whole.terms[name], atol=1e-12)
    doubled = compute_reward(facts, RewardConfig(scheme="sparse", weights={"stage": 2.0}))
    np.testing.assert_allclose(doubled.terms["stage"], 2 * whole.terms["stage"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scheme": "scor"}, "scheme has no choice 'scor'; did you mean score?"),
        ({"weights": {"holdin": 0.0}}, "weights has no choice 'holdin'; did you mean holding?"),
        ({"weights": {"holding": INF}}, "weights: that of holding must be finite, got inf"),
    ],
)
def test_unknown_names_and_endless_weights_are_refused(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        RewardConfig(**changes)
