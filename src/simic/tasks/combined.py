"""Family combined: tasks of the other families, for controllers that are to work on all of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from simic.tasks.bottlenecks import BOTTLENECKS
from simic.tasks.broad import BROAD
from simic.tasks.families import CNN, MLP, SEQUENCES, SUBSETS, TaskFamily
from simic.tasks.registry import SPLITS, Split
from simic.tasks.task import Task


@dataclass(frozen=True, kw_only=True)
class CombinedFamily:
    """Draws a family by its share, then one of its tasks."""

    families: tuple[TaskFamily, ...]
    shares: tuple[float, ...]

    def draw(self, rng_seed: int, split: Split) -> Task:
        """The task that one of the families draws with this rng seed."""
        # The last number keeps this stream apart from those of the families.
        rng = np.random.default_rng((SPLITS.index(split), rng_seed, len(self.families)))
        return self.families[rng.choice(len(self.families), p=self.shares)].draw(rng_seed, split)


# More than half of the tasks are small MLPs, which are cheap to train.
COMBINED = CombinedFamily(
    families=(MLP, CNN, SUBSETS, SEQUENCES, BROAD, BOTTLENECKS), shares=(0.4, 0.15, 0.1, 0.1, 0.1, 0.15)
)
