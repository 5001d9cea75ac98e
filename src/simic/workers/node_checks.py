"""Whether machines can work on one run: the same versions are required, other kinds of machine only change bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

BITS = {
    "machine": "processor architecture",
    "instructions": "vector instructions",
    "torch_build": "build of torch",
    "numpy": "numpy",
    "python": "Python",
}
"""Facts on which the last bits of results may depend."""


def missing_on(name: str, facts: Mapping[str, Any], own: Mapping[str, Any]) -> str | None:
    """Why a node cannot work with the driver, whose facts are `own`; None if it can."""
    for package in ("simic", "torch"):
        has = f"has {package} {facts[package]}" if facts[package] else f"has no {package}"
        # What follows a plus sign names the build, which changes bits only.
        if facts[package] is None or facts[package].partition("+")[0] != own[package].partition("+")[0]:
            return f"node {name} {has}, the driver has {own[package]}: install {package} {own[package]} there"
    if facts["code"] != own["code"]:
        return f"node {name} has other source code of simic {own['simic']}: install the same commit on every node"
    return None


def differing_bits(nodes: Mapping[str, Mapping[str, Any]], own: Mapping[str, Any]) -> str | None:
    """A warning if nodes differ from the driver in what bits depend on; None if they do not."""
    found = [
        f"node {name} has {called} {facts[fact] or 'unknown'}, the driver {own[fact] or 'unknown'}"
        for name, facts in nodes.items()
        for fact, called in BITS.items()
        if facts[fact] != own[fact]
    ]
    return f"machines differ, so bits may differ between runs: {'; '.join(found)}" if found else None
