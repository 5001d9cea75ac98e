"""Finding slots in a network: one traced pass tells what each submodule outputs and whether a seed fits there."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from simic.growth.blueprints import TOPOLOGIES, SlotShape
from simic.passes import evaluating, undisturbed

ExampleInput = Tensor | tuple | Mapping[str, Any]
_LAYERS_1D = (nn.Conv1d, nn.ConvTranspose1d, nn.MaxPool1d, nn.AvgPool1d, nn.BatchNorm1d, nn.InstanceNorm1d)


@dataclass(frozen=True)
class Site:
    """A slot's place: the submodule's name and the shape a seed must keep there."""

    name: str
    shape: SlotShape
    example_shape: tuple[int, ...]
    container: str
    """What holds the tensor: "tensor" for nothing, "tuple", "list", or the first field of a named tuple."""


def call(model: nn.Module, example_input: ExampleInput) -> Any:
    """Call a model on an example: a tensor, a tuple of arguments or a mapping of keyword arguments."""
    if isinstance(example_input, Mapping):
        return model(**example_input)
    return model(*example_input) if isinstance(example_input, tuple) else model(example_input)


def first_tensor(output: Any) -> Tensor | None:
    """The tensor a seed acts on: the output itself, or the first of a tuple or list."""
    first = output[0] if isinstance(output, (tuple, list)) and output else output
    return first if isinstance(first, Tensor) else None


def tensors(output: Any) -> Iterator[Tensor]:
    """Every tensor in a model's output."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, (Mapping, tuple, list)):
        for value in output.values() if isinstance(output, Mapping) else output:
            yield from tensors(value)


def with_first_tensor(output: Any, tensor: Tensor) -> Any:
    """The same output with its first tensor replaced."""
    if isinstance(output, Tensor):
        return tensor
    if hasattr(output, "_fields"):  # a named tuple
        return output._replace(**{output._fields[0]: tensor})
    return type(output)((tensor, *output[1:]))


def find_sites(
    model: nn.Module, slots: Sequence[str] | Mapping[str, str] | str, example_input: ExampleInput
) -> tuple[Site, ...]:
    """The sites of the named slots, or of those found when `slots` is "auto"; a name that cannot be one raises.

    A mapping from name to topology settles what a traced shape cannot tell, for instance (N, C, L) from (N, L, C).
    """
    modules = dict(model.named_modules())
    modules.pop("", None)
    if slots != "auto":
        if isinstance(slots, str):
            raise ValueError(f'slots must be "auto" or a list of submodule names, got the string {slots!r}')
        if not isinstance(slots, Collection):
            raise TypeError(f'slots must be "auto", a list of submodule names or a table of them, got {slots!r}')
        _check_names(list(slots), list(modules))
    traced, result = _trace(model, modules, example_input)
    topologies = dict(slots) if isinstance(slots, Mapping) else {}
    names = _choose(model, modules, traced, result) if slots == "auto" else list(slots)
    return tuple(_site(name, modules[name], traced[name], topologies.get(name)) for name in names)


def _check_names(names: list[str], known: list[str]) -> None:
    if not names:
        raise ValueError('slots is empty: name at least one submodule, or pass "auto"')
    for name in names:
        if not isinstance(name, str):
            raise ValueError(f"the model has no submodule {name!r}: names are strings; write {str(name)!r}")
        if name not in known:
            close = difflib.get_close_matches(str(name), known, n=4, cutoff=0.5)
            hint = f"did you mean {', '.join(close)}?" if close else f"it has {', '.join(known[:12])}"
            raise ValueError(f"the model has no submodule {name!r}; {hint}")
    repeated = {name for name in names if names.count(name) > 1}
    if repeated:
        raise ValueError(f"a slot may be named once, got {', '.join(sorted(repeated))} more often")


def _trace(
    model: nn.Module, modules: dict[str, nn.Module], example_input: ExampleInput
) -> tuple[dict[str, list[Any]], Any]:
    """Outputs of every call of every submodule in one evaluation pass, and the model's own output."""
    outputs: dict[str, list[Any]] = {name: [] for name in modules}
    handles = [
        module.register_forward_hook(lambda _module, _args, output, name=name: outputs[name].append(output))
        for name, module in modules.items()
    ]
    try:
        with undisturbed(model), evaluating(model):
            result = call(model, example_input)
    finally:
        for handle in handles:
            handle.remove()
    return outputs, result


def _site(name: str, module: nn.Module, outputs: list[Any], topology: str | None) -> Site:
    if not outputs:
        raise ValueError(
            f"slot {name!r} did not run in the traced pass; choose a submodule that the forward pass calls"
        )
    tensors = [first_tensor(output) for output in outputs]
    shapes = []
    for tensor in tensors:
        if tensor is None or not tensor.is_floating_point():
            got = type(outputs[0]).__name__ if tensor is None else str(tensor.dtype)
            raise ValueError(f"slot {name!r} must output a float tensor, or a tuple that starts with one; got {got}")
        shapes.append(tuple(tensor.shape))
    found = {_shape(name, module, shape, topology) for shape in shapes}
    if len(found) > 1:
        raise ValueError(
            f"slot {name!r} changes shape: it ran {len(shapes)} times in one pass and gave {sorted(set(shapes))}; "
            "choose a submodule that always gives the same number of features"
        )
    return Site(name, found.pop(), shapes[0], _container(outputs[0]))


def _container(output: Any) -> str:
    if hasattr(output, "_fields"):
        return output._fields[0]
    return "tensor" if isinstance(output, Tensor) else "tuple" if isinstance(output, tuple) else "list"


def _shape(name: str, module: nn.Module, shape: tuple[int, ...], topology: str | None) -> SlotShape:
    if topology is None:
        is_1d = len(shape) == 3 and any(isinstance(part, _LAYERS_1D) for part in module.modules())
        topology = "conv" if is_1d else {2: "features", 3: "sequence", 4: "conv", 5: "conv"}.get(len(shape))
    if topology not in TOPOLOGIES or (topology, len(shape)) not in _KNOWN:
        raise ValueError(
            f"slot {name!r} outputs shape {shape}; a seed needs (N, C), (N, L, C), (N, C, L), (N, C, H, W) or "
            f"(N, C, D, H, W), with topology one of {', '.join(TOPOLOGIES)} if it is given"
        )
    if topology == "conv":
        return SlotShape("conv", shape[1], len(shape) - 2)
    return SlotShape(topology, shape[-1])


_KNOWN = {("features", 2), ("sequence", 3), ("conv", 3), ("conv", 4), ("conv", 5)}


def _choose(model: nn.Module, modules: dict[str, nn.Module], traced: dict[str, list[Any]], result: Any) -> list[str]:
    """Blocks of the network: outermost members of a Sequential or ModuleList that have weights and feed others."""
    everything = {"": model} | modules
    lists = {name for name, module in everything.items() if isinstance(module, (nn.Sequential, nn.ModuleList))}
    members = [name for name in modules if name.rpartition(".")[0] in lists]
    candidates = [name for name in members if _fits(name, modules[name], traced[name], result)]
    if not candidates:
        top = [name for name in modules if "." not in name]
        candidates = [name for name in top if _fits(name, modules[name], traced[name], result)]
    chosen: list[str] = []
    for name in candidates:
        if not any(name.startswith(outer + ".") for outer in chosen):
            chosen.append(name)
    if not chosen:
        raise ValueError(f"found no submodule that could be a slot; name them: slots=[...] from {', '.join(modules)}")
    return chosen


def _fits(name: str, module: nn.Module, outputs: list[Any], result: Any) -> bool:
    tensor = first_tensor(outputs[0]) if len(outputs) == 1 else None
    if tensor is None or not any(parameter.dim() > 1 for parameter in module.parameters()):
        return False
    is_output = any(tensor is final for final in tensors(result))  # a head's features are no place to grow
    return not is_output and not isinstance(module, nn.Embedding) and _has_shape(name, module, outputs)


def _has_shape(name: str, module: nn.Module, outputs: list[Any]) -> bool:
    try:
        _site(name, module, outputs, None)
    except ValueError:
        return False
    return True


def check_activation(site: Site, h: Tensor) -> None:
    """Raise if an activation no longer has the shape that was traced."""
    shape = site.shape
    if h.dim() != shape.rank or h.shape[shape.feature_dim] != shape.features:
        raise ValueError(
            f"slot {site.name!r} changed shape: its seed was built for {shape} (traced {site.example_shape}), "
            f"got {tuple(h.shape)}; choose a slot whose features do not change"
        )


def reference_tensor(model: nn.Module, site: Site) -> Tensor:
    """A parameter that tells device and dtype of new seeds: the slot's own, else the model's first."""
    nearby = next((p for p in model.get_submodule(site.name).parameters() if p.is_floating_point()), None)
    fallback = next((p for p in model.parameters() if p.is_floating_point()), torch.zeros(()))
    return fallback if nearby is None else nearby
