"""What each of several processes does in tests of distributed training; also run by one process alone, to compare.

    python -m helpers.parallel_training RANK WORLD FOLDER SCENARIO...

Each process writes what it found to FOLDER/SCENARIO-RANK.json. A scenario has a process group of its own, whose
collectives give up after TIMEOUT.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.optim.lr_scheduler import StepLR

from simic import Action, GrowableModel, GrowthScheduler, LifecycleConfig, ScriptedController
from simic.telemetry.events import GrowthDecision, RunStarted
from simic.telemetry.reader import read_events

TIMEOUT = timedelta(seconds=20)
EPOCHS, BATCH = 11, 8
SCRIPTS = {
    "direct": {
        0: Action("germinate", "1", "mlp"),
        2: Action("germinate", "3", "norm", style="gated"),
        4: Action("advance", "1"),
        5: Action("fossilize", "1"),
        6: Action("prune", "3"),
    },
    "shadow": {
        0: Action("germinate", "1", "mlp"),
        1: Action("advance", "1"),
        3: Action("advance", "1"),
        4: Action("germinate", "3", "mlp_small"),
        5: Action("advance", "3"),
        7: Action("advance", "1"),
        8: Action("fossilize", "1"),
        9: Action("prune", "3"),
    },
}
SCRIPTS["straight_through"] = SCRIPTS["shadow"]


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(32, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 3, (32,), generator=generator)


def make_model(incubation: Any = "direct", rng_seed: int = 0, frozen: bool = False) -> GrowableModel:
    torch.manual_seed(0)
    host = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    host.requires_grad_(not frozen)
    lifecycle = LifecycleConfig(incubation=incubation, min_training_decisions=1)
    return GrowableModel(host, ["1", "3"], example_input=data()[0][:2], lifecycle=lifecycle, rng_seed=rng_seed)


class Training:
    """A user's loop: `net` is the model, or what wraps it; this rank trains and evaluates its share of every batch."""

    def __init__(
        self, net: Any, model: GrowableModel, rank: int, world: int, controller: Any = None, log: Path | None = None
    ) -> None:
        self.net, self.model, self.rank, self.world = net, model, rank, world
        self.optimizer = AdamW(model.parameters(), lr=0.05)
        controller = controller or ScriptedController(SCRIPTS[model.lifecycle.incubation])
        self.growth = GrowthScheduler(net, self.optimizer, controller, evaluate=self.evaluate, log=log)

    def share(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = data()
        return x[start:stop][self.rank :: self.world], y[start:stop][self.rank :: self.world]

    def loss(self, start: int, stop: int) -> torch.Tensor:
        x, y = self.share(start, stop)
        return cross_entropy(self.net(x), y)

    def evaluate(self) -> dict[str, float]:
        return {"val_loss": float(self.loss(0, 32))}

    def train(self) -> None:
        """A host epoch of two optimizer steps, each on two batches whose gradients are accumulated and clipped."""
        for start in range(0, 32, 2 * BATCH):
            self.optimizer.zero_grad()
            with self.net.no_sync() if isinstance(self.net, DistributedDataParallel) else nullcontext():
                self.growth.loss(lambda: self.loss(start, start + BATCH)).backward()  # noqa: B023
            self.growth.loss(lambda: self.loss(start + BATCH, start + 2 * BATCH)).backward()  # noqa: B023
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
            self.optimizer.step()

    def run(self, epochs: int = EPOCHS) -> Training:
        for _ in range(epochs):
            self.train()
            self.growth.step()
        return self

    def result(self) -> dict[str, Any]:
        return {
            "decisions": [str(decision.action) for decision in self.growth.decisions],
            "losses": [decision.val_loss for decision in self.growth.decisions],
            "slots": {report.slot: str(report.stage) for report in self.model.growth()},
            "weights": {name: p.tolist() for name, p in self.model.named_parameters()},
            "seed_groups": self.growth.groups.seed_order(),
        }


def failure(call: Any) -> str:
    """The error of a call, in words."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


# Scenarios: functions of rank, number of ranks and a folder that all share.


def grow(rank: int, world: int, folder: Path, incubation: str = "direct", **ddp: Any) -> dict[str, Any]:
    model = make_model(incubation)
    net = DistributedDataParallel(model, **ddp) if world > 1 else model
    return Training(net, model, rank, world).run().result()


def grow_logged(rank: int, world: int, folder: Path) -> dict[str, Any]:
    model = make_model()
    net = DistributedDataParallel(model) if world > 1 else model
    Training(net, model, rank, world, log=folder / "log").run()
    distributed.barrier()
    starts = [event.pid for event in read_events(folder / "log", [RunStarted])]
    return {
        "decisions": [event.update for event in read_events(folder / "log", [GrowthDecision])],
        "written_here": starts == [os.getpid()],
    }


def grow_shadow(rank: int, world: int, folder: Path) -> dict[str, Any]:
    return grow(rank, world, folder, "shadow")


def grow_shadow_find_unused(rank: int, world: int, folder: Path) -> dict[str, Any]:
    return grow(rank, world, folder, "shadow", find_unused_parameters=True)


def grow_straight_through(rank: int, world: int, folder: Path) -> dict[str, Any]:
    return grow(rank, world, folder, "straight_through", gradient_as_bucket_view=True)


def grow_compiled(rank: int, world: int, folder: Path) -> dict[str, Any]:
    model = make_model()
    compiled: Any = torch.compile(model, backend="eager")
    net = DistributedDataParallel(compiled) if world > 1 else compiled
    return Training(net, model, rank, world).run(5).result()


def grow_frozen(rank: int, world: int, folder: Path, wrapped: bool = False) -> dict[str, Any]:
    """A frozen host without DDP, which would refuse a model without trainable parameters."""
    model = make_model(frozen=True)
    model.execute(Action("germinate", "1", "mlp"))
    model.tick()
    script = {1: Action("germinate", "3", "mlp_small"), 3: Action("prune", "3")}
    net = DistributedDataParallel(model) if wrapped and world > 1 else model
    return Training(net, model, rank, world, ScriptedController(script)).run(5).result()


def grow_frozen_wrapped(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """The same inside DDP, which accepts it because a seed is there already, as after a resume."""
    return grow_frozen(rank, world, folder, wrapped=True)


def resume(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Saved by rank 0 while both seeds are blended in; loaded into DDP, and into a model that is wrapped later."""
    found = {}
    for when in ("before", "after"):
        model = make_model()
        first = Training(DistributedDataParallel(model), model, rank, world).run(4)
        if rank == 0:
            first.growth.save(folder / f"{when}.safetensors")
        distributed.barrier()
        model = make_model()
        if when == "before":
            alone = Training(model, model, rank, world)
            alone.growth.load(folder / f"{when}.safetensors")
            alone.net = DistributedDataParallel(model)
            second = alone
        else:
            second = Training(DistributedDataParallel(model), model, rank, world)
            second.growth.load(folder / f"{when}.safetensors")
        found[when] = second.run(EPOCHS - 4).result()
    return found


class AnswersByRank:
    """A controller that thinks of its own process."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def act(self, facts: Any) -> Action:
        first = facts.decision[0] == 0
        return Action("germinate", self.rank, "mlp") if first else Action()


def controller_by_rank(rank: int, world: int, folder: Path) -> dict[str, Any]:
    model = make_model()
    return Training(DistributedDataParallel(model), model, rank, world, AnswersByRank(rank)).run(2).result()


def different_rng_seeds(rank: int, world: int, folder: Path) -> str:
    model = make_model(rng_seed=rank)
    training = Training(DistributedDataParallel(model), model, rank, world)
    return failure(training.run)


def prunes_alone(rank: int, world: int, folder: Path) -> dict[str, str]:
    """One rank changes its model by itself, before it decides or before it trains on."""
    found = {}
    for before in ("step", "training"):
        model = make_model()
        training = Training(DistributedDataParallel(model), model, rank, world).run(2)
        if before == "step":
            training.train()
        if rank == 1:
            model.execute(Action("prune", "1"))
        found[before] = failure(training.growth.step if before == "step" else training.train)
    return found


def germinates_alone(rank: int, world: int, folder: Path) -> str:
    """The other rank holds no seed at all."""
    model = make_model()
    training = Training(DistributedDataParallel(model), model, rank, world)
    if rank == 1:
        model.execute(Action("germinate", "1", "mlp"))
    return failure(training.train)


def trains_alone(rank: int, world: int, folder: Path) -> str:
    """Without DDP every rank trains for itself."""
    model = make_model()
    return failure(Training(model, model, rank, world).run)


def calls_differ(rank: int, world: int, folder: Path) -> dict[str, str]:
    model = make_model()
    training = Training(DistributedDataParallel(model), model, rank, world)
    training.train()
    step, found = training.growth.step, {}
    found["arguments"] = failure(lambda: step(val_loss=1.0) if rank else step())
    found["metrics"] = failure(lambda: step(val_loss=1.0) if rank else step(val_accuracy=1.0))
    training.growth.evaluate = (lambda: {"val_loss": 1 / 0}) if rank else training.evaluate
    found["evaluate"] = failure(step)
    training.growth.evaluate = training.evaluate
    found["repeated"] = failure(step)
    if rank:
        training.growth._usage.optimizer_steps = 1  # as after a batch more than the others had
    found["idle"] = failure(step)
    return found


def metrics_are_means(rank: int, world: int, folder: Path) -> dict[str, float]:
    model = make_model()
    training = Training(DistributedDataParallel(model), model, rank, world)
    training.train()
    decision = training.growth.step(val_loss=[1.0, 4.0][rank], val_accuracy=0.1)
    return {"val_loss": decision.val_loss, "val_accuracy": decision.val_accuracy}


def larger_network(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """A seed is there when DDP is built around more than the model; the scheduler never sees the DDP object."""
    model = make_model()
    model.execute(Action("germinate", "1", "mlp"))
    model.tick()
    head = nn.Linear(3, 3).double()
    outer = nn.Sequential(model, head)
    net = DistributedDataParallel(outer)
    training = Training(model, model, rank, world, ScriptedController({2: Action("prune", "1")}))
    training.net = net
    return training.run(4).result()


def uneven_inputs(rank: int, world: int, folder: Path) -> str:
    model = make_model()
    training = Training(DistributedDataParallel(model), model, rank, world)

    def joined() -> None:
        with training.net.join():
            training.train()

    return failure(joined)


class Accelerated(Training):
    """The same loop as accelerate writes it: everything is prepared, batches are accumulated by its own rules."""

    def __init__(self, rank: int, world: int, folder: Path) -> None:
        from accelerate import Accelerator

        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        self.rank, self.world, self.folder = rank, world, folder
        model = make_model()
        optimizer = AdamW(model.parameters(), lr=0.05)
        rate = StepLR(optimizer, step_size=4 * world, gamma=0.5)  # accelerate steps it once per rank
        self.net, self.optimizer, self.rate = self.accelerator.prepare(model, optimizer, rate)
        self.model = self.accelerator.unwrap_model(self.net)
        controller = ScriptedController(SCRIPTS["direct"])
        self.growth = GrowthScheduler(self.net, self.optimizer, controller, self.rate, evaluate=self.evaluate)
        self.accelerator.register_for_checkpointing(self.growth)

    def train(self) -> None:
        for start in range(0, 32, BATCH):
            with self.accelerator.accumulate(self.net):
                self.accelerator.backward(self.growth.loss(lambda: self.loss(start, start + BATCH)))  # noqa: B023
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.net.parameters(), 0.5)
                self.optimizer.step()
                self.rate.step()
                self.optimizer.zero_grad()


def accelerated(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Straight through, and saved and loaded while both seeds are blended in."""
    from accelerate.state import AcceleratorState

    straight = Accelerated(rank, world, folder).run().result()
    saved = Accelerated(rank, world, folder)
    saved.run(4)
    saved.accelerator.save_state(str(folder / "accelerated"))
    again = Accelerated(rank, world, folder)
    again.accelerator.load_state(str(folder / "accelerated"))
    resumed = again.run(EPOCHS - 4).result()
    AcceleratorState._reset_state(reset_partial_state=True)  # for other users in this process
    return {"straight": straight, "resumed": resumed}


def sharded(rank: int, world: int, folder: Path) -> dict[str, str]:
    """FSDP2 around the model and inside it, and tensor parallelism."""
    found = {}
    mesh = init_device_mesh("cpu", (world,))
    for part in ("model", "layer", "tensor"):
        model = make_model()
        if part == "tensor":
            parallelize_module(model.host, mesh, {"0": ColwiseParallel()})
        else:
            fully_shard(model if part == "model" else model.host.get_submodule("0"), mesh=mesh)
        found[part] = failure(lambda: Training(model, model, rank, world))  # noqa: B023
    return found


def main(rank: int, world: int, folder: Path, names: list[str]) -> None:
    """Run scenarios one after the other."""
    torch.set_num_threads(1)
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": 1}
    # accelerate asks for these, although the group is there already.
    os.environ |= {name: str(number) for name, number in numbers.items()} | {"MASTER_ADDR": "127.0.0.1"}
    for name in names:
        store = FileStore(str(folder / f"{name}.store"), world)
        distributed.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=TIMEOUT)
        found = globals()[name](rank, world, folder)
        (folder / f"{name}-{rank}.json").write_text(json.dumps(found))
        distributed.barrier()
        distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
