"""The compiled LSTM gives what torch's gives, forward and backward, whatever sequences it runs."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from simic.compiled.product import COLUMN_UNIT
from simic.policy import lstm
from simic.policy.recurrence import Core
from simic.policy.segments import split_episodes, split_for_pieces, split_pieces

INPUTS = 3


def make_core(dtype=torch.float64, hidden=COLUMN_UNIT) -> Core:
    torch.manual_seed(0)
    core = Core(INPUTS, hidden).to(dtype)
    for bias in (core.cell.bias_ih_l0, core.cell.bias_hh_l0):
        torch.nn.init.normal_(bias)
    return core


def by_torch(core, x, state, first):
    """One step at a time by torch's cell, zeroing states where episodes begin: outputs and the last state."""
    outs, (h, c) = [], state.split(core.hidden_size, -1)
    for step, begins in enumerate(torch.from_numpy(first)):
        h, c = (torch.where(begins[:, None], 0.0, part) for part in (h, c))
        h, c = torch.lstm_cell(x[step], [h, c], *core.cell._flat_weights)
        outs.append(h)
    return torch.stack(outs), torch.cat([h, c], -1)


def draw(seed, steps, envs, rate, dtype=torch.float64, hidden=COLUMN_UNIT):
    """Inputs, states and where episodes begin, in about half of the environments with the first step."""
    rng = np.random.default_rng(seed)
    first = rng.random((steps, envs)) < rate
    first[0] |= rng.random(envs) < 0.5
    x, state = rng.normal(size=(steps, envs, INPUTS)), rng.normal(size=(envs, 2 * hidden))
    return torch.tensor(x, dtype=dtype), torch.tensor(state, dtype=dtype), first


def gradients(outputs, leaves):
    """Of a sum in which every number counts differently."""
    generator = torch.Generator().manual_seed(1)
    counts = [torch.randn(part.shape, generator=generator).to(part) for part in outputs]
    return torch.autograd.grad(outputs, leaves, counts)


@pytest.mark.parametrize("hidden", [COLUMN_UNIT, 3 * COLUMN_UNIT])
@pytest.mark.parametrize("envs", [1, 2, 3, 4, 5, 6, 7, 13])
def test_outputs_states_and_gradients_are_those_of_torch(envs, hidden):
    """Every size of a block of rows, and several blocks; the last state has a gradient too."""
    core = make_core(hidden=hidden)
    x, state, _ = draw(0, 7, envs, 0.0, hidden=hidden)
    x.requires_grad_()
    state.requires_grad_()
    assert lstm.can_run(x, core.cell._flat_weights)
    ours, leaves = core(x, state), [x, state, *core.parameters()]
    out, (h, c) = core.cell(x, tuple(part.contiguous() for part in state.unsqueeze(0).split(hidden, -1)))
    theirs = out, torch.cat([h, c], -1)[0]
    for a, b in zip([*ours, *gradients(ours, leaves)], [*theirs, *gradients(theirs, leaves)], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_episodes_of_any_lengths_with_carried_states(data):
    steps, envs = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 5))
    rate, seed = data.draw(st.sampled_from([0.0, 0.05, 0.3, 0.8])), data.draw(st.integers(0, 10**6))
    core = make_core()
    x, state, first = draw(seed, steps, envs, rate)
    x.requires_grad_()
    state.requires_grad_()
    leaves = [x, state, *core.parameters()]
    ours = core(x, state, split_episodes(first) or split_pieces(first, np.where(first, np.arange(envs), -1)))[0]
    theirs = by_torch(core, x, state, first)[0]
    for a, b in zip([ours, *gradients([ours], leaves)], [theirs, *gradients([theirs], leaves)], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_nothing_is_padded_and_short_episodes_run_behind_each_other():
    """Episodes of 20, 10 and 9 are 20 levels: the longest beside the two others, and it ends alone."""
    first = np.zeros((39, 1), dtype=bool)
    first[[0, 20, 30]] = True
    segments = split_episodes(first)
    assert segments is not None
    starts, previous, source, back = segments.levels
    assert np.diff(starts).tolist() == [2] * 19 + [1]
    assert (previous == -1).sum() == 3
    assert source is not None
    assert back is not None
    assert source[back].tolist() == list(range(39))


@pytest.mark.parametrize("length", [1, 3, 7, 50])
def test_kept_states_are_those_at_the_beginning_of_pieces(length):
    core, (x, state, first) = make_core(), draw(3, 23, 4, 0.1)
    segments, row = split_for_pieces(first, length)
    out, states = core(x, state, segments)
    expected, _ = by_torch(core, x, state, first)
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)
    for (step, env), kept in np.ndenumerate(row):
        if kept >= 0 and not first[step, env]:
            torch.testing.assert_close(
                states[kept], by_torch(core, x[:step], state, first[:step])[1][env] if step else state[env]
            )
    out, _ = core(x, states, split_pieces(first, row))
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)


def test_what_needs_no_gradient_gets_none():
    core = make_core()
    x, state, _ = draw(0, 4, 2, 0.0)
    core.cell.weight_ih_l0.requires_grad_(False)
    core.cell.bias_hh_l0.requires_grad_(False)
    core(x, state)[0].sum().backward()
    assert core.cell.weight_ih_l0.grad is None
    assert core.cell.bias_hh_l0.grad is None
    assert core.cell.weight_hh_l0.grad is not None
    assert core.cell.bias_ih_l0.grad is not None
    assert x.grad is None


def test_without_gradients_the_numbers_are_the_same():
    """The second call must not overwrite what the first returned, nor what its backward pass needs."""
    core = make_core(torch.float32)
    (x, state, first), (other, _, _) = draw(0, 9, 3, 0.2, torch.float32), draw(1, 9, 3, 0.2, torch.float32)
    segments = split_episodes(first)
    out = core(x, state, segments)[0]
    with torch.no_grad():
        quiet = core(x, state, segments)[0]
        core(other, state, segments)
    assert torch.equal(out, quiet)
    (first_time,) = torch.autograd.grad(out.sum(), [core.cell.weight_hh_l0], retain_graph=True)
    core(other, state, segments)[0].sum().backward()
    (second_time,) = torch.autograd.grad(out.sum(), [core.cell.weight_hh_l0])
    assert torch.equal(first_time, second_time)


def test_float32_is_as_exact_as_torch():
    core, (x, state, first) = make_core(torch.float32), draw(0, 30, 5, 0.1, torch.float32)
    exact = copy.deepcopy(core).double()
    ours = core(x, state, split_episodes(first))[0]
    expected = by_torch(exact, x.double(), state.double(), first)[0]
    torch.testing.assert_close(ours.double(), expected, rtol=1e-6, atol=1e-6)
    for a, b in zip(gradients([ours], [*core.parameters()]), gradients([expected], [*exact.parameters()]), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)


def test_nan_stays_in_its_sequence():
    core, (x, state, _) = make_core(torch.float32), draw(0, 5, 2, 0.0, torch.float32)
    x[2, 1, 0] = float("nan")
    out = core(x, state)[0]
    assert out[2:, 1].isnan().all()
    assert out[:2].isfinite().all()
    assert out[:, 0].isfinite().all()


def test_where_torch_runs_instead():
    core, x = make_core(torch.float32), torch.zeros(2, 2, INPUTS)
    weights = core.cell._flat_weights
    assert lstm.can_run(x, weights)
    assert not lstm.can_run(x.to("meta"), weights)
    assert not lstm.can_run(x.bfloat16(), weights)
    assert not lstm.can_run(x.double(), weights)
    assert not lstm.can_run(x, make_core(torch.float32, COLUMN_UNIT + 1).cell._flat_weights)
    with torch.autocast("cpu", torch.bfloat16):
        assert not lstm.can_run(x, weights)
    torch.set_num_threads(2)
    try:
        assert not lstm.can_run(x, weights)
    finally:
        torch.set_num_threads(1)
