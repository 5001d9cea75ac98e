"""A Trainer that is stopped, or killed, and resumed ends with the bits of one that ran through."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="make test-integrations installs it")
from helpers.tiny_trainer import FIRST, PLAN, SECOND, grow, logged, make_trainer

from simic import HeuristicConfig, HeuristicController, ScriptedController
from simic.integrations.transformers import attach, last_complete_checkpoint

pytestmark = pytest.mark.integrations
TESTS = Path(__file__).parent.parent


def bits(tree: Any) -> Any:
    """A nested state with its tensors as bytes and its numbers as text, so that it can be compared, NaN included."""
    if isinstance(tree, torch.Tensor):
        return tree.numpy().tobytes()
    if isinstance(tree, dict):
        return {key: bits(value) for key, value in tree.items()}
    return [bits(value) for value in tree] if isinstance(tree, list | tuple) else repr(tree)


def state_of(trainer: Any, growth: Any) -> dict[str, Any]:
    """Weights, seeds, optimizer, learning-rate scheduler, decisions and logs, but for times."""
    timed = ("runtime", "per_second", "train_loss")  # the mean loss is that of the steps since the resume
    logs = [
        {name: value for name, value in log.items() if not name.endswith(timed)} for log in trainer.state.log_history
    ]
    return {
        "weights": bits(trainer.model.state_dict()),
        "optimizer": bits(trainer.optimizer.state_dict()),
        "lr_scheduler": bits(trainer.lr_scheduler.state_dict()),
        "slots": bits(growth.model.slot_state.state_dict()),
        "horizon": growth.scheduler.horizon,
        "logs": bits(logs),
    }


BETWEEN = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 1}
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "every epoch": ({}, {}),
    "between evaluations": (BETWEEN, {}),
    "accumulated": (
        {
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 3,
            "eval_strategy": "steps",
            "eval_steps": 3,
            "save_strategy": "steps",
            "save_steps": 2,
            "lr_scheduler_type": "cosine",
            "num_train_epochs": 6,
        },
        {},
    ),
    "plateau": ({"lr_scheduler_type": "reduce_lr_on_plateau", "metric_for_best_model": "loss"}, {}),
    "governed": (BETWEEN, {"governor": True}),
    "bf16": ({"bf16": True}, {}),
    "limited": ({}, {"max_eval_samples": 7}),
    "by a rule": ({}, {"controller": "rule", "slots": "auto"}),
    "frozen": (BETWEEN, {"controller": "adapters", "slots": "linear", "freeze_host": True, "max_ablations": 2}),
}


def run(folder: Path, setting: str, resume: str | None = None) -> tuple[Any, Any]:
    args, growth_args = SETTINGS[setting]
    rule = HeuristicConfig(patience=1, min_improvement=0.5, holding_decisions=1, tempo=3)
    if growth_args.get("controller") == "rule":
        growth_args = growth_args | {"controller": HeuristicController(rule)}
    trainer = make_trainer(folder, **args)
    growth = grow(trainer, **growth_args)
    trainer.train(resume_from_checkpoint=resume)
    return trainer, growth


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_resumed_training_equals_the_uninterrupted_one(tmp_path, setting):
    expected = state_of(*run(tmp_path / "straight", setting))
    steps = sorted(int(path.name.rpartition("-")[2]) for path in (tmp_path / "straight").glob("checkpoint-*"))
    chosen = steps[1::2] if setting == "every epoch" else [steps[2], steps[-3]]
    for step in chosen:
        found = state_of(*run(tmp_path / "resumed", setting, str(tmp_path / "straight" / f"checkpoint-{step}")))
        for part in expected:
            assert found[part] == expected[part], f"{part} after step {step}"


def test_a_checkpoint_holds_a_seed_in_the_middle_of_its_blend(tmp_path):
    run(tmp_path, "every epoch")
    trainer = make_trainer(tmp_path)
    growth = grow(trainer)
    growth.load(tmp_path / "checkpoint-6")
    assert [report.alpha for report in growth.model.growth()] == pytest.approx([2 / 3, 1 / 3])


def test_growth_may_begin_with_a_checkpoint_without_it(tmp_path, caplog):
    make_trainer(tmp_path, num_train_epochs=2).train()
    trainer = make_trainer(tmp_path, num_train_epochs=5)
    growth = grow(trainer)
    trainer.train(resume_from_checkpoint=True)
    assert "the checkpoint was written without simic" in caplog.text
    assert logged(trainer, "growth_decision") == [0, 1]
    assert growth.model.grown_slots == [FIRST, SECOND]


def test_a_checkpoint_of_other_slots_or_another_controller_is_refused(tmp_path):
    run(tmp_path, "every epoch")
    trainer = make_trainer(tmp_path)
    attach(trainer, [SECOND], controller=ScriptedController(PLAN))
    with pytest.raises(ValueError, match="the checkpoint's slots are"):
        trainer.train(resume_from_checkpoint=True)
    trainer = make_trainer(tmp_path)
    attach(trainer, [FIRST, SECOND], controller="heuristic")
    with pytest.raises(ValueError, match="written with a ScriptedController"):
        trainer.train(resume_from_checkpoint=True)


def test_a_checkpoint_of_other_slots_is_refused_although_nothing_had_grown(tmp_path):
    """Its weights would fit; what controller and history remember would not."""
    trainer = make_trainer(tmp_path, num_train_epochs=1)
    attach(trainer, [FIRST, SECOND], controller="wait")
    trainer.train()
    trainer = make_trainer(tmp_path, num_train_epochs=2)
    attach(trainer, [SECOND], controller="wait")
    with pytest.raises(
        ValueError, match=rf"growth has the slots \['{FIRST}', '{SECOND}'\], here they are \['{SECOND}'\]; build"
    ):
        trainer.train(resume_from_checkpoint=True)


def test_the_last_complete_checkpoint_is_found(tmp_path):
    assert last_complete_checkpoint(tmp_path / "nothing") is None
    assert last_complete_checkpoint(tmp_path) is None
    for step, text in ((2, "{}"), (10, '{"global_step": 10}'), (12, '{"global'), (14, None)):
        (tmp_path / f"checkpoint-{step}").mkdir()
        if text is not None:
            (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(text)
    assert last_complete_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")


SCRIPT = """
import os, signal, sys, time, random, json
sys.path.insert(0, sys.argv[1])
import torch
from pathlib import Path
from helpers.tiny_trainer import grow, make_trainer
from simic.integrations.transformers import last_complete_checkpoint

torch.set_num_threads(1)
folder = Path(sys.argv[2])

def train(name):
    often = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 1}
    trainer = make_trainer(folder / name, save_total_limit=2, **often)
    growth = grow(trainer)
    trainer.train(resume_from_checkpoint=last_complete_checkpoint(folder / name))
    torch.save([trainer.model.state_dict(), trainer.optimizer.state_dict()], folder / f"{name}.pt")

def in_child(name):
    # A fork, because a new process would spend most of its life importing.
    child = os.fork()
    if not child:
        train(name)
        os._exit(0)
    return child

assert os.waitpid(in_child("straight"), 0)[1] == 0
generator, found, step = random.Random(int(sys.argv[3])), [], 0
for _ in range(5):
    child, step = in_child("killed"), step + generator.choice([1, 2, 3])
    while not (folder / "killed" / f"checkpoint-{step}").exists():  # while it is written, and some time after that
        time.sleep(0.001)
    time.sleep(generator.uniform(0, 0.08))
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    found.append(last_complete_checkpoint(folder / "killed"))
    step = max(step - 1, int((found[-1] or "-0").rpartition("-")[2]))
assert os.waitpid(in_child("killed"), 0)[1] == 0
print(json.dumps(found))
"""


def test_five_kills_end_in_the_same_bits(tmp_path):
    command = [sys.executable, "-c", SCRIPT, str(TESTS), str(tmp_path), "0"]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    assert len(set(found)) > 2, found  # training went on in between
    straight, killed = (torch.load(tmp_path / f"{name}.pt") for name in ("straight", "killed"))
    assert bits(killed) == bits(straight)
