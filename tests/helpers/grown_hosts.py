"""Stacked hosts of every topology that hold seeds of every built-in blueprint with every blend operator."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from simic.growth.blueprints import blueprints_for, fits
from simic.growth.slot_discovery import find_sites
from simic.growth.slot_shape import SlotShape
from simic.lifecycle.actions import STYLES, Action
from simic.lifecycle.stages import Incubation, LifecycleConfig
from simic.stacked.hosts import StackedHosts
from simic.tasks.hosts import conv_host, mlp_host, plain_mlp_host, transformer_host
from simic.tasks.task import accuracy, mean_cross_entropy

SLOTS = ("stem", "block1")
STYLE_OF = {style.operator: style.name for style in reversed(STYLES)}
"""Blend operator -> the first style that uses it."""


class Kind(NamedTuple):
    """Hosts of one architecture."""

    make_host: Callable[[], nn.Sequential]
    shape: SlotShape  # of both slots
    draw: Callable[..., tuple[Tensor, Tensor]]  # (hosts, samples) -> inputs and targets


def labelled(*shape: int) -> Callable[..., tuple[Tensor, Tensor]]:
    """Inputs whose class depends on their first number."""

    def draw(*sizes: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(*sizes, *shape, generator=torch.Generator().manual_seed(0))
        return x, x.flatten(len(sizes)).select(-1, 0).sign().long() + 1

    return draw


def text(*sizes: int) -> tuple[Tensor, Tensor]:
    """Tokens, each followed by its successor."""
    tokens = torch.randint(7, (*sizes, 5), generator=torch.Generator().manual_seed(0))
    return tokens, (tokens + 1) % 7


KINDS = {
    "features": Kind(lambda: mlp_host(5, 6, 2, 3), SlotShape("features", 6), labelled(5)),
    "features without norm": Kind(lambda: plain_mlp_host(5, 6, 2, 3), SlotShape("features", 6), labelled(5)),
    "signals": Kind(lambda: conv_host(2, 4, 1, 3, 1), SlotShape("conv", 4, 1), labelled(2, 8)),
    "images": Kind(lambda: conv_host(1, 4, 1, 3, 2), SlotShape("conv", 4, 2), labelled(1, 6, 6)),
    "text": Kind(lambda: transformer_host(7, 5, 8, 1), SlotShape("sequence", 8), text),
}


def grown_hosts(kind: str, incubation: Incubation = "shadow", **settings: Any) -> StackedHosts:
    """A host per blueprint and operator, with a fossil in the stem and a germinated seed in the block; one has none."""
    own = KINDS[kind]
    site = find_sites(own.make_host(), ["block1"], own.draw(2)[0])[0]
    every = [*product(blueprints_for([site.shape]), STYLE_OF.values())]
    hosts = StackedHosts(
        own.make_host,
        SLOTS,
        example_input=own.draw(2)[0],
        rng_seeds=range(len(every) + 1),
        loss=mean_cross_entropy,
        metric=accuracy,
        lifecycle=LifecycleConfig(incubation=incubation),
        **settings,
    )
    for slot, plant in zip(SLOTS, (hosts.plant, hosts.execute), strict=True):
        shape = hosts.sites[SLOTS.index(slot)].shape
        # The text's stem reads tokens, so that no seed can grow beside it.
        actions = [Action("germinate", slot, *each) if fits(each[0], shape) else Action() for each in every]
        plant(np.stack([action.encode(SLOTS, hosts.blueprint_names) for action in [*actions, Action()]]))
    hosts.tick()
    return hosts
