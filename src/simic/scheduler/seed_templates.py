"""Which of the host's parameter groups a seed's parameters are trained like.

Hosts often exempt biases and normalisations from weight decay, or train layers at rates of their own. A seed follows
such rules: each of its parameters is trained like the host's nearest parameters of the same kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

WEIGHT, BIAS, NORM = "weight", "bias", "norm"


def kinds_of(module: nn.Module) -> dict[nn.Parameter, str]:
    """Every parameter and its kind: with two dimensions or more a weight, else of a normalisation or a bias."""
    return {
        parameter: WEIGHT if parameter.ndim > 1 else NORM if "norm" in type(owner).__name__.lower() else BIAS
        for owner in module.modules()
        for parameter in owner._parameters.values()
        if parameter is not None
    }


def templates_for(
    seed: nn.Module, slot: str, host: nn.Module, host_groups: Sequence[Sequence[nn.Parameter]]
) -> dict[int, list[str]]:
    """Names of the seed's parameters by the host group to train them like, that of its weights first."""
    finder = _Finder(slot, host, host_groups)
    kinds = kinds_of(seed)
    found = {kind: finder.template(kind) for kind in (WEIGHT, BIAS, NORM)}
    chosen: dict[int, list[str]] = {found[WEIGHT]: []}
    for name, parameter in seed.named_parameters():
        chosen.setdefault(found[kinds[parameter]], []).append(name)
    return {group: names for group, names in chosen.items() if names}


class _Finder:
    """Looks for groups from a slot outwards."""

    def __init__(self, slot: str, host: nn.Module, host_groups: Sequence[Sequence[nn.Parameter]]) -> None:
        self._kinds = kinds_of(host)
        self._group_of = {p: index for index, group in enumerate(host_groups) for p in group if p in self._kinds}
        self._kinds_in = [{self._kinds[p] for p in group if p in self._kinds} for group in host_groups]
        self._around = list(_outwards(host, slot))
        self._own = self._groups_at(self._around[0])

    def template(self, kind: str) -> int:
        """Index of the group whose rule holds for this kind near the slot; 0 if the host is not trained at all."""
        if kind != WEIGHT and not any(kind in kinds for kinds in self._kinds_in):
            other = BIAS if kind == NORM else NORM  # a host that lacks one of the two treats both alike
            kind = other if any(other in kinds for kinds in self._kinds_in) else WEIGHT
        at_slot = self._groups_at(self._around[0], kind)
        # Else a group of the slot's own module that trains this kind elsewhere has a rule for it.
        at_slot += [group for group in self._own if kind in self._kinds_in[group]]
        if at_slot:
            return at_slot[0]
        for module in self._around[1:]:
            for group in self._groups_at(module, kind):
                # A group with weights in it is no rule for biases, but another layer's.
                if kind == WEIGHT or not self._own or WEIGHT not in self._kinds_in[group]:
                    return group
        if self._own:
            return self._own[0]
        return next(iter(self._group_of.values()), 0) if kind == WEIGHT else self.template(WEIGHT)

    def _groups_at(self, module: nn.Module, kind: str | None = None) -> list[int]:
        trained = {
            self._group_of[p] for p in module.parameters() if p in self._group_of and kind in (None, self._kinds[p])
        }
        return sorted(trained)


def _outwards(host: nn.Module, slot: str) -> Iterator[nn.Module]:
    """The slot's submodule, what encloses it, and so on up to the host."""
    path = slot.split(".")
    for length in range(len(path), -1, -1):
        yield host.get_submodule(".".join(path[:length]))
