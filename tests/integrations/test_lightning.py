"""GrowthCallback in Lightning's Trainer: what grows, how it is measured, what is logged, and mistakes that are told."""

import csv
import threading
from typing import Any, cast

import numpy as np
import pytest
import torch
from helpers.lightning_runs import (
    GROW,
    SLOTS,
    LitNet,
    X,
    Y,
    digest,
    make_net,
    make_trainer,
    scripted,
    train_data,
    val_data,
)
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    LearningRateMonitor,
    RichProgressBar,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy

from simic import Action, GrowableModel, HeuristicController, LifecycleConfig, ScriptedController, Stage
from simic.dashboard.run_view import RunWatcher
from simic.integrations.lightning import GrowthCallback, count_validations
from simic.integrations.lightning_validation import run_validation
from simic.scheduler.parameter_groups import SLOT_KEY

pytestmark = [
    pytest.mark.integrations,
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
]


def fit(directory, module: Any, *callbacks: Callback, max_epochs: int = 4, **settings: Any):
    """The trainer after it has trained; no checkpoints are written."""
    trainer = make_trainer(directory, *callbacks, max_epochs=max_epochs, enable_checkpointing=False, **settings)
    trainer.fit(module, train_data(), val_data())
    return trainer


# What grows.


def test_the_only_submodule_with_parameters_is_wrapped_and_grows(tmp_path):
    module, callback = LitNet(), scripted()
    fit(tmp_path, module, callback)
    assert isinstance(module.net, GrowableModel)
    assert callback.model is module.net
    assert module.net.slot_names == ("stem", "body")
    assert module.net.grown_slots == ["stem", "body"]
    assert [decision.action.op for decision in callback.growth.decisions] == ["germinate", "wait", "germinate"]
    assert cast(Tensor, module.net.example_input).shape == (2, 6)  # of a batch of 20
    assert "net.stem.0.weight" in module.state_dict()


def test_a_growable_model_that_the_user_built_is_used(tmp_path):
    module = LitNet()
    own = module.net = GrowableModel(make_net(), ["body"], example_input=X[:2])
    callback = GrowthCallback(controller=ScriptedController([Action("germinate", "body", "mlp")]))
    fit(tmp_path, module, callback, max_epochs=2)
    assert callback.model is own
    assert own.grown_slots == ["body"]


def test_every_optimizer_step_trains_the_seeds(tmp_path):
    module, callback = LitNet(), scripted()
    trainer = fit(tmp_path, module, callback, max_epochs=2)
    (optimizer,) = trainer.optimizers
    assert [group.get(SLOT_KEY) for group in optimizer.param_groups] == [None, "body"]
    seed = module.net.seed("body")
    newborn = module.net.newborn(1)
    assert all(optimizer.state[parameter]["step"] == 3 for parameter in seed.parameters())
    assert any(not torch.equal(a, b) for a, b in zip(seed.parameters(), newborn.parameters(), strict=True))


def test_the_network_is_the_one_that_was_validated_last(tmp_path):
    """No decision follows the last validation: validating again gives the same value."""
    module, callback = LitNet(), scripted()
    trainer = fit(tmp_path, module, callback, max_epochs=4)
    last = trainer.callback_metrics["val_loss"].item()
    assert len(callback.growth.decisions) == 3
    assert trainer.validate(module, val_data(), verbose=False)[0]["val_loss"] == last


def test_the_sanity_check_is_no_decision_and_training_goes_on_in_a_second_fit(tmp_path):
    module, callback = LitNet(), scripted()
    trainer = fit(tmp_path, module, callback, max_epochs=1, num_sanity_val_steps=1)
    assert callback.growth.decisions == []
    fit(tmp_path, module, callback, max_epochs=3, num_sanity_val_steps=1)
    assert [decision.index for decision in callback.growth.decisions] == [0, 1, 2]
    assert callback.growth.decisions[0].val_loss == trainer.callback_metrics["val_loss"]  # of both batches
    assert module.net.grown_slots == ["stem", "body"]


def test_the_heuristic_grows_and_keeps_a_seed(tmp_path):
    """The whole life of a seed, with contributions measured in Lightning's validation."""
    module, callback = LitNet(), GrowthCallback(SLOTS, HeuristicController())
    fit(tmp_path, module, callback, max_epochs=16)
    stages = {change.new for decision in callback.growth.decisions for change in decision.changes}
    assert {Stage.BLENDING, Stage.HOLDING} <= stages
    assert stages & {Stage.FOSSILIZED, Stage.PRUNED, Stage.EMBARGOED}


# How it is measured.


def mean_loss(net: nn.Module) -> float:
    with torch.no_grad():
        return cross_entropy(net.eval()(X[:24] + 0.1), Y[:24]).item()


def test_contributions_are_those_of_lightnings_validation(tmp_path):
    """Against a direct computation: the loss without the seed minus the loss with it, at the moment of the decision."""
    expected = []

    class Direct(Callback):  # runs before the GrowthCallback does
        def on_train_batch_start(self, trainer, pl_module: Any, batch, batch_idx) -> None:
            net = pl_module.net
            if batch_idx == 0 and net.grown_slots == ["body"]:
                with_seed = mean_loss(net)
                with net.switched_off("body"):
                    expected.append(mean_loss(net) - with_seed)
                net.train()

    callback = scripted(controller=ScriptedController({0: GROW[0]}))
    measured = []

    class Read(Callback):
        def on_train_batch_start(self, trainer, pl_module: Any, batch, batch_idx) -> None:
            if batch_idx == 0 and trainer.current_epoch > 1:
                measured.append(pl_module.net.slot_state.contribution[0, 1])

    fit(tmp_path, LitNet(), Direct(), callback, Read(), max_epochs=5)
    assert len(measured) == 3
    assert measured == pytest.approx(expected, abs=1e-6)


class Total(Metric):
    """A sum whose tensor is changed in place, and a list."""

    def __init__(self) -> None:
        super().__init__()
        self.total: Any
        self.seen: Any
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")
        self.add_state("seen", [], dist_reduce_fx="cat")

    def update(self, values: Tensor) -> None:
        self.total += values.sum()
        self.seen.append(values)

    def compute(self) -> Tensor:
        return self.total + sum(values.sum() for values in self.seen)


class Counting(LitNet):
    """Counts and collects in ways that Lightning's users do."""

    def __init__(self) -> None:
        super().__init__()
        self.validated, self.outputs, self.epoch_ends = 0, [], 0
        self.accuracy = MulticlassAccuracy(2)
        self.running = Total()  # over the whole run
        self.net.body.append(nn.Dropout(0.3))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.validated += 1
        self.outputs.append(torch.rand(()))
        self.accuracy(self.net(batch[0]), batch[1])
        self.running.update(self.net(batch[0]))
        self.log("val_metric", self.accuracy)

    def on_validation_epoch_end(self) -> None:
        self.epoch_ends += 1
        self.log("val_mean", torch.stack(self.outputs).mean())
        self.outputs.clear()

    def on_train_epoch_end(self) -> None:
        self.log("running", self.running.compute())


@pytest.mark.parametrize("max_batches", [None, 1])
def test_validating_again_disturbs_nothing(max_batches, tmp_path):
    """Run before every training batch, it changes neither weights nor random numbers, metrics, counters or logs."""
    again = []

    class Again(Callback):
        def on_train_batch_start(self, trainer, pl_module: Any, batch, batch_idx) -> None:
            again.extend([run_validation(trainer, max_batches), run_validation(trainer, max_batches)])

    results = []
    for number, callbacks in enumerate(([], [Again()])):
        torch.manual_seed(1)
        module = Counting()
        logger = CSVLogger(tmp_path, str(number), "")
        trainer = fit(tmp_path, module, *callbacks, logger=logger, log_every_n_steps=1, max_epochs=2)
        logged = (tmp_path / str(number) / "metrics.csv").read_text()
        metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
        counts = module.validated, module.outputs, module.epoch_ends, torch.rand(())
        results.append((digest(module, trainer), logged, metrics, counts, trainer.global_step))
    assert results[0] == results[1]
    assert len(again) == 12
    assert again[0] == again[1]
    assert {"val_loss", "val_metric", "val_mean"} <= again[0].keys()


def test_other_threads_see_the_callbacks_meanwhile(tmp_path):
    """Rich's progress bar is drawn by one, and fails without its callback."""
    seen, done = [], threading.Event()

    class Again(Callback):
        def on_train_batch_start(self, trainer, pl_module: Any, batch, batch_idx) -> None:
            def watch() -> None:
                while not done.is_set():
                    seen.append(trainer.progress_bar_callback)

            thread = threading.Thread(target=watch)
            thread.start()
            run_validation(trainer)
            done.set()
            thread.join()
            trainer.should_stop = True

    bar = RichProgressBar()
    fit(tmp_path, LitNet(), Again(), bar, enable_progress_bar=True, max_epochs=1)
    assert seen
    assert all(found is bar for found in seen)


def test_fewer_batches_measure_both_sides_on_the_same_ones(tmp_path):
    """With one batch of 20, the network as it is is measured on that batch too."""
    callback = scripted(max_batches=1)
    seen = []

    class Direct(Callback):
        def on_train_batch_start(self, trainer, pl_module: Any, batch, batch_idx) -> None:
            if batch_idx == 0 and trainer.current_epoch == 1:
                net = pl_module.net.eval()
                with torch.no_grad():
                    seen.append(cross_entropy(net(X[:20] + 0.1), Y[:20]).item())
                net.train()

    fit(tmp_path, LitNet(), Direct(), callback, max_epochs=2)
    assert callback.growth.decisions[0].val_loss == pytest.approx(seen[0], abs=1e-6)


def test_accuracy_may_be_what_counts(tmp_path):
    callback = scripted(monitor="val_accuracy")
    trainer = fit(tmp_path, LitNet(), callback, max_epochs=2)
    (decision,) = callback.growth.decisions
    assert 0 < decision.val_accuracy <= 1
    assert decision.val_loss > 0  # logged too, so it is observed too
    assert trainer.callback_metrics["val_accuracy"] <= 1


def test_a_metric_beyond_one_that_is_better_if_greater(tmp_path):
    """Contributions are shares of the larger value, with the seed and without it."""
    measured: list[float] = []

    class Score(LitNet):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("score", -80 * cross_entropy(self.net(batch[0]), batch[1]) + 100)

        def on_validation_epoch_end(self) -> None:
            measured.append(float(self.trainer.callback_metrics["score"]))

    callback = scripted(controller=ScriptedController({0: GROW[0]}), monitor="score", mode="max")
    trainer = make_trainer(tmp_path, callback, max_epochs=4, enable_checkpointing=False, num_sanity_val_steps=0)
    trainer.fit(Score(), train_data(), val_data())
    last = callback.growth.decisions[-1]
    whole, without = measured[-3:-1]  # the last is that of the last validation
    assert (last.metric, last.value) == ("score", whole)
    assert whole > 1
    contribution = callback.model.growth()[1].contribution
    assert contribution == pytest.approx((whole - without) / max(whole, without), abs=1e-6)
    assert contribution != 0


def test_gradients_of_the_present_step_are_observed(tmp_path):
    """Lightning computes them inside the optimizer's step; after clipping."""
    norms = []

    class Norms(Callback):
        def on_before_zero_grad(self, trainer, pl_module: Any, optimizer) -> None:
            seed = pl_module.net.seed("body")
            gradients = [p.grad.flatten() for p in seed.parameters() if p.grad is not None] if seed else []
            if gradients:
                norms.append(torch.cat(gradients).norm().item())

    observed = []

    class Read(Callback):
        def on_train_batch_start(self, trainer, pl_module: Any, batch, batch_idx) -> None:
            if batch_idx == 0 and trainer.current_epoch == 2:
                observed.append(pl_module.net.slot_state.gradient_norm[0, 1])

    class Kept(LitNet):
        def on_validation_model_zero_grad(self) -> None:
            """Keeps the last gradients, for Norms to see."""

    callback = scripted(controller=ScriptedController({0: GROW[0]}))
    fit(tmp_path, Kept(), callback, Read(), Norms(), max_epochs=3, gradient_clip_val=0.5)
    assert observed[0] == pytest.approx(sum(norms[:3]) / 3, rel=1e-5)


# Lightning's features.


def test_clipping_by_norm_sees_the_seeds(tmp_path):
    clipped = []

    class Totals(LitNet):
        def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None) -> None:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
            gradients = [p.grad.flatten() for p in self.parameters() if p.grad is not None]
            clipped.append((len(gradients), torch.cat(gradients).norm().item()))

    fit(tmp_path, Totals(), scripted(), max_epochs=4, gradient_clip_val=1e-3, gradient_clip_algorithm="norm")
    sizes = [size for size, _ in clipped]
    assert sizes[-1] > sizes[0]  # seeds have gradients
    assert all(norm == pytest.approx(1e-3, rel=1e-2) for _, norm in clipped)


def test_accumulated_gradients_reach_the_seeds(tmp_path):
    """Two batches at once equal one batch of both; three batches make two steps."""
    module, callback = LitNet(), scripted()
    trainer = fit(tmp_path, module, callback, max_epochs=3, accumulate_grad_batches=2)
    seed = module.net.seed("body")
    assert all(trainer.optimizers[0].state[parameter]["step"] == 4 for parameter in seed.parameters())
    assert len(callback.growth.decisions) == 2


def test_validations_without_an_optimizer_step_decide_nothing(tmp_path):
    """Validation after every batch, a step after every third: one decision per step."""
    callback = scripted()
    fit(tmp_path, LitNet(), callback, max_epochs=3, accumulate_grad_batches=3, val_check_interval=1)
    assert [decision.index for decision in callback.growth.decisions] == [0, 1]


def test_bf16_mixed_precision(tmp_path):
    module, callback = LitNet(), scripted()
    trainer = fit(tmp_path, module, callback, max_epochs=5, precision="bf16-mixed")
    assert module.net.grown_slots == ["stem", "body"]
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}
    assert all(torch.isfinite(parameter).all() for parameter in module.parameters())
    assert torch.isfinite(trainer.callback_metrics["val_loss"])
    assert all(decision.val_loss > 0 for decision in callback.growth.decisions)


def test_double_precision_gives_seeds_of_that_type(tmp_path):
    module = LitNet()
    callback = scripted()
    trainer = make_trainer(tmp_path, callback, max_epochs=2, enable_checkpointing=False, precision="64-true")
    trainer.fit(module, train_data(), val_data())
    assert {parameter.dtype for parameter in module.net.seeds.parameters()} == {torch.float64}


def test_early_stopping_counts_validations_as_without_growth(tmp_path):
    stopping = EarlyStopping("val_loss", patience=1, mode="max")  # the loss falls, which counts as worse
    callback = scripted()
    trainer = fit(tmp_path, LitNet(), callback, stopping, max_epochs=20)
    assert trainer.current_epoch == 2
    assert [decision.index for decision in callback.growth.decisions] == [0]


def test_growth_is_logged(tmp_path):
    module, callback = LitNet(), scripted()
    trainer = fit(tmp_path, module, callback, logger=CSVLogger(tmp_path, "", ""), max_epochs=5)
    with open(tmp_path / "metrics.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["val_loss"]]
    grown = sum(parameter.numel() for parameter in module.net.parameters())
    host = sum(parameter.numel() for parameter in module.net.host.parameters())
    assert [float(row["growth/parameters"]) for row in rows][:1] == [host]
    assert float(rows[-1]["growth/parameters"]) == grown
    assert [float(row["growth/blending"]) for row in rows] == [0, 1, 1, 2, 2]
    assert [row["growth/alpha/body"] for row in rows][:2] == ["", rows[1]["growth/alpha/body"]]
    assert 0 < float(rows[1]["growth/alpha/body"]) < float(rows[2]["growth/alpha/body"]) <= 1
    assert float(rows[-1]["growth/contribution/body"]) == pytest.approx(module.net.slot_state.contribution[0, 1])
    assert "growth/fossilized" in trainer.callback_metrics


def test_logging_can_be_left_to_the_user(tmp_path):
    trainer = fit(tmp_path, LitNet(), scripted(log=False), max_epochs=2)
    assert not [name for name in trainer.callback_metrics if name.startswith("growth/")]


def test_growth_is_a_run_to_watch(tmp_path):
    fit(tmp_path, LitNet(), scripted(log_directory=tmp_path / "run"), max_epochs=3)
    watcher = RunWatcher(tmp_path / "run")
    watcher.refresh()
    view = watcher.view()
    decisions = view["growth"]["hosts"][0]["decisions"]
    assert (view["now"]["kind"], len(decisions)) == ("growth", view["now"]["update"])
    assert [row["metrics"]["val_loss"] for row in view["learning"]["rows"]] == [own["val_loss"] for own in decisions]
    with pytest.raises(
        TypeError, match="log is True or False, got 'run'; a directory for simic watch is log_directory"
    ):
        scripted(log="run")


def test_learning_rates_of_seeds_follow_the_schedule_and_are_monitored(tmp_path):
    callback, logger = scripted(), CSVLogger(tmp_path, "", "")
    trainer = fit(tmp_path, LitNet(), callback, LearningRateMonitor(), logger=logger, max_epochs=5, log_every_n_steps=1)
    groups = trainer.optimizers[0].param_groups
    assert len(groups) == 3
    assert [group["lr"] for group in groups] == pytest.approx([0.05 * 0.7**2] * 3)


class TwoOptimizers(LitNet):
    """Manual optimization: one optimizer for the weights, one for biases and norms."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = cast(list[Any], self.optimizers())
        loss = cross_entropy(self.net(batch[0]), batch[1])
        first.zero_grad()
        second.zero_grad()
        self.manual_backward(loss)
        first.step()
        second.step()
        if self.trainer.is_last_batch:
            for scheduler in cast(list[Any], self.lr_schedulers()):
                scheduler.step()

    def configure_optimizers(self) -> Any:
        own = [p for name, p in self.named_parameters() if "seeds." not in name]
        optimizers = [
            torch.optim.SGD([p for p in own if p.ndim > 1], lr=0.1, momentum=0.9),
            torch.optim.AdamW([p for p in own if p.ndim == 1], lr=0.01),
        ]
        return optimizers, [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in optimizers]


def test_of_several_optimizers_the_one_named_trains_seeds(tmp_path):
    callback = scripted(optimizer=1)
    trainer = fit(tmp_path, TwoOptimizers(), callback)
    seeds = [[SLOT_KEY in group for group in optimizer.param_groups] for optimizer in trainer.optimizers]
    assert seeds == [[False], [False, True, True]]
    assert [group["lr"] for group in trainer.optimizers[1].param_groups] == pytest.approx([0.01 * 0.9**4] * 3)


def test_without_a_name_several_optimizers_are_ambiguous(tmp_path):
    with pytest.raises(ValueError, match=r"2 of 2 optimizers train the growing submodule, \[0, 1\]: say which"):
        fit(tmp_path, TwoOptimizers(), scripted())
    with pytest.raises(ValueError, match=r"optimizer=7 does not train the growing submodule; those that do: \[0, 1\]"):
        fit(tmp_path, TwoOptimizers(), scripted(optimizer=7))


def test_two_networks_grow_beside_each_other(tmp_path):
    class Pair(TwoOptimizers):
        def __init__(self) -> None:
            super().__init__()
            self.other = make_net()

        def training_step(self, batch: Any, batch_idx: int) -> None:
            for net, optimizer in zip((self.net, self.other), cast(list[Any], self.optimizers()), strict=True):
                optimizer.zero_grad()
                self.manual_backward(cross_entropy(net(batch[0]), batch[1]))
                optimizer.step()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            for name, net in (("val_loss", self.net), ("other_loss", self.other)):
                self.log(name, cross_entropy(net(batch[0]), batch[1]))

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(net.parameters(), lr=0.1) for net in (self.net, self.other)]

    module = Pair()
    first, second = scripted(module="net"), scripted(module="other", monitor="other_loss")
    trainer = fit(tmp_path, module, first, second)
    assert (first.model, second.model) == (module.net, module.other)
    assert [len(optimizer.param_groups) for optimizer in trainer.optimizers] == [3, 3]
    assert first.growth.decisions[0].val_loss != second.growth.decisions[0].val_loss


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"max_epochs": 6}, 6),
        ({"max_epochs": 6, "check_val_every_n_epoch": 2}, 3),
        ({"max_epochs": 6, "val_check_interval": 1}, 18),
        ({"max_epochs": 6, "val_check_interval": 2, "check_val_every_n_epoch": None}, 9),
        ({"max_epochs": -1, "max_steps": 9}, 3),
        ({"max_epochs": 5, "max_steps": 4, "accumulate_grad_batches": 2}, 2),
        ({"max_epochs": -1}, 0),
    ],
)
def test_the_horizon_is_the_number_of_validations(settings, expected, tmp_path):
    """Three batches per epoch."""
    found = []

    class Stop(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
            found.append((count_validations(trainer), callback.growth.horizon))
            trainer.should_stop = True

    callback = scripted()
    fit(tmp_path, LitNet(), callback, Stop(), **settings)
    assert found[0] == (expected, expected)


@pytest.mark.parametrize(
    ("loader", "settings", "expected"),
    [
        (train_data(), {}, 48),
        (train_data(), {"limit_train_batches": 2}, 32),
        (DataLoader(TensorDataset(X[:20], Y[:20]), batch_size=16, shuffle=True), {}, 20),
        ({"one": train_data(), "other": train_data()}, {}, None),
    ],
)
def test_controllers_are_told_the_number_of_training_samples(loader, settings, expected, tmp_path):
    class FirstOfSeveral(LitNet):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch["one"] if isinstance(batch, dict) else batch, batch_idx)

    callback = scripted(controller="wait")
    make_trainer(tmp_path, callback, max_epochs=1, enable_checkpointing=False, **settings).fit(
        FirstOfSeveral(), loader, val_data()
    )
    assert callback.growth.train_samples == expected
    told = callback.growth.facts().train_samples.tolist()
    assert told == [expected] if expected else np.isnan(told).all()


def test_a_number_of_training_samples_that_is_given_counts(tmp_path):
    callback = scripted(controller="wait", train_samples=7)
    fit(tmp_path, LitNet(), callback, max_epochs=1)
    assert callback.growth.facts().train_samples.tolist() == [7]


# How the input is found.


class Keywords(LightningModule):
    """A network that is called with keywords, by a step that is not its forward."""

    net: Any

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(6, 6), nn.Linear(6, 2)

        def forward(self, x: Tensor, scale: float = 1.0, *, mask: Tensor | None = None) -> Tensor:
            hidden = self.body(x * scale)
            return self.head(hidden if mask is None else hidden * mask)

    def __init__(self) -> None:
        super().__init__()
        self.net, self.weights = Keywords.Net(), nn.CrossEntropyLoss()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.weights(self.net(batch["x"], 2.0, mask=batch["mask"]), batch["y"])

    def validation_step(self, batch: Any) -> None:
        self.log("val_loss", self.training_step(batch, 0), batch_size=4)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_keyword_arguments_and_batches_that_are_dicts(tmp_path):
    samples: Any = [{"x": x, "mask": torch.ones(6), "y": y} for x, y in zip(X, Y, strict=True)]
    data = DataLoader(samples, batch_size=12)
    module = Keywords()
    callback = GrowthCallback(["body"], ScriptedController([Action("germinate", "body", "mlp")]))
    trainer = make_trainer(tmp_path, callback, max_epochs=2, enable_checkpointing=False)
    trainer.fit(module, data, data)
    example = module.net.example_input
    assert set(example) == {"x", "scale", "mask"}
    assert (example["x"].shape, example["scale"], example["mask"].shape) == ((2, 6), 2.0, (2, 6))
    assert module.net.grown_slots == ["body"]


def test_the_example_input_array_comes_before_the_data(tmp_path):
    class Shown(LitNet):
        def __init__(self) -> None:
            super().__init__()
            self.example_input_array = X[:5]

    module = Shown()
    fit(tmp_path, module, scripted(), max_epochs=1)
    assert module.net.example_input.shape == (5, 6)


def test_the_input_may_be_given(tmp_path):
    module = LitNet()
    fit(tmp_path, module, scripted(example_input=X[:7]), max_epochs=1)
    assert module.net.example_input.shape == (7, 6)


class Normed(LitNet):
    """Batch norm before the network that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step((self.norm(batch[0]), batch[1]), batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step((self.norm(batch[0]), batch[1]), batch_idx)


def test_finding_the_input_leaves_no_trace(tmp_path):
    """Neither random numbers nor batch norm's statistics change, and a run without growth is the same."""
    digests = []
    for callbacks in ([], [GrowthCallback(SLOTS, "wait", module="net")]):
        module = Normed()
        torch.manual_seed(3)
        trainer = make_trainer(tmp_path, *callbacks, max_epochs=2, enable_checkpointing=False)
        shuffled = DataLoader(TensorDataset(X, Y), batch_size=16, shuffle=True)
        trainer.fit(module, shuffled, val_data())
        digests.append(digest(module, trainer))
    assert digests[0] == digests[1]


# Mistakes.


def expect(directory, message: str, module: LightningModule, callback: GrowthCallback, **settings: Any) -> None:
    with pytest.raises(ValueError, match=message):
        fit(directory, module, callback, **settings)


def test_which_submodule_grows_must_be_clear(tmp_path):
    class Two(LitNet):
        def __init__(self) -> None:
            super().__init__()
            self.decoder = nn.Linear(2, 2)

    expect(tmp_path, "Two has several submodules with parameters, 'net', 'decoder': say which", Two(), scripted())
    expect(
        tmp_path,
        r"has no submodule 'nett' when the callback's setup runs; it has 'net'",
        LitNet(),
        scripted(module="nett"),
    )
    module = Two()
    fit(tmp_path, module, scripted(module="net"), max_epochs=1)
    assert isinstance(module.net, GrowableModel)
    empty = LitNet()
    del empty.net
    expect(tmp_path, "has no submodule with parameters when", empty, scripted())


def test_several_growable_models_are_ambiguous(tmp_path):
    module = LitNet()
    module.net = GrowableModel(make_net(), SLOTS, example_input=X[:2])
    module.other = GrowableModel(make_net(), SLOTS, example_input=X[:2])
    expect(tmp_path, "holds several GrowableModels, 'net', 'other': name one with module=", module, scripted())


def test_other_slots_than_those_of_the_model_are_refused(tmp_path):
    module = LitNet()
    module.net = GrowableModel(make_net(), ["body"], example_input=X[:2])
    expect(tmp_path, "is a GrowableModel already, with the slots body; leave slots out", module, scripted())


def test_a_value_that_is_not_logged_is_named(tmp_path):
    callback = scripted(monitor="val_f1")
    expect(
        tmp_path,
        "judges seeds by 'val_f1', but the validation logged val_accuracy, val_loss: log it",
        LitNet(),
        callback,
    )


def test_without_validation_nothing_could_grow(tmp_path):
    expect(
        tmp_path,
        "decides after every validation, but this trainer runs none",
        LitNet(),
        scripted(),
        limit_val_batches=0,
    )


@pytest.mark.parametrize("averaging", [StochasticWeightAveraging(1e-2), EMAWeightAveraging()])
def test_averages_of_a_copy_are_refused_at_the_start(averaging, tmp_path):
    with pytest.raises(ValueError, match=rf"{type(averaging).__name__} averages into a copy of the network"):
        fit(tmp_path, LitNet(), scripted(), averaging)


def test_an_input_that_cannot_be_found_is_said(tmp_path):
    class Early(LitNet):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            raise KeyError("image")

    expect(tmp_path, "validation_step fails before the network is called.*KeyError.*example_input", Early(), scripted())

    class Around(LitNet):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", self.net.head(batch[0][:, :1].expand(-1, 8)).mean())

    expect(tmp_path, "validation_step (fails|does not call)", Around(), scripted())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": "up"}, 'mode must be "min"'),
        ({"monitor": "val_accuracy", "mode": "min"}, 'val_accuracy has mode "max"'),
        ({"max_batches": 0}, "max_batches must be at least 1"),
    ],
)
def test_settings_are_checked_at_once(settings, message):
    with pytest.raises(ValueError, match=message):
        GrowthCallback(**settings)


def test_settings_of_model_and_scheduler_are_passed_on(tmp_path):
    module = LitNet()
    lifecycle = LifecycleConfig(max_seeds=1)
    callback = scripted(controller="wait", lifecycle=lifecycle, governor=True, rng_seed=7)
    fit(tmp_path, module, callback, max_epochs=1)
    assert (module.net.lifecycle, module.net.rng_seed) == (lifecycle, 7)
    assert callback.growth.state_dict()["governor"] is not None
    for name in ("blueprint", "evaluate", "lr_schedulers"):
        given: dict[str, Any] = {name: None}
        with pytest.raises(TypeError, match=f"no setting {name}; those passed on are .*governor, .*lifecycle"):
            GrowthCallback(**given)


def test_what_does_not_exist_yet_says_when_it_will():
    callback = GrowthCallback()
    with pytest.raises(RuntimeError, match="no model yet: it is found or wrapped when the trainer starts"):
        _ = callback.model
    with pytest.raises(RuntimeError, match=r"built when trainer.fit starts"):
        _ = callback.growth
