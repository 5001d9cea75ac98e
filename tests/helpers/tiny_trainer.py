"""A tiny GPT-2 in transformers' Trainer, with a plan of growth that has every stage within few evaluations."""

from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from simic import Action, ScriptedController
from simic.integrations.transformers import TrainerGrowth, attach

FIRST, SECOND = "transformer.h.0", "transformer.h.1"
IDS = torch.arange(16).view(2, 8) % 13
PLAN = {
    0: Action("germinate", FIRST, "low_rank", tempo=3),
    1: Action("germinate", SECOND, "widen", tempo=3),
    3: Action("advance", FIRST),
    4: Action("fossilize", FIRST),
    5: Action("prune", SECOND, tempo=3),
}


def make_model() -> GPT2LMHeadModel:
    """Tied weights, and dropout so that the random state matters."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=13, n_positions=8, n_embd=8, n_layer=2, n_head=2, bos_token_id=None, eos_token_id=None
    )
    return GPT2LMHeadModel(config)


def make_data(count: int, rng_seed: int) -> list[dict[str, Any]]:
    """Sequences that count upwards from a random token; `note` is a column that the model does not take."""
    start = torch.randint(13, (count, 1), generator=torch.Generator().manual_seed(rng_seed))
    tokens = (start + torch.arange(8)) % 13
    return [{"input_ids": row, "labels": row, "note": index} for index, row in enumerate(tokens)]


def make_trainer(folder: Path, *, model: Any = None, trainer: dict[str, Any] | None = None, **args: Any) -> Any:
    """A Trainer of 32 samples, two steps of 16 per epoch, evaluated and saved every epoch."""
    given = {
        "num_train_epochs": 8,
        "per_device_train_batch_size": 16,
        "learning_rate": 1e-2,
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "logging_steps": 1,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    settings = TrainingArguments(output_dir=str(folder), **(given | args))
    parts = {"model": model or make_model(), "train_dataset": make_data(32, 1), "eval_dataset": make_data(24, 2)}
    return Trainer(args=settings, **(parts | (trainer or {})))


def grow(trainer: Any, **settings: Any) -> TrainerGrowth:
    """Attach growth by the plan."""
    return attach(trainer, **({"slots": [FIRST, SECOND], "controller": ScriptedController(PLAN)} | settings))


def logits(model: Any) -> torch.Tensor:
    """What a model computes, in evaluation mode."""
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def logged(trainer: Any, name: str) -> list[Any]:
    """The values that a Trainer has logged under a name."""
    return [log[name] for log in trainer.state.log_history if name in log]
