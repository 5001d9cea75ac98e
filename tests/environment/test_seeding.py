"""Rng seeds: a pure function of their arguments, and different for different ones."""

from hypothesis import given
from hypothesis import strategies as st

from simic.environment.seeding import host_rng_seed, task_rng_seed

small = st.integers(0, 1000)


@given(small, small, small)
def test_rng_seeds_are_repeatable_and_fit_into_63_bits(rng_seed, episode, env):
    seed = host_rng_seed(rng_seed, episode, env)
    assert seed == host_rng_seed(rng_seed, episode, env)
    assert 0 <= seed < 2**63


def test_no_two_hosts_or_tasks_share_one():
    hosts = {host_rng_seed(run, episode, env) for run in range(4) for episode in range(8) for env in range(32)}
    tasks = {task_rng_seed(run, task) for run in range(4) for task in range(256)}
    assert len(hosts) == len(tasks) == 4 * 256
    assert not hosts & tasks
