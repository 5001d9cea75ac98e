"""Tiny environments whose best policy is known, and how well a policy does in them.

Shapes: N environments, S slots, B blueprints. Those with the actions of growth are one array program for all N, whose
episodes begin anew in the step that ends them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from simic.control.learned import row_masks
from simic.control.legality import Masks
from simic.gymnasium.collector import BoxView, View
from simic.lifecycle.actions import HEAD_USED, HEADS, Op
from simic.policy.network import GROWTH_TREE
from simic.ppo.agent import PPOAgent

OP, SLOT, BLUEPRINT = (HEADS.index(head) for head in ("op", "slot", "blueprint"))


def cart_pole_without_velocities() -> gym.Env:
    """CartPole that shows the position and the angle; how fast they change must be remembered."""
    space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    return gym.wrappers.TransformObservation(gym.make("CartPole-v1"), lambda seen: seen[[0, 2]], space)


class TMaze(gym.Env):
    """A corridor with a fork at its end; which way to turn is shown at its start only (Bakker 2001).

    Actions: walk on, turn left, turn right. At the fork the turn to the goal pays 1, the other nothing, and both end
    the episode; a turn in the corridor costs 0.1 and leads nowhere. Without memory every policy finds the goal in half
    of all episodes at best.
    """

    observation_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gym.spaces.Discrete(3)
    corridor = 10

    def __init__(self, goal: int | None = None) -> None:
        """The goal is always 1, left, or 2, right, if given; else it is drawn for each episode."""
        self._given = goal

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        """At the start."""
        super().reset(seed=seed)
        self._goal = self._given or int(self.np_random.integers(1, 3))
        self._place, self._steps = 0, 0
        return self._seen(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        """Walk or turn; after 3 corridors' worth of steps nobody waits any longer."""
        self._steps += 1
        fork, turns = self._place == self.corridor, int(action) > 0
        reward = float(action == self._goal) if fork and turns else -0.1 * turns
        self._place = min(self.corridor, self._place + (not turns))
        return self._seen(), reward, fork and turns, self._steps >= 3 * self.corridor, {}

    def _seen(self) -> np.ndarray:
        cue = (0.0, -1.0, 1.0)[self._goal] if self._place == 0 else 0.0
        return np.array([cue, self._place == self.corridor], dtype=np.float32)


class TreeView(View):
    """Environments that speak the language of growth: parts of an observation, and masks."""

    def observation(self, observation: dict[str, np.ndarray], reward: np.ndarray) -> dict[str, np.ndarray]:
        """As it is."""
        return observation

    def mask(self, info: dict[str, Any], num_envs: int) -> np.ndarray:
        """Rows of the action tree; unlike hosts of one task, environments may differ in legal blueprints (N, S, B)."""
        masks: Masks = info["masks"]
        rows = row_masks(replace(masks, blueprint=masks.blueprint[0]))
        pointed = rows[:, GROWTH_TREE.num_rows :]
        pointed[..., : masks.blueprint.shape[-1]] = masks.blueprint
        pointed[..., 0] |= ~pointed.any(-1)
        return rows

    def action(self, action: np.ndarray) -> np.ndarray:
        """As it is."""
        return action

    def contribution(self, info: dict[str, Any]) -> None:
        """Not known."""


class MaskedBandit(VectorEnv):
    """One decision: germinate the one ripe blueprint, if that is legal; what else pays depends on what is legal.

    The ripe blueprint, one of S x B, pays 1, others 0.2; it is illegal in a third of all states, others in half.
    Fossilize pays 0.6 and is legal half of the time; wait pays 0.4, set_alpha_target, prune and advance nothing. So the
    best mean is 2/3 * 1 + 1/3 * (0.6 + 0.4) / 2 = 5/6, and 0.5 for who never germinates. Blueprint and slot matter
    under one operation, and the other heads of that operation change nothing.
    """

    num_slots, num_blueprints = 2, 3
    sizes = (1, 1, 3)
    """Features of base, slots and blueprints."""
    best = 5 / 6

    def __init__(self, num_envs: int) -> None:
        self.num_envs, self.metadata = num_envs, {"autoreset_mode": AutoresetMode.SAME_STEP}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """New states."""
        super().reset(seed=seed)
        return self._draw()

    def step(self, actions: np.ndarray) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """What the actions pay, and new states."""
        check_legal(actions, self._masks)
        n = np.arange(self.num_envs)
        germinated = np.where(self._ripe[n, actions[:, SLOT], actions[:, BLUEPRINT]], 1.0, 0.2)
        reward = np.array([0.4, 0.0, 0.0, 0.0, 0.6, 0.0])[actions[:, OP]]
        reward = np.where(actions[:, OP] == Op.GERMINATE, germinated, reward)
        observation, info = self._draw()
        over = np.ones(self.num_envs, dtype=bool)
        return observation, reward, over, ~over, info

    def _draw(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        rng, shape = self.np_random, (self.num_envs, self.num_slots, self.num_blueprints)
        ripe = np.zeros((self.num_envs, self.num_slots * self.num_blueprints), dtype=bool)
        ripe[np.arange(self.num_envs), rng.integers(ripe.shape[1], size=self.num_envs)] = True
        self._ripe = ripe.reshape(shape)
        legal = rng.random(shape) < np.where(self._ripe, 2 / 3, 1 / 2)
        op = np.ones((self.num_envs, len(Op)), dtype=bool)
        op[:, Op.GERMINATE] = legal.any((1, 2))
        op[:, Op.FOSSILIZE] = rng.random(self.num_envs) < 1 / 2
        slot = np.ones((self.num_envs, len(Op), self.num_slots), dtype=bool)
        slot[:, Op.GERMINATE] = legal.any(-1)
        self._masks = Masks(op=op, slot=slot, blueprint=legal)
        observation = {
            "base": op[:, [Op.FOSSILIZE]].astype(np.float32),
            "slots": np.ones((*shape[:2], 1), dtype=np.float32),
            "blueprints": np.stack([np.ones(shape), self._ripe, legal], -1).astype(np.float32),
        }
        return observation, {"masks": self._masks}


class GrowOrWait(VectorEnv):
    """Half of the hosts stall and need a seed, half learn by themselves; only two losses in a row tell which is which.

    From the second decision on a seed may be germinated, then advanced, then fossilized; each decision that leaves it
    alive costs 0.1. To fossilize it pays 1 if the host stalls and the seed germinated by the fourth decision, and else
    costs 0.5; there is no way back. The best policy does so where the loss did not fall: it gets 1 - 2 * 0.1 = 0.8
    there and 0 elsewhere, 0.4 on average. Without memory it is best to grow wherever the loss is at least 1, as that of
    a stalling host always is: that spares the eighth of the others that begins below 1.5, so
    (0.8 - 7/8 * 0.7) / 2 = 0.09375. The first decision, and those after the seed is fossilized, leave no choice.
    """

    sizes = (1, 4, 2)
    """Features of base, slots and blueprints."""
    num_decisions, last_early, rent = 8, 3, 0.1
    best = 0.4
    DORMANT, GERMINATED, HOLDING, FOSSILIZED = range(4)

    def __init__(self, num_envs: int) -> None:
        self.num_envs, self.metadata = num_envs, {"autoreset_mode": AutoresetMode.SAME_STEP}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """New hosts, exactly half of which stall."""
        super().reset(seed=seed)
        return self._begin()

    def step(self, actions: np.ndarray) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Carry out the operations; all hosts live equally long."""
        check_legal(actions, self._masks)
        op = actions[:, OP]
        self._early[op == Op.GERMINATE] = self._decision <= self.last_early
        for name, stage in (
            (Op.GERMINATE, self.GERMINATED),
            (Op.ADVANCE, self.HOLDING),
            (Op.FOSSILIZE, self.FOSSILIZED),
        ):
            self._stage[op == name] = stage
        alive = (self._stage == self.GERMINATED) | (self._stage == self.HOLDING)
        pays = np.where(self._stalls & self._early, 1.0, -0.5)
        reward = pays * (op == Op.FOSSILIZE) - self.rent * alive
        self._decision += 1
        over = np.full(self.num_envs, self._decision == self.num_decisions)
        observation, info = self._begin() if over.all() else self._look()
        return observation, reward, over, np.zeros_like(over), info

    def _begin(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        self._decision, self._stage = 0, np.full(self.num_envs, self.DORMANT)
        self._stalls = self.np_random.permutation(self.num_envs) % 2 == 0
        self._early = np.zeros(self.num_envs, dtype=bool)
        self._first_loss = self.np_random.uniform(1, 5, self.num_envs)
        return self._look()

    def _look(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        loss = self._first_loss - np.where(self._stalls, 0.0, 0.5 * self._decision)
        stages = np.eye(4)[self._stage]
        op = np.zeros((self.num_envs, len(Op)), dtype=bool)
        op[:, Op.WAIT] = True
        op[:, Op.GERMINATE] = (self._stage == self.DORMANT) & (self._decision > 0)
        op[:, Op.ADVANCE] = stages[:, self.GERMINATED]
        op[:, Op.FOSSILIZE] = stages[:, self.HOLDING]
        slot = np.ones((self.num_envs, len(Op), 1), dtype=bool)
        self._masks = Masks(op=op, slot=slot, blueprint=np.ones((self.num_envs, 1, 2), dtype=bool))
        observation = {
            "base": loss[:, None].astype(np.float32),
            "slots": stages[:, None].astype(np.float32),
            "blueprints": np.tile(np.eye(2, dtype=np.float32), (self.num_envs, 1, 1, 1)),
        }
        return observation, {"masks": self._masks}


def check_legal(actions: np.ndarray, masks: Masks) -> None:
    """Raise if an action is illegal, or sets a head that does not matter."""
    n, op, slot, blueprint = np.arange(len(actions)), actions[:, OP], actions[:, SLOT], actions[:, BLUEPRINT]
    legal = masks.op[n, op] & (masks.slot[n, op, slot] | ~HEAD_USED[op, SLOT])
    legal &= masks.blueprint[n, slot, blueprint] | ~HEAD_USED[op, BLUEPRINT]
    legal &= ((actions == 0) | HEAD_USED[op]).all(-1)
    if not legal.all():
        raise ValueError(f"illegal action {actions[~legal][0]} of environment {np.flatnonzero(~legal)[0]}")


def greedy_returns(agent: PPOAgent, envs: VectorEnv, view: View | None = None, *, forget: bool = False) -> np.ndarray:
    """What the likeliest actions earn in the first episode of each environment (N,); `forget` empties the memory."""
    view = view or BoxView(envs.single_observation_space, envs.single_action_space)
    observation, info = envs.reset(seed=12345)
    state, total, alive = agent.initial_state(envs.num_envs), np.zeros(envs.num_envs), np.ones(envs.num_envs, bool)
    while alive.any():
        if forget:
            state = agent.initial_state(envs.num_envs)
        seen, mask = view.observation(observation, total), view.mask(info, envs.num_envs)
        decision = agent.act(seen, mask, state, greedy=True)
        observation, reward, terminated, truncated, info = envs.step(view.action(decision.action))
        total += reward * alive
        alive &= ~(terminated | truncated)
        state = decision.state
    return total
