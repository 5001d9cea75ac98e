"""Growth in a frozen host: the first decision is taken at once, several actions per decision, and exact resumption."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from simic import Action, GrowableModel, GrowthScheduler, IllegalActionError, LifecycleConfig, Stage, WaitController

X = torch.linspace(-1, 1, 12 * 4).view(12, 4).sin()
Y = (X[:, 0] * X[:, 1] > 0).long()
LAYERS = ["0", "2", "4"]


def make_model(**settings: Any) -> GrowableModel:
    torch.manual_seed(0)
    host = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    settings = {"freeze_host": True} | settings
    return GrowableModel(host, LAYERS, example_input=X, **settings)


def schedule(model, controller: Any = "adapters", **settings: Any) -> GrowthScheduler:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    evaluate = lambda: {"val_loss": cross_entropy(model(X), Y)}  # noqa: E731
    return GrowthScheduler(model, optimizer, controller, evaluate=evaluate, **settings)


def train(growth, epochs: int) -> None:
    for _ in range(epochs):
        for _ in range(5):
            growth.optimizer.zero_grad()
            cross_entropy(growth.model(X), Y).backward()
            growth.optimizer.step()
        growth.step()


class Plays:
    """Answers with these actions, one after the other, then waits; notes the facts it sees."""

    def __init__(self, *actions: Action) -> None:
        self.actions, self.seen = list(actions), []

    def act(self, facts) -> Action:
        self.seen.append(facts)
        return self.actions.pop(0) if self.actions else Action("wait")


def test_the_first_seeds_are_there_before_the_first_batch_and_only_they_train():
    model = make_model()
    host = [parameter.clone() for parameter in model.host.parameters()]
    growth = schedule(model, horizon=6)
    assert model.grown_slots == LAYERS
    assert (model.slot_state.alpha[0, ::2] == 1).all()  # no ramp
    assert [len(decision.actions) for decision in growth.decisions] == [6]  # planted and moved on
    assert growth.decisions[0].host_epoch == 0
    before = float(cross_entropy(model(X), Y).detach())
    train(growth, 6)
    assert float(cross_entropy(model(X), Y).detach()) < before - 0.01
    assert all(map(torch.equal, host, model.host.parameters()))


def test_an_optimizer_without_the_frozen_parameters_trains_the_seeds():
    """As trainers build it that leave out what needs no gradient."""
    model = make_model()
    GrowthScheduler(model, torch.optim.AdamW([{"params": []}]), "adapters", evaluate=lambda: {"val_loss": 1.0})
    assert model.grown_slots == LAYERS
    foreign = torch.optim.AdamW([nn.Parameter(torch.zeros(2))])
    with pytest.raises(ValueError, match="holds none of the model's parameters"):
        GrowthScheduler(make_model(), foreign, "adapters", evaluate=lambda: {"val_loss": 1.0})


def test_a_head_that_trains_along_is_trained_from_the_start():
    model = make_model()
    head = model.host.get_submodule("4").requires_grad_(True)
    before = [parameter.clone() for parameter in head.parameters()]
    growth = schedule(model)
    assert len(model.grown_slots) == 3
    train(growth, 1)
    assert not any(map(torch.equal, before, head.parameters()))


def test_a_controller_that_never_grows_is_asked_too():
    growth = schedule(make_model(), WaitController())
    assert [str(decision.action) for decision in growth.decisions] == ["wait"]


def test_each_action_of_a_decision_sees_those_before_it():
    model = make_model(freeze_host=False)
    controller = Plays(Action("germinate", "0", "norm"), Action("germinate", "2", "mlp"))
    growth = schedule(model, controller, actions_per_decision=5)
    train(growth, 1)
    assert model.grown_slots == ["0", "2"]
    assert [str(a.blueprint) for a in growth.decisions[0].actions] == ["norm", "mlp"]
    assert growth.decisions[0].action.blueprint == "norm"
    first, second, third = controller.seen
    assert not first.slots.occupied.any()
    assert second.slots.occupied[0].tolist() == [True, False, False]
    assert third.slots.occupied[0].tolist() == [True, True, False]
    assert [int(facts.decision[0]) for facts in controller.seen] == [0, 0, 0]
    assert third.previous_action[0, 1] == 1
    assert {change.slot for change in growth.decisions[0].changes} == {"0", "2"}


def test_no_more_actions_than_the_limit():
    controller = Plays(Action("germinate", "0", "norm"), Action("germinate", "2", "mlp"))
    growth = schedule(make_model(freeze_host=False), controller, actions_per_decision=1)
    train(growth, 1)
    assert growth.model.grown_slots == ["0"]
    train(growth, 1)
    assert growth.model.grown_slots == ["0", "2"]


def test_a_refused_action_undoes_those_before_it():
    model = make_model(freeze_host=False, lifecycle=LifecycleConfig(max_seeds=1))
    growth = schedule(
        model, Plays(Action("germinate", "0", "norm"), Action("germinate", "2", "mlp")), actions_per_decision=3
    )
    with pytest.raises(IllegalActionError, match="fewer than max_seeds"):
        train(growth, 1)
    assert model.grown_slots == []
    assert (model.slot_state.stage == Stage.DORMANT).all()
    assert model.germinations == 0
    assert not growth.decisions
    growth.step()  # the script is over, so it waits
    assert [str(decision.action) for decision in growth.decisions] == ["wait"]


@pytest.mark.parametrize("value", [0, 1.5, "all"])
def test_a_limit_that_is_no_count_is_refused(value):
    with pytest.raises(ValueError, match="actions_per_decision must be an integer"):
        schedule(make_model(), actions_per_decision=value)


@pytest.mark.parametrize("controller", ["adapters", "heuristic", "pretrained", "random"])
def test_resumed_equals_uninterrupted(controller, tmp_path):
    straight = schedule(make_model(), controller, horizon=8)
    train(straight, 6)
    first = schedule(make_model(), controller, horizon=8)
    train(first, 3)
    first.save(tmp_path / "growth.safetensors")
    second = schedule(make_model(), controller, horizon=8)
    second.load(tmp_path / "growth.safetensors")
    train(second, 3)
    assert second.model.state_dict().keys() == straight.model.state_dict().keys()
    for name, value in straight.model.state_dict().items():
        assert torch.equal(value, second.model.state_dict()[name]), name
    assert second.decisions[-1].host_epoch == 6


def test_a_run_that_has_pruned_all_its_seeds_can_go_on(tmp_path):
    """Its model is loaded before the scheduler is built, as in Trainer; that must not plant the first seeds again."""
    script = Action("germinate", "0", "lora_2"), Action("wait"), Action("prune", "0"), Action("wait")
    straight = schedule(make_model(), Plays(*script))
    train(straight, 2)
    assert straight.model.grown_slots == []
    model = make_model()
    model.load_state_dict(straight.model.state_dict())
    resumed = schedule(model, Plays(Action("germinate", "2", "lora_8")))
    assert model.grown_slots == ["2"]
    resumed.load_state_dict(straight.state_dict())
    assert model.grown_slots == []
    assert model.germinations == 1
    assert model.slot_state.state_dict() == straight.model.slot_state.state_dict()
    assert [decision.host_epoch for decision in resumed.decisions] == [0, 1, 2]


@pytest.mark.parametrize("controller", ["adapters", "heuristic", "pretrained", "random", "plan"])
def test_every_controller_grows_a_frozen_host_with_many_slots(controller):
    """24 layers; only LoRA fits beside them, and an adapter behind."""
    torch.manual_seed(0)
    host = nn.Sequential(*(nn.Linear(4, 4) for _ in range(24)))
    model = GrowableModel(host, [str(i) for i in range(24)], example_input=X, freeze_host=True)
    growth = schedule(model, controller, horizon=6)
    train(growth, 5)  # also before the first seed, while nothing can learn
    assert len(model.grown_slots) >= 1
    assert all(np.isfinite(decision.val_loss) for decision in growth.decisions[1:])
