"""Strict JSON from untrusted files: bounded in size and depth, errors in one line.

Python's parser accepts NaN and duplicate keys, parses numbers of any length and raises RecursionError for deeply nested
values. A file that needs this is damaged or not ours.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from simic.storage.files import FileKindError, FileSizeError, read_file

MAX_BYTES = 16 * 2**20
"""Settings, plans and manifests are far smaller."""
MAX_VALUES = 2_000_000
"""Per file, unless the caller expects more."""
MAX_DEPTH = 64
"""Levels of nested tables and lists."""
MAX_DIGITS = 40
"""Of an integer; a 128-bit random state has 39."""
REMEDY = "repair the file or write it again"


class JsonError(ValueError):
    """A file or text that is not strict JSON."""


def read_json(path: Path, *, max_bytes: int = MAX_BYTES, max_values: int = MAX_VALUES, remedy: str = REMEDY) -> Any:
    """The value in a JSON file; JsonError names the file, the place in it and a remedy."""
    text = read_text(path, max_bytes=max_bytes, remedy=remedy)
    return parse_json(text, path, max_values=max_values, remedy=remedy)


def parse_json(content: str | bytes, source: str | Path, *, max_values: int = MAX_VALUES, remedy: str = REMEDY) -> Any:
    """The value of a JSON text; `source` names its origin in errors."""
    try:
        text = content if isinstance(content, str) else content.decode("utf-8-sig")
        if text.count(",") > max_values:  # before parsing: `[],` takes 3 bytes here and 64 in memory
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
    try:
        return read_file(path, max_bytes=max_bytes, follow_links=True).decode("utf-8-sig")
    except (FileKindError, FileSizeError) as error:
        raise JsonError(f"{error}; {remedy}") from None
    except UnicodeDecodeError as error:
        raise JsonError(f"{path} is not UTF-8 text (byte {error.start}); {remedy}") from None


def check_values(value: Any, source: str | Path, *, remedy: str = REMEDY) -> Any:
    """Return the value, if all numbers are finite, all text is valid and nesting is within MAX_DEPTH."""
    # An explicit stack, because deep values would exceed the recursion limit; of iterators, because a list of all
    # remaining values would take more memory than the values themselves.
    pending: list[Iterator[tuple[Any, Any]]] = [iter([("", value)])]
    names = [""]
    while pending:
        name, item = next(pending[-1], (None, None))
        if name is None:
            pending.pop()
            names.pop()
            continue
        names[-1] = str(name)
        if fault := _fault(item, len(pending)):
            raise JsonError(f"{source}: {_short('.'.join(names[1:])) or 'the value'} {fault}; {remedy}")
        if isinstance(item, (dict, list)):
            pending.append(iter(item.items() if isinstance(item, dict) else enumerate(item)))
            names.append("")
    return value


def _fault(item: Any, depth: int) -> str:
    """What is wrong with a value itself, not with its parts; "" if nothing."""
    if isinstance(item, (dict, list)) and depth > MAX_DEPTH:
        return f"is nested more than {MAX_DEPTH} deep"
    if isinstance(item, float) and not math.isfinite(item):
        return f"must be a finite number, got {item}"
    if isinstance(item, int) and abs(item) >= 10**MAX_DIGITS:
        return f"must be a number of at most {MAX_DIGITS} digits"
    try:
        "".join([item] if isinstance(item, str) else item if isinstance(item, dict) else ()).encode()
    except UnicodeEncodeError:
        return "has text with half a character (a lone surrogate)"
    return ""


def _table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        (twice, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{_short(twice)!r} occurs twice in one table")
    return table


def _short(name: str) -> str:
    """An untrusted name, printable and short enough for one line."""
    printable = "".join(character if character.isprintable() else "?" for character in name[:61])
    return printable if len(printable) <= 60 else f"{printable[:57]}..."


def _integer(text: str) -> int:
    if len(text.lstrip("-")) > MAX_DIGITS:
        raise ValueError(f"an integer has {len(text)} digits, more than {MAX_DIGITS}")
    return int(text)
