"""Loss and accuracy of all hosts at once against torch's own and those of tasks, host by host."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck
from torch.nn import functional as F

from simic.stacked.figures import IGNORED, STACKED, stacked_figure
from simic.tasks.task import accuracy, mean_cross_entropy

SHAPES = [(3, 8, 4), (3, 2, 5, 4), (1, 3, 2, 2, 6)]
"""Logits (N, B, K), (N, B, L, K) and beyond."""


def draw(shape, ignored=0.0):
    torch.manual_seed(len(shape))
    logits = 3 * torch.randn(*shape, dtype=torch.double)
    targets = torch.randint(shape[-1], shape[:-1])
    targets[torch.rand(targets.shape) < ignored] = IGNORED
    targets.flatten(1)[:, 0] = 1  # a mean needs a sample
    return logits.requires_grad_(), targets


@pytest.mark.parametrize("ignored", [0.0, 0.4])
@pytest.mark.parametrize("shape", SHAPES)
def test_losses_are_those_of_each_host(shape, ignored):
    logits, targets = draw(shape, ignored)
    found = stacked_figure(mean_cross_entropy)(logits, targets)
    pairs = [*zip(logits, targets, strict=True)]
    torch.testing.assert_close(found, torch.stack([mean_cross_entropy(*own) for own in pairs]), rtol=1e-12, atol=1e-12)
    flat = [F.cross_entropy(own.flatten(0, -2), wanted.flatten()) for own, wanted in pairs]
    torch.testing.assert_close(found, torch.stack(flat), rtol=1e-12, atol=1e-12)
    weights = torch.arange(1.0, 1 + len(found), dtype=torch.double)
    one, other = (torch.autograd.grad((out * weights).sum(), logits)[0] for out in (found, torch.stack(flat)))
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_the_gradient_of_the_loss_is_that_of_small_differences():
    logits, targets = draw((2, 4, 3), 0.4)
    assert gradcheck(lambda own: stacked_figure(mean_cross_entropy)(own, targets), [logits])


def test_great_logits_do_not_overflow():
    logits = torch.tensor([[[1e4, 0.0]], [[-1e4, 0.0]]])
    losses = stacked_figure(mean_cross_entropy)(logits, torch.zeros(2, 1, dtype=torch.long))
    assert losses.tolist() == [0.0, 1e4]


def test_a_host_whose_samples_are_all_ignored_learns_nothing():
    logits, targets = draw((2, 4, 3))
    targets[0] = IGNORED
    losses = stacked_figure(mean_cross_entropy)(logits, targets)
    assert losses.isnan().tolist() == [True, False]  # as torch's own
    losses.sum().backward()
    assert logits.grad is not None
    assert not logits.grad[0].any()
    assert logits.grad[1].isfinite().all()


def test_an_impossible_class_costs_an_ignored_sample_nothing():
    logits = torch.tensor([[[-math.inf, 0.0, 1.0], [-math.inf, 2.0, 0.0]]])
    targets = torch.tensor([[IGNORED, 1]])
    expected = mean_cross_entropy(logits[0], targets[0])
    torch.testing.assert_close(stacked_figure(mean_cross_entropy)(logits, targets)[0], expected)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_accuracies_are_those_of_each_host(data):
    """Few different values make ties, of which the first wins."""
    shape = data.draw(st.sampled_from(SHAPES))
    values = st.sampled_from([-math.inf, -1.0, 0.0, 1.0, math.inf])
    logits = torch.tensor(data.draw(st.lists(values, min_size=math.prod(shape), max_size=math.prod(shape))))
    count = math.prod(shape[:-1])
    classes = st.sampled_from([*range(shape[-1]), IGNORED])
    targets = torch.tensor(data.draw(st.lists(classes, min_size=count, max_size=count)))
    logits, targets = logits.view(shape), targets.view(shape[:-1])
    expected = torch.stack([accuracy(*own) for own in zip(logits, targets, strict=True)])
    torch.testing.assert_close(stacked_figure(accuracy)(logits, targets), expected)


def test_of_equal_logits_the_first_wins():
    logits, targets = torch.tensor([[[0.0, 2.0, 2.0]] * 3]), torch.tensor([[0, 1, 2]])
    found = [stacked_figure(accuracy)(logits[:, :1], targets[:, i : i + 1]).item() for i in range(3)]
    assert found == [0.0, 1.0, 0.0]


@pytest.mark.parametrize("at", range(3))
def test_nan_logits_never_count_as_correct(at):
    logits = torch.tensor([3.0, 2.0, 1.0]).repeat(2, 3, 1)
    logits[0, :, at] = math.nan
    targets = torch.arange(3).expand(2, 3)
    assert stacked_figure(accuracy)(logits, targets).tolist() == pytest.approx([0.0, 1 / 3])


def test_an_own_loss_runs_host_by_host():
    def own(outputs, targets):
        return (outputs.squeeze(-1) - targets).abs().max()

    assert own not in STACKED
    outputs, targets = torch.randn(3, 5, 1), torch.randn(3, 5)
    expected = torch.stack([own(*each) for each in zip(outputs, targets, strict=True)])
    torch.testing.assert_close(stacked_figure(own)(outputs, targets), expected)
