"""StackedHosts: N hosts of one architecture as one tensor program.

Shapes: N hosts, S slots, B samples. A host is a Sequential of segments; behind segment s < S lies slot s. Activations
are (N, B, *their own shape). Hosts that hold the same blueprint with the same operator in a slot run together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import vmap

from simic.growth.blueprints import BLUEPRINTS, Gate, SlotShape, blueprints_for, count_parameters, new_branch
from simic.growth.isolation import preserved_rng
from simic.growth.model import check_branch
from simic.growth.slot_discovery import find_sites
from simic.lifecycle.actions import STYLES, Op
from simic.lifecycle.slots import SlotState, check_actions, execute, tick, to_measure
from simic.lifecycle.stages import LifecycleConfig, Stage
from simic.stacked.check import (
    check_alike,
    check_branches,
    check_figure,
    check_hosts,
    check_parameters,
    segments_of,
)
from simic.stacked.layers import Parameters, part_of, run_segments
from simic.stacked.optimizer import OptimizerConfig, StackedOptimizer
from simic.stacked.parameters import StackedParameters, row_of
from simic.stacked.seed_groups import ActiveSeeds, SeedGroup, SlotPlan, blend_seeds

PerHost = Callable[[Tensor, Tensor], Tensor]
"""(outputs, targets) of one host -> one number."""
ACTIVATION_LIMIT = 1 << 22
"""Bytes of a slot's activation for which hosts run together: beyond, memory is slower than one host after the other."""
_GroupKey = tuple[int, str, str]  # slot, blueprint, operator


@dataclass(frozen=True)
class _Part:
    """Hosts that go through the network together."""

    hosts: np.ndarray
    rows: slice
    plan: list[SlotPlan]


class StackedHosts:
    """Trains, judges and changes N hosts together; each lives exactly as it would alone.

    `batch_size` is what training batches will have; from it follows how many hosts run at once.
    """

    def __init__(
        self,
        make_host: Callable[[], nn.Sequential],
        slot_names: Sequence[str],
        *,
        example_input: Tensor,
        rng_seeds: Sequence[int],
        loss: PerHost,
        metric: PerHost,
        lifecycle: LifecycleConfig | None = None,
        optimizer: OptimizerConfig | None = None,
        batch_size: int = 64,
    ) -> None:
        self.make_host, self.loss, self.metric = make_host, loss, metric
        self.lifecycle, self.optimizer = lifecycle or LifecycleConfig(), optimizer or OptimizerConfig()
        if not len(rng_seeds):
            raise ValueError("rng_seeds must name at least one host, got none: give one rng seed per host")
        fresh = [self._fresh_host(int(seed)) for seed in rng_seeds]
        self._template = fresh[0]
        segments = segments_of(self._template)
        names = list(segments)
        if list(slot_names) != names[: len(slot_names)] or len(slot_names) >= len(names):
            raise ValueError(f"slots must be the first segments of {names}, with at least one behind, got {slot_names}")
        check_parameters(self._template)
        self.segments = list(segments.values())
        self.sites = find_sites(self._template, list(slot_names), example_input)
        if other := [site.name for site in self.sites if site.order is not None]:
            raise ValueError(f"slots of stacked hosts must put out (N, C), (N, L, C) or (N, C, *space); {other} do not")
        # Beside a lone host the check needs another one, to tell apart what belongs to which.
        compared = fresh if len(fresh) > 1 else [*fresh, self._fresh_host(int(rng_seeds[0]) + 1)]
        self._in_place = check_hosts(compared, self.sites, example_input)
        self._reference = next(self._template.parameters()).detach()
        self.hosts = StackedParameters.of_modules(fresh, self._reference)
        self._figures_checked = False
        self.blueprint_names = blueprints_for({site.shape.topology for site in self.sites})
        self.rng_seeds = np.array(rng_seeds, dtype=np.int64)
        self.germinations = np.zeros(len(rng_seeds), dtype=np.int64)
        self.slot_state = SlotState.dormant(len(rng_seeds), len(self.sites))
        self._names = names
        self.groups: dict[_GroupKey, SeedGroup] = {}
        self._checked: set[tuple[int, str]] = set()
        self.host_gradient_norm = np.full(len(rng_seeds), np.nan)
        """Mean norm of each host's gradient, seeds not included, at the last report (N,)."""
        self._regrouped = True
        self._parts: list[_Part] = []
        largest = max(math.prod(site.example_shape[1:]) for site in self.sites) * self._reference.element_size()
        self._hosts_at_once = max(1, ACTIVATION_LIMIT // (largest * batch_size))
        self.sync_with_slots()

    @property
    def num_hosts(self) -> int:
        """N."""
        return len(self.rng_seeds)

    @property
    def host_parameters(self) -> int:
        """Parameters of a host without seeds; all have the same."""
        return self.hosts.rows.shape[1]

    def seed_parameters(self) -> np.ndarray:
        """Parameters of every slot's seed, gates included (N, S)."""
        counts = np.zeros(self.slot_state.stage.shape, dtype=np.int64)
        for group in self.groups.values():
            counts[group.hosts, group.slot] = group.num_parameters
        return counts

    def blueprint_table(self) -> np.ndarray:
        """Parameters of every blueprint in every slot (S, B); -1 where it does not fit."""

        def size(name: str, shape: SlotShape) -> int:
            return count_parameters(name, shape) if shape.topology in BLUEPRINTS[name].topologies else -1

        return np.array([[size(name, site.shape) for name in self.blueprint_names] for site in self.sites])

    # Change: between host epochs only.

    def execute(self, actions: np.ndarray) -> None:
        """Carry out one action per host (N, H). An illegal one raises and changes nothing."""
        check_actions(self.slot_state, actions, self.lifecycle, [site.name for site in self.sites])
        planting = np.flatnonzero(actions[:, 0] == Op.GERMINATE)
        newborn = [(int(h), self._newborn(int(h), int(actions[h, 1]), int(actions[h, 2]))) for h in planting]
        execute(self.slot_state, actions, self.lifecycle)
        for host, branch in newborn:
            slot = int(actions[host, 1])
            self._add(host, slot, branch)
            self.germinations[host] += 1
        self.sync_with_slots()

    def tick(self) -> None:
        """Let one decision of time pass."""
        tick(self.slot_state, self.lifecycle)
        self.sync_with_slots()

    def reset(self, hosts: np.ndarray, rng_seeds: np.ndarray) -> None:
        """Begin new lives in some places: fresh weights, no seeds, nothing remembered."""
        networks = [self._fresh_host(int(rng_seed)) for rng_seed in rng_seeds]
        check_alike(self._template, networks)
        self.rng_seeds[hosts] = rng_seeds
        self.germinations[hosts] = 0
        self.host_gradient_norm[hosts] = np.nan
        fresh = SlotState.dormant(len(hosts), len(self.sites))
        for name, values in vars(fresh).items():
            getattr(self.slot_state, name)[hosts] = values
        for host, network in zip(hosts, networks, strict=True):
            self.hosts.rows[host] = row_of(network, self._reference)
        for tensor in self.hosts.moments.tensors():
            tensor[hosts] = 0
        self.sync_with_slots()

    # Learn and judge.

    def train_step(self, x: Tensor, y: Tensor, rate: Tensor) -> Tensor:
        """One step of every host on its own batch (N, B, ...) with its own learning rate (N,); the losses (N,)."""
        losses, gradients = [], None
        for part in self._parts:
            own, total = self._part_loss(part, x[part.rows], y[part.rows])
            losses.append(own)
            gradients = self._learner.gradients(total, gradients)
        assert gradients is not None
        with torch.no_grad():
            self._norm_sum += self._learner.step(gradients, rate, self._active)
        self._steps += 1
        return torch.cat(losses)

    @torch.no_grad()
    def evaluate(self, x: Tensor, y: Tensor, *, exported: bool = False) -> tuple[Tensor, Tensor]:
        """Loss and metric (N,) on samples (N, B, ...); `exported` leaves live seeds out."""
        alpha = np.where(exported & self.slot_state.live, 0.0, self.slot_state.alpha)
        figures = []
        for part in self._parts:
            plan = self._plan(part.hosts, alpha) if exported else part.plan
            out = self._run(x[part.rows], 0, part.rows, plan)
            self._check_figures(out, y[part.rows])
            figures.append((vmap(self.loss)(out, y[part.rows]), vmap(self.metric)(out, y[part.rows])))
        losses, metrics = (torch.cat(both) for both in zip(*figures, strict=True))
        return losses, metrics

    @torch.no_grad()
    def evaluate_and_attribute(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, np.ndarray]:
        """Loss and metric (N,), and the metric with each seed of `to_measure` switched the other way (N, S), else NaN.

        A seed that speaks is switched off; one in training is switched in at its target. The activations before its
        slot are used again.
        """
        flipped = np.full(self.slot_state.stage.shape, np.nan)
        measured = to_measure(self.slot_state)
        figures = []
        for part in self._parts:
            kept: dict[int, Tensor] = {}
            keep = set(np.flatnonzero(measured[part.hosts].any(0)).tolist())
            own_y = y[part.rows]
            out = self._run(x[part.rows], 0, part.rows, part.plan, kept=kept, keep=keep)
            figures.append((vmap(self.loss)(out, own_y), vmap(self.metric)(out, own_y)))
            for slot, h in kept.items():
                at = np.flatnonzero(measured[part.hosts, slot])
                hosts, chosen = part.hosts[at], torch.from_numpy(at)
                alpha = np.where(self.slot_state.alpha[:, slot] > 0, 0.0, self.slot_state.alpha_target[:, slot])
                result = self._run_behind(slot, h[chosen], hosts, alpha)
                flipped[hosts, slot] = vmap(self.metric)(result, own_y[chosen]).cpu().numpy()
        losses, metrics = (torch.cat(both) for both in zip(*figures, strict=True))
        return losses, metrics, flipped

    def report_gradients(self) -> None:
        """Write the mean gradient norm of each seed, fossils included, since the last report into the slots."""
        norms = (
            self._norm_sum.double().cpu().numpy() / self._steps if self._steps else np.full(len(self._norm_sum), np.nan)
        )
        self.slot_state.gradient_norm[self.slot_state.occupied] = np.nan
        self.host_gradient_norm = norms[: self.num_hosts].copy()
        start = self.num_hosts
        for group in self.groups.values():
            own = np.where(self._learning(group, "branch"), norms[start : start + len(group.hosts)], np.nan)
            self.slot_state.gradient_norm[group.hosts, group.slot] = own
            start += len(group.hosts)
        self._norm_sum.zero_()
        self._steps = 0

    # The pass.

    def _run(
        self,
        x: Tensor,
        start: int,
        hosts: Tensor | slice | None,
        plan: list[SlotPlan],
        *,
        kept: dict[int, Tensor] | None = None,
        keep: set[int] | frozenset[int] = frozenset(),
        constant: bool = False,
    ) -> Tensor:
        """From segment `start` to the end, for some hosts or all; activations before slots in `keep` go to `kept`."""

        def leaves_of(index: int) -> Parameters:
            leaves = self._segment_leaves[index]
            if constant:
                leaves = {name: leaf.detach() for name, leaf in leaves.items()}
            if isinstance(hosts, Tensor):
                return {name: leaf.index_select(0, hosts) for name, leaf in leaves.items()}
            if hosts is not None and len(self._parts) > 1:
                return {name: leaf[hosts] for name, leaf in leaves.items()}
            return leaves

        def behind(index: int, x: Tensor) -> Tensor:
            if index >= len(self.sites):
                return x
            if kept is not None and index in keep:
                kept[index] = x.detach()
            return blend_seeds(x, plan[index])

        return run_segments(self.segments, leaves_of, x, behind, start=start, in_place=self._in_place)

    def _run_behind(self, slot: int, h: Tensor, hosts: np.ndarray, alpha: np.ndarray, learns: bool = False) -> Tensor:
        """The rest of the network behind a slot of `hosts`, given their activations and their seeds' alpha (N,)."""
        plan = [SlotPlan.of([], 0) for _ in self.sites]
        plan[slot] = self._active_seeds(slot, hosts, alpha, learns=learns)
        for later in range(slot + 1, len(self.sites)):
            plan[later] = self._active_seeds(later, hosts, self.slot_state.alpha[:, later], learns=False)
        return self._run(blend_seeds(h, plan[slot]), slot + 1, torch.from_numpy(hosts), plan, constant=True)

    def _part_loss(self, part: _Part, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The losses of a part's hosts, and the sum whose gradient teaches them and their seeds."""
        training = (self.slot_state.stage[part.hosts] == Stage.TRAINING) & (self.lifecycle.incubation == "shadow")
        kept: dict[int, Tensor] = {}
        out = self._run(x, 0, part.rows, part.plan, kept=kept, keep=set(np.flatnonzero(training.any(0)).tolist()))
        losses = vmap(self.loss)(out, y)
        total = losses.sum()
        for slot, h in kept.items():
            at = np.flatnonzero(training[:, slot])
            chosen = torch.from_numpy(at)
            alpha = self.slot_state.alpha_target[:, slot]
            shadow = self._run_behind(slot, h[chosen], part.hosts[at], alpha, learns=True)
            total = total + vmap(self.loss)(shadow, y[chosen]).sum()
        return losses.detach(), total

    def _plan(self, hosts: np.ndarray, alpha: np.ndarray) -> list[SlotPlan]:
        """Who speaks where in a pass of these hosts, with alphas (N, S)."""
        return [self._active_seeds(slot, hosts, alpha[:, slot]) for slot in range(len(self.sites))]

    def _active_seeds(self, slot: int, hosts: np.ndarray, alpha: np.ndarray, *, learns: bool = True) -> SlotPlan:
        """Who speaks in a slot of these hosts, with which alpha (N,); positions are those in `hosts`."""
        position = np.full(self.num_hosts, -1)
        position[hosts] = np.arange(len(hosts))
        active_seeds = []
        for group in self.groups.values():
            if group.slot != slot:
                continue
            here = position[group.hosts] >= 0
            training = self.slot_state.stage[group.hosts, slot] == Stage.TRAINING
            straight = here & training & (self.lifecycle.incubation == "straight_through") & learns
            for chosen, is_straight in ((here & (alpha[group.hosts] > 0), False), (straight, True)):
                if not (rows := np.flatnonzero(chosen)).size:
                    continue
                values = torch.from_numpy(alpha[group.hosts[rows]]).to(self._reference)
                active_seeds.append(
                    ActiveSeeds(
                        group=group,
                        rows=None if len(rows) == len(group.hosts) else torch.from_numpy(rows),
                        at=torch.from_numpy(position[group.hosts[rows]]),
                        alpha=values.view(-1, *[1] * self.sites[slot].shape.rank),
                        straight=is_straight,
                        learns=learns,
                    )
                )
        return SlotPlan.of(active_seeds, len(hosts))

    def _learning(self, group: SeedGroup, part: str) -> np.ndarray:
        """Which seeds of a group receive a gradient (R,): those that speak, and those in training.

        Nothing passes a gate while its seed learns straight-through.
        """
        in_training = self.slot_state.stage[group.hosts, group.slot] == Stage.TRAINING
        heard = part == "branch" or self.lifecycle.incubation != "straight_through"
        return (self.slot_state.alpha[group.hosts, group.slot] > 0) | (in_training & heard)

    def _check_figures(self, out: Tensor, y: Tensor) -> None:
        """Once, and of two hosts: a loss or metric that cannot judge hosts together raises."""
        if not self._figures_checked:
            check_figure("loss", self.loss, out[:2], y[:2])
            check_figure("metric", self.metric, out[:2], y[:2])
            self._figures_checked = True

    # Structure.

    def _fresh_host(self, rng_seed: int) -> nn.Sequential:
        with preserved_rng():
            torch.default_generator.manual_seed(rng_seed)
            return self.make_host()

    def _newborn(self, host: int, slot: int, blueprint_index: int) -> nn.Module:
        if not 0 <= blueprint_index < len(self.blueprint_names):
            raise ValueError(f"a blueprint index must be below {len(self.blueprint_names)}, got {blueprint_index}")
        name, site = self.blueprint_names[blueprint_index], self.sites[slot]
        if site.shape.topology not in BLUEPRINTS[name].topologies:
            raise ValueError(f"blueprint {name!r} does not fit slot {site.name!r} ({site.shape})")
        entropy = (int(self.rng_seeds[host]), slot, int(self.germinations[host]))
        branch = new_branch(name, site.shape, entropy).to(self._reference)
        if (slot, name) not in self._checked:  # once per kind: the checks cost passes
            with preserved_rng():
                check_branch(name, branch, site, self._reference)
            other = new_branch(name, site.shape, (*entropy, 1)).to(self._reference)
            check_branches(name, [branch, other], site, self._reference)
            self._checked.add((slot, name))
        return branch

    def _add(self, host: int, slot: int, branch: nn.Module) -> None:
        blueprint = self.blueprint_names[self.slot_state.blueprint[host, slot]]
        operator = STYLES[self.slot_state.style[host, slot]].operator
        weights = StackedParameters.of_modules([branch], self._reference)
        self._join((slot, blueprint, operator), host, branch, weights)

    def _join(self, key: _GroupKey, host: int, branch: nn.Module, weights: StackedParameters) -> None:
        """Put a seed into its group; a gate, where the operator has one, is new."""
        parts, matrices = {"branch": branch}, {"branch": weights}
        if key[2] == "gate":
            with preserved_rng():
                parts["gate"] = Gate(self.sites[key[0]].shape).to(self._reference)
            matrices["gate"] = StackedParameters.of_modules([parts["gate"]], self._reference)
        self._regrouped = True
        present = self.groups.get(key)
        if present is None:
            self.groups[key] = SeedGroup(key[0], key[2], parts, np.array([host]), matrices)
        else:
            present.hosts = np.append(present.hosts, host)
            present.matrices = {part: present.matrices[part].joined(matrices[part]) for part in matrices}

    def sync_with_slots(self) -> None:
        """Make the groups what the arrays say, and plan who speaks."""
        for key, group in list(self.groups.items()):
            slot, blueprint, operator = key
            index = self.blueprint_names.index(blueprint)
            stays = self.slot_state.blueprint[group.hosts, slot] == index
            styles = np.array([STYLES[style].operator for style in self.slot_state.style[group.hosts, slot]])
            for row in np.flatnonzero(stays & (styles != operator)):
                weights = group.matrices["branch"].select(torch.tensor([row]))
                self._join((slot, blueprint, str(styles[row])), int(group.hosts[row]), group.parts["branch"], weights)
            self._keep(key, stays & (styles == operator))
        if self._regrouped:
            self._regroup()
        learning = [self._learning(group, part) for group in self.groups.values() for part in group.matrices]
        active = np.concatenate([np.ones(self.num_hosts, dtype=bool), *learning])
        self._active = torch.from_numpy(active).to(self._reference)
        everyone = np.arange(self.num_hosts)
        self._parts = []
        for start in range(0, self.num_hosts, self._hosts_at_once):
            hosts = everyone[start : start + self._hosts_at_once]
            rows = slice(start, start + len(hosts))
            self._parts.append(_Part(hosts, rows, self._plan(hosts, self.slot_state.alpha)))

    def _regroup(self) -> None:
        """Bring all weights together again after seeds came, went or changed groups."""
        self._regrouped = False
        everyone = np.arange(self.num_hosts)
        matrices, entities, owners, start = [self.hosts], [everyone], [everyone], self.num_hosts
        for group in self.groups.values():
            for matrix in group.matrices.values():
                matrices.append(matrix)
                entities.append(start + np.arange(len(group.hosts)))
                owners.append(group.hosts)
            start += len(group.hosts)
        self._learner = StackedOptimizer(matrices, entities, owners, self.optimizer)
        self._segment_leaves = [part_of(self.hosts.by_name, name) for name in self._names]
        self._norm_sum, self._steps = self._reference.new_zeros(start), 0

    def _keep(self, key: _GroupKey, stays: np.ndarray) -> None:
        group = self.groups[key]
        if stays.all():
            return
        self._regrouped = True
        if not stays.any():
            del self.groups[key]
            return
        rows = torch.from_numpy(np.flatnonzero(stays))
        group.hosts = group.hosts[stays]
        group.matrices = {part: matrix.select(rows) for part, matrix in group.matrices.items()}
