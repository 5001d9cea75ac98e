"""Lightning on two processes of gloo: ranks grow alike to the last bit, and resume alike.

This file is also the program that trains: `python test_lightning_ddp.py MODE DIRECTORY`.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.integrations
EPOCHS = 5


def train(directory: Path, name: str, strategy: str, module: Any, callback: Any, **settings: Any) -> Any:
    """Train on two processes; each writes how it ended."""
    from helpers.lightning_runs import digest, keep_all, make_trainer, train_data, val_data
    from lightning.pytorch import Callback

    class End(Callback):
        def on_train_end(self, trainer, pl_module: Any) -> None:
            end = {
                "digest": digest(pl_module, trainer),
                "grown": callback.model.grown_slots,
                "decisions": repr(callback.growth.decisions),
                "losses": [decision.val_loss for decision in callback.growth.decisions],
                "own_loss": trainer.callback_metrics["val_loss"].item(),
            }
            (directory / f"{name}-{trainer.global_rank}.json").write_text(json.dumps(end))

    path = settings.pop("ckpt_path", None)
    trainer = make_trainer(
        directory, callback, keep_all(directory / name), End(), max_epochs=EPOCHS, devices=2, strategy=strategy
    )
    trainer.fit(module, train_data(), val_data(), ckpt_path=path)
    return trainer


def run_ddp(directory: Path) -> None:
    """Straight through, then resumed within a blend."""
    from helpers.lightning_runs import LitNet, scripted

    train(directory, "whole", "ddp", LitNet(), scripted())
    train(directory, "resumed", "ddp", LitNet(), scripted(), ckpt_path=directory / "whole" / "epoch=2.ckpt")


def run_fork(directory: Path) -> None:
    """Processes that Lightning forks: a module that wraps itself comes back grown, any other is refused."""
    from helpers.lightning_runs import LitNet, X, make_net, scripted

    from simic import GrowableModel

    class OwnWrapper(LitNet):
        def __init__(self) -> None:
            super().__init__()
            self.net = GrowableModel(make_net(), ["stem", "body"], example_input=X[:2])

    module = OwnWrapper()
    train(directory, "fork", "ddp_fork", module, scripted())
    refused = ""
    try:
        train(directory, "refused", "ddp_fork", LitNet(), scripted())
    except Exception as error:
        refused = str(error)
    (directory / "main.json").write_text(json.dumps({"grown": module.net.grown_slots, "refused": refused}))


def run_program(mode: str, directory: Path) -> None:
    root = Path(__file__).parents[2]
    paths = os.pathsep.join([str(root / "src"), str(root / "tests")])
    result = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, mode, str(directory)],
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]


def read(directory: Path, name: str) -> dict[str, Any]:
    return json.loads((directory / f"{name}.json").read_text())


def test_two_processes_grow_alike_and_resume_alike(tmp_path):
    run_program("ddp", tmp_path)
    whole, other = read(tmp_path, "whole-0"), read(tmp_path, "whole-1")
    assert whole["grown"] == ["stem", "body"]
    assert len(whole["losses"]) == EPOCHS - 1
    assert whole["own_loss"] != other["own_loss"]  # each has validated its own samples
    assert (whole["digest"], whole["decisions"]) == (other["digest"], other["decisions"])
    for rank in (0, 1):
        resumed = read(tmp_path, f"resumed-{rank}")
        assert resumed["digest"] == whole["digest"]
        assert whole["losses"][-len(resumed["losses"]) :] == resumed["losses"]


def test_forked_processes_return_a_grown_module_or_refuse(tmp_path):
    run_program("fork", tmp_path)
    main = read(tmp_path, "main")
    assert main["grown"] == ["stem", "body"]
    assert read(tmp_path, "fork-0")["digest"] == read(tmp_path, "fork-1")["digest"]
    assert "trains in processes that it starts itself" in main["refused"]


if __name__ == "__main__":
    {"ddp": run_ddp, "fork": run_fork}[sys.argv[1]](Path(sys.argv[2]))
