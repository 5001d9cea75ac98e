"""StackedHosts: N hosts of one architecture, trained and evaluated as one tensor program.

Shapes: N hosts, M of them in a pass, S slots, H heads, B samples. Activations are (M, B, *their own shape). `structure`
holds the parameters of hosts and seeds, `seed_groups` runs the seeds of a slot; here they are trained and evaluated.

A pass has two seams for other modules: `plan_pass` says which seeds are active with which alpha, `run` and `run_from`
compute the outputs under such a plan. An ablation of slot 1 keeps the activation before that slot and computes the rest
again:

    run(x, plan, keep={1})          x -> segment 0 -> slot 0 -> segment 1 -+-> slot 1 -> segment 2 -> output
                                                                           | kept[1]
    run_from(1, kept[1], other)                                            +-> slot 1 -> segment 2 -> output

What is kept is the activation and, for seeds beside the segment, the segment's input.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from simic.growth.blueprints import parameter_table
from simic.lifecycle.actions import Column, Op
from simic.lifecycle.slots import SlotState, apply_actions, check_actions, plant_fossil, tick, to_measure
from simic.lifecycle.stages import LifecycleConfig, Stage
from simic.stacked.compiled.hosts import LOSSES, CompiledHosts
from simic.stacked.config import HostsConfig
from simic.stacked.figures import Figure, Figures, stacked_figure
from simic.stacked.forward import Kept, run_hosts
from simic.stacked.layers import compile_run, run_stacked
from simic.stacked.optimizer import OptimizerConfig
from simic.stacked.parameters import Parameters, Rows, take_rows
from simic.stacked.precision import LossScale, autocast
from simic.stacked.seed_groups import GATE, SlotPlan, plan_slot
from simic.stacked.structure import Structure

ACTIVATION_LIMIT = {"cpu": 1 << 22}
"""Bytes of a slot's activation up to which hosts run together: beyond, memory is slower than fewer hosts at a time."""
ACTIVATION_LIMIT_ELSEWHERE = 1 << 28
"""The same on accelerators, which are slow with little work at a time."""


class _Chunk(NamedTuple):
    """Hosts that run together, and their plan with the present alphas."""

    hosts: np.ndarray
    rows: slice
    plan: list[SlotPlan]


class StackedHosts:
    """N hosts that are trained, evaluated and grown together; each gets the same results as it would alone.

    `batch_size` is that of the training batches; it determines how many hosts run at once. Everything lives on
    `device`; with a lower precision forward passes run under autocast, the loss and the optimizer do not.
    """

    def __init__(
        self,
        make_host: Callable[[], nn.Sequential],
        slot_names: Sequence[str],
        *,
        example_input: Tensor,
        rng_seeds: Sequence[int],
        loss: Figure,
        metric: Figure,
        lifecycle: LifecycleConfig | None = None,
        optimizer: OptimizerConfig | None = None,
        batch_size: int = 64,
        device: torch.device | str | None = None,
        config: HostsConfig | None = None,
        join_seeds: bool = True,
    ) -> None:
        """`join_seeds` runs seeds of different blueprints in one call where it can; results are the same."""
        self.loss, self.metric = loss, metric
        self.losses, self.metrics, self._figures = stacked_figure(loss), stacked_figure(metric), Figures(loss, metric)
        self.lifecycle, self.optimizer_config = lifecycle or LifecycleConfig(), optimizer or OptimizerConfig()
        join_seeds = join_seeds and self.lifecycle.incubation != "straight_through"
        self.device, self.config = torch.device(device or "cpu"), config or HostsConfig()
        self.structure = Structure(
            make_host,
            slot_names,
            example_input,
            rng_seeds,
            seeds_per_slot=self.lifecycle.seeds_per_slot,
            join_seeds=join_seeds,
            device=self.device,
        )
        self.segments, self.sites, self.hosts = self.structure.segments, self.structure.sites, self.structure.hosts
        self.groups, self.blueprint_names = self.structure.groups, self.structure.blueprint_names
        self.rng_seeds = np.array(rng_seeds, dtype=np.int64)
        self.germinations = np.zeros(self.num_hosts, dtype=np.int64)
        self.slot_state = SlotState.dormant(self.num_hosts, len(self.sites))
        self.host_gradient_norm = np.full(self.num_hosts, np.nan)
        """Mean gradient norm of each host without its seeds, as of the last `report_gradients` (N,)."""
        self.loss_scale = LossScale(self.num_hosts, self.device) if self.config.precision == "float16" else None
        largest = max(math.prod(site.example_shape[1:]) for site in self.sites) * self.hosts.rows.element_size()
        limit = ACTIVATION_LIMIT.get(self.device.type, ACTIVATION_LIMIT_ELSEWHERE)
        self.hosts_at_once = max(1, limit // (largest * batch_size))
        self._norm_sum, self._steps = self.hosts.rows.new_zeros((1 + len(self.sites)) * self.num_hosts), 0
        self._run_segment = compile_run() if self.config.compile else run_stacked
        self._chunks: list[_Chunk] | None = None
        self._compiled, self._planned = CompiledHosts(self.structure, tuple(example_input.shape[1:])), b""
        self.use_compiled = self.config == HostsConfig() and self.device.type == "cpu" and self._compiled.knows_hosts
        """Whether passes run without autograd where they can (see `compiled`); results are the same."""
        self._ready = False
        self._new_optimizer = True
        self.sync_with_slots()

    @property
    def num_hosts(self) -> int:
        """N."""
        return len(self.rng_seeds)

    @property
    def slot_names(self) -> tuple[str, ...]:
        """Names of the slots, in order."""
        return tuple(site.name for site in self.sites)

    @property
    def host_parameters(self) -> int:
        """Number of parameters of a host without seeds."""
        return self.hosts.rows.shape[1]

    def seed_parameters(self) -> np.ndarray:
        """Number of parameters of the seed in every slot, gates included (N, S)."""
        return self._seed_parameters.copy()

    def blueprint_table(self) -> np.ndarray:
        """Number of parameters of every blueprint in every slot (S, blueprints); -1 where it does not fit."""
        return parameter_table(self.blueprint_names, [site.shape for site in self.sites])

    def index(self, hosts: np.ndarray) -> Tensor:
        """Indices of hosts as a tensor on the device."""
        return torch.from_numpy(hosts).to(self.device)

    # Change: between host epochs only.

    def execute(self, actions: np.ndarray, legal: np.ndarray | None = None) -> None:
        """Carry out one action per host (N, H). An illegal action raises and changes nothing.

        `legal` (N, ops, S), if known, saves computing the legal operations again.
        """
        check_actions(self.slot_state, actions, self.lifecycle, self.slot_names, legal)
        seeds = []
        # All seeds are built before anything changes, because building one may raise.
        for host in np.flatnonzero(actions[:, Column.OP] == Op.GERMINATE).tolist():
            slot, blueprint = actions[host, [Column.SLOT, Column.BLUEPRINT]].tolist()
            entropy = (int(self.rng_seeds[host]), slot, int(self.germinations[host]))
            branch = self.structure.new_seed(slot, blueprint, entropy)
            seeds.append((slot, self.blueprint_names[blueprint], host, branch))
        apply_actions(self.slot_state, actions, self.lifecycle)
        self.structure.add_seeds(seeds)
        for _, _, host, _ in seeds:
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
        if self.loss_scale is not None:
            self.loss_scale.reset(self.index(hosts))
        self.slot_state.clear(hosts)
        self.sync_with_slots()

    def sync_with_slots(self) -> None:
        """Bring groups in line with `slot_state`; call it after changing that. Optimizer and plans follow on use."""
        if self.structure.sync_with_slots(self.slot_state):
            self._new_optimizer, self._seed_parameters = True, self.structure.count_seeds()
        state = self.slot_state
        arrays = (state.alpha, state.alpha_target, state.stage, self.structure.operator)
        planned = b"".join(array.tobytes() for array in arrays)
        if self._new_optimizer or planned != self._planned:
            self._chunks, self._ready, self._planned = None, False, planned

    def _update(self) -> None:
        """Bring the optimizer and what follows from the seeds in line with the groups."""
        if self._ready:
            return
        if self._new_optimizer:
            # The optimizer moves all parameters into new memory, so views of the old memory are taken anew.
            self._optimizer = self.structure.new_optimizer(self.optimizer_config)
            self._segment_parameters = self.structure.segment_parameters()
            self._new_optimizer = False
            self._runs_compiled = self.use_compiled and self._compiled.knows_seeds()
        if self._runs_compiled:
            self._compiled.prepare(self.slot_state)
        learning = [group.learns(self.slot_state, self.lifecycle.incubation) for group in self.structure.ordered]
        learning = np.concatenate([np.ones(self.num_hosts, dtype=bool), *learning])
        self._learning_rows = None if learning.all() else torch.from_numpy(learning).to(self.hosts.rows)
        self._ready = True

    def _prepare(self) -> list[_Chunk]:
        """The hosts in chunks with their plans, for passes by autograd."""
        self._update()
        if self._chunks is not None:
            return self._chunks
        self._chunks = []
        for start in range(0, self.num_hosts, self.hosts_at_once):
            hosts = np.arange(start, min(start + self.hosts_at_once, self.num_hosts))
            plan = self._plan(hosts, self.slot_state.alpha)
            self._chunks.append(_Chunk(hosts, slice(start, start + len(hosts)), plan))
        return self._chunks

    # Forward passes.

    def plan_pass(
        self, hosts: np.ndarray, alpha: np.ndarray, *, learning: Collection[int] | None = None, start: int = 0
    ) -> list[SlotPlan]:
        """Which seeds are active in every slot in a pass of `hosts` (M,), with alphas (N, S).

        Seeds in the slots `learning` receive gradients; None stands for all slots. Slots before `start` are empty.
        """
        self._update()
        return self._plan(hosts, alpha, learning, start)

    def _plan(
        self, hosts: np.ndarray, alpha: np.ndarray, learning: Collection[int] | None = None, start: int = 0
    ) -> list[SlotPlan]:
        straight = (self.slot_state.stage == Stage.TRAINING) & (self.lifecycle.incubation == "straight_through")
        plans = []
        for slot in range(len(self.sites)):
            learns = learning is None or slot in learning
            own = hosts if slot >= start else hosts[:0]
            learns_straight = straight[own, slot] & learns
            seeds = self.structure.seeds_of(slot)
            plans.append(plan_slot(seeds, own, alpha[own, slot], learns_straight, self.hosts.rows, learns=learns))
        return plans

    def run(
        self, x: Tensor, hosts: Rows, plan: Sequence[SlotPlan], *, keep: Collection[int] = ()
    ) -> tuple[Tensor, dict[int, Kept]]:
        """Outputs of `hosts` for inputs (M, B, ...), and the activations before the seeds of the slots `keep`."""
        return self._run(x, hosts, plan, keep, constant=False)

    def run_from(
        self, slot: int, start: Kept, hosts: Rows, plan: Sequence[SlotPlan], *, keep: Collection[int] = ()
    ) -> tuple[Tensor, dict[int, Kept]]:
        """Like `run`, from the activations that an earlier pass kept at `slot`; hosts' parameters are constant."""
        return self._run((slot, start), hosts, plan, keep, constant=True)

    def _run(
        self,
        start: Tensor | tuple[int, Kept],
        hosts: Rows,
        plan: Sequence[SlotPlan],
        keep: Collection[int],
        *,
        constant: bool,
    ) -> tuple[Tensor, dict[int, Kept]]:
        if isinstance(hosts, slice) and len(self._prepare()) == 1:
            hosts = None  # all of them: no slicing in the backward pass

        def parameters_of(index: int) -> Parameters:
            return take_rows(self._segment_parameters[index], hosts, constant=constant)

        with autocast(self.device, self.config.precision):
            out, kept = run_hosts(self.structure, parameters_of, start, plan, keep, self._run_segment)
        return out.to(self.hosts.rows.dtype), kept

    def _run_switched(self, slot: int, start: Kept, hosts: np.ndarray, alpha: np.ndarray, *, learns: bool) -> Tensor:
        """Outputs of `hosts` with the alpha (N,) of one slot replaced, from the activations kept there."""
        alphas = self.slot_state.alpha.copy()
        alphas[:, slot] = alpha
        plan = self.plan_pass(hosts, alphas, learning={slot} if learns else (), start=slot)
        rows = slice(None) if len(hosts) == self.num_hosts and len(self._prepare()) == 1 else self.index(hosts)
        return self.run_from(slot, start, rows, plan)[0]

    # Training and evaluation.

    def train_step(self, x: Tensor, y: Tensor, rate: Tensor) -> Tensor:
        """One optimizer step of every host on its batch (N, B, ...) with its learning rate (N,); the losses (N,)."""
        self._update()
        if self._trains_compiled(x, y):
            losses, gradient = self._compiled.differentiate(x, y, self.loss, self._optimizer.vector)
        else:
            losses, gradient = self._differentiate(self._prepare(), x, y)
        with torch.inference_mode():
            self._norm_sum += self._optimizer.step(gradient, rate, self._learning_rows, self.loss_scale)
        self._steps += 1
        return losses

    def _trains_compiled(self, x: Tensor, y: Tensor) -> bool:
        """Compiled steps know no incubation, and no losses but those of `LOSSES`."""
        incubates = self.lifecycle.incubation != "direct" and (self.slot_state.stage == Stage.TRAINING).any()
        return self._runs_compiled and self.loss in LOSSES and not incubates and self._compiled.takes(x, y)

    def _differentiate(self, chunks: Sequence[_Chunk], x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The losses (N,), and the gradient of their sum with respect to all parameters, by autograd."""
        losses, gradient = [], None
        with self.structure.training():
            for chunk in chunks:
                own, total = self._training_loss(chunk, x[chunk.rows], y[chunk.rows])
                losses.append(own)
                gradient = self._optimizer.gradient(total, gradient)
        assert gradient is not None
        return torch.cat(losses) if len(losses) > 1 else losses[0], gradient

    def _training_loss(self, chunk: _Chunk, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of every host, and the sum to differentiate.

        With shadow incubation that includes a loss for every seed in training: that of the network with this seed
        switched on at its alpha target and everything else constant.
        """
        shadow = (self.slot_state.stage[chunk.hosts] == Stage.TRAINING) & (self.lifecycle.incubation == "shadow")
        out, kept = self.run(x, chunk.rows, chunk.plan, keep=set(np.flatnonzero(shadow.any(0)).tolist()))
        losses = self.losses(out, y)
        scale = None if self.loss_scale is None else self.loss_scale.scale[chunk.rows]
        total = losses.sum() if scale is None else (losses * scale).sum()
        for slot, here in kept.items():
            rows = np.flatnonzero(shadow[:, slot])
            chosen = self.index(rows)
            target = self.slot_state.alpha_target[:, slot]
            switched = self._run_switched(slot, here.of(chosen), chunk.hosts[rows], target, learns=True)
            own = self.losses(switched, y[chosen])
            total = total + (own.sum() if scale is None else (own * scale[chosen]).sum())
        return losses.detach(), total

    @torch.no_grad()
    def evaluate(self, x: Tensor, y: Tensor, *, exported: bool = False) -> tuple[Tensor, Tensor]:
        """Loss and metric (N,) on samples (N, B, ...); `exported` leaves out live seeds."""
        alpha = np.where(exported & self.slot_state.live, 0.0, self.slot_state.alpha)
        self._update()
        if self._runs_compiled and self._compiled.takes(x):
            out, _ = self._compiled.evaluate(x, alpha, self._optimizer.vector)
            return self._figures(out, y, len(out))
        figures = []
        for chunk in self._prepare():
            plan = self.plan_pass(chunk.hosts, alpha) if exported else chunk.plan
            out, _ = self.run(x[chunk.rows], chunk.rows, plan)
            figures.append(self._figures(out, y[chunk.rows], len(out)))
        losses, metrics = (torch.cat(both) for both in zip(*figures, strict=True))
        return losses, metrics

    @torch.no_grad()
    def evaluate_and_attribute(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Loss and metric (N,), and the metric with each seed of `to_measure` switched (N, S), NaN elsewhere.

        A seed that is blended in is switched off; one in training is switched on at its alpha target.
        """
        state, measured = self.slot_state, to_measure(self.slot_state)
        self._update()
        if self._runs_compiled and self._compiled.takes(x):
            return self._attribute_compiled(x, y, measured)
        switched = self.hosts.rows.new_full(state.stage.shape, math.nan)
        figures = []
        for chunk in self._prepare():
            own_y, slots = y[chunk.rows], np.flatnonzero(measured[chunk.hosts].any(0)).tolist()
            out, kept = self.run(x[chunk.rows], chunk.rows, chunk.plan, keep=set(slots))
            figures.append(self._figures(out, own_y, len(out)))
            for slot, here in kept.items():
                rows = np.flatnonzero(measured[chunk.hosts, slot])
                alpha = np.where(state.alpha[:, slot] > 0, 0.0, state.alpha_target[:, slot])
                if len(rows) < len(chunk.hosts):
                    chosen = self.index(rows)
                    here, targets = here.of(chosen), own_y[chosen]
                else:
                    targets = own_y
                out = self._run_switched(slot, here, chunk.hosts[rows], alpha, learns=False)
                switched[self.index(chunk.hosts[rows]), slot] = self.metrics(out, targets).to(switched.dtype)
        losses, metrics = (torch.cat(both) for both in zip(*figures, strict=True))
        return losses, metrics, switched

    def _attribute_compiled(self, x: Tensor, y: Tensor, measured: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
        state = self.slot_state
        other = np.where(state.alpha > 0, 0.0, state.alpha_target)
        out, hosts = self._compiled.evaluate(x, state.alpha, self._optimizer.vector, measured, other)
        losses, metrics = self._figures(out, y[hosts], self.num_hosts)
        switched = self.hosts.rows.new_full(measured.T.shape, math.nan)
        switched[torch.from_numpy(measured.T)] = metrics[self.num_hosts :].to(switched.dtype)
        return losses, metrics[: self.num_hosts], switched.T

    def mean_gradient_norms(self) -> Tensor:
        """Mean gradient norm since the last report of every host, then of the seeds slot by slot ((1 + S) N,)."""
        return self._norm_sum / self._steps if self._steps else torch.full_like(self._norm_sum, math.nan)

    def report_gradients(self, norms: np.ndarray) -> None:
        """Write `mean_gradient_norms` into `slot_state` and `host_gradient_norm`, and begin anew."""
        hosts, *seeds = norms.reshape(-1, self.num_hosts)
        self.host_gradient_norm = hosts.copy()
        self.slot_state.gradient_norm[self.slot_state.occupied] = np.nan
        for group in self.groups.values():
            if group.name != GATE:
                learns = group.learns(self.slot_state, self.lifecycle.incubation)
                own = np.where(learns, seeds[group.slot][group.hosts], np.nan)
                self.slot_state.gradient_norm[group.hosts, group.slot] = own
        self._norm_sum.zero_()
        self._steps = 0
