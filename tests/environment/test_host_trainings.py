"""The decision cycle: agrees with a plain training loop, judges what is exported, and keeps hosts apart."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from simic.control.governor import Verdict
from simic.environment.config import EpisodeConfig
from simic.environment.host_trainings import HostTrainings, Outcome
from simic.environment.metric_errors import binomial_error, variance_error
from simic.environment.seeding import tells_data
from simic.lifecycle.actions import HEADS, Action
from simic.lifecycle.stages import IllegalActionError, LifecycleConfig, Stage
from simic.rewards.schemes import RewardBreakdown, RewardConfig
from simic.rewards.score import POINTS
from simic.stacked.data import StackedData
from simic.stacked.optimizer import OptimizerConfig
from simic.tasks.augmentation import CropAndFlip
from simic.tasks.hosts import resnet_host
from simic.tasks.registry import make_task
from simic.tasks.task import Task, evaluate

TASK = make_task("teacher-mlp", width=4, num_slots=2, train_size=64)
HORIZON = 6


def new_trainings(rng_seeds=(1, 2, 3), task=TASK, **changes: Any) -> HostTrainings:
    episode: dict[str, Any] = {"horizon": HORIZON, **changes}
    return HostTrainings(task, rng_seeds, episode=EpisodeConfig(**episode), reward=RewardConfig())


def paid(outcome: Outcome) -> RewardBreakdown:
    """The rewards, which these trainings always compute."""
    assert outcome.reward is not None
    return outcome.reward


def rows(trainings: HostTrainings, *actions: Action) -> np.ndarray:
    """One action per host, or the same for all."""
    return rows_of(TASK, trainings, *actions)


def rows_of(task: Task, trainings: HostTrainings, *actions: Action) -> np.ndarray:
    encoded = [action.encode(task.slots, trainings.hosts.blueprint_names) for action in actions]
    return np.stack(encoded * (trainings.num_hosts // len(encoded)))


WAIT = Action()
GROW = Action("germinate", "stem", "mlp_small")


@pytest.mark.parametrize("anneal", [True, False])
def test_hosts_that_only_wait_learn_as_in_a_plain_loop(anneal):
    trainings = new_trainings(anneal=anneal)
    for _ in range(4):
        trainings.step(rows(trainings, WAIT))
    for host, rng_seed in enumerate((1, 2, 3)):
        expected = plain_loop(rng_seed, 4, anneal=anneal)
        facts = trainings.facts()
        np.testing.assert_allclose(facts.val_loss[host, -5:], [e["loss"] for e in expected], rtol=1e-4)
        np.testing.assert_allclose(facts.val_accuracy[host, -5:], [e["accuracy"] for e in expected], atol=1e-6)


def test_batch_norm_and_augmentation_are_those_of_a_plain_loop():
    digits, host = make_task("digits-cnn", num_slots=3, train_size=128), partial(resnet_host, 1, 4, 2, 10, dims=2)
    task = replace(digits, make_host=host, learning_rate=3e-3, augment=CropAndFlip(padding=1))
    trainings = new_trainings(task=task, anneal=False)
    for _ in range(3):
        trainings.step(rows(trainings, WAIT))
    for host, rng_seed in enumerate((1, 2, 3)):
        expected = plain_loop(rng_seed, 3, anneal=False, task=task)
        np.testing.assert_allclose(trainings.facts().val_loss[host, -4:], [e["loss"] for e in expected], rtol=1e-3)


def plain_loop(rng_seed: int, host_epochs: int, *, anneal: bool, task: Task = TASK) -> list[dict[str, float]]:
    """One host, torch's own optimizer; its validation figures before and after every host epoch."""
    task = task.for_host(task.draw(rng_seed))
    with torch.random.fork_rng():
        torch.manual_seed(rng_seed)
        host = task.make_host()
    config = OptimizerConfig()
    optimizer = torch.optim.AdamW(host.parameters(), lr=task.learning_rate, weight_decay=config.weight_decay)
    data = StackedData([task.data], [rng_seed], batch_size=task.batch_size, augment=task.augment)
    figures = [evaluate(host, task)]
    for host_epoch in range(host_epochs):
        factor = (1 + math.cos(math.pi * host_epoch / HORIZON)) / 2 if anneal else 1.0
        optimizer.param_groups[0]["lr"] = task.learning_rate * factor
        for x, y in data.batches():
            optimizer.zero_grad()
            task.loss(host(x[0]), y[0]).backward()
            torch.nn.utils.clip_grad_norm_(host.parameters(), config.max_gradient_norm)
            optimizer.step()
        figures.append(evaluate(host, task))
    return figures


def test_what_is_known_before_and_after_a_decision():
    trainings = new_trainings()
    before = trainings.facts()
    assert before.decision.tolist() == [0, 0, 0]
    assert before.horizon.tolist() == [HORIZON] * 3
    assert np.isnan(before.host_gradient_norm).all()
    assert np.isnan(before.train_loss).all()
    assert np.isfinite(before.val_loss[:, -1]).all()
    assert np.isnan(before.val_loss[:, :-1]).all()
    outcome = trainings.step(rows(trainings, GROW))
    after = outcome.facts
    assert after.decision.tolist() == [1, 1, 1]
    assert np.array_equal(after.previous_action, rows(trainings, GROW))
    assert np.array_equal(after.val_loss[:, -2], before.val_loss[:, -1])
    assert (after.host_gradient_norm > 0).all()
    assert np.isfinite(after.train_loss[:, -1]).all()
    assert (after.slots.gradient_norm[:, 0] > 0).all()
    assert before.decision.tolist() == [0, 0, 0], "facts are copies"
    assert not outcome.ended.any()
    assert not outcome.verdict.any()


def test_a_contribution_is_the_metric_with_the_seed_minus_without_it():
    trainings = new_trainings()
    for action in (GROW, WAIT, WAIT):
        facts = trainings.step(rows(trainings, action)).facts
    assert (facts.slots.alpha[:, 0] > 0).all()
    without = trainings._evaluate("validation", exported=True)[1]  # the only live seed is left out
    np.testing.assert_allclose(facts.slots.contribution[:, 0], facts.val_accuracy[:, -1] - without, atol=1e-6)
    assert np.isnan(facts.slots.contribution[:, 1]).all()
    assert not facts.slots.counterfactual.any()
    assert not facts.slots.contribution_age[:, 0].any(), "measured just now"


def test_a_seed_in_training_is_measured_at_its_alpha_target_and_marked():
    shadow = LifecycleConfig(incubation="shadow")
    trainings = HostTrainings(TASK, (1, 2, 3), episode=EpisodeConfig(horizon=HORIZON), lifecycle=shadow)
    grow = Action("germinate", "stem", "mlp", alpha_target=0.7)
    for action in (grow, Action("advance", "stem"), WAIT):
        facts = trainings.step(rows(trainings, action)).facts
    slot_state = trainings.hosts.slot_state
    assert facts.slots.counterfactual.tolist() == [[True, False]] * 3
    slot_state.stage[:, 0], slot_state.alpha[:, 0] = Stage.HOLDING, 0.7
    trainings.hosts.sync_with_slots()
    joined = trainings._evaluate("validation")[1]
    np.testing.assert_allclose(facts.slots.contribution[:, 0], joined - facts.val_accuracy[:, -1], atol=1e-6)


def without_each(trainings: HostTrainings) -> np.ndarray:
    """Metric as it is minus the metric with each seed's alpha at 0, by whole evaluations (N, S)."""
    slot_state = trainings.hosts.slot_state
    now, alpha, result = (
        trainings._evaluate("validation")[1],
        slot_state.alpha.copy(),
        np.full(slot_state.stage.shape, np.nan),
    )
    for slot in range(slot_state.stage.shape[1]):
        slot_state.alpha[:, slot] = 0
        trainings.hosts.sync_with_slots()
        result[:, slot] = now - trainings._evaluate("validation")[1]
        slot_state.alpha[:] = alpha
        trainings.hosts.sync_with_slots()
    return result


def keep_in(slot: str) -> list[Action]:
    return [
        Action("germinate", slot, "mlp", tempo=3),
        WAIT,
        WAIT,
        *(Action(op, slot) for op in ("advance", "fossilize")),
    ]


def test_a_fossil_is_told_what_it_contributes_now():
    task = make_task("digits-mlp")
    reward = RewardConfig(scheme="drip")
    trainings = HostTrainings(task, (0, 1), episode=EpisodeConfig(horizon=40, anneal=False), reward=reward)
    true: list[np.ndarray] = []
    outcomes: list[Outcome] = []
    for action in [*keep_in("stem"), *keep_in("block1"), *[WAIT] * 4]:
        outcome = trainings.step(rows_of(task, trainings, action))
        outcomes.append(outcome)
        true.append(without_each(trainings))
        slots, fossil = outcome.facts.slots, outcome.facts.slots.stage == Stage.FOSSILIZED
        assert (slots.contribution_age[fossil] < 2).all(), "two fossils take turns"
        for host, slot in np.argwhere(fossil):
            then = true[-1 - slots.contribution_age[host, slot]][host, slot]
            assert slots.contribution[host, slot] == pytest.approx(then, abs=1e-6)
    outcome = outcomes[-1]
    slots, fossil = outcome.facts.slots, outcome.facts.slots.stage == Stage.FOSSILIZED
    assert fossil.sum() == 4
    # What `drip` pays is a share of the present contribution less the fossil's own rent.
    own = np.log2(trainings.parameters()[:, None] / (trainings.parameters()[:, None] - outcome.facts.seed_parameters))
    worth = np.where(fossil, POINTS * slots.contribution - own, 0.0).sum(1)
    assert paid(outcome).terms["drip"] == pytest.approx(0.7 * worth / 40)
    moved = np.abs(true[-1][:, 0] - true[4][:, 0])
    assert moved.max() > 0.02, "what was measured at the fossilization is no longer true"


def test_what_was_measured_in_a_broken_host_is_not_told():
    trainings = new_trainings(horizon=20)
    before = [trainings.step(rows(trainings, action)).facts for action in keep_in("stem")][-1]
    trainings.hosts.hosts.rows[1] = torch.nan
    after = trainings.step(rows(trainings, WAIT)).facts
    assert after.slots.contribution[1, 0] == before.slots.contribution[1, 0]
    assert after.slots.contribution_age[:, 0].tolist() == [0, 1, 0]


def test_the_governor_forgets_what_was_usual_when_a_seed_leaves():
    trainings = new_trainings()
    for action in (GROW, WAIT, WAIT):
        trainings.step(rows(trainings, action))
    trainings.step(rows(trainings, WAIT, Action("prune", "stem"), WAIT))
    known = np.isfinite(trainings.governor.state_dict()["history"])  # (2, N, W)
    assert known.sum(2).tolist() == [[4, 1, 4]] * 2


def test_at_the_end_the_exported_network_counts():
    trainings = new_trainings()
    outcomes = [trainings.step(rows(trainings, action)) for action in (GROW, *[WAIT] * (HORIZON - 1))]
    assert [outcome.ended.all() for outcome in outcomes] == [False] * (HORIZON - 1) + [True]
    loss, metric = trainings._evaluate("validation", exported=True)
    assert np.array_equal(outcomes[-1].facts.val_loss[:, -1], loss)
    assert (trainings.parameters() > trainings.parameters(exported=True)).all()
    assert (trainings.parameters(exported=True) == trainings.hosts.host_parameters).all()
    # Nothing was kept, so no rent is due: the rewards are the gain in accuracy.
    earned = np.sum([paid(outcome).total for outcome in outcomes], axis=0)
    np.testing.assert_allclose(earned, POINTS * (metric - trainings._first[1]), atol=1e-9)


def test_an_illegal_action_changes_nothing():
    trainings, twin = new_trainings(), new_trainings()
    wrong = rows(trainings, GROW, WAIT, Action("advance", "stem"))
    with pytest.raises(IllegalActionError, match="advance in slot stem of host 2"):
        trainings.step(wrong)
    same_future(trainings, twin, [GROW, WAIT])


def same_future(one: HostTrainings, other: HostTrainings, actions: list[Action]) -> None:
    for action in actions:
        ours, theirs = one.step(rows(one, action)), other.step(rows(other, action))
        assert np.array_equal(ours.facts.val_loss, theirs.facts.val_loss, equal_nan=True)
        assert np.array_equal(ours.facts.host_gradient_norm, theirs.facts.host_gradient_norm)
        assert np.array_equal(paid(ours).total, paid(theirs).total)
    assert torch.equal(one.hosts.hosts.rows, other.hosts.hosts.rows)


def test_a_new_episode_is_as_if_there_had_been_no_other():
    task = replace(TASK, variation=replace(TASK.variation, rate_factor=(0.2, 5.0)))
    used, fresh = new_trainings((7, 8, 9), task), new_trainings((1, 2, 3), task)
    for action in (GROW, WAIT, Action("prune", "stem")):
        used.step(rows(used, action))
    used.reset(np.arange(3), (1, 2, 3))
    same_future(used, fresh, [GROW, WAIT, WAIT])


def test_a_reset_of_one_host_leaves_the_others_alone():
    trainings, twin = new_trainings(), new_trainings()
    for one in (trainings, twin):
        for action in (GROW, WAIT):
            one.step(rows(one, action))
    before = trainings.facts()
    after = trainings.reset(np.array([1]), (42,))
    others = [0, 2]
    for name in ("decision", "val_loss", "val_accuracy", "train_loss", "previous_action", "host_gradient_norm"):
        assert np.array_equal(getattr(before, name)[others], getattr(after, name)[others], equal_nan=True), name
    assert np.array_equal(before.slots.gradient_norm[others], after.slots.gradient_norm[others], equal_nan=True)
    assert np.array_equal(trainings._first[:, others], twin._first[:, others])
    assert after.decision[1] == 0
    assert not after.slots.occupied[1].any()
    for _ in range(2):
        ours, theirs = trainings.step(rows(trainings, WAIT)).facts, twin.step(rows(twin, WAIT)).facts
        np.testing.assert_allclose(ours.val_loss[others], theirs.val_loss[others], atol=1e-5)
        np.testing.assert_allclose(ours.host_gradient_norm[others], theirs.host_gradient_norm[others], rtol=1e-4)


def test_a_host_that_breaks_at_birth_returns_to_its_own_first_weights():
    trainings = new_trainings(anneal=False)
    assert paid(trainings.step(rows(trainings, WAIT))).total[1] != 0
    trainings.reset(np.array([1]), (42,))
    born = trainings.hosts.hosts.rows[1].clone()
    trainings.hosts.hosts.rows[1] = torch.nan
    outcome = trainings.step(rows(trainings, GROW))
    assert outcome.verdict.tolist() == [Verdict.OK, Verdict.NOT_FINITE, Verdict.OK]
    assert outcome.ended.tolist() == [False, True, False]
    assert torch.equal(trainings.hosts.hosts.rows[1], born)
    assert paid(outcome).terms["forfeit"][1] == 0, "what its predecessor earned is not its own"
    assert outcome.facts.slots.stage[:, 0].tolist() == [Stage.BLENDING, Stage.PRUNED, Stage.BLENDING]
    assert (outcome.facts.host_gradient_norm[[0, 2]] > 0).all()


# What each seed brought, at the end.

FOSSIL_AND_LIVE = [
    GROW,
    *[WAIT] * 3,
    Action("advance", "stem"),
    Action("fossilize", "stem"),
    Action("germinate", "block1", "mlp"),
    WAIT,
]


def last_outcome(trainings: HostTrainings, actions: list[Action]) -> Outcome:
    """Of an episode's decisions; none but the last may end it."""
    for action in actions[:-1]:
        assert not trainings.step(rows(trainings, action)).ended.any()
    return trainings.step(rows(trainings, actions[-1]))


def test_the_end_of_an_episode_says_what_each_seed_brought():
    trainings = new_trainings(horizon=len(FOSSIL_AND_LIVE), anneal=False)
    outcome = last_outcome(trainings, FOSSIL_AND_LIVE)
    slot_state, shares = trainings.hosts.slot_state, trainings.attribute(outcome.ended)
    assert (slot_state.stage == [Stage.FOSSILIZED, Stage.BLENDING]).all()
    fossil, both = outcome.facts.val_accuracy[:, -1], trainings._evaluate("validation")[1]
    slot_state.alpha[:, 0] = 0
    trainings.hosts.sync_with_slots()
    none, live = trainings._evaluate("validation", exported=True)[1], trainings._evaluate("validation")[1]
    # Each comes first in one order and second in the other.
    expected = np.stack([fossil - none + both - live, live - none + both - fossil], axis=1) / 2
    np.testing.assert_allclose(shares.shapley, expected, atol=1e-6)
    np.testing.assert_allclose(shares.shapley.sum(1), both - none, atol=1e-6)
    assert (np.abs(expected) > 1e-3).any(0).all(), "both kinds matter"
    assert not shares.shapley_error.any()
    for one, other in ((0, 1), (1, 0)):
        np.testing.assert_allclose(shares.interaction[:, one, other], both - fossil - live + none, atol=1e-6)


def test_a_host_that_breaks_gets_no_shares():
    trainings = new_trainings(horizon=len(FOSSIL_AND_LIVE))
    for action in FOSSIL_AND_LIVE[:-1]:
        trainings.step(rows(trainings, action))
    trainings.hosts.hosts.rows[1] = torch.nan
    outcome = trainings.step(rows(trainings, WAIT))
    assert outcome.ended.all()
    assert outcome.facts.slots.stage[1].tolist() == [Stage.FOSSILIZED, Stage.PRUNED]
    shares = trainings.attribute(outcome.verdict == Verdict.OK)
    for values in shares:
        assert np.isnan(values[1]).all()
    assert np.isfinite(shares.shapley[[0, 2]]).all()


def test_shares_do_not_disturb_training():
    asked, unasked = new_trainings(), new_trainings()
    state = torch.get_rng_state()
    for one in (asked, unasked):
        one.step(rows(one, GROW))
        one.reset(np.array([1]), (42,))
        for _ in range(HORIZON - 2):
            one.step(rows(one, WAIT))
    for one in (asked, unasked):
        assert one.step(rows(one, WAIT)).ended.tolist() == [True, False, True]
    assert np.isfinite(asked.attribute(np.array([True, False, True])).shapley).any()
    assert torch.equal(torch.get_rng_state(), state)
    for one in (asked, unasked):
        one.reset(np.array([0, 2]), (43, 44))
    same_future(asked, unasked, [GROW, WAIT, WAIT])


def likelihood(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A metric that every seed changes a little."""
    return (-cross_entropy(logits, targets)).exp()


def test_with_many_seeds_shares_are_sampled_from_each_hosts_own_rng_seed():
    task = replace(make_task("teacher-mlp", width=4, num_slots=5, train_size=64), metric=likelihood)
    actions = [Action("germinate", slot, "mlp_small") for slot in task.slots]
    few, many = (HostTrainings(task, seeds, episode=EpisodeConfig(horizon=5)) for seeds in ((5, 6), (7, 6, 8, 5)))
    results = []
    for one in (few, many):
        for action in actions:
            row = action.encode(task.slots, one.hosts.blueprint_names)
            one.step(np.tile(row, (one.num_hosts, 1)))
        results.append(one.attribute(np.ones(one.num_hosts, dtype=bool)))
    for ours, theirs in zip(*results, strict=True):
        np.testing.assert_allclose(ours, theirs[[3, 1]], atol=1e-6)
    assert (results[0].shapley_error > 0).all()
    few.hosts.rng_seeds[0] = 9
    again = few.attribute(np.ones(2, dtype=bool)).shapley
    assert not np.array_equal(again[0], results[0].shapley[0])
    assert np.array_equal(again[1], results[0].shapley[1])


def test_nothing_but_the_test_quality_sees_the_test_split():
    other = replace(TASK, variation=replace(TASK.variation, problems=()))
    data = other.data
    flipped = replace(other, data=replace(data, test_x=-data.test_x, test_y=(data.test_y + 1) % data.num_classes))
    one, two = new_trainings(task=other), new_trainings(task=flipped)
    same_future(one, two, [GROW, *[WAIT] * (HORIZON - 1)])
    assert not np.array_equal(one.test_quality(), two.test_quality())


def test_an_episode_needs_a_decision():
    with pytest.raises(ValueError, match="horizon must be at least 1, got 0"):
        EpisodeConfig(horizon=0)


def test_actions_are_rows_of_heads():
    trainings = new_trainings()
    with pytest.raises(IllegalActionError, match=rf"shape \(3, {len(HEADS)}\)"):
        trainings.step(np.zeros((2, len(HEADS)), dtype=np.int64))


def test_training_is_described_before_it_begins_and_measured_after():
    told = [rng_seed for rng_seed in range(20) if tells_data(rng_seed)][:2]
    untold = next(rng_seed for rng_seed in range(20) if not tells_data(rng_seed))
    trainings = new_trainings((*told, untold))
    before = trainings.facts()
    assert before.batches.tolist() == [1] * 3
    assert before.train_samples[:2].tolist() == [64, 64]
    expected = [TASK.draw(rng_seed).learning_rate / 1e-3 for rng_seed in (*told, untold)]
    assert before.learning_rate.tolist() == before.first_learning_rate.tolist() == pytest.approx(expected)
    assert before.adaptive.tolist() == [1] * 3
    assert np.isnan(before.loss_noise).all()
    assert np.isnan(before.host_weight_norm).all()
    trainings.step(rows(trainings, WAIT))
    after = trainings.step(rows(trainings, WAIT)).facts
    norms = trainings.hosts.hosts.rows.double().square().sum(1).sqrt()
    np.testing.assert_allclose(after.host_weight_norm, norms.numpy(), rtol=1e-5)
    factor = (1 + math.cos(math.pi / HORIZON)) / 2  # that of the host epoch before
    np.testing.assert_allclose(after.learning_rate, np.array(expected) * factor)
    assert np.isfinite(after.loss_noise[:2]).all()
    assert (after.metric_error[:2] > 0).all()
    for name in ("train_samples", "loss_noise", "metric_error"):
        assert np.isnan(getattr(after, name)[2]), f"{name} of a host that does not tell"
    fresh = trainings.reset(np.array([0]), [untold])
    assert np.isnan(fresh.loss_noise[0])
    assert np.isnan(fresh.train_samples[0])
    assert fresh.loss_noise[1] == after.loss_noise[1]


def test_noise_is_the_spread_of_the_losses_of_batches():
    task = make_task("teacher-mlp", width=4, num_slots=2, train_size=256)
    rng_seed = next(rng_seed for rng_seed in range(20) if tells_data(rng_seed))
    trainings, seen = new_trainings((rng_seed,), task), list[float]()
    train_step = trainings.hosts.train_step

    def noting(x: torch.Tensor, y: torch.Tensor, rate: torch.Tensor) -> torch.Tensor:
        losses = train_step(x, y, rate)
        seen.append(float(losses))
        return losses

    trainings.hosts.train_step = noting
    facts = trainings.step(rows_of(task, trainings, WAIT)).facts
    assert len(seen) == facts.batches[0] == 4
    assert facts.loss_noise[0] == pytest.approx(np.std(seen) / np.mean(seen), rel=1e-3)


def test_errors_of_metrics_by_hand():
    assert binomial_error(np.array([0.5, 1.0]), 98).tolist() == pytest.approx(
        [0.5 / 98**0.5, (0.99 * 0.01 / 98) ** 0.5]
    )
    assert variance_error(np.array([0.75]), 50).tolist() == pytest.approx([0.05])
