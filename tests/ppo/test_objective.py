"""PPO's objective: exact before the first step, and the same number however it is computed.

Agents are small; rollouts have real masks, every operation, resets inside and cut-off ends (see `helpers.rollouts`).
"""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.rollouts import AGENTS, actors, flat_agent, growth_agent, play, played, stir, without
from torch import nn

from simic.lifecycle.actions import HEADS, HEADS_USED_BY, Op
from simic.policy.action_tree import TreeDistribution
from simic.policy.network import GROWTH_TREE, Output
from simic.ppo.batch import Batch
from simic.ppo.config import PPOConfig
from simic.ppo.objective import mean_weights, ppo_terms, ratio_statistics
from simic.ppo.rollout import join

UNITS = (torch.tensor(0.0), torch.tensor(1.0))
WAIT = [0] * len(HEADS)


@pytest.fixture(scope="module", params=list(AGENTS))
def scene(request):
    return played(request.param)


def loss_and_gradient(network, plain, parts, entropy_weights, mean_std=UNITS, config=None):
    """Sum over (batch, weights) of the loss, and its gradient by name."""
    plain.zero_grad(set_to_none=True)
    total = 0.0
    for batch, weights in parts:
        loss = ppo_terms(network, batch, weights, entropy_weights, mean_std, config or PPOConfig()).loss
        loss.backward()
        total += loss.item()
    return total, {name: p.grad.clone() for name, p in plain.named_parameters() if p.grad is not None}


def assert_same(one, other, atol=1e-6):
    assert one[0] == pytest.approx(other[0], abs=atol)
    assert one[1].keys() == other[1].keys()
    for name, gradient in one[1].items():
        assert torch.allclose(gradient, other[1][name], atol=atol), (name, (gradient - other[1][name]).abs().max())


class Stepped(nn.Module):
    """A network that goes through a sequence one step at a time; `unwrap` finds the plain one behind it."""

    def __init__(self, network, first):
        super().__init__()
        self._orig_mod, self.first = network, first

    def forward(self, observation, state, segments=None):
        outputs = []
        for step, first in enumerate(self.first):
            state = torch.where(first[:, None], 0.0, state)
            seen = {part: values[step : step + 1] for part, values in observation.items()}
            outputs.append(self._orig_mod(seen, state))
            state = outputs[-1].state
        logits, value, _, contribution = zip(*outputs, strict=True)
        return Output(
            torch.cat(logits), torch.cat(value), state, None if contribution[0] is None else torch.cat(contribution)
        )


# Before the first gradient step.


def test_the_rollouts_have_everything(scene):
    """Resets inside, carried and cut ends, forced decisions; in growth every operation."""
    agent, batch, _, _ = scene
    rollout = batch.rollout
    assert rollout.first[1:].any()
    assert rollout.terminated.any()
    assert rollout.truncated[:-1].any()
    assert (~batch.free).any()
    if agent.plain.tree.heads == HEADS:
        assert set(rollout.action[..., 0].flatten().tolist()) == {int(op) for op in Op}


def test_every_ratio_is_1_before_the_first_step(scene):
    """Whole, and in the minibatches of several environments that the first steps see."""
    agent, batch, _, _ = scene
    for part in (batch, *agent.minibatches(batch, 0)):
        ratios = ratio_statistics(agent.network, part, agent.thresholds)
        assert abs(ratios["ratio_max"].item() - 1) < 1e-5
        assert abs(ratios["ratio_min"].item() - 1) < 1e-5
        terms = ppo_terms(agent.network, part, mean_weights(part), torch.zeros(1), UNITS, agent.config)
        assert terms.kl.item() == pytest.approx(0.0, abs=1e-7)
        assert terms.clip_fraction.item() == 0.0
        assert terms.policy_loss.item() == pytest.approx(
            -(part.advantage * mean_weights(part).policy).sum().item(), abs=1e-5
        )


def test_old_log_probs_equal_those_of_stepping_one_by_one(scene):
    agent, batch, _, _ = scene
    rollout = batch.rollout
    output = Stepped(agent.plain, rollout.first)(rollout.observation, rollout.state)
    policy = TreeDistribution(agent.plain.tree, output.logits, rollout.mask)
    ratio = (policy.head_log_prob(rollout.action) - batch.log_prob).exp()
    assert (ratio - 1).abs().max() < 1e-5
    assert not torch.allclose(batch.log_prob, torch.zeros(1))


@pytest.mark.parametrize("kind", list(AGENTS))
def test_without_normalizers_old_log_probs_are_those_of_acting(kind):
    """And with them it is not: the statistics have moved to include the rollout."""
    still = stir(AGENTS[kind]({"normalize_observations": False}))
    rollout, acted = play(still, 30, 4)
    batch, _ = still.prepare_batch(still.update_scales(rollout))
    assert ((batch.log_prob - acted).exp() - 1).abs().max() < 1e-5
    _, batch, _, acted = played(kind, 30, 4)
    assert ((batch.log_prob - acted).exp() - 1).abs().max() > 1e-3


def test_a_carried_state_is_where_the_sequence_goes_on():
    """The second half of a rollout, begun from the state after the first half, has the same probabilities."""
    agent, batch, _, _ = played("flat", 20, 3)
    rollout = batch.rollout
    part = replace(
        rollout,
        observation={part: values[10:] for part, values in rollout.observation.items()},
        **{n: getattr(rollout, n)[10:] for n in ("mask", "action", "reward", "terminated", "truncated", "next_value")},
        **{n: getattr(rollout, n)[10:] for n in ("first", "valid")},
    )
    halfway = Stepped(agent.plain, rollout.first[:10])
    with torch.no_grad():
        state = halfway({name: values[:10] for name, values in rollout.observation.items()}, rollout.state).state
    state[rollout.first[10]] = 0.0
    late, _ = agent.prepare_batch(replace(part, state=state))
    assert torch.allclose(late.log_prob, batch.log_prob[10:], atol=1e-5)


# The same loss and gradient, however it is computed.


@pytest.mark.parametrize("surrogate", ["joint", "per_head"])
def test_stepped_one_by_one(scene, surrogate):
    agent, batch, entropy_weights, _ = scene
    config = PPOConfig(surrogate=surrogate)
    # Old log-probabilities are moved, so that ratios are not all 1.
    batch = replace(batch, log_prob=batch.log_prob + 0.1 * torch.randn(batch.log_prob.shape) * batch.head_used)
    parts = [(batch, mean_weights(batch))]
    whole = loss_and_gradient(agent.network, agent.plain, parts, entropy_weights, config=config)
    stepped = Stepped(agent.plain, batch.rollout.first)
    assert_same(whole, loss_and_gradient(stepped, agent.plain, parts, entropy_weights, config=config), 2e-6)


@pytest.mark.parametrize("micro_batches", [2, 3, 99])
@pytest.mark.parametrize("surrogate", ["joint", "per_head"])
def test_in_micro_batches(scene, micro_batches, surrogate):
    """Environments differ in how often heads matter; means are over all of them all the same."""
    agent, batch, entropy_weights, _ = scene
    before = agent.config
    found = []
    for parts in (1, micro_batches):
        agent.config = replace(before, micro_batches=parts, surrogate=surrogate)
        agent.plain.zero_grad(set_to_none=True)
        terms = agent.backward(batch, entropy_weights)
        found.append(
            (terms, {name: p.grad.clone() for name, p in agent.plain.named_parameters() if p.grad is not None})
        )
    agent.config = before
    for name, one, other in zip(found[0][0]._fields, found[0][0], found[1][0], strict=True):
        assert torch.allclose(one, other, atol=1e-6), name
    one, other = ((terms.loss.item(), gradient) for terms, gradient in found)
    assert_same(one, other)


def test_padded_beside_larger_hosts():
    """Rollouts of 2 and 4 slots, of 9 and 14 steps: joined they give the sum of what they give apart."""
    agent = stir(growth_agent(normalize_values=False, scale_rewards=False))
    agent.update_scales(play(agent, 5, 3, seed=9)[0])
    short, long = play(agent, 9, 3, slots=2)[0], play(agent, 14, 2, slots=4, seed=1)[0]
    joined, _ = agent.prepare_batch(join([short, long]))
    weights = mean_weights(joined)
    apart = []
    for rollout, envs in ((short, slice(0, 3)), (long, slice(3, 5))):
        steps, slots = rollout.shape[0], rollout.observation["slots"].shape[2]
        alone, _ = agent.prepare_batch(rollout)
        for name in ("log_prob", "value", "target"):
            assert torch.allclose(getattr(alone, name), getattr(joined, name)[:steps, envs], atol=1e-5), name
        for name in ("head_used", "has_choice"):
            assert (getattr(alone, name) == getattr(joined, name)[:steps, envs]).all()
            assert not getattr(joined, name)[steps:, envs].any()
        own = [weight[:steps, envs] for weight in weights[:-1]]
        alone = replace(alone, advantage=joined.advantage[:steps, envs])
        assert weights.contribution is not None
        apart.append((alone, type(weights)(*own, contribution=weights.contribution[:steps, envs, :slots])))
    entropy_weights = torch.full((len(HEADS),), 0.01)
    one = loss_and_gradient(agent.network, agent.plain, [(joined, weights)], entropy_weights)
    assert_same(one, loss_and_gradient(agent.network, agent.plain, apart, entropy_weights), 2e-6)


def test_what_is_not_valid_does_not_count(scene):
    """Steps marked as not real may hold anything."""
    agent, batch, entropy_weights, _ = scene
    rollout = batch.rollout
    rollout = replace(rollout, valid=rollout.valid.clone())
    rollout.valid[5:9, 1] = False
    clean, _ = agent.prepare_batch(rollout)
    dirty = replace(clean, **{name: getattr(clean, name).clone() for name in ("advantage", "target", "value")})
    for name in ("advantage", "target", "value"):
        getattr(dirty, name)[5:9, 1] = 1e3
    found = [
        loss_and_gradient(agent.network, agent.plain, [(b, mean_weights(b))], entropy_weights) for b in (clean, dirty)
    ]
    assert_same(*found, atol=0.0)
    assert not clean.free[5:9, 1].any()


# Terms by hand.


def test_terms_by_hand():
    """Two decisions of one flat environment with known logits: every term of the loss, worked out.

    Probabilities 1/2 and 1/2 for choice 0 under logits (0, 0). Old probabilities 1/2 and 1/4: ratios 1 and 2.
    """

    class Known(nn.Module):
        def __init__(self, network):
            super().__init__()
            self._orig_mod = network

        def forward(self, observation, state, segments=None):
            return Output(torch.zeros(2, 1, 1, 2), torch.tensor([[1.0], [3.0]]), None, None)

    agent = flat_agent(head_sizes=(2,))
    rollout, _ = play(agent, 2, 1)
    rollout = replace(
        rollout, mask=torch.ones(2, 1, 1, 2, dtype=torch.bool), action=torch.zeros(2, 1, 1, dtype=torch.int64)
    )
    batch = Batch(
        rollout=rollout,
        log_prob=torch.tensor([[[math.log(0.5)]], [[math.log(0.25)]]]),
        value=torch.zeros(2, 1),
        target=torch.tensor([[2.0], [2.0]]),
        advantage=torch.tensor([[1.0], [-1.0]]),
        head_used=torch.ones(2, 1, 1, dtype=torch.bool),
        has_choice=torch.ones(2, 1, 1, dtype=torch.bool),
        reading=agent.plain.tree.reading(rollout.action, rollout.mask),
    )
    config = PPOConfig(clip_range=0.2, value_coefficient=0.5, entropy_coefficient=0.1)
    terms = ppo_terms(Known(agent.plain), batch, mean_weights(batch), torch.tensor([0.1]), UNITS, config)
    assert terms.policy_loss.item() == pytest.approx((-1.0 + 2.0) / 2)
    assert terms.value_loss.item() == pytest.approx(0.5)  # both are 1 off
    assert terms.kl.item() == pytest.approx((1 - math.log(2)) / 2)
    assert terms.clip_fraction.item() == pytest.approx(0.5)
    assert terms.head_entropy.tolist() == pytest.approx([1.0])
    assert terms.loss.item() == pytest.approx(0.5 + 0.5 * 0.5 - 0.1)
    # In units with mean 1 and deviation 2 the target is 1/2: errors 1/2 and 5/2.
    other = ppo_terms(
        Known(agent.plain),
        batch,
        mean_weights(batch),
        torch.tensor([0.1]),
        (torch.tensor(1.0), torch.tensor(2.0)),
        config,
    )
    assert other.value_loss.item() == pytest.approx((0.25 + 6.25) / 4)
    # Held within 0.1 of the old value, which is 0: errors of (2, 1.9) and (2, ...): the worse counts.
    held = ppo_terms(
        Known(agent.plain),
        batch,
        mean_weights(batch),
        torch.tensor([0.1]),
        UNITS,
        replace(config, value_clip_range=0.1),
    )
    assert held.value_loss.item() == pytest.approx(1.9**2 / 2)


def test_the_joint_ratio_is_the_product_of_the_heads(scene):
    """One head of one decision twice as likely as before, another half: the joint ratio is 1, each head's is not."""
    agent, batch, _, _ = scene
    step, env = (batch.head_used.sum(-1) >= 2).nonzero()[0].tolist()
    log_prob = batch.log_prob.clone()
    heads = batch.head_used[step, env].nonzero().flatten()[:2]
    log_prob[step, env, heads] += torch.tensor([math.log(2), -math.log(2)])
    moved = replace(batch, log_prob=log_prob)
    terms = ppo_terms(agent.network, moved, mean_weights(moved), torch.zeros(1), UNITS, agent.config)
    assert terms.kl.item() == pytest.approx(0.0, abs=1e-6)
    for head, ratio in zip(heads.tolist(), (0.5, 2.0), strict=True):
        share = 1 / batch.head_used[..., head].sum().item()
        assert terms.head_kl[head].item() == pytest.approx(share * (ratio - 1 - math.log(ratio)), rel=1e-3)


def test_forced_decisions_do_not_count():
    """Their advantage, and even their probability, may be anything; the value still learns from them."""
    agent, batch, entropy_weights, _ = played()
    forced = batch.rollout.valid & ~batch.free
    assert forced.any()
    assert (batch.rollout.action[forced][:, 0] == Op.WAIT).all()
    wild = replace(batch, advantage=torch.where(forced, 1e3, batch.advantage))
    weights = mean_weights(batch)
    assert not weights.policy[forced].any()
    assert not weights.heads[forced].any()
    assert not weights.entropy[forced].any()
    assert (weights.value[forced] > 0).all()
    for surrogate in ("joint", "per_head"):
        config = PPOConfig(surrogate=surrogate)
        found = [
            loss_and_gradient(agent.network, agent.plain, [(b, mean_weights(b))], entropy_weights, config=config)
            for b in (batch, wild)
        ]
        assert_same(*found, atol=0.0)


def test_a_first_head_without_choice_does_not_silence_the_others():
    """MultiDiscrete with one legal choice of the first head and two of the second: that is a free decision."""
    agent = stir(flat_agent())
    rollout, _ = play(agent, 10, 3)
    mask = torch.zeros_like(rollout.mask)
    mask[:, :, 0, 2] = mask[:, :, 1, :2] = True
    action = rollout.action.clone()
    action[..., 0] = 2
    batch, _ = agent.prepare_batch(replace(rollout, mask=mask, action=action))
    assert batch.free.all()
    _, gradient = loss_and_gradient(agent.network, agent.plain, [(batch, mean_weights(batch))], torch.zeros(2))
    assert gradient["actors.1.weight"].any()
    assert not gradient["actors.0.weight"].any()


# Heads that matter rarely.


def test_blueprint_weights_learn_from_germination_only():
    """Exactly nothing without one, entropy included; something from a single one; and so for every head."""
    agent = stir(growth_agent())
    rollout, _ = play(agent, 40, 6)
    for keep in (0, 1):
        batch, statistics = agent.prepare_batch(without(rollout, Op.GERMINATE, keep=keep))
        agent.plain.zero_grad(set_to_none=True)
        agent.backward(batch, agent.entropy_weights(statistics.head_entropy))
        own = agent.plain.head_parameters()["blueprint"]
        assert all((p.grad is not None and bool(p.grad.any())) == bool(keep) for p in own if p.grad is not None)
        assert any(p.grad is not None for p in own)


@pytest.mark.parametrize("surrogate", ["joint", "per_head"])
@pytest.mark.parametrize("op", list(Op))
def test_a_single_operation_moves_the_heads_of_the_one_table(op, surrogate):
    """A rollout of waits with one operation: gradient in the heads that matter for it, exactly none elsewhere."""
    agent = stir(growth_agent())
    rollout, _ = play(agent, 40, 24)
    for other in Op:
        rollout = without(rollout, other, keep=1 if other == op else 0) if other != Op.WAIT else rollout
    assert (rollout.action[..., 0] == op).any()
    batch, statistics = agent.prepare_batch(rollout)
    agent.config = replace(agent.config, surrogate=surrogate)
    agent.backward(batch, agent.entropy_weights(statistics.head_entropy))
    moved = {
        head
        for head, own in agent.plain.head_parameters().items()
        if any(p.grad is not None and p.grad.any() for p in own)
    }
    available = {head for head, is_so in zip(HEADS, batch.has_choice.any(0).any(0).tolist(), strict=True) if is_so}
    assert available <= set(HEADS_USED_BY[op])
    assert moved == available | {"op"}


def beside_waits(batch, copies) -> Batch:
    """The batch beside copies of itself in which every decision waits."""
    rollout = batch.rollout
    waiting = replace(rollout, action=torch.zeros_like(rollout.action))
    parts = [rollout] + [waiting] * copies
    quiet = replace(
        batch,
        rollout=waiting,
        head_used=batch.head_used & (torch.arange(len(HEADS)) == 0),
        has_choice=batch.has_choice & (torch.arange(len(HEADS)) == 0),
        log_prob=torch.where(torch.arange(len(HEADS)) == 0, batch.log_prob, 0.0),
    )
    batches = [batch] + [quiet] * copies
    names = ("log_prob", "value", "target", "advantage", "head_used", "has_choice")
    joined = join(parts)
    chosen: dict[str, Any] = {name: torch.cat([getattr(b, name) for b in batches], 1) for name in names}
    return Batch(rollout=joined, reading=GROWTH_TREE.reading(joined.action, joined.mask), **chosen)


def test_a_rare_head_learns_as_fast_among_many_waits():
    """Per-head surrogate, entropy and KL are means where the head matters: waits beside it do not thin them out."""
    agent, batch, entropy_weights, _ = played(steps=12, envs=3)
    config = PPOConfig(surrogate="per_head", value_coefficient=0.0, auxiliary_coefficient=0.0)
    batch = replace(batch, log_prob=batch.log_prob + 0.1 * batch.head_used)
    found = []
    for copies in (0, 3):
        wide = beside_waits(batch, copies)
        weights = mean_weights(wide)
        terms = ppo_terms(agent.network, wide, weights, entropy_weights, UNITS, config)
        gradient = torch.autograd.grad(terms.loss, agent.plain.head_parameters()["blueprint"], allow_unused=True)
        found.append((terms, [g for g in gradient if g is not None]))
    for one, other in zip(found[0][1], found[1][1], strict=True):
        assert one.any()
        assert torch.allclose(one, other, atol=1e-6)
    rare = [HEADS.index(head) for head in HEADS if head != "op"]
    assert torch.allclose(found[0][0].head_kl[rare], found[1][0].head_kl[rare], atol=1e-6)
    assert torch.allclose(found[0][0].head_entropy[rare], found[1][0].head_entropy[rare], atol=1e-6)


def test_entropy_is_a_mean_over_decisions_that_left_a_choice():
    """A uniform head with a choice in every other decision has an entropy of 1, not of a half."""
    agent = flat_agent()
    with torch.no_grad():
        for actor in actors(agent):
            actor.weight.zero_()
    rollout, _ = play(agent, 8, 2)
    mask = torch.ones_like(rollout.mask)
    mask[:, :, 1, 2] = False
    mask[::2, :, 1, 1] = False
    action = rollout.action * mask[..., 1]
    batch, statistics = agent.prepare_batch(replace(rollout, mask=mask, action=action))
    terms = ppo_terms(agent.network, batch, mean_weights(batch), torch.zeros(2), UNITS, agent.config)
    assert terms.head_entropy.tolist() == pytest.approx([1.0, 1.0], abs=1e-5)
    assert statistics.head_entropy.tolist() == pytest.approx([1.0, 1.0], abs=1e-5)


def test_the_kl_is_a_mean_over_free_decisions(scene):
    """Every free decision has become likelier by the same factor: the KL estimate of one is that of all."""
    agent, batch, entropy_weights, _ = scene
    available = batch.has_choice.clone()
    available[3:6] = False  # as if nothing had been left to choose
    batch = replace(batch, has_choice=available)
    log_prob = batch.log_prob.clone()
    log_prob[..., 0] -= 0.3 * batch.free
    moved = replace(batch, log_prob=log_prob)
    expected = math.exp(0.3) - 1 - 0.3
    terms = ppo_terms(agent.network, moved, mean_weights(moved), entropy_weights, UNITS, agent.config)
    assert terms.kl.item() == pytest.approx(expected, rel=1e-3)
    assert ratio_statistics(agent.network, moved, agent.thresholds)["kl_after"].item() == pytest.approx(
        expected, rel=1e-3
    )
