"""Growth inside transformers' Trainer: what Trainer does with a model must also hold for one that grows."""

import inspect
import math
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="make test-integrations installs it")
from helpers.tiny_trainer import FIRST, IDS, PLAN, SECOND, grow, logged, logits, make_data, make_model, make_trainer
from torch.utils.data import IterableDataset
from transformers import EarlyStoppingCallback, TrainerCallback

from simic import Action, HeuristicConfig, HeuristicController, LifecycleConfig, ScriptedController, Stage
from simic.integrations.transformers import attach

pytestmark = pytest.mark.integrations


class Recorder(TrainerCallback):
    """What Trainer tells its callbacks."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def on_prediction_step(self, args, state, control, **kwargs):
        self.events.append("prediction step")

    def on_evaluate(self, args, state, control, **kwargs):
        self.events.append("evaluate")

    def on_log(self, args, state, control, **kwargs):
        self.events.append("growth" if "growth_decision" in kwargs["logs"] else "log")


def test_seeds_germinate_train_and_fossilise(tmp_path):
    trainer = make_trainer(tmp_path)
    host = trainer.model
    growth = grow(trainer)
    trainer.train()
    assert trainer.model is host
    assert growth.model.seed(SECOND) is None
    seed = growth.model.seed(FIRST)
    assert seed is not None
    assert all(parameter.count_nonzero() for parameter in seed.parameters())
    assert [report.stage for report in growth.model.growth()] == [Stage.FOSSILIZED, Stage.EMBARGOED]
    assert growth.scheduler is not None
    assert [decision.action.op for decision in growth.scheduler.decisions[:2]] == ["germinate", "germinate"]


def test_each_evaluation_but_the_last_is_followed_by_one_decision(tmp_path):
    trainer = make_trainer(tmp_path, num_train_epochs=3, eval_strategy="steps", eval_steps=2, eval_on_start=True)
    growth = grow(trainer)
    trainer.train()
    assert len(logged(trainer, "eval_loss")) == 4
    assert logged(trainer, "growth_decision") == [0, 1]
    assert logged(trainer, "growth_live_seeds") == [1, 2]
    assert logged(trainer, "growth_parameters") == [24, 24 + 296]
    assert logged(trainer, "growth_fossils") == [0, 0]
    assert growth.scheduler is not None
    assert growth.scheduler.horizon == 3
    steps = [log["step"] for log in trainer.state.log_history if "growth_decision" in log]
    assert steps == [2, 4]
    means = [
        np.mean([log["loss"] for log in trainer.state.log_history[a:b] if "loss" in log]) for a, b in [(1, 3), (5, 7)]
    ]
    assert growth.scheduler.facts().train_loss[0, -2:] == pytest.approx(means)


def test_the_optimizer_inside_accelerates_wrapper_is_used(tmp_path):
    trainer = make_trainer(tmp_path, num_train_epochs=3)
    growth = grow(trainer)
    trainer.train()
    wrapper: Any = trainer.optimizer
    assert type(wrapper).__name__ == "AcceleratedOptimizer"
    assert growth.scheduler is not None
    assert growth.scheduler.optimizer is wrapper.optimizer
    assert {group.get("simic_slot") for group in wrapper.param_groups} == {None, FIRST, SECOND}


def test_trainer_keeps_the_columns_of_the_model(tmp_path):
    trainer = make_trainer(tmp_path)
    signature = inspect.signature(trainer.model.forward)
    grow(trainer)
    assert inspect.signature(trainer.model.forward) == signature
    assert set(next(iter(trainer.get_train_dataloader()))) == {"input_ids", "labels"}


def test_without_growth_training_is_the_same_to_the_last_bit(tmp_path):
    """Empty slots change no weight, no random number, no log and no parameter group."""
    plain = make_trainer(tmp_path / "plain", num_train_epochs=3)
    plain.train()
    ours = make_trainer(tmp_path / "ours", num_train_epochs=3)
    attach(ours, [FIRST], controller="wait")
    ours.train()
    expected, found = plain.model.state_dict(), ours.model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert logged(ours, "eval_loss") == logged(plain, "eval_loss")
    assert logged(ours, "loss") == logged(plain, "loss")


def test_measuring_contributions_leaves_no_trace(tmp_path):
    recorder = Recorder()
    trainer = make_trainer(tmp_path, num_train_epochs=5, trainer={"callbacks": [recorder]})
    growth = grow(trainer)
    draws: list[torch.Tensor] = []
    original = growth.decide

    def decide() -> None:
        before, loader = torch.get_rng_state(), trainer.callback_handler.eval_dataloader
        original()
        draws.append(before == torch.get_rng_state())
        assert trainer.callback_handler.eval_dataloader is loader

    growth.decide = decide
    trainer.train()
    assert all(same.all() for same in draws)
    assert not math.isnan(growth.model.growth()[0].contribution)
    epoch = ["log", "log", *["prediction step"] * 3, "log", "evaluate"]
    assert recorder.events == [*([*epoch, "growth"] * 4), *epoch, "log"]


def test_the_metrics_of_the_evaluation_are_used_again(tmp_path, monkeypatch):
    """A decision costs one evaluation per seed; the network as it is was just evaluated by Trainer."""
    trainer = make_trainer(tmp_path, num_train_epochs=4)
    grow(trainer)
    calls: list[str] = []
    loop = trainer.evaluation_loop
    monkeypatch.setattr(trainer, "evaluation_loop", lambda *a, **k: calls.append(k["description"]) or loop(*a, **k))
    trainer.train()
    # No seed, one seed and two seeds are there when the decisions are taken.
    assert calls == ["Evaluation", "Evaluation", "Contribution", "Evaluation", *["Contribution"] * 2, "Evaluation"]


@pytest.mark.parametrize("samples", [None, 5])
def test_contributions_by_hand(tmp_path, samples):
    """The loss without the seed minus the loss with it, on all or on evenly spaced evaluation data."""
    trainer = make_trainer(tmp_path, num_train_epochs=3, per_device_eval_batch_size=5)
    growth = grow(trainer, max_eval_samples=samples)
    trainer.train()
    assert growth.scheduler is not None
    with torch.no_grad():
        nn_seed = growth.model.seed(FIRST)
        assert nn_seed is not None
        for parameter in nn_seed.parameters():
            parameter.add_(0.5)
    trainer.evaluate()
    growth.note_evaluation(trainer.evaluate() if samples is None else {"eval_loss": 9.0})  # ignored: not in training
    trainer.is_in_train = True
    growth.note_evaluation(trainer.evaluate() if samples is None else {"eval_loss": 9.0})
    data = make_data(24, 2) if samples is None else [make_data(24, 2)[index] for index in (0, 6, 12, 17, 23)]
    tokens = torch.stack([row["input_ids"] for row in data])

    def loss() -> float:
        trainer.model.eval()
        with torch.no_grad():
            losses = [trainer.model(input_ids=part, labels=part).loss.repeat(5) for part in tokens.split(5)]
        return float(torch.cat(losses)[: len(tokens)].mean())

    with growth.model.switched_off(FIRST):
        without = loss()
    expected = (without - loss()) * 7 / 8  # Trainer divides by all labels, the model predicts all but the first
    growth.scheduler.groups.follow()
    growth.decide()
    assert growth.model.growth()[0].contribution == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("metric", "greater", "counted", "expected"),
    [
        ("accuracy", True, ("eval_accuracy", "max"), {"eval_accuracy": 0.25, "val_loss": 2.0}),
        ("eval_bleu", True, ("eval_bleu", "max"), {"eval_bleu": 31.0, "val_loss": 2.0}),
        ("perplexity", False, ("eval_perplexity", "min"), {"eval_perplexity": 7.0, "val_loss": 2.0}),
        ("loss", False, ("val_loss", None), {"val_loss": 2.0}),
        (None, None, ("val_loss", None), {"val_loss": 2.0}),
    ],
)
def test_the_metric_that_counts_is_trainers(tmp_path, metric, greater, counted, expected):
    trainer = make_trainer(tmp_path, metric_for_best_model=metric, greater_is_better=greater)
    growth = grow(trainer)
    metrics = {"eval_loss": 2.0, "eval_accuracy": 0.25, "eval_bleu": 31.0, "eval_perplexity": 7.0, "eval_runtime": 1.0}
    assert growth._evaluation.read(metrics) == expected
    found = growth._evaluation.counted
    assert (found["metric"], found.get("mode")) == counted


def hits(prediction: Any) -> np.ndarray:
    return prediction.predictions[:, :-1].argmax(-1) == prediction.label_ids[:, 1:]


def test_a_metric_beyond_one_that_is_better_if_greater(tmp_path):
    """Contributions are shares of the larger value, here in percent of hits, with the seed and without it."""
    measured: list[float] = []

    def score(prediction: Any) -> dict[str, float]:
        measured.append(100 * hits(prediction).mean())
        return {"score": measured[-1]}

    trainer = make_trainer(
        tmp_path, num_train_epochs=4, metric_for_best_model="score", trainer={"compute_metrics": score}
    )
    growth = grow(trainer, controller=ScriptedController({0: PLAN[0]}))
    trainer.train()
    assert growth.scheduler is not None
    assert [decision.value for decision in growth.scheduler.decisions] == logged(trainer, "eval_score")[:3]
    assert growth.scheduler.decisions[-1].metric == "eval_score"
    whole, without = measured[-3:-1]  # the last is that of the last evaluation
    assert whole > 1
    contribution = growth.model.growth()[0].contribution
    assert contribution == pytest.approx((whole - without) / max(whole, without), abs=1e-9)


def test_growth_is_judged_by_compute_metrics(tmp_path):
    def accuracy(prediction: Any) -> dict[str, float]:
        return {"accuracy": hits(prediction).mean()}

    trainer = make_trainer(
        tmp_path, num_train_epochs=4, metric_for_best_model="accuracy", trainer={"compute_metrics": accuracy}
    )
    growth = grow(trainer)
    trainer.train()
    assert growth.scheduler is not None
    seen = [decision.val_accuracy for decision in growth.scheduler.decisions]
    assert seen == logged(trainer, "eval_accuracy")[:3]
    contribution = growth.model.growth()[0].contribution * 24 * 7
    assert contribution == pytest.approx(round(contribution), abs=1e-9)  # a share of 24 x 7 predictions


def test_one_of_several_datasets_counts(tmp_path):
    datasets = {"easy": make_data(8, 2), "hard": make_data(8, 3)}
    trainer = make_trainer(
        tmp_path, num_train_epochs=3, metric_for_best_model="eval_hard_loss", trainer={"eval_dataset": datasets}
    )
    growth = grow(trainer)
    trainer.train()
    assert growth.scheduler is not None
    seen = [decision.val_loss for decision in growth.scheduler.decisions]
    assert seen == logged(trainer, "eval_hard_loss")[:2]
    assert not math.isnan(growth.model.growth()[0].contribution)


@pytest.mark.parametrize("kind", ["cosine", "reduce_lr_on_plateau", "constant_with_warmup", "cosine_with_min_lr"])
def test_seeds_follow_the_learning_rate_schedule(tmp_path, kind):
    rates: list[set[float]] = []

    class Rates(TrainerCallback):
        def on_optimizer_step(self, args, state, control, **kwargs):
            rates.append({group["lr"] for group in kwargs["optimizer"].param_groups})

    more = {"min_lr": 1e-3} if kind == "cosine_with_min_lr" else {}
    trainer = make_trainer(
        tmp_path,
        num_train_epochs=4,
        lr_scheduler_type=kind,
        warmup_steps=0 if kind.startswith("reduce") else 3,
        lr_scheduler_kwargs=more,
        weight_decay=0.1,
        metric_for_best_model="loss",
        trainer={"callbacks": [Rates()]},
    )
    growth = grow(trainer)
    trainer.train()
    assert all(len(rate) == 1 for rate in rates)
    assert len(rates) == 8
    decays = {group["weight_decay"] for group in trainer.optimizer.param_groups if "simic_slot" in group}  # pyright: ignore
    assert decays == {0.1, 0.0}
    assert growth.model.grown_slots == [FIRST, SECOND]


def test_accumulation_and_clipping_include_seeds(tmp_path):
    norms: list[float] = []

    class Norms(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            groups = kwargs["optimizer"].param_groups
            gradients = [p.grad for group in groups for p in group["params"] if p.grad is not None]
            norms.append(float(torch.nn.utils.get_total_norm(gradients)))
            if len(groups) > 2 and state.global_step > 5:
                assert all(p.grad is not None for group in groups[2:] for p in group["params"])

    trainer = make_trainer(
        tmp_path,
        num_train_epochs=5,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        max_grad_norm=0.01,
        trainer={"callbacks": [Norms()]},
    )
    growth = grow(trainer)
    trainer.train()
    assert growth.model.grown_slots == [FIRST, SECOND]
    assert len(norms) == 10
    assert norms == pytest.approx([0.01] * 10, rel=1e-3)
    assert growth.scheduler is not None
    assert growth.scheduler.decisions[-1].index == 3


@pytest.mark.parametrize(
    "args",
    [
        {"bf16": True},
        {"fp16": True},
        {"gradient_checkpointing": True},
        {"torch_compile": True, "torch_compile_backend": "eager"},
    ],
    ids=["bf16", "fp16", "checkpointing", "compile"],
)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # torch's compiler
def test_other_ways_to_train(tmp_path, args):
    trainer = make_trainer(tmp_path, num_train_epochs=3, **args)
    growth = grow(trainer)
    trainer.train()
    seed = growth.model.seed(FIRST)
    assert seed is not None
    assert all(parameter.count_nonzero() for parameter in seed.parameters())
    plain = growth.export(live="keep")
    assert "forward" not in vars(plain)
    torch.testing.assert_close(
        logits(plain), logits(trainer.model).float(), rtol=0, atol=5e-2 if {"bf16", "fp16"} & args.keys() else 1e-5
    )
    torch.save(plain, tmp_path / "plain.pt")
    torch.testing.assert_close(logits(torch.load(tmp_path / "plain.pt", weights_only=False)), logits(plain))


def test_early_stopping_stops_growth(tmp_path):
    trainer = make_trainer(
        tmp_path,
        learning_rate=0.0,
        metric_for_best_model="loss",
        load_best_model_at_end=True,
        trainer={"callbacks": [EarlyStoppingCallback(early_stopping_patience=2)]},
    )
    grow(trainer)
    trainer.train()
    assert len(logged(trainer, "eval_loss")) == 3
    assert logged(trainer, "growth_decision") == [0, 1]


def test_shadow_incubation_trains_seeds_on_the_loss_of_trainer(tmp_path):
    trainer = make_trainer(tmp_path, num_train_epochs=4)
    plan = ScriptedController({0: Action("germinate", FIRST, "low_rank"), 1: Action("advance", FIRST)})
    growth = grow(trainer, controller=plan, lifecycle=LifecycleConfig(incubation="shadow"))
    trainer.train()
    assert growth.model.growth()[0].stage == Stage.TRAINING
    seed = growth.model.seed(FIRST)
    assert seed is not None
    assert seed.alpha == 0
    assert all(parameter.count_nonzero() for parameter in seed.parameters())


def test_a_model_that_trainer_builds_itself_grows_too(tmp_path):
    trainer = make_trainer(tmp_path, num_train_epochs=3, trainer={"model": None, "model_init": make_model})
    growth = grow(trainer)
    first = trainer.model
    for _ in range(2):  # each training begins with a new model
        trainer.train()
        assert trainer.model is not first
        assert growth.model.host is trainer.model
        assert growth.model.grown_slots == [FIRST, SECOND]
        assert growth.scheduler is not None
        assert len(growth.scheduler.decisions) == 2


def test_a_second_training_goes_on_growing(tmp_path):
    trainer = make_trainer(tmp_path, num_train_epochs=3)
    plan = {0: Action("germinate", FIRST, "low_rank", tempo=3), 2: Action("germinate", SECOND, "low_rank", tempo=3)}
    growth = grow(trainer, controller=ScriptedController(plan))
    trainer.train()
    trainer.train()
    assert growth.scheduler is not None
    assert [decision.index for decision in growth.scheduler.decisions] == [0, 1, 2, 3]
    assert growth.scheduler.horizon == 6
    assert growth.model.grown_slots == [FIRST, SECOND]
    # The second training has a learning-rate scheduler of its own, which also drives the seed that came with it.
    assert len(trainer.lr_scheduler.base_lrs) == len(trainer.optimizer.param_groups)


def test_the_rule_of_thumb_grows_what_auto_finds(tmp_path):
    rule = HeuristicConfig(patience=1, min_improvement=0.5, holding_decisions=1, min_contribution=-1.0, tempo=3)
    trainer = make_trainer(tmp_path, num_train_epochs=9)
    growth = attach(trainer, controller=HeuristicController(rule), governor=True)
    trainer.train()
    assert Stage.FOSSILIZED in [report.stage for report in growth.model.growth()]
    assert logged(trainer, "growth_fossils")[-1] >= 1


def test_the_horizon_is_the_number_of_evaluations(tmp_path):
    horizons = []
    for args in ({}, {"max_steps": 5}, {"max_steps": 5, "eval_strategy": "steps", "eval_steps": 2}):
        trainer = make_trainer(tmp_path, **{"num_train_epochs": 2, "save_strategy": "no", **args})
        growth = attach(trainer, [FIRST], controller=ScriptedController({0: Action()}))
        trainer.train()
        assert growth.scheduler is not None
        horizons.append(growth.scheduler.horizon)
    assert horizons == [2, 3, 3]


class Stream(IterableDataset):
    """Training data of unknown length."""

    def __iter__(self):
        return iter(make_data(32, 1))


@pytest.mark.parametrize(
    ("dataset", "settings", "expected"),
    [(make_data(32, 1), {}, [32]), (make_data(32, 1), {"train_samples": 7}, [7]), (Stream(), {}, None)],
)
def test_controllers_are_told_the_number_of_training_samples(tmp_path, dataset, settings, expected):
    trainer = make_trainer(tmp_path, trainer={"train_dataset": dataset}, max_steps=2, save_strategy="no")
    growth = attach(trainer, [FIRST], controller="wait", example_input={"input_ids": IDS}, **settings)
    trainer.train()
    assert growth.scheduler is not None
    told = growth.scheduler.facts().train_samples
    assert told.tolist() == expected if expected else np.isnan(told).all()


def test_settings_of_model_and_scheduler_are_passed_on(tmp_path):
    """In a frozen host only seeds train; hooks, budget and bounds on costs are those of model and scheduler."""
    trainer, events = make_trainer(tmp_path, num_train_epochs=3), []
    host = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    growth = attach(
        trainer,
        "*.attn.c_proj",
        controller="adapters",
        freeze_host=True,
        blueprints=["lora_2"],
        max_parameters=1928 + 40,  # room for one seed of 2 x (8 + 8)
        max_ablations=1,
        on_germinate=events.append,
    )
    trainer.train()
    assert growth.model.blueprint_names == ("lora_2",)
    assert [event.slot for event in events] == growth.model.grown_slots == ["transformer.h.0.attn.c_proj"]
    assert sum(p.numel() for p in growth.model.parameters() if p.requires_grad) == 32
    assert all(torch.equal(value, trainer.model.state_dict()[name]) for name, value in host.items())
    assert growth.scheduler is not None
    assert max(decision.evaluations for decision in growth.scheduler.decisions) == 2
    merged: Any = growth.export(live="keep", merge=True)
    merged.save_pretrained(tmp_path / "merged")
    again = type(merged).from_pretrained(tmp_path / "merged").eval()
    tokens = torch.arange(8)[None]
    torch.testing.assert_close(again(tokens).logits, trainer.model.eval()(tokens).logits)


def test_a_setting_that_nothing_has_is_named(tmp_path):
    trainer = make_trainer(tmp_path)
    with pytest.raises(TypeError, match=r"attach has no setting freeze; those passed on are .*freeze_host, .*verbose"):
        attach(trainer, [FIRST], freeze=True)
    assert not hasattr(trainer.model, "seeds")
