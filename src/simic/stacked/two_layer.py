"""Seeds with one hidden layer, of any size and activation, run as one batched call per slot and side.

Shapes: R seeds, C features of the slot, D features of what is read (C behind a segment, those of its input beside it),
B samples, K hidden units per block, P parameters of a seed. Activations are (R, C, B): samples last, so that every
product runs over long rows.

The hidden layers are cut into blocks of K units, the last one padded with zeros, and all blocks of all seeds run
together. The output of a seed is the sum over its blocks. With K = 16 and three seeds of 4, 32 and 16 units, where the
last one is gated, so that a second first layer opens and closes its units:

    seed                    0: low_rank (4)    1: mlp (32)      2: glu (16)
    block                   0                  2, 3             1, and its gate 4
    activation              linear             gelu             linear * sigmoid(gate)

    hidden blocks           | 0      | 1   | 2   3 | 4     |    sorted by activation: linear, gated, gelu; then gates
    owner                     0        2     1   1   2          the seed that each block reads
    output blocks           | 0      | 1   | 2   3 |            all but the gates; added up by owner

Parameters stay where the optimizer has them, each seed with its true number. A pass copies them into the blocks: the
parameter `chosen[i]` goes to the position `places[i]` of a buffer that holds the weights and biases of all blocks.
Padded units have zero weights on both sides, so they compute zeros and nothing is learned there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from simic.growth.branch_layers import GatedLinear
from simic.growth.slot_shape import Reads, SlotShape
from simic.stacked.layers import is_customized

BLOCK = 16
"""Least number of hidden units in a block: smaller blocks make products too short to be fast."""
MAX_FEATURES = 64
"""Features up to which seeds run in blocks; the products of wider seeds are large enough by themselves."""
LINEAR, GATED, GELU = range(3)


class TwoLayer(NamedTuple):
    """What a branch computes, and the names of its parameters: out(activation(first(x)))."""

    activation: int
    first: str
    gate: str | None  # a second first layer
    out: str
    hidden: int


def two_layer(branch: nn.Module) -> TwoLayer | None:
    """How a branch runs in blocks; None if it is of another kind."""
    plain = all(type(part) in (nn.Linear, nn.GELU) for part in branch.children())  # a subclass may compute otherwise
    if not plain or _has_tied_parameters(branch) or any(is_customized(part) for part in branch.modules()):
        return None
    if type(branch) is GatedLinear:
        return TwoLayer(GATED, "value", "gate", "out", branch.value.out_features)
    if type(branch) is not nn.Sequential:
        return None
    match [*branch._modules.items()]:
        case [(first, nn.Linear() as layer), (out, nn.Linear())]:
            return TwoLayer(LINEAR, first, None, out, layer.out_features)
        case [(first, nn.Linear() as layer), (_, nn.GELU(approximate="none")), (out, nn.Linear())]:
            return TwoLayer(GELU, first, None, out, layer.out_features)
    return None


def _has_tied_parameters(branch: nn.Module) -> bool:
    return len([*branch.parameters()]) < len([*branch.named_parameters(remove_duplicate=False)])


class Seeds(NamedTuple):
    """Seeds of one blueprint in a pass."""

    kind: TwoLayer
    shapes: Mapping[str, torch.Size]  # of the parameters of one seed, in their order
    start: int  # of the blueprint's first seed in the vector of parameters
    rows: np.ndarray  # (r,) which of the blueprint's seeds
    number: np.ndarray  # (r,) each seed's number among the R seeds of the pass


@dataclass(frozen=True)
class BlockPlan:
    """Where parameters go, and which blocks belong together."""

    reads: Reads
    features: int  # C
    in_features: int  # D
    block: int  # K
    num_seeds: int
    num_hidden: int  # blocks, gates included
    num_out: int  # blocks without gates
    gated: slice  # among the blocks
    gelu: slice
    owner: Tensor  # (hidden blocks,) the number of their seed
    source: Tensor  # (hidden blocks,) the row of the activation that they read
    places: Tensor  # of the parameters in the buffer
    chosen: Tensor | None  # the parameters of these seeds; None for all, in order

    @property
    def sizes(self) -> list[int]:
        """Numbers in the buffer: weights and biases of the first layers, then of the second."""
        hidden, c, k = self.num_hidden, self.features, self.block
        return [hidden * k * self.in_features, hidden * k, self.num_out * c * k, self.num_seeds * c]

    def split(self, buffer: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The parts of a buffer: (hidden, D, K), (hidden, K, 1), (out, C, K), (R, C, 1)."""
        first, first_bias, out, out_bias = buffer.split(self.sizes)
        c, d, k = self.features, self.in_features, self.block
        return first.view(-1, d, k), first_bias.view(-1, k, 1), out.view(-1, c, k), out_bias.view(-1, c, 1)


def plan_blocks(
    seeds: Sequence[Seeds], at: np.ndarray, shape: SlotShape, reads: Reads, num_parameters: int, device: torch.device
) -> BlockPlan:
    """Lay seeds out in blocks. `at` (R,) is each seed's row of the activation; the vector has `num_parameters`.

    Seeds of other kinds, which are numbered too, have no blocks: their outputs are zero.
    """
    features, in_features = shape.features, shape.features if reads == "output" else shape.in_features
    assert in_features is not None
    block = max(BLOCK, features)
    number, sizes = np.concatenate([own.number for own in seeds]), [len(own.rows) for own in seeds]
    counts = np.repeat([-(-own.kind.hidden // block) for own in seeds], sizes)
    activation = np.repeat([own.kind.activation for own in seeds], sizes)
    seed = np.repeat(np.arange(len(counts)), counts)
    seed = seed[np.argsort(activation[seed], kind="stable")]  # the blocks of a seed stay together
    first_block = np.empty_like(counts)
    first_block[seed[::-1]] = np.arange(len(seed))[::-1]
    _, gated, gelu, end = np.searchsorted(activation[seed], [LINEAR, GATED, GELU, GELU + 1]).tolist()
    units = np.stack([number, first_block, len(seed) + first_block - gated], axis=1)
    owner = number[np.concatenate([seed, seed[gated:gelu]])]
    places, chosen = _places(seeds, units, (features, in_features), block, num_hidden=len(owner), num_out=len(seed))
    whole = len(chosen) == num_parameters and bool((chosen == np.arange(num_parameters)).all())
    return BlockPlan(
        reads=reads,
        features=features,
        in_features=in_features,
        block=block,
        num_seeds=len(at),
        num_hidden=len(owner),
        num_out=len(seed),
        gated=slice(gated, gelu),
        gelu=slice(gelu, end),
        owner=torch.from_numpy(owner).to(device),
        source=torch.from_numpy(at[owner]).to(device),
        places=torch.from_numpy(places).to(device),
        chosen=None if whole else torch.from_numpy(chosen).to(device),
    )


def _places(
    seeds: Sequence[Seeds],
    units: np.ndarray,
    features: tuple[int, int],
    block: int,
    *,
    num_hidden: int,
    num_out: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Where in the buffer each parameter of these seeds goes, and where in the vector it is; features are (C, D)."""
    c, d = features
    sizes = np.array([block * d, block, c * block, c])  # of one unit of each part
    bases = np.concatenate([[0], np.cumsum(sizes[:3] * [num_hidden, num_hidden, num_out])])
    places, chosen, start = [], [], 0
    for own in seeds:
        part, column, of_tensor, inner = _layout(own.kind, tuple(own.shapes.items()), features, block)
        first = bases[part] + sizes[part] * units[start : start + len(own.rows)][:, column]  # (r, tensors)
        places.append((first[:, of_tensor] + inner).reshape(-1))
        chosen.append((own.rows[:, None] * len(inner) + np.arange(own.start, own.start + len(inner))).reshape(-1))
        start += len(own.rows)
    return np.concatenate(places), np.concatenate(chosen)


@lru_cache(maxsize=1024)
def _layout(
    kind: TwoLayer, shapes: tuple[tuple[str, torch.Size], ...], features: tuple[int, int], block: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """For each tensor of a seed its part of the buffer, and what it is counted by there.

    That is the seed (0, the bias of the output), its first block (1) or its first gate (2). Then for each parameter
    (P,) the tensor that it belongs to, and its place behind the beginning of the first such unit.
    """
    c, d = features
    feature, unit = np.arange(c), np.arange(kind.hidden)
    chunk, inside = unit // block, unit % block
    parts, columns, places = [], [], []
    for name, _ in shapes:
        layer, _, kind_of_tensor = name.rpartition(".")
        if layer == kind.out and kind_of_tensor == "bias":
            own = (3, 0, feature)
        elif layer == kind.out:  # (C, hidden)
            own = (2, 1, feature[:, None] * block + chunk * block * c + inside)
        elif kind_of_tensor == "weight":  # (hidden, D)
            first = chunk * block * d + inside
            own = (0, 2 if layer == kind.gate else 1, first[:, None] + np.arange(d) * block)
        else:
            own = (1, 2 if layer == kind.gate else 1, unit)
        parts.append(own[0])
        columns.append(own[1])
        places.append(own[2].reshape(-1))
    of_tensor = np.repeat(np.arange(len(places)), [len(own) for own in places])
    return np.array(parts), np.array(columns), of_tensor, np.concatenate(places)


def run_blocks(h: Tensor, parameters: Tensor, plan: BlockPlan) -> Tensor:
    """Outputs (R, C, B) of the seeds of a slot that read the activation h (N, D, B); `parameters` is their vector."""
    kind = h.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        h = h.to(torch.get_autocast_dtype(kind))
        with torch.autocast(kind, enabled=False):
            out = _Blocks.apply(h, parameters, plan)
    else:
        out = _Blocks.apply(h, parameters, plan)
    assert isinstance(out, Tensor)
    return out


class _Blocks(torch.autograd.Function):
    """Written out with its gradient: autograd would need several times as many calls."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, parameters: Tensor, plan: BlockPlan) -> Tensor:
        own = parameters if plan.chosen is None else parameters.index_select(0, plan.chosen)
        buffer = own.new_zeros(sum(plan.sizes)).scatter_(0, plan.places, own)
        first, first_bias, out, out_bias = plan.split(buffer.to(h.dtype))
        x = h.index_select(0, plan.source)
        hidden = torch.baddbmm(first_bias, first.transpose(1, 2), x)  # (hidden blocks, K, B)
        active = hidden.new_empty(plan.num_out, *hidden.shape[1:])
        active[: plan.gated.start] = hidden[: plan.gated.start]
        if plan.gated.stop > plan.gated.start:
            torch.mul(hidden[plan.gated], hidden[plan.num_out :].sigmoid(), out=active[plan.gated])
        if plan.gelu.stop > plan.gelu.start:
            torch.ops.aten.gelu.out(hidden[plan.gelu], out=active[plan.gelu])
        y = out_bias.expand(-1, -1, h.shape[2]).clone()
        y.index_add_(0, plan.owner[: plan.num_out], torch.bmm(out, active))
        ctx.save_for_backward(parameters, x, hidden, active, first, out)
        ctx.plan, ctx.num_rows = plan, len(h)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        parameters, x, hidden, active, first, out = ctx.saved_tensors
        plan: BlockPlan = ctx.plan
        grad_out = grad.index_select(0, plan.owner[: plan.num_out])
        grad_active = torch.bmm(out.transpose(1, 2), grad_out)
        grad_hidden = torch.empty_like(hidden)
        grad_hidden[: plan.gated.start] = grad_active[: plan.gated.start]
        if plan.gated.stop > plan.gated.start:
            opened = hidden[plan.num_out :].sigmoid()
            torch.mul(grad_active[plan.gated], opened, out=grad_hidden[plan.gated])
            # The derivative of the sigmoid, value * opened * (1 - opened), starts with what is active.
            torch.mul(grad_active[plan.gated], active[plan.gated] * (1 - opened), out=grad_hidden[plan.num_out :])
        if plan.gelu.stop > plan.gelu.start:
            torch.ops.aten.gelu_backward.grad_input(
                grad_active[plan.gelu], hidden[plan.gelu], grad_input=grad_hidden[plan.gelu]
            )
        grad_h = grad_parameters = None
        if ctx.needs_input_grad[0]:
            grad_h = grad.new_zeros(ctx.num_rows, *x.shape[1:])
            grad_h.index_add_(0, plan.source, torch.bmm(first, grad_hidden))
        if ctx.needs_input_grad[1]:
            parts = (
                torch.bmm(x, grad_hidden.transpose(1, 2)),
                grad_hidden.sum(2),
                torch.bmm(grad_out, active.transpose(1, 2)),
                grad.sum(2),
            )
            buffer = torch.cat([part.flatten() for part in parts]).to(parameters.dtype)
            grad_parameters = buffer.index_select(0, plan.places)
            if plan.chosen is not None:
                grad_parameters = torch.zeros_like(parameters).index_copy_(0, plan.chosen, grad_parameters)
        return grad_h, grad_parameters, None
