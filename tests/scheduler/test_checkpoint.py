"""A run that is saved, killed and resumed in a fresh process equals one that never stopped, bit for bit.

This file is also the program of that process: `python test_checkpoint.py DIRECTORY` resumes every run saved there.
"""

import copy
import dataclasses
import hashlib
import json
import math
import os
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adam, AdamW, lr_scheduler
from torch.optim.swa_utils import SWALR

from simic import (
    Action,
    GrowableModel,
    GrowthScheduler,
    HeuristicConfig,
    HeuristicController,
    LifecycleConfig,
    RandomController,
    ScriptedController,
    Stage,
    WaitController,
    save_bundle,
)
from simic.control.autogrow import AutoGrowConfig, AutoGrowController
from simic.control.learned import LearnedController, make_network
from simic.control.plan import Plan, PlanController
from simic.lifecycle.stages import Incubation
from simic.scheduler.parameter_groups import SLOT_KEY

SLOTS = ("a", "b", "c", "d")
X = torch.linspace(-2, 2, 32 * 6).view(32, 6).sin()
Y = (X.sum(1) > 0).long()
WAIT = Action()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One way to grow, and what has happened when it is saved."""

    controller: str = "heuristic"
    incubation: Incubation = "direct"
    optimizer: str = "adamw"
    prelude: str = "none"

    @property
    def name(self) -> str:
        return "-".join(dataclasses.astuple(self))


# What is done before the save, and the stages of a, b, c, d that it leaves.
PRELUDES: dict[str, tuple[list[Action], list[int]]] = {
    "none": ([], [Stage.DORMANT] * 4),
    "one": ([WAIT, Action("germinate", "b", "glu", style="gated")], [0, Stage.BLENDING, 0, 0]),
    "three": (
        [
            Action("germinate", "d", "mlp"), Action("germinate", "a", "low_rank", style="sigmoid-add"), WAIT,
            Action("advance", "d"), Action("fossilize", "d"), Action("germinate", "b", "glu", style="gated", tempo=8),
            Action("germinate", "c", "mlp"), Action("advance", "a"), Action("prune", "c"),
        ],
        [Stage.HOLDING, Stage.BLENDING, Stage.PRUNED, Stage.FOSSILIZED],
    ),
    "three-shadow": (
        [
            Action("germinate", "d", "mlp"), Action("advance", "d"), Action("germinate", "c", "mlp"), WAIT, WAIT,
            Action("advance", "d"), Action("germinate", "a", "glu", style="gated"), Action("advance", "a"),
            Action("prune", "c"), Action("germinate", "b", "low_rank"),
        ],
        [Stage.TRAINING, Stage.GERMINATED, Stage.EMBARGOED, Stage.BLENDING],
    ),
}  # fmt: skip
RUNS = {
    run.name: run
    for run in (
        Run(),
        Run(controller="random", optimizer="sgd"),
        Run(prelude="one", optimizer="named"),
        Run(controller="random", prelude="one"),
        Run(prelude="three"),
        Run(controller="random", prelude="three", optimizer="sgd"),
        Run(incubation="shadow"),
        Run(incubation="shadow", prelude="three-shadow"),
        Run(controller="random", incubation="shadow", prelude="three-shadow", optimizer="named"),
    )
}
OPTIMIZERS = {
    "adamw": lambda model: AdamW(model.parameters(), lr=0.01),
    "named": lambda model: AdamW(model.named_parameters(), lr=0.01, foreach=True),
    "sgd": lambda model: SGD(
        [{"params": model.host.a.parameters(), "lr": 0.02}, {"params": list(model.host.parameters())[2:]}],
        lr=0.05,
        momentum=0.9,
    ),
}
# Always stalled and soon decided, so that much happens in few decisions.
RESTLESS = HeuristicConfig(patience=1, min_improvement=0.9, holding_decisions=1, max_live_seeds=2)


def make_host(width=5, slots=SLOTS) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [(slots[0], nn.Linear(6, width))]
    layers += [(slot, nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Tanh())) for slot in slots[1:]]
    return nn.Sequential(OrderedDict([*layers, ("drop", nn.Dropout(0.1)), ("head", nn.Linear(width, 2))]))


def make_scheduler(run: Run, *, host=None, controller=None, optimizer=None, rates=None) -> GrowthScheduler:
    host = host or make_host()
    slots = [name for name, _ in host.named_children()][:4]
    rules = LifecycleConfig(incubation=run.incubation, embargo_decisions=1)
    model = GrowableModel(host, slots, example_input=X, lifecycle=rules)
    optimizer = (optimizer or OPTIMIZERS[run.optimizer])(model)
    if rates is None:
        rates = [
            lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.99**epoch),
            lr_scheduler.CosineAnnealingLR(optimizer, 40),
        ]
    else:
        rates = [make(optimizer) for make in rates]
    chosen = HeuristicController(RESTLESS) if run.controller == "heuristic" else RandomController(3)

    def evaluate() -> dict[str, float]:
        return {"val_loss": float(cross_entropy(model(X * 1.1), Y))}

    return GrowthScheduler(model, optimizer, controller or chosen, rates, evaluate=evaluate)


def live(scheduler, num_decisions: int) -> None:
    """Train and decide; batches and dropout depend on the decision alone, so that a resumed run sees the same."""
    model = scheduler.model.train()
    for _ in range(num_decisions):
        torch.manual_seed(int(scheduler.facts().decision[0]))
        for batch in torch.randperm(len(X)).split(16):
            loss = scheduler.loss(lambda batch=batch: cross_entropy(model(X[batch]), Y[batch]))
            scheduler.optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)  # sums over parameters, so their order counts
            scheduler.optimizer.step()
        for rate in scheduler.lr_schedulers:
            if isinstance(rate, lr_scheduler.ReduceLROnPlateau):
                rate.step(1.0)
            else:
                rate.step()
        scheduler.step()


def play_prelude(scheduler, prelude: str) -> None:
    actions, stages = PRELUDES[prelude]
    own, scheduler.controller = scheduler.controller, ScriptedController(actions)
    live(scheduler, len(actions))
    scheduler.controller = own
    assert scheduler.model.slot_state.stage[0].tolist() == stages


def frozen(value):
    """A tree of tensors, arrays and numbers as something that == compares bit by bit, NaN included."""
    if isinstance(value, Tensor):
        return str(value.dtype), tuple(value.shape), value.detach().numpy().tobytes()
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, dict):
        return {str(key): frozen(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, (list, tuple)):
        return [frozen(item) for item in value]
    return repr(value)


def snapshot(scheduler):
    """Everything that a run consists of."""
    model = scheduler.model
    return {
        "weights": frozen(dict(model.state_dict())),
        "life": frozen(model.slot_state.state_dict()),
        "optimizer": frozen(scheduler.optimizer.state_dict()),
        "rates": frozen([rate.state_dict() for rate in scheduler.lr_schedulers]),
        "growth": frozen(scheduler.state_dict()),
    }


def summary(scheduler) -> dict[str, Any]:
    """A digest of each part, and all decisions in words: short enough to cross a process boundary."""
    digests = {part: hashlib.sha256(repr(state).encode()).hexdigest() for part, state in snapshot(scheduler).items()}
    return digests | {"decisions": [repr(decision) for decision in scheduler.decisions]}


def resume_all(directory: Path) -> None:
    """The fresh process: resume every run and say where it ends."""
    torch.set_num_threads(1)
    ends = {}
    for path in directory.glob("*.safetensors"):
        scheduler = make_scheduler(RUNS[path.stem])
        scheduler.load(path)
        live(scheduler, 10)
        ends[path.stem] = summary(scheduler)
    (directory / "resumed.json").write_text(json.dumps(ends))


@pytest.fixture(scope="module")
def ends(tmp_path_factory, request) -> dict[str, tuple[dict, dict]]:
    """For every run that is asked for: where it ends uninterrupted, and where it ends resumed in another process."""
    directory = tmp_path_factory.mktemp("checkpoints")
    asked = [item.callspec.params["name"] for item in request.session.items if "ends" in item.fixturenames]
    uninterrupted = {}
    for name in asked:
        run = RUNS[name]
        scheduler = make_scheduler(run)
        play_prelude(scheduler, run.prelude)
        live(scheduler, 1)
        scheduler.save(directory / f"{name}.safetensors")
        live(scheduler, 10)
        uninterrupted[name] = summary(scheduler)
    subprocess.run([sys.executable, "-W", "error", __file__, str(directory)], check=True, timeout=300)
    resumed = json.loads((directory / "resumed.json").read_text())
    return {name: (uninterrupted[name], resumed[name]) for name in asked}


FAST = ("heuristic-direct-adamw-three", "random-shadow-named-three-shadow")


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in RUNS]
)
def test_resumed_in_a_fresh_process_equals_uninterrupted(name, ends):
    uninterrupted, resumed = ends[name]
    assert resumed == uninterrupted
    assert sum("op='germinate'" in decision for decision in uninterrupted["decisions"]) >= 1


def grown(run=None, **parts) -> GrowthScheduler:
    scheduler = make_scheduler(run or Run(), **parts)
    play_prelude(scheduler, "three")
    return scheduler


def test_loading_over_other_seeds_replaces_them(tmp_path):
    """The receiving run has seeds of its own: they and their optimizer state go."""
    saved = grown()
    saved.save(tmp_path / "run")
    other = make_scheduler(Run())
    play_prelude(other, "one")
    other.load(tmp_path / "run")
    assert snapshot(other) == snapshot(saved)
    live(other, 6)
    live(saved, 6)
    assert snapshot(other) == snapshot(saved)


def test_a_run_can_go_back_to_its_own_past(tmp_path):
    scheduler = grown()
    scheduler.save(tmp_path / "run")
    before = snapshot(scheduler)
    live(scheduler, 5)
    scheduler.load(tmp_path / "run")
    assert snapshot(scheduler) == before


def test_a_grown_run_can_go_back_to_before_any_growth(tmp_path):
    scheduler = make_scheduler(Run(), controller=ScriptedController([WAIT, Action("germinate", "b", "mlp")]))
    live(scheduler, 1)
    scheduler.save(tmp_path / "run")
    before = snapshot(scheduler)
    live(scheduler, 3)
    scheduler.load(tmp_path / "run")
    assert scheduler.model.seed("b") is None
    assert snapshot(scheduler) == before


def states_of(scheduler) -> dict[str, Any]:
    """Every part by its own state dict, as a training script keeps its best moment."""
    rates = [rate.state_dict() for rate in scheduler.lr_schedulers]
    parts = {"model": scheduler.model, "growth": scheduler, "optimizer": scheduler.optimizer}
    return copy.deepcopy({name: part.state_dict() for name, part in parts.items()} | {"rates": rates})


def go_back(scheduler, states: dict[str, Any]) -> None:
    scheduler.model.load_state_dict(states["model"])
    scheduler.load_state_dict(states["growth"])
    scheduler.optimizer.load_state_dict(states["optimizer"])
    for rate, state in zip(scheduler.lr_schedulers, states["rates"], strict=True):
        rate.load_state_dict(copy.deepcopy(state))


@pytest.mark.parametrize("run", [Run(), Run(controller="random", optimizer="sgd"), Run(incubation="shadow")], ids=str)
@pytest.mark.parametrize("saved_after", [0, 3, 5])
def test_training_goes_on_from_an_older_topology_as_it_once_did(run, saved_after):
    """By state dicts, in place: the second time through equals the first bit for bit, seeds and optimizer included."""
    scheduler = make_scheduler(run)
    live(scheduler, saved_after)
    then, states = snapshot(scheduler), states_of(scheduler)
    germinations = scheduler.model.germinations
    live(scheduler, 12)
    once, decisions = snapshot(scheduler), [str(decision) for decision in scheduler.decisions[-12:]]
    assert scheduler.model.germinations > germinations
    go_back(scheduler, states)
    assert snapshot(scheduler) == then
    live(scheduler, 12)
    assert snapshot(scheduler) == once
    assert [str(decision) for decision in scheduler.decisions[-12:]] == decisions


def test_a_file_from_before_growth_brings_back_the_same_training(tmp_path):
    scheduler = make_scheduler(Run())
    live(scheduler, 1)
    assert not list(scheduler.model.seeds)
    scheduler.save(tmp_path / "run")
    live(scheduler, 8)
    once = snapshot(scheduler)
    assert list(scheduler.model.seeds)
    scheduler.load(tmp_path / "run")
    assert not list(scheduler.model.seeds)
    live(scheduler, 8)
    assert snapshot(scheduler) == once


@pytest.mark.parametrize("preludes", [("none", "three"), ("three", "none"), ("one", "three"), ("three", "one")])
def test_optimizer_groups_follow_at_once(preludes):
    """Model and optimizer alone, without the scheduler's state: groups come, go and take the saved order."""
    saved, other = (make_scheduler(Run(), rates=[]) for _ in range(2))
    for scheduler, prelude in zip((saved, other), preludes, strict=True):
        play_prelude(scheduler, prelude)
    other.model.load_state_dict(copy.deepcopy(saved.model.state_dict()))
    other.optimizer.load_state_dict(copy.deepcopy(saved.optimizer.state_dict()))
    assert snapshot(other)["optimizer"] == snapshot(saved)["optimizer"]
    for scheduler in (saved, other):
        trained = [parameter for group in scheduler.optimizer.param_groups for parameter in group["params"]]
        assert set(trained) == set(scheduler.model.parameters())
        torch.manual_seed(0)
        scheduler.optimizer.zero_grad()
        cross_entropy(scheduler.model.train()(X), Y).backward()
        scheduler.optimizer.step()
    assert snapshot(other)["weights"] == snapshot(saved)["weights"]


def test_groups_follow_a_model_that_went_back_alone():
    scheduler = make_scheduler(Run())
    best = copy.deepcopy(scheduler.model.state_dict())
    play_prelude(scheduler, "three")
    num_groups = len(scheduler.optimizer.param_groups)
    scheduler.model.load_state_dict(best)
    cross_entropy(scheduler.model.train()(X), Y).backward()
    scheduler.optimizer.step()
    scheduler.step()
    assert len(scheduler.optimizer.param_groups) == num_groups - 3
    live(scheduler, 3)


@pytest.mark.parametrize("prelude", ["one", "three"])
def test_the_plain_way_of_torch(prelude):
    """model, growth, optimizer, learning rate: each by its own load_state_dict, whatever the order of germinations."""
    saved, fresh = make_scheduler(Run()), make_scheduler(Run())
    play_prelude(saved, prelude)
    fresh.model.load_state_dict(copy.deepcopy(saved.model.state_dict()))
    fresh.load_state_dict(copy.deepcopy(saved.state_dict()))
    fresh.optimizer.load_state_dict(copy.deepcopy(saved.optimizer.state_dict()))
    for mine, theirs in zip(fresh.lr_schedulers, saved.lr_schedulers, strict=True):
        mine.load_state_dict(copy.deepcopy(theirs.state_dict()))
    for scheduler in (saved, fresh):
        live(scheduler, 6)
    momenta = [
        {
            group.get(SLOT_KEY): frozen([scheduler.optimizer.state[p] for p in group["params"]])
            for group in scheduler.optimizer.param_groups
        }
        for scheduler in (saved, fresh)
    ]
    assert momenta[0] == momenta[1]
    assert snapshot(fresh)["weights"] == snapshot(saved)["weights"]
    assert snapshot(fresh)["growth"] == snapshot(saved)["growth"]


CONTROLLERS = {
    "heuristic": lambda: HeuristicController(RESTLESS),
    "random": lambda: RandomController(3),
    "wait": WaitController,
    "autogrow": lambda: AutoGrowController(AutoGrowConfig(period=1, min_gain=-1.0)),
    "schedule": lambda: ScriptedController({1: Action("germinate", "b", "mlp"), 5: Action("germinate", "a", "mlp")}),
    "plan": lambda: PlanController(Plan(interval=2, max_seeds=3)),
    "learned": lambda: LearnedController(make_network(), greedy=False),
}


@pytest.mark.parametrize("name", CONTROLLERS)
def test_torch_load_with_its_defaults_reads_everything(name, tmp_path):
    """State dicts hold what torch unpickles without trust, whoever decides; and the run goes on as if never saved."""
    torch.manual_seed(1)
    saved = make_scheduler(Run(), controller=CONTROLLERS[name]())
    live(saved, 4)
    parts = {"model": saved.model, "growth": saved, "optimizer": saved.optimizer}
    torch.save({part: value.state_dict() for part, value in parts.items()}, tmp_path / "run.pt")
    state = torch.load(tmp_path / "run.pt")
    torch.manual_seed(1)
    fresh = make_scheduler(Run(), controller=CONTROLLERS[name]())
    for part, value in {"model": fresh.model, "growth": fresh, "optimizer": fresh.optimizer}.items():
        value.load_state_dict(state[part])
    for mine, theirs in zip(fresh.lr_schedulers, saved.lr_schedulers, strict=True):
        mine.load_state_dict(copy.deepcopy(theirs.state_dict()))
    for scheduler in (saved, fresh):
        live(scheduler, 6)
    for part in ("weights", "optimizer", "rates", "growth"):  # weights say what grows where, if anything does
        assert snapshot(fresh)[part] == snapshot(saved)[part]
    assert any(report.parameters for report in saved.model.growth()) == (name != "wait")


@pytest.mark.parametrize("name", ["heuristic", "autogrow"])
def test_memory_saved_as_arrays_is_read_too(name):
    saved = CONTROLLERS[name]()
    live(make_scheduler(Run(), controller=saved), 3)
    fresh = CONTROLLERS[name]()
    fresh.load_state_dict({key: np.array(value) for key, value in saved.state_dict().items()})
    assert frozen(fresh.state_dict()) == frozen(saved.state_dict())


class Germinates:
    """A controller of the user's that remembers nothing: all it has is `act`."""

    def act(self, facts) -> np.ndarray:
        row = Action("germinate", "b", "mlp") if facts.decision[0] == 1 else WAIT
        return row.encode(facts.slot_names, facts.blueprint_names)[None]


def test_a_controller_without_a_state_is_saved_and_restored(tmp_path):
    saved, fresh = (make_scheduler(Run(), controller=Germinates()) for _ in range(2))
    live(saved, 3)
    saved.save(tmp_path / "run")
    fresh.load(tmp_path / "run")
    for scheduler in (saved, fresh):
        live(scheduler, 2)
    assert snapshot(fresh) == snapshot(saved)


def test_a_seed_that_was_pruned_by_hand_is_not_saved(tmp_path):
    saved, fresh = (make_scheduler(Run(), controller=Germinates()) for _ in range(2))
    live(saved, 3)
    saved.model.execute(Action("prune", "b"))
    saved.save(tmp_path / "run")
    fresh.load(tmp_path / "run")
    assert snapshot(fresh) == snapshot(saved)


def test_models_that_share_an_optimizer_are_restored_by_their_state_dicts():
    """Seeds come in turns; every part is restored by its own state dict, and both go on as if never saved."""

    def build() -> tuple[list[GrowthScheduler], torch.optim.Optimizer]:
        models = [GrowableModel(make_host(), SLOTS, example_input=X) for _ in range(2)]
        optimizer = AdamW([p for model in models for p in model.parameters()], lr=0.01)
        turns = [{0: "c", 2: "a"}, {1: "c", 5: "b"}]
        schedules = [
            ScriptedController({decision: Action("germinate", slot, "mlp") for decision, slot in turn.items()})
            for turn in turns
        ]
        figures = lambda: {"val_loss": 1.0}  # noqa: E731
        both = [GrowthScheduler(m, optimizer, s, evaluate=figures) for m, s in zip(models, schedules, strict=True)]
        return both, optimizer

    def train(schedulers, optimizer, decisions) -> None:
        for _ in range(decisions):
            torch.manual_seed(int(schedulers[0].facts().decision[0]))
            optimizer.zero_grad()
            sum((cross_entropy(each.model.train()(X), Y) for each in schedulers), torch.zeros(())).backward()
            optimizer.step()
            for each in schedulers:
                each.step()

    (saved, optimizer), (fresh, other) = build(), build()
    train(saved, optimizer, 4)
    assert [group.get(SLOT_KEY) for group in optimizer.param_groups] == [None, "c", "c", "a"]
    for mine, theirs in zip(fresh, saved, strict=True):
        mine.model.load_state_dict(copy.deepcopy(theirs.model.state_dict()))
        mine.load_state_dict(copy.deepcopy(theirs.state_dict()))
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for schedulers, shared in ((saved, optimizer), (fresh, other)):
        train(schedulers, shared, 4)
    assert [snapshot(each) for each in fresh] == [snapshot(each) for each in saved]


def test_a_part_of_what_the_optimizer_trains_is_not_saved_as_the_whole(tmp_path):
    model = GrowableModel(make_host(), SLOTS, example_input=X)
    optimizer = AdamW([*model.parameters(), *nn.Linear(2, 2).parameters()])
    scheduler = GrowthScheduler(model, optimizer, evaluate=lambda: {"val_loss": 1.0})
    with pytest.raises(
        ValueError, match=r"trains 2 parameter tensors that are not this model's.*wrap the whole.*share"
    ):
        scheduler.save(tmp_path / "run")
    assert not list(tmp_path.iterdir())


def test_growth_without_its_model_is_refused_and_changes_nothing():
    """The scheduler's state alone does not fit a model with other seeds: the model comes first."""
    saved, fresh = grown(), make_scheduler(Run())
    live(fresh, 1)
    for receiver, state in ((fresh, saved.state_dict()), (saved, fresh.state_dict())):
        before = snapshot(receiver)
        with pytest.raises(ValueError, match="model"):
            receiver.load_state_dict(copy.deepcopy(state))
        assert snapshot(receiver) == before


RATES = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 3, gamma=0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 5, 11], gamma=0.5),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, factor=0.5, total_iters=11),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, total_iters=12),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, total_iters=15, power=2),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4, 2),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1, factor=0.5),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=6), lr_scheduler.CosineAnnealingLR(o, 10)], milestones=[11]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 11), lr_scheduler.ExponentialLR(o, 0.9)], optimizer=o
    ),
    "SWALR": lambda o: SWALR(o, swa_lr=0.05, anneal_epochs=14),
}


FAST_RATES = ("LambdaLR", "ReduceLROnPlateau", "OneCycleLR", "SequentialLR")


@pytest.mark.parametrize(
    "name", [name if name in FAST_RATES else pytest.param(name, marks=pytest.mark.slow) for name in RATES]
)
def test_every_learning_rate_scheduler_is_restored(name, tmp_path):
    saved = grown(rates=[RATES[name]])
    saved.save(tmp_path / "run")
    fresh = make_scheduler(Run(), rates=[RATES[name]])
    fresh.load(tmp_path / "run")
    for _ in range(4):
        for scheduler in (saved, fresh):
            live(scheduler, 1)
        ours, theirs = ([group["lr"] for group in each.optimizer.param_groups] for each in (fresh, saved))
        assert ours == theirs
    assert snapshot(fresh)["weights"] == snapshot(saved)["weights"]


class Tied(nn.Module):
    """A language model in miniature whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.block = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.GELU())
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.head(x + self.block(x))


def test_tied_weights_are_saved_once_and_stay_tied(tmp_path):
    tokens = torch.arange(12).view(2, 6) % 7

    def build() -> GrowthScheduler:
        torch.manual_seed(0)
        model = GrowableModel(Tied(), ["block"], example_input=tokens)
        schedule = ScriptedController([Action("germinate", "block", "attention")])
        evaluate = lambda: {"val_loss": 1.0}  # noqa: E731
        return GrowthScheduler(model, AdamW(model.parameters()), schedule, evaluate=evaluate)

    def train(scheduler) -> None:
        logits = scheduler.model(tokens)
        scheduler.optimizer.zero_grad()
        cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
        scheduler.optimizer.step()
        scheduler.step()

    saved, fresh = build(), build()
    for _ in range(2):
        train(saved)
    saved.save(tmp_path / "run")
    fresh.load(tmp_path / "run")
    host = fresh.model.host
    assert host.get_parameter("head.weight") is host.get_parameter("embed.weight")
    assert torch.equal(fresh.model(tokens), saved.model(tokens))
    for scheduler in (saved, fresh):
        train(scheduler)
    assert snapshot(fresh) == snapshot(saved)


# Refusals.


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint") / "run.safetensors"
    grown().save(path)
    return path


def other_head() -> nn.Sequential:
    host = make_host()
    host.head = nn.Linear(5, 3)
    return host


OTHERS = {
    "slots": (lambda: {"host": make_host(slots=("a", "b", "c", "z"))}, ["slots", "'d'", "'z'"]),
    "width": (lambda: {"host": make_host(width=6)}, ["5", "6"]),
    "head": (lambda: {"host": other_head()}, ["head.weight", "(2, 5)", "(3, 5)"]),
    "incubation": (lambda: {"run": Run(incubation="shadow")}, ["incubation", "direct", "shadow"]),
    "optimizer": (lambda: {"optimizer": lambda m: Adam(m.parameters())}, ["optimizer", "AdamW", "Adam"]),
    "groups": (
        lambda: {
            "optimizer": lambda m: AdamW([{"params": m.host.a.parameters()}, {"params": m.host.head.parameters()}])
        },
        ["[16]", "[2, 2]"],
    ),
    "rate": (
        lambda: {"rates": [lambda o: lr_scheduler.StepLR(o, 3)]},
        ["lr_scheduler", "CosineAnnealingLR", "StepLR"],
    ),
    "controller": (
        lambda: {"run": Run(controller="random")},
        ["HeuristicController", "RandomController"],
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_checkpoint_of_something_else_is_refused_and_changes_nothing(name, checkpoint):
    make, words = OTHERS[name]
    parts = make()
    scheduler = make_scheduler(parts.pop("run", Run()), **parts)
    live(scheduler, 3)
    before = snapshot(scheduler)
    with pytest.raises(ValueError, match=r"checkpoint|state dict") as error:
        scheduler.load(checkpoint)
    assert [word for word in words if word not in str(error.value)] == [], str(error.value)
    assert snapshot(scheduler) == before
    live(scheduler, 1)


def test_members_of_a_composite_rate_are_compared_too(tmp_path):
    def chain(*makers):
        return lambda o: lr_scheduler.ChainedScheduler([make(o) for make in makers], optimizer=o)

    constant, decay = RATES["ConstantLR"], RATES["ExponentialLR"]
    saved = grown(rates=[chain(constant, decay, decay)])
    saved.save(tmp_path / "run")
    other = make_scheduler(Run(), rates=[chain(constant)])
    live(other, 2)
    before = snapshot(other)
    with pytest.raises(ValueError, match="ConstantLR"):
        other.load(tmp_path / "run")
    assert snapshot(other) == before


def test_other_slots_are_refused_even_before_any_growth(tmp_path):
    """What the controller remembers is of these slots."""
    saved = make_scheduler(Run(), rates=[])
    live(saved, 1)
    saved.save(tmp_path / "run")
    model = GrowableModel(make_host(), ["a", "b"], example_input=X)
    controller, optimizer = HeuristicController(RESTLESS), AdamW(model.parameters())
    fewer = GrowthScheduler(model, optimizer, controller, evaluate=lambda: {"val_loss": 1.0})
    before = snapshot(fewer)
    with pytest.raises(ValueError, match="slots"):
        fewer.load(tmp_path / "run")
    assert snapshot(fewer) == before


def test_damaged_files_are_refused_and_change_nothing(checkpoint, tmp_path):
    scheduler = make_scheduler(Run())
    live(scheduler, 3)
    before = snapshot(scheduler)
    content = checkpoint.read_bytes()
    damaged = {f"cut at {cut}": content[:cut] for cut in (0, 7, 100, len(content) // 2, len(content) - 1)}
    rng = np.random.default_rng(0)
    for position in [0, 8, 9, *rng.integers(len(content), size=60).tolist()]:
        flipped = bytearray(content)
        flipped[position] ^= 1 << int(rng.integers(8))
        damaged[f"flipped at {position}"] = bytes(flipped)
    for name, damage in damaged.items():
        (tmp_path / name).write_bytes(damage)
        with pytest.raises(ValueError, match=name):  # the message names the file
            scheduler.load(tmp_path / name)
        assert snapshot(scheduler) == before, name


def test_foreign_and_missing_files_are_refused(tmp_path):
    scheduler = make_scheduler(Run())
    with pytest.raises(FileNotFoundError, match="there is no file"):
        scheduler.load(tmp_path / "missing")
    save_file({"w": torch.zeros(2)}, tmp_path / "foreign")
    with pytest.raises(ValueError, match="was not written by simic"):
        scheduler.load(tmp_path / "foreign")
    save_bundle(tmp_path / "other", {"kind": "policy"})
    with pytest.raises(ValueError, match="does not hold a growing model"):
        scheduler.load(tmp_path / "other")
    torch.save({"w": torch.zeros(2)}, tmp_path / "pickle")
    with pytest.raises(ValueError, match="not a readable safetensors file"):
        scheduler.load(tmp_path / "pickle")


def test_saving_over_a_checkpoint_keeps_the_old_one_until_the_new_is_whole(tmp_path, monkeypatch):
    scheduler = grown()
    scheduler.save(tmp_path / "run")
    old = (tmp_path / "run").read_bytes()
    live(scheduler, 1)

    def power_cut(*_):
        raise OSError("power cut")

    monkeypatch.setattr(os, "replace", power_cut)
    with pytest.raises(OSError, match="power cut"):
        scheduler.save(tmp_path / "run")
    assert (tmp_path / "run").read_bytes() == old
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_numbers_that_json_lacks_survive(tmp_path):
    """A loss history with gaps, and a plateau that has seen nothing yet."""
    scheduler = make_scheduler(Run(), rates=[RATES["ReduceLROnPlateau"]])
    cross_entropy(scheduler.model(X), Y).backward()
    scheduler.optimizer.step()
    scheduler.step(val_loss=0.1 + 0.2)
    scheduler.save(tmp_path / "run")
    fresh = make_scheduler(Run(), rates=[RATES["ReduceLROnPlateau"]])
    fresh.load(tmp_path / "run")
    (plateau,) = fresh.lr_schedulers
    assert isinstance(plateau, lr_scheduler.ReduceLROnPlateau)
    assert plateau.best == math.inf
    assert math.isnan(fresh.state_dict()["history"]["val_accuracy"][0])
    assert snapshot(fresh) == snapshot(scheduler)


if __name__ == "__main__":
    resume_all(Path(sys.argv[1]))
