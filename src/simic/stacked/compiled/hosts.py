"""CompiledHosts: training steps and evaluations of N stacked hosts by the compiled functions of `machine`.

Shapes: N hosts, S slots, B samples, K outputs, E elements of all parameters. Unit 0 of a host is itself, unit 1 + s the
seed in slot s, unit 1 + S + s its gate.

Hosts with the same seeds in the same slots, and the same blend operators, share a program. So a decision costs a table
of where each host's parameters lie, and programs for combinations of seeds that were not there before.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from simic.compiled.cache import announce
from simic.lifecycle.slots import SlotState
from simic.stacked.compiled import machine
from simic.stacked.compiled.builder import Program, Unit
from simic.stacked.compiled.instructions import CROSS_ENTROPY, IGNORED, SQUARED_ERROR
from simic.stacked.compiled.modules import is_known
from simic.stacked.compiled.program import SeedInSlot, build_program
from simic.stacked.figures import Figure
from simic.stacked.parameters import StackedParameters
from simic.stacked.seed_groups import GATE, OPERATORS, SeedGroup
from simic.stacked.structure import Structure
from simic.tasks.hosts import TokenEmbedding
from simic.tasks.task import mean_cross_entropy, mean_squared_error

LOSSES: dict[Figure, int] = {mean_cross_entropy: CROSS_ENTROPY, mean_squared_error: SQUARED_ERROR}
"""Losses whose gradient is known."""
CACHE = 1 << 20
"""Bytes of activations and gradients that a core keeps close."""
MIN_BLOCK = 64
"""Samples that a host takes at least at a time: short rows cost more than memory that is farther away."""


class _Tables(NamedTuple):
    """What the compiled functions need to know of all hosts, until seeds or their places change."""

    programs: np.ndarray  # (P, COLUMNS) of all programs
    begin: np.ndarray  # (N,) the first instruction of each host
    end: np.ndarray  # (N,) and the one behind its last
    bases: np.ndarray  # (N, 1 + 2 S) where the parameters of each unit begin
    numbers: np.ndarray  # (P, 2)
    blocks: np.ndarray  # (N,) how many samples a host takes at a time


class CompiledHosts:
    """Passes without autograd, for hosts and seeds of known layers on features and images."""

    def __init__(self, structure: Structure, example_shape: tuple[int, ...]) -> None:
        """`example_shape` is that of a sample."""
        self._structure, self._in_shape = structure, example_shape
        topologies = {site.shape.topology for site in structure.sites}
        self._is_sequence = topologies == {"sequence"}
        self.knows_hosts = (
            (
                topologies in ({"features"}, {"conv"})
                or (self._is_sequence and type(structure.segments[0]) is TokenEmbedding)
            )
            and structure.reference.dtype in (torch.float32, torch.float64)
            and all(is_known(segment) for segment in structure.segments)
            and not structure.hosts.aliases
            and len({id(tensor) for tensor in structure.hosts.statistics.values()}) == len(structure.hosts.statistics)
        )
        if self.knows_hosts:
            announce(machine.differentiate, machine.evaluate)
        self._programs: dict[tuple[int, ...], Program] = {}
        self._memory = np.empty((2, 0))

    def knows_seeds(self) -> bool:
        """Whether all present seeds can be part of a program."""
        return all(not group.parameters.aliases and is_known(group.module) for group in self._structure.groups.values())

    def prepare(self, state: SlotState) -> None:
        """Bring programs and tables in line with the seeds; call it when they, or the places of parameters, change."""
        structure, slots = self._structure, len(self._structure.sites)
        blueprint = np.where(state.occupied, state.blueprint, -1)
        keys = [tuple(row) for row in np.concatenate([blueprint, structure.operator], 1).tolist()]
        for key in set(keys) - set(self._programs):
            self._programs[key] = self._build(key)
        own = [self._programs[key] for key in keys]
        present = {id(program): program for program in own}
        ends = dict(zip(present, np.cumsum([len(program.table) for program in present.values()]).tolist(), strict=True))
        end = np.array([ends[id(program)] for program in own])
        bases = np.zeros((len(own), 1 + 2 * slots), dtype=np.int64)
        bases[:, 0] = _row_starts(structure.hosts)
        for group in structure.groups.values():
            bases[group.hosts, 1 + group.slot + (slots if group.name == GATE else 0)] = _row_starts(group.parameters)
        self._tables = _Tables(
            programs=np.concatenate([program.table for program in present.values()]),
            begin=end - np.array([len(program.table) for program in own]),
            end=end,
            bases=bases,
            numbers=np.concatenate([program.numbers for program in present.values()]).astype(self._dtype),
            blocks=np.array([self._block(program) for program in own]),
        )
        self._alpha = state.alpha.astype(self._dtype)
        self._outputs = np.array([program.outputs for program in own])
        self._starts = np.stack([program.starts for program in own])
        self._rows = max(program.rows for program in present.values())

    def _block(self, program: Program) -> int:
        """Samples whose activations and gradients fit into the cache, a multiple of the least number."""
        fitting = CACHE // (2 * program.rows * self._dtype.itemsize)
        return max(MIN_BLOCK, fitting // MIN_BLOCK * MIN_BLOCK)

    @property
    def _dtype(self) -> np.dtype:
        return self._structure.reference.numpy().dtype

    def _build(self, key: tuple[int, ...]) -> Program:
        structure, slots = self._structure, len(self._structure.sites)
        blueprints, operators = key[:slots], key[slots:]
        seeds: list[list[SeedInSlot]] = []
        for segment in range(len(structure.segments)):
            seeds.append([])
            for slot in structure.slots_of(segment):
                if blueprints[slot] >= 0:
                    group = structure.groups[slot, structure.blueprint_names[blueprints[slot]]]
                    seeds[-1].append(self._seed(slot, group, OPERATORS[operators[slot]]))
        segments = list(zip(structure.segment_names, structure.segments, strict=True))
        host = _unit(0, structure.hosts)
        # Statistics lie in memory of their own, where each has a place, too.
        sizes = [tensor[0].numel() for tensor in self._statistics.values()]
        starts = np.cumsum([0, *sizes])[:-1].tolist()
        host = host._replace(offsets={**host.offsets, **dict(zip(self._statistics, starts, strict=True))})
        return build_program(segments, host, seeds, slots, self._in_shape)

    def _seed(self, slot: int, group: SeedGroup, operator: str) -> SeedInSlot:
        gate = None
        if operator == "gate":
            gates = self._structure.groups[slot, GATE]
            gate = gates.module, _unit(1 + len(self._structure.sites) + slot, gates.parameters)
        unit = _unit(1 + slot, group.parameters)
        return SeedInSlot(slot, group.module, unit, group.reads == "input", operator, gate)

    def _take_memory(self, samples: int) -> np.ndarray:
        """Memory for the activations of so many samples of one host, and for their gradients (2, rows)."""
        needed = self._rows * samples
        if self._memory.shape[1] < needed:
            self._memory = np.empty((2, needed), dtype=self._dtype)
        return self._memory

    @property
    def _statistics(self) -> dict[str, Tensor]:
        """Means and variances that batch norms keep, each (N, C), by name."""
        return {name: own for name, own in self._structure.hosts.statistics.items() if own.is_floating_point()}

    def _kept(self) -> np.ndarray:
        """All of them side by side (N, F)."""
        if not self._structure.hosts.statistics:
            return np.empty((len(self._outputs), 0), dtype=self._dtype)
        return torch.cat([*self._statistics.values()], 1).numpy()

    def _keep(self, kept: np.ndarray) -> None:
        """Write them back after a training step."""
        hosts = self._structure.hosts
        pieces = torch.from_numpy(kept).split([own.shape[1] for own in self._statistics.values()], 1)
        for own, new in zip(self._statistics.values(), pieces, strict=True):
            own.copy_(new)
        for own in hosts.statistics.values():
            if not own.is_floating_point():
                own += 1  # batches

    def takes(self, x: Tensor, y: Tensor | None = None) -> bool:
        """Whether batches of this kind are known: one target per sample, or per position of a sequence.

        A batch norm of a single sample is left to torch, which says why it cannot be.
        """
        if y is not None and self._structure.hosts.statistics and x.shape[1] < 2:
            return False
        tokens = self._is_sequence and not x.is_floating_point()
        plain = not self._is_sequence and x.dtype == self._structure.reference.dtype
        return (tokens or plain) and (y is None or y.is_floating_point() or y.dim() == (3 if tokens else 2))

    def differentiate(self, x: Tensor, y: Tensor, loss: Figure, parameters: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of every host (N,) on its batch (N, B, ...), and the gradient (E,) of their sum."""
        losses, gradient = np.empty(len(x), dtype=self._dtype), torch.empty_like(parameters)
        kept, tables = self._kept(), self._tables
        if kept.size:
            tables = tables._replace(blocks=np.full_like(tables.blocks, x.shape[1]))
        values, grads = self._take_memory(min(x.shape[1], int(tables.blocks.max())))
        kind, classes = LOSSES[loss], np.empty((len(x), 1, 0), dtype=np.int64)
        targets = np.empty((len(x), 0, 0), dtype=values.dtype)
        if kind == CROSS_ENTROPY:
            classes = _samples_last(y)
        else:
            targets = _samples_last(y)
        machine.differentiate(
            *tables, kept, self._alpha, parameters.numpy(), gradient.numpy(), self._inputs(x), classes, targets,
            *(kind, self._outputs, values, grads, losses),
        )  # fmt: skip
        if kind == CROSS_ENTROPY and np.isnan(losses).any():
            _check_classes(classes, int(self._outputs[0, 1]) // classes.shape[1])
        if kept.size:
            self._keep(kept)
        return torch.from_numpy(losses), gradient

    def _inputs(self, x: Tensor) -> np.ndarray:
        """Samples (N, B, ...) as (N, rows, B); tokens as whole numbers of the parameters' type."""
        if not self._is_sequence:
            return _samples_last(x)
        embedding = self._structure.segments[0]
        assert isinstance(embedding, TokenEmbedding)
        number = embedding.token.num_embeddings
        if not (int(x.min()) >= 0 and int(x.max()) < number):
            raise IndexError(f"tokens must be from 0 to {number - 1}, got {int(x.min())} to {int(x.max())}")
        return _samples_last(x.to(self._structure.reference.dtype))

    def evaluate(
        self, x: Tensor, alpha: np.ndarray, parameters: Tensor, measured: np.ndarray | None = None,
        switched: np.ndarray | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Outputs (rows, B, K) of all hosts, then with each `measured` seed (N, S) switched to another alpha (N, S).

        Those are in the order of slots, then hosts; of sequences outputs are (rows, B, L, K). Returns the host of each
        row, too.
        """
        measured = np.zeros(alpha.shape, dtype=bool) if measured is None else measured
        slots, hosts = np.nonzero(measured.T)
        rows = np.full(alpha.shape, -1)
        rows[hosts, slots] = len(x) + np.arange(len(hosts))
        values, _ = self._take_memory(min(x.shape[1], int(self._tables.blocks.max())))
        out = np.empty((len(x) + len(hosts), int(self._outputs[0, 1]), x.shape[1]), dtype=values.dtype)
        other = (alpha if switched is None else switched).astype(values.dtype)
        machine.evaluate(
            *self._tables, self._kept(), alpha.astype(values.dtype), parameters.numpy(),
            *(self._inputs(x), self._starts, rows, other, self._outputs, values, out),
        )  # fmt: skip
        owner = torch.from_numpy(np.concatenate([np.arange(len(x)), hosts]))
        outputs = torch.from_numpy(out)
        if self._is_sequence:
            return outputs.unflatten(1, (-1, x.shape[2])).permute(0, 3, 2, 1), owner
        return outputs.transpose(1, 2), owner


def _check_classes(classes: np.ndarray, number: int) -> None:
    wrong = classes[(classes != IGNORED) & ((classes < 0) | (classes >= number))]
    if wrong.size:
        raise IndexError(f"targets must be classes from 0 to {number - 1}, got {wrong[0]}")


def _unit(index: int, parameters: StackedParameters) -> Unit:
    sizes = [shape.numel() for shape in parameters.shapes.values()]
    starts = np.cumsum([0, *sizes])[:-1].tolist()
    return Unit(index, dict(zip(parameters.shapes, starts, strict=True)))


def _row_starts(parameters: StackedParameters) -> np.ndarray:
    """Where each row begins in the vector of all parameters (R,)."""
    number, width = parameters.rows.shape
    return int(parameters.rows.storage_offset()) + width * np.arange(number)


def _samples_last(x: Tensor) -> np.ndarray:
    """Samples (N, B, ...) as (N, rows, B)."""
    return x.flatten(2).transpose(1, 2).contiguous().numpy() if x.dim() > 2 else x.unsqueeze(1).contiguous().numpy()
