"""TrainingRanges: how hosts of a drawn task are trained: how long, with which optimizer, batches, initial weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np
from torch import nn

from simic.tasks.hosts import scaled_host
from simic.tasks.problems import Traits
from simic.tasks.task import Length, Optimizer, Task

SGD_FACTOR = 10.0
"""Learning rate of SGD relative to that of AdamW."""
Ending = Literal["planned", "untold", "open", "cut"]
"""What is known about the end of training: controllers are told when; only the learning rate is annealed towards it;
nothing, so the learning rate is constant; or training is planned for twice as long and stopped without notice."""


@dataclass(frozen=True, kw_only=True)
class TrainingRanges:
    """How the hosts of a task are trained, each field drawn independently and uniformly."""

    host_epochs: tuple[int, ...]
    endings: tuple[Ending, ...] = ("planned", "untold", "open", "cut")
    optimizers: tuple[Optimizer, ...] = ("adamw", "adamw", "adamw", "sgd")
    batch_factors: tuple[float, ...] = (0.5, 1.0, 2.0)
    """Factors on the batch size."""
    weight_scales: tuple[float, ...] = (0.7, 1.0, 1.0, 1.5)
    """Factors on the initial weights."""

    def apply(self, task: Task, rng: np.random.Generator) -> Task:
        """The task with what was drawn, which its traits name."""
        host_epochs, ending = int(rng.choice(self.host_epochs)), self.endings[rng.integers(len(self.endings))]
        optimizer = self.optimizers[rng.integers(len(self.optimizers))]
        batch_size = max(1, round(task.batch_size * float(rng.choice(self.batch_factors))))
        scale = float(rng.choice(self.weight_scales))
        of_width = task.host_of_width
        drawn: Traits = {"host_epochs": host_epochs, "ending": ending, "optimizer": optimizer}
        return replace(
            task,
            make_host=partial(scaled_host, task.make_host, scale),
            host_of_width=None if of_width is None else partial(_scaled_of_width, of_width, scale),
            batch_size=batch_size,
            optimizer=optimizer,
            learning_rate=task.learning_rate * (SGD_FACTOR if optimizer == "sgd" else 1),
            length=Length(
                host_epochs=host_epochs,
                planned=2 * host_epochs if ending == "cut" else None,
                told=ending in ("planned", "cut"),
                anneal=ending != "open",
            ),
            traits=task.traits | drawn | {"batch_size": batch_size, "weight_scale": scale},
        )


def _scaled_of_width(
    of_width: Callable[[int], Callable[[], nn.Sequential]], scale: float, width: int
) -> Callable[[], nn.Sequential]:
    return partial(scaled_host, of_width(width), scale)
