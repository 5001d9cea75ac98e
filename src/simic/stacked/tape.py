"""Layers on features as flat lists of kernel calls, forward and backward, with all memory allocated beforehand.

Shapes: N networks, C features, B samples. Activations are (N, C, B), samples last (see `feature_layers`).

Hosts of a few hundred parameters spend most of their time in what surrounds a kernel: autograd's graph, views, new
memory. A `Tape` has none of it. Each function below allocates the memory of its result once and adds its calls, bound
to that memory, to the tape. A linear layer and a GELU become

    forward     baddbmm(bias, weight, x, out=h)        gelu(h, out=y)
    backward    gelu_backward(dy, h, out=dh)           sum(dh, out=dbias)  bmm(dh, x^T, out=dweight)  bmm(.., out=dx)

and a training step is nothing but these calls in order. An activation has one reader, which writes its gradient; those
who read rows of it besides (`take`) add to the gradient afterwards, so they come first on the tape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from simic.growth.branch_layers import Gate, GatedLinear, Scale
from simic.stacked.layers import is_customized

Call = Callable[[], Any]
aten = torch.ops.aten


class Node(NamedTuple):
    """A tensor and the memory of its gradient, if it needs one."""

    value: Tensor
    memory: Tensor | None = None

    @property
    def grad(self) -> Tensor:
        """The gradient."""
        assert self.memory is not None, "a node without gradient"
        return self.memory


Nodes = Mapping[str, Node]
"""Stacked parameters by name."""


@dataclass
class Tape:
    """Kernel calls of a pass; without `learns` there is no backward pass."""

    learns: bool
    _forward: list[Call] = field(default_factory=list)
    _backward: list[list[Call]] = field(default_factory=list)

    def add(self, *calls: Call) -> None:
        """Calls of the forward pass."""
        self._forward += calls

    def add_backward(self, *calls: Call) -> None:
        """Calls of the backward pass of what was added last; it runs before that of everything added earlier."""
        self._backward.append([*calls])

    def node(self, *shape: int, like: Tensor) -> Node:
        """Memory for a result and its gradient."""
        value = like.new_empty(shape)
        return Node(value, torch.empty_like(value) if self.learns else None)

    def node_over(self, x: Node) -> Node:
        """Memory for a result of the shape of x. Gradients share theirs: that of the result turns into that of x."""
        value = torch.empty_like(x.value)
        return Node(value, torch.empty_like(value) if self.learns and x.memory is None else x.memory)

    def run(self) -> None:
        """The forward pass."""
        for call in self._forward:
            call()

    def run_backward(self) -> None:
        """The backward pass."""
        for calls in reversed(self._backward):
            for call in calls:
                call()


# Modules.


def is_known(module: nn.Module) -> bool:
    """Whether a module on features can be put on a tape."""
    if type(module) not in MODULES or is_customized(module):
        return False
    if type(module) is nn.LayerNorm and len(module.normalized_shape) != 1:
        return False
    if type(module) is Gate and module.spatial_dims:
        return False
    return all(is_known(child) for child in module.children())


def put_module(tape: Tape, module: nn.Module, parameters: Nodes, x: Node) -> Node:
    """The outputs of N networks with the structure of `module`, each with its own parameters and inputs."""
    return MODULES[type(module)](tape, module, parameters, x)


def part_of(parameters: Nodes, name: str) -> Nodes:
    """The parameters of a child module, under the names the child uses."""
    return {key[len(name) + 1 :]: value for key, value in parameters.items() if key.startswith(name + ".")}


def _sequential(tape: Tape, module: nn.Sequential, parameters: Nodes, x: Node) -> Node:
    for name, child in module.named_children():
        x = put_module(tape, child, part_of(parameters, name), x)
    return x


def _linear(tape: Tape, module: nn.Linear, parameters: Nodes, x: Node) -> Node:
    weight, bias = parameters["weight"], parameters.get("bias")
    out = tape.node(len(x.value), module.out_features, x.value.shape[2], like=x.value)
    if bias is None:
        tape.add(partial(torch.bmm, weight.value, x.value, out=out.value))
    else:
        tape.add(partial(torch.baddbmm, bias.value.unsqueeze(2), weight.value, x.value, out=out.value))
    if tape.learns:
        calls = [partial(torch.bmm, out.grad, x.value.transpose(1, 2), out=weight.grad)]
        if bias is not None:
            calls.append(partial(torch.sum, out.grad, 2, out=bias.grad))
        if x.memory is not None:
            calls.append(partial(torch.bmm, weight.value.transpose(1, 2), out.grad, out=x.grad))
        tape.add_backward(*calls)
    return out


def _layer_norm(tape: Tape, module: nn.LayerNorm, parameters: Nodes, x: Node) -> Node:
    n, _, samples = x.value.shape
    normal, product = tape.node_over(x), torch.empty_like(x.value)
    mean, inverse = (x.value.new_empty(n, 1, samples) for _ in range(2))
    tape.add(
        partial(torch.mean, x.value, 1, keepdim=True, out=mean),
        partial(torch.sub, x.value, mean, out=normal.value),
        partial(torch.mul, normal.value, normal.value, out=product),
        partial(torch.mean, product, 1, keepdim=True, out=inverse),
        partial(inverse.add_, module.eps),
        inverse.rsqrt_,
        partial(normal.value.mul_, inverse),
    )
    if x.memory is not None:
        tape.add_backward(
            partial(torch.mul, x.grad, normal.value, out=product),
            partial(torch.mean, product, 1, keepdim=True, out=mean),
            partial(torch.addcmul, x.grad, normal.value, mean, value=-1.0, out=product),
            partial(torch.mean, x.grad, 1, keepdim=True, out=mean),
            partial(product.sub_, mean),
            partial(torch.mul, product, inverse, out=x.grad),
        )
    return _affine(tape, parameters, normal, product) if "weight" in parameters else normal


def _affine(tape: Tape, parameters: Nodes, x: Node, product: Tensor) -> Node:
    """Times a weight, plus a bias, per feature; the memory of `product` is free for use."""
    weight, bias, out = parameters["weight"], parameters.get("bias"), tape.node_over(x)
    factor = weight.value.unsqueeze(2)
    if bias is None:
        tape.add(partial(torch.mul, x.value, factor, out=out.value))
    else:
        tape.add(partial(torch.addcmul, bias.value.unsqueeze(2), x.value, factor, out=out.value))
    if tape.learns:
        tape.add_backward(
            partial(torch.mul, out.grad, x.value, out=product),
            partial(torch.sum, product, 2, out=weight.grad),
            *(() if bias is None else (partial(torch.sum, out.grad, 2, out=bias.grad),)),
            partial(out.grad.mul_, factor),
        )
    return out


def _scale(tape: Tape, module: Scale, parameters: Nodes, x: Node) -> Node:
    factor, out = parameters["factor"], tape.node_over(x)
    spread = factor.value.unsqueeze(2)
    tape.add(partial(torch.mul, x.value, spread, out=out.value))
    if tape.learns:
        product = torch.empty_like(x.value)
        tape.add_backward(
            partial(torch.mul, out.grad, x.value, out=product),
            partial(torch.sum, product.flatten(1), 1, keepdim=True, out=factor.grad),
            partial(out.grad.mul_, spread),
        )
    return out


def _gelu(tape: Tape, module: nn.GELU, parameters: Nodes, x: Node) -> Node:
    how, out = {"approximate": module.approximate}, tape.node_over(x)
    tape.add(partial(aten.gelu.out, x.value, **how, out=out.value))
    if x.memory is not None:
        tape.add_backward(partial(aten.gelu_backward.grad_input, out.grad, x.value, **how, grad_input=x.grad))
    return out


def _relu(tape: Tape, module: nn.ReLU, parameters: Nodes, x: Node) -> Node:
    out = tape.node_over(x)
    tape.add(partial(torch.clamp_min, x.value, 0.0, out=out.value))
    if x.memory is not None:
        tape.add_backward(partial(aten.threshold_backward.grad_input, out.grad, x.value, 0.0, grad_input=x.grad))
    return out


def _tanh(tape: Tape, module: nn.Tanh, parameters: Nodes, x: Node) -> Node:
    out = tape.node_over(x)
    tape.add(partial(torch.tanh, x.value, out=out.value))
    if x.memory is not None:
        tape.add_backward(partial(aten.tanh_backward.grad_input, out.grad, out.value, grad_input=x.grad))
    return out


def _sigmoid(tape: Tape, x: Node) -> Node:
    out = tape.node_over(x)
    tape.add(partial(torch.sigmoid, x.value, out=out.value))
    if x.memory is not None:
        tape.add_backward(partial(aten.sigmoid_backward.grad_input, out.grad, out.value, grad_input=x.grad))
    return out


def _gate(tape: Tape, module: Gate, parameters: Nodes, x: Node) -> Node:
    return _sigmoid(tape, _linear(tape, module.linear, part_of(parameters, "linear"), x))


def _gated_linear(tape: Tape, module: GatedLinear, parameters: Nodes, x: Node) -> Node:
    # The input has two readers: the second one's gradient is added after the first one has written its own.
    second = Node(x.value, None if x.memory is None else torch.empty_like(x.value))
    if x.memory is not None:
        tape.add_backward(partial(x.grad.add_, second.grad))
    value = _linear(tape, module.value, part_of(parameters, "value"), x)
    opened = _sigmoid(tape, _linear(tape, module.gate, part_of(parameters, "gate"), second))
    product = tape.node_over(value)
    tape.add(partial(torch.mul, value.value, opened.value, out=product.value))
    if tape.learns:
        tape.add_backward(
            partial(torch.mul, product.grad, value.value, out=opened.grad),
            partial(product.grad.mul_, opened.value),
        )
    return _linear(tape, module.out, part_of(parameters, "out"), product)


MODULES: dict[type[nn.Module], Callable[[Tape, Any, Nodes, Node], Node]] = {
    nn.Sequential: _sequential,
    nn.Linear: _linear,
    nn.LayerNorm: _layer_norm,
    nn.GELU: _gelu,
    nn.ReLU: _relu,
    nn.Tanh: _tanh,
    Gate: _gate,
    GatedLinear: _gated_linear,
    Scale: _scale,
}


# Rows, and the loss.


def take(tape: Tape, x: Node, rows: Tensor) -> Node:
    """Some rows of an activation; their gradient is added to that of the activation."""
    out = tape.node(len(rows), *x.value.shape[1:], like=x.value)
    tape.add(partial(torch.index_select, x.value, 0, rows, out=out.value))
    if x.memory is not None:
        tape.add_backward(partial(x.grad.index_add_, 0, rows, out.grad))
    return out
