"""Checks that networks, seeds, losses and metrics can run stacked, with errors that say what to change.

The stacked program runs the arithmetic of a network for N sets of parameters. Anything else that a module does in a
call (an overridden forward, random numbers, state between calls) would be lost or fail under vmap. Such modules are
refused here, so that nothing else than the user's network is trained. Hosts may keep the running statistics of batch
norms; seeds may not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from simic.growth.blueprints import BLUEPRINTS, Blueprint, new_branch
from simic.growth.isolation import preserve_state, preserved_rng
from simic.growth.seed import check_branch
from simic.growth.slot_discovery import Site
from simic.growth.slot_shape import SlotShape
from simic.stacked.compare import TOLERANCE, Fault, Program, Unusable, compare, first_sentence, relative_difference
from simic.stacked.layers import is_customized, run_segments, run_stacked
from simic.stacked.parameters import Parameters, part_of, statistics_of

ALONE = "or grow the model alone with GrowableModel and GrowthScheduler, which take any module"
IN_ORDER = "write the host as segments that run one after the other (residual connections go inside a segment)"
TENSORS_ONLY = "compute with tensors only (no random numbers, no state between calls, no branches on values)"
REMEDIES: tuple[tuple[tuple[type, ...], str], ...] = (
    ((nn.modules.batchnorm._BatchNorm,), "use GroupNorm or LayerNorm, or in a host a batch norm with a momentum"),
    ((nn.modules.dropout._DropoutNd, nn.RReLU), "leave it out (a dropout with p=0 is accepted)"),
    ((nn.modules.instancenorm._InstanceNorm,), "leave track_running_stats off"),
    ((nn.RNNBase,), "use attention or convolutions over the sequence"),
)
"""Kinds of modules that cannot be stacked, and what to use instead."""

Figure = Callable[[Tensor, Tensor], Tensor]
"""(outputs, targets) of one host -> one number: a loss or a metric."""

PLAIN_LAYERS = frozenset(
    {nn.Sequential, nn.Linear, nn.Conv1d, nn.Conv2d, nn.LayerNorm, nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Flatten}
)
"""Layers whose text tells all that they compute, but for their weights."""
_checked_hosts: dict[tuple[Any, ...] | None, frozenset[int]] = {}
"""What `check_hosts` found, by the description of a host."""
_stackable: set[tuple[Blueprint, SlotShape, tuple[int, ...], torch.dtype, torch.device]] = set()


def segments_of(host: nn.Module) -> dict[str, nn.Module]:
    """The children of a host by name; a module that is used twice is listed twice, because it runs twice."""
    if not isinstance(host, nn.Module):
        raise TypeError(f"make_host must return an nn.Sequential of segments, got {host!r}: return the host it builds")
    return {name: child for name, child in host._modules.items() if child is not None}


# Structure.


def check_alike(template: nn.Module, others: Sequence[nn.Module], maker: str = "make_host") -> None:
    """Raise unless networks differ in the values of their parameters only."""
    rule = f"{maker} must build a new network of the same structure at every call"
    here, owned, buffers = _structure(template), set(template.parameters()), list(template.buffers())
    own_statistics = statistics_of(template)
    for other in others:
        if not owned.isdisjoint(other.parameters()):
            raise ValueError(f"{rule}, got one that shares parameters with an earlier one: build all its layers anew")
        there = _structure(other)
        if here != there:
            name = next(key for key in (*here, *there) if here.get(key) != there.get(key))
            raise ValueError(
                f"{rule}, got two: {name!r} is {here.get(name, 'missing')}, then {there.get(name, 'missing')}"
            )
        for (name, buffer), own in zip(other.named_buffers(), buffers, strict=True):
            if name not in own_statistics and not torch.equal(buffer, own):
                raise ValueError(
                    f"{rule}, got two values of buffer {name!r}: stacked networks share their buffers; make it a "
                    f"parameter or draw it from a fixed seed, {ALONE}"
                )


def _structure(network: nn.Module) -> dict[str, str | tuple]:
    tensors = [*network.named_parameters(remove_duplicate=False), *network.named_buffers()]
    modules = {name: type(part).__name__ for name, part in network.named_modules(remove_duplicate=False)}
    return modules | {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors}


def check_parameters(network: nn.Module) -> None:
    """Raise unless all parameters of a network can be one row of a matrix that is trained as a whole."""
    named = dict(network.named_parameters())
    if not named:
        raise ValueError(f"the network ({type(network).__name__}) has no parameters, so it cannot learn: give it some")
    first = next(iter(named.values()))
    for name, parameter in named.items():
        if is_lazy(parameter):
            raise ValueError(f"parameter {name!r} has no shape yet: give its lazy layer the size of its input")
        if (parameter.dtype, parameter.device) != (first.dtype, first.device):
            raise ValueError(
                f"all parameters must have one dtype and device, got {first.dtype} on {first.device} and, "
                f"for {name!r}, {parameter.dtype} on {parameter.device}: convert the network as a whole"
            )
        hooked = parameter._backward_hooks or parameter._post_accumulate_grad_hooks
        if hooked or not parameter.requires_grad:
            got, remedy = ("has gradient hooks", "remove them") if hooked else ("is frozen", "make it a buffer")
            raise ValueError(
                f"all parameters of stacked networks are trained with their own gradient, {name!r} {got}: {remedy}, "
                f"{ALONE}"
            )


def _check_slots(host: nn.Module, sites: Sequence[Site]) -> None:
    """Raise a Fault unless adding to the output of a slot's segment is the same as a seed in that slot."""
    if is_customized(host):
        raise Fault("has hooks or a forward of its own, which segments alone do not run")
    calls = [part for _, part in host.named_modules(remove_duplicate=False)]
    for site in sites:
        if site.container != "tensor":
            raise Fault(f"outputs a {site.container} in slot {site.name!r}, not a tensor")
        if sum(part is host.get_submodule(site.name) for part in calls) > 1:
            raise Fault(f"uses the segment {site.name!r} twice, so that its slot is two places")


# Hosts, seeds, losses and metrics.


def check_hosts(hosts: Sequence[nn.Module], sites: Sequence[Site], example_input: Tensor) -> frozenset[int]:
    """Raise unless stacked hosts have the outputs and gradients of each host alone.

    Returns the indices of the segments that overwrite their input.
    """
    check_alike(hosts[0], hosts[1:])
    key = _description(hosts[0], sites, example_input)
    if key in _checked_hosts:  # a comparison takes as long as a host epoch
        return _checked_hosts[key]
    example = example_input.expand(len(hosts), *example_input.shape)
    with preserved_rng():
        try:
            _check_slots(hosts[0], sites)
            compare(hosts, _host_program, example, sites, statistics=True)
        except Fault as fault:
            own_forward = type(hosts[0]).forward is not nn.Sequential.forward
            subject = f"the forward of {type(hosts[0]).__name__}" if own_forward else "the host"
            reason = _blame_part(hosts, example, statistics=True) or f"{subject} {fault}: {IN_ORDER}"
            raise ValueError(
                f"hosts run stacked, as one program of segments in a row, but {reason}, {ALONE}"
            ) from fault.__cause__
        overwriting = _find_overwriting(hosts[0], example_input)
    if key is not None:
        _checked_hosts[key] = overwriting
    return overwriting


def _description(host: nn.Module, sites: Sequence[Site], x: Tensor) -> tuple[Any, ...] | None:
    """All that a host computes, but for its weights; None if it has layers whose text does not tell that."""
    if any(type(part) not in PLAIN_LAYERS or is_customized(part) for part in host.modules()):
        return None
    parameters = tuple((name, own.shape, own.dtype, own.device) for name, own in host.named_parameters())
    return repr(host), parameters, tuple(sites), x.shape, x.dtype, x.device


def check_blueprint(name: str, site: Site, reference: Tensor) -> None:
    """Raise unless the seeds of a blueprint fit the slot, and have the same outputs and gradients stacked as alone."""
    read_shape = site.read_shape(BLUEPRINTS[name].reads)
    key = (BLUEPRINTS[name], site.shape, read_shape, reference.dtype, reference.device)
    if key in _stackable:  # what a blueprint builds depends on the shape only, and a check costs several passes
        return
    rule = f"seeds of blueprint {name!r} run stacked with those of other hosts"
    branches = [new_branch(name, site.shape, (number,)).to(reference) for number in range(2)]
    x = torch.zeros(len(branches), *read_shape, device=reference.device, dtype=reference.dtype)
    with preserved_rng():
        check_branch(name, branches[0], site, reference)
        try:
            check_parameters(branches[0])
            check_alike(branches[0], branches[1:], maker="it")
            compare(branches, _module_program, x)
        except ValueError as error:
            raise ValueError(f"{rule}: {error}") from error
        except Fault as fault:
            whole = f"its {type(branches[0]).__name__} {fault}: {_remedy(branches[0])}"
            raise ValueError(
                f"{rule}, but {_blame_part(branches, x, statistics=False) or whole}, {ALONE}"
            ) from fault.__cause__
    _stackable.add(key)


def check_figure(what: str, figure: Figure, stacked_figure: Figure, outputs: Tensor, targets: Tensor) -> None:
    """Raise unless the stacked form of a loss or metric gives what the function gives for each host alone."""
    rule = f"the {what} must return one number per host, the same for stacked hosts as for each host alone"
    try:
        alone = torch.stack([torch.as_tensor(figure(*pair)) for pair in zip(outputs, targets, strict=True)])
    except Exception as error:
        shapes = f"outputs {tuple(outputs.shape[1:])} and {targets.dtype} targets {tuple(targets.shape[1:])}"
        raise ValueError(f"the {what} fails on {shapes} of a host: {first_sentence(error)}") from error
    if alone.dim() != 1:
        raise ValueError(f"{rule}, got shape {tuple(alone.shape[1:])}: return the mean over the batch")
    try:
        stacked = stacked_figure(outputs, targets)
    except Exception as error:
        raise ValueError(f"{rule}; stacked it fails ({first_sentence(error)}): use tensor operations only") from error
    if (size := relative_difference(stacked, alone)) > TOLERANCE:
        raise ValueError(f"{rule}; they differ by {size:.2g} of the largest: use tensor operations only")


def _host_program(host: nn.Module) -> Program:
    names, segments = zip(*segments_of(host).items(), strict=True)

    def program(parameters: Parameters, x: Tensor, shifts: Sequence[Tensor]) -> Tensor:
        def add_shift(index: int, h: Tensor, _: Tensor) -> Tensor:
            return h + shifts[index] if index < len(shifts) else h

        return run_segments(segments, lambda index: part_of(parameters, names[index]), x, add_shift)

    return program


def _module_program(module: nn.Module) -> Program:
    return lambda parameters, x, _: run_stacked(module, parameters, x)


def _find_overwriting(host: nn.Module, x: Tensor) -> frozenset[int]:
    found = set()
    with torch.no_grad(), preserve_state(host):
        x = x.clone()
        for index, segment in enumerate(segments_of(host).values()):
            before, version = x, x._version
            x = segment(x)
            if before._version != version:
                found.add(index)
    return frozenset(found)


# Error texts.


def _blame_part(modules: Sequence[nn.Module], x: Tensor, prefix: str = "", *, statistics: bool) -> str | None:
    """Which part of the modules cannot be stacked, why, and the remedy; None if each part can."""
    if not isinstance(modules[0], nn.Sequential):
        return None
    for name in segments_of(modules[0]):
        parts = [segments_of(module)[name] for module in modules]
        try:
            compare(parts, _module_program, x, statistics=statistics)
            with torch.no_grad():
                x = torch.stack([part(own) for part, own in zip(parts, x, strict=True)])
        except Unusable:
            return None  # parts that do not fit together are not at fault by themselves
        except Fault as fault:
            own = f"{type(parts[0]).__name__} {prefix + name!r} {fault}: {_remedy(parts[0])}"
            return _blame_part(parts, x, f"{prefix}{name}.", statistics=statistics) or own
    return None


def _remedy(module: nn.Module) -> str:
    known = [text for kinds, text in REMEDIES if any(isinstance(part, kinds) for part in module.modules())]
    return ", ".join(known) or TENSORS_ONLY
