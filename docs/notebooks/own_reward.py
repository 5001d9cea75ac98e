# %% [markdown]
# # A reward of your own
#
# A reward is a sum of terms with weights. We write a term that charges for networks beyond a size, put it into a
# scheme, train with it and without it on the same hosts, and compare.

# %%
from dataclasses import replace

import numpy as np

import simic


@simic.reward_term("oversize", bound=5.0)
def oversize(transition, config):
    """A point for every doubling beyond twice the host, charged when it happens."""

    def doublings(parameters):
        return np.maximum(np.log2(parameters / (2 * transition.host_parameters)), 0.0)

    return doublings(transition.parameters_before) - doublings(transition.parameters_after)


@simic.reward("small_networks")
def small_networks():
    return {"score": 1.0, "oversize": 4.0}


# %% [markdown]
# A term gets a `Transition`: arrays over hosts of what was before and after a decision. It returns points per
# host, clamped to its bound. Written as a *difference* of a quantity before and after, what is charged for growing
# is paid back for pruning, so that no cycle of actions earns anything.
#
# Check it by hand before you train: with 100 parameters in the host, growing from 150 to 400 crosses one doubling.

# %%
from types import SimpleNamespace

case = SimpleNamespace(
    host_parameters=np.array([100.0]), parameters_before=np.array([150.0]), parameters_after=np.array([400.0])
)
oversize(case, simic.RewardConfig())

# %% [markdown]
# ## Train with it
#
# In a module of your own this is `simic train --plugin my_rewards --reward score,small_networks`. Here, from
# Python, with few updates.

# %%
base = replace(simic.preset("quick"), updates=5, num_groups=2, group_size=16, workers=0, compare=0)
results = {
    scheme: simic.train(replace(base, reward=simic.RewardConfig(scheme=scheme)))
    for scheme in ("score", "small_networks")
}
comparison = simic.evaluate(results, "mlp:validation", num_tasks=3, rng_seeds=4, workers=0)
print(comparison.table())

# %% [markdown]
# The comparison says what the term did to size and to quality, host by host:

# %%
import pandas as pd

differences = comparison.paired("small_networks", "score")
pd.DataFrame(differences).T[["mean", "low", "high"]].drop("flops").round(2)

# %% [markdown]
# Five updates and twelve hosts are few: this is a first tendency, no finding. Whether an interval contains 0 is what
# counts, not the sign of the mean. A reward that you keep should also be tried against gaming: `gaming` in
# [Metrics](../metrics.md).
