"""Every blueprint's branch, run for N networks at once, says what the networks say one by one, gradients included."""

import pytest
import torch
from torch.func import functional_call

from simic.growth.blueprints import BLUEPRINTS, SlotShape, new_branch
from simic.stacked.layers import run_stacked

SHAPES = {
    "features": (SlotShape(topology="features", features=6), (6,)),
    "conv": (SlotShape(topology="conv", features=6, dims=2), (6, 5, 5)),
    "conv1d": (SlotShape(topology="conv", features=6, dims=1), (6, 7)),
    "sequence": (SlotShape(topology="sequence", features=6), (5, 6)),
}
PAIRS = [
    (kind, name)
    for kind, (shape, _) in SHAPES.items()
    for name, own in BLUEPRINTS.items()
    if shape.topology in own.topologies
]


@pytest.mark.parametrize("samples", [3, 500])
@pytest.mark.parametrize("num_networks", [1, 2, 9])
@pytest.mark.parametrize(("kind", "name"), PAIRS)
def test_networks_at_once_equal_networks_one_by_one(kind, name, num_networks, samples):
    shape, size = SHAPES[kind]
    branch = new_branch(name, shape, (0,)).double()
    torch.manual_seed(0)
    parameters = {
        key: torch.randn(num_networks, *value.shape, dtype=torch.float64, requires_grad=True)
        for key, value in branch.named_parameters()
    }
    x = torch.randn(num_networks, samples, *size, dtype=torch.float64)
    together = run_stacked(branch, parameters, x)
    alone = torch.stack(
        [
            functional_call(branch, {key: value[n] for key, value in parameters.items()}, (x[n],))
            for n in range(num_networks)
        ]
    )
    torch.testing.assert_close(together, alone)
    weights = torch.randn_like(alone)
    gradients = [torch.autograd.grad((out * weights).sum(), list(parameters.values())) for out in (together, alone)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)
