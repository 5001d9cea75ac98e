"""Sequences cut at resets and run side by side give what one step after the other gives."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from simic.policy.recurrence import SHORT, Core, split_episodes, state_health

INPUTS, HIDDEN = 3, 4


def make_core(name) -> Core:
    torch.manual_seed(0)
    return Core(INPUTS, HIDDEN, name)


def stepped(core, x, state, first):
    """One step at a time, zeroing states where episodes begin."""
    outs = []
    for step in range(len(x)):
        state = torch.where(first[step][:, None], 0.0, state)
        out, state = core(x[step : step + 1], state)
        outs.append(out)
    return torch.cat(outs), state


@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_a_sequence_in_one_call_is_its_steps(name):
    core = make_core(name)
    x, state = torch.randn(9, 2, INPUTS), torch.randn(2, core.state_size)
    out, last = core(x, state)
    expected, expected_last = stepped(core, x, state, torch.zeros(9, 2, dtype=torch.bool))
    assert core.state_size == HIDDEN * {"lstm": 2, "gru": 1}[name]
    assert torch.allclose(out, expected, atol=1e-5)
    assert torch.allclose(last, expected_last, atol=1e-5)


@pytest.mark.parametrize("name", ["lstm", "gru"])
@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_pieces_are_steps_with_zeroed_states(name, data):
    """Random resets, states carried in where the first step is no reset; outputs and gradients."""
    steps, envs = data.draw(st.integers(1, 2 * SHORT + 20)), data.draw(st.integers(1, 4))
    rate, seed = data.draw(st.sampled_from([0.0, 0.03, 0.2, 0.7])), data.draw(st.integers(0, 10**6))
    rng = np.random.default_rng(seed)
    first = rng.random((steps, envs)) < rate
    first[0] |= rng.random(envs) < 0.5
    core = make_core(name)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(steps, envs, INPUTS, generator=generator)
    state = torch.randn(envs, core.state_size, generator=generator).requires_grad_()
    state_after_reset = torch.where(torch.from_numpy(first[0])[:, None], 0.0, state)
    out, _ = core(x, state_after_reset, split_episodes(first))
    expected, _ = stepped(core, x, state, torch.from_numpy(first))
    assert out.shape == (steps, envs, HIDDEN)
    assert torch.allclose(out, expected, atol=1e-5)
    loss = torch.randn(out.shape, generator=generator)
    leaves = [state, *core.parameters()]
    ours, theirs = (torch.autograd.grad((o * loss).sum(), leaves) for o in (out, expected))
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, atol=1e-4)


def test_whole_episodes_need_no_cut():
    first = np.zeros((5, 3), dtype=bool)
    first[0] = True
    assert split_episodes(first) is None


def test_a_piece_that_begins_ignores_the_state_before_the_rollout():
    core, first = make_core("lstm"), np.array([[True, False], [False, True]])
    x = torch.randn(2, 2, INPUTS)
    quiet, loud = torch.zeros(2, core.state_size), torch.full((2, core.state_size), 3.0)
    a, b = core(x, quiet, split_episodes(first))[0], core(x, loud, split_episodes(first))[0]
    assert (a[:, 0] == b[:, 0]).all()
    assert (a[0, 1] != b[0, 1]).any()
    assert (a[1, 1] == b[1, 1]).all()


def test_some_begin_and_some_go_on():
    """No reset inside: the one that begins still ignores the state, the one that goes on still uses it."""
    core, first = make_core("gru"), np.array([[True, False], [False, False]])
    x = torch.randn(2, 2, INPUTS)
    quiet, loud = torch.zeros(2, core.state_size), torch.full((2, core.state_size), 3.0)
    a, b = core(x, quiet, split_episodes(first))[0], core(x, loud, split_episodes(first))[0]
    assert (a[:, 0] == b[:, 0]).all()
    assert (a[:, 1] != b[:, 1]).any(-1).all()


@given(seed=st.integers(0, 10**6), steps=st.integers(1, 80))
@settings(max_examples=30, deadline=None)
def test_padding_at_most_doubles_what_is_not_short(seed, steps):
    """Every step is found where `back` says; buckets of long segments are at most half padding."""
    first = np.random.default_rng(seed).random((steps, 3)) < 0.1
    segments = split_episodes(first)
    if segments is None:
        return
    laid_out = torch.cat([bucket.source.flatten() for bucket in segments.buckets])
    assert laid_out[segments.back].tolist() == list(range(3 * steps))
    size = sum(bucket.source.numel() for bucket in segments.buckets)
    assert size <= 2 * 3 * steps + SHORT * sum(b.source.shape[1] for b in segments.buckets if len(b.source) <= SHORT)


def test_orthogonal_weights_and_zero_biases():
    core = make_core("lstm")
    for gate in core.cell.weight_hh_l0.split(HIDDEN):
        assert gate.shape == (HIDDEN, HIDDEN)
    weight = core.cell.weight_hh_l0.detach()
    assert torch.allclose(weight.T @ weight, torch.eye(HIDDEN), atol=1e-5)
    assert (core.cell.bias_ih_l0 == 0).all()


def test_an_unknown_core_is_refused():
    with pytest.raises(ValueError, match="core must be one of lstm, gru, got 'rnn'"):
        Core(2, 2, "rnn")  # pyright: ignore[reportArgumentType]


def test_the_health_of_a_state_by_hand():
    """Of (3, 4, NaN, inf) half is finite, with a root mean square of sqrt(25 / 2); no state has none."""
    health = state_health(torch.tensor([[3.0, 4.0], [float("nan"), float("inf")]]))
    assert health["state_rms"].item() == pytest.approx(12.5**0.5)
    assert health["state_finite"].item() == 0.5
    zero = state_health(torch.zeros(2, 3))
    assert (zero["state_rms"].item(), zero["state_finite"].item()) == (0.0, 1.0)
    none = state_health(None)
    assert none["state_rms"].isnan()
    assert none["state_finite"].item() == 1.0
