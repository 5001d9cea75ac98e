"""What the dimensions of an activation mean: known by the layers that touch it, else measured, never guessed.

The feature dimension is known where a layer of torch produces or consumes the very tensor: a Linear acts on the last
dimension, a convolution on dimension 1. Otherwise the host runs on longer and shorter inputs: dimensions that follow
are positions, the one that stays is the features'. The batch dimension is measured by changing one sample:

    input (N, L, F)   sample 0 changed: the activation (N, L, C) changes at index 0 of dimension 0 only
    input (L, N, F)   step 0 changed: a recurrent layer changes at every later step, so dimension 0 is not the batch
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from simic.growth.example import (
    ExampleInput,
    call,
    first_tensor,
    is_data,
    main_tensor,
    map_tensors,
    other_values,
)
from simic.growth.influence import plain_kernels
from simic.growth.isolation import evaluating, preserve_state

_FEATURES_LAST = (
    *(nn.Linear, nn.Bilinear, nn.Embedding, nn.RNNBase, nn.MultiheadAttention),
    *(nn.TransformerEncoderLayer, nn.TransformerDecoderLayer),
)
_FEATURES_SECOND: dict[int, tuple[type[nn.Module], ...]] = {
    3: (nn.Conv1d, nn.ConvTranspose1d, nn.BatchNorm1d, nn.InstanceNorm1d, nn.GroupNorm),
    4: (
        *(nn.Conv2d, nn.ConvTranspose2d, nn.BatchNorm2d, nn.InstanceNorm2d, nn.GroupNorm),
        *(nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d),
    ),
    5: (
        *(nn.Conv3d, nn.ConvTranspose3d, nn.BatchNorm3d, nn.InstanceNorm3d, nn.GroupNorm),
        *(nn.MaxPool3d, nn.AvgPool3d, nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool3d),
    ),
}
_ELEMENTWISE = ("torch.nn.modules.activation", "torch.nn.modules.dropout")


@dataclass(frozen=True)
class Call:
    """One call of a submodule in a traced pass."""

    name: str
    module: nn.Module
    inputs: tuple[Tensor, ...]
    output: Any


@dataclass(frozen=True)
class Layout:
    """Which dimension of an activation is the batch and which holds the features; the others are positions."""

    batch: int
    features: int


class Unknown(Exception):
    """Neither layers nor measurements tell a layout."""


def trace(model: nn.Module, example_input: ExampleInput, calls: list[Call]) -> Any:
    """One evaluation pass; every call of every submodule is appended to `calls`, also if the host then fails."""

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            inputs = tuple(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
            calls.append(Call(name, module, inputs, output))

        return hook

    handles = [
        module.register_forward_hook(note(name), with_kwargs=True) for name, module in model.named_modules() if name
    ]
    try:
        with preserve_state(model), evaluating(model), plain_kernels():
            return call(model, example_input)
    finally:
        for handle in handles:
            handle.remove()


class Layouts:
    """Finds layouts of a host's activations; passes run only when a question needs them."""

    def __init__(self, model: nn.Module, example_input: ExampleInput, calls: list[Call]) -> None:
        self.model, self.example_input, self.calls = model, example_input, calls

    def of(self, name: str, tensor: Tensor) -> Layout:
        """The layout of a submodule's output; raises Unknown."""
        if tensor.dim() == 2:
            return Layout(0, 1)
        by_layers = self._features_by_layer.get(id(tensor), set())
        if by_layers == {1}:  # layers with channels in dimension 1 have the batch before it
            return Layout(0, 1)
        batch = self.batch(name, tensor)
        if len(by_layers) == 1:
            (features,) = by_layers
        else:
            positions = self._following_dims.get(name, set()) - {batch}
            fixed = set(range(tensor.dim())) - positions - {batch}
            if not positions or len(fixed) != 1:
                raise Unknown
            (features,) = fixed
        if features == batch:
            raise Unknown
        return Layout(batch, features)

    def batch(self, name: str, tensor: Tensor) -> int:
        """The batch dimension of a submodule's output; raises Unknown."""
        measured = self._measured_batch.get(name)
        if measured is not None and len(measured) == 1:
            return next(iter(measured))
        by_layers = self._batch_by_layer.get(id(tensor), set())
        if len(by_layers) == 1:
            return next(iter(by_layers))
        # A host that runs on this batch only, and has no layer with the batch elsewhere, follows torch's convention.
        if measured is not None or any(_batch_first(module) is False for module in self.model.modules()):
            raise Unknown
        return 0

    # By the layers that produce or consume a tensor.

    @cached_property
    def _features_by_layer(self) -> dict[int, set[int]]:
        found: dict[int, set[int]] = {}
        for made in self.calls:
            for tensor in _touched(made):
                if (dim := _feature_dim(made.module, tensor)) is not None:
                    found.setdefault(id(tensor), set()).add(dim)
        # What a layer tells of its output holds before and behind an activation function or dropout too.
        for made in (*self.calls, *reversed(self.calls)):
            if _is_elementwise(made):
                touched = [id(tensor) for tensor in _touched(made)]
                told = set().union(*(found.get(key, set()) for key in touched))
                found |= {key: found.get(key, set()) | told for key in touched}
        return found

    @cached_property
    def _batch_by_layer(self) -> dict[int, set[int]]:
        found: dict[int, set[int]] = {}
        for made in self.calls:
            batch_first, output = _batch_first(made.module), first_tensor(made.output)
            if batch_first is not None and output is not None:
                found.setdefault(id(output), set()).add(0 if batch_first else 1)
        return found

    # By measurement.

    @cached_property
    def _measured_batch(self) -> dict[str, set[int]]:
        return self._batch_and_input_dim[0]

    @cached_property
    def _batch_and_input_dim(self) -> tuple[dict[str, set[int]], int]:
        """Which dimensions may be the batch of each submodule's output, and of the input."""
        first = self._vary_sample(0)
        if first is None:
            return {}, 0
        if first[1]:  # something mixes along the input's dimension 0; it is the batch only if dimension 1 is no better
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
            runs = [self._record(change) for change in (base, *_one_changed(base, dim, samples))]
            if all(complete for _, complete in runs):
                before, *after = [calls for calls, _ in runs]
                return _confinement(before, after, samples)
        return None

    @cached_property
    def _following_dims(self) -> dict[str, set[int]]:
        """Dimensions of each submodule's output that change with the size of some dimension of the input."""
        main, following = main_tensor(self.example_input), {}
        if main is None:
            return following
        shapes = _first_shapes(self.calls)
        batch = self._batch_and_input_dim[1]
        for dim in range(main.dim()):
            for factor in (2, 0.5):
                if dim == batch or main.shape[dim] * factor < 1:
                    continue
                calls, complete = self._record(_resized(self.example_input, main, dim, batch, factor))
                for name, shape in _first_shapes(calls if complete else _behind_weights(calls)).items():
                    if len(shape) == len(shapes.get(name, ())):
                        changed = {d for d, size in enumerate(shape) if size != shapes[name][d]}
                        following.setdefault(name, set()).update(changed)
        return following

    def _record(self, example: Any) -> tuple[list[Call], bool]:
        calls: list[Call] = []
        try:
            trace(self.model, example, calls)
        except Exception:  # a host may take one size only; what ran before it failed is told all the same
            return calls, False
        return calls, True


def _touched(made: Call) -> list[Tensor]:
    output = first_tensor(made.output)
    return [*made.inputs, *([] if output is None else [output])]


def _feature_dim(module: nn.Module, tensor: Tensor) -> int | None:
    if not tensor.is_floating_point() or tensor.dim() < 2:
        return None
    if isinstance(module, _FEATURES_SECOND.get(tensor.dim(), ())):
        return 1
    is_norm = isinstance(module, (nn.LayerNorm, nn.RMSNorm)) and len(module.normalized_shape) == 1
    return tensor.dim() - 1 if is_norm or isinstance(module, _FEATURES_LAST) else None


def _is_elementwise(made: Call) -> bool:
    output = first_tensor(made.output)
    known = type(made.module).__module__ in _ELEMENTWISE or isinstance(made.module, nn.Identity)
    same_shape = output is not None and len(made.inputs) == 1 and made.inputs[0].shape == output.shape
    return known and same_shape and not isinstance(made.module, nn.MultiheadAttention)


def _batch_first(module: nn.Module) -> bool | None:
    own = getattr(module, "batch_first", None)
    own = getattr(getattr(module, "self_attn", None), "batch_first", None) if own is None else own
    return own if isinstance(own, bool) else None


def _with_samples(example: Any, dim: int, size: int, samples: int) -> Any:
    """The example with another number of samples: two of them, twice the only one, or all."""

    def change(_: str, tensor: Tensor) -> Tensor:
        if tensor.dim() <= dim or tensor.shape[dim] != size:
            return tensor
        return torch.cat([tensor, tensor], dim) if size == 1 else tensor.narrow(dim, 0, samples)

    return map_tensors(example, change)


def _one_changed(example: Any, dim: int, samples: int) -> list[Any]:
    """The example with its first sample changed, and with its last."""

    def changed(index: int) -> Any:
        def change(name: str, tensor: Tensor) -> Tensor:
            if not is_data(name, tensor) or tensor.dim() <= dim or tensor.shape[dim] != samples:
                return tensor
            tensor, other = tensor.clone(), other_values(tensor)
            tensor.select(dim, index).copy_(other.select(dim, index))
            return tensor

        return map_tensors(example, change)

    return [changed(0), changed(samples - 1)]


def _confinement(before: list[Call], after: list[list[Call]], samples: int) -> tuple[dict[str, set[int]], bool]:
    batch: dict[str, set[int]] = {}
    mixes = False
    for made, *others in zip(before, *after, strict=False):
        was = first_tensor(made.output)
        if was is None or not was.is_floating_point() or was.dim() < 2:
            continue
        dims = set(range(was.dim()))
        for other, index in zip(others, (0, samples - 1), strict=True):
            now = first_tensor(other.output)
            if other.name == made.name and now is not None and now.shape == was.shape:
                dims &= _confined_dims(was, now, samples, index)
        mixes |= not dims
        batch.setdefault(made.name, dims)
    return batch, mixes


def _confined_dims(before: Tensor, after: Tensor, samples: int, index: int) -> set[int]:
    """Dimensions along which two activations differ in one sample's part only; all of them if they do not differ."""
    scale = before.abs().nan_to_num().max().clamp(min=1e-12)
    changed = (after - before).abs() > 1e-6 * scale
    dims = set(range(before.dim()))
    if not changed.any():
        return dims
    for dim, size in enumerate(before.shape):
        rows = changed.movedim(dim, 0).reshape(size, -1).any(1).nonzero().flatten()
        # A sample may own several rows, next to each other or interleaved, where batch and positions are folded.
        in_block = size % samples == 0 and bool((rows // (size // samples) == index).all())
        interleaved = size % samples == 0 and bool((rows % samples == index).all())
        if not (in_block or interleaved):
            dims.discard(dim)
    return dims


def _resized(example: Any, main: Tensor, dim: int, batch: int, factor: float) -> Any:
    """The example with one dimension of its main tensor longer or shorter, and those of the same size elsewhere."""
    size = main.shape[dim]

    def change(_: str, tensor: Tensor) -> Tensor:
        own = [dim] if tensor is main else [d for d, n in enumerate(tensor.shape) if n == size and d != batch]
        for d in own:
            tensor = torch.cat([tensor, tensor], d) if factor > 1 else tensor.narrow(d, 0, int(size * factor))
        return tensor

    return map_tensors(example, change)


def _first_shapes(calls: list[Call]) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for made in calls:
        tensor = first_tensor(made.output)
        if tensor is not None:
            shapes.setdefault(made.name, tuple(tensor.shape))
    return shapes


def _behind_weights(calls: list[Call]) -> list[Call]:
    """Calls from the first layer with a matrix of weights on: before it, any size would have run."""
    for index, made in enumerate(calls):
        if any(p.dim() > 1 for p in made.module.parameters(recurse=False)):
            return calls[index:]
    return []
