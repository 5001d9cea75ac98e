"""GrowthVectorEnv: N host trainings as a Gymnasium vector environment.

Shapes: N hosts, S slots, B blueprints, H heads of an action; a flat mask has one column per choice of every head.
The end of an episode, at its horizon or by the governor, is `terminated`, never `truncated`: the time left is part of
the observation, so there is no state to bootstrap from.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from simic.control.facts import Facts
from simic.control.governor import Verdict
from simic.control.legality import flat_mask, legal_masks, replace_illegal
from simic.control.observation import Observation, flatten, observe
from simic.environment.config import EpisodeConfig, GovernorConfig
from simic.environment.host_trainings import HostTrainings
from simic.environment.seeding import host_rng_seed
from simic.lifecycle.actions import HEAD_VALUES, HEADS
from simic.lifecycle.stages import LifecycleConfig, Stage
from simic.rewards.schemes import RewardConfig
from simic.tasks.registry import DEFAULT_TASK, make_task
from simic.tasks.task import Task

ObservationKind = Literal["dict", "flat"]
METADATA: dict[str, Any] = {"render_modes": ["ansi"], "render_fps": 1}
_MODES = (AutoresetMode.SAME_STEP, AutoresetMode.DISABLED)


class GrowthVectorEnv(VectorEnv[Any, np.ndarray, np.ndarray]):
    """N hosts that train side by side; one step is one decision of each and the host epoch that follows.

    Randomness derives from (rng_seed, episode index, environment index), so the hosts of an environment do not depend
    on num_envs. `reset(seed=...)` sets the rng_seed and starts at episode 0; without a seed, and after the end of an
    episode, an environment continues with its next episode.

    Keys of `info`, with Gymnasium's `_key` masks:
    - of the observed state: `action_mask` (N, sum of head sizes), its parts `op_mask` (N, ops), `slot_mask` (N, ops, S)
      and `blueprint_mask` (N, S, B), and `score` (N,) in points;
    - of the decision before it: `illegal` (N,), `verdict` (N,) of the governor, `reward_terms` {name: (N,)};
    - where an episode reached its horizon, unless `attribution` is False: `shapley` and `shapley_error` (N, S) and
      `interaction` (N, S, S) of all seeds, fossils and live ones (see `environment.attribution`);
    - where an episode ended: `final_obs` and `final_info` of its last state; everything else is of the next episode.

    Gaming is not detected here: it needs twins (see `rewards.gaming`), which only training plays.
    """

    metadata: dict[str, Any] = METADATA | {"autoreset_mode": AutoresetMode.SAME_STEP}

    def __init__(
        self,
        task: Task | str = DEFAULT_TASK,
        num_envs: int = 1,
        *,
        rng_seed: int = 0,
        episode: EpisodeConfig | None = None,
        lifecycle: LifecycleConfig | None = None,
        reward: RewardConfig | None = None,
        governor: GovernorConfig | None = None,
        attribution: bool = True,
        observation: ObservationKind = "dict",
        autoreset_mode: AutoresetMode = AutoresetMode.SAME_STEP,
        render_mode: str | None = None,
    ) -> None:
        _check_choice("observation", observation, ("dict", "flat"))
        _check_choice("render_mode", render_mode, (None, *self.metadata["render_modes"]))
        _check_choice("autoreset_mode", autoreset_mode, _MODES)
        if num_envs < 1:
            raise ValueError(f"num_envs must be at least 1, got {num_envs}")
        self.metadata = type(self).metadata | {"autoreset_mode": autoreset_mode}
        self.num_envs, self.render_mode, self.observation_kind = num_envs, render_mode, observation
        self._rng_seed, self._attribution = _checked_seed(rng_seed), attribution
        self._episode = np.full(num_envs, -1)  # index of the current episode of each environment
        self._ended = np.ones(num_envs, dtype=bool)
        self.trainings = HostTrainings(
            make_task(task) if isinstance(task, str) else task,
            [host_rng_seed(rng_seed, 0, env) for env in range(num_envs)],
            episode=episode,
            lifecycle=lifecycle,
            reward=reward or RewardConfig(),
            governor=governor,
        )
        self._update_facts(self.trainings.facts())
        self.single_action_space = spaces.MultiDiscrete(_head_sizes(self.facts))
        self.single_observation_space = _observation_space(observe(self.facts, self.masks), observation)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.observation_space = batch_space(self.single_observation_space, num_envs)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode in every environment, or where `options["reset_mask"]`, bool (N,), is True."""
        super().reset(seed=seed)
        which = self._reset_mask(options or {})
        if seed is not None:
            if not which.all():
                raise ValueError("a seed applies to all environments: leave out either seed or reset_mask")
            self._rng_seed = _checked_seed(seed)
            self._episode[:] = -1
        self._begin(which)
        return self._observation(), _with_masks(self._state_info(), which)

    def step(self, actions: np.ndarray) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """One decision of every host, rows of head indices (N, H). An illegal one counts as wait."""
        if self._ended.any():
            raise RuntimeError(f"environments {np.flatnonzero(self._ended).tolist()} are over: call reset() first")
        rows, illegal = replace_illegal(self._checked(actions), self.masks)
        outcome = self.trainings.step(rows, self.masks)
        assert outcome.reward is not None
        self._ended = outcome.ended.copy()
        self._update_facts(outcome.facts)
        decision = {"illegal": illegal, "verdict": outcome.verdict, "reward_terms": outcome.reward.terms}
        everyone = np.ones(self.num_envs, dtype=bool)
        info = _with_masks(decision, everyone)
        final = outcome.ended & (outcome.verdict == Verdict.OK)
        if self._attribution and final.any():
            shares = self.trainings.attribute(final)._asdict()
            decision |= shares
            info |= _with_masks(shares, final)
        if outcome.ended.any() and self.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP:
            info |= _with_masks(self._final_info(decision), outcome.ended)
            self._begin(outcome.ended)
        info |= _with_masks(self._state_info(), everyone)
        return self._observation(), outcome.reward.total, outcome.ended, np.zeros_like(illegal), info

    def action_masks(self) -> np.ndarray:
        """The flat mask of every environment, for sb3-contrib (N, sum of head sizes)."""
        return flat_mask(self.masks)

    def render(self) -> tuple[Any, ...] | None:
        """The growth table of every host, if render_mode is "ansi"."""
        if self.render_mode is None:
            return None
        return tuple(growth_table(self.facts, host) for host in range(self.num_envs))

    def _begin(self, which: np.ndarray) -> None:
        """Start the next episode of some environments (mask (N,))."""
        self._episode += which
        envs = np.flatnonzero(which)
        seeds = [host_rng_seed(self._rng_seed, int(self._episode[env]), int(env)) for env in envs]
        self._ended &= ~which
        self._update_facts(self.trainings.reset(envs, seeds))

    def _update_facts(self, facts: Facts) -> None:
        self.facts, self.masks = facts, legal_masks(facts)

    def _observation(self) -> Any:
        seen = observe(self.facts, self.masks)
        if self.observation_kind == "flat":
            return flatten(seen)
        return {"base": seen.base, "slots": seen.slots, "blueprints": self._for_all(seen.blueprints)}

    def _state_info(self) -> dict[str, Any]:
        return {
            "action_mask": flat_mask(self.masks),
            "op_mask": self.masks.op.copy(),
            "slot_mask": self.masks.slot.copy(),
            "blueprint_mask": self._for_all(self.masks.blueprint),
            "score": self.trainings.score(exported=self._ended),
        }

    def _final_info(self, decision: dict[str, Any]) -> dict[str, Any]:
        """The last observation and info of the episodes that ended."""
        batch, final_obs = self._observation(), np.full(self.num_envs, None, dtype=object)
        for env in np.flatnonzero(self._ended):
            final_obs[env] = take(batch, int(env))
        return {"final_obs": final_obs, "final_info": decision | self._state_info()}

    def _for_all(self, shared: np.ndarray) -> np.ndarray:
        return np.repeat(shared[None], self.num_envs, axis=0)

    def _checked(self, actions: np.ndarray) -> np.ndarray:
        actions, sizes = np.asarray(actions), _head_sizes(self.facts)
        if actions.shape != (self.num_envs, len(HEADS)) or not np.issubdtype(actions.dtype, np.integer):
            raise ValueError(
                f"actions must be integers of shape {(self.num_envs, len(HEADS))}, one row of head indices per "
                f"environment, got {actions.dtype} of {actions.shape}"
            )
        wrong = (actions < 0) | (actions >= sizes)
        if wrong.any():
            env, head = np.argwhere(wrong)[0].tolist()
            raise ValueError(
                f"head {HEADS[head]} must be in 0..{sizes[head] - 1}, got {actions[env, head]} in environment {env}"
            )
        return actions.astype(np.int64, copy=False)

    def _reset_mask(self, options: dict[str, Any]) -> np.ndarray:
        unknown = sorted(options.keys() - {"reset_mask"})
        if unknown:
            raise ValueError(f"the only option of reset is reset_mask, got {', '.join(unknown)}")
        mask = np.asarray(options.get("reset_mask", np.ones(self.num_envs, dtype=bool)))
        if mask.shape != (self.num_envs,) or mask.dtype != np.bool_ or not mask.any():
            raise ValueError(f"reset_mask must be bool of shape {(self.num_envs,)} and true somewhere, got {mask}")
        if (~mask & (self._episode < 0)).any():
            raise ValueError("the first reset must start an episode in every environment: leave out reset_mask")
        return mask


def growth_table(facts: Facts, host: int) -> str:
    """State of one host and its slots as a text table."""
    slots, seeds = facts.slots, facts.seed_parameters[host]
    rows = [("slot", "stage", "blueprint", "alpha", "contribution", "parameters")]
    for index, name in enumerate(facts.slot_names):
        at, stage = (host, index), str(Stage(slots.stage[host, index]))
        if slots.blueprint[at] < 0:
            rows.append((name, stage, "-", "-", "-", "-"))
            continue
        blueprint = facts.blueprint_names[slots.blueprint[at]]
        measured = "-" if np.isnan(slots.contribution[at]) else f"{slots.contribution[at]:+.3f}"
        if slots.contribution_age[at] and measured != "-":
            measured += f" ({slots.contribution_age[at]} ago)"
        rows.append((name, stage, blueprint, f"{slots.alpha[at]:.2f}", measured, f"{seeds[index]:,}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    own = facts.host_parameters[host]
    title = (
        f"decision {facts.decision[host]} of {facts.horizon[host]}: validation loss {facts.val_loss[host, -1]:.4f}, "
        f"accuracy {facts.val_accuracy[host, -1]:.4f}, {own + seeds.sum():,} parameters ({own:,} of the host)"
    )
    return "\n".join([title, *lines])


def take(batch: Any, env: int) -> Any:
    """The part of one environment in arrays (N, ...) or dicts of them, without Gymnasium's `_key` masks."""
    if isinstance(batch, dict):
        return {key: take(value, env) for key, value in batch.items() if not key.startswith("_")}
    return batch[env]


def _with_masks(info: dict[str, Any], which: np.ndarray) -> dict[str, Any]:
    """Add Gymnasium's `_key` masks: the environments in which each key is valid."""
    masked: dict[str, Any] = {}
    for key, value in info.items():
        masked[key] = _with_masks(value, which) if isinstance(value, dict) else value
        masked[f"_{key}"] = which.copy()
    return masked


def _head_sizes(facts: Facts) -> list[int]:
    sizes = {head: len(values) for head, values in HEAD_VALUES.items()}
    sizes |= {"slot": len(facts.slot_names), "blueprint": len(facts.blueprint_names)}
    return [sizes[head] for head in HEADS]


def _observation_space(seen: Observation, kind: ObservationKind) -> spaces.Space:
    if kind == "flat":
        return _features(flatten(seen).shape[1:])
    shapes = {"base": seen.base.shape[1:], "slots": seen.slots.shape[1:], "blueprints": seen.blueprints.shape}
    return spaces.Dict({name: _features(shape) for name, shape in shapes.items()})


def _features(shape: tuple[int, ...]) -> spaces.Box:
    return spaces.Box(-1.0, 1.0, shape, np.float32)  # what observation.py promises of every feature


def _checked_seed(rng_seed: int) -> int:
    if rng_seed < 0:
        raise ValueError(f"rng_seed must not be negative, got {rng_seed}")
    return int(rng_seed)


def _check_choice(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(str, allowed))}, got {value}")
