"""The governor leaves ordinary learning alone, catches what breaks where it breaks, and restores nothing else."""

import gc
from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from simic.control.governor import Governor, Verdict
from simic.environment.config import GovernorConfig
from simic.lifecycle.actions import Action
from simic.lifecycle.stages import Stage
from simic.stacked.hosts import StackedHosts
from simic.stacked.snapshot import Snapshot

DECISIONS = 40
SLOTS = ("stem", "block")


def learning_curves(num_hosts: int, rng_seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Validation and training losses (T, N) of hosts that learn, and their random-guess loss (N,)."""
    rng = np.random.default_rng(rng_seed)
    guess = rng.uniform(0.7, 5.0, num_hosts)
    speed, floor = rng.uniform(1, 20, num_hosts), rng.uniform(0.02, 0.9, num_hosts)
    start, noise = rng.uniform(0.9, 1.2, num_hosts), rng.uniform(0, 0.15, num_hosts)
    time = np.arange(DECISIONS)[:, None]
    curve = guess * (floor + (start - floor) * np.exp(-time / speed))
    spikes = np.where(rng.random(curve.shape) < 0.1, 1.5, 1.0)
    val = curve * spikes * np.exp(noise * rng.normal(size=curve.shape))
    train = (curve - 0.5 * guess * floor * time / DECISIONS) * spikes * np.exp(noise * rng.normal(size=curve.shape))
    # Half of them overfit: validation climbs by up to 40 % per decision from somewhere on.
    onset, growth = rng.integers(5, 2 * DECISIONS, num_hosts), rng.uniform(1.05, 1.4, num_hosts)
    return val * growth ** np.clip(time - onset, 0, 8), train, guess


def judge_all(governor: Governor, val: np.ndarray, train: np.ndarray, guess: np.ndarray) -> np.ndarray:
    return np.stack([governor.judge(v, t, guess) for v, t in zip(val, train, strict=True)])


def test_ordinary_learning_is_left_alone():
    verdicts = judge_all(Governor(5000), *learning_curves(5000))
    assert (verdicts == Verdict.OK).all(), np.argwhere(verdicts)[:5]


def not_finite(losses, since, guess):
    losses[since] = np.nan


def infinite(losses, since, guess):
    losses[since] = np.inf


def jump(losses, since, guess):
    losses[since:] = 10 * np.maximum(losses[since - 1], 0.2 * guess)


def doubling(losses, since, guess):
    losses[since:] = losses[since - 1] * 2.0 ** np.arange(1, DECISIONS - since + 1)[:, None]


def growth(losses, since, guess):
    losses[since:] = losses[since - 1] * 1.6 ** np.arange(1, DECISIONS - since + 1)[:, None]


def back_to_guessing(losses, since, guess):
    losses[since:] = guess * np.array([0.97, 1.0, 1.03])[np.arange(DECISIONS - since) % 3, None]


@pytest.mark.parametrize(
    ("plant", "expected", "decisions"),
    [
        (not_finite, {Verdict.NOT_FINITE}, 1),
        (infinite, {Verdict.NOT_FINITE}, 1),
        (jump, {Verdict.DIVERGED, Verdict.COLLAPSED}, 2),
        (doubling, {Verdict.DIVERGED, Verdict.COLLAPSED}, 3),
        (growth, {Verdict.DIVERGED, Verdict.COLLAPSED}, 3),
        (back_to_guessing, {Verdict.COLLAPSED}, 2),
    ],
)
def test_what_is_planted_is_caught_there_once_and_soon(plant, expected, decisions):
    val, train, guess = learning_curves(1000)
    rng, time = np.random.default_rng(1), np.arange(DECISIONS)[:, None]
    level = guess * (0.1 + 0.9 * np.exp(-time / 3))
    val[:, :500] = (level * np.exp(0.05 * rng.normal(size=level.shape)))[:, :500]
    train[:, :500] = (level * np.exp(0.05 * rng.normal(size=level.shape)))[:, :500]
    for losses in (val, train):
        planted = losses[:, :500]
        plant(planted, 20, guess[:500])
    verdicts = judge_all(Governor(1000), val, train, guess)
    assert (verdicts[:, 500:] == Verdict.OK).all()
    assert (np.count_nonzero(verdicts[:, :500], axis=0) == 1).all()
    assert set(verdicts[:, :500].sum(0).tolist()) <= expected
    assert set(verdicts.argmax(0)[:500].tolist()) <= set(range(20, 20 + decisions))


def lives(*values: float) -> np.ndarray:
    """The losses (T, 1) of one host whose task has the random-guess loss 1."""
    return np.array(values)[:, None]


@pytest.mark.parametrize(
    ("val", "train", "expected"),
    [
        ((1.0,) * 10, (1.0,) * 10, {}),  # never learned anything: nothing to fall back from
        ((1.9,) * 10, (1.9,) * 10, {}),  # a bad start is no divergence
        ((2.1, 2.1), (2.1, 2.1), {1: "diverged"}),  # twice as bad as guessing is one
        ((0.3,) * 5 + (0.95, 0.95), (0.3,) * 5 + (0.95, 0.95), {6: "collapsed"}),
        ((0.3,) * 5 + (0.95, 0.3, 0.95), (0.3,) * 5 + (0.95, 0.3, 0.95), {}),  # a blip, twice
        ((0.3,) * 5 + (0.95, 0.95), (0.3,) * 5 + (0.2, 0.1), {}),  # overfitting
        ((0.3,) * 5 + (0.3, 0.3), (0.3,) * 5 + (3.0, 3.0), {}),  # it trained badly and came out well
        ((0.3,) * 5 + (0.59, 0.59), (0.3,) * 5 + (0.59, 0.59), {}),  # below twice the median
        ((0.3,) * 5 + (0.61, 0.61), (0.3,) * 5 + (0.61, 0.61), {6: "diverged"}),  # above it
        ((0.3,) * 5 + (0.61, 3.0), (0.3,) * 5 + (0.61, 3.0), {6: "diverged"}),  # far beyond guessing
        ((0.01,) * 5 + (0.1, 0.1), (0.01,) * 5 + (0.1, 0.1), {}),  # tenfold, and still next to nothing
        ((0.3,) * 2 + (np.nan, 0.3, np.nan), (0.3,) * 5, {2: "not_finite"}),
        ((0.3,) * 5, (0.3,) * 2 + (np.inf,) * 3, {2: "not_finite"}),
    ],
)
def test_verdicts_by_hand(val, train, expected):
    verdicts = judge_all(Governor(1), lives(*val), lives(*train), np.ones(1))[:, 0]
    assert {int(t): str(Verdict(verdicts[t])) for t in np.flatnonzero(verdicts)} == expected


def test_a_noisy_past_buys_more_room():
    # Median 0.3; deviations 0.15, 0, 0.15, 0.15, 0: their median 0.15, five of them 0.75, so the limit is 1.05.
    past = (0.15, 0.3, 0.45, 0.45, 0.3)
    config = GovernorConfig(collapsed_share=1.0, patience=1)
    for value, verdict in ((0.99, Verdict.OK), (1.06, Verdict.DIVERGED)):
        governor, losses = Governor(1, config), lives(*past, value)
        verdicts = judge_all(governor, losses, losses, np.full(1, 1.2))
        assert verdicts[-1] == verdict


def test_what_is_under_suspicion_does_not_become_the_norm():
    losses = lives(*(0.3,) * 5, *(0.7,) * 5)
    verdicts = judge_all(Governor(1, GovernorConfig(patience=5)), losses, losses, np.ones(1))[:, 0]
    assert np.flatnonzero(verdicts).tolist() == [9]


def test_a_suspect_is_not_trusted_and_a_new_episode_forgets():
    governor, guess = Governor(3), np.ones(3)
    for _ in range(5):
        governor.judge(np.full(3, 0.3), np.full(3, 0.3), guess)
    worse = np.array([0.3, 1.0, 1.0])
    assert not governor.judge(worse, worse, guess).any()
    assert governor.trusted.tolist() == [True, False, False]
    governor.reset(np.array([2]))
    assert governor.trusted.tolist() == [True, False, True]
    assert governor.judge(worse, worse, guess).tolist() == [0, Verdict.COLLAPSED, 0]
    assert not governor.judge(worse, worse, guess).any(), "reported once"
    assert governor.trusted.tolist() == [True, False, True]


def test_a_saved_governor_goes_on_as_if_nothing_had_happened():
    val, train, guess = learning_curves(50)
    back_to_guessing(val[:, :9], 21, guess[:9])
    back_to_guessing(train[:, :9], 21, guess[:9])
    whole, first, second = Governor(50), Governor(50), Governor(50)
    expected = judge_all(whole, val, train, guess)
    judge_all(first, val[:22], train[:22], guess)
    state = first.state_dict()
    first.reset(np.arange(50))  # what was saved is a copy
    second.load_state_dict(state)
    assert np.array_equal(judge_all(second, val[22:], train[22:], guess), expected[22:])
    assert expected[22:].any()
    with pytest.raises(ValueError, match="same num_hosts"):
        Governor(49).load_state_dict(first.state_dict())


@pytest.mark.parametrize(
    ("field", "value"),
    [("window", 2), ("patience", 0), ("deviations", 0.0), ("absolute_rise", -1.0), ("learned_share", 0.95)],
)
def test_a_config_without_sense_is_refused(field, value):
    with pytest.raises(ValueError, match=field):
        GovernorConfig(**{field: value})


def test_losses_of_other_hosts_are_refused():
    with pytest.raises(ValueError, match="each of 2 hosts"):
        Governor(2).judge(np.ones(2), np.ones(3), np.ones(2))
    with pytest.raises(ValueError, match="random_guess_loss"):
        Governor(2).judge(np.ones(2), np.ones(2), np.array([1.0, np.nan]))


# Snapshots.


def host() -> nn.Sequential:
    layers = [nn.Sequential(nn.Linear(i, 4), nn.LayerNorm(4), nn.ReLU()) for i in (3, 4)]
    return nn.Sequential(OrderedDict(stem=layers[0], block=layers[1], head=nn.Linear(4, 2)))


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
    found: dict = {"host": [t[host].clone() for t in (hosts.hosts.rows, *hosts.hosts.optimizer_state.tensors())]}
    for key, group in hosts.groups.items():
        for row in np.flatnonzero(group.hosts == host):
            matrices = group.matrices.values()
            found[key] = [t[row].clone() for m in matrices for t in (m.rows, *m.optimizer_state.tensors())]
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
        group.matrices["branch"].rows[WHICH] = torch.nan
    hosts.hosts.rows[WHICH] = torch.nan
    train(hosts, 1)
    now = [weights(hosts, n) for n in range(4)]
    snapshot.restore(hosts, WHICH)
    for n in (0, 2):
        assert_same(weights(hosts, n), now[n])
        assert hosts.slot_state.stage[n].tolist() == [Stage.FOSSILIZED, Stage.BLENDING]
    for n in (1, 3):
        assert_same(weights(hosts, n), {key: good[n][key] for key in ("host", (0, "mlp_small", "gate"))})
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
        assert_same(weights(hosts, n), {key: expected[key] for key in ("host", (0, "mlp_small", "gate"))})


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


@pytest.mark.parametrize("episodes", [100, pytest.param(1000, marks=pytest.mark.slow)])
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
