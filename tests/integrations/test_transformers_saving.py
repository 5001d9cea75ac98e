"""Models that grow in transformers' Trainer: saved, loaded, exported, and rebuilt as the best one."""

from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="make test-integrations installs it")
from helpers.tiny_trainer import FIRST, IDS, PLAN, SECOND, grow, logged, logits, make_data, make_trainer
from safetensors.torch import load_file
from transformers import GPT2LMHeadModel

from simic import ScriptedController
from simic.integrations.transformers import attach

pytestmark = pytest.mark.integrations


@pytest.mark.parametrize(("best", "slots"), [(0, []), (1, [FIRST]), (3, [FIRST, SECOND]), (6, [FIRST])])
def test_the_best_model_is_rebuilt(tmp_path, best, slots):
    """Before growth, mid-blend, with two seeds, and after one was pruned; the metric names the best evaluation."""
    ranks = iter(range(100))
    trainer = make_trainer(
        tmp_path,
        load_best_model_at_end=True,
        metric_for_best_model="distance",
        greater_is_better=False,
        eval_do_concat_batches=False,
        trainer={"compute_metrics": lambda prediction: {"distance": abs(next(ranks) - best) + 1.0}},
    )
    growth = grow(trainer, controller=ScriptedController(PLAN), max_eval_samples=1)
    growth._evaluation._run = lambda: {"eval_distance": 1.0, "eval_loss": 1.0}
    trainer.train()
    assert trainer.state.best_model_checkpoint == str(tmp_path / f"checkpoint-{2 * best + 2}")
    assert growth.model.grown_slots == slots
    assert trainer.evaluate()["eval_loss"] == logged(trainer, "eval_loss")[best]
    weights: Any = trainer.model
    assert weights.lm_head.weight is weights.transformer.wte.weight


def test_predict_evaluate_and_generate(tmp_path):
    trainer = make_trainer(tmp_path, num_train_epochs=6)
    growth = grow(trainer)
    trainer.train()
    last = logged(trainer, "eval_loss")[-1]
    assert trainer.evaluate()["eval_loss"] == last
    predicted = trainer.predict(make_data(24, 2))  # pyright: ignore[reportArgumentType]
    assert predicted.metrics is not None
    assert predicted.metrics["test_loss"] == last
    tokens = torch.stack([row["input_ids"] for row in make_data(24, 2)])
    with torch.no_grad():
        assert torch.equal(torch.as_tensor(predicted.predictions), trainer.model(input_ids=tokens).logits)
    unlabelled = [{"input_ids": row["input_ids"]} for row in make_data(4, 3)]
    assert "eval_loss" not in trainer.evaluate(unlabelled)  # growth asks for its metric only while it trains
    with growth.model.switched_off(FIRST):
        assert trainer.evaluate()["eval_loss"] != last
    model: Any = trainer.model
    assert model.generate(IDS[:, :3], max_new_tokens=2, pad_token_id=0).shape == (2, 5)


def test_a_saved_model_is_loaded_by_growth(tmp_path):
    trainer = make_trainer(tmp_path / "run", num_train_epochs=4)
    grow(trainer)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    other = make_trainer(tmp_path / "other")
    growth = grow(other)
    growth.load(tmp_path / "saved")
    assert growth.model.grown_slots == [FIRST, SECOND]
    assert torch.equal(logits(other.model), logits(trainer.model))
    with pytest.raises(FileNotFoundError, match="name a folder that save_model"):
        growth.load(tmp_path)


def test_a_script_without_growth_does_not_lose_seeds_silently(tmp_path, caplog):
    trainer = make_trainer(tmp_path, num_train_epochs=4)
    grow(trainer)
    trainer.train()
    with pytest.raises(ValueError, match="different number of parameter groups"):
        make_trainer(tmp_path).train(resume_from_checkpoint=True)


def test_an_ungrown_model_is_a_plain_one(tmp_path):
    trainer = make_trainer(tmp_path / "run", num_train_epochs=1)
    growth = attach(trainer, [FIRST], controller="wait")
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    assert not [
        name for name in load_file(tmp_path / "saved" / "model.safetensors") if "seed" in name or "growth" in name
    ]
    growth.export().save_pretrained(tmp_path / "exported")  # pyright: ignore[reportCallIssue]
    for folder in ("saved", "exported"):
        loaded = GPT2LMHeadModel.from_pretrained(tmp_path / folder)
        assert torch.equal(logits(loaded), logits(trainer.model))


def test_a_grown_export_is_saved_whole_or_not_at_all(tmp_path):
    trainer = make_trainer(tmp_path / "run", num_train_epochs=7)
    growth = grow(trainer)
    trainer.train()
    plain = growth.export()
    torch.testing.assert_close(logits(plain), logits(trainer.model))
    with pytest.raises(AssertionError, match="save_pretrained would lose what has grown"):
        plain.save_pretrained(tmp_path / "exported")  # pyright: ignore[reportCallIssue]
    torch.save(plain, tmp_path / "plain.pt")
    torch.testing.assert_close(logits(torch.load(tmp_path / "plain.pt", weights_only=False)), logits(plain))
