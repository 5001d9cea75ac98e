"""torch.compile around and inside a model that grows: one graph per structure and mode, whatever alpha is."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD

from simic import Action, GrowableModel, GrowthScheduler, LifecycleConfig, ScriptedController

X = torch.linspace(-1, 1, 48).view(8, 6)
Y = torch.arange(8) % 2
DIRECT = {
    0: Action("germinate", "1", "mlp", tempo=5),
    2: Action("germinate", "3", "norm", style="gated"),
    6: Action("advance", "1"),
    7: Action("fossilize", "1"),
    8: Action("prune", "3", alpha_speed=3),
}
SHADOW = {
    0: Action("germinate", "1", "mlp"),
    1: Action("advance", "1"),
    3: Action("advance", "1"),
    7: Action("advance", "1"),
    8: Action("fossilize", "1"),
}


@pytest.fixture
def graphs():
    """Every graph that a backend was asked to compile."""
    torch.compiler.reset()
    yield []
    torch.compiler.reset()


class Backend:
    """Runs graphs as they are and counts them."""

    def __init__(self, graphs: list) -> None:
        self.graphs = graphs

    def __call__(self, graph, example_inputs):
        self.graphs.append(graph)
        return graph.forward


def make_host() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 2)).double()


def grow(model, net, script, epochs=12, count=lambda: 0) -> tuple[list[float], dict[str, int]]:
    """The losses of a growing training, and what `count` rose by in training and in steps."""
    optimizer = SGD(model.parameters(), lr=0.1)
    evaluate = lambda: {"val_loss": float(cross_entropy(net(X.double()), Y))}  # noqa: E731
    growth = GrowthScheduler(net, optimizer, ScriptedController(script), evaluate=evaluate)
    compiled = {"training": 0, "steps": 0}
    for _ in range(epochs):
        before = count()
        for _ in range(2):
            optimizer.zero_grad()
            growth.loss(lambda: cross_entropy(net(X.double()), Y)).backward()
            optimizer.step()
        between = count()
        growth.step()
        compiled["training"] += between - before
        compiled["steps"] += count() - between
    return [decision.val_loss for decision in growth.decisions], compiled


def make_model(host=None, slots=("1", "3"), incubation: Any = "direct") -> GrowableModel:
    lifecycle = LifecycleConfig(incubation=incubation, min_training_decisions=1)
    return GrowableModel(host or make_host(), slots, example_input=X.double(), lifecycle=lifecycle)


def test_a_compiled_model_is_compiled_once_per_change_of_structure(graphs):
    """Two germinations and one removal; ramps of 5 and 3 decisions, a gate and all ablations cost no graph."""
    model = make_model()
    net = torch.compile(model, backend=Backend(graphs))
    losses, compiled = grow(model, net, DIRECT, count=lambda: len(graphs))
    assert [report.stage.name for report in model.growth()] == ["FOSSILIZED", "EMBARGOED"]
    assert compiled == {"training": 4, "steps": 4}
    plain = make_model()
    assert losses == pytest.approx(grow(plain, plain, DIRECT)[0], rel=1e-12)


@pytest.mark.slow
def test_a_compiled_host_is_compiled_once_per_change_of_structure(graphs):
    """A GrowableModel around what torch.compile returned; its slots have torch's prefix."""
    model = make_model(torch.compile(make_host(), backend=Backend(graphs)), ["_orig_mod.1", "_orig_mod.3"])
    assert not graphs  # finding slots compiles nothing
    script = {index: replace(action, slot=f"_orig_mod.{action.slot}") for index, action in DIRECT.items()}
    losses, compiled = grow(model, model, script, count=lambda: len(graphs))
    assert compiled == {"training": 4, "steps": 4}
    plain = make_model()
    assert losses == pytest.approx(grow(plain, plain, DIRECT)[0], rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("incubation", ["shadow", "straight_through"])
def test_incubation_adds_a_graph_where_the_computation_changes(graphs, incubation):
    """Training: host alone, with an idle seed, with the seed in training (for shadow: its own pass), and blended in."""
    model = make_model(incubation=incubation)
    net = torch.compile(model, backend=Backend(graphs))
    losses, compiled = grow(model, net, SHADOW, count=lambda: len(graphs))
    assert compiled["training"] <= 4
    assert compiled["steps"] <= 4
    plain = make_model(incubation=incubation)
    assert losses == pytest.approx(grow(plain, plain, SHADOW)[0], rel=1e-12)


def test_a_seed_switched_off_in_a_compiled_graph_adds_nothing_even_if_it_overflows(graphs):
    model = make_model().eval()
    net = torch.compile(model, backend=Backend(graphs))
    alone = model(X.double())
    model.plant("1", "mlp")
    with torch.no_grad():
        for parameter in model.seeds.parameters():
            parameter.fill_(torch.inf)
        with model.switched_off("1"):
            assert torch.equal(net(X.double()), alone)
        assert not net(X.double()).isfinite().all()
    assert len(graphs) == 1


def test_the_whole_model_is_one_graph(graphs):
    model = make_model()
    model.plant("1", "mlp")
    torch.compile(model, backend=Backend(graphs), fullgraph=True)(X.double()).sum().backward()
    assert len(graphs) == 1


class Outer(nn.Module):
    """A network around the model, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.drop = make_model(), nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(self.body(x))


@pytest.mark.parametrize("in_place", [False, True])
def test_a_network_around_the_model_is_evaluated_in_evaluation_mode_when_compiled(graphs, in_place):
    outer = Outer()
    model, net = outer.body, outer if in_place else torch.compile(outer, backend=Backend(graphs))
    if in_place:
        outer.compile(backend=Backend(graphs))
    optimizer, found = SGD(outer.parameters(), lr=0.1), []

    def evaluate():
        found.extend(net(X.double()).sum().item() for _ in range(3))
        return {"val_loss": 1.0}

    growth = GrowthScheduler(model, optimizer, "wait", evaluate=evaluate)
    optimizer.step()
    growth.step()
    assert len(set(found)) == 1
    assert outer.drop.training
