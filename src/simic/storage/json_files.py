"""Strict JSON from files that a user, an older simic or a stranger wrote: bounded, and refused in one line.

Python's own reader takes NaN, keeps the last of two equal keys, parses numbers of any length and raises RecursionError
when values are nested deeply. A file that needs such leniency is damaged, or was never meant for us.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MAX_BYTES = 16 * 2**20
"""Settings, plans and manifests are far smaller."""
MAX_VALUES = 2_000_000
"""In one file, unless its reader expects more."""
MAX_DEPTH = 64
"""Tables and lists within each other."""
MAX_DIGITS = 40
"""Of a whole number; a 128-bit random state has 39."""
REMEDY = "mend the file or write it anew"


class JsonError(ValueError):
    """A file or text that is not JSON as we read it."""


def read_json(path: Path, *, max_bytes: int = MAX_BYTES, max_values: int = MAX_VALUES, remedy: str = REMEDY) -> Any:
    """The value in a JSON file; what is damaged, odd or too large raises JsonError with the file, place and remedy."""
    text = read_text(path, max_bytes=max_bytes, remedy=remedy)
    return parse_json(text, path, max_values=max_values, remedy=remedy)


def parse_json(content: str | bytes, source: str | Path, *, max_values: int = MAX_VALUES, remedy: str = REMEDY) -> Any:
    """The value of a JSON text that was read from `source`."""
    try:
        text = content if isinstance(content, str) else content.decode("utf-8-sig")
        if text.count(",") > max_values:  # an empty list takes three characters here and 64 bytes of memory
            raise JsonError(f"{source} holds more than {max_values:,} values; {remedy}")
        value = json.loads(text, object_pairs_hook=_table, parse_int=_integer)
    except UnicodeDecodeError as error:
        raise JsonError(f"{source} is not UTF-8 text (byte {error.start}); {remedy}") from None
    except JsonError:
        raise
    except RecursionError:
        raise JsonError(f"{source} nests values more than {MAX_DEPTH} deep; {remedy}") from None
    except ValueError as error:
        raise JsonError(f"{source} is not valid JSON: {error}; {remedy}") from None
    return check_values(value, source, remedy=remedy)


def read_text(path: Path, *, max_bytes: int = MAX_BYTES, remedy: str = REMEDY) -> str:
    """The UTF-8 text of a regular file of bounded size."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # without O_NONBLOCK opening a named pipe waits for ever
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        os.close(descriptor)
        raise JsonError(f"{path} is not a regular file; {remedy}")
    with open(descriptor, "rb") as file:  # what is too large is not even read
        content = file.read(found.st_size) if found.st_size <= max_bytes else None
    if content is None:
        raise JsonError(f"{path} is larger than {max_bytes:,} bytes; {remedy}")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise JsonError(f"{path} is not UTF-8 text (byte {error.start}); {remedy}") from None


def check_values(value: Any, source: str | Path, *, remedy: str = REMEDY) -> Any:
    """The value itself, if every part of it is finite, printable and within MAX_DEPTH."""
    # A stack of our own, because recursion would be what deep values break; of iterators, because a list of all
    # values that are left would take more memory than the values.
    pending, names = [iter([("", value)])], [""]
    while pending:
        name, item = next(pending[-1], (None, None))
        if name is None:
            pending.pop()
            names.pop()
            continue
        names[-1] = name
        if fault := _fault(item, len(pending)):
            raise JsonError(f"{source}: {_short('.'.join(names[1:])) or 'the whole'} {fault}; {remedy}")
        if isinstance(item, (dict, list)):
            pending.append(_parts(item))
            names.append("")
    return value


def _fault(item: Any, depth: int) -> str:
    """What is wrong with a value, its parts aside; "" if nothing is."""
    if isinstance(item, (dict, list)) and depth > MAX_DEPTH:
        return f"is nested more than {MAX_DEPTH} deep"
    if isinstance(item, float) and not math.isfinite(item):
        return f"must be a finite number, got {item}"
    if isinstance(item, int) and abs(item) >= 10**MAX_DIGITS:
        return f"must be a number of at most {MAX_DIGITS} digits"
    texts = [item] if isinstance(item, str) else item if isinstance(item, dict) else ()
    if any("\ud800" <= character <= "\udfff" for text in texts for character in text):
        return "has text with half a character (a lone surrogate)"
    return ""


def _parts(item: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(item, dict):
        yield from item.items()
    elif isinstance(item, list):
        yield from ((str(index), part) for index, part in enumerate(item))


def _table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        (twice, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{_short(twice)!r} stands twice in one table")
    return table


def _short(name: str) -> str:
    """A foreign name that fits in a line of a terminal."""
    printable = "".join(character if character.isprintable() else "?" for character in name[:61])
    return printable if len(printable) <= 60 else f"{printable[:57]}..."


def _integer(text: str) -> int:
    if len(text.lstrip("-")) > MAX_DIGITS:
        raise ValueError(f"a whole number has {len(text)} digits, more than {MAX_DIGITS}")
    return int(text)
