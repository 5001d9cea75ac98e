"""Which parameter group of the host each parameter of a seed is trained like.

Hosts often exempt biases and normalisation layers from weight decay, or give layers their own learning rates. A seed
follows these rules: each of its parameters is trained like the nearest host parameters of the same kind.

    host group 0: weights, decay 0.1     seed's weights          -> group 0
    host group 1: biases and norms, 0    seed's biases and norms -> group 1
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

WEIGHT, BIAS, NORM = "weight", "bias", "norm"


def kinds_of(module: nn.Module) -> dict[nn.Parameter, str]:
    """The kind of every parameter: two dimensions or more are a weight; others belong to a norm or are a bias."""
    return {
        parameter: WEIGHT if parameter.ndim > 1 else NORM if "norm" in type(owner).__name__.lower() else BIAS
        for owner in module.modules()
        for parameter in owner._parameters.values()
        if parameter is not None
    }


def templates_for(
    seed: nn.Module, submodule: str, host: nn.Module, host_groups: Sequence[Sequence[nn.Parameter]]
) -> dict[int, list[str]]:
    """Names of the seed's parameters by index of the host group to train them like; its weights' group comes first.

    `submodule` is the name of the one that its slot belongs to.
    """
    finder = _GroupFinder(submodule, host, host_groups)
    kinds = kinds_of(seed)
    found = {kind: finder.group_for(kind) for kind in (WEIGHT, BIAS, NORM)}
    chosen: dict[int, list[str]] = {found[WEIGHT]: []}
    for name, parameter in seed.named_parameters():
        chosen.setdefault(found[kinds[parameter]], []).append(name)
    return {group: names for group, names in chosen.items() if names}


class _GroupFinder:
    """Searches for groups from a slot outwards: its submodule, the module around that, and so on up to the host."""

    def __init__(self, submodule: str, host: nn.Module, host_groups: Sequence[Sequence[nn.Parameter]]) -> None:
        self._kinds = kinds_of(host)
        self._group_of = {p: index for index, group in enumerate(host_groups) for p in group if p in self._kinds}
        self._kinds_in = [{self._kinds[p] for p in group if p in self._kinds} for group in host_groups]
        path = submodule.split(".")
        self._outwards = [host.get_submodule(".".join(path[:length])) for length in range(len(path), -1, -1)]
        self._own = self._groups_at(self._outwards[0])

    def group_for(self, kind: str) -> int:
        """Index of the group whose rule applies to this kind near the slot; 0 if the host is not trained at all."""
        trained_kinds = set().union(*self._kinds_in)
        if kind != WEIGHT and kind not in trained_kinds:
            other = BIAS if kind == NORM else NORM  # a host with only one of the two has one rule for both
            kind = other if other in trained_kinds else WEIGHT
        at_slot = self._groups_at(self._outwards[0], kind)
        # Else a group that trains the slot's own module and this kind elsewhere.
        at_slot += [group for group in self._own if kind in self._kinds_in[group]]
        if at_slot:
            return at_slot[0]
        for module in self._outwards[1:]:
            for group in self._groups_at(module, kind):
                # A group that also has weights is not a rule for biases but one for another layer.
                if kind == WEIGHT or not self._own or WEIGHT not in self._kinds_in[group]:
                    return group
        if self._own:
            return self._own[0]
        return next(iter(self._group_of.values()), 0) if kind == WEIGHT else self.group_for(WEIGHT)

    def _groups_at(self, module: nn.Module, kind: str | None = None) -> list[int]:
        """Groups that train parameters (of one kind) of a module, in order."""
        trained = [p for p in module.parameters() if p in self._group_of and kind in (None, self._kinds[p])]
        return sorted({self._group_of[p] for p in trained})
