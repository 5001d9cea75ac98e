"""Ways to adapt a pretrained model: which parameters are trained, and which steps that takes.

LoRA and AdaLoRA are peft's, on layers that are fixed in advance. LoRA's alpha is the same for every rank.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import peft  # pyright: ignore[reportMissingImports]
import torch
from adapter_problems import Problem, Sample
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

RANKS = (1, 2, 4, 8, 16)
LORA_ALPHA = 16
ADALORA_RANK = 6
"""Rank that AdaLoRA begins with."""
ORTHOGONALITY = 0.5
"""Weight of AdaLoRA's regularizer, as in peft."""


AfterStep = Callable[[int], float]
"""Called with the number of a step when the optimizer has taken it; returns floating-point operations."""


def _nothing_after(optimizer: Optimizer, schedule: LRScheduler) -> AfterStep:
    return lambda step: 0.0


@dataclass(kw_only=True)
class Adaptation:
    """A model whose trained parameters require gradients, and what its method adds to a training."""

    model: nn.Module
    count: Callable[[], int]
    """Parameters that adapt the model; a head that all arms train does not count."""
    penalty: Callable[[], Tensor | float] = lambda: 0.0
    """Added to the loss."""
    begin: Callable[[Optimizer, LRScheduler], AfterStep] = _nothing_after
    """Called once before the first step."""
    notes: Callable[[], dict[str, Any]] = dict
    """What else to record at the end."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A way to adapt any of the models."""

    name: str
    start: Callable[[Problem, Sample, int], Adaptation]
    """From a problem, a sample of its data and its rng seed."""


def frozen_model(problem: Problem) -> nn.Module:
    """The pretrained model, of which only the head is trained."""
    model = problem.load().requires_grad_(False)
    if problem.head is not None:
        model.get_submodule(problem.head).requires_grad_(True)
    return model


def head_parameters(problem: Problem, model: nn.Module) -> list[nn.Parameter]:
    """Parameters of the head, in whatever the model is wrapped."""
    if problem.head is None:
        return []
    return [value for name, value in model.named_parameters() if f".{problem.head}." in f".{name}"]


def count_trained(problem: Problem, model: nn.Module) -> int:
    """Parameters that require gradients, without the head's."""
    head = {id(parameter) for parameter in head_parameters(problem, model)}
    return sum(each.numel() for each in model.parameters() if each.requires_grad and id(each) not in head)


def _fixed(problem: Problem, model: nn.Module) -> Adaptation:
    return Adaptation(model=model, count=lambda: count_trained(problem, model))


def start_head(problem: Problem, sample: Sample, rng_seed: int) -> Adaptation:
    """Train the head only, or nothing."""
    return _fixed(problem, frozen_model(problem))


def start_full(problem: Problem, sample: Sample, rng_seed: int) -> Adaptation:
    """Train every layer behind the embeddings."""
    model = frozen_model(problem)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad or re.search(problem.block, name) is not None)
    return _fixed(problem, model)


def choose_layers(problem: Problem, model: nn.Module, placement: str, rng_seed: int) -> list[str]:
    """Linear layers by placement: attention, mlp, all; every second block; or a random half."""
    patterns = {"attention": problem.attention, "mlp": problem.mlp}
    layers = problem.layers(model, patterns.get(placement, f"{problem.attention}|{problem.mlp}"))
    if placement == "every-second-block":
        blocks = {name: re.search(problem.block, name) for name in layers}
        return [name for name, found in blocks.items() if found and int(found[1]) % 2 == 0]
    if placement == "random-half":
        return sorted(np.random.default_rng((3, rng_seed)).choice(layers, len(layers) // 2, replace=False))
    return layers


def start_lora(placement: str, rank: int, problem: Problem, sample: Sample, rng_seed: int) -> Adaptation:
    """LoRA of one rank on some linear layers."""
    model = frozen_model(problem)
    layers = choose_layers(problem, model, placement, rng_seed)
    config = peft.LoraConfig(r=rank, lora_alpha=LORA_ALPHA, lora_dropout=0.0, target_modules=layers)
    return _fixed(problem, _peft_model(problem, model, config))


def start_adalora(problem: Problem, sample: Sample, rng_seed: int) -> Adaptation:
    """AdaLoRA on all linear layers: from rank 6 to 4 on average, between a sixth and two thirds of the training."""
    model, steps = frozen_model(problem), len(sample.batches)
    config = peft.AdaLoraConfig(
        init_r=ADALORA_RANK,
        target_r=4,
        tinit=steps // 6,
        tfinal=steps // 3,
        deltaT=2,
        total_step=steps,
        lora_alpha=LORA_ALPHA,
        target_modules=choose_layers(problem, model, "all", rng_seed),
    )
    adapted = _peft_model(problem, model, config)
    base: Any = adapted.base_model

    def count() -> int:
        """Parameters of the ranks that are left; the others are masked."""
        kept: dict[str, list[bool]] = base.peft_config["default"].rank_pattern or {}
        return sum(
            _per_rank(module) * sum(kept.get(f"{name}.lora_E.default", [True] * ADALORA_RANK))
            for name, module in base.model.named_modules()
            if hasattr(module, "lora_E")
        )

    def begin(optimizer: Optimizer, schedule: LRScheduler) -> AfterStep:
        return lambda step: base.update_and_allocate(step) or 0.0

    return Adaptation(model=adapted, count=count, penalty=lambda: _orthogonality(adapted), begin=begin)


def _per_rank(layer: Any) -> int:
    """Parameters of one singular value and its vectors."""
    return layer.lora_A["default"].shape[1] + layer.lora_B["default"].shape[0] + 1


def _orthogonality(model: nn.Module) -> Tensor:
    """How far the singular vectors are from orthogonal, as peft measures it for models that return their loss."""
    deviations = []
    for name, values in model.named_parameters():
        if "lora_A" in name or "lora_B" in name:
            product = values @ values.T if "lora_A" in name else values.T @ values
            deviations.append((product - torch.eye(len(product))).norm())
    return ORTHOGONALITY * torch.stack(deviations).mean()


def _peft_model(problem: Problem, model: nn.Module, config: peft.PeftConfig) -> nn.Module:
    adapted = peft.get_peft_model(model, config)  # pyright: ignore[reportArgumentType]: any module will do
    for parameter in head_parameters(problem, adapted):
        parameter.requires_grad_(True)
    return adapted


FIXED_ARMS = (
    Arm(name="head", start=start_head),
    *(
        Arm(name=f"lora-{placement}-{rank}", start=partial(start_lora, placement, rank))
        for placement in ("attention", "mlp", "all")
        for rank in RANKS
    ),
    Arm(name="adalora", start=start_adalora),
    *(
        Arm(name=f"lora-{placement}-8", start=partial(start_lora, placement, 8))
        for placement in ("every-second-block", "random-half")
    ),
    Arm(name="full", start=start_full),
)
