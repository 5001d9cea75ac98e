"""Keeps an optimizer, and the learning-rate schedulers on it, in step with the seeds of a model.

A seed's parameters stand in groups of their own behind the host's, one for each host group that they are trained like
(see `seed_templates`), for instance:

    param_groups   0 host, decayed   1 host, not decayed   2 slot "a" like 0   3 slot "a" like 1   4 slot "b" like 0
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import LBFGS, Muon, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from simic.growth.model import GrowableModel
from simic.scheduler.seed_templates import templates_for

SLOT_KEY = "simic_slot"
"""Marks a group of a seed's parameters, with the name of its slot."""
ORDER_KEY = "simic_order"
"""A number that rises from one group of seeds to the next, so that models which share an optimizer can restore it."""
FOLLOWS_KEY = "simic_follows"
"""The host group that a seed's group is trained like: its place among the groups without seeds."""
SEEN_KEY = "simic_seen"
"""Settings of the host group and of the seed's when they were last compared, {name: [host's, seed's]}."""

_FOLLOWED = ("lr", "weight_decay", "momentum")

# What torch's schedulers keep per group. Everything else they need stands in the group itself.
_LISTS = ("base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "base_momentums", "max_momentums")


class ParameterGroups:
    """The groups of a model's seeds: each starts as a copy of the host group that it is trained like, and follows it.

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
            wanted = self._wanted(group[SLOT_KEY])
            # A checkpoint may hold a group without this key: everything of its seed, trained like the weights.
            follows = group.setdefault(FOLLOWS_KEY, next(iter(wanted), 0))
            if follows in wanted:
                self._set_parameters(group, wanted[follows])
            else:
                self._remove(group)
        present = {(group[SLOT_KEY], group[FOLLOWS_KEY]) for group in self._own()}
        for slot in self.model.slot_names:
            for follows, names in self._wanted(slot).items():
                if (slot, follows) not in present:
                    order = 1 + max((group.get(ORDER_KEY, 0) for group in self.optimizer.param_groups), default=0)
                    self._add(slot, names, follows, order)
        self._remember()

    def follow(self, *, tensors: bool = False) -> None:
        """Change a seed's settings as somebody changed its host group's, unless he changed the seed's himself.

        Learning-rate schedulers that are not torch's own set the groups that they saw at their construction, or all.
        Settings that are tensors are compared on request only, since that waits for their device.
        """
        hosts = self._host_groups()
        for group in self._own():
            host = hosts[group.get(FOLLOWS_KEY, 0)]
            seen = group.setdefault(SEEN_KEY, {})
            for name in _FOLLOWED:
                if name in group and name in host and (tensors or not isinstance(group[name], Tensor)):
                    seen[name] = _follow(name, host, group, seen.get(name))

    def seed_order(self) -> list[str]:
        """Slots of the seeds' groups, as the optimizer has them."""
        return [group[SLOT_KEY] for group in self._own()]

    def seed_numbers(self) -> list[int]:
        """Where these groups stand among all that seeds have in the optimizer."""
        return [group.get(ORDER_KEY, 0) for group in self._own()]

    def rebuild(self, slots: Sequence[str], numbers: Sequence[int]) -> None:
        """Fresh groups for the seeds in this order, behind the host's, to load a saved optimizer into.

        A slot that is named once has everything in one group, as older checkpoints do; the next `sync` divides it.
        """
        planned = {slot: list(self._wanted(slot).items()) for slot in slots}
        for slot, parts in planned.items():
            if slots.count(slot) == 1 and len(parts) > 1:
                planned[slot] = [(parts[0][0], [name for name, _ in self._seed(slot).named_parameters()])]
            elif slots.count(slot) != len(parts):
                raise ValueError(
                    f"the saved optimizer trains the seed in slot {slot!r} in {slots.count(slot)} parameter groups, "
                    f"this one would in {len(parts)}; build the optimizer with the same groups"
                )
        for group in self._own():
            self._remove(group, forget=True)
        for slot, number in zip(slots, numbers, strict=True):
            follows, names = planned[slot].pop(0)
            self._add(slot, names, follows, number)
        self._remember()

    def _remember(self) -> None:
        self._tended = {parameter for group in self._own() for parameter in group["params"]}

    def _follow_saved(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Before the optimizer loads: the groups of the seeds that the model holds now, in the saved order."""
        self.sync()
        saved = [(group[SLOT_KEY], group.get(ORDER_KEY, 0)) for group in state["param_groups"] if SLOT_KEY in group]
        slots, present = [slot for slot, _ in saved], self.seed_order()
        alone = len(present) == sum(SLOT_KEY in group for group in self.optimizer.param_groups)
        if alone and present != slots and set(present) == set(slots):
            self.rebuild(slots, [number for _, number in saved])

    def _own(self) -> list[dict[str, Any]]:
        """Groups of this model's seeds, and of those it held when optimizer and model were last in step."""
        known = self._tended | set(self.model.seeds.parameters())
        groups = [group for group in self.optimizer.param_groups if SLOT_KEY in group]
        return [group for group in groups if not known.isdisjoint(group["params"])]

    def _host_groups(self) -> list[dict[str, Any]]:
        return [group for group in self.optimizer.param_groups if SLOT_KEY not in group]

    def _seed(self, slot: str) -> nn.Module:
        seed = self.model.seed(slot)
        assert seed is not None, f"slot {slot} holds no seed"
        return seed

    def _wanted(self, slot: str) -> dict[int, list[str]]:
        """Names of the seed's parameters by the host group that each is trained like; nothing without a seed."""
        if self.model.seed(slot) is None:
            return {}
        groups = [group["params"] for group in self._host_groups()]
        return templates_for(self._seed(slot), slot, self.model.host, groups)

    def _add(self, slot: str, names: list[str], follows: int, order: int) -> None:
        groups = self.optimizer.param_groups
        seed = self._seed(slot)
        new = {seed.get_parameter(name) for name in names}
        for group in groups:  # an optimizer built from a grown model's parameters() holds its seeds already
            self._keep(group, [parameter not in new for parameter in group["params"]])
        template = self._host_groups()[follows]
        source = next(i for i, group in enumerate(groups) if group is template)
        kept = {k: copy.deepcopy(v) for k, v in template.items() if k not in ("params", "param_names")}
        named = [(f"seeds.{slot}.{name}", seed.get_parameter(name)) for name in names]
        params = named if "param_names" in template else [parameter for _, parameter in named]
        keys = {SLOT_KEY: slot, ORDER_KEY: order, FOLLOWS_KEY: follows}
        self.optimizer.add_param_group({**kept, "params": params, **keys})
        added = groups.pop()
        place = next((i for i, group in enumerate(groups) if group.get(ORDER_KEY, 0) > order), len(groups))
        for values in self._per_group_lists(len(groups)):
            values.insert(place, copy.copy(values[source]))
        groups.insert(place, added)

    def _keep(self, group: dict[str, Any], wanted: list[bool]) -> None:
        for key in ("params", "param_names"):
            if key in group:
                group[key] = [value for value, keep in zip(group[key], wanted, strict=True) if keep]

    def _set_parameters(self, group: dict[str, Any], names: list[str]) -> None:
        seed = self._seed(group[SLOT_KEY])
        self._forget(group["params"], seed)
        group["params"] = [seed.get_parameter(name) for name in names]
        if "param_names" in group:
            group["param_names"] = [f"seeds.{group[SLOT_KEY]}.{name}" for name in names]

    def _forget(self, parameters: Sequence[nn.Parameter], seed: nn.Module | None) -> None:
        """Drop what the optimizer remembers of parameters that the seed does not have, or has no longer."""
        present = set() if seed is None else set(seed.parameters())
        for parameter in parameters:
            if parameter not in present:
                self.optimizer.state.pop(parameter, None)

    def _remove(self, group: dict[str, Any], *, forget: bool = False) -> None:
        groups = self.optimizer.param_groups
        index = next(i for i, other in enumerate(groups) if other is group)
        self._forget(group["params"], None if forget else self.model.seed(group[SLOT_KEY]))
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


def _follow(name: str, host: dict[str, Any], own: dict[str, Any], seen: list[float] | None) -> list[float]:
    """Move a seed's setting in proportion to its host group's; the values of both to compare with next time."""
    now, mine = float(host[name]), float(own[name])
    if seen is not None and now != seen[0] and mine == seen[1] and (seen[0] or not mine):
        mine = now * (mine / seen[0]) if seen[0] else now
        if isinstance(own[name], Tensor):
            own[name].fill_(mine)
        else:
            own[name] = mine
    return [now, float(own[name])]
