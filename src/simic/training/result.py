"""TrainingResult: what a training run hands back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from simic.control.learned import LearnedController, network_of
from simic.ppo.agent import PPOAgent

Status = Literal["done", "stopped", "diverged", "failed"]
OnUpdate = Callable[[int, Mapping[str, float]], bool | None]
"""Called after every update with the number of updates done and their metrics; True ends the run."""


class StopTraining(Exception):
    """Raise it in `on_update` of `simic.train` to end a run early; the result is that of the last whole update.

    Example::

        def stop(updates, metrics):
            if metrics["score"] > 90:
                raise simic.StopTraining
    """


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """A trained controller and how training went. The agent has the state of the last whole update.

    Example::

        result = simic.train()
        result.save("mine.safetensors")  # for GrowthScheduler(..., "mine.safetensors")
        result.to_pandas().plot(x="update", y="score")
    """

    status: Status
    """`stopped` by a signal or by `on_update`; `diverged` when the policy broke, with the last good weights."""
    reason: str = ""
    """Why the run ended, if it is not done."""
    exit_code: int = 0
    """What `simic train` exits with: 0, 3 if it diverged, 128 plus the number of a signal."""
    updates: int
    """Whole updates (of imitation and IQL: reports), those before a resume included."""
    history: list[dict[str, float]] = field(repr=False)
    """Metrics of every update of this process, by the names of docs/metrics.md; `update` counts from 1."""
    agent: PPOAgent = field(repr=False)
    directory: Path | None = None
    """The run directory; None if nothing was written."""

    @property
    def controller(self) -> LearnedController:
        """A controller with a copy of the trained policy, for `GrowthScheduler`, `simic.evaluate` or `simic.grow`."""
        return LearnedController(network_of(self.agent.state_dict(), "the trained agent"))

    def save(self, path: str | Path) -> None:
        """Save the policy without optimizer or random state, for `LearnedController.load`, `--controller` or `init`.

        Args:
            path: The file, by custom `NAME.safetensors`.
        """
        self.agent.save_controller(path)

    def to_pandas(self) -> Any:
        """The history as a table.

        Returns:
            A pandas.DataFrame, one row per update.

        Raises:
            ImportError: pandas is missing (extra `pandas`).
        """
        return to_dataframe(self.history)

    def __str__(self) -> str:
        because = f" ({self.reason})" if self.reason else ""
        where = "" if self.directory is None else f": {self.directory}"
        return f"{self.status} after {self.updates} updates{because}{where}"


def to_dataframe(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Rows as a pandas.DataFrame; pandas is not a dependency of simic."""
    try:
        import pandas  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ImportError("to_pandas needs pandas, which is not installed: pip install 'simic-rl[pandas]'") from None
    return pandas.DataFrame.from_records(list(rows))
