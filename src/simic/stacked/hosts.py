"""StackedHosts: N hosts of one architecture, trained and evaluated as one tensor program.

Shapes: N hosts, M of them in a pass, S slots, H heads, B samples. Activations are (M, B, *their own shape). `structure`
holds the parameters of hosts and seeds, `seed_groups` runs the seeds of a slot; here they are trained and evaluated.

A pass has two seams for other modules: `plan_pass` says which seeds are active with which alpha, `run` and `run_from`
compute the outputs under such a plan. An ablation of slot 1 keeps the activation before that slot and computes the rest
again:

    run(x, plan, keep={1})          x -> segment 0 -> slot 0 -> segment 1 -+-> slot 1 -> segment 2 -> output
                                                                           | kept[1]
    run_from(1, kept[1], other)                                            +-> slot 1 -> segment 2 -> output
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import vmap

from simic.growth.blueprints import parameter_table
from simic.lifecycle.actions import STYLES, Column, Op
from simic.lifecycle.slots import SlotState, apply_actions, check_actions, plant_fossil, tick, to_measure
from simic.lifecycle.stages import LifecycleConfig, Stage
from simic.stacked.check import check_figure
from simic.stacked.layers import run_segments
from simic.stacked.optimizer import OptimizerConfig
from simic.stacked.parameters import Parameters, Rows, take_rows
from simic.stacked.seed_groups import SeedGroup, SlotPlan, blend_seeds, plan_slot
from simic.stacked.structure import Structure

PerHost = Callable[[Tensor, Tensor], Tensor]
"""(outputs, targets) of one host -> one number."""
Kept = dict[int, Tensor]
"""Activations (M, B, ...) before the seeds of some slots."""
ACTIVATION_LIMIT = 1 << 22
"""Bytes of a slot's activation up to which hosts run together: beyond, memory is slower than fewer hosts at a time."""


class _Chunk(NamedTuple):
    """Hosts that run together, and their plan with the present alphas."""

    hosts: np.ndarray
    rows: slice
    plan: list[SlotPlan]


class StackedHosts:
    """N hosts that are trained, evaluated and grown together; each gets the same results as it would alone.

    `batch_size` is that of the training batches; it determines how many hosts run at once.
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
        self.loss, self.metric = loss, metric
        self.lifecycle, self.optimizer_config = lifecycle or LifecycleConfig(), optimizer or OptimizerConfig()
        self.structure = Structure(make_host, slot_names, example_input, rng_seeds)
        self.segments, self.sites, self.hosts = self.structure.segments, self.structure.sites, self.structure.hosts
        self.groups, self.blueprint_names = self.structure.groups, self.structure.blueprint_names
        self.rng_seeds = np.array(rng_seeds, dtype=np.int64)
        self.germinations = np.zeros(self.num_hosts, dtype=np.int64)
        self.slot_state = SlotState.dormant(self.num_hosts, len(self.sites))
        self.host_gradient_norm = np.full(self.num_hosts, np.nan)
        """Mean gradient norm of each host without its seeds, as of the last `report_gradients` (N,)."""
        largest = max(math.prod(site.example_shape[1:]) for site in self.sites) * self.hosts.rows.element_size()
        self.hosts_at_once = max(1, ACTIVATION_LIMIT // (largest * batch_size))
        self._figures_checked = False
        self.sync_with_slots()

    @property
    def num_hosts(self) -> int:
        """N."""
        return len(self.rng_seeds)

    @property
    def host_parameters(self) -> int:
        """Number of parameters of a host without seeds."""
        return self.hosts.rows.shape[1]

    def seed_parameters(self) -> np.ndarray:
        """Number of parameters of the seed in every slot, gates included (N, S)."""
        counts = np.zeros(self.slot_state.stage.shape, dtype=np.int64)
        for group in self.groups.values():
            counts[group.hosts, group.slot] = group.num_parameters
        return counts

    def blueprint_table(self) -> np.ndarray:
        """Number of parameters of every blueprint in every slot (S, blueprints); -1 where it does not fit."""
        return parameter_table(self.blueprint_names, [site.shape for site in self.sites])

    # Change: between host epochs only.

    def execute(self, actions: np.ndarray, legal: np.ndarray | None = None) -> None:
        """Carry out one action per host (N, H). An illegal action raises and changes nothing.

        `legal` (N, ops, S), if known, saves computing the legal operations again.
        """
        check_actions(self.slot_state, actions, self.lifecycle, [site.name for site in self.sites], legal)
        seeds = []
        # All seeds are built before anything changes, because building one may raise.
        for host in np.flatnonzero(actions[:, Column.OP] == Op.GERMINATE).tolist():
            slot, blueprint, style = actions[host, [Column.SLOT, Column.BLUEPRINT, Column.STYLE]].tolist()
            entropy = (int(self.rng_seeds[host]), slot, int(self.germinations[host]))
            branch = self.structure.new_seed(slot, blueprint, entropy)
            seeds.append(((slot, self.blueprint_names[blueprint], STYLES[style].operator), host, branch))
        apply_actions(self.slot_state, actions, self.lifecycle)
        for key, host, branch in seeds:
            self.structure.add_seed(key, host, branch)
            self.germinations[host] += 1
        self.sync_with_slots()

    def plant(self, actions: np.ndarray) -> None:
        """Germinate as `actions` (N, H) say and fossilize at once, at alpha 1: grown networks from the start."""
        self.execute(actions)
        hosts = np.flatnonzero(actions[:, Column.OP] == Op.GERMINATE)
        plant_fossil(self.slot_state, (hosts, actions[hosts, Column.SLOT]))
        self.sync_with_slots()

    def tick(self) -> None:
        """Advance the lifecycle by one decision."""
        tick(self.slot_state, self.lifecycle)
        self.sync_with_slots()

    def reset(self, hosts: np.ndarray, rng_seeds: np.ndarray) -> None:
        """Replace some hosts by new ones: initial weights, no seeds, empty optimizer state."""
        self.structure.reset(hosts, rng_seeds)
        self.rng_seeds[hosts] = rng_seeds
        self.germinations[hosts] = 0
        self.host_gradient_norm[hosts] = np.nan
        self.slot_state.clear(hosts)
        self.sync_with_slots()

    def sync_with_slots(self) -> None:
        """Bring groups, optimizer and plans in line with `slot_state`; call it after changing that."""
        if self.structure.sync_with_slots(self.slot_state):
            # The optimizer moves all parameters into new memory, so views of the old memory are taken anew.
            self._optimizer = self.structure.new_optimizer(self.optimizer_config)
            self._segment_parameters = self.structure.segment_parameters()
            self._norm_sum, self._steps = self.structure.reference.new_zeros(self._optimizer.num_entities), 0
        learning = [self._learning(group, part) for group in self.groups.values() for part in group.matrices]
        learning = np.concatenate([np.ones(self.num_hosts, dtype=bool), *learning])
        self._learning_rows = torch.from_numpy(learning).to(self.structure.reference)
        self._chunks = []
        for start in range(0, self.num_hosts, self.hosts_at_once):
            hosts = np.arange(start, min(start + self.hosts_at_once, self.num_hosts))
            plan = self.plan_pass(hosts, self.slot_state.alpha)
            self._chunks.append(_Chunk(hosts, slice(start, start + len(hosts)), plan))

    def _learning(self, group: SeedGroup, part: str) -> np.ndarray:
        """Which seeds of a group receive a gradient (R,): those blended in, and those in training."""
        in_training = self.slot_state.stage[group.hosts, group.slot] == Stage.TRAINING
        # The straight-through output does not depend on the gate.
        trains = part == "branch" or self.lifecycle.incubation != "straight_through"
        return (self.slot_state.alpha[group.hosts, group.slot] > 0) | (in_training & trains)

    # Forward passes.

    def plan_pass(
        self, hosts: np.ndarray, alpha: np.ndarray, *, learning: Collection[int] | None = None
    ) -> list[SlotPlan]:
        """Which seeds are active in every slot in a pass of `hosts` (M,), with alphas (N, S).

        Seeds in the slots `learning` receive gradients; None stands for all slots.
        """
        straight = (self.slot_state.stage == Stage.TRAINING) & (self.lifecycle.incubation == "straight_through")
        plans = []
        for slot in range(len(self.sites)):
            groups = [group for group in self.groups.values() if group.slot == slot]
            learns = learning is None or slot in learning
            plans.append(plan_slot(groups, hosts, alpha[:, slot], straight[:, slot] & learns, learns=learns))
        return plans

    def run(
        self, x: Tensor, hosts: Rows, plan: Sequence[SlotPlan], *, keep: Collection[int] = ()
    ) -> tuple[Tensor, Kept]:
        """Outputs of `hosts` for inputs (M, B, ...), and the activations before the seeds of the slots `keep`."""
        return self._run(x, 0, hosts, plan, keep, constant=False)

    def run_from(
        self, slot: int, h: Tensor, hosts: Rows, plan: Sequence[SlotPlan], *, keep: Collection[int] = ()
    ) -> tuple[Tensor, Kept]:
        """Like `run`, from the activation h that an earlier pass kept at `slot`; hosts' parameters are constant."""
        return self._run(blend_seeds(h, plan[slot]), slot + 1, hosts, plan, keep, constant=True)

    def _run(
        self, x: Tensor, start: int, hosts: Rows, plan: Sequence[SlotPlan], keep: Collection[int], *, constant: bool
    ) -> tuple[Tensor, Kept]:
        kept: Kept = {}
        if isinstance(hosts, slice) and len(self._chunks) == 1:
            hosts = None  # all of them: no slicing in the backward pass

        def after_segment(index: int, h: Tensor) -> Tensor:
            if index >= len(self.sites):
                return h
            if index in keep:
                kept[index] = h.detach()
            return blend_seeds(h, plan[index])

        def parameters_of(index: int) -> Parameters:
            return take_rows(self._segment_parameters[index], hosts, constant=constant)

        overwriting = self.structure.overwriting
        out = run_segments(self.segments, parameters_of, x, after_segment, start=start, overwriting=overwriting)
        return out, kept

    def _run_switched(self, slot: int, h: Tensor, hosts: np.ndarray, alpha: np.ndarray, *, learns: bool) -> Tensor:
        """Outputs of `hosts` with the alpha (N,) of one slot replaced, from the activation h before that slot."""
        alphas = np.zeros_like(self.slot_state.alpha)
        alphas[:, slot], alphas[:, slot + 1 :] = alpha, self.slot_state.alpha[:, slot + 1 :]
        plan = self.plan_pass(hosts, alphas, learning={slot} if learns else ())
        return self.run_from(slot, h, torch.from_numpy(hosts), plan)[0]

    # Training and evaluation.

    def train_step(self, x: Tensor, y: Tensor, rate: Tensor) -> Tensor:
        """One optimizer step of every host on its batch (N, B, ...) with its learning rate (N,); the losses (N,)."""
        losses, gradients = [], None
        for chunk in self._chunks:
            own, total = self._training_loss(chunk, x[chunk.rows], y[chunk.rows])
            losses.append(own)
            gradients = self._optimizer.gradients(total, gradients)
        assert gradients is not None
        with torch.no_grad():
            self._norm_sum += self._optimizer.step(gradients, rate, self._learning_rows)
        self._steps += 1
        return torch.cat(losses)

    def _training_loss(self, chunk: _Chunk, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of every host, and the sum to differentiate.

        With shadow incubation that includes a loss for every seed in training: that of the network with this seed
        switched on at its alpha target and everything else constant.
        """
        shadow = (self.slot_state.stage[chunk.hosts] == Stage.TRAINING) & (self.lifecycle.incubation == "shadow")
        out, kept = self.run(x, chunk.rows, chunk.plan, keep=set(np.flatnonzero(shadow.any(0)).tolist()))
        losses = vmap(self.loss)(out, y)
        total = losses.sum()
        for slot, h in kept.items():
            rows = np.flatnonzero(shadow[:, slot])
            chosen = torch.from_numpy(rows)
            target = self.slot_state.alpha_target[:, slot]
            switched = self._run_switched(slot, h[chosen], chunk.hosts[rows], target, learns=True)
            total = total + vmap(self.loss)(switched, y[chosen]).sum()
        return losses.detach(), total

    @torch.no_grad()
    def evaluate(self, x: Tensor, y: Tensor, *, exported: bool = False) -> tuple[Tensor, Tensor]:
        """Loss and metric (N,) on samples (N, B, ...); `exported` leaves out live seeds."""
        alpha = np.where(exported & self.slot_state.live, 0.0, self.slot_state.alpha)
        figures = []
        for chunk in self._chunks:
            plan = self.plan_pass(chunk.hosts, alpha) if exported else chunk.plan
            out, _ = self.run(x[chunk.rows], chunk.rows, plan)
            figures.append(self._judge(out, y[chunk.rows]))
        losses, metrics = (torch.cat(both) for both in zip(*figures, strict=True))
        return losses, metrics

    @torch.no_grad()
    def evaluate_and_attribute(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, np.ndarray]:
        """Loss and metric (N,), and the metric with each seed of `to_measure` switched (N, S), NaN elsewhere.

        A seed that is blended in is switched off; one in training is switched on at its alpha target.
        """
        state, measured = self.slot_state, to_measure(self.slot_state)
        switched = np.full(state.stage.shape, np.nan)
        figures = []
        for chunk in self._chunks:
            own_y = y[chunk.rows]
            keep = set(np.flatnonzero(measured[chunk.hosts].any(0)).tolist())
            out, kept = self.run(x[chunk.rows], chunk.rows, chunk.plan, keep=keep)
            figures.append(self._judge(out, own_y))
            for slot, h in kept.items():
                rows = np.flatnonzero(measured[chunk.hosts, slot])
                hosts, chosen = chunk.hosts[rows], torch.from_numpy(rows)
                alpha = np.where(state.alpha[:, slot] > 0, 0.0, state.alpha_target[:, slot])
                out = self._run_switched(slot, h[chosen], hosts, alpha, learns=False)
                switched[hosts, slot] = vmap(self.metric)(out, own_y[chosen]).cpu().numpy()
        losses, metrics = (torch.cat(both) for both in zip(*figures, strict=True))
        return losses, metrics, switched

    def _judge(self, out: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Loss and metric of every host; the first call checks on two hosts that both functions can run stacked."""
        if not self._figures_checked:
            check_figure("loss", self.loss, out[:2], y[:2])
            check_figure("metric", self.metric, out[:2], y[:2])
            self._figures_checked = True
        return vmap(self.loss)(out, y), vmap(self.metric)(out, y)

    def report_gradients(self) -> None:
        """Write the mean gradient norms since the last report into `slot_state` and `host_gradient_norm`."""
        sums = self._norm_sum.double().cpu().numpy()
        norms = sums / self._steps if self._steps else np.full(len(sums), np.nan)
        self.slot_state.gradient_norm[self.slot_state.occupied] = np.nan
        self.host_gradient_norm = norms[: self.num_hosts].copy()
        start = self.num_hosts
        for group in self.groups.values():
            own = np.where(self._learning(group, "branch"), norms[start : start + len(group.hosts)], np.nan)
            self.slot_state.gradient_norm[group.hosts, group.slot] = own
            start += len(group.hosts)
        self._norm_sum.zero_()
        self._steps = 0
