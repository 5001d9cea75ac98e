"""Implicit Q-learning finds a better policy than the recorded one, where cloning the record cannot."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.rollouts import actors

from simic.gymnasium.flat_network import RecurrentActorCritic
from simic.lifecycle.actions import HEAD_VALUES, HEADS, Op
from simic.policy.config import PolicyConfig
from simic.policy.network import GROWTH_TREE, FactoredRecurrentActorCritic
from simic.ppo.agent import DivergedError, PPOAgent
from simic.ppo.config import ImitationConfig, IQLConfig, PPOConfig
from simic.ppo.demonstrations import prepare_demonstrations
from simic.ppo.imitation import imitate
from simic.ppo.offline import (
    TwinQ,
    advantage_weight,
    encode_action,
    expectile_loss,
    iql_terms,
    learn_offline,
    q_target,
)
from simic.ppo.rollout import Rollout

SMALL = PolicyConfig(hidden_size=32, encoding_size=16)
PLACES, GAMMA = 6, 0.7


def record(observation, action, mask, reward, **given) -> Rollout:
    """Episodes of one decision each, but for what is given."""
    yes = torch.ones(action.shape[:2], dtype=torch.bool)
    parts = {"terminated": yes, "truncated": ~yes, "first": yes, "valid": yes}
    state, next_value = torch.zeros(action.shape[1], 1), torch.zeros(action.shape[:2])
    return Rollout(
        observation={part: torch.as_tensor(values, dtype=torch.float32) for part, values in observation.items()},
        action=torch.as_tensor(action),
        mask=torch.as_tensor(mask),
        reward=torch.as_tensor(reward, dtype=torch.float32),
        next_value=next_value,
        state=state,
        **(parts | {name: torch.as_tensor(values) for name, values in given.items()}),
    )


def plain_agent(rng_seed=0, size=PLACES, actions=2, gamma=GAMMA) -> PPOAgent:
    torch.manual_seed(rng_seed)
    network = RecurrentActorCritic(size, [actions], SMALL)
    return PPOAgent(network, PPOConfig(gamma=gamma), rng_seed=rng_seed)


def growth_agent(rng_seed=0) -> PPOAgent:
    torch.manual_seed(rng_seed)
    return PPOAgent(FactoredRecurrentActorCritic(2, 2, 1, SMALL), rng_seed=rng_seed)


# By hand.


@pytest.mark.parametrize(
    ("difference", "expectile", "expected"),
    [
        (2.0, 0.9, 3.6),  # the target is higher: 0.9 * 4
        (-2.0, 0.9, 0.4),  # lower: 0.1 * 4
        (-2.0, 0.5, 2.0),  # half the squared error on both sides
        (0.0, 0.9, 0.0),
    ],
)
def test_expectile_loss_by_hand(difference, expectile, expected):
    assert float(expectile_loss(torch.tensor(difference), expectile)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("advantage", "expected"),
    [(0.0, 1.0), (0.5, math.e), (-0.5, 1 / math.e), (1.0, math.exp(2)), (1.2, 10.0), (1000.0, 10.0)],
)
def test_advantage_weight_by_hand(advantage, expected):
    assert float(advantage_weight(torch.tensor(advantage), 2.0, limit=10.0)) == pytest.approx(expected)


def test_q_target_by_hand():
    """Discount 1/2; the second decision of the first environment ends its episode, whatever comes next."""
    reward, value = torch.tensor([[1.0, 1], [2, 2], [4, 4]]), torch.tensor([[100.0, 8], [10, 6], [1000, 4]])
    terminated = torch.tensor([[0, 0], [1, 0], [0, 0]]).bool()
    assert q_target(reward, value, terminated, 0.5).tolist() == [[6.0, 4.0], [2.0, 4.0], [4.0, 4.0]]


def figures_of(*args) -> dict[str, float]:
    """The terms as plain numbers."""
    return {name: figure.item() for name, figure in iql_terms(*args).items()}


class Says(torch.nn.Module):
    """A twin Q of fixed opinion."""

    def __init__(self, *estimates) -> None:
        super().__init__()
        self.estimates = estimates

    def forward(self, episodes) -> torch.Tensor:
        return torch.stack([torch.full(episodes.shape, value) for value in self.estimates])


def three_decisions(**given) -> Rollout:
    """One environment ends after the second decision, the other is cut off after the third; action 0 throughout."""
    parts = {
        "first": torch.tensor([[1, 1], [0, 0], [1, 0]]).bool(),
        "terminated": torch.tensor([[0, 0], [1, 0], [1, 0]]).bool(),
        "truncated": torch.tensor([[0, 0], [0, 0], [0, 1]]).bool(),
        "mask": np.ones((3, 2, 1, 2), dtype=bool),
        "reward": [[1.0, 1.0], [2.0, 2.0], [4.0, 4.0]],
    }
    data = record({"base": torch.zeros(3, 2, 1)}, torch.zeros(3, 2, 1).long(), **(parts | given))
    return replace(data, state=torch.zeros(2, 2 * SMALL.hidden_size))


def even_agent(value) -> PPOAgent:
    """Both actions are equally likely, and everything is worth `value`."""
    agent = plain_agent(size=1, gamma=0.5)
    for layer, bias in ((actors(agent)[0], 0.0), (agent.plain.critic[-1], value)):
        assert isinstance(layer, torch.nn.Linear)
        torch.nn.init.zeros_(layer.weight)
        torch.nn.init.constant_(layer.bias, bias)
    return agent


def test_terms_by_hand():
    """V = 2, Q = 4 (the lower of 4 and 5), Q that learns = 0 and 1.

    Targets: 1 + 2/2, 2 and 4 in the first environment, 1 + 2/2 and 2 + 2/2 in the second, whose third is not known.
    """
    config = IQLConfig(expectile=0.75, inverse_temperature=0.5)
    terms = figures_of(even_agent(2.0), Says(0.0, 1.0), Says(5.0, 4.0), three_decisions(), config)
    squares = [target**2 + (1 - target) ** 2 for target in (2, 2, 4, 2, 3)]
    assert terms["q_loss"] == pytest.approx(sum(squares) / 5)
    assert terms["value_loss"] == pytest.approx(0.75 * 4)
    assert terms["weight"] == pytest.approx(math.e)
    assert terms["policy_loss"] == pytest.approx(math.e * math.log(2))
    assert terms["q"] == 4.0
    assert terms["value"] == 2.0
    assert terms["limited"] == 0.0
    assert terms["counted"] == pytest.approx(5 / 6)


def test_q_and_v_are_told_in_units_of_the_value_scale():
    """Returns of mean 1 and deviation 2: V = 2 means 5, so the first target, 1 + 5/2, is told as 5/4."""
    agent = even_agent(2.0)
    agent.value_scale.mean.fill_(1.0)
    agent.value_scale.variance.fill_(4.0)
    terms = figures_of(agent, Says(0.0, 0.0), Says(0.0, 0.0), three_decisions(), IQLConfig())
    told = [(target - 1) / 2 for target in (3.5, 2, 4, 3.5, 4.5)]
    assert terms["q_loss"] == pytest.approx(2 * sum(number**2 for number in told) / 5)


def test_a_decision_with_only_one_choice_does_not_concern_the_policy():
    """Half of the decisions leave no choice: the loss is still that of the others."""
    mask = np.ones((3, 2, 1, 2), dtype=bool)
    mask[:, 0, 0, 1] = False
    q = Says(2.0, 2.0)
    terms = figures_of(even_agent(2.0), q, q, three_decisions(mask=mask), IQLConfig())
    assert terms["policy_loss"] == pytest.approx(math.log(2))


def test_padding_counts_for_nothing():
    data, q = three_decisions(), Says(2.0, 2.0)
    short = three_decisions(valid=torch.tensor([[1, 1], [1, 1], [0, 1]]).bool())
    other = replace(short, reward=short.reward + torch.tensor([[0.0, 0], [0, 0], [1e6, 1e6]]))
    terms, same = (figures_of(even_agent(2.0), q, q, one, IQLConfig()) for one in (short, other))
    assert terms == same
    assert terms["q_loss"] != figures_of(even_agent(2.0), q, q, data, IQLConfig())["q_loss"]


def coin(num_envs=16, steps=4) -> Rollout:
    """Episodes of one decision, one after the other: action 1 pays 1, action 0 nothing; each is taken as often."""
    action = np.indices((steps, num_envs)).sum(0)[..., None] % 2
    return record(
        {"base": np.zeros((steps, num_envs, 1))}, action, np.ones((steps, num_envs, 1, 2), bool), action[..., 0]
    )


@pytest.mark.parametrize(
    ("inverse_temperature", "limit", "odds"),
    [(0.5, 100.0, math.e), pytest.param(1.0, 0.5, 0.5 / math.exp(-1.8), marks=pytest.mark.slow)],
)
def test_a_coin_by_hand(inverse_temperature, limit, odds):
    """Pay is told as -1 or 1, whose 0.9 expectile is 0.8: 0.9 (1 - v) = 0.1 (v + 1). Advantages are -1.8 and 0.2.

    So the odds of the better action are exp(0.5 * 2); with a limit of 0.5 they are 0.5 to exp(-1.8).
    """
    agent = plain_agent(size=1, gamma=0.9)
    settings = {"inverse_temperature": inverse_temperature, "weight_limit": limit, "expectile": 0.9}
    metrics = learn_offline(agent, [coin()], IQLConfig(steps=200, learning_rate=1e-2, target_rate=0.2, **settings))
    assert metrics.value == pytest.approx(0.8, abs=0.02)
    assert metrics.q == pytest.approx(0.0, abs=0.02)
    assert metrics.limited == pytest.approx(0.5 if limit < 1 else 0.0)
    state = agent.initial_state(1)
    decision = agent.act({"base": np.zeros((1, 1))}, np.ones((1, 1, 2), dtype=bool), state, greedy=True)
    assert decision.action.item() == 1
    assert math.exp(decision.log_prob.item()) == pytest.approx(odds / (1 + odds), abs=0.02)
    assert float(decision.value.item()) == pytest.approx(
        1.8, abs=0.03
    )  # mean 1 and 0.8 deviations of 1, pay scaled by 2


def test_without_temperature_it_is_imitation():
    agent, rng = growth_agent(), np.random.default_rng(0)
    data = prepare_demonstrations(agent, [bandit(rng, 32)])
    q = TwinQ(agent.plain, rng_seed=0)
    terms = figures_of(agent, q, q, data, IQLConfig(inverse_temperature=0.0))
    metrics = imitate(agent, [data], ImitationConfig(passes=1, held_out=0.0, minibatch_envs=32, learning_rate=1e-9))
    assert terms["policy_loss"] == pytest.approx(metrics.training[0].loss, rel=1e-4)


# What Q knows of an action.


def test_an_action_is_told_by_what_matters():
    agent, data = growth_agent(), bandit(np.random.default_rng(0), 8, steps=1)
    features = agent.plain.features(data.observation, agent.initial_state(8))
    assert features.slots is not None
    assert features.blueprints is not None

    def told(**choices) -> torch.Tensor:
        action = torch.zeros(1, 8, len(HEADS), dtype=torch.int64)
        for head, choice in choices.items():
            action[..., HEADS.index(head)] = choice
        return encode_action(agent.plain, features, action)

    assert told(op=Op.WAIT, slot=2, tempo=1).sum(-1).tolist() == [[1.0] * 8]  # the operation, and nothing else
    assert torch.equal(told(op=Op.PRUNE, slot=1), told(op=Op.PRUNE, slot=1, blueprint=1))
    germinate = told(op=Op.GERMINATE, slot=1, blueprint=1, tempo=2)
    assert torch.equal(germinate[..., -32:-16], features.slots[:, :, 1])
    assert torch.equal(germinate[..., -16:], features.blueprints[:, :, 1, 1])
    for other in ({"op": Op.FOSSILIZE}, {"slot": 2}, {"blueprint": 0}, {"tempo": 1}):
        assert not torch.equal(germinate, told(**({"op": Op.GERMINATE, "slot": 1, "blueprint": 1, "tempo": 2} | other)))


def test_plain_actions_are_one_hot():
    network = RecurrentActorCritic(1, [2, 3], SMALL)
    features = network.features({"base": torch.zeros(1, 1, 1)}, network.initial_state(1))
    assert encode_action(network, features, torch.tensor([[[1, 2]]])).tolist() == [[[0, 1, 0, 0, 1]]]


# A corridor: the left end pays 0.4, the right one 1, and who walks does not know better than to go left mostly.


def step(place, right) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    place = place + np.where(right, 1, -1)
    return place, 0.4 * (place == 0) + 1.0 * (place == PLACES - 1), (place == 0) | (place == PLACES - 1)


def corridor(rng, num_envs=48, steps=20, share_right=0.3) -> Rollout:
    place, begins, rows = rng.integers(1, PLACES - 1, num_envs), np.ones(num_envs, dtype=bool), []
    for _ in range(steps):
        right = rng.random(num_envs) < share_right
        after, reward, ended = step(place, right)
        rows.append((np.eye(PLACES)[place], right[:, None].astype(np.int64), reward, begins, ended))
        place, begins = np.where(ended, rng.integers(1, PLACES - 1, num_envs), after), ended
    seen, action, reward, first, terminated = (np.stack(column) for column in zip(*rows, strict=True))
    truncated = np.zeros_like(terminated)
    truncated[-1] = ~terminated[-1]
    mask = np.ones((steps, num_envs, 1, 2), dtype=bool)
    return record({"base": seen}, action, mask, reward, first=first, terminated=terminated, truncated=truncated)


def best_values() -> np.ndarray:
    """Values of the places between the ends, by value iteration."""
    value = np.zeros(PLACES)
    for _ in range(100):
        outcomes = [step(np.arange(1, PLACES - 1), right) for right in (False, True)]
        value[1:-1] = np.max([reward + GAMMA * value[place] * ~ended for place, reward, ended in outcomes], 0)
    return value[1:-1]


def returns_of(agent) -> np.ndarray:
    """Discounted returns of the greedy policy from every place between the ends."""
    place, state = np.arange(1, PLACES - 1), agent.initial_state(PLACES - 2)
    total, going = np.zeros(PLACES - 2), np.ones(PLACES - 2, dtype=bool)
    for time in range(20):
        seen, mask = {"base": np.eye(PLACES, dtype=np.float32)[place]}, np.ones((PLACES - 2, 1, 2), dtype=bool)
        decision = agent.act(seen, mask, state, greedy=True)
        after, reward, ended = step(place, decision.action[:, 0] == 1)
        total += GAMMA**time * reward * going
        going &= ~ended
        place, state = np.where(going, after, 1), decision.state
    return total


def test_the_corridor_by_hand():
    assert best_values() == pytest.approx([0.4, 0.49, 0.7, 1.0])


@pytest.mark.slow
@pytest.mark.parametrize("rng_seed", [0, 1, 2])
def test_the_best_walk_is_found_in_bad_ones(rng_seed):
    data = [corridor(np.random.default_rng([rng_seed, part])) for part in range(2)]
    clone, agent = plain_agent(rng_seed), plain_agent(rng_seed)
    imitate(clone, data, ImitationConfig(passes=20))
    metrics = learn_offline(
        agent, data, IQLConfig(steps=800, learning_rate=3e-3, expectile=0.9, inverse_temperature=10.0)
    )
    assert returns_of(agent) == pytest.approx(best_values(), abs=1e-3), metrics
    assert returns_of(clone).mean() < 0.75 * best_values().mean()


# A bandit in two stages: to wait pays 0.5; to germinate pays 1 with the marked blueprint in the marked slot, else 0.


def all_legal(num_slots, num_blueprints) -> np.ndarray:
    """The mask of one growth decision in which wait and germinate are legal, with any choice (R, W)."""
    sizes = {head: len(values) for head, values in HEAD_VALUES.items()}
    sizes |= {"slot": num_slots, "blueprint": num_blueprints}
    rows = GROWTH_TREE.row_names(GROWTH_TREE.num_rows + num_slots)
    mask = np.arange(max(sizes.values())) < np.array([sizes[head] for head in rows])[:, None]
    mask[0] = np.isin(np.arange(mask.shape[1]), [Op.WAIT, Op.GERMINATE])
    return mask


def bandit(rng, num_envs=64, steps=8, num_slots=3, num_blueprints=2, share_wait=0.7) -> Rollout:
    """Somebody waits mostly, and germinates anything anywhere. One slot is closed, and at times nothing is free."""
    shape = (steps, num_envs)
    marked, closed = rng.permuted(np.tile(np.arange(num_slots), (*shape, 1)), axis=-1)[..., :2].transpose(2, 0, 1)
    offers = rng.permuted(np.tile(np.arange(num_blueprints) == 0, (*shape, num_slots, 1)), axis=-1)
    slots = np.stack([np.arange(num_slots) == marked[..., None], rng.random((*shape, num_slots)) < 0.5], -1)
    seen = {"base": rng.normal(size=(*shape, 2)), "slots": 2 * slots - 1.0, "blueprints": 2 * offers[..., None] - 1.0}
    mask = np.tile(all_legal(num_slots, num_blueprints), (*shape, 1, 1))
    forced = rng.random(shape) < 0.1
    slot_rows = [row for row, head in enumerate(GROWTH_TREE.row_head) if HEADS[head] == "slot"]
    mask[:, :, slot_rows, :num_slots] &= (np.arange(num_slots) != closed[..., None])[:, :, None]
    mask[:, :, 0, 1:] &= ~forced[..., None]
    op = ((rng.random(shape) > share_wait) & ~forced).astype(np.int64)
    slot = (closed + rng.integers(1, num_slots, size=shape)) % num_slots
    choices = {"op": op, "slot": slot, "blueprint": rng.integers(num_blueprints, size=shape)}
    action = np.stack([choices.get(head, np.zeros_like(op)) for head in HEADS], -1) * op[..., None]
    return record(seen, action, mask, payoff(seen, action))


def payoff(seen, action) -> np.ndarray:
    """What actions (..., H) are paid."""
    slot, blueprint = (action[..., HEADS.index(head), None] for head in ("slot", "blueprint"))
    in_slot = np.take_along_axis(seen["slots"][..., 0], slot, -1)[..., 0] > 0
    offers = np.take_along_axis(seen["blueprints"][..., 0], slot[..., None], -2)[..., 0, :]
    right = in_slot & (np.take_along_axis(offers, blueprint, -1)[..., 0] > 0)
    return np.where(action[..., 0] == Op.GERMINATE, 1.0 * right, 0.5)


def played(agent, rng, **how) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Masks, actions and pay of an agent in 400 fresh scenes."""
    scenes = bandit(rng, 400, steps=1)
    seen, mask = {part: values[0].numpy() for part, values in scenes.observation.items()}, scenes.mask[0].numpy()
    action = agent.act(seen, mask, agent.initial_state(400), **how).action
    return mask, action, payoff(seen, action)


@pytest.mark.slow
@pytest.mark.parametrize("rng_seed", [0, 1, 2])
def test_the_right_slot_and_blueprint_are_found_in_random_tries(rng_seed):
    """About a tenth of the scenes leave no choice, so the best mean pay is about 0.95; who clones waits for 0.5."""
    rng = np.random.default_rng(rng_seed)
    data, clone, agent = [bandit(rng) for _ in range(4)], growth_agent(rng_seed), growth_agent(rng_seed)
    imitate(clone, data, ImitationConfig(passes=10))
    learn_offline(agent, data, IQLConfig(steps=500))
    assert played(agent, rng, greedy=True)[-1].mean() > 0.9
    assert played(clone, rng, greedy=True)[-1].mean() < 0.6


# Afterwards.


def test_illegal_actions_are_never_chosen():
    agent, rng = growth_agent(), np.random.default_rng(0)
    learn_offline(agent, [bandit(rng)], IQLConfig(steps=30, learning_rate=1e-2))
    for greedy in (False, True):
        mask, action, _ = played(agent, rng, greedy=greedy)
        rows = GROWTH_TREE.row_of[action[:, 0]]
        rows[:, GROWTH_TREE.pointed] += action[:, GROWTH_TREE.pointer] * GROWTH_TREE.head_used[action[:, 0], 2]
        legal = mask[np.arange(len(mask))[:, None], rows, action]
        assert legal[GROWTH_TREE.head_used[action[:, 0]]].all()


def test_ppo_goes_on_from_there():
    agent, data = growth_agent(), bandit(np.random.default_rng(0), 16)
    own = replace(data, state=agent.initial_state(16))
    agent.update(own)
    assert agent.optimizer.state
    learn_offline(agent, [data], IQLConfig(steps=5))
    assert not agent.optimizer.state
    metrics = agent.update(own)
    assert metrics.steps_taken > 0
    assert math.isfinite(metrics.policy_loss)
    assert math.isfinite(metrics.value_loss)


def test_draws_derive_from_the_rng_seed_alone():
    def weights(rng_seed, drawn_by_others=0) -> torch.Tensor:
        agent = plain_agent()
        agent.rng_seed = rng_seed
        torch.rand(drawn_by_others)
        before = torch.get_rng_state()
        learn_offline(agent, [corridor(np.random.default_rng(0), 8)], IQLConfig(steps=3, minibatch_envs=3))
        assert torch.equal(before, torch.get_rng_state())
        return torch.nn.utils.parameters_to_vector(agent.plain.parameters())

    assert torch.equal(weights(0), weights(0, drawn_by_others=7))
    assert not torch.equal(weights(0), weights(1))


def test_progress_is_told_now_and_then_and_at_the_end(monkeypatch):
    monkeypatch.setattr("simic.ppo.offline.REPORT_STEPS", 2)
    told = []
    last = learn_offline(plain_agent(size=1), [coin(2, 1)], IQLConfig(steps=5), progress=told.append)
    assert [metrics.step for metrics in told] == [2, 4, 5]
    assert last.step == 5


# Bad input.


def test_decisions_without_an_outcome_are_refused():
    no = torch.zeros(1, 4, dtype=torch.bool)
    with pytest.raises(ValueError, match="no recorded decision has a known outcome"):
        learn_offline(plain_agent(size=1), [replace(coin(4, 1), terminated=no, truncated=~no)])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("steps", 0),
        ("minibatch_envs", 0),
        ("learning_rate", 0.0),
        ("expectile", 0.0),
        ("expectile", 1.0),
        ("inverse_temperature", -1.0),
        ("weight_limit", 0.0),
        ("target_rate", 0.0),
        ("target_rate", 1.1),
        ("value_coefficient", 0.0),
        ("max_gradient_norm", math.nan),
    ],
)
def test_settings_out_of_range_are_refused(name, value):
    with pytest.raises(ValueError, match=f"{name} must be"):
        IQLConfig(**{name: value})


@pytest.mark.parametrize(("steps", "what"), [(2, "the gradient's norm is inf"), (1, "the norm of the weights is inf")])
def test_learning_that_is_not_finite_ends_as_diverged(steps, what):
    with pytest.raises(DivergedError, match=f"{what}: look for rewards and observations in the recorded episodes"):
        learn_offline(plain_agent(size=1), [three_decisions()], IQLConfig(steps=steps, learning_rate=1e30))
