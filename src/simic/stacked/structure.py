"""What N stacked hosts consist of: the segments of a host, its slots, and the seeds of all hosts in groups.

Shapes: N hosts, S slots. A host is a Sequential of segments; slot s < S belongs to segment s, and its seeds lie behind
or beside that. With k seeds per slot, slots k s to k s + k - 1 belong to segment s, one behind the other:

    x -> segment 0 -> slot 0 -> segment 1 -> slot 1 -> ... -> last segment -> output

The parameters of the N hosts are one `StackedParameters` with a row per host; those of the seeds are one per group (see
`seed_groups`), with a row per seed. Three hosts with an mlp in slot 0 of hosts 0 and 2 and a gated norm in slot 1 of
host 1:

    hosts                rows of hosts 0, 1, 2
    groups[0, "mlp"]     rows of hosts 0, 2
    groups[1, "norm"]    row of host 1
    groups[1, GATE]      row of host 1
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from simic.growth.blueprints import BLUEPRINTS, blueprints_for, new_branch
from simic.growth.isolation import preserved_rng
from simic.growth.seed import blueprint_at, new_gate
from simic.growth.slot_discovery import find_sites, with_seats
from simic.lifecycle.actions import STYLES
from simic.lifecycle.slots import SlotState
from simic.stacked.check import check_alike, check_blueprint, check_hosts, check_parameters, segments_of
from simic.stacked.optimizer import OptimizerConfig, StackedOptimizer
from simic.stacked.parameters import Parameters, StackedParameters, batch_norms, part_of, row_of, stack_statistics
from simic.stacked.seed_groups import GATE, OPERATORS, GroupKey, SeedGroup, SlotSeeds
from simic.stacked.two_layer import MAX_FEATURES, two_layer

_OPERATOR = np.array([OPERATORS.index(style.operator) for style in STYLES])


class Structure:
    """Segments, slots and seed groups of N hosts; it changes between host epochs only."""

    def __init__(
        self,
        make_host: Callable[[], nn.Sequential],
        slot_names: Sequence[str],
        example_input: Tensor,
        rng_seeds: Sequence[int],
        *,
        seeds_per_slot: int = 1,
        join_seeds: bool = True,
        device: torch.device | None = None,
    ) -> None:
        """`join_seeds` runs seeds of different blueprints together where it can."""
        if not len(rng_seeds):
            raise ValueError("rng_seeds must name at least one host, got none: give one rng seed per host")
        self._make_host = make_host
        hosts = [self._new_host(int(rng_seed)) for rng_seed in rng_seeds]
        self._template = hosts[0]
        segments = segments_of(self._template)
        names = list(segments)
        if list(slot_names) != names[: len(slot_names)] or len(slot_names) >= len(names):
            raise ValueError(f"slots must be the first segments of {names}, with at least one behind, got {slot_names}")
        check_parameters(self._template)
        self.segments, self.segment_names = list(segments.values()), names
        sites = find_sites(self._template, list(slot_names), example_input)
        self.sites, self.seeds_per_slot = with_seats(sites, seeds_per_slot), seeds_per_slot
        if other := [site.name for site in sites if site.order is not None]:
            raise ValueError(f"slots of stacked hosts must put out (N, C), (N, L, C) or (N, C, *space); {other} do not")
        # A mix-up between hosts shows only where there are two of them.
        compared = hosts if len(hosts) > 1 else [*hosts, self._new_host(int(rng_seeds[0]) + 1)]
        self.overwriting = check_hosts(compared, sites, example_input)
        """Segments that overwrite their input."""
        self.join_seeds = join_seeds
        self.reference = next(self._template.parameters()).detach().to(device)
        """A tensor with the dtype and device of all parameters."""
        self.hosts = StackedParameters.of_modules(hosts, self.reference)
        self.blueprint_names = blueprints_for(site.shape for site in sites)
        for segment in self.segments:
            segment.to(self.reference.device)  # their buffers are shared by all hosts, except statistics
        self._norms = [*batch_norms(self._template).values()]
        self._set_training(False)
        self.groups: dict[GroupKey, SeedGroup] = {}
        self.ordered: list[SeedGroup] = []
        """The groups in the order of the optimizer's rows."""
        self.operator = np.zeros((len(rng_seeds), len(self.sites)), dtype=np.int64)
        """Blend operator of every seed (N, S), an index into OPERATORS."""
        self._vectors: dict[int, Tensor] = {}
        self._changed, self._seeds = True, b""

    def _new_host(self, rng_seed: int) -> nn.Sequential:
        with preserved_rng():
            torch.default_generator.manual_seed(rng_seed)
            return self._make_host()

    def reset(self, hosts: np.ndarray, rng_seeds: np.ndarray) -> None:
        """Give some hosts newly initialized parameters and an empty optimizer state."""
        networks = [self._new_host(int(rng_seed)) for rng_seed in rng_seeds]
        check_alike(self._template, networks)
        rows = torch.from_numpy(np.asarray(hosts)).to(self.reference.device)
        self.hosts.rows[rows] = torch.stack([row_of(network, self.reference) for network in networks])
        for tensor in self.hosts.optimizer_state.tensors():
            tensor[rows] = 0
        for name, fresh in stack_statistics(networks, self.reference.device).items():
            self.hosts.statistics[name][rows] = fresh

    @contextmanager
    def training(self) -> Iterator[None]:
        """Batch norms use the statistics of the batch and update their own; outside they use their own."""
        self._set_training(True)
        try:
            yield
        finally:
            self._set_training(False)

    def _set_training(self, training: bool) -> None:
        for norm in self._norms:
            norm.training = training

    def copy_hosts(self, origin: Structure, sources: np.ndarray, targets: np.ndarray) -> None:
        """Give the hosts `targets` (M,) the parameters, seeds and optimizer state of the hosts `sources` of `origin`.

        Slot states are copied by the caller, which then calls `sync_with_slots`.
        """
        rows, own = (torch.from_numpy(hosts).to(self.reference.device) for hosts in (sources, targets))
        for tensor, other in zip(self.hosts.tensors(), origin.hosts.tensors(), strict=True):
            tensor[own] = other[rows]
        given = dict(origin.groups)
        for key in list(self.groups | given):
            pieces = []
            if (group := self.groups.pop(key, None)) is not None:
                pieces.append(_select_rows(group, np.flatnonzero(~np.isin(group.hosts, targets))))
            if (group := given.get(key)) is not None:
                chosen, at = np.nonzero(sources[:, None] == group.hosts)
                pieces.append(replace(_select_rows(group, at), hosts=targets[chosen]))
            pieces = [piece for piece in pieces if piece.hosts.size]
            if len(pieces) == 2:
                hosts = np.concatenate([piece.hosts for piece in pieces])
                parameters = pieces[0].parameters.extend(pieces[1].parameters)
                pieces = [replace(pieces[0], hosts=hosts, parameters=parameters)]
            if pieces:
                self.groups[key] = pieces[0]
        self._changed = True

    def segment_parameters(self) -> list[Parameters]:
        """The parameters of each segment, (N, *shape) by name; valid until the groups change."""
        return [part_of(self.hosts.by_name, name) for name in self.segment_names]

    def segment_sizes(self) -> dict[str, int]:
        """Number of parameters of each segment of a host, in order."""
        sizes = zip(self.segment_names, self.segments, strict=True)
        return {name: sum(parameter.numel() for parameter in segment.parameters()) for name, segment in sizes}

    def segment_of(self, slot: int) -> int:
        """The segment that a slot belongs to."""
        return slot // self.seeds_per_slot

    def slots_of(self, segment: int) -> range:
        """The slots of a segment."""
        first = segment * self.seeds_per_slot
        return range(first, min(first + self.seeds_per_slot, len(self.sites)))

    # Seeds.

    def new_seed(self, slot: int, blueprint_index: int, entropy: tuple[int, ...]) -> nn.Module:
        """Build a seed's branch, initialized from `entropy`; raise if it does not fit or cannot run stacked."""
        site = self.sites[slot]
        name = blueprint_at(self.blueprint_names, blueprint_index, site)
        check_blueprint(name, site, self.reference.new_empty(0, device="cpu"))
        return new_branch(name, site.shape, entropy)

    def add_seeds(self, seeds: Iterable[tuple[int, str, int, nn.Module]]) -> None:
        """Put newborn seeds (slot, blueprint, host, branch) into their groups; gates come with `sync_with_slots`."""
        born: dict[GroupKey, list[tuple[int, nn.Module]]] = {}
        for slot, blueprint, host, branch in seeds:
            born.setdefault((slot, blueprint), []).append((host, branch))
        for key, own in born.items():
            self._add_rows(key, *zip(*own, strict=True))

    def _add_rows(self, key: GroupKey, hosts: Sequence[int], modules: Sequence[nn.Module]) -> None:
        self._changed = True
        group = self.groups.get(key)
        if group is not None:
            rows = torch.stack([row_of(module, self.reference) for module in modules])
            group.hosts, group.parameters = np.append(group.hosts, hosts), group.parameters.append(rows)
            return
        rows = StackedParameters.of_modules(modules, self.reference)
        slot, name = key
        shape, reads = self.sites[slot].shape, "output" if name == GATE else BLUEPRINTS[name].reads
        widest = max(shape.features, shape.in_features or 0) if reads == "input" else shape.features
        narrow = name != GATE and shape.topology == "features" and widest <= MAX_FEATURES
        kind = two_layer(modules[0]) if narrow and self.join_seeds else None
        module = modules[0].to(self.reference.device)
        self.groups[key] = SeedGroup(slot, name, module, np.array(hosts), rows, reads, kind)

    def sync_with_slots(self, slot_state: SlotState) -> bool:
        """Drop seeds and gates that the slots no longer hold and add missing gates; whether groups changed."""
        seeds = b"".join(array.tobytes() for array in (slot_state.occupied, slot_state.blueprint, slot_state.style))
        if seeds == self._seeds and not self._changed:
            return False
        self._seeds = seeds
        gated = slot_state.occupied & (_OPERATOR[slot_state.style] == OPERATORS.index("gate"))
        for key, group in list(self.groups.items()):
            slot, name = key
            index = self.blueprint_names.index(name) if name != GATE else None
            here = gated[:, slot] if index is None else slot_state.blueprint[:, slot] == index
            self._keep_rows(key, here[group.hosts])
        for slot, site in enumerate(self.sites):
            group = self.groups.get((slot, GATE))
            known = () if group is None else group.hosts
            if missing := np.setdiff1d(np.flatnonzero(gated[:, slot]), known).tolist():
                cpu = self.reference.new_empty(0, device="cpu")
                self._add_rows((slot, GATE), missing, [new_gate(site.shape, cpu)] * len(missing))  # all are born alike
        self.operator = np.where(slot_state.occupied, _OPERATOR[slot_state.style], 0)
        changed, self._changed = self._changed, False
        return changed

    def _keep_rows(self, key: GroupKey, kept: np.ndarray) -> None:
        if kept.all():
            return
        self._changed = True
        if not kept.any():
            del self.groups[key]
            return
        group, rows = self.groups[key], torch.from_numpy(np.flatnonzero(kept)).to(self.reference.device)
        group.hosts, group.parameters = group.hosts[kept], group.parameters.select(rows)

    def count_seeds(self) -> np.ndarray:
        """Number of parameters of the seed in every slot, gates included (N, S)."""
        counts = np.zeros(self.operator.shape, dtype=np.int64)
        for group in self.groups.values():
            counts[group.hosts, group.slot] += group.parameters.rows.shape[1]
        return counts

    def seeds_of(self, slot: int) -> SlotSeeds:
        """All seeds of a slot, as passes are planned from; valid until the groups change."""
        shape = self.sites[slot].shape
        return SlotSeeds(
            groups=[group for (at, name), group in self.groups.items() if at == slot and name != GATE],
            gates=self.groups.get((slot, GATE)),
            vector=self._vectors.get(slot),
            shape=shape,
            operator=self.operator[:, slot],
        )

    # Rows of all matrices: those of the hosts first, then slot by slot, seeds that run in blocks side by side.

    def new_optimizer(self, config: OptimizerConfig) -> StackedOptimizer:
        """An optimizer for all rows. Host n is its entity n, the seed in slot s of host n is entity (s + 1) N + n."""
        every_host = np.arange(len(self.hosts.rows))
        matrices, entities, owners = [self.hosts], [every_host], [every_host]
        joined: dict[int, list[StackedParameters]] = {}
        self.ordered = sorted(self.groups.values(), key=lambda group: (group.slot, group.two_layer is None))
        for group in self.ordered:
            matrices.append(group.parameters)
            entities.append((group.slot + 1) * len(every_host) + group.hosts)
            owners.append(group.hosts)
            if group.two_layer is not None:
                own = joined.setdefault(group.slot, [])
                group.start = sum(matrix.rows.numel() for matrix in own)
                own.append(group.parameters)
        optimizer = StackedOptimizer(matrices, entities, owners, config, num_slots=len(self.sites))
        self._vectors = {slot: optimizer.join(own) for slot, own in joined.items()}
        return optimizer


def _select_rows(group: SeedGroup, rows: np.ndarray) -> SeedGroup:
    """A copy of some seeds of a group."""
    chosen = torch.from_numpy(rows).to(group.parameters.rows.device)
    return replace(group, hosts=group.hosts[rows], parameters=group.parameters.select(chosen))
