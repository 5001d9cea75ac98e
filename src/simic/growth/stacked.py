"""StackedHosts: N hosts of one architecture as one tensor program.

Shapes: N hosts, S slots, B samples. A host is a Sequential of segments; behind segment s < S lies slot s. Activations
are (N, B, *their own shape). Hosts that hold the same blueprint with the same operator in a slot run together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import vmap

from simic.actions import STYLES, Op
from simic.growth.blend import OPERATORS, straight_through
from simic.growth.blueprints import Gate, blueprints_for, count_parameters, get_blueprint, new_branch
from simic.growth.matrix import ParameterMatrix, row_of
from simic.growth.model import check_branch
from simic.growth.sites import find_sites
from simic.growth.stacked_layers import run_stacked
from simic.growth.stacked_optimizer import OptimizerConfig, step
from simic.lifecycle import LifecycleConfig, Stage
from simic.passes import preserved_rng
from simic.slots import Slots, check_actions, execute, tick

PerHost = Callable[[Tensor, Tensor], Tensor]
"""(outputs, targets) of one host -> one number."""
_GroupKey = tuple[int, str, str]  # slot, blueprint, operator


@dataclass
class SeedGroup:
    """Seeds of one blueprint and operator in one slot of several hosts."""

    slot: int
    operator: str
    parts: dict[str, nn.Module]  # branch and, for the gate operator, gate: their structure, not their weights
    hosts: np.ndarray  # (R,) whose they are
    matrices: dict[str, ParameterMatrix]  # the weights of each part
    gradient_sum: Tensor  # (R,) of norms, since the last report

    @property
    def num_parameters(self) -> int:
        """Of one seed, its gate included."""
        return sum(matrix.rows.shape[1] for matrix in self.matrices.values())


@dataclass(frozen=True)
class _Voice:
    """Seeds of one group that speak in a pass."""

    group: SeedGroup
    rows: Tensor | None  # which of the group; None for all
    at: Tensor | None  # where in the activation; None for everywhere, in order
    alpha: Tensor  # (R, 1, ...)
    straight: bool = False
    """Heard only by its own gradient: straight-through incubation."""
    learns: bool = True


class StackedHosts:
    """Trains, judges and changes N hosts together; each lives exactly as it would alone."""

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
    ) -> None:
        self.make_host, self.loss, self.metric = make_host, loss, metric
        self.lifecycle, self.optimizer = lifecycle or LifecycleConfig(), optimizer or OptimizerConfig()
        with preserved_rng():
            template = make_host()
        names = [name for name, _ in template.named_children()]
        if list(slot_names) != names[: len(slot_names)] or len(slot_names) >= len(names):
            raise ValueError(f"slots must be the first segments of {names}, with at least one behind, got {slot_names}")
        self._reference = next(template.parameters()).detach()
        self.sites = find_sites(template, list(slot_names), example_input)
        self.segments = list(template.children())
        self._segment_names = names
        self.blueprint_names = blueprints_for({site.shape.topology for site in self.sites})
        self.rng_seeds = np.array(rng_seeds, dtype=np.int64)
        self.germinations = np.zeros(len(rng_seeds), dtype=np.int64)
        self.life = Slots.dormant(len(rng_seeds), len(self.sites))
        self.hosts = ParameterMatrix.of_modules([self._fresh_host(int(seed)) for seed in rng_seeds], self._reference)
        self.groups: dict[_GroupKey, SeedGroup] = {}
        self._steps = 0
        self._plan: list[list[_Voice]] = [[] for _ in self.sites]
        self._checked: set[tuple[int, str]] = set()

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
        counts = np.zeros(self.life.stage.shape, dtype=np.int64)
        for group in self.groups.values():
            counts[group.hosts, group.slot] = group.num_parameters
        return counts

    def blueprint_table(self) -> np.ndarray:
        """Parameters of every blueprint in every slot (S, B); -1 where it does not fit."""
        fits = [
            [site.shape.topology in get_blueprint(b).topologies for b in self.blueprint_names] for site in self.sites
        ]
        return np.array(
            [
                [
                    count_parameters(b, site.shape) if fit else -1
                    for b, fit in zip(self.blueprint_names, row, strict=True)
                ]
                for site, row in zip(self.sites, fits, strict=True)
            ]
        )

    # Change: between host epochs only.

    def execute(self, actions: np.ndarray) -> None:
        """Carry out one action per host (N, H). An illegal one raises and changes nothing."""
        check_actions(self.life, actions, self.lifecycle, [site.name for site in self.sites])
        planting = np.flatnonzero(actions[:, 0] == Op.GERMINATE)
        newborn = [(int(h), self._newborn(int(h), int(actions[h, 1]), int(actions[h, 2]))) for h in planting]
        execute(self.life, actions, self.lifecycle)
        for host, branch in newborn:
            slot = int(actions[host, 1])
            self._add(host, slot, branch)
            self.germinations[host] += 1
        self._follow_life()

    def tick(self) -> None:
        """Let one decision of time pass."""
        tick(self.life, self.lifecycle)
        self._follow_life()

    def reset(self, hosts: np.ndarray, rng_seeds: np.ndarray) -> None:
        """Begin new lives in some places: fresh weights, no seeds, nothing remembered."""
        self.rng_seeds[hosts] = rng_seeds
        self.germinations[hosts] = 0
        fresh = Slots.dormant(len(hosts), len(self.sites))
        for name, values in vars(fresh).items():
            getattr(self.life, name)[hosts] = values
        for host in hosts:
            self.hosts.rows[host] = row_of(self._fresh_host(int(self.rng_seeds[host])), self._reference)
        for tensor in self.hosts.moments.tensors():
            tensor[hosts] = 0
        self._follow_life()

    # Learn and judge.

    def train_step(self, x: Tensor, y: Tensor, rate: Tensor) -> Tensor:
        """One step of every host on its own batch (N, B, ...) with its own learning rate (N,); the losses (N,)."""
        kept: dict[int, Tensor] = {}
        shadows = self._in_shadow()
        losses = vmap(self.loss)(self._run(x, 0, None, self._plan, kept=kept, keep=set(shadows)), y)
        total = losses.sum()
        for slot, hosts in shadows.items():
            total = total + self._shadow_loss(slot, hosts, kept[slot], y)
        self._learn(total, rate)
        return losses.detach()

    @torch.no_grad()
    def evaluate(self, x: Tensor, y: Tensor, *, exported: bool = False) -> tuple[Tensor, Tensor]:
        """Loss and metric (N,) on samples (N, B, ...); `exported` leaves live seeds out."""
        plan = self._plan
        if exported:
            silent = np.where(self.life.live, 0.0, self.life.alpha)
            plan = [self._voices(slot, np.arange(self.num_hosts), silent[:, slot]) for slot in range(len(self.sites))]
        out = self._run(x, 0, None, plan)
        return vmap(self.loss)(out, y), vmap(self.metric)(out, y)

    @torch.no_grad()
    def evaluate_and_attribute(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, np.ndarray]:
        """Loss and metric (N,), and the metric with each live seed switched the other way (N, S), NaN elsewhere.

        A seed that speaks is switched off; one in training is switched in at its target. The activations before its
        slot are used again.
        """
        flipped = np.full(self.life.stage.shape, np.nan)
        speaking = self.life.live & (self.life.alpha > 0)
        measured = speaking | (self.life.stage == Stage.TRAINING)
        kept: dict[int, Tensor] = {}
        out = self._run(x, 0, None, self._plan, kept=kept, keep=set(np.flatnonzero(measured.any(0)).tolist()))
        for slot, h in kept.items():
            hosts = np.flatnonzero(measured[:, slot])
            alpha = np.where(speaking[:, slot], 0.0, self.life.alpha_target[:, slot])
            result = self._run_behind(slot, h, hosts, alpha)
            flipped[hosts, slot] = vmap(self.metric)(result, y[torch.from_numpy(hosts)]).cpu().numpy()
        return vmap(self.loss)(out, y), vmap(self.metric)(out, y), flipped

    def report_gradients(self) -> None:
        """Write each live seed's mean gradient norm since the last report into the slots."""
        self.life.gradient_norm[self.life.live] = np.nan
        for group in self.groups.values():
            live = self.life.live[group.hosts, group.slot]
            active = self._learning(group, "branch")
            norms = np.where(active & bool(self._steps), group.gradient_sum.cpu().numpy() / max(self._steps, 1), np.nan)
            self.life.gradient_norm[group.hosts[live], group.slot] = norms[live]
            group.gradient_sum.zero_()
        self._steps = 0

    # The pass.

    def _run(
        self,
        x: Tensor,
        start: int,
        hosts: Tensor | None,
        plan: list[list[_Voice]],
        *,
        kept: dict[int, Tensor] | None = None,
        keep: set[int] | frozenset[int] = frozenset(),
        constant: bool = False,
    ) -> Tensor:
        """From segment `start` to the end, for some hosts or all; activations before slots in `keep` go to `kept`."""
        for index in range(start, len(self.segments)):
            prefix = self._segment_names[index] + "."
            leaves = {k.removeprefix(prefix): v for k, v in self.hosts.leaves.items() if k.startswith(prefix)}
            if constant:
                leaves = {name: leaf.detach() for name, leaf in leaves.items()}
            if hosts is not None:
                leaves = {name: leaf[hosts] for name, leaf in leaves.items()}
            x = run_stacked(self.segments[index], leaves, x)
            if index < len(self.sites):
                if kept is not None and index in keep:
                    kept[index] = x.detach()
                x = _speak(x, plan[index])
        return x

    def _run_behind(self, slot: int, h: Tensor, hosts: np.ndarray, alpha: np.ndarray, learns: bool = False) -> Tensor:
        """The rest of the network behind a slot, in which the seeds of `hosts` speak with `alpha` (N,)."""
        index = torch.from_numpy(hosts)
        plan: list[list[_Voice]] = [[] for _ in self.sites]
        plan[slot] = self._voices(slot, hosts, alpha, learns=learns)
        for later in range(slot + 1, len(self.sites)):
            plan[later] = self._voices(later, hosts, self.life.alpha[:, later], learns=False)
        x = _speak(h[index], plan[slot])
        return self._run(x, slot + 1, index, plan, constant=True)

    def _in_shadow(self) -> dict[int, np.ndarray]:
        """Slots with seeds that learn in a pass of their own, and their hosts."""
        if self.lifecycle.incubation != "shadow":
            return {}
        training = self.life.stage == Stage.TRAINING
        return {int(slot): np.flatnonzero(training[:, slot]) for slot in np.flatnonzero(training.any(0))}

    def _shadow_loss(self, slot: int, hosts: np.ndarray, h: Tensor, y: Tensor) -> Tensor:
        out = self._run_behind(slot, h, hosts, self.life.alpha_target[:, slot], learns=True)
        return vmap(self.loss)(out, y[torch.from_numpy(hosts)]).sum()

    def _voices(self, slot: int, hosts: np.ndarray, alpha: np.ndarray, *, learns: bool = True) -> list[_Voice]:
        """Who speaks in a slot of these hosts, with which alpha (N,); positions are those in `hosts`."""
        position = np.full(self.num_hosts, -1)
        position[hosts] = np.arange(len(hosts))
        voices = []
        for group in self.groups.values():
            if group.slot != slot:
                continue
            here = position[group.hosts] >= 0
            training = self.life.stage[group.hosts, slot] == Stage.TRAINING
            straight = here & training & (self.lifecycle.incubation == "straight_through") & learns
            for chosen, is_straight in ((here & (alpha[group.hosts] > 0), False), (straight, True)):
                rows = np.flatnonzero(chosen)
                if not rows.size or (is_straight and not learns):
                    continue
                at = position[group.hosts[rows]]
                everywhere = len(rows) == len(hosts) and (at == np.arange(len(at))).all()
                values = torch.from_numpy(alpha[group.hosts[rows]]).to(self._reference)
                voices.append(
                    _Voice(
                        group=group,
                        rows=None if len(rows) == len(group.hosts) else torch.from_numpy(rows),
                        at=None if everywhere else torch.from_numpy(at),
                        alpha=values.view(-1, *[1] * self.sites[slot].shape.rank),
                        straight=is_straight,
                        learns=learns,
                    )
                )
        return voices

    # Learning.

    def _learn(self, total: Tensor, rate: Tensor) -> None:
        groups = list(self.groups.values())
        parts = [(group, part) for group in groups for part in group.matrices]
        matrices = [self.hosts, *(group.matrices[part] for group, part in parts)]
        leaves = [leaf for matrix in matrices for leaf in matrix.leaves.values()]
        found = iter(torch.autograd.grad(total, leaves, allow_unused=True))
        gradients = [matrix.gradient([next(found) for _ in matrix.leaves]) for matrix in matrices]
        with torch.no_grad():
            squares = [gradient.square().sum(1) for gradient in gradients]
            scale = self._clip_scale(squares, parts)
            step(self.hosts.rows, gradients[0] * scale.unsqueeze(1), self.hosts.moments, rate, self.optimizer)
            for (group, part), matrix, gradient in zip(parts, matrices[1:], gradients[1:], strict=True):
                owners = torch.from_numpy(group.hosts)
                active = torch.from_numpy(self._learning(group, part))
                if active.any():
                    clipped, all_or_some = gradient * scale[owners].unsqueeze(1), None if active.all() else active
                    step(matrix.rows, clipped, matrix.moments, rate[owners], self.optimizer, all_or_some)
        self._steps += 1

    def _clip_scale(self, squares: list[Tensor], parts: list[tuple[SeedGroup, str]]) -> Tensor:
        """What each host's gradient is multiplied with (N,); on the way each seed's norm is noted."""
        total = squares[0]
        for group in self.groups.values():
            own = sum(square for (other, _), square in zip(parts, squares[1:], strict=True) if other is group)
            assert isinstance(own, Tensor)
            total = total.index_add(0, torch.from_numpy(group.hosts), own)
            group.gradient_sum += own.sqrt()
        return (self.optimizer.max_gradient_norm / (total.sqrt() + 1e-6)).clamp(max=1.0)

    def _learning(self, group: SeedGroup, part: str) -> np.ndarray:
        """Which seeds of a group receive a gradient (R,): those that speak, and those in training.

        Nothing passes a gate while its seed learns straight-through.
        """
        in_training = self.life.stage[group.hosts, group.slot] == Stage.TRAINING
        heard = part == "branch" or self.lifecycle.incubation != "straight_through"
        return (self.life.alpha[group.hosts, group.slot] > 0) | (in_training & heard)

    # Structure.

    def _fresh_host(self, rng_seed: int) -> nn.Sequential:
        with preserved_rng():
            torch.default_generator.manual_seed(rng_seed)
            return self.make_host()

    def _newborn(self, host: int, slot: int, blueprint_index: int) -> nn.Module:
        if not 0 <= blueprint_index < len(self.blueprint_names):
            raise ValueError(f"a blueprint index must be below {len(self.blueprint_names)}, got {blueprint_index}")
        name, site = self.blueprint_names[blueprint_index], self.sites[slot]
        if site.shape.topology not in get_blueprint(name).topologies:
            raise ValueError(f"blueprint {name!r} does not fit slot {site.name!r} ({site.shape})")
        branch = new_branch(name, site.shape, (int(self.rng_seeds[host]), slot, int(self.germinations[host])))
        branch.to(self._reference)
        if (slot, name) not in self._checked:  # once per kind: the check costs a pass
            with preserved_rng():
                check_branch(name, branch, site, self._reference)
            self._checked.add((slot, name))
        return branch

    def _add(self, host: int, slot: int, branch: nn.Module) -> None:
        blueprint = self.blueprint_names[self.life.blueprint[host, slot]]
        operator = STYLES[self.life.style[host, slot]].operator
        weights = ParameterMatrix.of_modules([branch], self._reference)
        self._join((slot, blueprint, operator), host, branch, weights)

    def _join(self, key: _GroupKey, host: int, branch: nn.Module, weights: ParameterMatrix) -> None:
        """Put a seed into its group; a gate, where the operator has one, is new."""
        parts, matrices = {"branch": branch}, {"branch": weights}
        if key[2] == "gate":
            with preserved_rng():
                parts["gate"] = Gate(self.sites[key[0]].shape).to(self._reference)
            matrices["gate"] = ParameterMatrix.of_modules([parts["gate"]], self._reference)
        present, zero = self.groups.get(key), weights.rows.new_zeros(1)
        if present is None:
            self.groups[key] = SeedGroup(key[0], key[2], parts, np.array([host]), matrices, zero)
        else:
            present.hosts = np.append(present.hosts, host)
            present.matrices = {part: present.matrices[part].joined(matrices[part]) for part in matrices}
            present.gradient_sum = torch.cat([present.gradient_sum, zero])

    def _follow_life(self) -> None:
        """Make the groups what the arrays say, and plan who speaks."""
        for key, group in list(self.groups.items()):
            slot, blueprint, operator = key
            index = self.blueprint_names.index(blueprint)
            stays = self.life.blueprint[group.hosts, slot] == index
            styles = np.array([STYLES[style].operator for style in self.life.style[group.hosts, slot]])
            for row in np.flatnonzero(stays & (styles != operator)):
                weights = group.matrices["branch"].select(torch.tensor([row]))
                self._join((slot, blueprint, str(styles[row])), int(group.hosts[row]), group.parts["branch"], weights)
            self._keep(key, stays & (styles == operator))
        everyone = np.arange(self.num_hosts)
        self._plan = [self._voices(slot, everyone, self.life.alpha[:, slot]) for slot in range(len(self.sites))]

    def _keep(self, key: _GroupKey, stays: np.ndarray) -> None:
        group = self.groups[key]
        if stays.all():
            return
        if not stays.any():
            del self.groups[key]
            return
        rows = torch.from_numpy(np.flatnonzero(stays))
        group.hosts = group.hosts[stays]
        group.matrices = {part: matrix.select(rows) for part, matrix in group.matrices.items()}
        group.gradient_sum = group.gradient_sum[rows]


def _speak(h: Tensor, voices: list[_Voice]) -> Tensor:
    """The activation with every voice blended in."""
    if not voices:
        return h
    spoken = [_blended(h if voice.at is None else h[voice.at], voice) for voice in voices]
    if len(voices) == 1 and voices[0].at is None:
        return spoken[0]
    at = torch.cat([voice.at for voice in voices if voice.at is not None])
    silent = torch.ones(len(h), dtype=torch.bool).index_fill(0, at, False).nonzero().squeeze(1)
    order = torch.cat([silent, at])
    return torch.cat([h[silent], *spoken])[order.argsort()]


def _blended(h: Tensor, voice: _Voice) -> Tensor:
    group = voice.group
    own: dict[str, dict[str, Tensor]] = {}
    for part, matrix in group.matrices.items():
        leaves = matrix.leaves if voice.learns else {name: leaf.detach() for name, leaf in matrix.leaves.items()}
        own[part] = leaves if voice.rows is None else {name: leaf[voice.rows] for name, leaf in leaves.items()}
    heard = h.detach() if voice.straight else h
    branch = run_stacked(group.parts["branch"], own["branch"], heard)
    if voice.straight:
        return straight_through(h, branch)
    gate = run_stacked(group.parts["gate"], own["gate"], h) if "gate" in own else None
    return OPERATORS[group.operator](h, branch, voice.alpha, gate)
