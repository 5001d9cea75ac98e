"""Batches of N hosts: every host sees its own data in its own order, whoever else is there."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from simic.stacked.data import StackedData
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
