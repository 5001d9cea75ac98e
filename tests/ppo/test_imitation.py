"""Imitation finds the rule behind recorded episodes, respects masks, and leaves an agent that PPO goes on with."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.rollouts import actors, recorded

from simic.gymnasium.flat_network import RecurrentActorCritic
from simic.lifecycle.actions import HEAD_VALUES, HEADS, HEADS_USED_BY, Op
from simic.policy.config import PolicyConfig
from simic.policy.network import GROWTH_TREE, FactoredRecurrentActorCritic
from simic.ppo.agent import DivergedError, PPOAgent
from simic.ppo.config import ImitationConfig, PPOConfig
from simic.ppo.imitation import imitate
from simic.ppo.rollout import Rollout

SMALL = PolicyConfig(hidden_size=32, encoding_size=16)


def echoes(rng, num_envs, steps=12, symbols=3) -> Rollout:
    """Somebody says what they saw two steps ago, 0 at first."""
    seen = rng.integers(symbols, size=(steps, num_envs))
    said = np.concatenate([np.zeros((2, num_envs), dtype=np.int64), seen[:-2]])
    base = torch.from_numpy(np.eye(symbols, dtype=np.float32)[seen])
    return recorded({"base": base}, torch.from_numpy(said)[..., None], torch.ones(steps, num_envs, 1, symbols).bool())


def all_legal(num_slots, num_blueprints) -> np.ndarray:
    """The mask of one growth decision in which wait, germinate and prune are legal, with any choice (R, W)."""
    sizes = {head: len(values) for head, values in HEAD_VALUES.items()}
    sizes |= {"slot": num_slots, "blueprint": num_blueprints}
    rows = GROWTH_TREE.row_names(GROWTH_TREE.num_rows + num_slots)
    mask = np.arange(max(sizes.values())) < np.array([sizes[head] for head in rows])[:, None]
    mask[0, [Op.SET_ALPHA_TARGET, Op.FOSSILIZE, Op.ADVANCE]] = False
    return mask


def growth(rng, num_envs, steps=6, num_slots=3, num_blueprints=2) -> Rollout:
    """Somebody germinates the largest blueprint in the legal slot with the largest feature, or prunes the least one."""
    base = rng.normal(size=(steps, num_envs, 2))
    slots = rng.normal(size=(steps, num_envs, num_slots, 2))
    offers = rng.normal(size=(steps, num_envs, num_slots, num_blueprints, 1))
    mask = np.tile(all_legal(num_slots, num_blueprints), (steps, num_envs, 1, 1))
    slot_rows = [row for row, head in enumerate(GROWTH_TREE.row_head) if HEADS[head] == "slot"]
    closed = rng.integers(num_slots, size=(steps, num_envs))
    mask[:, :, slot_rows, :num_slots] &= (np.arange(num_slots) != closed[..., None])[:, :, None]
    forced = rng.random((steps, num_envs)) < 0.2
    mask[:, :, 0, 1:] &= ~forced[..., None]

    op = np.where(base[..., 0] > 0, Op.GERMINATE, np.where(base[..., 1] > 0, Op.PRUNE, Op.WAIT)) * ~forced
    usable, feature = np.arange(num_slots) != closed[..., None], slots[..., 0]
    largest = np.where(usable, feature, -np.inf).argmax(-1)
    slot = np.where(op == Op.GERMINATE, largest, np.where(usable, feature, np.inf).argmin(-1))
    offered = np.take_along_axis(offers[..., 0], slot[..., None, None], 2)[:, :, 0]
    choices = {"op": op, "slot": slot, "blueprint": offered.argmax(-1), "tempo": 1 + (base[..., 1] > 0)}
    action = np.stack([choices.get(head, np.zeros_like(op)) for head in HEADS], -1) * GROWTH_TREE.head_used[op]
    parts = {"base": base, "slots": slots, "blueprints": offers}
    seen = {part: torch.from_numpy(values.astype(np.float32)) for part, values in parts.items()}
    return recorded(seen, torch.from_numpy(action), torch.from_numpy(mask))


def plain_agent(rng_seed=0, symbols=3, **ppo) -> PPOAgent:
    torch.manual_seed(rng_seed)
    return PPOAgent(RecurrentActorCritic(symbols, [symbols], SMALL), PPOConfig(**ppo), rng_seed=rng_seed)


def growth_agent(rng_seed=0) -> PPOAgent:
    torch.manual_seed(rng_seed)
    return PPOAgent(FactoredRecurrentActorCritic(2, 2, 1, SMALL), rng_seed=rng_seed)


# By hand.


def test_losses_of_a_uniform_policy_by_hand():
    """Each head's loss is the log of its number of legal choices, and forced decisions do not thin it out."""
    agent, data = growth_agent(), growth(np.random.default_rng(0), 40)
    assert (data.mask[:, :, 0].sum(-1) == 1).any()
    for parameters in agent.plain.head_parameters().values():
        for parameter in parameters:
            torch.nn.init.zeros_(parameter)
    first = imitate(agent, [data], ImitationConfig(passes=1, held_out=0.0, learning_rate=1e-12)).training[0]
    choices = {"op": 3, "slot": 2, "blueprint": 2, "style": 4, "tempo": 3, "alpha_target": 3}
    choices |= {"alpha_speed": 4, "alpha_curve": 5}
    assert first.head_loss == pytest.approx({head: math.log(number) for head, number in choices.items()}, rel=1e-5)
    assert first.loss == pytest.approx(sum(first.head_loss.values()))


def test_accuracy_by_hand():
    """A policy that would prune wherever it may, with tempo 2 if it germinated, is right where that was done."""
    agent, data = growth_agent(), growth(np.random.default_rng(0), 40)
    assert isinstance(agent.plain, FactoredRecurrentActorCritic)
    for layer, choice in ((agent.plain.op, Op.PRUNE), (agent.plain.plain["tempo"], 2)):
        assert isinstance(layer, torch.nn.Linear)
        torch.nn.init.constant_(layer.bias[choice], 100.0)
    metrics = imitate(agent, [data], ImitationConfig(passes=1, held_out=0.0, learning_rate=1e-12))
    free = data.mask[:, :, 0].sum(-1) > 1
    op, tempo = data.action[..., 0][free], data.action[..., HEADS.index("tempo")]
    accuracy = metrics.training[0].head_accuracy
    assert accuracy["op"] == pytest.approx((op == Op.PRUNE).float().mean().item())
    assert accuracy["tempo"] == pytest.approx((tempo[data.action[..., 0] == Op.GERMINATE] == 2).float().mean().item())


def test_a_decision_whose_first_head_has_one_choice_is_free_if_another_has_more():
    """Heads of 2 and 3 choices that do not depend on each other; only the second ever has a choice."""
    torch.manual_seed(0)
    agent = PPOAgent(RecurrentActorCritic(3, [2, 3], SMALL))
    mask = torch.tensor([[True, False, False], [True, True, True]]).expand(4, 8, 2, 3).clone()
    mask[1, 0, 1] = torch.tensor([False, False, True])  # one decision is forced
    action = torch.tensor([0, 2]).expand(4, 8, 2).clone()
    data = recorded({"base": torch.randn(4, 8, 3)}, action, mask)
    for actor in actors(agent):
        torch.nn.init.zeros_(actor.weight)
    metrics = imitate(agent, [data], ImitationConfig(passes=30, held_out=0.0, learning_rate=0.1))
    first, last = metrics.training[0].head_loss, metrics.training[-1].head_loss
    assert first["action_1"] == pytest.approx(math.log(3), rel=0.05)
    assert last["action_1"] < 0.1 * first["action_1"]
    assert first["action_0"] == 0.0


@pytest.mark.parametrize(
    ("passes", "held_out", "what"),
    [
        (2, 0.0, "the gradient's norm is nan"),
        (1, 0.0, "the norm of the weights is inf"),  # no gradient follows that could tell
        (1, 0.25, "the loss is nan"),
    ],
)
def test_learning_that_is_not_finite_ends_as_diverged(passes, held_out, what):
    config = ImitationConfig(passes=passes, held_out=held_out, learning_rate=1e30)
    with pytest.raises(DivergedError, match=f"{what}: look for rewards and observations in the recorded episodes"):
        imitate(growth_agent(), [growth(np.random.default_rng(0), 8)], config)


def test_a_head_that_nobody_used_stays_as_it_was():
    agent, data = growth_agent(), growth(np.random.default_rng(0), 40)
    pruned = data.action[..., 0] == Op.PRUNE
    data = replace(data, action=torch.where(pruned.unsqueeze(-1), 0, data.action))
    before = {head: [p.clone() for p in own] for head, own in agent.plain.head_parameters().items()}
    metrics = imitate(agent, [data], ImitationConfig(passes=3))
    after = agent.plain.head_parameters()
    for head in HEADS:
        used = head in HEADS_USED_BY[Op.GERMINATE]
        same = all(torch.equal(a, b) for a, b in zip(before[head], after[head], strict=True))
        assert same != used, head
        assert math.isnan(metrics.held_out[-1].head_loss[head]) != used
    assert all(parameter.isfinite().all() for parameter in agent.plain.parameters())
    assert math.isfinite(metrics.held_out[-1].loss)


def test_forced_decisions_teach_nothing():
    agent, data = plain_agent(), echoes(np.random.default_rng(0), 8)
    only_what_was_said = torch.nn.functional.one_hot(data.action, 3).bool()
    before = [parameter.clone() for parameter in agent.plain.parameters()]
    imitate(agent, [replace(data, mask=only_what_was_said)], ImitationConfig(passes=2, value_coefficient=0.0))
    assert all(torch.equal(a, b) for a, b in zip(before, agent.plain.parameters(), strict=True))


# Going on with PPO.


def rewarded(num_envs=48) -> Rollout:
    """Episodes of two steps: symbol k pays k in the first and 5 k in the second."""
    data = echoes(np.random.default_rng(0), num_envs, steps=2)
    symbol = data.observation["base"].argmax(-1).float()
    return replace(data, reward=symbol * torch.tensor([[1.0], [5.0]]))


@pytest.mark.parametrize("normalize_values", [True, False])
def test_ppo_goes_on_with_a_critic_that_knows(normalize_values):
    """Rewards follow from what is seen: the critic can know them all, and knows them in PPO's units."""
    agent = plain_agent(normalize_values=normalize_values, gamma=0.0)
    assert plain_agent(gamma=0.0).update(at_home(rewarded())).explained_variance < 0.5
    imitate(agent, [rewarded()], ImitationConfig(passes=60, held_out=0.0, learning_rate=1e-2))
    assert not agent.optimizer.state
    metrics = agent.update(at_home(rewarded()))
    assert metrics.explained_variance > 0.95
    assert metrics.value_mean == pytest.approx(metrics.return_mean, abs=0.1)
    assert metrics.steps_taken > 0
    assert metrics.skipped_steps == 0
    assert math.isfinite(metrics.policy_loss)


def at_home(data: Rollout) -> Rollout:
    """The same with states of the learner's size."""
    return replace(data, state=torch.zeros(data.shape[1], 2 * SMALL.hidden_size))


def test_what_adam_remembers_of_an_earlier_ppo_is_dropped():
    agent = plain_agent()
    agent.update(at_home(rewarded()))
    assert agent.optimizer.state
    imitate(agent, [rewarded()], ImitationConfig(passes=1))
    assert not agent.optimizer.state
    assert agent.learning_rate == agent.config.learning_rate


def test_returns_of_unknown_end_and_a_zero_coefficient_leave_the_critic_alone():
    whole = rewarded()
    cut_off = replace(whole, terminated=torch.zeros_like(whole.valid), truncated=whole.terminated)
    for data, coefficient in ((cut_off, 0.5), (whole, 0.0)):
        agent = plain_agent(normalize_values=False)
        before = [parameter.clone() for parameter in agent.plain.critic.parameters()]
        metrics = imitate(agent, [data], ImitationConfig(passes=2, value_coefficient=coefficient))
        assert all(torch.equal(a, b) for a, b in zip(before, agent.plain.critic.parameters(), strict=True))
        assert math.isnan(metrics.held_out[0].value_loss) == (data is cut_off)


def test_episodes_without_reward_do_not_blow_up_the_critic():
    agent = plain_agent()
    metrics = imitate(agent, [echoes(np.random.default_rng(0), 8)], ImitationConfig(passes=1))
    assert metrics.training[0].value_loss < 10


# When to stop.


def noise(num_envs=24) -> Rollout:
    """Nothing to be learned: what is said does not follow from what is seen."""
    data = echoes(np.random.default_rng(0), num_envs)
    return replace(data, action=torch.from_numpy(np.random.default_rng(1).integers(3, size=(12, num_envs, 1))))


def test_learning_stops_when_held_out_environments_gain_nothing():
    agent, seen = plain_agent(), []

    def watch(figures) -> None:
        seen.append((figures, [parameter.clone() for parameter in agent.plain.parameters()]))

    config = ImitationConfig(passes=60, held_out=0.25, patience=4, minibatch_envs=6, learning_rate=1e-2)
    metrics = imitate(agent, [noise()], config, progress=watch)
    losses = [figures.loss for figures in metrics.held_out]
    assert len(losses) == metrics.best_pass + 1 + config.patience < config.passes
    assert metrics.best_pass == int(np.argmin(losses))
    assert [figures for figures, _ in seen] == list(metrics.held_out)
    best = seen[metrics.best_pass][1]
    assert all(torch.equal(a, b) for a, b in zip(best, agent.plain.parameters(), strict=True))


def test_held_out_environments_are_not_learned_from():
    config = ImitationConfig(passes=60, held_out=0.25, patience=60, minibatch_envs=6, learning_rate=1e-2)
    metrics = imitate(plain_agent(), [noise()], config)
    assert metrics.training[-1].head_accuracy["action_0"] > 0.9
    assert metrics.held_out[-1].head_accuracy["action_0"] < 0.6


def test_an_entropy_bonus_keeps_a_policy_unsure():
    data = replace(echoes(np.random.default_rng(0), 16), action=torch.zeros(12, 16, 1, dtype=torch.int64))
    sure, unsure = (
        imitate(plain_agent(), [data], ImitationConfig(passes=30, learning_rate=1e-2, entropy_coefficient=weight))
        for weight in (0.0, 1.0)
    )
    assert sure.training[-1].loss < 0.05 < 0.2 < unsure.training[-1].loss


def test_draws_derive_from_the_rng_seed_alone():
    def weights(rng_seed, drawn_by_others=0) -> torch.Tensor:
        agent = plain_agent()
        agent.rng_seed = rng_seed
        torch.rand(drawn_by_others)
        before = torch.get_rng_state()
        imitate(agent, [echoes(np.random.default_rng(0), 8)], ImitationConfig(passes=2, minibatch_envs=3))
        assert torch.equal(before, torch.get_rng_state())
        return torch.nn.utils.parameters_to_vector(agent.plain.parameters())

    assert torch.equal(weights(0), weights(0, drawn_by_others=7))
    assert not torch.equal(weights(0), weights(1))


# Bad input.


def test_an_illegal_choice_on_record_is_refused():
    data = growth(np.random.default_rng(0), 4)
    data.mask[1, 2, 0, int(data.action[1, 2, 0])] = False
    with pytest.raises(ValueError, match="of head op at step 1 of environment 2 is illegal"):
        imitate(growth_agent(), [data])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("passes", 0),
        ("minibatch_envs", 0),
        ("patience", 0),
        ("held_out", 1.0),
        ("held_out", -0.1),
        ("learning_rate", 0.0),
        ("value_coefficient", -1.0),
        ("entropy_coefficient", math.nan),
        ("max_gradient_norm", 0.0),
    ],
)
def test_settings_out_of_range_are_refused(name, value):
    with pytest.raises(ValueError, match=f"{name} must be"):
        ImitationConfig(**{name: value})


# Learning.


@pytest.mark.slow
@pytest.mark.parametrize("rng_seed", [0, 1, 2])
def test_a_rule_that_needs_memory_is_found(rng_seed):
    rollouts = [echoes(np.random.default_rng([rng_seed, part]), 32) for part in range(4)]
    metrics = imitate(plain_agent(rng_seed), rollouts, ImitationConfig(passes=50))
    assert metrics.held_out[metrics.best_pass].head_accuracy["action_0"] > 0.95


@pytest.mark.slow
@pytest.mark.parametrize("rng_seed", [0, 1, 2])
def test_a_rule_of_many_heads_is_found(rng_seed):
    """Slots and blueprints are pointed at by what they look like, also on hosts with another number of them."""
    agent, rng = growth_agent(rng_seed), np.random.default_rng(rng_seed)
    rollouts = [growth(rng, 192), growth(rng, 64, num_slots=4, num_blueprints=3)]
    metrics = imitate(agent, rollouts, ImitationConfig(passes=50))
    accuracy = metrics.held_out[metrics.best_pass].head_accuracy
    for head in ("op", "slot", "blueprint", "style", "tempo", "alpha_target"):
        assert accuracy[head] > 0.95, (head, accuracy)
    for weights in agent.plain.parameters():
        assert weights.isfinite().all()
    fresh = growth(rng, 200, steps=1, num_slots=5)
    seen = {part: values[0].numpy() for part, values in fresh.observation.items()}
    action = agent.act(seen, fresh.mask[0].numpy(), agent.initial_state(200), greedy=True).action
    assert (action == fresh.action[0].numpy()).all(-1).mean() > 0.8
