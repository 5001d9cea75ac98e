# pyright: strict
"""What a user writes with simic, for a strict type checker: nothing that simic gives is of unknown type.

It is checked, not run.
"""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

import simic
from simic import GrowableModel, GrowthScheduler


def validate() -> dict[str, float]:
    """A user's own validation."""
    return {"val_loss": 0.5, "val_accuracy": 0.9}


def announce(event: simic.GrowthEvent) -> None:
    """A hook."""
    print(event.slot, event.kind, event.blueprint, event.change.new)


def grow_my_model(network: nn.Module, x: Tensor, y: Tensor) -> nn.Module:
    """The sample of README, with more of what it may call."""
    for candidate in simic.find_slots(network, x):
        print(candidate.name, candidate.grows, candidate.output_shape)
    model = GrowableModel(
        network, slots="auto", example_input=x, lifecycle=simic.LifecycleConfig(seeds_per_slot=2), rng_seed=1
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    growth = GrowthScheduler(
        model, optimizer, "pretrained", [cosine], evaluate=validate, horizon=40, governor=True, on_fossilize=announce
    )
    for _ in range(40):
        loss = growth.loss(lambda: nn.functional.cross_entropy(model(x), y))
        optimizer.zero_grad()
        loss.backward()  # pyright: ignore[reportUnknownMemberType]  # torch's own
        optimizer.step()  # pyright: ignore[reportUnknownMemberType]  # torch's own
        decision = growth.step()
        print(decision.index, decision.val_loss, decision.parameters, [change.new for change in decision.changes])
    model.print_growth()
    for report in model.growth():
        print(report.slot, report.stage == simic.Stage.FOSSILIZED, report.contribution, report.parameters)
    growth.save("run.safetensors")
    growth.load("run.safetensors")
    history = growth.history()
    print(history)
    simic.save(model, "grown.safetensors")
    again = simic.load("grown.safetensors", network)
    print(again.slot_names)
    return model.export()


@simic.blueprint("wide", topology="features")
def wide(shape: simic.SlotShape) -> nn.Module:
    """A blueprint of one's own."""
    return nn.Sequential(nn.Linear(shape.features, 64), nn.ReLU(), simic.zeroed(nn.Linear(64, shape.features)))


class Once:
    """A controller of one's own."""

    def act(self, facts: simic.Facts) -> simic.Action:
        """Grow at the first decision."""
        if facts.decision[0] == 0:
            return simic.Action("germinate", "0", "wide")
        return simic.Action()


@simic.reward_term("small", bound=1.0)
def small(transition: simic.Transition, config: simic.RewardConfig) -> object:
    """A term of one's own."""
    return -(transition.parameters_after > 2 * transition.host_parameters).astype(float)


def train_and_compare(out: Path) -> None:
    """From Python."""
    config = replace(simic.preset("quick"), updates=4)
    result = simic.train(config, on_update=lambda update, metrics: metrics["score"] > 95)
    print(result.history[-1]["score"])
    result.save(out / "mine.safetensors")
    comparison = simic.evaluate({"mine": result, "heuristic": "heuristic"}, "mlp:validation", num_tasks=4, rng_seeds=4)
    print(comparison.table(), comparison.paired("mine", "heuristic"))
    grown = simic.grow("digits-mlp", "heuristic", host_epochs=4, log=out / "log")
    print(grown.test_accuracy, grown.parameters)
    grown.save(out / "grown.pt2")
