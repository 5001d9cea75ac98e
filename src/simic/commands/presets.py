"""simic presets: the presets of `simic train`."""

from __future__ import annotations

from dataclasses import dataclass

from simic.config import PRESETS


@dataclass(frozen=True, kw_only=True)
class PresetsCommand:
    """List the presets of `simic train`."""

    def run(self) -> int:
        """Print what each is for, and its main settings."""
        for name, (purpose, config) in PRESETS.items():
            hosts = f"{config.num_groups} groups of {config.group_size} hosts"
            print(f"{name:10s} {purpose} {config.updates} updates, {hosts}, family {config.task}, {config.device}.")
        print("All settings of one: simic train --preset NAME --print-config")
        return 0
