"""The input of a slot's submodule: which argument a seed beside the submodule can read, or why there is none.

A seed sees it as it sees the output: (N, C), (N, L, C) or (N, C, *space), with features of its own number. Positions of
a sequence must be those of the output; those of a convolution a whole number of times as many, which is the stride:

    submodule                    input            output           in_features, stride
    Linear(8, 32)                (N, 8)           (N, 32)          8
    Conv2d(3, 16, 3, stride=2)   (N, 3, 32, 32)   (N, 16, 16, 16)  3, (2, 2)
    a transformer's block        (N, L, 64)       (N, L, 64)       64
    Sequential(Flatten, Linear)  (N, 4, 8, 8)     (N, 10)          none: another kind of shape
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from simic.growth.layout import Call
from simic.growth.slot_shape import SlotShape

if TYPE_CHECKING:
    from simic.growth.slot_discovery import Site


class NoInputError(Exception):
    """No argument of a submodule can be read; the text says why."""


@dataclass(frozen=True)
class SlotInput:
    """An argument of a slot's submodule."""

    key: int | str
    """Its position or keyword."""
    example_shape: tuple[int, ...]
    """As a seed sees it."""

    def of_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """The argument in a call, if it is a tensor there."""
        value = {**dict(enumerate(args)), **kwargs}.get(self.key)
        return value if isinstance(value, Tensor) else None


def find_input(
    calls: Sequence[Call], site: Site, known_features: Callable[[Tensor], set[int]] | None
) -> tuple[SlotInput, SlotShape]:
    """The argument that seeds beside a submodule read, and the slot's shape with its sizes; else NoInputError.

    `known_features` tells the feature dimensions of a tensor that layers show; None if the user stated the layout.
    """
    found = {_read_call(made, site, known_features) for made in calls}
    if len(found) > 1:
        raise NoInputError(f"it runs {len(calls)} times in one pass, with inputs of different shapes")
    return found.pop()


def _read_call(
    made: Call, site: Site, known_features: Callable[[Tensor], set[int]] | None
) -> tuple[SlotInput, SlotShape]:
    output = made.tensor
    assert output is not None
    key, tensor = _candidate(made, output)
    if made.overwrites_input:
        raise NoInputError("it overwrites its input (a layer that works in place)")
    order = site.order or tuple(range(site.shape.rank))
    features = order[site.shape.feature_dim]
    shapes = f"its input has shape {tuple(tensor.shape)}, its output {tuple(output.shape)}"
    if tensor.shape[order[0]] != output.shape[order[0]]:
        raise NoInputError(f"{shapes}: not the same samples")
    if known_features is not None and tensor.dim() > 2 and (known := known_features(tensor)) != {features}:
        if known:
            raise NoInputError(f"{shapes}, with features in another dimension")
        raise NoInputError(f"{shapes}, and no layer shows which dimension of the input holds the features")
    example = tuple(tensor.shape[dim] for dim in order)
    stride = _stride(site, example, shapes)
    shape = replace(site.shape, in_features=tensor.shape[features], stride=stride)
    return SlotInput(key, example), shape


def _candidate(made: Call, output: Tensor) -> tuple[int | str, Tensor]:
    """The only argument of the output's kind; one tensor that is passed several times counts once."""
    floats = {key: tensor for key, tensor in made.arguments.items() if tensor.is_floating_point()}
    if not floats:
        raise NoInputError("its input is no float tensor")
    alike = {key: tensor for key, tensor in floats.items() if tensor.dim() == output.dim()}
    if not alike:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in floats.values())
        raise NoInputError(f"its input has shape {shapes}, its output {tuple(output.shape)}: another kind of shape")
    if len({id(tensor) for tensor in alike.values()}) > 1:
        raise NoInputError(f"it gets several tensors: arguments {', '.join(map(str, alike))}")
    return next(iter(alike.items()))


def _stride(site: Site, example: tuple[int, ...], shapes: str) -> tuple[int, ...]:
    if site.shape.topology == "features":
        return ()
    if site.shape.topology == "sequence":
        if example[1] != site.example_shape[1]:
            raise NoInputError(f"{shapes}: not the same positions")
        return ()
    stride = []
    for before, after in zip(example[2:], site.example_shape[2:], strict=True):
        # The seed's convolutions are padded: with stride s they make ceil(n / s) positions of n.
        fitting = [step for step in range(1, before + 1) if -(-before // step) == after]
        if not fitting:
            raise NoInputError(f"{shapes}: no padded convolution with a stride turns {before} positions into {after}")
        # Several may fit one size, as 3 and 4 turn 5 positions into 2; of these a power of two is likelier.
        stride.append(next((step for step in fitting if step & (step - 1) == 0), fitting[0]))
    return tuple(stride)
