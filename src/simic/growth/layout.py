"""Which dimension of an activation is the batch and which holds the features: known or measured, never guessed.

The feature dimension is known where one of torch's layers produces or consumes the very tensor: a Linear acts on the
last dimension, a convolution on dimension 1. Otherwise the host runs on longer and shorter inputs: dimensions whose
size follows are positions, and the one that stays holds the features. The batch dimension is measured by changing one
sample of the input and looking where an activation changes:

    input (N, L, F), sample 0 changed   activation (N, L, C) changes at index 0 of dimension 0 only: that is the batch
    input (L, N, F), step 0 changed     a recurrent layer changes at all later steps: dimension 0 is not the batch
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from simic.growth.example import (
    ExampleInput,
    call,
    first_tensor,
    hook_submodules,
    is_data,
    main_tensor,
    map_tensors,
    other_values,
)
from simic.growth.isolation import evaluating, plain_kernels, preserve_state
from simic.growth.slot_patterns import is_linear

_FEATURES_LAST = (
    *(nn.Bilinear, nn.Embedding, nn.RNNBase, nn.MultiheadAttention),
    *(nn.TransformerEncoderLayer, nn.TransformerDecoderLayer),
)
_CHANNEL_LAYERS = ("Conv", "ConvTranspose", "BatchNorm", "InstanceNorm")
_POOLS = ("MaxPool", "AvgPool", "AdaptiveAvgPool", "AdaptiveMaxPool")
# Layers with channels in dimension 1, by rank of the activation. One-dimensional pools also run on (N, L, C).
_FEATURES_SECOND: dict[int, tuple[type[nn.Module], ...]] = {
    rank: (nn.GroupNorm, *(getattr(nn, f"{kind}{rank - 2}d") for kind in kinds))
    for rank, kinds in ((3, _CHANNEL_LAYERS), (4, _CHANNEL_LAYERS + _POOLS), (5, _CHANNEL_LAYERS + _POOLS))
}
_ELEMENTWISE = ("torch.nn.modules.activation", "torch.nn.modules.dropout")


@dataclass(frozen=True)
class Call:
    """One call of a submodule in a traced pass."""

    name: str
    module: nn.Module
    arguments: dict[int | str, Tensor]
    """The tensors among the arguments, by position or keyword."""
    output: Any
    overwrites_input: bool = False

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The tensors among the arguments."""
        return tuple(self.arguments.values())

    @property
    def tensor(self) -> Tensor | None:
        """The first tensor of the output."""
        return first_tensor(self.output)

    @property
    def touched(self) -> list[Tensor]:
        """Inputs and output."""
        return [*self.inputs, *([] if self.tensor is None else [self.tensor])]


@dataclass(frozen=True)
class Layout:
    """The batch and the feature dimension of an activation; all others are positions."""

    batch: int
    features: int


class UnknownLayoutError(Exception):
    """Neither layers nor measurements determine a layout."""


def trace(model: nn.Module, example_input: ExampleInput, calls: list[Call]) -> Any:
    """One pass in evaluation mode; submodule calls are appended to `calls`, also those before a failure."""

    before: dict[str, list[list[int]]] = {}

    def note_versions(name: str, _module: nn.Module, args: Any, kwargs: Any) -> None:
        versions = [tensor._version for tensor in tensor_arguments(args, kwargs).values()]
        before.setdefault(name, []).append(versions)

    def record(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        arguments = tensor_arguments(args, kwargs)
        overwrites = before[name].pop() != [tensor._version for tensor in arguments.values()]
        calls.append(Call(name, module, arguments, output, overwrites))

    with hook_submodules(model, record, note_versions), preserve_state(model), evaluating(model), plain_kernels():
        return call(model, example_input)


def tensor_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int | str, Tensor]:
    """The tensors among the arguments of a call, by position or keyword."""
    every: dict[int | str, Any] = {**dict(enumerate(args)), **kwargs}
    return {key: value for key, value in every.items() if isinstance(value, Tensor)}


class LayoutFinder:
    """Finds the layouts of a host's activations; measuring passes run only when they are needed."""

    def __init__(self, model: nn.Module, example_input: ExampleInput, calls: list[Call]) -> None:
        self.model, self.example_input, self.calls = model, example_input, calls

    def layout(self, name: str, tensor: Tensor) -> Layout:
        """The layout of a submodule's output, or UnknownLayoutError."""
        if tensor.dim() == 2:
            return Layout(0, 1)
        by_layers = self._features_by_layer.get(id(tensor), set())
        if by_layers == {1}:  # layers with channels in dimension 1 have the batch in dimension 0
            return Layout(0, 1)
        batch = self.batch(name, tensor)
        if len(by_layers) != 1:
            positions = self._variable_dims.get(name, set()) - {batch}
            by_layers = set(range(tensor.dim())) - positions - {batch}
            if not positions or len(by_layers) != 1:
                raise UnknownLayoutError
        (features,) = by_layers
        if features == batch:
            raise UnknownLayoutError
        return Layout(batch, features)

    def known_features(self, tensor: Tensor) -> set[int]:
        """Feature dimensions of a tensor by the layers that touch it, else by the layout of the output that it is."""
        if known := self._features_by_layer.get(id(tensor)):
            return known
        source = next((made for made in self.calls if made.tensor is tensor), None)
        try:
            return set() if source is None else {self.layout(source.name, tensor).features}
        except UnknownLayoutError:
            return set()

    def batch(self, name: str, tensor: Tensor) -> int:
        """The batch dimension of a submodule's output, or UnknownLayoutError."""
        measured = self._measured_batch[0].get(name)
        if measured is not None and len(measured) == 1:
            return next(iter(measured))
        by_layers = {
            0 if batch_first else 1
            for made in self.calls
            if made.tensor is tensor and (batch_first := _batch_first(made.module)) is not None
        }
        if len(by_layers) == 1:
            return by_layers.pop()
        # Without a measurement and without a layer that has the batch elsewhere, torch's convention holds.
        if measured is not None or any(_batch_first(module) is False for module in self.model.modules()):
            raise UnknownLayoutError
        return 0

    @cached_property
    def _features_by_layer(self) -> dict[int, set[int]]:
        """Feature dimensions of tensors, by id, according to the layers that touch them."""
        found: dict[int, set[int]] = {}
        for made in self.calls:
            for tensor in made.touched:
                if (dim := _feature_dim(made.module, tensor)) is not None:
                    found.setdefault(id(tensor), set()).add(dim)
        # What is known on one side of an activation function or dropout holds on the other side too.
        for made in (*self.calls, *reversed(self.calls)):
            if _is_elementwise(made):
                touched = [id(tensor) for tensor in made.touched]
                known = set().union(*(found.get(key, set()) for key in touched))
                found |= {key: found.get(key, set()) | known for key in touched}
        return found

    @cached_property
    def _measured_batch(self) -> tuple[dict[str, set[int]], int]:
        """Candidates for the batch dimension of each submodule's output, and the batch dimension of the input."""
        first = self._vary_sample(0)
        if first is None:
            return {}, 0
        if first[1]:  # samples mix along the input's dimension 0, so the batch may be dimension 1
            second = self._vary_sample(1)
            if second is None:
                return {}, 0
            if not second[1]:
                return second[0], 1
        return first[0], 0

    def _vary_sample(self, dim: int) -> tuple[dict[str, set[int]], bool] | None:
        """Where changes of single samples along an input's dimension show, and whether samples mix."""
        main = main_tensor(self.example_input)
        if main is None or main.dim() <= dim or main.is_meta:
            return None
        size = main.shape[dim]
        for samples in (2, size) if size > 2 else (2,):
            base = _with_samples(self.example_input, dim, size, samples)
            changed = [_with_changed_sample(base, dim, samples, index) for index in (0, samples - 1)]
            runs = [self._run(example) for example in (base, *changed)]
            if all(complete for _, complete in runs):
                before, *after = [calls for calls, _ in runs]
                return _batch_candidates(before, after, samples)
        return None

    @cached_property
    def _variable_dims(self) -> dict[str, set[int]]:
        """Dimensions of each submodule's output whose size changes with that of some input dimension but the batch."""
        main, variable = main_tensor(self.example_input), {}
        if main is None:
            return variable
        shapes = _first_shapes(self.calls)
        batch = self._measured_batch[1]
        for dim in range(main.dim()):
            for factor in (2, 0.5):
                if dim == batch or main.shape[dim] * factor < 1:
                    continue
                calls, complete = self._run(_resized(self.example_input, main, dim, batch, factor))
                for name, shape in _first_shapes(calls if complete else _after_first_weights(calls)).items():
                    if len(shape) == len(shapes.get(name, ())):
                        changed = {d for d, size in enumerate(shape) if size != shapes[name][d]}
                        variable.setdefault(name, set()).update(changed)
        return variable

    def _run(self, example: Any) -> tuple[list[Call], bool]:
        """The calls of a pass, and whether it was complete: a host may accept one size only."""
        calls: list[Call] = []
        try:
            trace(self.model, example, calls)
        except Exception:
            return calls, False
        return calls, True


def _feature_dim(module: nn.Module, tensor: Tensor) -> int | None:
    if not tensor.is_floating_point() or tensor.dim() < 2:
        return None
    if isinstance(module, _FEATURES_SECOND.get(tensor.dim(), ())):
        return 1
    is_norm = isinstance(module, (nn.LayerNorm, nn.RMSNorm)) and len(module.normalized_shape) == 1
    return tensor.dim() - 1 if is_norm or is_linear(module) or isinstance(module, _FEATURES_LAST) else None


def _is_elementwise(made: Call) -> bool:
    known = type(made.module).__module__ in _ELEMENTWISE or isinstance(made.module, nn.Identity)
    same_shape = made.tensor is not None and [x.shape for x in made.inputs] == [made.tensor.shape]
    return known and same_shape and not isinstance(made.module, nn.MultiheadAttention)


def _batch_first(module: nn.Module) -> bool | None:
    own = getattr(module, "batch_first", None)
    own = getattr(getattr(module, "self_attn", None), "batch_first", None) if own is None else own
    return own if isinstance(own, bool) else None


def _with_samples(example: Any, dim: int, size: int, samples: int) -> Any:
    """The example with `samples` of its samples; a single one is doubled."""

    def change(_: str, tensor: Tensor) -> Tensor:
        if tensor.dim() <= dim or tensor.shape[dim] != size:
            return tensor
        return torch.cat([tensor, tensor], dim) if size == 1 else tensor.narrow(dim, 0, samples)

    return map_tensors(example, change)


def _with_changed_sample(example: Any, dim: int, samples: int, index: int) -> Any:
    """The example with other values in one sample."""

    def change(name: str, tensor: Tensor) -> Tensor:
        if not is_data(name, tensor) or tensor.dim() <= dim or tensor.shape[dim] != samples:
            return tensor
        tensor, other = tensor.clone(), other_values(tensor)
        tensor.select(dim, index).copy_(other.select(dim, index))
        return tensor

    return map_tensors(example, change)


def _batch_candidates(before: list[Call], after: list[list[Call]], samples: int) -> tuple[dict[str, set[int]], bool]:
    """Dimensions along which each change stays within one sample, by submodule; and whether some output has none."""
    batch: dict[str, set[int]] = {}
    mixes = False
    for made, *others in zip(before, *after, strict=False):
        if made.tensor is None or not made.tensor.is_floating_point() or made.tensor.dim() < 2:
            continue
        dims = set(range(made.tensor.dim()))
        for other, index in zip(others, (0, samples - 1), strict=True):
            if other.name == made.name and other.tensor is not None and other.tensor.shape == made.tensor.shape:
                dims &= _confined_dims(made.tensor, other.tensor, samples, index)
        mixes |= not dims
        batch.setdefault(made.name, dims)
    return batch, mixes


def _confined_dims(before: Tensor, after: Tensor, samples: int, index: int) -> set[int]:
    """Dimensions along which two activations differ only in the part of one sample; all of them if they are equal."""
    scale = before.abs().nan_to_num().max().clamp(min=1e-12)
    changed = (after - before).abs() > 1e-6 * scale
    dims = set(range(before.dim()))
    if not changed.any():
        return dims
    for dim, size in enumerate(before.shape):
        rows = changed.movedim(dim, 0).reshape(size, -1).any(1).nonzero().flatten()
        # Where batch and positions are folded into one dimension, a sample owns a block of rows or every n-th row.
        in_block = size % samples == 0 and bool((rows // (size // samples) == index).all())
        interleaved = size % samples == 0 and bool((rows % samples == index).all())
        if not (in_block or interleaved):
            dims.discard(dim)
    return dims


def _resized(example: Any, main: Tensor, dim: int, batch: int, factor: float) -> Any:
    """The example with a dimension of its main tensor doubled or halved; in other tensors, those of the same size."""
    size = main.shape[dim]

    def change(_: str, tensor: Tensor) -> Tensor:
        own = [dim] if tensor is main else [d for d, n in enumerate(tensor.shape) if n == size and d != batch]
        for d in own:
            tensor = torch.cat([tensor, tensor], d) if factor > 1 else tensor.narrow(d, 0, int(size * factor))
        return tensor

    return map_tensors(example, change)


def _first_shapes(calls: list[Call]) -> dict[str, tuple[int, ...]]:
    """The output shape of each submodule's first call."""
    return {made.name: tuple(made.tensor.shape) for made in reversed(calls) if made.tensor is not None}


def _after_first_weights(calls: list[Call]) -> list[Call]:
    """Calls from the first layer with a weight matrix on: modules before it accept any size, so they prove nothing."""
    for index, made in enumerate(calls):
        if any(p.dim() > 1 for p in made.module.parameters(recurse=False)):
            return calls[index:]
    return []
