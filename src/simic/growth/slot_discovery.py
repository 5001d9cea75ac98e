"""Slot discovery: traced passes determine what each submodule outputs and whether a seed fits there.

A seed sees activations as (N, C), (N, L, C) or (N, C, *space). `Site.order` permutes other layouts:

    submodule's output   order          a seed sees   back
    (L, N, C)            (1, 0, 2)      (N, L, C)     (1, 0, 2)
    (N, H, W, C)         (0, 3, 1, 2)   (N, C, H, W)  (0, 2, 3, 1)
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from simic.growth.example import ExampleInput, explain_failure, first_tensor, tensors
from simic.growth.influence import directions, used_outputs
from simic.growth.layout import Call, Layout, LayoutFinder, UnknownLayoutError, trace
from simic.growth.notices import warn_user
from simic.growth.slot_input import NoInputError, SlotInput, find_input
from simic.growth.slot_shape import TOPOLOGIES, Reads, SlotShape

DIRECTIONS = {"sequence-causal": True, "sequence-bidirectional": False}
"""Topologies of a sequence that also state whether it is causal."""
_RANKS = {("features", 2), ("sequence", 3), ("conv", 3), ("conv", 4), ("conv", 5)}
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


class AmbiguousShapeError(ValueError):
    """The user has to state what the dimensions of a slot mean."""


@dataclass(frozen=True)
class Site:
    """The place of a slot: the submodule's name and the shape that a seed must keep there."""

    name: str
    shape: SlotShape
    example_shape: tuple[int, ...]
    """As a seed sees it: (N, C), (N, L, C) or (N, C, *space)."""
    container: str
    """What the submodule returns: "tensor", "tuple", "list", or the name of a named tuple's first field."""
    order: tuple[int, ...] | None = None
    """Permutation of the submodule's output into what a seed sees; None if it is that already."""
    input: SlotInput | None = None
    """The argument that seeds beside the submodule read; None if there is none that fits."""
    why_no_input: str = "it was not traced"
    """The reason if `input` is None."""
    seat: int = 0
    """0 for the first seed of the submodule, 1 for the one that may follow when that is a fossil, and so on."""

    @property
    def submodule(self) -> str:
        """The name of the submodule; that of a later seat's slot has the seat's number behind it: "block1#2"."""
        return self.name.rpartition("#")[0] if self.seat else self.name

    def read_shape(self, reads: Reads) -> tuple[int, ...]:
        """The example shape of what a seed reads."""
        return self.example_shape if self.input is None or reads == "output" else self.input.example_shape

    def to_seed(self, h: Tensor) -> Tensor:
        """The submodule's output as a seed sees it."""
        return h if self.order is None else h.permute(self.order)

    def from_seed(self, h: Tensor) -> Tensor:
        """The inverse of `to_seed`."""
        return h if self.order is None else h.permute(self.inverse_order)

    @property
    def inverse_order(self) -> list[int]:
        """The permutation of `from_seed`."""
        assert self.order is not None
        return [self.order.index(dim) for dim in range(len(self.order))]


def find_sites(
    model: nn.Module, slots: Sequence[str] | Mapping[str, str] | str, example_input: ExampleInput
) -> tuple[Site, ...]:
    """The sites of the named slots, or with "auto" of all that are found; a name that cannot be a slot raises.

    A mapping from name to topology states what passes cannot determine, for instance (N, C, L) or (N, L, C); a sequence
    may be "sequence-causal" or "sequence-bidirectional" where the host's direction cannot be measured.
    """
    if slots != "auto":
        if isinstance(slots, str):
            raise ValueError(f'slots must be "auto" or a list of submodule names, got the string {slots!r}')
        if not isinstance(slots, Collection):
            raise TypeError(f'slots must be "auto", a list of submodule names or a table of them, got {slots!r}')
        _check_names(list(slots), [name for name, _ in model.named_modules() if name])
    host = _TracedHost(model, example_input)
    topologies = dict(slots) if isinstance(slots, Mapping) else {}
    chosen = _choose(host) if slots == "auto" else list(slots)
    sites = [host.site(name, topologies.get(name)) for name in chosen]
    sites = _with_directions(model, sites, topologies, example_input)
    return tuple(host.with_input(site, stated=site.name in topologies) for site in sites)


def with_seats(sites: Sequence[Site], seeds_per_slot: int) -> tuple[Site, ...]:
    """Every site once for each seed that it may hold, those of one submodule side by side."""
    seats = range(1, seeds_per_slot)
    return tuple(
        seat
        for site in sites
        for seat in (site, *(replace(site, name=f"{site.name}#{index + 1}", seat=index) for index in seats))
    )


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
        raise ValueError(f"each slot may be named once, got {', '.join(sorted(repeated))} several times")


class _TracedHost:
    """A host with the outputs of its submodules on the example input."""

    def __init__(self, model: nn.Module, example_input: ExampleInput) -> None:
        self.model = model
        calls: list[Call] = []
        try:
            self.result = trace(model, example_input, calls)
        except Exception as error:
            raise explain_failure(model, example_input, error) from error
        self.calls: dict[str, list[Call]] = {name: [] for name, _ in model.named_modules()}
        for made in calls:
            self.calls[made.name].append(made)
        self.outputs = {name: [made.output for made in own] for name, own in self.calls.items()}
        self.layouts = LayoutFinder(model, example_input, calls)
        self.used = used_outputs(model, example_input)

    def site(self, name: str, topology: str | None) -> Site:
        """The site of a submodule, or ValueError if it cannot be a slot."""
        outputs = self.outputs[name]
        if not outputs:
            raise ValueError(
                f"slot {name!r} did not run in the traced pass; choose a submodule that the forward pass calls"
            )
        found, shapes = set(), []
        for output in outputs:
            tensor = first_tensor(output)
            if tensor is None or not tensor.is_floating_point():
                got = type(output).__name__ if tensor is None else str(tensor.dtype)
                raise ValueError(
                    f"slot {name!r} must output a float tensor, or a tuple that starts with one; got {got}"
                )
            shapes.append(tuple(tensor.shape))
            found.add(self._shape_and_order(name, tensor, topology))
        if len(found) > 1:
            raise ValueError(
                f"slot {name!r} changes shape: it ran {len(shapes)} times in one pass and gave "
                f"{sorted(set(shapes))}; choose a submodule that always gives the same number of features"
            )
        if self.used is not None and name not in self.used:
            raise ValueError(
                f"slot {name!r} has no effect on the host's output: no gradient reaches its first tensor, so a seed "
                "there could not learn; choose a submodule whose output is used"
            )
        shape, order = found.pop()
        example_shape = shapes[0] if order is None else tuple(shapes[0][dim] for dim in order)
        return Site(name, shape, example_shape, _container(outputs[0]), order)

    def with_input(self, site: Site, *, stated: bool) -> Site:
        """The site with the argument that seeds beside its submodule may read, or with the reason why there is none.

        `stated`: the user said what the dimensions of the output mean; the input's then mean the same.
        """
        try:
            found, shape = find_input(self.calls[site.name], site, None if stated else self.layouts.known_features)
        except NoInputError as reason:
            return replace(site, why_no_input=str(reason))
        return replace(site, input=found, shape=shape)

    def _shape_and_order(
        self, name: str, tensor: Tensor, topology: str | None
    ) -> tuple[SlotShape, tuple[int, ...] | None]:
        shape, rank = tuple(tensor.shape), tensor.dim()
        kind = "sequence" if topology in DIRECTIONS else topology
        if not 2 <= rank <= 5 or (kind is not None and (kind, rank) not in _RANKS):
            raise ValueError(
                f"slot {name!r} outputs shape {shape}; a seed needs (N, C), (N, L, C), (N, C, L), (N, C, H, W) or "
                f"(N, C, D, H, W), with topology one of {', '.join((*TOPOLOGIES, *DIRECTIONS))} if it is given"
            )
        try:
            layout = self.layouts.layout(name, tensor) if kind is None else self._stated_layout(name, tensor, kind)
        except UnknownLayoutError:
            raise AmbiguousShapeError(
                f"slot {name!r} outputs shape {shape}, and neither its layers nor passes over other batches and "
                "lengths show which dimension is the batch and which holds the features; state it: "
                f'slots={{{name!r}: "sequence"}} for (N, L, C), "conv" for (N, C, ...)'
            ) from None
        positions = [dim for dim in range(rank) if dim not in (layout.batch, layout.features)]
        if kind is None:
            kind = "features" if rank == 2 else "sequence" if (rank, layout.features) == (3, 2) else "conv"
        order = (
            (layout.batch, layout.features, *positions)
            if kind == "conv"
            else (layout.batch, *positions, layout.features)
        )
        slot_shape = SlotShape(kind, shape[layout.features], rank - 2 if kind == "conv" else 0)
        return slot_shape, None if order == tuple(range(rank)) else order

    def _stated_layout(self, name: str, tensor: Tensor, kind: str) -> Layout:
        if kind != "sequence":
            return Layout(0, 1)
        try:
            batch = self.layouts.batch(name, tensor)
        except UnknownLayoutError:
            batch = 0
        return Layout(batch if batch < 2 else 0, 2)


def _container(output: Any) -> str:
    if hasattr(output, "_fields"):
        return output._fields[0]
    return "tensor" if isinstance(output, Tensor) else "tuple" if isinstance(output, tuple) else "list"


def _with_directions(
    model: nn.Module, sites: list[Site], topologies: Mapping[str, str], example_input: ExampleInput
) -> list[Site]:
    """Sites with the stated or measured direction; a sequence whose direction cannot be measured counts as causal.

    A one-dimensional convolution that is causal becomes a sequence: the convolutions of conv blueprints look ahead.
    """
    stated = {name: DIRECTIONS[kind] for name, kind in topologies.items() if kind in DIRECTIONS}
    unknown: dict[str, tuple[int, int]] = {}
    for site in sites:
        order = site.order or tuple(range(site.shape.rank))
        if site.shape.topology == "sequence" and site.name not in stated:
            unknown[site.name] = order[0], order[1]
        elif site.shape.dims == 1 and site.name not in topologies:
            unknown[site.name] = order[0], order[2]
    found = directions(model, unknown, example_input) if unknown else {}
    return [_directed(site, stated.get(site.name), found.get(site.name, set())) for site in sites]


def _directed(site: Site, stated: bool | None, found: set[str]) -> Site:
    if site.shape.topology == "conv":
        return _as_sequence(site) if found == {"back"} else site
    causal = "ahead" not in found if stated is None else stated
    return replace(site, shape=replace(site.shape, causal=causal))


def _as_sequence(site: Site) -> Site:
    """A site (N, C, L) as (N, L, C)."""
    batch, features, position = site.order or (0, 1, 2)
    samples, channels, length = site.example_shape
    order = None if (batch, position, features) == (0, 1, 2) else (batch, position, features)
    shape = SlotShape("sequence", channels)
    return replace(site, shape=shape, example_shape=(samples, length, channels), order=order)


def _choose(host: _TracedHost) -> list[str]:
    """For "auto": blocks with weights that feed others, which are members of containers or submodules without any."""
    chosen: list[str] = []
    unclear: list[str] = []

    def visit(module: nn.Module, prefix: str) -> None:
        for own_name, child in module.named_children():
            if own_name == "parametrizations" and is_parametrized(module):
                continue
            name = prefix + own_name
            is_member = isinstance(module, _CONTAINERS)
            if not is_member and (isinstance(child, _CONTAINERS) or _holds_blocks(host, name, child)):
                visit(child, name + ".")
            elif not _has_features(host, name, child):
                # A block whose output is the host's output is a head; its parts are not blocks.
                if not is_member or isinstance(child, _CONTAINERS) or not _is_output(host, name):
                    visit(child, name + ".")
            else:
                try:
                    host.site(name, None)
                except AmbiguousShapeError:
                    if host.used is None or name in host.used:
                        unclear.append(name)
                except ValueError:
                    visit(child, name + ".")
                else:
                    chosen.append(name)

    visit(host.model, "")
    if unclear:
        warn_user(
            f"slots that auto leaves out because their shape can be read in several ways: {', '.join(unclear)}; "
            'to grow there, state their topology: slots={"name": "sequence"} for (N, L, C), "conv" for (N, C, ...)',
        )
    if not chosen:
        names = ", ".join(name for name in host.outputs if name)
        raise ValueError(f"found no submodule that could be a slot; name them: slots=[...] from {names}")
    return chosen


def _holds_blocks(host: _TracedHost, prefix: str, module: nn.Module) -> bool:
    """Whether a container inside a submodule has members of several layers, which are better slots than the whole."""
    for name, inner in module.named_modules():
        if isinstance(inner, _CONTAINERS):
            for member, child in inner.named_children():
                path = ".".join(filter(None, (prefix, name, member)))
                if next(child.children(), None) is not None and _has_features(host, path, child):
                    return True
    return False


def _has_features(host: _TracedHost, name: str, module: nn.Module) -> bool:
    """Whether a submodule has weights, runs once and outputs a tensor that is not the host's own output."""
    outputs = host.outputs.get(name, [])
    tensor = first_tensor(outputs[0]) if len(outputs) == 1 else None
    tables = {p for part in module.modules() if isinstance(part, nn.Embedding) for p in part.parameters()}
    if tensor is None or not any(p.dim() > 1 and p not in tables for p in module.parameters()):
        return False
    return not _is_output(host, name)


def _is_output(host: _TracedHost, name: str) -> bool:
    outputs = [first_tensor(output) for output in host.outputs.get(name, [])]
    return any(tensor is final for tensor in outputs for final in tensors(host.result))


def check_activation(site: Site, h: Tensor) -> None:
    """Raise if an activation does not have the shape that was traced."""
    shape = site.shape
    if h.dim() != shape.rank or h.shape[shape.feature_dim] != shape.features:
        raise ValueError(
            f"slot {site.name!r} changed shape: its seed was built for {shape} (traced {site.example_shape}), "
            f"got {tuple(h.shape)}; choose a slot whose features do not change"
        )


def reference_tensor(model: nn.Module, site: Site) -> Tensor:
    """A parameter with the device and dtype of new seeds: the slot's own, else the model's first."""
    nearby = next((p for p in model.get_submodule(site.submodule).parameters() if p.is_floating_point()), None)
    fallback = next((p for p in model.parameters() if p.is_floating_point()), torch.zeros(()))
    return fallback if nearby is None else nearby
