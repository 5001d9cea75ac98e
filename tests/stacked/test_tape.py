"""Layers and seeds on a tape against autograd in float64: outputs, gradients of inputs and of all parameters."""

import pytest
import torch
from helpers.slot_example import randomized
from torch import nn

from simic.growth.branch_layers import Gate, GatedLinear, Scale, SlotShape
from simic.stacked.tape import Node, Tape, is_known, put_module, take

MODULES = {
    "linear": lambda: nn.Linear(4, 3),
    "linear without bias": lambda: nn.Linear(4, 3, bias=False),
    "layer norm": lambda: nn.LayerNorm(4),
    "layer norm without bias": lambda: nn.LayerNorm(4, bias=False),
    "plain layer norm": lambda: nn.LayerNorm(4, elementwise_affine=False),
    "gelu": lambda: nn.Sequential(nn.Linear(4, 3), nn.GELU()),
    "approximate gelu": lambda: nn.Sequential(nn.Linear(4, 3), nn.GELU(approximate="tanh")),
    "relu": lambda: nn.Sequential(nn.Linear(4, 3), nn.ReLU()),
    "tanh": lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)),
    "norm seed": lambda: nn.Sequential(nn.LayerNorm(4), Scale()),
    "gate": lambda: Gate(SlotShape("features", 4)),
    "gated linear": lambda: GatedLinear(4, 5),
    "nested": lambda: nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.ReLU()), nn.Linear(4, 2)),
}


def parameters_on_tape(modules: list[nn.Module]) -> dict[str, Node]:
    stacked = {name: torch.stack([dict(m.named_parameters())[name].detach() for m in modules]) for name, _ in
               modules[0].named_parameters()}  # fmt: skip
    return {name: Node(value, torch.zeros_like(value)) for name, value in stacked.items()}


@pytest.mark.parametrize("name", MODULES)
def test_a_module_on_a_tape_computes_what_autograd_does(name):
    torch.manual_seed(0)
    modules = [randomized(MODULES[name](), number) for number in range(3)]
    x, tape = torch.randn(3, 4, 7, dtype=torch.double), Tape(learns=True)
    parameters, given = parameters_on_tape(modules), Node(x.clone(), torch.zeros_like(x))
    out = put_module(tape, modules[0], parameters, given)
    weights = torch.randn_like(out.value)
    tape.add_backward(lambda: out.grad.copy_(weights))
    for _ in range(2):  # the second run finds the memory as the first has left it
        tape.run()
        tape.run_backward()
    inputs = x.transpose(1, 2).clone().requires_grad_()
    expected = torch.stack([module(own) for module, own in zip(modules, inputs, strict=True)]).transpose(1, 2)
    torch.testing.assert_close(out.value, expected.detach())
    leaves = [inputs, *(module.get_parameter(key) for key in parameters for module in modules)]
    of_inputs, *others = torch.autograd.grad((expected * weights).sum(), leaves)
    torch.testing.assert_close(given.grad, of_inputs.transpose(1, 2))
    for index, node in enumerate(parameters.values()):
        torch.testing.assert_close(node.grad, torch.stack(others[3 * index : 3 * index + 3]))


@pytest.mark.parametrize("name", MODULES)
def test_without_learning_nothing_but_the_output_is_computed(name):
    modules = [randomized(MODULES[name](), number) for number in range(2)]
    tape, x = Tape(learns=False), torch.randn(2, 4, 3, dtype=torch.double)
    parameters = {key: Node(node.value) for key, node in parameters_on_tape(modules).items()}
    out = put_module(tape, modules[0], parameters, Node(x))
    tape.run()
    expected = torch.stack([module(own.T).T for module, own in zip(modules, x, strict=True)])
    torch.testing.assert_close(out.value, expected.detach())
    assert out.memory is None


def test_rows_that_are_taken_add_to_the_gradient_of_all():
    tape, x = Tape(learns=True), Node(torch.arange(12.0).view(3, 2, 2), torch.ones(3, 2, 2))
    out = take(tape, x, torch.tensor([2, 0, 2]))
    tape.run()
    assert torch.equal(out.value, x.value[[2, 0, 2]])
    out.grad.copy_(torch.tensor([1.0, 10.0, 100.0]).view(3, 1, 1).expand(3, 2, 2))
    tape.run_backward()
    assert x.grad[:, 0, 0].tolist() == [11.0, 1.0, 102.0]


class Subclass(nn.Linear):
    def forward(self, input):
        return 2 * super().forward(input)


def test_only_modules_that_do_nothing_else_are_known():
    hooked = nn.Linear(2, 2)
    hooked.register_forward_hook(lambda *_: None)
    unknown = [Subclass(2, 2), nn.SiLU(), nn.LayerNorm([2, 2]), Gate(SlotShape("conv", 2, dims=2)), hooked]
    for module in unknown:
        assert not is_known(module)
        assert not is_known(nn.Sequential(nn.Linear(2, 2), module))
    assert is_known(nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.GELU())))
