"""What a training loop tells about itself: the same as stacked hosts, measured by hand, and kept in checkpoints."""

import math
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import LambdaLR

from simic import GrowableModel, GrowthScheduler
from simic.control.facts import TRAINING_FACTS, Facts
from simic.control.features import BASE_FEATURES, SLOT_FEATURES
from simic.control.observation import observe
from simic.environment.config import EpisodeConfig
from simic.environment.host_trainings import HostTrainings
from simic.environment.seeding import tells_data
from simic.lifecycle.actions import HEADS
from simic.stacked.data import StackedData
from simic.stacked.optimizer import OptimizerConfig
from simic.tasks.registry import make_task
from simic.tasks.task import evaluate

TASK = make_task("teacher-mlp", width=4, num_slots=2, train_size=256)
HOST_EPOCHS, HORIZON = 3, 6
RNG_SEED = next(rng_seed for rng_seed in range(9) if tells_data(rng_seed))
X, Y = torch.linspace(-1, 1, 12).view(4, 3), torch.tensor([0.0, 1.0, 2.0, 3.0]).view(4, 1)


class Recorder:
    """Waits, and keeps the facts it was shown."""

    def __init__(self) -> None:
        self.seen: list[Facts] = []

    def act(self, facts: Facts) -> np.ndarray:
        self.seen.append(facts)
        return np.zeros((1, len(HEADS)), dtype=np.int64)


def stacked_facts() -> Facts:
    trainings = HostTrainings(TASK, [RNG_SEED], episode=EpisodeConfig(horizon=HORIZON))
    for _ in range(HOST_EPOCHS):
        trainings.step(np.zeros((1, len(HEADS)), dtype=np.int64))
    return trainings.facts()


def looped_facts() -> Facts:
    """The same training as a user would write it."""
    task = TASK.for_host(TASK.draw(RNG_SEED))
    with torch.random.fork_rng():
        torch.manual_seed(RNG_SEED)
        model = GrowableModel(task.make_host(), task.slots, example_input=task.data.train_x[:2])
    optimizer = AdamW(model.parameters(), lr=task.learning_rate, weight_decay=OptimizerConfig().weight_decay)
    rate = LambdaLR(optimizer, lambda host_epoch: (1 + math.cos(math.pi * host_epoch / HORIZON)) / 2)

    def validate() -> dict[str, Any]:
        logits = model(task.data.validation_x)
        hits = (logits.argmax(-1) == task.data.validation_y).float()
        return {"val_loss": evaluate(model, task)["loss"], "val_accuracy": hits}

    recorder = Recorder()
    growth = GrowthScheduler(model, optimizer, recorder, rate, evaluate=validate, train_samples=256, horizon=HORIZON)
    data = StackedData([task.data], [RNG_SEED], batch_size=task.batch_size)
    for _ in range(HOST_EPOCHS):
        losses = []
        for x, y in data.batches():
            optimizer.zero_grad()
            loss = growth.loss(lambda x=x, y=y: task.loss(model(x[0]), y[0]))
            loss.backward()
            losses.append(float(loss.detach()))
            nn.utils.clip_grad_norm_(model.parameters(), OptimizerConfig().max_gradient_norm)
            optimizer.step()
        rate.step()
        growth.step(None, train_loss=float(np.mean(losses)))
    return recorder.seen[-1]


def test_stacked_hosts_and_a_users_loop_tell_the_same():
    stacked, looped = stacked_facts(), looped_facts()
    loose = {"metric_error": 0.1, "gradient": 0.1, "gradient_to_weight": 0.1}  # measured at some steps only
    there, here = observe(stacked), observe(looped)
    new = BASE_FEATURES.names[BASE_FEATURES.names.index("batches") :]
    for name in ("val_accuracy", "train_loss_change.over_1", "overfitting", "host_size", "gradient", *new):
        index = BASE_FEATURES.names.index(name)
        expected = pytest.approx(float(there.base[0, index]), abs=loose.get(name, 2e-3))
        assert float(here.base[0, index]) == expected, name
    rest = np.array([name != "stage_age" for name in SLOT_FEATURES.names])  # its first decision is an epoch later
    np.testing.assert_allclose(here.slots[0, :, rest], there.slots[0, :, rest], atol=1e-6)
    for name in TRAINING_FACTS:
        assert np.isfinite(getattr(looped, name)).all(), name


def small(optimizer_of: Any, **settings: Any) -> tuple[GrowthScheduler, Recorder]:
    torch.manual_seed(0)
    host = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 1))
    model, recorder = GrowableModel(host, ["0"], example_input=X), Recorder()
    growth = GrowthScheduler(
        model, optimizer_of(model.parameters()), recorder, evaluate=lambda: {"val_loss": 1.0}, **settings
    )
    return growth, recorder


def train(growth: GrowthScheduler, *scales: float, watched: bool = True) -> list[float]:
    """One step per scale of the targets; the losses."""
    losses = []
    for scale in scales:
        growth.optimizer.zero_grad()
        closure = lambda scale=scale: nn.functional.mse_loss(growth.model(X), scale * Y)  # noqa: E731
        loss = growth.loss(closure) if watched else closure()
        loss.backward()
        growth.optimizer.step()
        losses.append(loss.item())
    return losses


def test_noise_steps_and_norm_by_hand():
    growth, recorder = small(lambda parameters: SGD(parameters, lr=1e-4))
    losses = train(growth, 1.0, 2.0, 3.0)
    growth.step()
    (facts,) = recorder.seen
    assert facts.batches.tolist() == [3]
    assert facts.loss_noise[0] == pytest.approx(np.std(losses) / np.mean(losses))
    norm = math.sqrt(sum(float(parameter.detach().square().sum()) for parameter in growth.model.parameters()))
    assert facts.host_weight_norm[0] == pytest.approx(norm)
    assert np.isnan([facts.train_samples[0], facts.metric_error[0]]).all()


def test_a_loop_that_does_not_pass_its_loss_leaves_the_noise_unknown():
    growth, recorder = small(lambda parameters: SGD(parameters, lr=1e-4))
    train(growth, 1.0, 2.0, watched=False)
    growth.step()
    assert np.isnan(recorder.seen[0].loss_noise).all()
    assert recorder.seen[0].batches.tolist() == [2]


def test_a_closure_of_the_optimizer_tells_its_loss():
    growth, recorder = small(lambda parameters: SGD(parameters, lr=1e-4))
    losses = []
    for scale in (1.0, 2.0):

        def closure(scale=scale) -> torch.Tensor:
            growth.optimizer.zero_grad()
            loss = nn.functional.mse_loss(growth.model(X), scale * Y)
            loss.backward()
            losses.append(loss.item())
            return loss

        growth.optimizer.step(closure)  # pyright: ignore[reportArgumentType, reportCallIssue]
    growth.step()
    assert recorder.seen[0].loss_noise[0] == pytest.approx(np.std(losses) / np.mean(losses))


class Unusual(SGD):
    """A plain optimizer of a user's own."""


@pytest.mark.parametrize(
    ("optimizer_of", "rate", "adaptive"),
    [
        (lambda parameters: AdamW(parameters, lr=3e-3), 3, 1),
        (lambda parameters: RMSprop(parameters, lr=3e-2), 3, 1),  # its own default is 0.01
        (lambda parameters: SGD(parameters, lr=0.1, momentum=0.9), 1, 0),
        (lambda parameters: SGD(parameters, lr=0.1), 0.1, 0),
        (lambda parameters: Unusual(parameters, lr=0.2), 0.2, 0),
        (lambda parameters: AdamW(parameters, lr=torch.tensor(1e-3), capturable=False, foreach=False), 1, 1),
    ],
)
def test_learning_rates_are_relative_to_the_optimizers_usual_one(optimizer_of, rate, adaptive):
    growth, recorder = small(optimizer_of)
    train(growth, 1.0)
    for group in growth.optimizer.param_groups:
        group["lr"] = group["lr"] * 0.5  # a scheduler that steps before `growth.step`: the rate used counts
    growth.step()
    train(growth, 1.0)
    growth.step()
    first, second = recorder.seen
    assert first.learning_rate[0] == pytest.approx(rate)
    assert second.learning_rate[0] == pytest.approx(rate / 2)
    assert second.first_learning_rate[0] == pytest.approx(rate)
    assert first.adaptive[0] == adaptive


def test_a_checkpoint_in_the_middle_of_a_host_epoch_forgets_nothing():
    plain = lambda parameters: SGD(parameters, lr=1e-4)  # noqa: E731
    whole, there = small(plain, train_samples=7)
    train(whole, 1.0)
    whole.step()
    train(whole, 2.0)
    saved = deepcopy((whole.state_dict(), whole.model.state_dict()))
    train(whole, 3.0)
    whole.step()
    resumed, here = small(plain, train_samples=7)
    resumed.model.load_state_dict(saved[1])
    resumed.load_state_dict(saved[0])
    train(resumed, 3.0)
    resumed.step()
    for name in TRAINING_FACTS:
        np.testing.assert_array_equal(getattr(here.seen[-1], name), getattr(there.seen[-1], name), err_msg=name)


def test_a_checkpoint_without_these_measurements_still_loads():
    growth, recorder = small(lambda parameters: SGD(parameters, lr=1e-4))
    train(growth, 1.0)
    growth.step()
    state = growth.state_dict()
    state["gradients"] = {"steps": 3, "norms": []}
    growth.load_state_dict(state)
    train(growth, 1.0)
    growth.step()
    assert recorder.seen[-1].batches.tolist() == [1]


@pytest.mark.parametrize("value", [0, -3, 2.5, "many"])
def test_a_number_of_samples_is_checked(value):
    with pytest.raises(ValueError, match="train_samples must be a number of samples, at least 1, or None, got"):
        small(lambda parameters: SGD(parameters, lr=0.1), train_samples=value)


def test_an_optimizer_without_a_learning_rate_leaves_it_unknown():
    class Fixed(Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {})

        def step(self, closure: Any = None) -> Any:
            pass

    growth, recorder = small(Fixed)
    train(growth, 1.0)
    growth.step()
    assert np.isnan(recorder.seen[0].learning_rate).all()
