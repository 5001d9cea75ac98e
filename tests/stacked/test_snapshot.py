"""Snapshots restore the hosts that are asked for and nothing else, in flat memory."""

import gc
from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from simic.lifecycle.actions import Action
from simic.lifecycle.stages import Stage
from simic.stacked.hosts import StackedHosts
from simic.stacked.seed_groups import GATE
from simic.stacked.snapshot import Snapshot

SLOTS = ("stem", "block")


def host() -> nn.Sequential:
    stem = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.ReLU())
    block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU())
    return nn.Sequential(OrderedDict(stem=stem, block=block, head=nn.Linear(4, 2)))


def accuracy(logits, targets):
    return (logits.argmax(-1) == targets).float().mean()


X, Y = torch.randn(4, 8, 3, generator=torch.Generator().manual_seed(0)), (torch.arange(8) % 2).expand(4, 8)


def new_hosts() -> StackedHosts:
    return StackedHosts(host, SLOTS, example_input=X[0], rng_seeds=range(4), loss=cross_entropy, metric=accuracy)


def germinate(hosts: StackedHosts, slot: str, blueprint: str = "mlp_small", style: str = "linear-add") -> None:
    row = Action("germinate", slot, blueprint, style).encode(SLOTS, hosts.blueprint_names)
    hosts.execute(np.stack([row] * hosts.num_hosts))
    hosts.tick()


def train(hosts: StackedHosts, steps: int = 3) -> None:
    for _ in range(steps):
        hosts.train_step(X, Y, torch.full((4,), 0.05))


def fossilize(hosts: StackedHosts, slot: int) -> None:
    hosts.slot_state.stage[:, slot] = Stage.FOSSILIZED
    hosts.tick()


def weights(hosts: StackedHosts, host: int) -> dict:
    """Every number that belongs to a host."""
    kept = (hosts.hosts.rows, *hosts.hosts.optimizer_state.tensors(), *hosts.hosts.statistics.values())
    found: dict = {"host": [t[host].clone() for t in kept]}
    for key, group in hosts.groups.items():
        for row in np.flatnonzero(group.hosts == host):
            own = group.parameters
            found[key] = [t[row].clone() for t in (own.rows, *own.optimizer_state.tensors())]
    return found


def assert_same(one: dict, other: dict) -> None:
    assert one.keys() == other.keys()
    for key, tensors in one.items():
        for a, b in zip(tensors, other[key], strict=True):
            assert torch.equal(a, b), key


def grown_hosts() -> StackedHosts:
    """A gated fossil in the stem and a live seed in the block of every host, all of them trained."""
    hosts = new_hosts()
    germinate(hosts, "stem", style="gated")
    train(hosts)
    fossilize(hosts, 0)
    germinate(hosts, "block", "norm")
    train(hosts)
    return hosts


WHICH = np.array([False, True, False, True])


def test_a_broken_host_returns_to_its_last_good_weights_without_live_seeds():
    hosts = grown_hosts()
    snapshot = Snapshot(hosts)
    good = [weights(hosts, n) for n in range(4)]
    train(hosts)
    for group in hosts.groups.values():
        group.parameters.rows[WHICH] = torch.nan
    hosts.hosts.rows[WHICH] = torch.nan
    train(hosts, 1)
    now = [weights(hosts, n) for n in range(4)]
    snapshot.restore(hosts, WHICH)
    for n in (0, 2):
        assert_same(weights(hosts, n), now[n])
        assert hosts.slot_state.stage[n].tolist() == [Stage.FOSSILIZED, Stage.BLENDING]
    for n in (1, 3):
        assert_same(weights(hosts, n), {key: good[n][key] for key in ("host", (0, "mlp_small"), (0, GATE))})
        assert hosts.slot_state.stage[n].tolist() == [Stage.FOSSILIZED, Stage.PRUNED]
        assert hosts.seed_parameters()[n, 1] == 0
    assert hosts.slot_state.alpha[WHICH, 1].tolist() == [0, 0]
    assert torch.isfinite(hosts.evaluate(X, Y)[0]).all()
    hosts.tick()
    train(hosts)
    assert torch.isfinite(hosts.hosts.rows).all()


def test_a_snapshot_is_renewed_only_where_asked():
    hosts = grown_hosts()
    snapshot = Snapshot(hosts)
    old = [weights(hosts, n) for n in range(4)]
    train(hosts)
    snapshot.save(hosts, WHICH)
    new = [weights(hosts, n) for n in range(4)]
    train(hosts)
    snapshot.restore(hosts, np.ones(4, dtype=bool))
    for n in range(4):
        expected = new[n] if WHICH[n] else old[n]
        assert_same(weights(hosts, n), {key: expected[key] for key in ("host", (0, "mlp_small"), (0, GATE))})


def test_a_seed_fossilised_after_the_snapshot_returns_to_what_it_was_then():
    hosts = new_hosts()
    germinate(hosts, "stem")
    train(hosts)
    snapshot = Snapshot(hosts)
    good = [weights(hosts, n) for n in range(4)]
    fossilize(hosts, 0)
    train(hosts)
    snapshot.restore(hosts, WHICH)
    assert_same(weights(hosts, 1), good[1])
    assert (hosts.slot_state.stage[:, 0] == Stage.FOSSILIZED).all()


def test_a_fossil_younger_than_the_snapshot_becomes_an_identity():
    hosts = new_hosts()
    snapshot = Snapshot(hosts)
    expected, _ = hosts.evaluate(X, Y)
    germinate(hosts, "stem", style="gated")
    fossilize(hosts, 0)
    train(hosts)
    assert not torch.equal(hosts.evaluate(X, Y)[0], expected)
    snapshot.restore(hosts, np.ones(4, dtype=bool))
    assert torch.equal(hosts.evaluate(X, Y)[0], expected)


def test_what_is_known_of_a_seed_goes_with_its_host():
    hosts = grown_hosts()
    snapshot = Snapshot(hosts)
    hosts.reset(np.flatnonzero(WHICH), np.array([8, 9]))
    snapshot.save(hosts, WHICH)
    assert {key: rows.hosts.tolist() for key, rows in snapshot._seeds.items()} == {key: [0, 2] for key in hosts.groups}
    hosts.reset(np.flatnonzero(~WHICH), np.array([10, 11]))
    snapshot.save(hosts, ~WHICH)
    assert not snapshot._seeds


def bytes_alive() -> int:
    gc.collect()
    storages = [thing.untyped_storage() for thing in gc.get_objects() if type(thing) is torch.Tensor]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.parametrize("episodes", [30, pytest.param(1000, marks=pytest.mark.slow)])
def test_memory_is_flat_over_many_episodes(episodes):
    hosts, everyone = new_hosts(), np.ones(4, dtype=bool)
    snapshot, rng = Snapshot(hosts), np.random.default_rng(0)
    start, addresses = bytes_alive(), [tensor.data_ptr() for tensor in snapshot._hosts]
    most = []
    for episode in range(0, episodes, 4):
        germinate(
            hosts, SLOTS[episode // 4 % 2], rng.choice(hosts.blueprint_names), ("linear-add", "gated")[episode // 8 % 2]
        )
        snapshot.save(hosts, everyone)
        fossilize(hosts, episode // 4 % 2)
        snapshot.save(hosts, rng.random(4) < 0.5)
        snapshot.restore(hosts, rng.random(4) < 0.5)
        if episode % (episodes // 10) == 0:
            most.append(bytes_alive())
        hosts.reset(np.arange(4), rng.integers(0, 1000, 4))
        snapshot.save(hosts, everyone)
    assert bytes_alive() == start
    assert max(most) < 10 * start
    assert [tensor.data_ptr() for tensor in snapshot._hosts] == addresses
