"""SlotShape: what a blueprint needs to know about the place where its seed grows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

TOPOLOGIES = ("conv", "features", "sequence")
Reads = Literal["output", "input"]
"""What a branch reads of its slot's submodule: behind it the output, beside it the input."""
Hosts = Literal["trained", "frozen", "any"]
"""Hosts that are offered a blueprint unless they name their own: those that train along, frozen ones, or both."""


class AmbiguousShapeError(ValueError):
    """The user has to state what the dimensions of a slot mean."""


@dataclass(frozen=True)
class SlotShape:
    """The shape of what a slot's submodule puts out and, if a seed can read it, of what goes in.

    Blueprints get one:

        >>> shape = simic.find_slots(net, x[:2], ["0"])[0].shape
        >>> shape.topology, shape.features, shape.in_features
        ('features', 16, 8)
    """

    topology: str
    features: int
    """C: channels (conv) or size of the last dimension (features, sequence)."""
    dims: int = 0
    """Spatial dimensions of a conv slot."""
    causal: bool = True
    """Whether positions of a sequence may depend on earlier ones only."""
    in_features: int | None = None
    """Features of the submodule's input; None if no seed can read it."""
    stride: tuple[int, ...] = ()
    """Of a conv slot whose input can be read: input positions per output position, one number per spatial dimension."""

    @property
    def feature_dim(self) -> int:
        """The dimension of an activation that holds the features."""
        return 1 if self.topology == "conv" else -1

    @property
    def rank(self) -> int:
        """Number of dimensions of an activation, including the batch."""
        return {"features": 2, "sequence": 3, "conv": 2 + self.dims}[self.topology]

    @property
    def kind(self) -> str:
        """The topology, with a suffix for bidirectional sequences."""
        return self.topology if self.causal else f"{self.topology}-bidirectional"

    def __str__(self) -> str:
        spatial = f" {self.dims}-D" if self.topology == "conv" else ""
        return f"{self.kind}{spatial}, {self.features} features"
