"""Mistakes around the growth scheduler: refused in one line with a remedy, or warned about once."""

import random
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from helpers.growth import seed_of
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import CosineAnnealingLR

from simic import (
    Action,
    GrowableModel,
    GrowthScheduler,
    HeuristicConfig,
    HeuristicController,
    ScriptedController,
    Stage,
)
from simic.scheduler import usage

X = torch.linspace(-1, 1, 48).view(8, 6)
Y = torch.arange(8) % 2


def make_host(dropout=0.0) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Dropout(dropout), nn.ReLU(), nn.Linear(5, 2))


def make_model(host=None) -> GrowableModel:
    return GrowableModel(host or make_host(), ["2"], example_input=X)


def make_scheduler(controller: Any = "wait", model=None, **settings: Any) -> GrowthScheduler:
    model = model or make_model()
    optimizer = SGD(model.parameters(), lr=0.1)
    evaluate = lambda: {"val_loss": float(cross_entropy(model(X), Y))}  # noqa: E731
    settings = {"evaluate": evaluate} | settings
    return GrowthScheduler(model, optimizer, controller, **settings)


def train(scheduler, batches=2) -> None:
    for _ in range(batches):
        scheduler.optimizer.zero_grad()
        cross_entropy(scheduler.model(X), Y).backward()
        scheduler.optimizer.step()


# What it is given.


def validate(model, data, verbose=False):
    """A user's own, which wants to know what to evaluate."""


class Wrapper:
    """An optimizer inside something else, as trainers have them."""

    def __init__(self, optimizer) -> None:
        self.optimizer = optimizer


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda m, o: (o, m), r"model and optimizer are swapped: write GrowthScheduler\(model, optimizer"),
        (lambda m, o: (m.host, o), r"must be a GrowableModel, got a Sequential; wrap it first: GrowableModel\("),
        (lambda m, o: (None, o), "must be a GrowableModel, got a NoneType"),
        (lambda m, o: (GrowableModel, o), "got the class GrowableModel"),
        (lambda m, o: (m, m.parameters()), "must be a torch.optim.Optimizer, got a generator; build it from"),
        (lambda m, o: (m, SGD), "got the class SGD"),
        (lambda m, o: (m, Wrapper(o)), "got a Wrapper; pass the optimizer inside it"),
    ],
)
def test_model_and_optimizer_are_what_they_should_be(arguments, message):
    model = make_model()
    with pytest.raises(TypeError, match=message):
        GrowthScheduler(*arguments(model, SGD(model.parameters(), lr=0.1)))


@pytest.mark.parametrize(
    ("evaluate", "message"),
    [
        (
            validate,
            r"without arguments, but validate\(model, data, verbose=False\) needs some: write evaluate=lambda: val",
        ),
        (lambda x: {}, r"<lambda>\(x\) needs some"),
    ],
)
def test_an_evaluate_with_arguments_is_refused_at_once(evaluate, message):
    with pytest.raises(TypeError, match=message):
        make_scheduler(evaluate=evaluate)
    make_scheduler(evaluate=lambda x=1, *rest, **others: {"val_loss": 1.0})


def test_a_governor_that_is_none_is_refused():
    with pytest.raises(TypeError, match="governor must be True, False or a GovernorConfig, got 'on'"):
        make_scheduler(governor="on")


def test_a_learning_rate_scheduler_built_too_late_is_refused_before_it_fails():
    scheduler = make_scheduler("heuristic")
    CosineAnnealingLR(scheduler.optimizer, 10)
    train(scheduler)
    with pytest.raises(ValueError, match=r"built after the GrowthScheduler.* pass it as lr_schedulers=\[...\]"):
        scheduler.step()
    waiting = make_scheduler("wait")  # no seed, no group
    rate = CosineAnnealingLR(waiting.optimizer, 10)
    for _ in range(3):
        train(waiting)
        rate.step()
        waiting.step()


class Answers:
    """A user's controller that thinks in words."""

    def __init__(self, wrap) -> None:
        self.wrap = wrap

    def act(self, facts):
        return self.wrap(Action("germinate", "2", "mlp") if facts.decision[0] == 0 else Action())


@pytest.mark.parametrize("wrap", [lambda a: a, lambda a: [a], lambda a: (a,)], ids=["alone", "list", "tuple"])
def test_a_controller_may_answer_an_action(wrap):
    scheduler = make_scheduler(Answers(wrap))
    for _ in range(2):
        train(scheduler)
        scheduler.step()
    assert [decision.action.op for decision in scheduler.decisions] == ["germinate", "wait"]


# What it is told.


@pytest.mark.parametrize("accuracy", [92.5, 1.01])
def test_an_accuracy_in_percent_is_refused(accuracy):
    scheduler = make_scheduler()
    train(scheduler)
    with pytest.raises(ValueError, match=f"between 0 and 1, got {accuracy}: divide percent by 100"):
        scheduler.step(val_loss=1.0, val_accuracy=accuracy)
    percent = make_scheduler(evaluate=lambda: {"val_accuracy": accuracy})
    train(percent)
    with pytest.raises(ValueError, match="divide percent by 100"):
        percent.step()
    assert scheduler.step(val_accuracy=1.0000001).val_accuracy > 1  # a rounding error


# When it is called.


def test_steps_without_training_decide_nothing_and_say_so_once():
    """Nothing learned, nothing kept: a seed is not carried to its end by calls alone."""
    eager = HeuristicConfig(patience=1, min_improvement=0.9, holding_decisions=1)
    scheduler = make_scheduler(HeuristicController(eager))
    while not scheduler.model.slot_state.live.any():
        train(scheduler)
        scheduler.step()
    before, decisions = scheduler.model.slot_state.state_dict(), len(scheduler.decisions)
    with pytest.warns(UserWarning, match="has not made a step since the call before, so nothing is decided"):
        decision = scheduler.step()
    assert (decision.action, decision.changes) == (Action(), ())
    for _ in range(30):
        scheduler.step()  # a second warning would be an error
    assert str(scheduler.model.slot_state.state_dict()) == str(before)
    assert len(scheduler.decisions) == decisions
    train(scheduler)
    assert scheduler.step().index == decisions


def test_training_before_a_save_counts_after_it():
    scheduler, fresh = make_scheduler(), make_scheduler()
    train(scheduler)
    fresh.load_state_dict(scheduler.state_dict())
    fresh.step()
    assert len(fresh.decisions) == 1


def test_a_state_that_does_not_say_what_was_trained_is_believed():
    scheduler, fresh = make_scheduler(), make_scheduler()
    state = scheduler.state_dict()
    del state["optimizer_steps"], state["governor"]
    fresh.load_state_dict(state)
    fresh.step()
    assert len(fresh.decisions) == 1


def test_a_step_for_every_batch_is_warned_about_once():
    scheduler = make_scheduler()
    for _ in range(usage.SINGLE_STEPS - 1):
        train(scheduler, batches=1)
        scheduler.step()
    train(scheduler, batches=1)
    with pytest.warns(UserWarning, match="once per host epoch, not for every batch"):
        scheduler.step()
    for _ in range(usage.SINGLE_STEPS):
        train(scheduler, batches=1)
        scheduler.step()


def test_a_call_beyond_the_horizon_is_warned_about_once():
    scheduler = make_scheduler(horizon=2)
    for _ in range(2):
        train(scheduler)
        scheduler.step()
    train(scheduler)
    with pytest.warns(UserWarning, match="beyond the horizon of 2 host epochs"):
        scheduler.step()
    train(scheduler)
    scheduler.step()


def test_a_step_that_is_never_called_is_warned_about_once(monkeypatch):
    monkeypatch.setattr(usage, "UNCALLED_STEPS", 5)
    scheduler = make_scheduler()
    train(scheduler, batches=4)
    with pytest.warns(UserWarning, match=r"5 optimizer steps have passed and .* step\(\) was never called"):
        train(scheduler, batches=1)
    train(scheduler, batches=10)
    called = make_scheduler()
    train(called, batches=1)
    called.step()
    train(called, batches=10)


# What it leaves alone.


class Noisy(nn.Module):
    """A host whose layers draw from every global stream."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.drop = nn.Linear(6, 6), nn.Linear(6, 2), nn.Dropout(0.3)

    def forward(self, x):
        h = self.drop(self.first(x).relu())
        if self.training:
            h = h * random.uniform(0.9, 1.1) + np.random.normal() * 0.01  # noqa: NPY002
        return self.second(h)


HOSTS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 2)), ["2"]),
    "batch norm": (lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)), ["2"]),
    "conv": (
        lambda: nn.Sequential(
            nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 3, padding=1), nn.Dropout2d(0.3), nn.Flatten(), nn.Linear(24, 2)
        ),
        ["1"],
    ),
    "python and numpy": (Noisy, ["first"]),
}


def seed_everything() -> None:
    torch.manual_seed(3)
    np.random.seed(3)  # noqa: NPY002
    random.seed(3)


def run_plain(host, grow) -> list[bytes]:
    """Four host epochs; every weight, buffer and random stream after each."""
    seed_everything()
    host = host()
    model, step = grow(host)
    optimizer = Adam(host.parameters(), lr=0.01) if step is None else step[0]
    seen = []
    for _ in range(4):
        model.train()
        for batch in torch.randperm(8).split(4):
            optimizer.zero_grad()
            cross_entropy(model(X[batch]), Y[batch]).backward()
            optimizer.step()
        if step is not None:
            step[1].step()
        streams = [torch.get_rng_state().numpy().tobytes(), str(np.random.get_state()).encode()]  # noqa: NPY002
        seen += [*streams, str(random.getstate()).encode()]
        seen += [tensor.detach().numpy().tobytes() for tensor in host.state_dict().values()]
    return seen


@pytest.mark.parametrize("controller", ["wait", "pretrained", "heuristic", "random"])
@pytest.mark.parametrize("name", HOSTS)
def test_slots_without_growth_change_nothing_draw_for_draw(name, controller):
    make, slots = HOSTS[name]

    def wrapped(host):
        model = GrowableModel(host, slots, example_input=X)
        optimizer = Adam(model.parameters(), lr=0.01)

        def evaluate():
            model.train()  # a careless user, who draws
            random.random()
            np.random.normal()  # noqa: NPY002
            return {"val_loss": float(cross_entropy(model(X), Y))}

        scheduler = GrowthScheduler(model, optimizer, controller, evaluate=evaluate, horizon=4)
        if controller != "wait":  # what decides is built and asked, but told to wait
            act = scheduler.controller.act

            def wait(facts):
                rows = act(facts)
                assert isinstance(rows, np.ndarray)
                return rows * 0

            scheduler.controller.act = wait
        return model, (optimizer, scheduler)

    assert run_plain(make, wrapped) == run_plain(make, lambda host: (host, None))


# Modules outside the model.


class Outer(nn.Module):
    """A network of which a part grows; the rest has dropout and batch statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.body = make_model()
        self.norm, self.drop, self.head = nn.BatchNorm1d(2), nn.Dropout(0.5), nn.Linear(2, 2)
        self.frozen = nn.Dropout(0.9).eval()

    def forward(self, x):
        h = self.drop(self.norm(self.body(x)))
        return self.head(nn.functional.dropout(h, 0.5, self.training))


def test_modules_around_the_model_are_evaluated_in_evaluation_mode_and_put_back():
    outer, beside = Outer().train(), nn.Dropout(0.5).train()
    optimizer = SGD(outer.parameters(), lr=0.01)
    found = []

    def evaluate():
        losses = [float(cross_entropy(beside(outer(X)), Y)) for _ in range(3)]
        found.append(set(losses))
        return {"val_loss": losses[0]}

    scheduler = GrowthScheduler(
        outer.body, optimizer, ScriptedController([Action("germinate", "2", "mlp")]), evaluate=evaluate
    )
    outer.frozen.eval()
    for _ in range(3):
        cross_entropy(outer(X), Y).backward()
        optimizer.step()
        assert outer.norm.running_mean is not None
        statistics = outer.norm.running_mean.clone()
        scheduler.step()
        assert torch.equal(outer.norm.running_mean, statistics)
        assert all(part.training for part in (outer, outer.norm, outer.drop, outer.body, outer.body.host, beside))
        assert not outer.frozen.training
    assert len(found) > 3  # ablations too
    assert all(len(losses) == 1 for losses in found), found
    assert not torch.nn.modules.module._global_forward_pre_hooks


def test_an_evaluation_that_fails_puts_modes_back():
    beside = nn.Dropout(0.5).train()

    def evaluate():
        beside(X)
        raise RuntimeError("no data")

    scheduler = make_scheduler(evaluate=evaluate)
    train(scheduler)
    with pytest.raises(RuntimeError, match="no data"):
        scheduler.step()
    assert beside.training
    assert not torch.nn.modules.module._global_forward_pre_hooks


@pytest.mark.slow
def test_a_compiled_network_is_evaluated_without_a_warning():
    model = make_model()
    compiled = torch.compile(model, backend="eager")
    scheduler = make_scheduler(
        Answers(lambda a: a), model, evaluate=lambda: {"val_loss": float(cross_entropy(compiled(X), Y))}
    )
    for _ in range(3):
        train(scheduler)
        scheduler.step()
    assert np.isfinite(model.slot_state.contribution).all()
    assert model.slot_state.contribution[0, 0] != 0  # the compiled graph runs without the seed too


# Other threads.


def test_inference_in_another_thread_never_sees_seeds_switched_off():
    """A thread asks the network between any two moments of a step; the step's own thread sees the ablation."""
    model = make_model().eval()
    scheduler = make_scheduler(model=model)
    model.plant("2", "mlp")
    model.slot_state.stage[0, 0] = Stage.HOLDING  # a live seed that speaks
    branch = seed_of(model, "2").branch
    assert isinstance(branch, nn.Sequential)
    last = branch[-1]
    assert isinstance(last, nn.Linear)
    with torch.no_grad():
        nn.init.ones_(last.weight)
    answers, own = [], []

    def ask(into):
        with torch.no_grad():
            into.append(model(X).numpy().tobytes())

    def evaluate():
        ask(own)
        other = threading.Thread(target=ask, args=(answers,))
        other.start()
        other.join()
        return {"val_loss": float(cross_entropy(model(X), Y))}

    scheduler = make_scheduler(model=model, evaluate=evaluate)
    train(scheduler)
    ask(truth := [])
    scheduler.step()
    assert len(set(own)) == 2  # with the seed, and without it
    assert set(answers) == set(truth)


def test_an_evaluation_in_another_thread_is_told_that_it_measures_nothing():
    """Switching a seed off holds for the thread that asked."""
    model = make_model().eval()
    model.plant("2", "mlp")

    def evaluate():
        with ThreadPoolExecutor(1) as pool, torch.no_grad():
            return {"val_loss": float(cross_entropy(pool.submit(model, X).result(), Y))}

    scheduler = make_scheduler(model=model, evaluate=evaluate)
    train(scheduler)
    with pytest.warns(UserWarning, match="ran the seed in slot '2' in another thread than step"):
        scheduler.step()


def test_two_threads_may_switch_the_same_seed():
    model = make_model().eval()
    model.plant("2", "mlp")
    seed = seed_of(model, "2")
    seen = {}

    def look(name, alpha, entered, leave):
        with torch.no_grad():
            seed.override = alpha
            entered.set()
            leave.wait(10)
            seen[name] = seed.override
            seed.override = None

    events = [threading.Event() for _ in range(4)]
    threads = [threading.Thread(target=look, args=(i, 0.25 * i, events[2 * i], events[2 * i + 1])) for i in range(2)]
    for thread in threads:
        thread.start()
    for event in events[::2]:
        event.wait(10)
    assert seed.override is None
    for event in events[1::2]:
        event.set()
    for thread in threads:
        thread.join()
    assert seen == {0: 0.0, 1: 0.25}
    assert not seed._overrides


def test_no_warning_of_ours_in_an_ordinary_training():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler = make_scheduler("heuristic", horizon=8)
        for _ in range(8):
            train(scheduler)
            scheduler.step()
