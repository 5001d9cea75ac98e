"""Slot discovery: traced passes determine what each submodule outputs and whether a seed fits there.

A seed sees activations as (N, C), (N, L, C) or (N, C, *space). `Site.order` permutes other layouts:

    submodule's output   order          a seed sees   back
    (L, N, C)            (1, 0, 2)      (N, L, C)     (1, 0, 2)
    (N, H, W, C)         (0, 3, 1, 2)   (N, C, H, W)  (0, 2, 3, 1)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from simic.growth.example import ExampleInput, explain_failure, first_tensor
from simic.growth.influence import directions, used_outputs
from simic.growth.layout import Call, Layout, LayoutFinder, UnknownLayoutError, trace
from simic.growth.slot_choice import choose_auto, choose_linear, drop_unusable
from simic.growth.slot_input import NoInputError, SlotInput, find_input
from simic.growth.slot_patterns import AUTO, LINEAR, Slots, canonical_names, match_slots
from simic.growth.slot_shape import TOPOLOGIES, AmbiguousShapeError, Reads, SlotShape

DIRECTIONS = {"sequence-causal": True, "sequence-bidirectional": False}
"""Topologies of a sequence that also state whether it is causal."""
_RANKS = {("features", 2), ("sequence", 3), ("conv", 3), ("conv", 4), ("conv", 5)}


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
    runs: int = 1
    """Calls of the submodule in one pass."""
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


@dataclass(frozen=True)
class KnownSites:
    """Sites that were found before, for a model that is built again."""

    sites: tuple[Site, ...]


def find_sites(model: nn.Module, slots: Slots | KnownSites, example_input: ExampleInput) -> tuple[Site, ...]:
    """The sites of the slots, see `slot_patterns`; a name that cannot be a slot raises.

    A table from name to topology states what passes cannot determine, for instance (N, C, L) or (N, L, C); a sequence
    may be "sequence-causal" or "sequence-bidirectional" where the host's direction cannot be measured.
    """
    if isinstance(slots, KnownSites):
        match_slots(model, [site.name for site in slots.sites])
        return slots.sites
    if isinstance(slots, str) and slots in (AUTO, *LINEAR):
        host = TracedHost(model, example_input)
        return host.sites(choose_auto(host) if slots == AUTO else choose_linear(host))
    matched = match_slots(model, slots)
    host = TracedHost(model, example_input)
    return host.sites(drop_unusable(host, matched), matched.topologies)


def with_seats(sites: Sequence[Site], seeds_per_slot: int) -> tuple[Site, ...]:
    """Every site once for each seed that it may hold, those of one submodule side by side."""
    seats = range(1, seeds_per_slot)
    return tuple(
        seat
        for site in sites
        for seat in (site, *(replace(site, name=f"{site.name}#{index + 1}", seat=index) for index in seats))
    )


class TracedHost:
    """A host with the outputs of its submodules on the example input."""

    def __init__(self, model: nn.Module, example_input: ExampleInput) -> None:
        self.model, self.example_input = model, example_input
        calls: list[Call] = []
        try:
            self.result = trace(model, example_input, calls)
        except Exception as error:
            raise explain_failure(model, example_input, error) from error
        self.first_names = canonical_names(model)
        """The name under which calls of each submodule are recorded."""
        self.calls: dict[str, list[Call]] = {name: [] for name, _ in model.named_modules()}
        for made in calls:
            self.calls[made.name].append(made)
        self.outputs = {name: [made.output for made in own] for name, own in self.calls.items()}
        self.layouts = LayoutFinder(model, example_input, calls)
        self.used = used_outputs(model, example_input)

    def sites(self, names: Sequence[str], topologies: Mapping[str, str] = MappingProxyType({})) -> tuple[Site, ...]:
        """The sites of submodules, complete with direction and input; a name that cannot be a slot raises."""
        found = [self.site(name, topologies.get(name)) for name in names]
        found = _with_directions(self, found, topologies)
        return tuple(self._with_input(site, stated=site.name in topologies) for site in found)

    def refused(self, names: Sequence[str], topologies: Mapping[str, str]) -> dict[str, str]:
        """Why some of these submodules cannot be slots, by name."""
        reasons = {}
        for name in names:
            try:
                self.site(name, topologies.get(name))
            except ValueError as error:
                reasons[name] = str(error)
        return reasons

    def site(self, name: str, topology: str | None) -> Site:
        """The site of a submodule, without direction and input, or ValueError if it cannot be a slot."""
        recorded = self.first_names[name]
        outputs = self.outputs[recorded]
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
        if self.used is not None and recorded not in self.used:
            raise ValueError(
                f"slot {name!r} has no effect on the host's output: no gradient reaches its first tensor, so a seed "
                "there could not learn; choose a submodule whose output is used"
            )
        shape, order = found.pop()
        example_shape = shapes[0] if order is None else tuple(shapes[0][dim] for dim in order)
        return Site(name, shape, example_shape, _container(outputs[0]), order, runs=len(outputs))

    def _with_input(self, site: Site, *, stated: bool) -> Site:
        """The site with the argument that seeds beside its submodule may read, or with the reason why there is none.

        `stated`: the user said what the dimensions of the output mean; the input's then mean the same.
        """
        try:
            known_features = None if stated else self.layouts.known_features
            found, shape = find_input(self.calls[self.first_names[site.name]], site, known_features)
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
            find = self.layouts.layout if kind is None else partial(self._stated_layout, kind)
            layout = find(self.first_names[name], tensor)
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

    def _stated_layout(self, kind: str, name: str, tensor: Tensor) -> Layout:
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


def _with_directions(host: TracedHost, sites: list[Site], topologies: Mapping[str, str]) -> list[Site]:
    """Sites with the stated or measured direction; a sequence whose direction cannot be measured counts as causal.

    A one-dimensional convolution that is causal becomes a sequence: the convolutions of conv blueprints look ahead.
    """
    stated = {name: DIRECTIONS[kind] for name, kind in topologies.items() if kind in DIRECTIONS}
    unknown: dict[str, tuple[int, int]] = {}
    convolutions = set[str]()
    for site in sites:
        order = site.order or tuple(range(site.shape.rank))
        if site.shape.topology == "sequence" and site.name not in stated:
            unknown[host.first_names[site.name]] = order[0], order[1]
        elif site.shape.dims == 1 and site.name not in topologies:
            unknown[host.first_names[site.name]] = order[0], order[2]
            convolutions.add(host.first_names[site.name])
    found = directions(host.model, unknown, host.example_input, convolutions) if unknown else {}
    return [_directed(site, stated.get(site.name), found.get(host.first_names[site.name], set())) for site in sites]


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
