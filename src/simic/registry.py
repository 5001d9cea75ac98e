"""Registry: named things that simic ships and that users add. One registry per kind; nothing here loads torch.

A kind's registry stands in its own room (`simic.tasks.registry`, `simic.control.registry`, ...) beside the decorator
that users call (`@simic.task("mine")`). Built-ins register with the same decorator. What a name stands for is a
function or class that is called when it is needed, so that names are known before torch is loaded.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

Entry = TypeVar("Entry")

# What the command line uses as punctuation (`name=PATH,PATH`, `family:split`) cannot be part of a name.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


class Registry(Mapping[str, Entry]):
    """Entries by name, in order of registration. An unknown name raises ValueError and names the nearest one."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, Entry] = {}

    def add(self, name: str, entry: Entry) -> Entry:
        """Register an entry; a name can be given once."""
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ValueError(f"a {self.kind}'s name consists of letters, digits, '_', '.' and '-', got {name!r}")
        if name in self._entries:
            raise ValueError(f"a {self.kind} named {name!r} exists already; choose another name")
        self._entries[name] = entry
        return entry

    def register(self, name: str) -> Callable[[Entry], Entry]:
        """A decorator that registers what it decorates, and returns it unchanged."""
        return lambda entry: self.add(name, entry)

    def __getitem__(self, name: str) -> Entry:
        if name not in self._entries:
            raise ValueError(f"there is no {self.kind} named {name!r}; {nearest(name, self._entries)}")
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def nearest(name: str, valid: Iterable[str]) -> str:
    """A hint for a name that is not valid: the closest that is, or all of them."""
    valid = list(valid)
    ends = [own for own in valid if own.rpartition(".")[2] == name.rpartition(".")[2]]
    close = ends[:1] or difflib.get_close_matches(name, valid, n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else f"valid ones are {', '.join(valid)}"
