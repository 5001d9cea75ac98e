"""PolicyConfig: the shape of a policy network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from simic.policy.registry import POLICIES

CoreName = Literal["lstm", "gru"]


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """The shape of a policy network."""

    network: str = "factored"
    """The registered network; see `@simic.policy_network`."""
    hidden_size: int = 128
    """Units of the recurrent core."""
    core: CoreName = "lstm"
    """Kind of recurrent core."""
    encoding_size: int = 64
    """Units that describe the host, and each slot."""
    normalize_observations: bool = True
    """Whether features are brought to mean 0 and deviation 1 over all that was seen."""
    predict_contributions: bool = True
    """Whether an auxiliary head predicts what each seed will contribute."""
    isolate_prediction: bool = False
    """Whether that head learns without shaping the rest of the network."""

    def __post_init__(self) -> None:
        POLICIES.check("network", self.network)
        for name in ("hidden_size", "encoding_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
