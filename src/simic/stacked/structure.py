"""What N stacked hosts consist of: the segments of a host, its slots, and the seeds of all hosts in groups.

Shapes: N hosts, S slots. A host is a Sequential of segments; slot s < S lies behind segment s:

    x -> segment 0 -> slot 0 -> segment 1 -> slot 1 -> ... -> last segment -> output

The parameters of the N hosts are one `StackedParameters` with a row per host; those of the seeds are one per group and
part (see `seed_groups`), with a row per seed. Three hosts with an mlp in slot 0 of hosts 0 and 2 and a gated norm in
slot 1 of host 1:

    hosts                             rows of hosts 0, 1, 2
    groups[0, "mlp", "add"]           branch: rows of hosts 0, 2
    groups[1, "norm", "gate"]         branch: row of host 1; gate: row of host 1
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from simic.growth.blueprints import blueprints_for
from simic.growth.isolation import preserved_rng
from simic.growth.seed import new_gate, new_seed
from simic.growth.slot_discovery import find_sites
from simic.lifecycle.actions import STYLES
from simic.lifecycle.slots import SlotState
from simic.stacked.check import check_alike, check_blueprint, check_hosts, check_parameters, segments_of
from simic.stacked.optimizer import OptimizerConfig, StackedOptimizer
from simic.stacked.parameters import Parameters, StackedParameters, part_of, row_of
from simic.stacked.seed_groups import GroupKey, SeedGroup

_OPERATORS = np.array([style.operator for style in STYLES])


class Structure:
    """Segments, slots and seed groups of N hosts; it changes between host epochs only."""

    def __init__(
        self,
        make_host: Callable[[], nn.Sequential],
        slot_names: Sequence[str],
        example_input: Tensor,
        rng_seeds: Sequence[int],
    ) -> None:
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
        self.segments, self._segment_names = list(segments.values()), names
        self.sites = find_sites(self._template, list(slot_names), example_input)
        if other := [site.name for site in self.sites if site.order is not None]:
            raise ValueError(f"slots of stacked hosts must put out (N, C), (N, L, C) or (N, C, *space); {other} do not")
        # A mix-up between hosts shows only where there are two of them.
        compared = hosts if len(hosts) > 1 else [*hosts, self._new_host(int(rng_seeds[0]) + 1)]
        self.overwriting = check_hosts(compared, self.sites, example_input)
        """Segments that overwrite their input."""
        self.reference = next(self._template.parameters()).detach()
        """A tensor with the dtype and device of all parameters."""
        self.hosts = StackedParameters.of_modules(hosts, self.reference)
        self.blueprint_names = blueprints_for({site.shape.topology for site in self.sites})
        self.groups: dict[GroupKey, SeedGroup] = {}
        self._changed = True

    def _new_host(self, rng_seed: int) -> nn.Sequential:
        with preserved_rng():
            torch.default_generator.manual_seed(rng_seed)
            return self._make_host()

    def reset(self, hosts: np.ndarray, rng_seeds: np.ndarray) -> None:
        """Give some hosts newly initialized parameters and an empty optimizer state."""
        networks = [self._new_host(int(rng_seed)) for rng_seed in rng_seeds]
        check_alike(self._template, networks)
        for host, network in zip(hosts, networks, strict=True):
            self.hosts.rows[host] = row_of(network, self.reference)
        for tensor in self.hosts.optimizer_state.tensors():
            tensor[hosts] = 0

    def segment_parameters(self) -> list[Parameters]:
        """The parameters of each segment, (N, *shape) by name; valid until the groups change."""
        return [part_of(self.hosts.by_name, name) for name in self._segment_names]

    # Seeds.

    def new_seed(self, slot: int, blueprint_index: int, entropy: tuple[int, ...]) -> nn.Module:
        """Build a seed's branch, initialized from `entropy`; raise if it does not fit or cannot run stacked."""
        site = self.sites[slot]
        seed = new_seed(self.blueprint_names, blueprint_index, site, entropy, self.reference, check=False)
        check_blueprint(seed.blueprint, site, self.reference)
        return seed.branch

    def add_seed(self, key: GroupKey, host: int, branch: nn.Module, weights: StackedParameters | None = None) -> None:
        """Put a seed into its group, with the parameters of `branch` or the given row; a gate is always new."""
        slot, _, operator = key
        parts = {"branch": branch}
        matrices = {"branch": weights or StackedParameters.of_modules([branch], self.reference)}
        if operator == "gate":
            parts["gate"] = new_gate(self.sites[slot].shape, self.reference)
            matrices["gate"] = StackedParameters.of_modules([parts["gate"]], self.reference)
        self._changed = True
        group = self.groups.get(key)
        if group is None:
            self.groups[key] = SeedGroup(slot, operator, parts, np.array([host]), matrices)
        else:
            group.hosts = np.append(group.hosts, host)
            group.matrices = {part: matrix.append(matrices[part]) for part, matrix in group.matrices.items()}

    def sync_with_slots(self, slot_state: SlotState) -> bool:
        """Drop seeds that the slots no longer hold and regroup those with a new operator; whether groups changed."""
        for key, group in list(self.groups.items()):
            slot, blueprint, operator = key
            present = slot_state.blueprint[group.hosts, slot] == self.blueprint_names.index(blueprint)
            operators = _OPERATORS[slot_state.style[group.hosts, slot]]
            for row in np.flatnonzero(present & (operators != operator)):
                weights = group.matrices["branch"].select(torch.tensor([row]))
                new_key = (slot, blueprint, str(operators[row]))
                self.add_seed(new_key, int(group.hosts[row]), group.parts["branch"], weights)
            self._keep_rows(key, present & (operators == operator))
        changed, self._changed = self._changed, False
        return changed

    def _keep_rows(self, key: GroupKey, kept: np.ndarray) -> None:
        if kept.all():
            return
        self._changed = True
        if not kept.any():
            del self.groups[key]
            return
        group, rows = self.groups[key], torch.from_numpy(np.flatnonzero(kept))
        group.hosts = group.hosts[kept]
        group.matrices = {part: matrix.select(rows) for part, matrix in group.matrices.items()}

    # Rows of all matrices: those of the hosts first, then group by group.

    def new_optimizer(self, config: OptimizerConfig) -> StackedOptimizer:
        """An optimizer for all rows; hosts are its entities 0..N-1, the seeds of the groups follow in order."""
        every_host = np.arange(len(self.hosts.rows))
        matrices, entities, owners, start = [self.hosts], [every_host], [every_host], len(every_host)
        for group in self.groups.values():
            for matrix in group.matrices.values():
                matrices.append(matrix)
                entities.append(start + np.arange(len(group.hosts)))
                owners.append(group.hosts)
            start += len(group.hosts)
        return StackedOptimizer(matrices, entities, owners, config)
