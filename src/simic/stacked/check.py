"""Whether networks may run stacked: clear errors for whatever the stacked program would compute otherwise.

The stacked program runs a network's arithmetic for N sets of parameters. Whatever else a module does when it is called
(an overridden forward, batch statistics, random draws, state kept between calls) is lost or fails inside vmap, so such
a module is refused here, rather than trained as another network than the user's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn.parameter import is_lazy

from simic.growth.blueprints import BLUEPRINTS, Blueprint, SlotShape
from simic.growth.isolation import preserve_state, preserved_rng
from simic.growth.slot_discovery import Site
from simic.stacked.compare import (
    TOLERANCE,
    Fault,
    Program,
    Unusable,
    compare,
    first_sentence,
    relative_difference,
)
from simic.stacked.layers import Parameters, is_customized, part_of, run_segments, run_stacked

ALONE = "or grow the model alone with GrowableModel and GrowthScheduler, which take any module"
IN_ORDER = "write the host as segments that run one after the other (residual connections go inside a segment)"
TENSORS_ONLY = "compute with tensors only (no random numbers, no state between calls, no branches on values)"
REMEDIES: tuple[tuple[tuple[type, ...], str], ...] = (
    ((nn.modules.batchnorm._BatchNorm,), "use GroupNorm or LayerNorm, which keep no statistics of batches"),
    ((nn.modules.dropout._DropoutNd, nn.RReLU), "leave it out (a dropout with p=0 is accepted)"),
    ((nn.modules.instancenorm._InstanceNorm,), "leave track_running_stats off"),
    ((nn.RNNBase,), "use attention or convolutions over the sequence"),
)
"""Kinds of modules that cannot be stacked, and what to do about them."""

Figure = Callable[[Tensor, Tensor], Tensor]
"""(outputs, targets) of one host -> one number: a loss or a metric."""

_stackable: set[tuple[Blueprint, SlotShape, tuple[int, ...], torch.dtype, torch.device]] = set()


def segments_of(host: nn.Module) -> dict[str, nn.Module]:
    """The children of a host under their names; a module that comes twice is listed twice, as it runs twice."""
    if not isinstance(host, nn.Module):
        raise TypeError(f"make_host must return an nn.Sequential of segments, got {host!r}: return the host it builds")
    return {name: child for name, child in host._modules.items() if child is not None}


# Structure.


def check_alike(template: nn.Module, others: Sequence[nn.Module], maker: str = "make_host") -> None:
    """Raise unless networks differ in nothing but the values of their parameters."""
    rule = f"{maker} must build a new network of the same structure at every call"
    here, owned, buffers = _structure(template), set(template.parameters()), list(template.buffers())
    for other in others:
        if not owned.isdisjoint(other.parameters()):
            raise ValueError(f"{rule}, got one that shares parameters with an earlier one: build all its layers anew")
        there = _structure(other)
        if here != there:
            name = next(key for key in (*here, *there) if here.get(key) != there.get(key))
            one, another = (seen.get(name, "missing") for seen in (here, there))
            raise ValueError(f"{rule}, got two: {name!r} is {one}, then {another}")
        for (name, buffer), own in zip(other.named_buffers(), buffers, strict=True):
            if not torch.equal(buffer, own):
                raise ValueError(
                    f"{rule}, got two values of buffer {name!r}: stacked networks share their buffers; make it a "
                    f"parameter or draw it from a fixed seed, {ALONE}"
                )


def _structure(network: nn.Module) -> dict[str, str | tuple]:
    modules = {name: type(part).__name__ for name, part in network.named_modules(remove_duplicate=False)}
    parameters = network.named_parameters(remove_duplicate=False)
    return (
        modules
        | {name: (tuple(p.shape), p.dtype) for name, p in parameters}
        | {name: (tuple(b.shape), b.dtype) for name, b in network.named_buffers()}
    )


def check_parameters(network: nn.Module) -> None:
    """Raise unless a network's parameters can be a row of a matrix that learns as a whole."""
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
                f"all parameters of stacked networks learn by their own gradient, {name!r} {got}: {remedy}, {ALONE}"
            )


def _check_places(host: nn.Module, sites: Sequence[Site]) -> None:
    """Raise a fault unless a seed behind a slot's segment is a seed in that slot."""
    if is_customized(host):
        raise Fault("has hooks or a forward of its own, which its segments know nothing of")
    calls = [part for _, part in host.named_modules(remove_duplicate=False)]
    for site in sites:
        if site.container != "tensor":
            raise Fault(f"outputs a {site.container} in slot {site.name!r}, not a tensor")
        if sum(part is host.get_submodule(site.name) for part in calls) > 1:
            raise Fault(f"uses the segment {site.name!r} twice, so that its slot is two places")


# Hosts, seeds, figures.


def check_hosts(hosts: Sequence[nn.Module], sites: Sequence[Site], example_input: Tensor) -> frozenset[int]:
    """Raise unless hosts that run as one program compute and learn what each does alone.

    Returns which segments overwrite their input.
    """
    check_alike(hosts[0], hosts[1:])
    example = example_input.expand(len(hosts), *example_input.shape)
    with preserved_rng():
        try:
            _check_places(hosts[0], sites)
            compare(hosts, _host_program, example, sites)
        except Fault as fault:
            raise ValueError(_host_refusal(hosts, example, fault)) from fault.__cause__
        return _overwriting(hosts[0], example_input)


def check_branches(name: str, branches: Sequence[nn.Module], site: Site, reference: Tensor) -> None:
    """Raise unless seeds of a blueprint that run as one program compute and learn what each does alone."""
    key = (BLUEPRINTS[name], site.shape, site.example_shape, reference.dtype, reference.device)
    if key in _stackable:  # what a blueprint builds depends on the shape alone
        return
    rule = f"seeds of blueprint {name!r} run stacked with those of other hosts"
    x = torch.zeros(len(branches), *site.example_shape, device=reference.device, dtype=reference.dtype)
    with preserved_rng():
        try:
            check_parameters(branches[0])
            check_alike(branches[0], branches[1:], maker="it")
            compare(branches, _module_program, x)
        except ValueError as error:
            raise ValueError(f"{rule}: {error}") from error
        except Fault as fault:
            path, module, reason = _locate(branches, x) or ("", branches[0], fault)
            raise ValueError(
                f"{rule}, but {_told(path, module)} {reason}: {_remedy(module)}, {ALONE}"
            ) from fault.__cause__
    _stackable.add(key)


def check_figure(what: str, figure: Figure, outputs: Tensor, targets: Tensor) -> None:
    """Raise unless a loss or metric of several hosts at once is what it is for each."""
    rule = f"the {what} must give every host one number, the same whether hosts are judged together or alone"
    alone = torch.stack([torch.as_tensor(figure(*pair)) for pair in zip(outputs, targets, strict=True)])
    if alone.dim() != 1:
        raise ValueError(f"{rule}, got shape {tuple(alone.shape[1:])}: return the mean over the batch")
    try:
        together = vmap(figure)(outputs, targets)
    except Exception as error:
        raise ValueError(f"{rule}; together it fails ({first_sentence(error)}): use tensor operations only") from error
    if (size := relative_difference(together, alone)) > TOLERANCE:
        raise ValueError(f"{rule}; they differ by {size:.2g} of the largest: use tensor operations only")


def _host_program(host: nn.Module) -> Program:
    names, segments = zip(*segments_of(host).items(), strict=True)

    def program(parameters: Parameters, x: Tensor, shifts: Sequence[Tensor]) -> Tensor:
        return run_segments(
            segments,
            lambda index: part_of(parameters, names[index]),
            x,
            lambda index, h: h + shifts[index] if index < len(shifts) else h,
        )

    return program


def _module_program(module: nn.Module) -> Program:
    return lambda parameters, x, _: run_stacked(module, parameters, x)


def _overwriting(host: nn.Module, x: Tensor) -> frozenset[int]:
    """The segments of a host that overwrite their input."""
    found = set()
    with torch.no_grad(), preserve_state(host):
        x = x.clone()
        for index, segment in enumerate(segments_of(host).values()):
            before, version = x, x._version
            x = segment(x)
            if before._version != version:
                found.add(index)
    return frozenset(found)


# What to tell.


def _host_refusal(hosts: Sequence[nn.Module], example: Tensor, fault: Fault) -> str:
    rule = "hosts run stacked, as one program of segments in a row"
    found = _locate(hosts, example)
    if found is not None:
        path, module, reason = found
        return f"{rule}, but {_told(path, module)} {reason}: {_remedy(module)}, {ALONE}"
    own_forward = type(hosts[0]).forward is not nn.Sequential.forward
    subject = f"the forward of {type(hosts[0]).__name__}" if own_forward else "the host"
    return f"{rule}, but {subject} {fault}: {IN_ORDER}, {ALONE}"


def _locate(modules: Sequence[nn.Module], x: Tensor, prefix: str = "") -> tuple[str, nn.Module, Fault] | None:
    """The first of the modules' parts that cannot be stacked, with its path and why; None if it is none of them."""
    if not isinstance(modules[0], nn.Sequential):
        return None
    for name in segments_of(modules[0]):
        parts = [segments_of(module)[name] for module in modules]
        try:
            compare(parts, _module_program, x)
            with torch.no_grad():
                x = torch.stack([part(own) for part, own in zip(parts, x, strict=True)])
        except Unusable:
            return None  # parts that do not fit each other are not at fault by themselves
        except Fault as fault:
            return _locate(parts, x, f"{prefix}{name}.") or (prefix + name, parts[0], fault)
    return None


def _told(path: str, module: nn.Module) -> str:
    kind = type(module).__name__
    return f"{kind} {path!r}" if path else f"its {kind}"


def _remedy(module: nn.Module) -> str:
    known = [text for kinds, text in REMEDIES if any(isinstance(part, kinds) for part in module.modules())]
    return ", ".join(known) or TENSORS_ONLY
