"""PolicyConfig: the architecture of a policy network."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from simic.policy.registry import POLICIES

CoreName = Literal["lstm", "gru"]


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """The architecture of a policy network.

    >>> config = replace(simic.preset(), policy=simic.PolicyConfig(hidden_size=64, core="gru"))
    """

    network: str = field(default="factored", metadata={"choices": lambda: POLICIES})
    """The registered network; see `@simic.policy_network`."""
    hidden_size: int = 128
    """Hidden units of the recurrent core."""
    core: CoreName = "lstm"
    """Type of the recurrent core."""
    encoding_size: int = 64
    """Size of the embedding of the host, and of each slot and blueprint."""
    normalize_observations: bool = True
    """Standardize each feature by its running mean and standard deviation."""
    predict_contributions: bool = True
    """Add an auxiliary head that predicts the contribution of each seed."""
    isolate_prediction: bool = False
    """Stop the gradient between the auxiliary head and the rest of the network."""

    def __post_init__(self) -> None:
        POLICIES.check("network", self.network)
        for name in ("hidden_size", "encoding_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
