"""simic ensemble: several trained controllers as one."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from simic.commands.flags import POSITIONAL
from simic.storage.printable import printable
from simic.training.preflight import check_output_file


@dataclass(frozen=True, kw_only=True)
class EnsembleCommand:
    """Write several trained controllers as one file; it acts by the mean of their probabilities."""

    controllers: tuple[Path, ...] = field(
        metadata=POSITIONAL | {"usage": "CONTROLLER CONTROLLER ...", "metavar": "CONTROLLER"}
    )
    """Runs, checkpoints or controller files, at least two."""
    out: Path = Path("ensemble.safetensors")
    """File of the ensemble, for `--controllers`, `--controller` and `GrowthScheduler(controller=...)`."""

    def run(self) -> int:
        """Check the output first: loading takes longer."""
        check_output_file(self.out)
        from simic.control.ensemble import save_ensemble

        print(f"{printable(self.out)} holds {save_ensemble(self.controllers, self.out)} policies")
        return 0
