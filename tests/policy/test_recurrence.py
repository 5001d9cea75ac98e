"""Sequences cut at resets and run side by side give what one step after the other gives."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from simic.policy.recurrence import Core, state_health
from simic.policy.segments import Pieces, split_episodes, split_for_pieces, split_pieces

INPUTS, HIDDEN = 3, 4


def make_core(name) -> Core:
    """A core with biases as training leaves them: a fresh one has none."""
    torch.manual_seed(0)
    core = Core(INPUTS, HIDDEN, name)
    for bias in (core.cell.bias_ih_l0, core.cell.bias_hh_l0):
        torch.nn.init.normal_(bias)
    return core


def draw_resets(seed, steps, envs, rate) -> np.ndarray:
    """Where episodes begin (T, N), in about half of the environments with the first step."""
    rng = np.random.default_rng(seed)
    first = rng.random((steps, envs)) < rate
    first[0] |= rng.random(envs) < 0.5
    return first


def cut(core, x, state, first, length) -> Pieces:
    """The pieces after a pass over whole sequences."""
    segments, row = split_for_pieces(first, length)
    return Pieces(row, core(x, state, segments)[1].detach())


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
    steps, envs = data.draw(st.integers(1, 84)), data.draw(st.integers(1, 4))
    rate, seed = data.draw(st.sampled_from([0.0, 0.03, 0.2, 0.7])), data.draw(st.integers(0, 10**6))
    first = draw_resets(seed, steps, envs, rate)
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


@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_nothing_passes_from_an_episode_to_the_next_of_its_row(name):
    """Both are in one row; to the last bit, the second does not depend on the first, nor does its gradient."""
    core, first = make_core(name), np.zeros((60, 1), dtype=bool)
    first[[0, 40, 50]] = True
    segments = split_episodes(first)
    assert segments is not None
    assert segments.rows.calls == ((40, 2),)  # the first episode, and behind each other the two short ones
    x = torch.randn(60, 1, INPUTS, requires_grad=True)
    other = torch.cat([torch.randn(50, 1, INPUTS), x[50:].detach()])
    state = torch.zeros(1, core.state_size)
    out = core(x, state, segments)[0]
    assert torch.equal(out[50:], core(other, state, segments)[0][50:])
    (gradient,) = torch.autograd.grad(out[50:].square().sum(), x)
    assert (gradient[:50] == 0).all()
    assert (gradient[50:] != 0).any(-1).all()


@pytest.mark.parametrize("name", ["lstm", "gru"])
@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_pieces_from_exact_states_are_whole_sequences(name, data):
    """Also the first pass, which keeps the states; pieces are as long as asked or end with their episode."""
    steps, envs, length = data.draw(st.integers(2, 50)), data.draw(st.integers(1, 4)), data.draw(st.integers(1, 20))
    seed, rate = data.draw(st.integers(0, 10**6)), data.draw(st.sampled_from([0.0, 0.1, 0.5]))
    first, core = draw_resets(seed, steps, envs, rate), make_core(name)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(steps, envs, INPUTS, generator=generator)
    state = torch.randn(envs, core.state_size, generator=generator)
    expected, _ = stepped(core, x, state, torch.from_numpy(first))
    segments, row = split_for_pieces(first, length)
    out, states = core(x, state, segments)
    assert torch.allclose(out, expected, atol=1e-5)
    out, _ = core(x, states, split_pieces(first, row))
    assert torch.allclose(out, expected, atol=1e-5)
    for env in range(envs):
        begins = [*np.flatnonzero(row[:, env] >= 0), steps]
        for begin, end in pairwise(begins):
            assert end - begin == length or (end - begin < length and (end == steps or first[end, env]))


@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_no_gradient_crosses_the_border_of_a_piece(name):
    """Steps 8 to 11 are a piece; an episode that begins with step 10 stops the gradient inside it."""
    core, first = make_core(name), np.zeros((16, 2), dtype=bool)
    first[0] = True
    first[10, 1] = True
    x, state = torch.randn(16, 2, INPUTS, requires_grad=True), torch.zeros(2, core.state_size)
    pieces = cut(core, x, state, first, 4)
    out, _ = core(x, pieces.states, split_pieces(first, pieces.row))
    (gradient,) = torch.autograd.grad(out[11].square().sum(), x)
    reached = (gradient != 0).any(-1)
    assert reached[:, 0].nonzero().flatten().tolist() == [8, 9, 10, 11]
    assert reached[:, 1].nonzero().flatten().tolist() == [10, 11]


def test_pieces_of_some_environments_keep_their_states():
    core, first = make_core("lstm"), draw_resets(3, 20, 5, 0.1)
    x, state = torch.randn(20, 5, INPUTS), torch.randn(5, core.state_size)
    pieces, chosen = cut(core, x, state, first, 6), np.array([4, 1])
    part = pieces.environments(chosen)
    whole, _ = core(x, pieces.states, split_pieces(first, pieces.row))
    out, _ = core(x[:, chosen], part.states, split_pieces(first[:, chosen], part.row))
    assert torch.allclose(out, whole[:, chosen], atol=1e-6)


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
def test_every_step_is_found_and_rows_are_filled(seed, steps):
    """At most one row is less than half full."""
    first = np.random.default_rng(seed).random((steps, 3)) < 0.1
    segments = split_episodes(first)
    if segments is None:
        return
    assert segments.rows.source[segments.rows.back].tolist() == list(range(3 * steps))
    ((length, rows),) = segments.rows.calls
    assert len(segments.rows.source) == length * rows
    assert (rows - 1) * length <= 2 * (3 * steps + first.sum())


def test_longer_rows_are_taken_where_they_need_fewer_entries():
    """Episodes of 20, 10 and 12: rows of 20 hold one each, 60 entries; of two rows of 24 one holds 12 + reset + 10."""
    first = np.zeros((42, 1), dtype=bool)
    first[[0, 20, 30]] = True
    segments = split_episodes(first)
    assert segments is not None
    assert segments.rows.calls == ((24, 2),)


def test_orthogonal_weights_and_zero_biases():
    core = Core(INPUTS, HIDDEN, "lstm")
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
