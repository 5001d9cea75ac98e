"""Attribution against games worked by hand, brute force over all orders, and seeds switched one by one."""

from collections import OrderedDict
from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import nn
from torch.nn.functional import cross_entropy

from simic.environment.attribution import (
    attribute_episodes,
    cached,
    coalition_metrics,
    pairwise_interaction,
    seed_game,
    shapley,
)
from simic.lifecycle.actions import Action
from simic.lifecycle.stages import LifecycleConfig, Stage
from simic.stacked.hosts import StackedHosts

NAN = np.nan


def rng():
    return np.random.default_rng(0)


def everyone(count):
    return np.ones(count, dtype=bool)


def table_game(table):
    """A game whose value is looked up: player i counts 2^i."""
    return lambda coalitions: table[coalitions @ (1 << np.arange(coalitions.shape[1]))]


def additive(coalitions):
    return 10 + coalitions @ np.array([3.0, -1.0, 0.0, 5.0])


def gloves(coalitions):
    """Player 0 owns a left glove, 1 and 2 a right one each; a pair is worth 1."""
    return (coalitions[:, 0] & coalitions[:, 1:].any(1)).astype(float)


def test_in_an_additive_game_each_gets_what_it_brings():
    brings = [3, -1, 0, 5]
    assert shapley(additive, everyone(4), generator=rng()).values == pytest.approx(brings)
    interaction = pairwise_interaction(additive, everyone(4))
    assert np.isnan(np.diag(interaction)).all()
    assert interaction[~np.eye(4, dtype=bool)] == pytest.approx(0)


def test_the_glove_game_by_hand():
    result = shapley(gloves, everyone(3), generator=rng())
    # The left glove completes a pair unless it comes first: in 4 of 6 orders. A right one does right after it: in 1.
    assert result.values == pytest.approx([2 / 3, 1 / 6, 1 / 6])
    assert result.standard_error.tolist() == [0, 0, 0]
    # Without 0: 1 - 0 - 1 + 0 for each partner. Without both right gloves: 1 - 1 - 1 + 0, they do the same work.
    assert pairwise_interaction(gloves, everyone(3)) == pytest.approx(
        np.array([[NAN, 0, 0], [0, NAN, -1], [0, -1, NAN]]), nan_ok=True
    )


def test_seeds_that_are_absent_never_play():
    def value(coalitions):
        assert not coalitions[:, [0, 2]].any()
        return 2 * coalitions[:, 1] + 4.0 * (coalitions[:, 1] & coalitions[:, 3])

    present = np.array([False, True, False, True])
    assert shapley(value, present, generator=rng()).values == pytest.approx(np.array([NAN, 4, NAN, 2]), nan_ok=True)
    assert pairwise_interaction(value, present)[1, 3] == 4
    assert np.isnan(shapley(value, ~everyone(4), generator=rng()).values).all()


def test_every_host_plays_its_own_game():
    def value(coalitions):
        return np.stack([additive(coalitions), -2 * additive(coalitions), gloves(coalitions)], axis=1)

    result = shapley(value, everyone(4), generator=rng())
    assert result.values == pytest.approx(np.array([[3, -1, 0, 5], [-6, 2, 0, -10], [3 / 4, 1 / 12, 1 / 12, 1 / 12]]))
    assert pairwise_interaction(value, everyone(4)).shape == (3, 4, 4)


def brute_force(value, count):
    """Every order of arrival, one after the other."""
    total = np.zeros(count)
    orders = list(permutations(range(count)))
    for order in orders:
        coalition = np.zeros((1, count), dtype=bool)
        for player in order:
            before = value(coalition)[0]
            coalition[0, player] = True
            total[player] += value(coalition)[0] - before
    return total / len(orders)


@given(data=st.data(), count=st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_exact_values_equal_brute_force_and_add_up(data, count):
    table = data.draw(arrays(np.float64, 2**count, elements=st.floats(-100, 100, width=32)))
    value = table_game(table)
    result = shapley(value, everyone(count), generator=rng()).values
    assert result == pytest.approx(brute_force(value, count), abs=1e-9)
    assert result.sum() == pytest.approx(table[-1] - table[0], abs=1e-9)


def six_players():
    """A random game in which players 0 and 1 are alike, and player 5 never matters."""
    table = rng().normal(size=64)
    index = np.arange(64)
    swapped = (index & ~3) | ((index & 1) << 1) | ((index & 2) >> 1)
    table = (table + table[swapped]) / 2
    return table_game(table[index & 31]), table[31] - table[0]


def test_sampled_values_are_within_their_error_of_the_exact_ones():
    value, total = six_players()
    exact = brute_force(cached(value), 6)
    few, many = (shapley(value, everyone(6), generator=rng(), num_pairs=pairs) for pairs in (100, 1600))
    for sample in (few, many):
        assert sample.values.sum() == pytest.approx(total, abs=1e-12)
        assert (np.abs(sample.values - exact) <= 4 * sample.standard_error + 1e-12).all()
        assert sample.values[5] == sample.standard_error[5] == 0
    assert many.standard_error[:5] == pytest.approx(few.standard_error[:5] / 4, rel=0.5)
    assert exact[0] == pytest.approx(exact[1])
    assert many.values[0] == pytest.approx(many.values[1], abs=4 * many.standard_error[:2].sum())


def test_the_stated_error_is_the_true_one():
    value, _ = six_players()
    samples = [shapley(value, everyone(6), generator=np.random.default_rng(s), num_pairs=10) for s in range(300)]
    spread = np.std([sample.values for sample in samples], axis=0)
    stated = np.sqrt(np.mean([sample.standard_error**2 for sample in samples], axis=0))
    assert stated[:5] == pytest.approx(spread[:5], rel=0.15)


def test_orders_taken_backwards_cancel_what_depends_on_coming_early():
    # Worth the square of the number present: the first to come adds 1, the last 11; forwards and backwards make 12.
    sample = shapley(lambda c: c.sum(1) ** 2.0, everyone(6), generator=rng(), num_pairs=3)
    assert sample.values == pytest.approx([6.0] * 6)
    assert sample.standard_error == pytest.approx(0, abs=1e-12)


def test_the_generator_decides_which_orders_are_drawn():
    value, _ = six_players()
    one, two, other = (shapley(value, everyone(6), generator=np.random.default_rng(s)).values for s in (1, 1, 2))
    assert np.array_equal(one, two)
    assert not np.array_equal(one, other)
    with pytest.raises(ValueError, match="num_pairs"):
        shapley(value, everyone(6), generator=rng(), num_pairs=1)


@pytest.mark.parametrize(("count", "most"), [(4, 16), (6, 64)])
def test_no_coalition_is_evaluated_twice(count, most):
    seen = []

    def value(coalitions):
        seen.extend(row.tobytes() for row in coalitions)
        return coalitions.sum(1) * 1.0

    game = cached(value)
    shapley(game, everyone(count), generator=rng(), num_pairs=200)
    pairwise_interaction(game, everyone(count))
    assert len(seen) == len(set(seen)) == most
    seen.clear()
    shapley(value, everyone(count), generator=rng(), num_pairs=200)
    assert len(seen) == len(set(seen)) == most


# Seeds of real hosts.

SLOTS = ("stem", "block1", "block2")
BLUEPRINTS = ("mlp", "norm", "mlp", "glu")
STYLES = ("linear-add", "linear-multiply", "gated", "linear-add")


def host() -> nn.Sequential:
    layers = [nn.Sequential(nn.Linear(i, 6), nn.LayerNorm(6), nn.ReLU()) for i in (5, 6, 6)]
    names = (*SLOTS, "head")
    return nn.Sequential(OrderedDict(zip(names, (*layers, nn.Linear(6, 3)), strict=True))).double()


def minus_loss(logits, targets):
    return -cross_entropy(logits, targets)


@pytest.fixture(params=["direct", "shadow", "straight_through"])
def grown(request):
    """Hosts with different seeds: three of them lack one, the last has two fossils."""
    lifecycle = LifecycleConfig(incubation=request.param)
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(4, 32, 5, generator=generator, dtype=torch.double), (torch.arange(32) % 3).expand(4, 32)
    hosts = StackedHosts(
        host, SLOTS, example_input=x[0], rng_seeds=range(4), loss=cross_entropy, metric=minus_loss, lifecycle=lifecycle
    )
    for slot in range(3):
        rows = [Action("germinate", slot, name, style) for name, style in zip(BLUEPRINTS, STYLES, strict=True)]
        actions = np.stack([row.encode(SLOTS, hosts.blueprint_names) for row in rows])
        actions[slot] = 0  # this host waits
        hosts.execute(actions)
        hosts.tick()
        if lifecycle.has_training_stage:
            hosts.slot_state.stage[hosts.slot_state.stage == Stage.GERMINATED] = Stage.TRAINING
            hosts.tick()
        for _ in range(5):
            hosts.train_step(x, y, torch.full((4,), 0.05, dtype=torch.double))
    for place in ((3, 0), (3, 1)):
        hosts.slot_state.stage[place], hosts.slot_state.alpha[place] = Stage.FOSSILIZED, 0.7
    hosts.slot_state.stage[0, 1], hosts.slot_state.alpha[0, 1] = Stage.HOLDING, 0.5
    hosts.tick()
    return hosts, x, y


def test_coalitions_of_real_seeds_equal_evaluation_with_those_alphas(grown):
    hosts, x, y = grown
    masks = np.random.default_rng(0).random((12, 4, 3)) < 0.5
    masks[5] = masks[3]
    found = coalition_metrics(hosts, x, y, masks)
    some = coalition_metrics(hosts, x[[3, 1]], y[[3, 1]], masks[:, [3, 1]], np.array([3, 1]))
    assert some == pytest.approx(found[:, [3, 1]], abs=1e-12)
    slot_state, original = hosts.slot_state, hosts.slot_state.alpha.copy()
    slot_state.stage[slot_state.live] = Stage.HOLDING  # a seed in training has no alpha of its own
    for mask, values in zip(masks, found, strict=True):
        on = np.where(original > 0, original, slot_state.alpha_target)
        slot_state.alpha[:] = np.where(mask, on, 0.0)
        hosts.sync_with_slots()
        expected = hosts.evaluate(x, y)[1]
        slot_state.alpha[:] = original
        assert values == pytest.approx(expected.numpy(), abs=1e-12)
    assert np.ptp(found, axis=0).min() > 1e-4, "the masks make a difference in every host"


def test_leave_one_out_of_real_seeds_equals_the_switching_of_each_decision(grown):
    hosts, x, y = grown
    _, metric, flipped = hosts.evaluate_and_attribute(x, y)
    flipped = flipped.numpy()
    blended = hosts.slot_state.alpha > 0
    switchable = blended & hosts.slot_state.live
    without = np.tile(blended, (4, 1, 1))
    without[[1, 2, 3], :, [0, 1, 2]] = False
    values = coalition_metrics(hosts, x, y, without)
    assert values[0] == pytest.approx(metric.numpy(), abs=1e-12)
    assert values[1:].T[switchable] == pytest.approx(flipped[switchable], abs=1e-12)
    training = hosts.slot_state.stage == Stage.TRAINING
    for n, slot in np.argwhere(training):
        joined = blended.copy()
        joined[n, slot] = True
        assert coalition_metrics(hosts, x, y, joined[None])[0, n] == pytest.approx(flipped[n, slot], abs=1e-12)
    assert switchable.any()
    assert training.any() == hosts.lifecycle.has_training_stage


def bare_metric(hosts, x, y):
    """The metric of every host without any seed, from its weights alone."""
    metrics = []
    for n in range(hosts.num_hosts):
        alone = host()
        nn.utils.vector_to_parameters(hosts.hosts.rows[n], alone.parameters())
        metrics.append(minus_loss(alone(x[n]), y[n]).item())
    return metrics


def test_shapley_values_of_real_seeds_add_up_to_what_growth_brought(grown):
    hosts, x, y = grown
    before = hosts.hosts.rows.clone()
    value, present = seed_game(hosts, [(x, y)])
    result = shapley(value, present, generator=rng())
    all_in, none = value(np.stack([present, ~everyone(3)]))
    assert result.values.sum(1) == pytest.approx(all_in - none, abs=1e-12)
    assert (np.abs(result.values[hosts.slot_state.occupied]) > 1e-6).all(), "fossils play too"
    assert result.values[~hosts.slot_state.occupied] == pytest.approx(0, abs=1e-12)
    assert none == pytest.approx(bare_metric(hosts, x, y), abs=1e-12)
    assert torch.equal(hosts.hosts.rows, before)


def test_a_game_on_batches_is_the_game_on_all_samples(grown):
    hosts, x, y = grown
    coalitions = np.array([[True, False, True], [False, True, True]])
    whole, parts = (seed_game(hosts, batches)[0](coalitions) for batches in ([(x, y)], split(x, y)))
    assert parts == pytest.approx(whole, abs=1e-12)


def split(x, y):
    return [(x[:, :20], y[:, :20]), (x[:, 20:], y[:, 20:])]


def test_at_the_end_each_host_gets_what_it_would_alone(grown):
    hosts, x, y = grown
    which = np.array([True, False, True, True])
    found = attribute_episodes(hosts, split(x, y), which)
    present = hosts.slot_state.occupied & which[:, None]
    assert np.array_equal(np.isfinite(found.shapley), present)
    assert (found.shapley_error[present] == 0).all()
    pairs = present[:, :, None] & present[:, None] & ~np.eye(3, dtype=bool)
    assert np.array_equal(np.isfinite(found.interaction), pairs)
    assert np.array_equal(found.interaction, found.interaction.swapaxes(1, 2), equal_nan=True)
    for n in np.flatnonzero(which):
        value, slots = seed_game(hosts, [(x, y)], np.array([n]))
        expected = shapley(value, slots, generator=rng()).values[0]
        assert found.shapley[n] == pytest.approx(expected, abs=1e-12, nan_ok=True)
        assert found.interaction[n] == pytest.approx(pairwise_interaction(value, slots)[0], abs=1e-12, nan_ok=True)


@pytest.mark.parametrize("grown", ["direct"], indirect=True)
def test_hosts_that_do_not_fit_into_memory_at_once_play_in_turn(grown):
    hosts, x, y = grown
    whole = attribute_episodes(hosts, [(x, y)], everyone(4))
    hosts.hosts_at_once = 3
    hosts.sync_with_slots()
    for one, other in zip(whole, attribute_episodes(hosts, [(x, y)], everyone(4)), strict=True):
        assert one == pytest.approx(other, abs=1e-12, nan_ok=True)


@pytest.mark.parametrize("grown", ["direct"], indirect=True)
def test_without_an_end_or_a_seed_there_is_nothing_to_share(grown):
    hosts, x, y = grown
    assert all(np.isnan(values).all() for values in attribute_episodes(hosts, [(x, y)], ~everyone(4)))
    hosts.reset(np.arange(4), np.arange(4))
    assert all(np.isnan(values).all() for values in attribute_episodes(hosts, [(x, y)], everyone(4)))


def test_coalitions_that_say_the_same_of_seeds_cost_one_pass(grown):
    hosts, x, y = grown
    passes = []
    whole = hosts.metrics
    hosts.metrics = lambda logits, targets: passes.append(1) or whole(logits, targets)
    masks = np.tile(hosts.slot_state.occupied, (3, 1, 1))
    masks[1][~hosts.slot_state.occupied] = True
    coalition_metrics(hosts, x, y, masks)
    assert len(passes) == 1


def test_coalitions_of_other_hosts_are_refused(grown):
    hosts, x, y = grown
    with pytest.raises(ValueError, match=r"\(K, \*\(4, 3\)\)"):
        coalition_metrics(hosts, x, y, np.ones((2, 3, 3), dtype=bool))
