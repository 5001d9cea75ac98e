"""Contributions with their standard error, where `evaluate` returns one value per batch."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from simic import Action, GrowableModel, GrowthScheduler, ScriptedController
from simic.scheduler.metric_values import average_values

X = torch.linspace(-1, 1, 12 * 4).view(12, 4).sin()
Y = X[:, :2] * X[:, 2:]
PLAN = {0: Action("germinate", "0", "mlp", tempo=3), 3: Action("advance", "0"), 4: Action("fossilize", "0")}


def losses(model: nn.Module) -> torch.Tensor:
    """One per batch of three."""
    with torch.no_grad():
        return torch.stack([mse_loss(model(x), y) for x, y in zip(X.split(3), Y.split(3), strict=True)])


def make(read=lambda values: values) -> GrowthScheduler:
    torch.manual_seed(0)
    host = nn.Sequential(nn.Sequential(nn.Linear(4, 8), nn.Tanh()), nn.Linear(8, 2))
    model = GrowableModel(host, ["0"], example_input=X)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    evaluate = lambda: {"val_loss": read(losses(model))}  # noqa: E731
    return GrowthScheduler(model, optimizer, ScriptedController(PLAN), evaluate=evaluate)


def train(growth: GrowthScheduler, epochs: int) -> None:
    for _ in range(epochs):
        for _ in range(4):
            growth.optimizer.zero_grad()
            mse_loss(growth.model(X), Y).backward()
            growth.optimizer.step()
        growth.step()


def test_the_error_is_that_of_paired_differences(capsys):
    growth = make()
    train(growth, 3)
    expected = []
    original = growth.evaluate
    assert original is not None

    def evaluate():
        values = original()
        expected.append(values["val_loss"].double().numpy())
        return values

    growth.evaluate = evaluate
    train(growth, 1)
    whole, without = expected
    differences = without - whole
    (report,) = growth.model.growth()
    assert report.contribution == pytest.approx(differences.mean())
    assert report.contribution_error == pytest.approx(np.std(differences, ddof=1) / 2)  # four batches
    assert growth.decisions[-1].val_loss == pytest.approx(whole.mean())
    (change,) = growth.decisions[-1].changes
    assert change.contribution_error == report.contribution_error
    assert f" +- {report.contribution_error:.2g}," in str(change)
    facts = growth.facts()
    assert facts.contribution_error is not None
    assert facts.contribution_error.tolist() == [[report.contribution_error]]
    growth.model.print_growth()
    assert f"{report.contribution:+.4f} +-" in " ".join(capsys.readouterr().out.split())


def test_plain_numbers_have_no_error_and_the_same_contribution():
    several, single = make(), make(lambda values: values.double().mean())
    for growth in (several, single):
        train(growth, 4)
    (with_error,), (without,) = several.model.growth(), single.model.growth()
    assert with_error.contribution == without.contribution
    assert math.isnan(without.contribution_error)
    assert np.isnan(single.facts().contribution_error).all()  # pyright: ignore[reportArgumentType, reportCallIssue]


def test_errors_survive_a_resume_and_end_with_their_contribution(tmp_path):
    growth = make()
    train(growth, 5)
    growth.save(tmp_path / "growth.safetensors")
    other = make()
    other.load(tmp_path / "growth.safetensors")
    assert other.model.growth() == growth.model.growth()
    assert other.decisions[-2].changes == growth.decisions[-2].changes
    assert not math.isnan(other.model.growth()[0].contribution_error)
    state = growth.state_dict()
    del state["contribution_errors"]  # as written before there were any
    other.load_state_dict(state)
    assert math.isnan(other.model.growth()[0].contribution_error)
    growth.model.slot_state.contribution[:] = 0.125
    assert math.isnan(growth.model.growth()[0].contribution_error)


def test_a_failed_step_leaves_the_errors_as_they_were():
    growth = make()
    train(growth, 3)
    before, controller = growth.model.growth(), growth.controller
    growth.controller = ScriptedController({3: Action("germinate", "0", "mlp")})  # the slot is taken
    with pytest.raises(ValueError, match="cannot germinate"):
        train(growth, 1)
    assert growth.model.growth() == before
    assert not math.isnan(before[0].contribution_error)
    growth.controller = controller
    growth.step()


def test_other_batches_with_the_seed_off_are_refused():
    calls = iter(range(100))
    growth = make(lambda values: values[: 4 - next(calls) % 2])
    train(growth, 1)
    with pytest.raises(ValueError, match=r"evaluate returned \d values .* and \d with a seed switched"):
        train(growth, 3)


@pytest.mark.parametrize("value", [[0.5, 1.5], (0.5, 1.5), np.array([0.5, 1.5]), torch.tensor([0.5, 1.5])])
def test_kinds_of_several_values(value):
    metrics, several = average_values({"f1": value, "note": "x", "one": [3.0]})
    assert metrics == {"f1": 1.0, "note": "x", "one": [3.0]}
    assert several["f1"].tolist() == [0.5, 1.5]
    assert list(several) == ["f1"]


@pytest.mark.parametrize(
    "value", [["a", "b"], [0.5, "b"], [[1.0], [2.0]], torch.zeros(2, 2), np.array(["a", "b"]), None]
)
def test_what_is_not_several_numbers_stays(value):
    metrics, several = average_values({"f1": value})
    assert metrics["f1"] is value
    assert not several
