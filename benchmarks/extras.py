"""How large is simic with each of its extras, installed?

Run: python benchmarks/extras.py

Sums up the files of every package that an extra needs, as installed in this environment, from their metadata. What the
extra adds is what simic alone does not need. Packages that are not installed are named: their size is not known.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
OWN = "simic-rl"
GPU = ("nvidia-", "cuda-", "triton")
"""Packages of torch for Linux with CUDA, which its CPU version does without."""


@cache
def size_of(name: str) -> int | None:
    """Bytes of a package's files, compiled ones excluded; None if it is not installed."""
    found = find(name)
    if found is None:
        return None
    paths = {Path(str(found.locate_file(file))).resolve() for file in found.files or () if file.suffix != ".pyc"}
    return sum(path.stat().st_size for path in paths if path.is_file())


def find(name: str) -> Distribution | None:
    """The installed package of this name."""
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None


def needed(requirements: Iterable[str], extras: dict[str, list[str]]) -> set[str]:
    """Names of all packages that requirements lead to; those of simic's own extras are read from `extras`."""
    names, waiting = set[str](), [Requirement(text) for text in requirements]
    seen = set[tuple[str, str]]()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name == OWN:
            waiting += [Requirement(text) for extra in requirement.extras for text in extras[extra]]
            continue
        names.add(name)
        for extra in ("", *requirement.extras):
            if (name, extra) not in seen:
                seen.add((name, extra))
                waiting += _requirements(name, extra)
    return {name for name in names if not name.startswith(GPU)}


def _requirements(name: str, extra: str) -> Iterator[Requirement]:
    found = find(name)
    for text in (found.requires if found else None) or ():
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            yield requirement


def main() -> None:
    """Print a line for simic alone, and one for each extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras: dict[str, list[str]] = project["optional-dependencies"]
    base = needed(project["dependencies"], extras)
    package = sum(file.stat().st_size for file in (ROOT / "src").rglob("*") if "__pycache__" not in file.parts)
    result: dict[str, float] = {"simic": round(package / 1e6, 1)}
    print(f"simic itself {package / 1e6:.1f} MB; torch {(size_of('torch') or 0) / 1e6:,.0f} MB")
    for name, added in {"(none)": base, **{name: needed(own, extras) - base for name, own in extras.items()}}.items():
        missing = sorted(package for package in added if size_of(package) is None)
        size = sum(size_of(package) or 0 for package in added) / 1e6
        print(f"{name:14s} {size:7,.0f} MB  {len(added)} packages" + (f"; not installed: {missing}" if missing else ""))
        if not missing:
            result[name] = round(size, 1)
    print("RESULT", json.dumps(result))


if __name__ == "__main__":
    main()
