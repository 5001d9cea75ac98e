"""Batches of N hosts: every host sees its own data in its own order, whoever else is there."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from simic.stacked.data import StackedData, _generator
from simic.tasks.registry import make_task

DATA = make_task("teacher-mlp").data


def shuffled(seed: int):
    """The same data set with other targets."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(DATA.train_y), generator=generator)
    return replace(DATA, train_y=DATA.train_y[order])


def epoch(data: StackedData) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = zip(*data.batches(), strict=True)
    return torch.cat(x, dim=1), torch.cat(y, dim=1)


@pytest.mark.parametrize("shared", [True, False])
def test_a_host_sees_what_it_would_see_alone(shared):
    own = [DATA] * 3 if shared else [shuffled(0), shuffled(1), shuffled(2)]
    together = StackedData(own, [5, 6, 7], batch_size=50)
    alone = [StackedData([data], [rng_seed], batch_size=50) for data, rng_seed in zip(own, (5, 6, 7), strict=True)]
    for _ in range(2):
        x, y = epoch(together)
        for n, one in enumerate(alone):
            own_x, own_y = epoch(one)
            assert torch.equal(x[n], own_x[0])
            assert torch.equal(y[n], own_y[0])
    for n in range(3):
        assert torch.equal(together.split("validation", slice(3, 9))[0][n], own[n].validation_x[3:9])
    assert together.size("test") == len(DATA.test_y)


def jitter(x, generator):
    return x + torch.rand(x.shape, generator=generator)


def test_a_host_is_augmented_as_alone_and_anew_for_every_batch():
    task = replace(make_task("teacher-mlp"), batch_size=50, augment=jitter)
    together = StackedData([DATA] * 3, [5, 6, 7], batch_size=50, augment=jitter)
    generator = _generator(6)
    stacked, alone = list(together.batches()), list(task.train_batches(generator))
    for (x, y), (own_x, own_y) in zip(stacked, alone[: len(stacked)], strict=True):
        assert torch.equal(x[1], own_x)
        assert torch.equal(y[1], own_y)
        assert x.stride() == (x.shape[1] * x.shape[2], 1, x.shape[1])  # features: samples last
    added = torch.cat([x for x, _ in stacked], 1)[0].sum(0) - DATA.train_x[: len(stacked) * 50].sum(0)
    assert (added > 0).all()
    assert torch.equal(together.split("validation", slice(None))[0][0], DATA.validation_x)


def test_an_epoch_has_full_batches_of_different_samples():
    data = StackedData([DATA], [1], batch_size=48)
    x, _ = epoch(data)
    assert x.shape[1] == data.steps_per_host_epoch * 48 <= len(DATA.train_x)
    assert len(x[0].unique(dim=0)) == len(x[0])


def test_a_reset_host_gets_a_new_order_and_others_keep_theirs():
    one, other = (StackedData([DATA] * 2, [1, 2], batch_size=50) for _ in range(2))
    one.reset(np.array([1]), [DATA], [9])
    (x, _), (y, _) = epoch(one), epoch(other)
    assert torch.equal(x[0], y[0])
    assert not torch.equal(x[1], y[1])
