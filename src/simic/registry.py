"""Registry: things that are chosen by name, those of simic and those of users. Nothing here loads torch.

There is one registry per kind, beside the decorator that adds to it: `@simic.task("mine")`, `@simic.controller("mine")`
and so on. Built-ins are registered with the same decorators. An entry is a function or class that is called when it is
needed, so names are known before torch is loaded.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from traceback import walk_tb
from typing import Any, TypeVar

Entry = TypeVar("Entry")

# The command line uses "," "=" and ":" as punctuation (`name=PATH,PATH`, `family:split`).
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


class OwnCodeError(ValueError):
    """Code of a user that simic called failed; the message names it, the error and the line."""


class Registry(Mapping[str, Entry]):
    """Entries by name, in order of registration. Looking up an unknown name raises a ValueError with the nearest."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, Entry] = {}
        self._homes: dict[str, tuple[str, str]] = {}

    def add(self, name: str, entry: Entry, source: Callable[..., Any]) -> None:
        """Register what was made of `source`, a function or class. A name can be registered once.

        The same source may be registered again, so that a notebook cell can be run twice.
        """
        self.check_new(name)
        home = (source.__module__, source.__qualname__)
        if self._homes.get(name, home) != home:
            raise ValueError(
                f"a {self.kind} named {name!r} exists already (in {self._homes[name][0]}); choose another name"
            )
        self._entries[name], self._homes[name] = entry, home

    def check_new(self, name: str) -> None:
        """Raise unless an entry can have this name; decorators call it, because one without a name gets a function."""
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            remedy = ": write the decorator with a name" if callable(name) else ""
            raise ValueError(
                f"a {self.kind}'s name consists of letters, digits, '_', '.' and '-', got {name!r}{remedy}"
            )

    def running(self, name: str, kind: str | None = None) -> AbstractContextManager[None]:
        """While the code of an entry runs: name it in errors that it raises, see `running`."""
        return running(f"{kind or self.kind} {name}", self._homes[name][0])

    def __getitem__(self, name: str) -> Entry:
        if name not in self._entries:
            raise ValueError(f"there is no {self.kind} named {name!r}; {nearest_entry(name, self._entries)}")
        return self._entries[name]

    def check(self, setting: str, name: str) -> None:
        """Raise unless `name`, the value of a setting, is registered."""
        if name not in self._entries:
            raise ValueError(f"{setting} has no choice {name!r}; {nearest_entry(name, self._entries)}")

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def nearest(name: str, valid: Iterable[str]) -> str:
    """A hint for an invalid name: the closest valid one, or all of them."""
    valid = list(valid)
    ends = [own for own in valid if own.rpartition(".")[2] == name.rpartition(".")[2]]
    close = ends[:1] or difflib.get_close_matches(name, valid, n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else f"valid ones are {', '.join(valid)}"


def nearest_entry(name: str, valid: Iterable[str]) -> str:
    """The same for names of registries, where a plugin that is not loaded may define it."""
    return f"{nearest(name, valid)} (a plugin's names need --plugin MODULE)"


@contextmanager
def running(what: str, module: str) -> Iterator[None]:
    """While code of `module` runs: an error that it raises becomes one that says `what` failed, why and where.

    Other errors pass: those of simic's own entries are bugs; those of its checks, of files and memory are clear.
    """
    try:
        yield
    except Exception as error:
        if module.partition(".")[0] == "simic":
            raise
        calls = [(frame.f_globals.get("__name__", ""), frame, line) for frame, line in walk_tb(error.__traceback__)]
        is_check = isinstance(error, ValueError) and calls[-1][0].partition(".")[0] == "simic"
        if is_check or isinstance(error, (OSError, MemoryError)):
            raise
        own = [
            f" in {Path(frame.f_code.co_filename).name}, line {line}" for name, frame, line in calls if name == module
        ]
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise OwnCodeError(f"{what} failed{own[-1] if own else ''} ({reason})") from error
