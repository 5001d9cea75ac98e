"""Lightning's checkpoints of networks that grow: resuming is exact, and older structures come back."""

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from helpers.lightning_runs import (
    GROW,
    LitNet,
    X,
    digest,
    keep_all,
    make_net,
    make_trainer,
    scripted,
    train_data,
    val_data,
)
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.nn.functional import cross_entropy

from simic import Action, GrowableModel, HeuristicController, LifecycleConfig, RandomController, ScriptedController
from simic.integrations.lightning import GrowthCallback, load_from_checkpoint

pytestmark = [
    pytest.mark.integrations,
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed:UserWarning"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists:UserWarning"),
]
EPOCHS = 6


class ByHand(LitNet):
    """Two optimizers, stepped by hand, with a head outside the network that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.last = nn.Linear(2, 2)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = cast(list[Any], self.optimizers())
        first.zero_grad()
        second.zero_grad()
        self.manual_backward(cross_entropy(self.last(self.net(batch[0])), batch[1]))
        first.step()
        second.step()

    def configure_optimizers(self) -> Any:
        whole = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        return whole, torch.optim.AdamW(self.last.parameters(), lr=0.01)


class OwnWrapper(LitNet):
    """Builds its GrowableModel itself."""

    def __init__(self) -> None:
        super().__init__()
        self.net = GrowableModel(make_net(), ["stem", "body"], example_input=X[:2])


RUNS: dict[str, tuple[type[LitNet], Any, dict[str, Any]]] = {
    "scripted": (LitNet, scripted, {}),
    "saved after training epochs": (LitNet, scripted, {"checkpoint": {"save_on_train_epoch_end": True}}),
    "heuristic": (LitNet, lambda: GrowthCallback(["stem", "body"], HeuristicController()), {"max_epochs": 9}),
    "random": (LitNet, lambda: GrowthCallback(["stem", "body"], RandomController(4), governor=True), {"max_epochs": 9}),
    "own wrapper": (OwnWrapper, lambda: GrowthCallback(controller=ScriptedController(GROW)), {}),
    "validated every second epoch": (
        LitNet,
        scripted,
        {
            "max_epochs": 8,
            "check_val_every_n_epoch": 2,
            "num_sanity_val_steps": 0,
            "checkpoint": {"save_on_train_epoch_end": True},
        },
    ),
    "two optimizers": (ByHand, lambda: scripted(module="net"), {}),
    "accumulated, clipped, bf16": (
        LitNet,
        scripted,
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1, "precision": "bf16-mixed"},
    ),
}


def run(directory: Path, name: str, ckpt_path: Path | None = None, **more: Any):
    """Train one of RUNS, from a checkpoint or from the start, with checkpoints in the directory."""
    make_module, make_callback, given = RUNS[name]
    settings: dict[str, Any] = {"max_epochs": EPOCHS} | given | more
    checkpoint = keep_all(directory, **settings.pop("checkpoint", {}))
    callback, module = make_callback(), make_module()
    trainer = make_trainer(directory, callback, checkpoint, **settings)
    trainer.fit(module, train_data(), val_data(), ckpt_path=ckpt_path)
    return module, callback, trainer


@pytest.mark.parametrize("name", RUNS)
def test_resumed_from_any_checkpoint_a_run_ends_in_the_same_bits(name, tmp_path):
    """Weights, optimizer states, groups, learning rates and decisions; some checkpoints are written within a blend."""
    module, callback, trainer = run(tmp_path / "whole", name)
    expected, decisions = digest(module, trainer), callback.growth.decisions
    assert module.net.grown_slots or name == "random"
    files = sorted((tmp_path / "whole").glob("*.ckpt"))
    assert len(files) >= EPOCHS
    for file in files[:-1] if name == "scripted" else files[1:-1:2]:
        resumed, again, its_trainer = run(tmp_path / "resumed", name, file)
        assert digest(resumed, its_trainer) == expected, file.name
        tail = decisions[len(decisions) - len(again.growth.decisions) :]
        assert repr(again.growth.decisions) == repr(tail), file.name  # NaN does not equal itself
    if name == "scripted":
        alphas = [torch.load(file)["state_dict"].get("net.growth") for file in files]
        assert alphas[0] is None  # saved before the first decision
        assert alphas[1] is not None


def test_a_checkpoint_holds_the_network_that_was_validated(tmp_path):
    """Whatever was decided afterwards: its score is reproduced to the last bit, in a fresh module."""
    checkpoint = ModelCheckpoint(tmp_path, monitor="val_loss", save_top_k=3, filename="{epoch}")
    module, callback = LitNet(), scripted()
    trainer = make_trainer(tmp_path, callback, checkpoint, max_epochs=EPOCHS)
    trainer.fit(module, train_data(), val_data())
    assert len(checkpoint.best_k_models) == 3
    for path, score in checkpoint.best_k_models.items():
        fresh = make_trainer(tmp_path, scripted())
        (metrics,) = fresh.validate(LitNet(), val_data(), ckpt_path=path, verbose=False)
        assert metrics["val_loss"] == score.item()


@pytest.mark.parametrize("fresh", [True, False])
def test_best_may_have_an_older_structure(fresh, tmp_path):
    """The first epoch is made the best: testing, validating and resuming go back to the network without seeds."""
    checkpoint = ModelCheckpoint(tmp_path, monitor="val_loss", mode="max", save_top_k=3, filename="{epoch}")
    module, callback = LitNet(), scripted()
    trainer = make_trainer(tmp_path, callback, checkpoint, max_epochs=EPOCHS)
    trainer.fit(module, train_data(), val_data())
    assert checkpoint.best_model_path.endswith("epoch=0.ckpt")
    assert module.net.grown_slots == ["stem", "body"]
    expected = digest(module, trainer)
    tested = LitNet() if fresh else module
    trainer.test(tested, val_data(), ckpt_path="best", verbose=False)
    assert tested.net.grown_slots == []
    (metrics,) = trainer.validate(tested, val_data(), ckpt_path="best", verbose=False)
    assert metrics["val_loss"] == cast(torch.Tensor, checkpoint.best_model_score).item()
    # From the best on, the run goes as it went.
    again = make_trainer(tmp_path / "again", scripted(), max_epochs=EPOCHS)
    again.fit(tested, train_data(), val_data(), ckpt_path=checkpoint.best_model_path)
    assert tested.net.grown_slots == ["stem", "body"]
    assert digest(tested, again) == expected


def test_going_back_to_an_older_structure_in_the_same_trainer(tmp_path):
    """After testing the best one, `fit` goes on from there, with the state that belongs to it."""
    checkpoint = ModelCheckpoint(tmp_path, monitor="val_loss", mode="max", filename="{epoch}")
    module, callback = LitNet(), scripted()
    trainer = make_trainer(tmp_path, callback, checkpoint, max_epochs=4)
    trainer.fit(module, train_data(), val_data())
    trainer.test(module, val_data(), ckpt_path="best", verbose=False)
    other = make_trainer(tmp_path / "other", callback, max_epochs=2)
    other.fit(module, train_data(), val_data())
    assert [decision.index for decision in callback.growth.decisions] == [0, 1]
    assert module.net.grown_slots == ["body"]


def grown_file(directory: Path, **settings: Any) -> tuple[LitNet, Path]:
    """A trained module and its last checkpoint, written within a blend."""
    checkpoint = ModelCheckpoint(directory, save_last=True, **settings)
    module = LitNet(lr=0.04)
    trainer = make_trainer(directory, scripted(), checkpoint, max_epochs=4)
    trainer.fit(module, train_data(), val_data())
    return module, directory / "last.ckpt"


def same_output(one: LightningModule, other: LightningModule) -> bool:
    with torch.no_grad():
        return torch.equal(one.eval()(X), other.eval()(X))


def test_load_from_checkpoint_needs_the_class_and_the_path(tmp_path):
    module, path = grown_file(tmp_path)
    loaded = load_from_checkpoint(LitNet, path)
    assert type(loaded) is LitNet
    assert loaded.hparams["lr"] == 0.04
    assert isinstance(loaded.net, GrowableModel)
    assert loaded.net.grown_slots == ["stem", "body"]
    assert loaded.net.slot_state.alpha.tolist() == module.net.slot_state.alpha.tolist()
    assert same_output(loaded, module)
    assert load_from_checkpoint(LitNet, path, lr=0.5).hparams["lr"] == 0.5


def test_a_module_that_wraps_itself_loads_by_itself(tmp_path):
    module = OwnWrapper()
    trainer = make_trainer(tmp_path, GrowthCallback(controller=ScriptedController(GROW)), max_epochs=4)
    trainer.fit(module, train_data(), val_data())
    trainer.save_checkpoint(tmp_path / "file.ckpt")
    for loaded in (
        OwnWrapper.load_from_checkpoint(tmp_path / "file.ckpt"),
        load_from_checkpoint(OwnWrapper, tmp_path / "file.ckpt"),
    ):
        assert loaded.net.grown_slots == ["stem", "body"]
        assert same_output(loaded, module)


def test_lifecycle_and_topologies_come_back_too(tmp_path):
    class Texts(LitNet):
        """Signals of length 6, for which only the user knows whether channels come first."""

        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Unflatten(1, (3, 2)), nn.Identity(), nn.Flatten(), nn.Linear(6, 2))

    slots = {"1": "sequence"}
    lifecycle = LifecycleConfig(seeds_per_slot=2, max_seeds=1)
    callback = GrowthCallback(slots, "wait", lifecycle=lifecycle, rng_seed=5)
    module = Texts()
    trainer = make_trainer(tmp_path, callback, max_epochs=1)
    trainer.fit(module, train_data(), val_data())
    trainer.save_checkpoint(tmp_path / "file.ckpt")
    loaded = load_from_checkpoint(Texts, tmp_path / "file.ckpt").net
    assert (loaded.sites, loaded.lifecycle, loaded.rng_seed) == (module.net.sites, lifecycle, 5)


def test_an_example_that_no_checkpoint_may_hold_is_asked_for(tmp_path):
    class Scaled(LitNet):
        """Its network takes an object beside the tensor."""

        def __init__(self) -> None:
            super().__init__()
            inner = make_net()
            self.net = nn.Module()
            self.net.add_module("inner", inner)
            self.net.forward = lambda x, scale=Path("1"): inner(x * float(scale.name))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return cross_entropy(self.net(batch[0], Path("2")), batch[1])

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", self.training_step(batch, batch_idx))

    trainer = make_trainer(tmp_path, GrowthCallback(["inner.body"], "wait"), max_epochs=1)
    trainer.fit(Scaled(), train_data(), val_data())
    trainer.save_checkpoint(tmp_path / "file.ckpt")
    with pytest.raises(ValueError, match=r"does not hold example_input of the network.*pass callback="):
        load_from_checkpoint(Scaled, tmp_path / "file.ckpt")


def test_without_simic_seeds_are_not_lost_silently(tmp_path):
    _, path = grown_file(tmp_path)
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\) in state_dict: .*net.seeds"):
        LitNet.load_from_checkpoint(path)
    with pytest.warns(UserWarning, match=r"not in the model state dict but in the checkpoint.*net.seeds"):
        LitNet.load_from_checkpoint(path, strict=False)
    trainer = make_trainer(tmp_path / "other", max_epochs=8)
    with pytest.raises(RuntimeError, match="Unexpected"):
        trainer.fit(LitNet(), train_data(), val_data(), ckpt_path=path)


def test_a_file_of_weights_alone_needs_the_callback(tmp_path):
    module, path = grown_file(tmp_path, save_weights_only=True)
    with pytest.raises(ValueError, match=r"holds net.growth, but not how the network was wrapped"):
        load_from_checkpoint(LitNet, path)
    with pytest.raises(ValueError, match="needs example_input"):
        load_from_checkpoint(LitNet, path, callback=scripted())
    assert same_output(load_from_checkpoint(LitNet, path, callback=scripted(example_input=X[:2])), module)


def test_a_checkpoint_from_before_growth_can_be_grown_from(tmp_path):
    """A run without simic is continued with the callback."""
    trainer = make_trainer(tmp_path, max_epochs=2)
    trainer.fit(LitNet(), train_data(), val_data())
    trainer.save_checkpoint(tmp_path / "plain.ckpt")
    module, callback = LitNet(), scripted()
    again = make_trainer(tmp_path, callback, max_epochs=5)
    again.fit(module, train_data(), val_data(), ckpt_path=tmp_path / "plain.ckpt")
    assert [decision.index for decision in callback.growth.decisions] == [0, 1]
    assert module.net.grown_slots == ["body"]


def test_a_checkpoint_of_another_callback_is_refused(tmp_path):
    _, path = grown_file(tmp_path)
    with pytest.raises(ValueError, match=r"holds seeds in slots stem, body, but no state of .*'net'.*, only of"):
        make_trainer(tmp_path, scripted(module="net"), max_epochs=8).fit(
            LitNet(), train_data(), val_data(), ckpt_path=path
        )
    other = GrowthCallback(["stem", "body"], "heuristic")
    with pytest.raises(ValueError, match="written with a ScriptedController, this scheduler has a HeuristicController"):
        make_trainer(tmp_path, other, max_epochs=8).fit(LitNet(), train_data(), val_data(), ckpt_path=path)
    other = scripted(slots=["body"], controller=ScriptedController({0: Action("germinate", "body", "mlp")}))
    with pytest.raises(ValueError, match="the checkpoint's slots are"):
        make_trainer(tmp_path, other, max_epochs=8).fit(LitNet(), train_data(), val_data(), ckpt_path=path)


def test_a_checkpoint_of_other_slots_is_refused_although_nothing_had_grown(tmp_path):
    """Its weights would fit; what controller and history remember would not. Refused before the first batch."""
    trainer = make_trainer(tmp_path, GrowthCallback(["stem", "body"], "wait"), max_epochs=2)
    trainer.fit(LitNet(), train_data(), val_data())
    trainer.save_checkpoint(tmp_path / "ungrown.ckpt")
    other, module = GrowthCallback(["body"], "wait"), LitNet()
    again = make_trainer(tmp_path, other, max_epochs=4)
    with pytest.raises(ValueError, match=r"growth has the slots \['stem', 'body'\], here they are \['body'\]; build"):
        again.fit(module, train_data(), val_data(), ckpt_path=tmp_path / "ungrown.ckpt")
    assert again.fit_loop.epoch_loop.batch_progress.current.ready == 0
    # Tested, it is a network like any other.
    (expected,) = trainer.test(LitNet(), val_data(), ckpt_path=tmp_path / "ungrown.ckpt", verbose=False)
    fresh = make_trainer(tmp_path, GrowthCallback(["body"], "wait"))
    assert fresh.test(LitNet(), val_data(), ckpt_path=tmp_path / "ungrown.ckpt", verbose=False) == [expected]
