"""PPOAgent: what an update does, step by step, and what it refuses to do."""

import copy
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.rollouts import RandomHosts, actors, flat_agent, growth_agent, play, stir, without

from simic.lifecycle.actions import HEADS, Op
from simic.policy.masked_categorical import MaskedCategorical
from simic.ppo import losses
from simic.ppo.agent import DivergedError
from simic.ppo.metrics import UpdateMetrics
from simic.ppo.objective import mean_weights, ppo_terms

ONE_STEP: dict[str, Any] = {"ppo_epochs": 1, "num_minibatches": 1}
UNSCALED: dict[str, Any] = {"scale_rewards": False, "normalize_values": False}


def parameters(agent) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in agent.plain.named_parameters()}


def same(one, other) -> bool:
    return one.keys() == other.keys() and all((value == other[name]).all() for name, value in one.items())


# Acting.


def test_what_is_sampled_can_be_executed():
    """1,000 random decisions on real slots, sampled and greedy: the rules refuse none."""
    agent, hosts = stir(growth_agent()), RandomHosts(20, 3)
    state = agent.initial_state(20)
    for step in range(50):
        observation, mask = hosts.look()
        decision = agent.act(observation, mask, state, greedy=step % 10 == 9)
        hosts.step(decision.action)  # raises at an illegal one
        state = decision.state
        hosts.reset(hosts.rng.random(20) < 0.02)


def test_acting_tells_the_value_in_real_units_and_the_probabilities():
    agent = stir(flat_agent())
    rollout, _ = play(agent, 3, 4)
    agent.value_scale.update(torch.tensor([[4.0], [6.0]]))  # mean 5, deviation 1
    observation, mask = {"base": rollout.observation["base"][0].numpy()}, rollout.mask[0].numpy()
    decision = agent.act(observation, mask, agent.initial_state(4))
    output = agent.plain({"base": rollout.observation["base"][:1]}, agent.initial_state(4))
    assert decision.value == pytest.approx((5 + output.value[0]).tolist(), abs=1e-4)
    assert agent.value(observation, agent.initial_state(4)) == pytest.approx(decision.value)
    for head in range(2):
        row = MaskedCategorical(output.logits[0, :, head], rollout.mask[0, :, head])
        chosen = row.log_prob(torch.from_numpy(decision.action[:, head]))
        assert decision.log_prob[:, head] == pytest.approx(chosen.tolist(), abs=1e-5)
    assert not decision.state.requires_grad
    assert torch.allclose(decision.state, output.state)


def test_greedy_takes_the_likeliest_and_draws_nothing():
    agent = stir(flat_agent())
    rollout, _ = play(agent, 1, 5)
    before = agent.generator.get_state()
    arguments = ({"base": rollout.observation["base"][0].numpy()}, rollout.mask[0].numpy(), agent.initial_state(5))
    action = agent.act(*arguments, greedy=True).action
    assert (agent.generator.get_state() == before).all()
    logits = agent.plain({"base": rollout.observation["base"][:1]}, agent.initial_state(5)).logits[0]
    expected = torch.where(rollout.mask[0], logits, -torch.inf).argmax(-1)
    assert (action == expected.numpy()).all()


def test_a_generator_of_the_callers_is_used():
    agent = flat_agent()
    rollout, _ = play(agent, 1, 30)
    arguments = ({"base": rollout.observation["base"][0].numpy()}, rollout.mask[0].numpy(), agent.initial_state(30))
    before = agent.generator.get_state()
    one, other = (agent.act(*arguments, generator=torch.Generator().manual_seed(3)).action for _ in range(2))
    assert (one == other).all()
    assert (agent.generator.get_state() == before).all()
    assert (agent.act(*arguments).action != one).any()


# Scales, before anything else.


def test_observation_statistics_include_the_rollout_and_only_its_valid_steps():
    agent = flat_agent()
    rollout, _ = play(agent, 12, 3)
    rollout = replace(rollout, valid=rollout.valid.clone())
    rollout.valid[5:, 2] = False
    agent.update(rollout)
    rows = rollout.observation["base"][rollout.valid].double()
    assert torch.allclose(agent.plain.normalizer("base").mean, rows.mean(0))
    assert torch.allclose(agent.plain.normalizer("base").variance, rows.var(0, correction=0))


@pytest.mark.parametrize("make", [flat_agent, growth_agent])
def test_probabilities_are_compared_under_the_statistics_that_include_the_rollout(make):
    """With a step of no size nothing moves: every ratio of the update is 1, though the normalisers have moved."""
    agent = stir(make(learning_rate=1e-30, target_kl=None))
    rollout, _ = play(agent, 20, 4)
    metrics = agent.update(rollout)
    assert metrics.ratio_max == pytest.approx(1.0, abs=1e-5)
    assert metrics.ratio_min == pytest.approx(1.0, abs=1e-5)
    assert metrics.kl == pytest.approx(0.0, abs=1e-7)
    assert metrics.steps_taken == 16


def test_normalisation_that_is_off_stays_off():
    agent = flat_agent({"normalize_observations": False}, scale_rewards=False, normalize_values=False)
    rollout, _ = play(agent, 6, 2)
    agent.update(rollout)
    assert agent.plain.normalizer("base").count == 0
    assert agent.return_scale.moments.count == 0
    assert agent.value_scale.count == 0


def test_rewards_are_divided_by_the_scale_that_includes_them_and_never_centred():
    """All rewards 100: returns are far above 0 in units of their deviation, and the sign is kept."""
    agent = flat_agent(gamma=0.5)
    rollout, _ = play(agent, 10, 3)
    scaled = agent.update_scales(replace(rollout, reward=torch.full((10, 3), 100.0)))
    returns, running = [], np.zeros(3)
    for first in rollout.first.numpy():
        running = np.where(first, 0, 0.5 * running) + 100
        returns.append(running)
    assert scaled.reward[0, 0].item() == pytest.approx(100 / np.std(returns), rel=1e-4)
    assert (scaled.reward > 0).all()


def test_targets_are_returns_in_the_critics_new_units():
    """The value loss before the first step is half the mean squared advantage in units of the returns' deviation."""
    agent = stir(flat_agent(**ONE_STEP))
    rollout, _ = play(agent, 20, 4)
    metrics = agent.update(rollout)
    other = stir(flat_agent(**ONE_STEP))
    batch, statistics = other.prepare_batch(other.update_scales(rollout))
    raw = batch.target - batch.value
    expected = (raw.double() ** 2).mean() / 2 / batch.target.double().var(correction=0)
    assert metrics.value_loss == pytest.approx(expected.item(), rel=1e-3)
    assert metrics.advantage_mean == pytest.approx(raw[batch.free].mean().item(), abs=1e-5)
    assert metrics.explained_variance == pytest.approx(1 - (raw.var() / batch.target.var()).item(), abs=1e-4)
    assert statistics.return_mean.item() == pytest.approx(batch.target.mean().item(), abs=1e-5)


def test_values_learn_their_units_from_valid_steps_only():
    """Returns of 1 in steps that count, of 1000 in those that do not."""
    agent = flat_agent(gamma=0.0, scale_rewards=False)
    rollout, _ = play(agent, 6, 2)
    valid = rollout.valid.clone()
    valid[3:, 1] = False
    agent.update(replace(rollout, reward=torch.where(valid, 1.0, 1000.0), valid=valid))
    assert agent.value_scale.mean.item() == pytest.approx(1.0, abs=1e-5)


# Advantages.


def test_advantages_are_recomputed_only_if_asked():
    outcomes = []
    for recompute in (False, True):
        agent = stir(flat_agent(recompute_advantages=recompute, ppo_epochs=2, num_minibatches=1, learning_rate=0.05))
        calls = []
        plain = agent.refresh_advantages
        agent.refresh_advantages = lambda batch, plain=plain, calls=calls: calls.append(1) or plain(batch)
        agent.update(play(agent, 12, 3)[0])
        outcomes.append((len(calls), parameters(agent)))
    assert [calls for calls, _ in outcomes] == [0, 1]
    assert not same(outcomes[0][1], outcomes[1][1])


# The entropy bonus.


@pytest.mark.parametrize("head_sizes", [(3,), (3, 3), (3, 3, 3, 3, 3)])
def test_the_entropy_coefficient_does_not_grow_with_the_number_of_heads(head_sizes):
    """Uniform heads: the bonus is the coefficient itself, for one head or five."""
    agent = flat_agent(head_sizes=head_sizes, entropy_coefficient=0.3, value_coefficient=0.0)
    with torch.no_grad():
        for actor in actors(agent):
            actor.weight.zero_()
    rollout, _ = play(agent, 8, 2)
    rollout = replace(rollout, mask=torch.ones_like(rollout.mask))
    batch, statistics = agent.prepare_batch(rollout)
    batch = replace(batch, advantage=torch.zeros_like(batch.advantage))
    weights = agent.entropy_weights(statistics.head_entropy)
    terms = ppo_terms(agent.network, batch, mean_weights(batch), weights, agent.value_scale.mean_std(), agent.config)
    assert terms.loss.item() == pytest.approx(-0.3, abs=1e-5)


def test_multipliers_say_how_the_bonus_is_shared():
    agent = flat_agent(entropy_coefficient=0.4, head_entropy={"action_0": 3.0, "action_1": 1.0})
    _, statistics = agent.prepare_batch(play(agent, 4, 2)[0])
    assert agent.entropy_weights(statistics.head_entropy).tolist() == pytest.approx([0.3, 0.1])


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (dict.fromkeys(HEADS, 1.0) | {"slots": 1.0}, r"unknown: \['slots'\], missing: \[\]"),
        ({head: 1.0 for head in HEADS if head != "tempo"}, r"unknown: \[\], missing: \['tempo'\]"),
    ],
)
def test_a_head_that_is_unknown_or_missing_is_refused_at_construction(table, message):
    with pytest.raises(ValueError, match=f"head_entropy must name exactly the heads.*{message}"):
        growth_agent(head_entropy=table)


def test_the_floor_lifts_heads_that_had_a_choice_and_no_other():
    """Of three heads: nearly decided, decided because nothing else was legal, and undecided."""
    agent = flat_agent(head_sizes=(2, 2, 2), entropy_coefficient=0.3, entropy_floor=0.5, floor_boost=4.0)
    with torch.no_grad():
        actors(agent)[0].bias.copy_(torch.tensor([9.0, 0.0]))
    rollout, _ = play(agent, 6, 2)
    mask = torch.ones_like(rollout.mask)
    mask[:, :, 1, 0] = False
    action = rollout.action.clone()
    action[..., 1] = 1
    _, statistics = agent.prepare_batch(replace(rollout, mask=mask, action=action))
    assert statistics.head_entropy[0].item() < 0.1
    assert statistics.head_entropy[1].isnan()
    assert statistics.head_entropy[2].item() > 0.9
    weights = agent.entropy_weights(statistics.head_entropy)
    assert weights.tolist() == pytest.approx([0.4, 0.1, 0.1])


def test_the_floor_caps_nothing_by_itself():
    """It weighs the bonus; probabilities are those of the network, however small."""
    agent = flat_agent(entropy_floor=1.0)
    with torch.no_grad():
        actors(agent)[0].bias.copy_(torch.tensor([30.0, 0.0, 0.0]))
    rollout, _ = play(agent, 1, 200)
    mask = torch.ones(200, 2, 3, dtype=torch.bool)
    mask[:, 1, 2] = False
    decision = agent.act({"base": rollout.observation["base"][0].numpy()}, mask.numpy(), agent.initial_state(200))
    assert (decision.action[:, 0] == 0).all()


def test_the_entropy_metric_is_of_heads_with_a_choice_and_of_the_whole_tree():
    agent = stir(growth_agent(**ONE_STEP))
    rollout, _ = play(agent, 40, 6)
    metrics = agent.update(without(rollout, Op.GERMINATE))
    assert math.isnan(metrics.head_entropy["blueprint"])  # it never had a choice
    assert 0 < metrics.head_entropy["op"] <= 1
    assert metrics.entropy > 0


# Minibatches.


def test_minibatches_are_whole_environments_each_once_and_reshuffled():
    agent = flat_agent(num_minibatches=3)
    batch, _ = agent.prepare_batch(play(agent, 5, 7)[0])
    orders = []
    for ppo_epoch in range(3):
        parts = list(agent.minibatches(batch, ppo_epoch))
        assert [part.rollout.shape for part in parts] == [(5, 3), (5, 2), (5, 2)]
        values = torch.cat([part.value for part in parts], 1)
        order = [(batch.value == column[:, None]).all(0).nonzero().item() for column in values.T]
        assert sorted(order) == list(range(7))
        orders.append(order)
    assert orders[0] != orders[1]
    assert [p.value.tolist() for p in agent.minibatches(batch, 0)] == [
        p.value.tolist() for p in agent.minibatches(batch, 0)
    ]
    agent.update_count += 1
    again = torch.cat([part.value for part in agent.minibatches(batch, 0)], 1)
    assert [(batch.value == column[:, None]).all(0).nonzero().item() for column in again.T] != orders[0]


def test_more_minibatches_than_environments_is_one_each():
    agent = flat_agent(num_minibatches=8, ppo_epochs=2, target_kl=None)
    assert agent.update(play(agent, 5, 3)[0]).steps_taken == 6


def test_an_update_in_micro_batches_is_the_same_update():
    agents = [stir(growth_agent(micro_batches=parts, num_minibatches=2)) for parts in (1, 3)]
    rollout, _ = play(agents[0], 6, 6)
    metrics = [agent.update(rollout) for agent in agents]
    for name, value in parameters(agents[0]).items():
        assert torch.allclose(value, parameters(agents[1])[name], atol=2e-5), name
    assert metrics[0].policy_loss == pytest.approx(metrics[1].policy_loss, abs=1e-5)
    assert metrics[0].gradient_norm == pytest.approx(metrics[1].gradient_norm, rel=1e-3)


# Truncated backpropagation.


@pytest.mark.parametrize("length", [12, 99])
def test_sequences_no_longer_than_pieces_are_not_cut(length):
    """To the last bit."""
    agents = [stir(growth_agent(sequence_length=n, num_minibatches=2)) for n in (None, length)]
    rollout, _ = play(agents[0], 12, 4)
    for agent in agents:
        agent.update(rollout)
    assert same(*map(parameters, agents))


@pytest.mark.parametrize("make", [flat_agent, growth_agent])
def test_pieces_start_from_states_that_no_step_made_stale(make):
    """Before the first step they give the losses of whole sequences, and a gradient of their own."""
    agents = [stir(make(sequence_length=length)) for length in (None, 3)]
    rollout = play(agents[0], 14, 4)[0]
    assert rollout.first[1:].any()
    found = []
    for agent in agents:
        batch, statistics = agent.prepare_batch(agent.update_scales(rollout))
        minibatches = list(agent.minibatches(batch, 0))
        assert [part.rollout.shape for part in minibatches] == [(14, 1)] * 4
        found.append((agent.backward(minibatches[0], agent.entropy_weights(statistics.head_entropy)), agent))
    (whole, _), (cut, _) = found
    for name, one, other in zip(whole._fields, whole, cut, strict=True):
        assert torch.allclose(one, other, atol=1e-5), name
    assert cut.kl.item() < 1e-6
    weights = [agent.plain.core.cell.weight_hh_l0.grad for _, agent in found]
    assert not torch.allclose(*weights, atol=1e-4)


def test_pieces_in_micro_batches_are_the_same_update():
    agents = [stir(flat_agent(sequence_length=4, micro_batches=parts, num_minibatches=2)) for parts in (1, 3)]
    rollout, _ = play(agents[0], 18, 6)
    for agent in agents:
        agent.update(rollout)
    for name, value in parameters(agents[0]).items():
        assert torch.allclose(value, parameters(agents[1])[name], atol=2e-5), name


def test_recomputing_advantages_also_refreshes_the_states_of_pieces():
    agent = stir(flat_agent(sequence_length=4))
    batch, _ = agent.prepare_batch(play(agent, 12, 3)[0])
    stir(agent)
    fresh = agent.refresh_advantages(batch)
    assert batch.pieces is not None
    assert fresh.pieces is not None
    assert torch.equal(fresh.pieces.states[:3], batch.pieces.states[:3])  # before the rollout
    assert not torch.allclose(fresh.pieces.states[3:], batch.pieces.states[3:], atol=1e-3)


# KL: when to stop, how fast to go on.


def test_the_kl_stops_an_update_before_the_step_also_in_the_first_pass():
    """The second minibatch finds the policy moved too far by the first: its step is not taken."""
    agent = stir(flat_agent(ppo_epochs=1, num_minibatches=4, learning_rate=0.05, target_kl=1e-5))
    rollout, _ = play(agent, 12, 8)
    after_first = []
    agent.optimizer.register_step_post_hook(lambda *_: after_first.append(parameters(agent)))
    metrics = agent.update(rollout)
    assert metrics.stopped_early
    assert (metrics.steps_taken, metrics.gradient_steps, len(after_first)) == (1, 1, 1)
    assert same(parameters(agent), after_first[0])
    assert metrics.kl > 1.5e-5


def test_without_a_target_every_step_is_taken():
    agent = stir(flat_agent(learning_rate=0.05, target_kl=None, ppo_epochs=3, num_minibatches=2))
    metrics = agent.update(play(agent, 10, 4)[0])
    assert (metrics.steps_taken, metrics.stopped_early) == (6, False)


@pytest.mark.parametrize(
    ("rate", "target", "expected"),
    [
        (1e-3, 10.0, 1.5e-3),  # hardly moved: faster
        (1e-3, 1e-9, 1e-3 / 1.5),  # moved too far: slower
        (9e-3, 10.0, 1e-2),  # within limits
        (1.2e-6, 1e-18, 1e-6),
    ],
)
def test_the_kl_steers_the_learning_rate(rate, target, expected):
    agent = stir(flat_agent(learning_rate=rate, learning_rate_schedule="kl", target_kl=target))
    metrics = agent.update(play(agent, 10, 4)[0])
    assert metrics.learning_rate == rate  # what the update used
    assert agent.learning_rate == pytest.approx(expected)
    assert all(group["lr"] == agent.learning_rate for group in agent.optimizer.param_groups)


def test_the_kl_is_seen_after_the_update_also_with_a_single_gradient_step():
    agent = stir(flat_agent(learning_rate=1e-2, ppo_epochs=1, num_minibatches=1))
    metrics = agent.update(play(agent, 10, 4)[0])
    assert metrics.steps_taken == 1
    assert metrics.kl == pytest.approx(0.0, abs=1e-7)  # before the step
    assert metrics.kl_after > 1e-6


def test_linear_schedules_reach_their_end():
    agent = flat_agent(
        learning_rate=0.4, learning_rate_schedule="linear", anneal_updates=4, entropy_coefficient=0.2,
        final_entropy_coefficient=0.0, **ONE_STEP,
    )  # fmt: skip
    rollout, _ = play(agent, 4, 2)
    metrics = [agent.update(rollout) for _ in range(6)]
    assert [m.learning_rate for m in metrics] == pytest.approx([0.4, 0.3, 0.2, 0.1, 0.0, 0.0])
    assert [m.entropy_coefficient for m in metrics] == pytest.approx([0.2, 0.15, 0.1, 0.05, 0.0, 0.0])
    _, statistics = agent.prepare_batch(rollout)
    assert agent.entropy_weights(statistics.head_entropy).tolist() == [0.0, 0.0]
    agent.update_count = 1
    assert agent.entropy_weights(statistics.head_entropy).sum().item() == pytest.approx(0.15)


# What is not finite.


def overflowing(rollout):
    """Finite rewards whose squared error is not."""
    return replace(rollout, reward=torch.full_like(rollout.reward, 1e25))


def test_a_loss_that_is_not_finite_is_skipped_and_counted():
    agent = stir(flat_agent(ppo_epochs=2, num_minibatches=2, **UNSCALED))
    rollout, _ = play(agent, 6, 4)
    before = parameters(agent)
    metrics = agent.update(overflowing(rollout))
    assert same(parameters(agent), before)
    assert (metrics.skipped_steps, metrics.steps_taken, metrics.gradient_steps, metrics.update_count) == (4, 0, 0, 1)
    assert not agent.optimizer.state
    assert math.isnan(metrics.gradient_norm)
    assert agent.update(rollout).steps_taken == 4


def test_a_gradient_that_is_not_finite_is_skipped_though_the_loss_is():
    agent = stir(flat_agent(**ONE_STEP))
    rollout, _ = play(agent, 6, 4)
    parameter = agent.plain.get_parameter("encoder.0.weight")
    handle = parameter.register_hook(lambda gradient: gradient * float("inf"))
    before = {name: v for name, v in parameters(agent).items() if not name.startswith("critic")}
    metrics = agent.update(rollout)
    assert (metrics.skipped_steps, metrics.steps_taken) == (1, 0)
    assert same({name: parameters(agent)[name] for name in before}, before)
    handle.remove()
    assert agent.update(rollout).skipped_steps == 0


def test_repeated_ones_end_the_run():
    agent = flat_agent(ppo_epochs=1, num_minibatches=2, max_skipped_steps=5, **UNSCALED)
    rollout, _ = play(agent, 6, 4)
    agent.update(overflowing(rollout))
    agent.update(overflowing(rollout))
    before = parameters(agent)
    with pytest.raises(DivergedError, match="5 gradient steps in a row were not finite: lower the learning rate"):
        agent.update(overflowing(rollout))
    assert same(parameters(agent), before)


def test_a_good_step_between_them_starts_the_count_anew():
    agent = flat_agent(ppo_epochs=1, num_minibatches=2, max_skipped_steps=3, **UNSCALED)
    rollout, _ = play(agent, 6, 4)
    for _ in range(3):
        agent.update(overflowing(rollout))
        assert agent.update(rollout).steps_taken == 2


# The metrics of an update.


def test_the_record_is_typed_and_flat():
    agent = growth_agent(ppo_epochs=3, num_minibatches=2, target_kl=None)
    rollout, _ = play(agent, 8, 4, resets=0.0)
    first, second = agent.update(rollout), agent.update(rollout)
    assert isinstance(first, UpdateMetrics)
    assert (first.update_count, first.gradient_steps, first.steps_taken) == (1, 6, 6)
    assert (second.update_count, second.gradient_steps, second.steps_taken) == (2, 12, 6)
    assert first.decisions == 32
    for name in ("update_count", "gradient_steps", "steps_taken", "skipped_steps", "decisions"):
        assert type(getattr(first, name)) is int
    assert type(first.stopped_early) is bool
    flat = first.flat()
    assert all(type(value) in (int, float) for value in flat.values())
    assert all(math.isfinite(value) for name, value in flat.items() if not name.startswith("head_entropy"))
    assert {f"head_kl/{head}" for head in HEADS} <= flat.keys()
    assert flat["policy_loss"] == first.policy_loss
    assert flat["ratio_alarms"] == len(first.ratio_alarms)


def test_metrics_are_means_over_the_steps_of_the_update():
    """One minibatch per pass, two passes: the loss is the mean of what the two steps saw."""
    agent = stir(flat_agent(ppo_epochs=2, num_minibatches=1, target_kl=None))
    rollout, _ = play(agent, 8, 3)
    seen, plain = [], agent.backward
    agent.backward = lambda *args, **named: seen.append(plain(*args, **named)) or seen[-1]
    metrics = agent.update(rollout)
    for name in ("policy_loss", "value_loss", "clip_fraction"):
        expected = sum(getattr(terms, name).item() for terms in seen) / 2
        assert getattr(metrics, name) == pytest.approx(expected, abs=1e-6)
    assert metrics.kl == pytest.approx(seen[-1].kl.item(), abs=1e-9)
    for index, head in enumerate(agent.plain.tree.heads):
        assert metrics.head_kl[head] == pytest.approx(sum(terms.head_kl[index].item() for terms in seen) / 2, abs=1e-8)


def test_an_update_learns_what_pays():
    """One-step episodes in which choice 1 of the second head pays: it becomes likelier, others do not vanish."""
    agent = flat_agent(learning_rate=0.02, entropy_coefficient=0.0)
    for seed in range(4):
        rollout, _ = play(agent, 16, 8, seed=seed, resets=1.0)
        agent.update(replace(rollout, reward=rollout.action[..., 1].float()))
    rollout, _ = play(agent, 16, 8, seed=99)
    chosen = rollout.action[..., 1][rollout.mask[:, :, 1].sum(-1) > 1]
    assert chosen.float().mean() > 0.8


def test_the_prediction_of_contributions_learns():
    agent = growth_agent(auxiliary_coefficient=1.0, learning_rate=0.02, num_minibatches=2, target_kl=None)
    rollout, _ = play(agent, 10, 2)
    first = agent.update(rollout)
    assert agent.update(rollout).auxiliary_loss < first.auxiliary_loss
    quiet = growth_agent()
    assert quiet.update(replace(rollout, contribution=None)).auxiliary_loss == 0.0


def test_contributions_of_steps_that_are_not_valid_do_not_count():
    agent = stir(growth_agent(**ONE_STEP))
    rollout, _ = play(agent, 10, 3)
    valid = rollout.valid.clone()
    valid[6:, 1] = False
    assert rollout.contribution is not None
    found = []
    for wild in (0.0, 0.9):
        contribution = rollout.contribution.clone()
        contribution[6:, 1] = wild
        found.append(
            copy.deepcopy(agent).update(replace(rollout, valid=valid, contribution=contribution)).auxiliary_loss
        )
    assert found[0] == found[1] != 0.0


def test_the_same_seed_learns_the_same_and_another_does_not():
    outcomes = []
    for rng_seed in (0, 0, 1):
        agent = flat_agent()
        agent.rng_seed = rng_seed
        agent.generator.manual_seed(rng_seed)
        for seed in range(2):
            agent.update(play(agent, 4, 6, seed=seed)[0])
        outcomes.append(parameters(agent))
    assert same(outcomes[0], outcomes[1])
    assert not same(outcomes[0], outcomes[2])


def test_mean_weights_of_nothing_are_harmless():
    """A rollout in which every decision was forced: the value learns, the policy stays."""
    agent = stir(flat_agent(**ONE_STEP))
    rollout, _ = play(agent, 5, 2)
    mask = torch.zeros_like(rollout.mask)
    mask[..., 0] = True
    metrics = agent.update(replace(rollout, mask=mask, action=torch.zeros_like(rollout.action)))
    assert (metrics.policy_loss, metrics.kl, metrics.forced_share) == (0.0, 0.0, 1.0)
    assert metrics.value_loss > 0
    assert losses.mean_weights(torch.zeros(1, 1, dtype=torch.bool)).item() == 0.0
