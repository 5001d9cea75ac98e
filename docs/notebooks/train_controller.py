# %% [markdown]
# # Train a controller, and look at what it learned
#
# A recurrent policy is trained by PPO over many small host trainings. This run is far too short for a good
# controller (the one that ships with simic saw 28,160 host trainings); it shows the way, and how to read what
# comes out.

# %%
from dataclasses import replace

import matplotlib.pyplot as plt

import simic

config = replace(simic.preset("quick"), updates=6, num_groups=2, group_size=16, workers=0, compare=0)
result = simic.train(config)
print(result)

# %% [markdown]
# Every update has some eighty metrics; [Metrics](../metrics.md) explains each. The score is quality in points
# minus rent for parameters, and the gain is the score minus that of a twin that never grows.

# %%
updates = [row["update"] for row in result.history]
for name in ("score", "gain"):
    plt.plot(updates, [row[name] for row in result.history], marker="o", label=name)
plt.xlabel("update")
plt.ylabel("points")
plt.legend(frameon=False)

# %% [markdown]
# ## What does it do?
#
# Let it tend one host, and look at each decision. Beside it: the controller that ships with simic, on the same
# host.

# %%
for name, controller in (("this run", result.controller), ("pretrained", "pretrained")):
    grown = simic.grow("digits-mlp", controller, host_epochs=16)
    print(f"{name}: {grown.parameters} parameters, test accuracy {grown.test_accuracy:.3f}")
    for decision in grown.decisions:
        if decision.action.op != "wait":
            print(f"  host epoch {decision.host_epoch:2}: {decision.action}")

# %% [markdown]
# ## How often each operation?
#
# Played on a few hosts of tasks that were not used in training. Few hosts give wide intervals: the table says so.

# %%
comparison = simic.evaluate(
    {"this run": result, "pretrained": "pretrained", "heuristic": "heuristic", "wait": "wait"},
    "mlp:validation",
    num_tasks=3,
    rng_seeds=4,
    workers=0,
)
print(comparison.table())

# %% [markdown]
# A difference whose interval contains 0 is not shown by these data. For a claim, take dozens of tasks, several
# trained policies and the baselines of [Train and study controllers](../training.md#compare-controllers).

# %%
for other in ("pretrained", "heuristic", "wait"):
    score = comparison.paired("this run", other)["score"]
    print(f"this run - {other:10} {score['mean']:+6.2f} ({score['low']:+.2f}, {score['high']:+.2f}) points")
