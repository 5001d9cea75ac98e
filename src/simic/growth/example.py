"""The example input of a host: running the host on it, explaining a failure, and varying it for measurements."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

ExampleInput = Tensor | tuple[Any, ...] | Mapping[str, Any]


def call(model: nn.Module, example_input: ExampleInput) -> Any:
    """Run a model on an example: a tensor, a tuple of arguments or a mapping of keyword arguments."""
    if isinstance(example_input, Mapping):
        return model(**example_input)
    return model(*example_input) if isinstance(example_input, tuple) else model(example_input)


@contextmanager
def hook_submodules(
    model: nn.Module, hook: Callable[..., Any], before: Callable[..., Any] | None = None
) -> Iterator[None]:
    """Call `hook(name, module, args, kwargs, output)` after every submodule's forward; a result replaces the output.

    `before(name, module, args, kwargs)`, if given, is called before it.
    """
    named = [(name, module) for name, module in model.named_modules() if name]
    handles = [module.register_forward_hook(partial(hook, name), with_kwargs=True) for name, module in named]
    if before is not None:
        handles += [part.register_forward_pre_hook(partial(before, name), with_kwargs=True) for name, part in named]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def first_tensor(output: Any) -> Tensor | None:
    """The tensor a seed acts on: the output itself, or the first item of a tuple or list."""
    first = output[0] if isinstance(output, (tuple, list)) and output else output
    return first if isinstance(first, Tensor) else None


def tensors(output: Any) -> Iterator[Tensor]:
    """Every tensor in a nested output of mappings, tuples, lists and dataclasses."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, (Mapping, tuple, list)):
        for value in output.values() if isinstance(output, Mapping) else output:
            yield from tensors(value)
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        for field in dataclasses.fields(output):
            yield from tensors(getattr(output, field.name))


def with_first_tensor(output: Any, tensor: Tensor) -> Any:
    """The output with its first tensor replaced."""
    if isinstance(output, Tensor):
        return tensor
    if hasattr(output, "_fields"):  # a named tuple
        return output._replace(**{output._fields[0]: tensor})
    return type(output)((tensor, *output[1:]))


def explain_failure(model: nn.Module, example_input: Any, error: Exception) -> ValueError:
    """The host's own error in one line that describes the example and names a remedy."""
    reason = str(error).strip().splitlines()
    summary = f"{type(error).__name__}: {reason[0] if reason else 'no message'}"
    described, remedy = _describe(example_input), _remedy(model, example_input)
    return ValueError(f"the host fails on example_input ({described}): {summary}; {remedy}")


def _remedy(model: nn.Module, example_input: Any) -> str:
    if type(example_input).__module__.partition(".")[0] == "numpy":
        return "pass a tensor: torch.from_numpy(example_input)"
    given = {tensor.device for tensor in tensors(example_input)}
    expected = {parameter.device for parameter in model.parameters()}
    if given and len(expected) == 1 and given != expected:
        return f"the host is on {', '.join(map(str, expected))}, so move the example there with .to(...)"
    if isinstance(example_input, tuple) and len(example_input) > 1:
        return "a tuple holds the arguments of the host's forward; of a batch (x, y) pass x alone"
    if isinstance(example_input, list):
        return "a list is passed as one argument; pass a tensor, or a tuple for several arguments"
    return "pass a batch as the host's forward takes it: a tensor, a tuple of arguments or a dict of keyword arguments"


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {tuple(value.shape)} of {value.dtype} on {value.device}"
    if isinstance(value, Mapping):
        return "keywords " + ", ".join(f"{key}: {_describe(item)}" for key, item in list(value.items())[:4])
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}: " + ", ".join(_describe(item) for item in value[:3])
    return f"{type(value).__module__}.{type(value).__name__}"


def map_tensors(example: Any, change: Callable[[str, Tensor], Tensor], name: str = "") -> Any:
    """The example with every tensor replaced by `change(keyword, tensor)`; the keyword is "" if there is none."""
    if isinstance(example, Tensor):
        return change(name, example)
    if isinstance(example, Mapping):
        return {key: map_tensors(value, change, str(key)) for key, value in example.items()}
    if hasattr(example, "_fields"):
        return type(example)(*(map_tensors(value, change, name) for value in example))
    if isinstance(example, (tuple, list)):
        return type(example)(map_tensors(value, change, name) for value in example)
    return example


def is_data(name: str, tensor: Tensor) -> bool:
    """Whether a tensor holds input data, rather than a mask or labels."""
    if tensor.dim() == 0 or tensor.dtype == torch.bool or tensor.is_complex():
        return False
    return not any(word in name for word in ("mask", "label"))


def main_tensor(example: Any) -> Tensor | None:
    """The first tensor of input data in an example."""
    found: list[Tensor] = []

    def collect(name: str, tensor: Tensor) -> Tensor:
        if is_data(name, tensor):
            found.append(tensor)
        return tensor

    map_tensors(example, collect)
    return found[0] if found else None


def other_values(tensor: Tensor) -> Tensor:
    """A tensor of the same kind whose values all differ: noise added to floats, another token for each token."""
    if tensor.is_floating_point():
        noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0)).to(tensor)
        spread = tensor.float().std(correction=0).to(tensor)
        return tensor + noise * (spread if spread > 0 else 1)
    low, high = tensor.min(), tensor.max()
    # Only tokens between the smallest and the largest of the example: the host is known to accept these.
    return tensor + 1 if low == high else torch.where(tensor == high, low, tensor + 1)
