"""The budget of a model: how many parameters, and how many operations of a pass, it may have when it has grown.

Fossils and live seeds count alike, a gate where there is one. A germination that would exceed the budget is illegal:
`execute` refuses it, and controllers see its blueprint as one that does not fit the slot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf, isfinite
from numbers import Integral, Real
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from simic.growth.blueprints import BLUEPRINTS, Blueprint, fits, parameter_table
from simic.growth.branch_layers import Gate
from simic.growth.example import ExampleInput, call
from simic.growth.isolation import evaluating, plain_kernels, preserve_state, preserved_rng
from simic.growth.slot_shape import SlotShape
from simic.lifecycle.actions import STYLES, Column, Op
from simic.lifecycle.stages import IllegalActionError

if TYPE_CHECKING:
    from simic.growth.model import GrowableModel
    from simic.growth.slot_discovery import Site

_GATED = np.array([style.operator == "gate" for style in STYLES])


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Limits of a grown model; None means no limit."""

    max_parameters: int | None = None
    """Parameters of host and seeds together."""
    max_growth: float | None = None
    """The same as a multiple of the host's parameters: with 2.0 the model may double."""
    max_flops: float | None = None
    """Floating-point operations of a forward pass over the example input, as torch's FlopCounterMode counts them."""

    def __post_init__(self) -> None:
        whole = isinstance(self.max_parameters, Integral) and not isinstance(self.max_parameters, bool)
        if self.max_parameters is not None and not whole:
            raise ValueError(f"max_parameters must be a whole number, got {self.max_parameters!r}")
        for name in ("max_growth", "max_flops"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, Real) and isfinite(value)):
                raise ValueError(f"{name} must be a finite number, got {value!r}")
        if self.max_growth is not None and self.max_growth < 1:
            raise ValueError(f"max_growth is a multiple of the host, so at least 1, got {self.max_growth}")

    @property
    def limits_parameters(self) -> bool:
        """Whether there is a limit of parameters."""
        return self.max_parameters is not None or self.max_growth is not None


@dataclass(frozen=True)
class _Resource:
    """What a model uses of one resource, what it may use, and what a seed or a gate would add."""

    unit: str
    rule: str
    limit: float
    used: float
    seed: np.ndarray  # (S, B); -1 where the blueprint does not fit
    gate: np.ndarray  # (S,)

    @property
    def free(self) -> float:
        return self.limit - self.used


def check_budget(model: GrowableModel) -> None:
    """Raise if the host alone exceeds the budget of a new model, or no seed fits into it."""
    for resource in _resources(model):
        if resource.free < 0:
            raise ValueError(
                f"the host alone has {resource.used:,.0f} {resource.unit}, more than {resource.rule} allows; raise the "
                "limit"
            )
        smallest = np.where(resource.seed >= 0, resource.seed, inf).min()
        if smallest > resource.free and model.budget.max_growth != 1:
            raise ValueError(
                f"nothing can grow within {resource.rule}: the host has {resource.used:,.0f} {resource.unit}, and the "
                f"smallest seed adds {smallest:,.0f}; raise the limit, or allow smaller blueprints"
            )


def check_action(model: GrowableModel, row: np.ndarray) -> None:
    """Raise IllegalActionError if an action (H,) would exceed the budget."""
    op, slot, gated = row[Column.OP], int(row[Column.SLOT]), bool(_GATED[row[Column.STYLE]])
    if op not in (Op.GERMINATE, Op.SET_ALPHA_TARGET) or row[Column.BLUEPRINT] >= len(model.blueprint_names):
        return
    for resource in _resources(model):
        added = 0.0
        if op == Op.GERMINATE:
            added = max(0.0, resource.seed[slot, row[Column.BLUEPRINT]]) + gated * resource.gate[slot]
        elif gated and not _GATED[model.slot_state.style[0, slot]]:
            added = resource.gate[slot]
        if added > resource.free:
            what = model.blueprint_names[row[Column.BLUEPRINT]] if op == Op.GERMINATE else "the gate"
            raise IllegalActionError(
                f"cannot {Op(op)} slot {model.slot_names[slot]!r}: {what} adds {added:,.0f} {resource.unit} to "
                f"{resource.used:,.0f}, more than {resource.rule} allows; choose a smaller blueprint, or prune a seed "
                "first"
            )


def table_within_budget(model: GrowableModel) -> np.ndarray:
    """Parameters of every blueprint in every slot (S, B); -1 where it does not fit, or not into the budget.

    Slots with a seed keep their row: what is known of the seed's blueprint does not change.
    """
    table = model.blueprint_table()
    empty = ~model.slot_state.occupied[0][:, None]
    for resource in _resources(model):
        table = np.where(empty & (resource.seed > resource.free), -1, table)
    return table


def styles_within_budget(model: GrowableModel) -> np.ndarray | None:
    """Styles that fit under each operation, bool (1, ops, styles), or None if all do.

    Controllers choose the style apart from slot and blueprint, so a style with a gate fits if it does with all of them.
    """
    legal = np.ones((1, len(Op), len(STYLES)), dtype=bool)
    occupied = model.slot_state.occupied[0]
    lacks_gate = occupied & ~_GATED[model.slot_state.style[0]]
    for resource in _resources(model):
        seed = np.where(occupied[:, None] | (resource.seed > resource.free), -1, resource.seed)
        with_gate = np.where(seed >= 0, seed + resource.gate[:, None], -1)
        legal[0, Op.GERMINATE, _GATED] &= with_gate.max() <= resource.free
        legal[0, Op.SET_ALPHA_TARGET, _GATED] &= not (lacks_gate & (resource.gate > resource.free)).any()
    return None if legal.all() else legal


def count_flops(host: nn.Module, example_input: ExampleInput) -> int:
    """Operations of a forward pass of a host over its example input."""
    with preserve_state(host), evaluating(host), plain_kernels(), FlopCounterMode(display=False) as counter:
        call(host, example_input)
    return counter.get_total_flops()


def _resources(model: GrowableModel) -> list[_Resource]:
    """The resources that a model's budget limits."""
    budget, resources, shapes = model.budget, [], [site.shape for site in model.sites]
    if budget.limits_parameters:
        host = sum(p.numel() for p in model.host_parameters())
        limits = {
            f"max_parameters={budget.max_parameters}": inf if budget.max_parameters is None else budget.max_parameters,
            f"max_growth={budget.max_growth}": inf if budget.max_growth is None else budget.max_growth * host,
        }
        rule = min(limits, key=lambda name: limits[name])
        gate = np.array([_gate_parameters(shape) for shape in shapes])
        used = sum(p.numel() for p in model.parameters())
        seed = parameter_table(model.blueprint_names, shapes)
        resources.append(_Resource("parameters", rule, limits[rule], used, seed, gate))
    if budget.max_flops is not None:
        seed, gate = _flop_tables(model.blueprint_names, model.sites)
        used = model.host_flops + _used(model, seed, gate)
        rule = f"max_flops={budget.max_flops:g}"
        resources.append(_Resource("operations per pass", rule, budget.max_flops, used, seed, gate))
    return resources


def _used(model: GrowableModel, seed: np.ndarray, gate: np.ndarray) -> float:
    state = model.slot_state
    (slots,) = np.nonzero(state.occupied[0])
    return float(seed[slots, state.blueprint[0, slots]].sum() + gate[slots][_GATED[state.style[0, slots]]].sum())


@lru_cache(maxsize=4096)
def _gate_parameters(shape: SlotShape) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in Gate(shape).parameters())


def _flop_tables(names: Sequence[str], sites: Sequence[Site]) -> tuple[np.ndarray, np.ndarray]:
    """Operations per pass of every blueprint in every slot (S, B), -1 where it does not fit, and of gates (S,)."""
    seed = np.array(
        [
            [
                site.runs * _seed_flops(BLUEPRINTS[name], site.shape, site.read_shape(BLUEPRINTS[name].reads))
                if fits(name, site.shape)
                else -1
                for name in names
            ]
            for site in sites
        ]
    )
    return seed, np.array([site.runs * _gate_flops(site.shape, site.example_shape) for site in sites])


@lru_cache(maxsize=4096)
def _seed_flops(entry: Blueprint, shape: SlotShape, read_shape: tuple[int, ...]) -> int:
    with preserved_rng():
        return _count(lambda: entry.build(shape), read_shape)


@lru_cache(maxsize=4096)
def _gate_flops(shape: SlotShape, example_shape: tuple[int, ...]) -> int:
    return _count(lambda: Gate(shape), example_shape)


def _count(build: Callable[[], nn.Module], example_shape: tuple[int, ...]) -> int:
    try:
        return _count_on("meta", build, example_shape)
    except Exception:  # a user's branch may compute with values, which tensors on meta do not have
        return _count_on("cpu", build, example_shape)


def _count_on(device: str, build: Callable[[], nn.Module], example_shape: tuple[int, ...]) -> int:
    with torch.device(device), torch.no_grad(), FlopCounterMode(display=False) as counter:
        build().eval()(torch.zeros(example_shape))
    return counter.get_total_flops()
