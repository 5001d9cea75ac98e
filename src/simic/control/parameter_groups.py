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
ORDER_KEY = "simic_order"
"""A number that rises from one seed's group to the next, so that models which share an optimizer can restore it."""

# What torch's schedulers keep per group. Everything else they need stands in the group itself.
_LISTS = ("base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "base_momentums", "max_momentums")


class ParameterGroups:
    """One parameter group per seed: it starts as a copy of the group that trains the seed's surroundings.

    Groups of other models' seeds in the same optimizer are left alone.
    """

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
        self._tended: set[nn.Parameter] = set()  # in the groups of this model's seeds, when they were last in step
        self.sync()
        optimizer.register_load_state_dict_pre_hook(self._follow_saved)

    def sync(self) -> None:
        """Add groups of new seeds, update those whose gate came or went, remove those of seeds that are gone."""
        for group in self._own():
            seed = self.model.seed(group[SLOT_KEY])
            if seed is None:
                self._remove(group)
            else:
                self._update(group, seed)
        present = self.seed_order()
        for slot in self.model.slot_names:
            seed = self.model.seed(slot)
            if seed is not None and slot not in present:
                order = 1 + max((group.get(ORDER_KEY, 0) for group in self.optimizer.param_groups), default=0)
                self._add(slot, seed, order)
        self._tended = {parameter for group in self._own() for parameter in group["params"]}

    def seed_order(self) -> list[str]:
        """Slots of the seeds' groups, as the optimizer has them."""
        return [group[SLOT_KEY] for group in self._own()]

    def seed_numbers(self) -> list[int]:
        """Where these groups stand among all that seeds have in the optimizer."""
        return [group.get(ORDER_KEY, 0) for group in self._own()]

    def rebuild(self, slots: Sequence[str], numbers: Sequence[int]) -> None:
        """Fresh groups for the seeds in this order, behind the host's, to load a saved optimizer into."""
        for group in self._own():
            self._remove(group)
        for slot, number in zip(slots, numbers, strict=True):
            seed = self.model.seed(slot)
            assert seed is not None, f"slot {slot} holds no seed"
            self._add(slot, seed, number)
        self.sync()

    def _follow_saved(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Before the optimizer loads: the groups of the seeds that the model holds now, in the saved order."""
        self.sync()
        saved = {group[SLOT_KEY]: group.get(ORDER_KEY, 0) for group in state["param_groups"] if SLOT_KEY in group}
        alone = len(self._own()) == sum(SLOT_KEY in group for group in self.optimizer.param_groups)
        present = list(dict.fromkeys(self.seed_order()))
        if alone and present != list(saved) and set(present) == set(saved):
            self.rebuild(list(saved), list(saved.values()))

    def _own(self) -> list[dict[str, Any]]:
        """Groups of this model's seeds, and of those it held when optimizer and model were last in step."""
        known = self._tended | set(self.model.seeds.parameters())
        groups = [group for group in self.optimizer.param_groups if SLOT_KEY in group]
        return [group for group in groups if not known.isdisjoint(group["params"])]

    def _add(self, slot: str, seed: nn.Module, order: int) -> None:
        groups = self.optimizer.param_groups
        for group in groups:  # an optimizer built from a grown model's parameters() holds its seeds already
            self._keep(group, [parameter not in set(seed.parameters()) for parameter in group["params"]])
        source = self._surroundings(slot)
        template = groups[source]
        kept = {k: copy.deepcopy(v) for k, v in template.items() if k not in ("params", "param_names")}
        named = [(f"seeds.{slot}.{name}", parameter) for name, parameter in seed.named_parameters()]
        params = named if "param_names" in template else [parameter for _, parameter in named]
        self.optimizer.add_param_group({**kept, "params": params, SLOT_KEY: slot, ORDER_KEY: order})
        added = groups.pop()
        place = next((i for i, group in enumerate(groups) if group.get(ORDER_KEY, 0) > order), len(groups))
        for values in self._per_group_lists(len(groups)):
            values.insert(place, copy.copy(values[source]))
        groups.insert(place, added)

    def _surroundings(self, slot: str) -> int:
        """Index of the group that trains the slot's submodule, else of the first that trains this host, else 0."""
        nearby, host = set(self.model.host.get_submodule(slot).parameters()), set(self.model.host.parameters())
        trained = [set(group["params"]) for group in self.optimizer.param_groups]
        return next((i for wanted in (nearby, host) for i, found in enumerate(trained) if wanted & found), 0)

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
