"""What growth inside transformers' Trainer needs, checked before anything is changed."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Subset
from transformers import PreTrainedModel, Trainer

from simic.growth.isolation import preserved_rng
from simic.growth.notices import warn_user


def check_trainer(trainer: Any) -> None:
    """Raise unless growth can be attached to a trainer; every error names the remedy."""
    if not isinstance(trainer, Trainer):
        raise TypeError(f"attach takes a transformers.Trainer, got a {type(trainer).__name__}")
    _check_model(trainer.model)
    args = trainer.args
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        raise ValueError("DeepSpeed and FSDP split the parameters, and seeds come later: train without them")
    if args.n_gpu > 1:
        raise ValueError(
            f"Trainer would use DataParallel on {args.n_gpu} devices, whose copies of the model do not follow growth: "
            "let it see one device, with CUDA_VISIBLE_DEVICES=0"
        )
    if args.eval_strategy == "no":
        raise ValueError('growth takes a decision after every evaluation: set eval_strategy="epoch" or "steps"')
    if args.eval_strategy == "epoch" and args.save_strategy == "steps":
        warn_user(
            "checkpoints are written by steps, evaluations made by epochs: one that is written at the end of an epoch "
            "comes before the epoch's evaluation, which Trainer skips when it resumes, and with it a decision; use the "
            "same strategy for both"
        )
    if trainer.eval_dataset is None:
        raise ValueError("growth is judged on validation data: give Trainer an eval_dataset")


def _check_model(model: Any) -> None:
    if hasattr(model, "peft_config"):
        raise ValueError(
            f"the model has adapters of peft ({', '.join(model.peft_config)}), and only these are saved, so what grows "
            "would be lost: merge them first with model.merge_and_unload(), or attach to the model without adapters"
        )
    if not isinstance(model, PreTrainedModel):
        remedy = "give Trainer the host itself" if hasattr(model, "grown_slots") else "use GrowthScheduler in a loop"
        raise TypeError(f"Trainer's model must be a PreTrainedModel to grow, got a {type(model).__name__}; {remedy}")


def example_of(trainer: Any) -> dict[str, Any]:
    """Arguments of a call of the model: the first two samples, without labels."""
    dataset = trainer.train_dataset
    if dataset is None or not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise ValueError(
            f"an example input is taken from a train_dataset with an index, got a {type(dataset).__name__}: pass "
            "example_input={...}, arguments of the model's forward without labels"
        )
    with preserved_rng():
        batch = next(iter(list(trainer.get_test_dataloader(Subset(dataset, range(min(2, len(dataset))))))))
    return {name: value for name, value in batch.items() if name not in trainer.label_names and value is not None}
