"""Every controller keeps to the budget and the menu of a model, also where it would like to grow more."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from simic import Action, GrowableModel, GrowthScheduler, IllegalActionError, LifecycleConfig, ScriptedController
from simic.control.autogrow import AutoGrowConfig, AutoGrowController
from simic.control.heuristic import HeuristicConfig, HeuristicController
from simic.control.plan import Plan, PlanController
from simic.lifecycle.actions import Op

X = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
Y = (X[:, 0] * X[:, 1] > 0).long()


def make_model(**settings) -> GrowableModel:
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(0)
        host = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    lifecycle = LifecycleConfig(seeds_per_slot=3, embargo_decisions=0)
    return GrowableModel(host, ["0", "2"], example_input=X, lifecycle=lifecycle, **settings)


def train(model: GrowableModel, controller, decisions: int) -> list[Action]:
    """What the controller does; the budget is checked after every decision."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def evaluate() -> dict[str, float]:
        return {"val_loss": F.cross_entropy(model(X), Y).item()}

    scheduler = GrowthScheduler(model, optimizer, controller, evaluate=evaluate)
    for _ in range(decisions):
        for _ in range(2):
            optimizer.zero_grad()
            F.cross_entropy(model(X), Y).backward()
            optimizer.step()
        scheduler.step()
        if model.budget.max_parameters is not None:
            assert sum(p.numel() for p in model.parameters()) <= model.budget.max_parameters
    return [decision.action for decision in scheduler.decisions]


CONTROLLERS = {
    "heuristic": lambda: HeuristicController(HeuristicConfig(min_contribution=-1e9, max_seed_ratio=99)),
    "gated heuristic": lambda: HeuristicController(HeuristicConfig(min_contribution=-1e9, style="gated")),
    "random": lambda: "random",
    "plan": lambda: PlanController(Plan(interval=1, max_seeds=9, size=1.0)),
    "gated plan": lambda: PlanController(Plan(interval=1, max_seeds=9, size=0.2, style="gated")),
    "autogrow": lambda: AutoGrowController(AutoGrowConfig(period=1, min_gain=-1e9)),
    "pretrained": lambda: "pretrained",
}


@pytest.mark.parametrize("name", CONTROLLERS)
def test_no_controller_exceeds_the_budget(name):
    free = make_model()
    train(free, CONTROLLERS[name](), 25)
    wanted = sum(p.numel() for p in free.parameters())
    host = sum(p.numel() for p in free.host.parameters())
    assert wanted > host, "the test shows nothing if the controller never grows"
    limit = host + (wanted - host) // 2
    model = make_model(max_parameters=limit)
    train(model, CONTROLLERS[name](), 25)
    assert sum(p.numel() for p in model.parameters()) <= limit


@pytest.mark.parametrize("name", CONTROLLERS)
def test_every_controller_keeps_to_the_menu(name):
    model = make_model(blueprints=["low_rank", "mlp_small", "norm"])
    actions = train(model, CONTROLLERS[name](), 20)
    grown = {action.blueprint for action in actions if action.op == str(Op.GERMINATE)}
    assert grown
    assert grown <= {"low_rank", "mlp_small", "norm"}


def test_a_script_that_exceeds_the_budget_is_refused_when_it_is_due():
    model = make_model(max_growth=1.7)
    with pytest.raises(IllegalActionError, match=r"mlp_large adds .* more than max_growth=1.7 allows"):
        train(model, ScriptedController([Action(), Action("germinate", "2", "mlp_large")]), 2)
    assert not model.grown_slots
