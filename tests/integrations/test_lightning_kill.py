"""A Lightning run that is killed five times at random moments ends in the same bits as one that never was.

This file is also the program that trains, `python test_lightning_kill.py DIRECTORY`: it imports Lightning once, and
forks a process for every attempt.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.integrations
KILLS, EPOCHS = 5, 16


def train(directory: Path) -> None:
    """Train, or continue with the last checkpoint, and write the end to a file."""
    from helpers.lightning_runs import LitNet, digest, make_trainer, train_data, val_data
    from lightning.pytorch import Callback
    from lightning.pytorch.callbacks import ModelCheckpoint

    from simic import HeuristicController
    from simic.integrations.lightning import GrowthCallback

    class Started(Callback):
        def on_train_start(self, trainer, pl_module) -> None:
            (directory / "started").touch()

    module, callback = LitNet(), GrowthCallback(["stem", "body"], HeuristicController())
    last = ModelCheckpoint(directory, save_last=True, enable_version_counter=False)
    trainer = make_trainer(directory, callback, last, Started(), max_epochs=EPOCHS)
    trainer.fit(module, train_data(), val_data(), ckpt_path="last")
    end = {"digest": digest(module, trainer), "growth": repr(callback.growth.state_dict())}
    (directory / "end.json").write_text(json.dumps(end))


def attempt(directory: Path, seconds: float | None) -> tuple[bool, float]:
    """Train in a process of its own, killed after so many seconds of training; whether it was, and after how many."""
    (directory / "started").unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        try:
            train(directory)
        finally:
            os._exit(not (directory / "end.json").exists())
    while not (directory / "started").exists():
        time.sleep(0.002)
    start = time.monotonic()
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status), time.monotonic() - start


def main(directory: Path) -> None:
    """Once without a kill, then with five."""
    import helpers.lightning_runs  # noqa: F401 - what every attempt needs, once
    import torch

    torch.set_num_threads(1)
    _, duration = attempt(directory / "whole", None)
    moments = []
    while len(moments) < KILLS:
        killed, moment = attempt(directory / "killed", random.uniform(0.0, 0.35) * duration)
        if killed:
            moments.append(moment)
        else:  # it was done before
            shutil.rmtree(directory / "killed")
            (directory / "killed").mkdir()
    resumed_from = [path.name for path in (directory / "killed").glob("*.ckpt")]
    attempt(directory / "killed", None)
    ends = [json.loads((directory / name / "end.json").read_text()) for name in ("whole", "killed")]
    print(json.dumps({"moments": moments, "duration": duration, "resumed_from": resumed_from, "ends": ends}))


def test_killed_five_times_it_ends_in_the_same_bits(tmp_path):
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    root = Path(__file__).parents[2]
    paths = os.pathsep.join([str(root / "src"), str(root / "tests")])
    result = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    told = json.loads(result.stdout.splitlines()[-1])
    assert len(told["moments"]) == KILLS
    assert told["resumed_from"], told  # at least the last attempt began in the middle
    assert told["ends"][0] == told["ends"][1], told["moments"]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
