"""Keeps an optimizer, and the learning-rate schedulers on it, in step with the seeds of a model."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import LBFGS, Muon, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from simic.growth.model import GrowableModel

SLOT_KEY = "simic_slot"
"""Marks the group of a seed's parameters, with the name of its slot."""

# What torch's schedulers keep per group. Everything else they need stands in the group itself.
_LISTS = ("base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "base_momentums", "max_momentums")


class ParameterGroups:
    """One parameter group per seed: it starts as a copy of the group that trains the seed's surroundings."""

    def __init__(self, model: GrowableModel, optimizer: Optimizer, lr_schedulers: Sequence[LRScheduler]) -> None:
        known = set(model.parameters())
        if isinstance(optimizer, (LBFGS, Muon)):
            name = type(optimizer).__name__  # one takes a single group, the other matrices only
            raise ValueError(f"{name} cannot train seeds, which come and go and have biases; use SGD or AdamW")
        if not any(parameter in known for group in optimizer.param_groups for parameter in group["params"]):
            raise ValueError("the optimizer holds none of the model's parameters; build it from model.parameters()")
        for scheduler in lr_schedulers:
            if scheduler.optimizer is not optimizer:
                raise ValueError(f"the {type(scheduler).__name__} drives another optimizer than the one given")
        self.model, self.optimizer = model, optimizer
        self.lr_schedulers = tuple(lr_schedulers)
        self.sync()

    def sync(self) -> None:
        """Add groups of new seeds, update those whose gate came or went, remove those of seeds that are gone."""
        for group in list(self.optimizer.param_groups):
            if SLOT_KEY in group:
                seed = self.model.seed(group[SLOT_KEY])
                if seed is None:
                    self._remove(group)
                else:
                    self._update(group, seed)
        present = {group.get(SLOT_KEY) for group in self.optimizer.param_groups}
        for slot in self.model.slot_names:
            seed = self.model.seed(slot)
            if seed is not None and slot not in present:
                self._add(slot, seed)

    def seed_order(self) -> list[str]:
        """Slots of the seeds' groups, as the optimizer has them."""
        return [group[SLOT_KEY] for group in self.optimizer.param_groups if SLOT_KEY in group]

    def rebuild(self, slots: Sequence[str]) -> None:
        """Fresh groups for the seeds in this order, behind the host's, to load a saved optimizer into."""
        for group in [group for group in self.optimizer.param_groups if SLOT_KEY in group]:
            self._remove(group)
        for slot in slots:
            seed = self.model.seed(slot)
            assert seed is not None, f"slot {slot} holds no seed"
            self._add(slot, seed)

    def _add(self, slot: str, seed: nn.Module) -> None:
        groups = self.optimizer.param_groups
        for group in groups:  # an optimizer built from a grown model's parameters() holds its seeds already
            self._keep(group, [parameter not in set(seed.parameters()) for parameter in group["params"]])
        nearby = set(self.model.host.get_submodule(slot).parameters())
        index = next((i for i, group in enumerate(groups) if nearby & set(group["params"])), 0)
        template = groups[index]
        kept = {k: copy.deepcopy(v) for k, v in template.items() if k not in ("params", "param_names", SLOT_KEY)}
        named = [(f"seeds.{slot}.{name}", parameter) for name, parameter in seed.named_parameters()]
        params = named if "param_names" in template else [parameter for _, parameter in named]
        self.optimizer.add_param_group({**kept, "params": params, SLOT_KEY: slot})
        for values in self._per_group_lists(len(groups) - 1):
            values.append(copy.copy(values[index]))

    def _keep(self, group: dict[str, Any], wanted: list[bool]) -> None:
        for key in ("params", "param_names"):
            if key in group:
                group[key] = [value for value, keep in zip(group[key], wanted, strict=True) if keep]

    def _update(self, group: dict[str, Any], seed: nn.Module) -> None:
        names, wanted = zip(*seed.named_parameters(), strict=True)
        for gone in set(group["params"]) - set(wanted):
            self.optimizer.state.pop(gone, None)
        group["params"] = list(wanted)
        if "param_names" in group:
            group["param_names"] = [f"seeds.{group[SLOT_KEY]}.{name}" for name in names]

    def _remove(self, group: dict[str, Any]) -> None:
        groups = self.optimizer.param_groups
        index = next(i for i, other in enumerate(groups) if other is group)
        for parameter in group["params"]:
            self.optimizer.state.pop(parameter, None)
        for values in self._per_group_lists(len(groups)):
            del values[index]
        del groups[index]

    def _per_group_lists(self, num_groups: int) -> list[list]:
        """Every list with one entry per group; composite schedulers may share one, which counts once."""
        lists: dict[int, list] = {}
        pending = list(self.lr_schedulers)
        while pending:
            scheduler = pending.pop()
            pending.extend(getattr(scheduler, "_schedulers", ()))
            for name in _LISTS:
                values = getattr(scheduler, name, None)
                if isinstance(values, list) and len(values) == num_groups:
                    lists[id(values)] = values
        return list(lists.values())
