"""Collector: runs an agent in a Gymnasium vector environment and returns rollouts.

Actions must be Discrete or MultiDiscrete. If `info["action_mask"]` exists, it holds the legal actions, one column per
choice of every head. For other environments, such as growth, pass a `View` that converts observations, masks and
actions.

Shapes: T steps, N environments, H heads, R rows and W choices of the action tree, S slots.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from torch import Tensor

from simic.gymnasium.flat_network import RecurrentActorCritic
from simic.policy.config import PolicyConfig
from simic.ppo.agent import PPOAgent
from simic.ppo.rollout import Rollout

MODES = (AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP)


class View(Protocol):
    """Converts between an environment and a policy."""

    def observation(self, observation: Any, reward: np.ndarray) -> dict[str, np.ndarray]:
        """Parts of the observation (N, ...) from the environment's observation and the last reward (N,)."""
        ...

    def mask(self, info: dict[str, Any], num_envs: int) -> np.ndarray:
        """Legal choices (N, R, W)."""
        ...

    def action(self, action: np.ndarray) -> np.ndarray:
        """The argument of `step`, from rows of head indices (N, H)."""
        ...

    def contribution(self, info: dict[str, Any]) -> np.ndarray | None:
        """Contributions of the seeds (N, S), if the environment measures them."""
        ...


class BoxView:
    """A vector observation and Discrete or MultiDiscrete actions."""

    def __init__(self, observation_space: spaces.Space, action_space: spaces.Space) -> None:
        """The spaces of a single environment."""
        if not isinstance(observation_space, spaces.Box):
            raise ValueError(
                f"observations must be a Box, got {observation_space}: wrap the environment to flatten them"
            )
        if isinstance(action_space, spaces.Discrete):
            if action_space.start != 0:
                raise ValueError(f"Discrete actions must start at 0, got {action_space}")
            self.head_sizes = [int(action_space.n)]
        elif isinstance(action_space, spaces.MultiDiscrete) and action_space.nvec.ndim == 1:
            self.head_sizes = action_space.nvec.tolist()
        else:
            raise ValueError(f"actions must be Discrete or MultiDiscrete, got {action_space}")
        self._discrete = isinstance(action_space, spaces.Discrete)
        self.observation_size = int(np.prod(observation_space.shape))
        self._all = np.arange(max(self.head_sizes)) < np.array(self.head_sizes)[:, None]  # (R, W)

    def observation(self, observation: Any, reward: np.ndarray) -> dict[str, np.ndarray]:
        """All features as the part `base`."""
        # A copy: environments may write the next observation into the same array.
        return {"base": np.array(observation, dtype=np.float32).reshape(len(observation), -1)}

    def mask(self, info: dict[str, Any], num_envs: int) -> np.ndarray:
        """All choices are legal unless `info` has an `action_mask`."""
        mask = np.repeat(self._all[None], num_envs, axis=0)
        flat = info.get("action_mask")
        if flat is None:
            return mask
        flat = np.stack(list(flat)).astype(bool)
        if flat.shape != (num_envs, sum(self.head_sizes)):
            raise ValueError(
                f"action_mask must have shape {(num_envs, sum(self.head_sizes))}, one column per choice of every "
                f"head, got {flat.shape}"
            )
        mask[mask] = flat.reshape(-1)
        return mask

    def action(self, action: np.ndarray) -> np.ndarray:
        """(N,) for Discrete, (N, H) for MultiDiscrete."""
        return action[:, 0] if self._discrete else action

    def contribution(self, info: dict[str, Any]) -> None:
        """None: there are no seeds."""


class Finished(NamedTuple):
    """A finished episode."""

    total_reward: float
    length: int


class Collector:
    """Collects `num_steps` decisions of every environment per rollout; episodes continue in the next rollout."""

    def __init__(
        self, envs: VectorEnv, agent: PPOAgent, num_steps: int, *, view: View | None = None, rng_seed: int = 0
    ) -> None:
        self.mode = envs.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP)
        if self.mode not in MODES:
            raise ValueError(
                f"the environments must reset automatically, in the same step or the next, got {self.mode}; pass "
                "autoreset_mode=AutoresetMode.SAME_STEP"
            )
        if num_steps < 1:
            raise ValueError(f"num_steps must be at least 1, got {num_steps}")
        self.envs, self.agent, self.num_steps = envs, agent, num_steps
        self.view: View = view or _box_view(envs, agent)
        n = envs.num_envs
        self.finished: deque[Finished] = deque(maxlen=100)
        """The latest finished episodes."""
        self._observation, self._info = envs.reset(seed=rng_seed)
        self._state, self._first = agent.initial_state(n), np.ones(n, dtype=bool)
        self._resets, self._reward = np.zeros(n, dtype=bool), np.zeros(n)
        self._total, self._length = np.zeros(n), np.zeros(n, dtype=np.int64)

    def collect(self) -> Rollout:
        """The next rollout."""
        agent, n = self.agent, self.envs.num_envs
        state_before = torch.where(torch.from_numpy(self._first).to(self._state.device).unsqueeze(1), 0.0, self._state)
        steps: list[dict[str, Any]] = []
        values: list[np.ndarray] = []
        for _ in range(self.num_steps):
            inputs = self.view.observation(self._observation, self._reward)
            mask = self.view.mask(self._info, n)
            # The action of an environment that only resets is ignored, and its mask may be empty.
            mask[self._resets, :, 0] = True
            if self._first.any():
                self._state[torch.from_numpy(self._first)] = 0.0
            chosen = agent.act(inputs, mask, self._state)
            values.append(chosen.value)
            observation, reward, terminated, truncated, info = self.envs.step(self.view.action(chosen.action))
            valid, ended = ~self._resets, (terminated | truncated) & ~self._resets
            step = {
                "observation": inputs,
                "mask": mask,
                "action": chosen.action,
                "reward": np.where(valid, reward, 0.0),
                "terminated": terminated & valid,
                "truncated": truncated & ~terminated & valid,
                "next_value": np.zeros(n, dtype=np.float32),
                "first": self._first,
                "valid": valid,
            }
            contribution = self.view.contribution(info)
            if contribution is not None:
                step["contribution"] = np.where(ended[:, None], np.nan, contribution)
            steps.append(step)
            self._count(step["reward"], valid, ended)
            self._state = chosen.state
            self._reward = step["reward"]
            if self.mode is AutoresetMode.SAME_STEP:
                self._reward = np.where(ended, 0.0, reward)
                if step["truncated"].any():
                    self._add_final_values(step, info, reward)
                self._first = ended
            else:
                self._first, self._resets = self._resets, ended
            self._observation, self._info = observation, info
        return self._assemble(steps, values, state_before)

    def _add_final_values(self, step: dict[str, Any], info: dict[str, Any], reward: np.ndarray) -> None:
        """Set `next_value` of truncated episodes from their final observations."""
        envs = np.flatnonzero(step["truncated"])
        inputs = self.view.observation(_stack([info["final_obs"][env] for env in envs]), reward[envs])
        step["next_value"][envs] = self.agent.value(inputs, self._state[torch.from_numpy(envs)])

    def _assemble(self, steps: list[dict[str, Any]], values: list[np.ndarray], state: Tensor) -> Rollout:
        last_value = self.agent.value(self.view.observation(self._observation, self._reward), self._state)
        following = np.stack([*values[1:], last_value])  # (T, N) values of the next step of each sequence
        stacked = {name: np.stack([step[name] for step in steps]) for name in steps[0] if name != "observation"}
        if self.mode is AutoresetMode.NEXT_STEP:
            # The reset step after an end still reads the final observation: its value is that of the final state.
            stacked["next_value"] = np.where(stacked["truncated"], following, 0.0)
        # The end of the rollout truncates unfinished episodes.
        open_end = ~(stacked["terminated"][-1] | stacked["truncated"][-1]) & stacked["valid"][-1]
        stacked["truncated"][-1] |= open_end
        stacked["next_value"][-1] = np.where(open_end, following[-1], stacked["next_value"][-1])
        parts = steps[0]["observation"]
        observation = {p: torch.from_numpy(np.stack([step["observation"][p] for step in steps])) for p in parts}
        tensors = {name: torch.from_numpy(array) for name, array in stacked.items()}
        for name in ("reward", "next_value", "contribution"):
            if name in tensors:
                tensors[name] = tensors[name].float()
        return Rollout(observation=observation, state=state.detach().cpu(), **tensors)

    def _count(self, reward: np.ndarray, valid: np.ndarray, ended: np.ndarray) -> None:
        self._total += reward
        self._length += valid
        for env in np.flatnonzero(ended):
            self.finished.append(Finished(float(self._total[env]), int(self._length[env])))
        self._total[ended], self._length[ended] = 0.0, 0


def _box_view(envs: VectorEnv, agent: PPOAgent) -> BoxView:
    """The default view; an agent made for other spaces is refused."""
    view = BoxView(envs.single_observation_space, envs.single_action_space)
    for what, made, shown in (
        ("observations", agent.plain.sizes, {"base": view.observation_size}),
        ("action heads", list(agent.plain.fixed_head_sizes.values()), view.head_sizes),
    ):
        if made != shown:
            raise ValueError(
                f"the agent was made for {what} of sizes {made}, the environments have {shown}; build it from "
                "make_network(envs), or pass the view it was made for"
            )
    return view


def make_network(envs: VectorEnv, config: PolicyConfig | None = None) -> RecurrentActorCritic:
    """An untrained network for the spaces of an environment."""
    view = BoxView(envs.single_observation_space, envs.single_action_space)
    return RecurrentActorCritic(view.observation_size, view.head_sizes, config)


def _stack(observations: list[Any]) -> Any:
    if isinstance(observations[0], dict):
        return {part: np.stack([own[part] for own in observations]) for part in observations[0]}
    return np.stack(observations)
