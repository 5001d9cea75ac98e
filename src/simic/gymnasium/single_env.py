"""GrowthEnv: one host training as a plain Gymnasium environment.

Importing this module registers the id "simic/Growth-v0" with Gymnasium: `gymnasium.make` then builds a GrowthEnv,
`gymnasium.make_vec(..., vectorization_mode="vector_entry_point")` a GrowthVectorEnv. Without an import of your own,
`gymnasium.make("simic.gymnasium.single_env:simic/Growth-v0")` does both.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode

from simic.gymnasium.vector_env import METADATA, GrowthVectorEnv, take
from simic.tasks.registry import DEFAULT_TASK
from simic.tasks.task import Task

ENV_ID = "simic/Growth-v0"


class GrowthEnv(gymnasium.Env[Any, np.ndarray]):
    """A GrowthVectorEnv of one environment without its leading axis: same spaces, seeds, info and keyword arguments."""

    metadata: dict[str, Any] = METADATA

    def __init__(self, task: Task | str = DEFAULT_TASK, **settings: Any) -> None:
        self.vector_env = GrowthVectorEnv(task, 1, autoreset_mode=AutoresetMode.DISABLED, **settings)
        self.render_mode = self.vector_env.render_mode
        self.action_space = self.vector_env.single_action_space
        self.observation_space = self.vector_env.single_observation_space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin the next episode, or with a seed the first one of that seed."""
        super().reset(seed=seed)
        observation, info = self.vector_env.reset(seed=seed, options=options)
        return take(observation, 0), take(info, 0)

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """One decision, a row of head indices (H,). An illegal one counts as wait."""
        observation, reward, ended, truncated, info = self.vector_env.step(np.asarray(action)[None])
        return take(observation, 0), float(reward[0]), bool(ended[0]), bool(truncated[0]), take(info, 0)

    def action_masks(self) -> np.ndarray:
        """The flat mask, as sb3-contrib asks for it (sum of head sizes,)."""
        return self.vector_env.action_masks()[0]

    def render(self) -> Any:
        """The growth table, if render_mode is "ansi"."""
        tables = self.vector_env.render()
        return None if tables is None else tables[0]

    def close(self) -> None:
        """Nothing is open; may be called any number of times."""
        self.vector_env.close()


def register() -> None:
    """Make the id known to Gymnasium, once."""
    if ENV_ID not in gymnasium.registry:
        gymnasium.register(
            ENV_ID,
            entry_point="simic.gymnasium.single_env:GrowthEnv",
            vector_entry_point="simic.gymnasium.vector_env:GrowthVectorEnv",
        )


register()
