# %% [markdown]
# # Read a run with pandas and DuckDB
#
# A run writes events, one JSON object per line. `simic.read_tables` gives them as pandas frames; `simic query`
# asks them with SQL. We make a small run, and answer three questions.

# %%
from dataclasses import replace

import simic

config = replace(simic.preset("quick"), updates=4, num_groups=2, group_size=8, workers=0, compare=0, checkpoint_every=4)
result = simic.train(config, out="runs/small")
tables = simic.read_tables("runs/small")
{name: len(frame) for name, frame in tables.items() if len(frame)}

# %% [markdown]
# ## How did the score develop?

# %%
tables["updates"][["update", "score", "gain", "entropy"]].round(3)

# %% [markdown]
# ## What became of the seeds of each blueprint?
#
# `lifecycle` has one row per change of stage.

# %%
changes = tables["lifecycle"]
fates = changes[changes["new_stage"].isin(["fossilized", "pruned"])]
fates.groupby(["blueprint", "new_stage"]).size().unstack(fill_value=0)

# %% [markdown]
# ## Where does the time go?

# %%
timings = tables["timings"].groupby("phase")["seconds"].sum().sort_values()
timings.plot.barh(color="#2f9e62").set_xlabel("seconds")

# %% [markdown]
# ## The same with SQL
#
# DuckDB reads pandas frames by the name of the variable. On the command line it is `simic query runs/small "select
# ..."`, which also reads many runs at once: [Queries](../query.md).

# %%
import duckdb

decisions = tables["decisions"]
duckdb.sql("""
    select split_part(action, ' ', 1) as operation, count(*) as times, round(avg(reward), 3) as mean_reward
    from decisions group by operation order by times desc
""").df()
