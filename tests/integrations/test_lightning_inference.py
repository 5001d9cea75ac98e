"""`trainer.test`, `validate` and `predict` with networks that have grown, in the same trainer and in a fresh one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.lightning_runs import LitNet, X, Y, make_trainer, scripted, train_data, val_data
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from simic.integrations.lightning import GrowthCallback

pytestmark = [
    pytest.mark.integrations,
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed:UserWarning"),
]
PREDICTED = DataLoader(X, batch_size=20)  # pyright: ignore[reportArgumentType]: a tensor is a dataset


class WithPredictStep(LitNet):
    """Predicts from batches that are pairs."""

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, LitNet, Path]:
    """A trainer, its module with two seeds, of which one is being blended in, and a checkpoint of it."""
    folder = tmp_path_factory.mktemp("trained")
    module = LitNet()
    trainer = make_trainer(folder, scripted(), ModelCheckpoint(folder, save_last=True), max_epochs=4)
    trainer.fit(module, train_data(), val_data())
    return trainer, module, folder / "last.ckpt"


@torch.no_grad()
def exported_logits(module: LitNet) -> Tensor:
    """Of the plain network that the module's exports as, which nothing of simic computes."""
    return module.net.export(live="keep")(X)


def test_the_trainer_that_grew_a_network_tests_and_predicts_with_it(trained):
    trainer, module, _ = trained
    expected = exported_logits(module)
    torch.testing.assert_close(torch.cat(trainer.predict(module, PREDICTED)), expected)
    (metrics,) = trainer.test(module, DataLoader(TensorDataset(X, Y), batch_size=len(X)), verbose=False)
    assert metrics["test_loss"] == pytest.approx(cross_entropy(expected, Y).item(), rel=1e-5)
    decisions = len(trainer.callbacks[0].growth.decisions)
    assert decisions == 3  # none of these runs decides


@pytest.mark.parametrize(("kind", "data"), [(LitNet, PREDICTED), (WithPredictStep, val_data())])
def test_a_fresh_trainer_predicts_with_what_a_checkpoint_holds(kind, data, trained, tmp_path):
    """Also by Lightning's own predict_step, which calls the module."""
    _, module, path = trained
    fresh = kind()
    predicted: Any = make_trainer(tmp_path, scripted()).predict(fresh, data, ckpt_path=path)
    assert fresh.net.grown_slots == ["stem", "body"]
    inputs = X if kind is LitNet else X[:24] + 0.1
    with torch.no_grad():
        expected = module.eval()(inputs)
    assert torch.equal(torch.cat(predicted), expected)


def test_a_fresh_trainer_tests_what_a_checkpoint_holds(trained, tmp_path):
    trainer, module, path = trained
    (expected,) = trainer.test(module, val_data(), verbose=False)
    fresh = LitNet()
    (found,) = make_trainer(tmp_path, scripted()).test(fresh, val_data(), ckpt_path=path, verbose=False)
    assert found == expected
    assert fresh.net.grown_slots == ["stem", "body"]


def test_without_the_callback_a_grown_checkpoint_is_refused(trained, tmp_path):
    _, _, path = trained
    with pytest.raises(RuntimeError, match="Unexpected key"):
        make_trainer(tmp_path).predict(LitNet(), PREDICTED, ckpt_path=path)


def test_a_network_that_never_grew_predicts_as_without_the_callback(tmp_path):
    module = LitNet()
    with torch.no_grad():
        expected = module.eval()(X)
    predicted: Any = make_trainer(tmp_path, GrowthCallback(["stem"], "wait")).predict(module, PREDICTED)
    assert torch.equal(torch.cat(predicted), expected)
