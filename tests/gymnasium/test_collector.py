"""Collecting from Gymnasium environments: what is recorded, in both ways of beginning anew.

The environment counts: its observation is the number of the episode and the steps taken in it, so that every entry of a
rollout is known.
"""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from helpers.rollouts import growth_agent, stir

from simic.gymnasium.collector import BoxView, Collector, make_network
from simic.policy.config import PolicyConfig
from simic.ppo.agent import PPOAgent
from simic.ppo.config import PPOConfig

SAME, NEXT = AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP


class Counting(gym.Env):
    """Episode k lasts `lengths[k % len]` steps; even ones are cut off, odd ones end. Pays its step number."""

    observation_space = gym.spaces.Box(-1e6, 1e6, (2,), np.float32)
    action_space = gym.spaces.MultiDiscrete([3, 2])

    def __init__(self, lengths=(3, 2), masked=True):
        self.lengths, self.masked, self.episode = lengths, masked, -1

    def info(self):
        """One legal choice of the first head, the step number modulo 3; at the end nothing is legal."""
        over = self.step_number == self.lengths[self.episode % len(self.lengths)]
        legal = np.array([i == self.step_number % 3 for i in range(3)] + [True, True]) & (not over)
        return {"action_mask": legal} if self.masked else {}

    def seen(self):
        return np.array([self.episode, self.step_number], dtype=np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.step_number = self.episode + 1, 0
        return self.seen(), self.info()

    def step(self, action):
        assert not self.masked or action[0] == self.step_number % 3, "an illegal action"
        self.step_number += 1
        over = self.step_number == self.lengths[self.episode % len(self.lengths)]
        cut = self.episode % 2 == 0
        return self.seen(), float(self.step_number), over and not cut, over and cut, self.info()


def collector(mode, num_steps=12, lengths=((3, 2), (4,)), *, value_is_sum=True, **settings) -> Collector:
    """Environments with these lengths of episodes; the critic says 10 * episode + step + 100 * previous reward."""
    envs = SyncVectorEnv([lambda own=own: Counting(own) for own in lengths], autoreset_mode=mode)
    torch.manual_seed(0)
    network = make_network(envs, PolicyConfig(hidden_size=8, encoding_size=8, normalize_observations=False))
    agent = PPOAgent(network, PPOConfig(**settings))
    if value_is_sum:
        agent.value = lambda observation, state: observation["base"] @ np.array([10, 1], dtype=np.float32)
        act = agent.act

        def act_with_known_value(observation, mask, state, **settings: Any):
            return act(observation, mask, state, **settings)._replace(value=agent.value(observation, state))

        agent.act = act_with_known_value
    return Collector(envs, agent, num_steps)


def transitions(rollout, env):
    """The valid steps of one environment, as the environment would tell them."""
    keep = rollout.valid[:, env]
    names = ("reward", "terminated", "truncated", "next_value", "first")
    columns = [rollout.observation["base"], *(getattr(rollout, name) for name in names)]
    return [[column[step, env].tolist() for column in columns] for step in keep.nonzero().flatten().tolist()]


def test_same_step_by_hand():
    """Episodes of 3 (cut off) and 2 (ended) steps; a rollout of 6 cuts the third after its first step."""
    rollout = collector(SAME, 6, ((3, 2),)).collect()
    assert rollout.valid.all()
    #         seen      reward  ended  cut  value after the cut  first
    assert transitions(rollout, 0) == [
        [[0.0, 0.0], 1.0, False, False, 0.0, True],
        [[0.0, 1.0], 2.0, False, False, 0.0, False],
        [[0.0, 2.0], 3.0, False, True, 3.0, False],  # the state after is episode 0, step 3
        [[1.0, 0.0], 1.0, False, False, 0.0, True],
        [[1.0, 1.0], 2.0, True, False, 0.0, False],
        [[2.0, 0.0], 1.0, False, True, 21.0, True],  # the rollout cuts it: episode 2, step 1
    ]


def test_next_step_by_hand():
    """The same with a step between episodes that only resets."""
    rollout = collector(NEXT, 8, ((3, 2),)).collect()
    assert rollout.valid[:, 0].tolist() == [True, True, True, False, True, True, False, True]
    assert transitions(rollout, 0) == [
        [[0.0, 0.0], 1.0, False, False, 0.0, True],
        [[0.0, 1.0], 2.0, False, False, 0.0, False],
        [[0.0, 2.0], 3.0, False, True, 3.0, False],
        [[1.0, 0.0], 1.0, False, False, 0.0, True],
        [[1.0, 1.0], 2.0, True, False, 0.0, False],
        [[2.0, 0.0], 1.0, False, True, 21.0, True],
    ]
    assert not rollout.reward[~rollout.valid].any()
    assert not (rollout.terminated | rollout.truncated)[~rollout.valid].any()


def test_a_rollout_that_ends_with_a_reset_cuts_nothing():
    """The episode was over before: the last step is neither cut off nor followed by a value."""
    rollout = collector(NEXT, 4, ((3, 2),)).collect()
    assert rollout.valid[:, 0].tolist() == [True, True, True, False]
    assert rollout.truncated[:, 0].tolist() == [False, False, True, False]
    assert rollout.next_value[:, 0].tolist() == [0.0, 0.0, 3.0, 0.0]


def test_what_was_cut_off_is_valued_with_the_memory_of_its_own_episode():
    """A critic that remembers says the same in both modes, of environments that are cut off at different times."""
    lengths, found = ((3, 2), (4,), (7,)), []
    for mode in (SAME, NEXT):
        several = collector(mode, 24, lengths, value_is_sum=False)
        stir(several.agent)
        rollout = several.collect()
        found.append([[s[4] for s in transitions(rollout, env)[:15] if s[3]] for env in range(3)])
    for ours, theirs in zip(*found, strict=True):
        assert ours
        assert ours == pytest.approx(theirs, abs=1e-5)
    assert len({round(value, 4) for values in found[0] for value in values}) > 3


def flattened(rollouts, env):
    """Transitions of one environment over several rollouts, less the cuts that rollouts make."""
    found = [step for rollout in rollouts for step in transitions(rollout, env)]
    length = {0: (3, 2), 1: (4,)}[env]
    for step in found:
        (episode, number), cut = step[0], step[3]
        if cut and number + 1 < length[int(episode) % len(length)]:
            step[3], step[4] = False, 0.0
    return found


def test_both_modes_tell_the_same_story():
    """Over rollout borders too: the valid transitions are the same."""
    same, later = collector(SAME, 7), collector(NEXT, 7)
    ours, theirs = ([c.collect() for _ in range(4)] for c in (same, later))
    for env in range(2):
        one, other = flattened(ours, env), flattened(theirs, env)
        shorter = min(len(one), len(other))
        assert shorter >= 20
        assert one[:shorter] == other[:shorter]


@pytest.mark.parametrize("mode", [SAME, NEXT])
@pytest.mark.parametrize("num_steps", [1, 2, 3, 5])
def test_borders_between_rollouts_lose_nothing(mode, num_steps):
    """Short rollouts, laid end to end, are the long one."""
    long = [collector(mode, 30).collect()]
    short = collector(mode, num_steps)
    parts = [short.collect() for _ in range(30 // num_steps)]
    for env in range(2):
        assert flattened(parts, env) == flattened(long, env)


@pytest.mark.parametrize("mode", [SAME, NEXT])
def test_the_end_of_a_rollout_is_the_value_of_what_comes_next(mode):
    rollout = collector(mode, 2, ((4,),)).collect()
    assert rollout.truncated[:, 0].tolist() == [False, True]
    assert rollout.next_value[:, 0].tolist() == [0.0, 2.0]


@pytest.mark.parametrize("mode", [SAME, NEXT])
def test_the_state_is_carried_across_rollouts_and_zeroed_at_resets(mode):
    """Replaying each rollout from its recorded state and flags gives the log-probabilities that were acted on."""
    several = collector(mode, 5, ((3, 2), (4,), (7,)), value_is_sum=False)
    stir(several.agent)
    acted, act = [], several.agent.act

    def recorded(*arguments: Any, **settings: Any):
        acted.append(act(*arguments, **settings))
        return acted[-1]

    several.agent.act = recorded
    carried = []
    for _ in range(4):
        acted.clear()
        rollout = several.collect()
        carried.append(rollout.state.any(1))
        assert not rollout.state[rollout.first[0]].any()
        assert not rollout.state.requires_grad
        batch, _ = several.agent.prepare_batch(rollout)
        expected = torch.from_numpy(np.stack([decision.log_prob for decision in acted]))
        assert torch.allclose(batch.log_prob, expected, atol=1e-5)
        assert (rollout.action == torch.from_numpy(np.stack([decision.action for decision in acted]))).all()
    assert torch.stack(carried[1:]).any()


@pytest.mark.parametrize("mode", [SAME, NEXT])
def test_masks_of_the_environment_are_obeyed_and_recorded(mode):
    """The environment refuses illegal actions; where an episode is over its empty mask matters to nobody."""
    rollout = collector(mode, 40).collect()
    step = rollout.observation["base"][..., 1].long()
    free = rollout.valid
    assert (rollout.action[..., 0][free] == step[free] % 3).all()
    assert (rollout.mask[:, :, 0].sum(-1)[free] == 1).all()
    assert (rollout.mask[:, :, 1].sum(-1)[free] == 2).all()
    assert not rollout.mask[:, :, 1, 2][free].any()
    assert set(rollout.action[..., 1].flatten().tolist()) == {0, 1}


@pytest.mark.parametrize("mode", [SAME, NEXT])
def test_a_rollout_can_be_learned_from(mode):
    several = collector(mode, 12, value_is_sum=False)
    rollout = several.collect()
    metrics = several.agent.update(rollout)
    assert metrics.decisions == int(rollout.valid.sum())
    assert metrics.steps_taken > 0


@pytest.mark.parametrize("mode", [SAME, NEXT])
def test_episodes_that_ended_are_counted(mode):
    several = collector(mode, 13, ((3, 2),))
    several.collect()
    # 1 + 2 + 3, 1 + 2, and so on; a step between them does not count.
    assert [tuple(finished) for finished in several.finished][:3] == [(6.0, 3), (3.0, 2), (6.0, 3)]


class PreviousReward(BoxView):
    """Shows the reward that came with an observation as its first feature."""

    def observation(self, observation, reward):
        seen = np.array(observation, dtype=np.float32)
        seen[:, 0] = reward
        return {"base": seen}


def test_the_reward_that_came_with_an_observation_is_the_same_in_both_modes():
    """Also with the last one of an episode, whose value stands for what was cut off; after a reset it is 0."""
    found = []
    for mode in (SAME, NEXT):
        several = collector(mode, 20, ((3, 2),))
        several.view = PreviousReward(several.envs.single_observation_space, several.envs.single_action_space)
        found.append(transitions(several.collect(), 0)[:12])
    assert found[0] == found[1]
    assert [step[0][0] for step in found[0][:6]] == [0, 1, 2, 0, 1, 0]
    assert found[0][2][4] == 10 * 3 + 3  # the reward was 3, at step 3


def test_observations_are_copies():
    """An environment that writes into one array again and again does not change what was recorded."""
    envs = SyncVectorEnv([lambda: Counting((9,), masked=False)], autoreset_mode=SAME, copy=False)
    agent = PPOAgent(make_network(envs, PolicyConfig(hidden_size=4, encoding_size=4)))
    rollout = Collector(envs, agent, 5).collect()
    assert rollout.observation["base"][:, 0, 1].tolist() == [0, 1, 2, 3, 4]


# What is refused.


def test_discrete_actions_are_numbers_and_without_masks_all_are_legal():
    envs = gym.make_vec("CartPole-v1", 2, vectorization_mode="sync", vector_kwargs={"autoreset_mode": SAME})
    network = make_network(envs, PolicyConfig(hidden_size=4, encoding_size=4))
    assert network.fixed_head_sizes == {"action_0": 2}
    rollout = Collector(envs, PPOAgent(network), 6).collect()
    assert rollout.mask.all()
    assert rollout.action.shape == (6, 2, 1)


@pytest.mark.parametrize(
    ("observation", "action", "message"),
    [
        (
            gym.spaces.Box(-1, 1, (2,)),
            gym.spaces.Box(-1, 1, (2,)),
            "actions must be Discrete or MultiDiscrete, got Box",
        ),
        (gym.spaces.Dict({}), gym.spaces.Discrete(2), "observations must be a Box, got Dict.*flatten"),
        (gym.spaces.Box(-1, 1, (2,)), gym.spaces.Discrete(2, start=1), "must start at 0"),
        (
            gym.spaces.Box(-1, 1, (2,)),
            gym.spaces.MultiDiscrete(np.array([[2, 2]])),
            "actions must be Discrete or MultiDiscrete",
        ),
    ],
)
def test_spaces_that_do_not_fit_are_refused(observation, action, message):
    with pytest.raises(ValueError, match=message):
        BoxView(observation, action)


def test_environments_that_do_not_begin_anew_are_refused():
    envs = SyncVectorEnv([Counting], autoreset_mode=AutoresetMode.DISABLED)
    with pytest.raises(ValueError, match=r"must reset automatically.*SAME_STEP"):
        Collector(envs, PPOAgent(make_network(envs)), 4)


def test_a_rollout_of_no_steps_is_refused():
    envs = SyncVectorEnv([Counting], autoreset_mode=SAME)
    with pytest.raises(ValueError, match="num_steps must be at least 1, got 0"):
        Collector(envs, PPOAgent(make_network(envs)), 0)


def box_env(features: int, *sizes: int) -> SyncVectorEnv:
    """One environment with these spaces; it is never played."""
    envs = SyncVectorEnv([Counting], autoreset_mode=SAME)
    envs.single_observation_space = gym.spaces.Box(-1, 1, (features,))
    envs.single_action_space = gym.spaces.MultiDiscrete(list(sizes))
    return envs


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        (box_env(4, 3, 2), "made for observations of sizes {'base': 4}, the environments have {'base': 2}"),
        (box_env(2, 2, 3), r"made for action heads of sizes \[2, 3\], the environments have \[3, 2\]"),
        (box_env(2, 3), r"of sizes \[3\], the environments have \[3, 2\]; build it from make_network\(envs\)"),
    ],
)
def test_an_agent_made_for_other_spaces_is_refused_at_once(agent, message):
    envs = SyncVectorEnv([Counting], autoreset_mode=SAME)
    with pytest.raises(ValueError, match=message):
        Collector(envs, PPOAgent(make_network(agent)), 4)


def test_a_growth_agent_needs_its_view():
    envs = SyncVectorEnv([Counting], autoreset_mode=SAME)
    with pytest.raises(ValueError, match=r"'slots': \d+, .* have {'base': 2}; .* or pass the view it was made for"):
        Collector(envs, growth_agent(), 4)


def test_a_mask_of_another_shape_is_refused():
    view = BoxView(Counting.observation_space, Counting.action_space)
    with pytest.raises(ValueError, match=r"action_mask must have shape \(2, 5\).*got \(2, 4\)"):
        view.mask({"action_mask": np.ones((2, 4), dtype=bool)}, 2)


def test_pictures_are_flattened():
    view = BoxView(gym.spaces.Box(0, 1, (2, 3)), gym.spaces.Discrete(2))
    assert view.observation_size == 6
    assert view.observation(np.zeros((4, 2, 3)), np.zeros(4))["base"].shape == (4, 6)
