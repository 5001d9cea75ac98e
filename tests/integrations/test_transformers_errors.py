"""What growth in transformers' Trainer refuses, before anything has changed."""

from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

pytest.importorskip("transformers", reason="make test-integrations installs it")
from helpers.tiny_trainer import FIRST, IDS, grow, make_data, make_model, make_trainer
from transformers import Trainer

from simic import Action, GrowableModel, ScriptedController
from simic.integrations.transformers import attach

pytestmark = pytest.mark.integrations


class Stream(IterableDataset):
    def __iter__(self):
        return iter(make_data(4, 0))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"growth": {"controller": "heuristics"}}, "did you mean heuristic"),
        ({"growth": {"slots": ["nowhere"]}}, "the model has no submodule 'nowhere'"),
        ({"eval_strategy": "no"}, 'set eval_strategy="epoch" or "steps"'),
        ({"trainer": {"eval_dataset": {"a": make_data(4, 0), "b": make_data(4, 1)}}}, "'eval_loss' belongs to none"),
        ({"trainer": {"train_dataset": Stream()}, "max_steps": 4}, "pass example_input="),
    ],
)
def test_settings_that_growth_needs(tmp_path, args, message):
    settings = dict(args)
    growth = settings.pop("growth", {})
    trainer = make_trainer(tmp_path, **settings)
    with pytest.raises(ValueError, match=message):
        grow(trainer, **growth)
    assert not hasattr(trainer.model, "seeds")
    assert len(trainer.callback_handler.callbacks) == len(make_trainer(tmp_path).callback_handler.callbacks)


def test_data_to_judge_growth_is_needed(tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.eval_dataset = None
    with pytest.raises(ValueError, match="give Trainer an eval_dataset"):
        grow(trainer)


@pytest.mark.parametrize(("samples", "message"), [(0, "must be at least 1, got 0"), (3, "got a Stream; cut the")])
def test_samples_that_cannot_be_taken(tmp_path, samples, message):
    trainer = make_trainer(tmp_path, trainer={"eval_dataset": Stream()} if samples else {})
    with pytest.raises(ValueError, match=message):
        grow(trainer, max_eval_samples=samples)


def test_a_stream_of_training_data_needs_an_example(tmp_path):
    trainer = make_trainer(
        tmp_path, max_steps=6, eval_strategy="steps", eval_steps=2, trainer={"train_dataset": Stream()}
    )
    growth = grow(trainer, example_input={"input_ids": IDS})
    trainer.train()
    assert growth.model.grown_slots


def test_other_objects_are_refused(tmp_path):
    with pytest.raises(TypeError, match=r"attach takes a transformers\.Trainer, got a GPT2LMHeadModel"):
        attach(make_model())  # pyright: ignore[reportArgumentType]
    wrapped = GrowableModel(make_model(), [FIRST], example_input={"input_ids": IDS})
    with pytest.raises(TypeError, match="got a GrowableModel; give Trainer the host itself"):
        grow(make_trainer(tmp_path, model=wrapped))
    with pytest.raises(TypeError, match="got a Linear; use GrowthScheduler in a loop"):
        grow(make_trainer(tmp_path, model=torch.nn.Linear(2, 2)))


def test_growth_is_attached_once(tmp_path):
    trainer = make_trainer(tmp_path)
    grow(trainer)
    with pytest.raises(ValueError, match="has an attribute `seeds` already"):
        grow(trainer)


def test_adapters_of_peft_are_refused(tmp_path):
    peft = pytest.importorskip("peft", reason="make test-integrations installs it")
    config = peft.LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True)
    adapted = peft.get_peft_model(make_model(), config)
    inside = make_model()
    inside.add_adapter(config)
    for model in (adapted, inside):
        with pytest.raises(ValueError, match=r"adapters of peft \(default\), and only these are saved"):
            grow(make_trainer(tmp_path, model=model))
    merged = adapted.merge_and_unload()
    grow(make_trainer(tmp_path, model=merged))


def test_a_metric_that_nobody_measures_is_named(tmp_path):
    trainer = make_trainer(tmp_path, metric_for_best_model="f1")
    grow(trainer)
    with pytest.raises(
        ValueError, match=r"judged by 'eval_f1' \(metric_for_best_model\), but the evaluation gives eval_loss"
    ):
        trainer.train()


def test_a_metric_that_is_not_finite_is_named(tmp_path):
    def nan(prediction: Any) -> dict[str, float]:
        return {"score": float("nan")}

    trainer = make_trainer(tmp_path, metric_for_best_model="score", trainer={"compute_metrics": nan})
    attach(trainer, [FIRST], controller=ScriptedController({0: Action()}))
    with pytest.raises(ValueError, match="eval_score must be finite"):
        trainer.train()


def test_checkpoints_that_come_before_their_evaluation_are_warned_about(tmp_path):
    trainer = make_trainer(tmp_path, save_strategy="steps", save_steps=1)
    assert isinstance(trainer, Trainer)
    with pytest.warns(UserWarning, match="Trainer skips when it resumes, and with it a decision"):
        grow(trainer)


@pytest.mark.parametrize(("attribute", "message"), [("is_deepspeed_enabled", "DeepSpeed"), ("is_fsdp_enabled", "FSDP")])
def test_split_parameters_are_refused(tmp_path, attribute, message):
    trainer = make_trainer(tmp_path)
    setattr(trainer, attribute, True)
    with pytest.raises(ValueError, match=message):
        grow(trainer)


def test_several_devices_in_one_process_are_refused(tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.args._n_gpu = 2
    with pytest.raises(ValueError, match="DataParallel on 2 devices"):
        grow(trainer)
