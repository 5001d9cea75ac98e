"""simic version."""

from __future__ import annotations

from dataclasses import dataclass

from simic import __version__


@dataclass(frozen=True, kw_only=True)
class VersionCommand:
    """Print the version."""

    def run(self) -> int:
        """Print it."""
        print(__version__)
        return 0
