"""Adds, updates and removes the parameter groups of seeds in an optimizer and its learning-rate schedulers.

The parameters of a seed are in groups behind the host's, one for each host group that they are trained like (see
`seed_templates`). With two host groups and seeds in slots "a" and "b":

    param_groups   0          1              2                   3                      4
                   host,      host,          slot "a", weights   slot "a", biases       slot "b", weights
                   decayed    not decayed    (follows 0)         and norms (follows 1)  (follows 0)
    base_lrs       [0.1,      0.1,           0.1,                0.1,                   0.1]   (of each lr scheduler)
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import LBFGS, Muon, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from simic.growth.model import GrowableModel
from simic.scheduler.seed_templates import templates_for

SLOT_KEY = "simic_slot"
"""Marks a group of a seed's parameters; the value is the name of its slot."""
ORDER_KEY = "simic_order"
"""A rising number of every seed's group, so that models which share an optimizer can restore the order of groups."""
FOLLOWS_KEY = "simic_follows"
"""Index of the host group that a seed's group is trained like, among the groups without seeds."""
SEEN_KEY = "simic_seen"
"""Settings of the host's and of the seed's group when they were last compared, {name: [host's, seed's]}."""

_FOLLOWED = ("lr", "weight_decay", "momentum")

# Attributes of torch's schedulers with one entry per group. Everything else they need is in the group itself.
_LISTS = ("base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "base_momentums", "max_momentums")


class ParameterGroups:
    """The groups of a model's seeds: each starts with the settings of its host group, and follows their changes.

    Groups of other models' seeds in the same optimizer are not touched.
    """

    def __init__(self, model: GrowableModel, optimizer: Optimizer, lr_schedulers: Sequence[LRScheduler]) -> None:
        known = set(model.parameters())
        if isinstance(optimizer, (LBFGS, Muon)):
            name = type(optimizer).__name__  # LBFGS takes a single group, Muon only matrices
            raise ValueError(f"{name} cannot train seeds, which come and go and have biases; use SGD or AdamW")
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        # Trainers that leave out what is frozen build groups without parameters for a host that is not trained at all.
        if known.isdisjoint(held) and (held or not model.freeze_host):
            raise ValueError("the optimizer holds none of the model's parameters; build it from model.parameters()")
        for scheduler in lr_schedulers:
            driven = scheduler.optimizer
            if getattr(driven, "optimizer", driven) is not optimizer:  # accelerate's wrapper has the optimizer inside
                raise ValueError(f"the {type(scheduler).__name__} drives another optimizer than the one given")
        self.model, self.optimizer = model, optimizer
        self.lr_schedulers = tuple(lr_schedulers)
        self._managed: set[nn.Parameter] = set()  # parameters in the groups of this model's seeds at the last sync
        self.sync()
        optimizer.register_load_state_dict_pre_hook(self._before_load)

    def sync(self) -> None:
        """Add groups of new seeds, update those whose gate was added or removed, remove those of removed seeds."""
        for group in self._own():
            wanted = self._wanted(group[SLOT_KEY])
            # Older checkpoints have one group per seed without this key, trained like the weights.
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
        self._managed = {parameter for group in self._own() for parameter in group["params"]}

    def follow(self, *, tensors: bool = False) -> None:
        """Apply changes of a host group's settings to the seeds' groups, unless these were changed themselves.

        Learning-rate schedulers other than torch's may set only the groups that existed at their construction.
        Settings that are tensors are compared only with `tensors`, because that synchronises with their device.
        """
        hosts = self._host_groups()
        for group in self._own():
            host = hosts[group.get(FOLLOWS_KEY, 0)]
            seen = group.setdefault(SEEN_KEY, {})
            for name in _FOLLOWED:
                if name in group and name in host and (tensors or not isinstance(group[name], Tensor)):
                    seen[name] = _follow(name, host, group, seen.get(name))

    def seed_order(self) -> list[str]:
        """Slots of the seeds' groups, in the optimizer's order."""
        return [group[SLOT_KEY] for group in self._own()]

    def seed_numbers(self) -> list[int]:
        """ORDER_KEY of these groups."""
        return [group.get(ORDER_KEY, 0) for group in self._own()]

    def rebuild(self, slots: Sequence[str], numbers: Sequence[int]) -> None:
        """Replace the seeds' groups by new ones in this order, to load a saved optimizer into.

        A slot that occurs once gets one group, as in older checkpoints; the next `sync` splits it. Groups that are in
        this order already stay, with their optimizer state: it may have been loaded before.
        """
        self.sync()
        if (self.seed_order(), self.seed_numbers()) == (list(slots), list(numbers)):
            return
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
        self._managed = {parameter for group in self._own() for parameter in group["params"]}

    def _before_load(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Optimizer hook: bring the groups of the present seeds into the order of the state to be loaded."""
        self.sync()
        saved = [(group[SLOT_KEY], group.get(ORDER_KEY, 0)) for group in state["param_groups"] if SLOT_KEY in group]
        slots, present = [slot for slot, _ in saved], self.seed_order()
        alone = len(present) == sum(SLOT_KEY in group for group in self.optimizer.param_groups)
        if alone and present != slots and set(present) == set(slots):
            self.rebuild(slots, [number for _, number in saved])

    def _own(self) -> list[dict[str, Any]]:
        """Groups of this model's seeds, and of those it held at the last sync."""
        known = self._managed | set(self.model.seeds.parameters())
        groups = [group for group in self.optimizer.param_groups if SLOT_KEY in group]
        return [group for group in groups if not known.isdisjoint(group["params"])]

    def _host_groups(self) -> list[dict[str, Any]]:
        return [group for group in self.optimizer.param_groups if SLOT_KEY not in group]

    def _seed(self, slot: str) -> nn.Module:
        seed = self.model.seed(slot)
        assert seed is not None, f"slot {slot} holds no seed"
        return seed

    def _wanted(self, slot: str) -> dict[int, list[str]]:
        """Names of the seed's parameters by host group (see `templates_for`); empty without a seed."""
        if self.model.seed(slot) is None:
            return {}
        seeds = set(self.model.seeds.parameters())  # an optimizer built from a grown model has them in a host group
        groups = [[p for p in group["params"] if p not in seeds] for group in self._host_groups()]
        submodule = self.model.sites[self.model.slot_names.index(slot)].submodule
        return templates_for(self._seed(slot), submodule, self.model.host, groups)

    def _add(self, slot: str, names: list[str], follows: int, order: int) -> None:
        groups = self.optimizer.param_groups
        seed = self._seed(slot)
        new = {seed.get_parameter(name) for name in names}
        for group in groups:  # an optimizer built from a grown model's parameters() has its seeds in a host group
            others = [parameter not in new for parameter in group["params"]]
            for key in {"params", "param_names"} & group.keys():
                group[key] = list(itertools.compress(group[key], others))
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

    def _set_parameters(self, group: dict[str, Any], names: list[str]) -> None:
        seed = self._seed(group[SLOT_KEY])
        self._drop_state(group["params"], seed)
        group["params"] = [seed.get_parameter(name) for name in names]
        if "param_names" in group:
            group["param_names"] = [f"seeds.{group[SLOT_KEY]}.{name}" for name in names]

    def _drop_state(self, parameters: Sequence[nn.Parameter], seed: nn.Module | None) -> None:
        """Delete the optimizer state of parameters that are not the seed's."""
        present = set() if seed is None else set(seed.parameters())
        for parameter in parameters:
            if parameter not in present:
                self.optimizer.state.pop(parameter, None)

    def _remove(self, group: dict[str, Any], *, forget: bool = False) -> None:
        groups = self.optimizer.param_groups
        index = next(i for i, other in enumerate(groups) if other is group)
        self._drop_state(group["params"], None if forget else self.model.seed(group[SLOT_KEY]))
        for values in self._per_group_lists(len(groups)):
            del values[index]
        del groups[index]

    def _per_group_lists(self, num_groups: int) -> list[list]:
        """Every list of the schedulers with one entry per group; one that composite schedulers share is listed once."""
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
    """Scale a seed's setting as its host group's changed; returns [host's, seed's] for the next comparison."""
    now, mine = float(host[name]), float(own[name])
    if seen is not None and now != seen[0] and mine == seen[1] and (seen[0] or not mine):
        mine = now * (mine / seen[0]) if seen[0] else now
        if isinstance(own[name], Tensor):
            own[name].fill_(mine)
        else:
            own[name] = mine
    return [now, float(own[name])]
