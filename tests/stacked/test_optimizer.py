"""The stacked optimizer against torch's own, row by row: rates, steps, clipping by host, rows that do not learn."""

import numpy as np
import pytest
import torch
from torch import nn

from simic.stacked.optimizer import OptimizerConfig, StackedOptimizer
from simic.stacked.parameters import StackedParameters

RATES = torch.tensor([0.1, 0.02, 0.05], dtype=torch.double)
OWNERS = [np.arange(3), np.array([2, 0])]  # three hosts; two seeds, in hosts 2 and 0


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_rows_learn_as_parameters_alone(name):
    torch.manual_seed(0)
    config = OptimizerConfig(name=name, max_gradient_norm=1.5, weight_decay=0.1)
    values = [torch.randn(3, 4, dtype=torch.double), torch.randn(2, 2, dtype=torch.double)]
    alone = [[nn.Parameter(row.clone()) for row in matrix] for matrix in values]
    optimizers = [
        [torch_optimizer(p, config, RATES[o]) for p, o in zip(*own, strict=True)]
        for own in zip(alone, OWNERS, strict=True)
    ]
    matrices = [StackedParameters(v.clone(), {"w": torch.Size([v.shape[1]])}) for v in values]
    entities = [np.arange(3), np.array([5, 3])]  # both seeds in the only slot
    stacked = StackedOptimizer(matrices, entities, OWNERS, config, num_slots=1)
    assert stacked.num_entities == 6
    for step in range(6):
        active = [[True] * 3, [True, step % 2 == 0]]  # the second seed learns every other time
        gradients = [torch.randn_like(v) for v in values]
        gradients[1][1] *= active[1][1]
        gradient = torch.cat([g.flatten() for g in gradients])
        # None stands for rows that all learn.
        learning = None if all(active[1]) else torch.tensor([*active[0], *active[1]], dtype=torch.double)
        norms = stacked.step(gradient, RATES, learning)
        hosts, seeds = (g.norm(dim=1) for g in gradients)
        torch.testing.assert_close(norms, torch.stack([*hosts, seeds[1], torch.zeros_like(seeds[0]), seeds[0]]))
        for host in range(3):
            own = [(m, r) for m in range(2) for r in range(len(values[m])) if OWNERS[m][r] == host]
            for m, r in own:
                alone[m][r].grad = gradients[m][r].clone()
            nn.utils.clip_grad_norm_([alone[m][r] for m, r in own], config.max_gradient_norm)
            for m, r in own:
                if active[m][r]:
                    optimizers[m][r].step()
        for matrix, expected in zip(matrices, alone, strict=True):
            torch.testing.assert_close(matrix.rows, torch.stack([p.detach() for p in expected]))
    assert matrices[1].optimizer_state.steps.tolist() == [6, 3]


def torch_optimizer(parameter, config, rate):
    if config.name == "adamw":
        return torch.optim.AdamW([parameter], lr=float(rate), weight_decay=config.weight_decay)
    return torch.optim.SGD([parameter], float(rate), momentum=config.beta1, weight_decay=config.weight_decay)


def test_gradients_of_chunks_add_up():
    matrix = StackedParameters(torch.ones(2, 3), {"w": torch.Size([3])})
    stacked = StackedOptimizer([matrix], [np.arange(2)], [np.arange(2)], OptimizerConfig(), num_slots=0)
    found = None
    for row in range(2):
        found = stacked.gradient((matrix.leaves["w"][row] * (row + 1)).sum(), found)
    assert found is not None
    assert found.tolist() == [1, 1, 1, 2, 2, 2]
