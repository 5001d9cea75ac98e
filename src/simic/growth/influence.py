"""What influences what inside a host, measured by gradients: which outputs are used, and which way positions look."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from simic.growth.example import ExampleInput, call, first_tensor, map_tensors, tensors, with_first_tensor
from simic.growth.incubation import constant_but
from simic.growth.isolation import evaluating, preserve_state


def used_outputs(model: nn.Module, example_input: ExampleInput) -> set[str] | None:
    """Names of the submodules whose output the host's output depends on; None where gradients cannot tell."""
    probes: dict[str, list[Tensor]] = {}

    def add_probe(name: str, tensor: Tensor) -> Tensor:
        probe = tensor.new_zeros((), requires_grad=True)
        probes.setdefault(name, []).append(probe)
        return tensor + probe

    result = _differentiable_pass(model, example_input, add_probe)
    outputs = [tensor for tensor in tensors(result) if tensor.requires_grad]
    if not outputs:
        return None
    flat = [(name, probe) for name, parts in probes.items() for probe in parts]
    # Unused rather than zero is asked for: a head that is zero at birth will use its input soon.
    gradients = _gradients(outputs, [probe for _, probe in flat])
    return {name for (name, _), gradient in zip(flat, gradients, strict=True) if gradient is not None}


def directions(
    model: nn.Module, slots: Mapping[str, tuple[int, int]], example_input: ExampleInput
) -> dict[str, set[str]]:
    """Whether the host looks "ahead" or "back" along each slot; `slots` gives its dimensions of batch and position.

    A host looks ahead if everything that the slot is made from reaches its first position from later ones too (true of
    a bidirectional encoder, not of a decoder that attends to an encoder), or if the slot's own later positions reach
    the first position of a sequence behind it. Looking back is the same from the other end.
    """
    sources: list[Tensor] = []
    behind: list[Tensor] = []
    inside: dict[str, Tensor] = {}
    probes: dict[str, Tensor] = {}

    def add_probe(name: str, tensor: Tensor) -> Tensor:
        if tensor.dim() != 3:
            return tensor
        # Parameters are constants here: without a gradient, nothing before this tensor has a probe.
        is_source, is_slot = not tensor.requires_grad, name in slots and name not in probes
        probe = torch.zeros_like(tensor, requires_grad=True)
        if is_slot:
            inside[name], probes[name] = tensor, probe
        if is_source:
            sources.append(probe)
        behind.append(tensor + probe if is_slot or is_source else tensor)
        return behind[-1]

    def as_source(_: str, tensor: Tensor) -> Tensor:
        if tensor.dim() != 3 or not tensor.is_floating_point():
            return tensor
        sources.append(tensor.detach().clone().requires_grad_())
        return sources[-1]

    result = _differentiable_pass(model, map_tensors(example_input, as_source), add_probe)
    behind += [tensor for tensor in tensors(result) if tensor.dim() == 3 and tensor.is_floating_point()]
    found: dict[str, set[str]] = {name: set() for name in slots}
    for name, tensor in inside.items():
        batch, position = slots[name]
        made_from = [source for source in sources if _same_positions(source, tensor, batch, position)]
        leads_to = [made for made in behind if _same_positions(made, tensor, batch, position)]
        # Positions may be made on the way, from patches of a picture for instance: the first such tensor counts then.
        made_from = made_from or leads_to[:1]
        for direction in ("ahead", "back") if tensor.shape[position] > 1 and not tensor.is_meta else ():
            if _all_reach(made_from, tensor, position, direction) or any(
                _reaches(probes[name], end, position, direction) for end in leads_to[-2:]
            ):
                found[name].add(direction)
    return found


def _all_reach(sources: Sequence[Tensor], tensor: Tensor, position: int, direction: str) -> bool:
    """Whether a tensor has sources, and its end depends on other positions of each one that it depends on."""
    gradients = _gradients([_end(tensor, position, direction)], sources) if tensor.requires_grad else []
    used = [gradient for gradient in gradients if gradient is not None and gradient.count_nonzero()]
    return bool(used) and all(_beyond_end(gradient, position, direction) for gradient in used)


def _reaches(probe: Tensor, tensor: Tensor, position: int, direction: str) -> bool:
    (gradient,) = _gradients([_end(tensor, position, direction)], [probe])
    return gradient is not None and _beyond_end(gradient, position, direction)


def _end(tensor: Tensor, position: int, direction: str) -> Tensor:
    """The first position, from which a host can only look ahead, or the last, from which it can only look back."""
    return tensor.select(position, 0 if direction == "ahead" else tensor.shape[position] - 1)


def _beyond_end(gradient: Tensor, position: int, direction: str) -> bool:
    others = gradient.narrow(position, 1 if direction == "ahead" else 0, gradient.shape[position] - 1)
    return bool(others.nan_to_num().count_nonzero())


def _same_positions(tensor: Tensor, like: Tensor, batch: int, position: int) -> bool:
    same_length = tensor.shape[position] == like.shape[position]
    return tensor.requires_grad and same_length and tensor.shape[batch] in (1, like.shape[batch])


def _gradients(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """Gradients of a random projection, so that no symmetry of the outputs cancels them."""
    if not inputs:
        return []
    generator = torch.Generator().manual_seed(0)
    projection = sum((output * torch.randn(output.shape, generator=generator).to(output)).sum() for output in outputs)
    assert isinstance(projection, Tensor)
    with plain_kernels():
        return torch.autograd.grad(projection, inputs, retain_graph=True, allow_unused=True)


def _differentiable_pass(model: nn.Module, example_input: Any, change: Any) -> Any:
    """The host's output in evaluation mode, with every submodule's first float tensor changed on the way.

    Gradients flow from what `change` adds only. None where the host cannot run like this.
    """

    def hook_for(name: str) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Any) -> Any:
            tensor = first_tensor(output)
            if tensor is None or not tensor.is_floating_point() or not torch.is_grad_enabled():
                return output
            return with_first_tensor(output, change(name, tensor))

        return hook

    handles = [module.register_forward_hook(hook_for(name)) for name, module in model.named_modules() if name]
    try:
        with ExitStack() as stack:
            for context in (
                preserve_state(model),
                evaluating(model),
                constant_but(model, nn.Module()),
                plain_kernels(),
            ):
                stack.enter_context(context)
            stack.enter_context(torch.enable_grad())
            return call(model, example_input)
    except Exception:  # the plain pass went well: a host that gradients cannot be sent through is not measured
        return None
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def plain_kernels() -> Iterator[None]:
    """Without torch's fused inference path, which skips submodules, and cuDNN, which needs training mode."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.backends.cudnn.flags(enabled=False):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
