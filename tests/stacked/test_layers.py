"""Every blueprint's branch, run for N networks at once, says what the networks say one by one, gradients included."""

import pytest
import torch
from torch import nn
from torch.func import functional_call

from simic.growth.blueprints import BLUEPRINTS, new_branch
from simic.growth.slot_shape import SlotShape
from simic.stacked.layers import run_stacked
from simic.tasks.hosts import TokenEmbedding, TransformerBlock

SHAPES = {
    "features": (SlotShape("features", 6, in_features=4), (6,), (4,)),
    "conv": (SlotShape("conv", 6, 2, in_features=4, stride=(1, 2)), (6, 5, 5), (4, 5, 5)),
    "conv1d": (SlotShape("conv", 6, 1, in_features=4, stride=(2,)), (6, 7), (4, 7)),
    "sequence": (SlotShape("sequence", 6, in_features=4), (5, 6), (5, 4)),
    "both ways": (SlotShape("sequence", 6, causal=False, in_features=4), (5, 6), (5, 4)),
}
"""Of a slot, its output and its input."""
PAIRS = [
    (kind, name)
    for kind, (shape, *_) in SHAPES.items()
    for name, own in BLUEPRINTS.items()
    if shape.topology in own.topologies
]


@pytest.mark.parametrize("samples", [3, 500])
@pytest.mark.parametrize("num_networks", [1, 2, 9])
@pytest.mark.parametrize(("kind", "name"), PAIRS)
def test_networks_at_once_equal_networks_one_by_one(kind, name, num_networks, samples):
    shape, *sizes = SHAPES[kind]
    size = sizes[BLUEPRINTS[name].reads == "input"]
    x = torch.randn(num_networks, samples, *size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    check_stacked(new_branch(name, shape, (0,)).double(), x)


@pytest.mark.parametrize("num_networks", [1, 3])
def test_transformer_blocks_equal_those_of_each_network(num_networks):
    x = torch.randn(num_networks, 50, 7, 12, dtype=torch.float64, requires_grad=True)
    check_stacked(TransformerBlock(12).double(), x)


@pytest.mark.parametrize("module", [nn.Embedding(5, 4), TokenEmbedding(5, 8, 4)])
def test_embeddings_equal_those_of_each_network(module):
    check_stacked(module.double(), torch.randint(5, (3, 6, 7), generator=torch.Generator().manual_seed(0)))


def test_an_image_without_gradient_reaches_a_norm_of_one_large_network():
    # torch's group norm crashes on such an image in channels-last layout.
    x = torch.randn(1, 500, 6, 5, 5, dtype=torch.float64).movedim(2, -1).contiguous().movedim(-1, 2)
    check_stacked(nn.Sequential(nn.GroupNorm(1, 6), nn.ReLU(), nn.Conv2d(6, 6, 3, padding=1)).double(), x)


def check_stacked(branch: nn.Module, x: torch.Tensor) -> None:
    """Outputs and gradients of `branch` with random parameters for each row of x, at once and one by one."""
    num_networks = len(x)
    torch.manual_seed(0)
    parameters = {
        key: torch.randn(num_networks, *value.shape, dtype=torch.float64, requires_grad=True)
        for key, value in branch.named_parameters()
    }
    together = run_stacked(branch, parameters, x)
    alone = torch.stack(
        [
            functional_call(branch, {key: value[n] for key, value in parameters.items()}, (x[n].contiguous(),))
            for n in range(num_networks)
        ]
    )
    torch.testing.assert_close(together, alone)
    weights = torch.randn_like(alone)
    leaves = [*parameters.values(), *([x] if x.requires_grad else [])]
    gradients = [torch.autograd.grad((out * weights).sum(), leaves) for out in (together, alone)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)
