"""Growth in a Trainer on two processes: both ranks end with the same bits, also when they are resumed."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="make test-integrations installs it")
from helpers.tiny_trainer import FIRST

pytestmark = pytest.mark.integrations
TESTS = Path(__file__).parent.parent

SCRIPT = """
import json, os, sys, traceback
sys.path.insert(0, sys.argv[1])
import torch
from pathlib import Path
from helpers.tiny_trainer import grow, make_trainer

torch.set_num_threads(1)
folder, port = Path(sys.argv[2]), sys.argv[3]

def train(rank):
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})
    for name, resume in (("straight", None), ("resumed", str(folder / "straight" / "checkpoint-6"))):
        trainer = make_trainer(folder / name, per_device_train_batch_size=8, ddp_backend="gloo")
        growth = grow(trainer)
        trainer.train(resume_from_checkpoint=resume)
        assert type(trainer.model_wrapped).__name__ == "DistributedDataParallel"
        assert growth.model.grown_slots == ["transformer.h.0"]
        logs = [log for log in trainer.state.log_history if "growth_decision" in log]
        torch.save([trainer.model.state_dict(), json.dumps(logs)], folder / f"{name}-{rank}.pt")

children = []
for rank in range(2):  # forks, because new processes would spend most of their lives importing
    children.append(os.fork())
    if not children[-1]:
        try:
            train(rank)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
sys.exit(max(os.waitpid(child, 0)[1] for child in children))
"""


def test_two_processes_grow_alike(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-c", SCRIPT, str(TESTS), str(tmp_path), str(port)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert result.returncode == 0, result.stderr
    expected, logs = torch.load(tmp_path / "straight-0.pt")
    assert any(name.startswith(f"seeds.{FIRST.replace('.', '/')}") for name in expected)
    assert [log["growth_decision"] for log in json.loads(logs)] == [0, 1, 2, 3, 4, 5, 6]
    for other in ("straight-1", "resumed-0", "resumed-1"):
        found, other_logs = torch.load(tmp_path / f"{other}.pt")
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected), other
        assert json.loads(other_logs) == json.loads(logs)
