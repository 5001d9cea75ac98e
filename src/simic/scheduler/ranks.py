"""The processes that train one model together: they see the same metrics, take rank 0's decision, and check each other.

Metrics are means over ranks. That is right if every rank evaluates its share of the validation data (equal shares, as
DistributedSampler makes them), and changes nothing if every rank evaluates all of it or has averaged already. Rank 0's
own metrics would leave the other shares out.

Every exchange carries its purpose and the errors of each rank, so that ranks which are not at the same point, or one
that fails, end all of them with an error and none waits for ever.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, distributed

from simic.growth.data_parallel import RanksDisagreeError, ddp_around, in_process_group
from simic.growth.model import GrowableModel
from simic.lifecycle.stages import Stage

T = TypeVar("T")
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Ranks:
    """The ranks that train `model`: the group of the DDP object around it, else all. Alone, every call is plain."""

    def __init__(self, model: GrowableModel) -> None:
        self._model = model

    @property
    def size(self) -> int:
        """The number of ranks."""
        return distributed.get_world_size(self._group) if in_process_group() else 1

    @property
    def _group(self) -> Any:
        ddp = ddp_around(self._model)
        return distributed.group.WORLD if ddp is None else ddp.process_group

    def mean(self, purpose: str, measure: Callable[[], dict[str, float]]) -> dict[str, float]:
        """The mean over ranks of the metrics that each measures."""
        found = self._gather(purpose, measure)
        names = [tuple(metrics) for metrics in found]
        if any(set(other) != set(names[0]) for other in names):
            raise RanksDisagreeError(f"ranks measure different metrics: {_by_rank(names)}; measure the same on each")
        return {name: _mean([metrics[name] for metrics in found]) for name in names[0]}

    def first(self, purpose: str, decide: Callable[[], T]) -> T:
        """What rank 0 decides; the others decide too, so that their controllers keep pace."""
        return self._gather(purpose, decide)[0]

    def check(self, purpose: str, **facts: Any) -> None:
        """Raise on every rank unless all have the same `facts`, slots, seeds and weights."""
        if self.size == 1:
            return
        found = self._gather(purpose, lambda: facts | _describe(self._model))
        weights = [facts.pop("weights") for facts in found]
        for name in found[0]:
            values = [facts[name] for facts in found]
            if any(value != values[0] for value in values):
                raise RanksDisagreeError(
                    f"ranks disagree {purpose} about {name.replace('_', ' ')}: {_by_rank(values)}; build every rank's "
                    "model and scheduler alike, with the same rng_seed, and change them on every rank or on none"
                )
        different = [name for name in weights[0] if any(other.get(name) != weights[0][name] for other in weights)]
        if different or any(len(other) != len(weights[0]) for other in weights):
            raise RanksDisagreeError(
                f"ranks disagree {purpose}: {len(different)} of {len(weights[0])} parameter tensors differ, for "
                f"instance {', '.join(different[:3])}; train the model inside DistributedDataParallel, or average "
                "every gradient yourself, and start every rank from the same weights and rng_seed"
            )

    def _gather(self, purpose: str, compute: Callable[[], T]) -> list[T]:
        """What every rank computes, in order of ranks; an error on one rank becomes an error on all."""
        if self.size == 1:
            return [compute()]
        own, error = None, None
        try:
            own = compute()
        except Exception as raised:  # raised below, after the others know
            error = raised
        answers: list[Any] = [None] * self.size
        told = None if error is None else f"{type(error).__name__}: {error}"
        distributed.all_gather_object(answers, (purpose, told, own), group=self._group)
        if error is not None:
            raise error
        purposes = [purpose for purpose, _, _ in answers]
        if len(set(purposes)) > 1:
            raise RanksDisagreeError(
                f"ranks are at different points of GrowthScheduler.step(): {_by_rank(purposes)}; call it on every rank "
                "the same number of times, with the same arguments"
            )
        for rank, (_, text, _) in enumerate(answers):
            if text is not None:
                raise RuntimeError(f"rank {rank} failed {purpose}, so this rank stops too: {text}")
        return [value for _, _, value in answers]


def _mean(values: list[float]) -> float:
    same = all(value == values[0] or (math.isnan(value) and math.isnan(values[0])) for value in values)
    return values[0] if same else sum(values) / len(values)  # equal values stay exactly what they are


def _by_rank(values: list[Any]) -> str:
    return "; ".join(f"rank {rank}: {_in_words(value)}" for rank, value in enumerate(values))


def _in_words(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {entry}" for key, entry in value.items()) or "none"
    return ", ".join(map(str, value)) or "none" if isinstance(value, tuple) else str(value)


def _describe(model: GrowableModel) -> dict[str, Any]:
    # Gradient norms are left out: kinds of devices may sum in another order, and only rank 0's are read.
    state = {name: values for name, values in model.slot_state.state_dict().items() if name != "gradient_norm"}
    return {
        "rng_seed": model.rng_seed,
        "germinations": model.germinations,
        "slots": _slots(model),
        "slot_state": str(state),
        "weights": _weights(model),
    }


def _slots(model: GrowableModel) -> dict[str, str]:
    """Every slot that is not dormant, in words."""
    state, found = model.slot_state, {}
    for index in np.flatnonzero(state.stage[0] != Stage.DORMANT).tolist():
        blueprint = state.blueprint[0, index]
        name = model.blueprint_names[blueprint] if blueprint >= 0 else ""
        words = (str(Stage(state.stage[0, index])), name, f"alpha {float(state.alpha[0, index])!r}")
        found[model.slot_names[index]] = " ".join(filter(None, words))
    return found


def _weights(model: GrowableModel) -> dict[str, int]:
    """A checksum of every parameter: the sum of its bits read as integers, exact in any order and on any device."""
    named = dict(model.named_parameters())
    sums = [_bits(parameter).sum(dtype=torch.int64) for parameter in named.values()]
    return dict(zip(named, torch.stack([value.cpu() for value in sums]).tolist(), strict=True)) if named else {}


def _bits(parameter: Tensor) -> Tensor:
    values = parameter.detach().reshape(-1)
    values = torch.view_as_real(values) if values.is_complex() else values
    return values.view(_BITS[values.element_size()])
