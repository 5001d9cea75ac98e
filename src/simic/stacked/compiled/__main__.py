"""Compile the engine for this machine and keep it on disk: python -m simic.stacked.compiled

It happens by itself at the first use, in every process that finds nothing on disk. `make` does it once, beforehand.
"""

import torch

from simic.compiled.product import COLUMN_UNIT
from simic.policy.recurrence import Core
from simic.stacked.hosts import StackedHosts
from simic.tasks.hosts import plain_mlp_host
from simic.tasks.task import accuracy, mean_cross_entropy


def compile_engine() -> None:
    """Train and evaluate a tiny host, and differentiate a tiny LSTM, in each precision."""
    torch.set_num_threads(1)  # where the compiled LSTM runs
    for dtype in (torch.float32, torch.float64):
        x, y = torch.zeros(1, 4, 2, dtype=dtype), torch.zeros(1, 4, dtype=torch.long)
        hosts = StackedHosts(
            lambda dtype=dtype: plain_mlp_host(2, 2, 1, 2).to(dtype), ["stem"], example_input=x[0], rng_seeds=[0],
            loss=mean_cross_entropy, metric=accuracy,
        )  # fmt: skip
        hosts.train_step(x, y, torch.ones(1, dtype=dtype))
        hosts.evaluate(x, y)
        core = Core(2, COLUMN_UNIT).to(dtype)
        core(x[:, :1], torch.zeros(1, core.state_size, dtype=dtype))[0].sum().backward()


if __name__ == "__main__":
    compile_engine()
