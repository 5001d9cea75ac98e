"""Groups of controllers that are pooled, rows of the tables, and which pairs are compared.

Only what the user groups is pooled. A group `ours` of the policies a and b is a row; so is each ablation of it, such as
`replay(ours)`, which pools replay(a) and replay(b). Controllers without a group are rows of their own:

    --controllers wait ours=a,b --ablations      rows: wait, ours, replay(ours), ...    members of ours: a, b
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

Facts = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Groups:
    """The controllers and groups of an evaluation, as results.json describes them."""

    controllers: Facts
    """By label: `kind`, and `of`, the learned controller that an ablation derives from."""
    groups: Facts = field(default_factory=dict)
    """By name: `kind`, `of` (the group that an ablation derives from) and `members`, labels of controllers."""

    @classmethod
    def of_results(cls, results: Mapping[str, Any]) -> Groups:
        """The groups of the content of a results.json."""
        return cls(results["controllers"], results["groups"])

    @cached_property
    def owner(self) -> dict[str, str]:
        """The group of every controller that is in one."""
        return {label: name for name, about in self.groups.items() for label in about["members"]}

    def about(self, label: str) -> Mapping[str, Any]:
        """The entry of a controller or group."""
        return self.groups[label] if label in self.groups else self.controllers[label]

    def kind(self, label: str) -> str:
        """The kind of a controller or group."""
        return self.about(label)["kind"]

    def members(self, label: str) -> tuple[str, ...]:
        """The controllers pooled under a label: the members of a group, or the controller itself."""
        return tuple(self.groups[label]["members"]) if label in self.groups else (label,)

    def rows(self, labels: Iterable[str]) -> list[str]:
        """The labels that have a row: groups and controllers without a group, in the given order."""
        return [label for label in labels if label not in self.owner]

    def learned(self, labels: Iterable[str]) -> list[str]:
        """The labels of trained controllers and their groups, without ablations."""
        return [label for label in labels if self.kind(label) == "learned"]

    def comparable(self, label: str, other: str) -> bool:
        """Whether two labels are compared.

        A policy or group is compared with its ablations, every rule and the other learned rows; an ablation with the
        others of the same origin, and with the rules if it is a row.
        """
        if label == other or self.owner.get(label) == other or self.owner.get(other) == label:
            return False
        if self._root(label) == self._root(other):
            return True
        pair = (label, other)
        if any(own in self.owner for own in pair):
            return self._meets_rows(*pair) or self._meets_rows(*reversed(pair))
        return not any(self._derived(own) for own in pair) or any(self._rule(own) for own in pair)

    def matched(self, label: str, other: str) -> bool:
        """Whether the policies of two groups correspond one to one, as those of `ours` and `replay(ours)` do."""
        return self._root(label) == self._root(other)

    def _meets_rows(self, member: str, row: str) -> bool:
        """Whether a member of a group is itself compared with a row."""
        alone = member in self.owner and not self._derived(member)
        return alone and row not in self.owner and not self._derived(row)

    def _root(self, label: str) -> str:
        return self.about(label)["of"] or label

    def _derived(self, label: str) -> bool:
        return self.about(label)["of"] is not None

    def _rule(self, label: str) -> bool:
        return self.kind(label) != "learned" and not self._derived(label)
