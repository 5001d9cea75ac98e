"""Gradient measurements inside a host: which submodules affect its output, and in which direction positions depend.

Probes (zeros with a gradient) are added to activations; what an output depends on shows in the probes' gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from simic.growth.example import (
    ExampleInput,
    call,
    first_tensor,
    hook_submodules,
    map_tensors,
    tensors,
    with_first_tensor,
)
from simic.growth.isolation import evaluating, freeze_all_but, plain_kernels, preserve_state


def used_outputs(model: nn.Module, example_input: ExampleInput) -> set[str] | None:
    """Names of the submodules whose output the host's output depends on; None if gradients cannot be computed."""
    probes: list[tuple[str, Tensor]] = []

    def add_probe(name: str, tensor: Tensor) -> Tensor:
        probes.append((name, tensor.new_zeros((), requires_grad=True)))
        return tensor + probes[-1][1]

    result = _differentiable_pass(model, example_input, add_probe)
    outputs = [tensor for tensor in tensors(result) if tensor.requires_grad]
    if not outputs:
        return None
    gradients = _gradients(outputs, [probe for _, probe in probes])
    # None (not in the graph) rather than zero: a head with zero weights at birth still uses its input.
    return {name for (name, _), gradient in zip(probes, gradients, strict=True) if gradient is not None}


def directions(
    model: nn.Module,
    slots: Mapping[str, tuple[int, int]],
    example_input: ExampleInput,
    doubted: Collection[str] = (),
) -> dict[str, set[str]]:
    """Whether positions of each slot depend on later ("ahead") or earlier ("back") ones.

    `slots` gives each slot's batch and position dimensions. For "ahead", the slot's first position is examined:

        sources (N, L, *)  ->  slot (N, L, C)  ->  sequences behind it (N, L, *)

    Either the slot's first position depends on later positions of every source it uses (a bidirectional encoder does, a
    decoder with cross-attention does not), or the first position behind the slot depends on later positions of the
    slot. "back" examines the last position in the same way. Of slots that are `doubted`, "silent" tells that the first
    position depends on nothing, as where all its units are dead, so that nothing is known about "ahead".
    """
    sources: list[Tensor] = []
    behind: list[Tensor] = []
    inside: dict[str, Tensor] = {}
    probes: dict[str, Tensor] = {}

    def add_probe(name: str, tensor: Tensor) -> Tensor:
        if tensor.dim() != 3:
            return tensor
        # All parameters are frozen: a tensor without a gradient has no probe before it, so it is a source.
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
    for names in _alike(inside, slots):
        (batch, position), like = slots[names[0]], inside[names[0]]
        made_from = [source for source in sources if _same_positions(source, like, batch, position)]
        leads_to = [made for made in behind if _same_positions(made, like, batch, position)]
        # Positions may be created inside the host, for instance from image patches: then the first such tensor counts.
        made_from = made_from or leads_to[:1]
        for direction in ("ahead", "back") if like.shape[position] > 1 and not like.is_meta else ():
            reaching = {name for end in leads_to[-2:] for name in _reach_end(names, probes, end, position, direction)}
            rest = [name for name in names if name not in reaching and inside[name].requires_grad]
            from_sources = _FromSources(made_from, inside, probes, position, direction)
            from_sources.search(rest, 0, len(rest))
            for name in reaching | from_sources.found:
                found[name].add(direction)
        for name in (own for own in names if own in doubted):
            found[name] |= {"silent"} if _is_silent(_end(inside[name], position, "ahead"), made_from) else set()
    return found


def _is_silent(tensor: Tensor, sources: Sequence[Tensor]) -> bool:
    """Whether a tensor depends on none of the sources."""
    gradients = _gradients([tensor], sources) if tensor.requires_grad else ()
    return not any(gradient is not None and gradient.count_nonzero() for gradient in gradients)


def _alike(inside: Mapping[str, Tensor], slots: Mapping[str, tuple[int, int]]) -> list[list[str]]:
    """Slots grouped by batch, position and their sizes: those of one group share sources and what lies behind."""
    groups: dict[tuple, list[str]] = {}
    for name, tensor in inside.items():
        dims = slots[name]
        groups.setdefault((dims, *(tensor.shape[dim] for dim in dims)), []).append(name)
    return list(groups.values())


def _reach_end(
    names: Sequence[str], probes: Mapping[str, Tensor], end: Tensor, position: int, direction: str
) -> list[str]:
    """Slots with other positions on which the end of a tensor behind them depends; one backward pass for all."""
    gradients = _gradients([_end(end, position, direction)], [probes[name] for name in names])
    return [
        name
        for name, gradient in zip(names, gradients, strict=True)
        if gradient is not None and _beyond_end(gradient, position, direction)
    ]


class _FromSources:
    """Finds slots whose end depends on other positions of each source that it depends on at all.

    Of hundreds of slots often none does, which one backward pass of all of them shows; else halves are examined. From a
    slot that does, the next one often inherits it, which a pass between the two shows.
    """

    def __init__(
        self,
        sources: Sequence[Tensor],
        inside: Mapping[str, Tensor],
        probes: Mapping[str, Tensor],
        position: int,
        direction: str,
    ) -> None:
        self.sources, self.inside, self.probes = sources, inside, probes
        self.position, self.direction = position, direction
        self.found: set[str] = set()

    def search(self, names: Sequence[str], start: int, stop: int) -> None:
        """Add the slots that qualify among names[start:stop] to `found`; in a row, also those that follow."""
        wanted = [name for name in names[start:stop] if name not in self.found]
        if not wanted:
            return
        gradients = _gradients([self._end(name) for name in wanted], self.sources)
        used = [gradient for gradient in gradients if gradient is not None and gradient.count_nonzero()]
        beyond = [_beyond_end(gradient, self.position, self.direction) for gradient in used]
        if not any(beyond):
            return
        if stop - start > 1:
            middle = (start + stop) // 2
            self.search(names, start, middle)
            self.search(names, middle, stop)
        elif all(beyond):
            self.found.add(names[start])
            if len(used) == len(self.sources):  # no later slot can use another source
                self._follow(names[start:])

    def _follow(self, names: Sequence[str]) -> None:
        for before, name in pairwise(names):
            (gradient,) = _gradients([self._end(name)], [self.probes[before]])
            if gradient is None or not _end(gradient, self.position, self.direction).count_nonzero():
                return
            self.found.add(name)

    def _end(self, name: str) -> Tensor:
        return _end(self.inside[name], self.position, self.direction)


def _end(tensor: Tensor, position: int, direction: str) -> Tensor:
    """The first position, which can only depend on later ones, or the last, which can only depend on earlier ones."""
    return tensor.select(position, 0 if direction == "ahead" else tensor.shape[position] - 1)


def _beyond_end(gradient: Tensor, position: int, direction: str) -> bool:
    others = gradient.narrow(position, 1 if direction == "ahead" else 0, gradient.shape[position] - 1)
    return bool(others.nan_to_num().count_nonzero())


def _same_positions(tensor: Tensor, like: Tensor, batch: int, position: int) -> bool:
    same_length = tensor.shape[position] == like.shape[position]
    return tensor.requires_grad and same_length and tensor.shape[batch] in (1, like.shape[batch])


def _gradients(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """Gradients of a random projection of the outputs; a plain sum could cancel, as behind a softmax."""
    if not inputs:
        return []
    generator = torch.Generator().manual_seed(0)
    projection = sum((output * torch.randn(output.shape, generator=generator).to(output)).sum() for output in outputs)
    assert isinstance(projection, Tensor)
    with plain_kernels():
        return torch.autograd.grad(projection, inputs, retain_graph=True, allow_unused=True)


def _differentiable_pass(model: nn.Module, example_input: Any, change: Callable[[str, Tensor], Tensor]) -> Any:
    """The host's output in evaluation mode with every submodule's first float tensor replaced by `change(name, it)`.

    Gradients flow only from what `change` adds. None if the host cannot run like this.
    """

    def hook(name: str, _module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> Any:
        tensor = first_tensor(output)
        if tensor is None or not tensor.is_floating_point() or not torch.is_grad_enabled():
            return output
        return with_first_tensor(output, change(name, tensor))

    try:
        unchanged = (preserve_state(model), evaluating(model), freeze_all_but(model), plain_kernels())
        with hook_submodules(model, hook), ExitStack() as stack:
            for context in (*unchanged, torch.enable_grad()):
                stack.enter_context(context)
            return call(model, example_input)
    except Exception:  # the plain pass has succeeded: the host just does not support gradients
        return None
