"""The program of a host with its seeds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

from simic.stacked.compiled import instructions as m
from simic.stacked.compiled.builder import Activation, Builder, Program, Unit
from simic.stacked.compiled.modules import put_module


class SeedInSlot(NamedTuple):
    """A seed as a program runs it."""

    slot: int
    module: nn.Module
    unit: Unit
    reads_input: bool
    operator: str
    gate: tuple[nn.Module, Unit] | None


def build_program(
    segments: Sequence[tuple[str, nn.Module]],
    host: Unit,
    seeds: Sequence[Sequence[SeedInSlot]],
    num_slots: int,
    in_shape: Sequence[int],
) -> Program:
    """The program of a host with some seeds, segment by segment; `in_shape` is that of a sample."""
    builder, starts = Builder(), [-1] * num_slots
    x = builder.allocate(in_shape[0], tuple(in_shape[1:]))
    for (name, segment), own in zip(segments, seeds, strict=True):
        builder.unit = host
        h = put_module(builder, segment, name, x)
        for seed in own:
            starts[seed.slot] = builder.size
            h = _put_seed(builder, seed, h, x)
        if x.row and any(seed.reads_input for seed in own):
            # Seeds that are skipped set nothing, so all readers of x add to its gradient.
            builder.add(m.CLEAR, x)
        x = h
    return builder.finish(starts, x)


def _put_seed(builder: Builder, seed: SeedInSlot, h: Activation, x: Activation) -> Activation:
    """The activation h of a slot with a seed blended in."""
    skip = builder.add(m.SKIP, h, SLOT=seed.slot)
    builder.unit = seed.unit
    y, gate, gates = put_module(builder, seed.module, "", x if seed.reads_input else h), -1, 1
    if seed.gate is not None:
        module, builder.unit = seed.gate
        opened = put_module(builder, module, "", h)
        gate, gates = opened.row, opened.rows
    elif seed.operator == "multiply":
        gate = builder.like(h).row
    skipped = builder.add(m.SKIPPED, h, SLOT=seed.slot, TARGET=skip)
    out = builder.like(h)
    columns = {"SLOT": seed.slot, "GATE": gate, "SPACE": gates, "MULTIPLY": int(seed.operator == "multiply")}
    builder.add(m.BLEND, h, out, AUX=y.row, **columns)
    builder.point(skip, skipped + 1)
    return out
