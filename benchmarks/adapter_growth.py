"""The arms of benchmarks/adapters.py that grow: simic decides beside which linear layers LoRA grows, and how large."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

from adapter_arms import Adaptation, AfterStep, Arm, choose_layers, head_parameters
from adapter_problems import Problem, Sample, evaluate
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.flop_counter import FlopCounterMode

from simic.growth.model import GrowableModel
from simic.scheduler.scheduler import GrowthScheduler

BLUEPRINTS = ("lora_2", "lora_8", "lora_32")
NUM_DECISIONS = 8
VALIDATION_SHARE = 0.5
"""Share of the validation data that growth is decided on: every live seed costs an evaluation per decision."""
CONTROLLERS = {"simic-adapters": "adapters", "simic-heuristic": "heuristic", "simic-learned": "pretrained"}
"""Arm -> name of its controller."""


def adapt_with_simic(controller: str, problem: Problem, sample: Sample, rng_seed: int) -> Adaptation:
    """Slots at all linear layers of a frozen model; growth is decided on the validation data every few steps."""
    host = problem.load()
    layers = choose_layers(problem, host, "all", rng_seed)
    example = sample.batches[0][0][:2]
    model = GrowableModel(
        host, layers, example_input=example, freeze_host=True, blueprints=BLUEPRINTS, rng_seed=rng_seed
    )
    for parameter in head_parameters(problem, model):
        parameter.requires_grad_(True)
    steps, (x, y) = len(sample.batches), sample.validation
    shown = round(VALIDATION_SHARE * len(x))
    actions: Counter[str] = Counter()
    flops: list[float] = []

    def validate() -> dict[str, float]:
        with FlopCounterMode(display=False) as counter:
            loss, accuracy = evaluate(model, (x[:shown], y[:shown]))
        flops.append(float(counter.get_total_flops()))
        return {"val_loss": loss, "val_accuracy": accuracy} if problem.higher_is_better else {"val_loss": loss}

    def begin(optimizer: Optimizer, schedule: LRScheduler) -> AfterStep:
        growth = GrowthScheduler(
            model,
            optimizer,
            controller,
            schedule,
            evaluate=validate,
            max_ablations=problem.max_ablations,
            horizon=NUM_DECISIONS,
            rng_seed=rng_seed,
        )

        def after_step(step: int) -> float:
            if (step + 1) % max(steps // NUM_DECISIONS, 1) or step + 1 == steps:
                return 0.0  # nothing that grew after the last step could learn
            flops.clear()
            decision = growth.step()
            actions.update(str(action.op) for action in decision.actions)
            return sum(flops)

        return after_step

    def notes() -> dict[str, Any]:
        held = Counter(str(report.blueprint) for report in model.growth() if report.blueprint)
        return {"actions": dict(actions), "seeds": dict(held)}

    def count() -> int:
        return sum(parameter.numel() for parameter in model.seeds.parameters())

    return Adaptation(model=model, count=count, notes=notes, begin=begin)


GROWING_ARMS = tuple(
    Arm(name=name, start=partial(adapt_with_simic, controller)) for name, controller in CONTROLLERS.items()
)
