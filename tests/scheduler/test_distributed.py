"""Several processes that train one model together are refused; a process alone is not."""

import json
import socket
import subprocess
import sys
from datetime import timedelta

import pytest
import torch
from torch import distributed, nn
from torch.distributed import HashStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from simic import GrowableModel, GrowthScheduler


def make_host() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def make_model(host=None) -> GrowableModel:
    return GrowableModel(host or make_host(), ["1"], example_input=torch.zeros(2, 3))


def make_scheduler(model) -> GrowthScheduler:
    optimizer = SGD(model.parameters(), lr=0.1)
    return GrowthScheduler(model, optimizer, evaluate=lambda: {"val_loss": 1.0})


def train(model, optimizer) -> None:
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def refusal(call) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return "accepted"


def rank_of_two(rank: int, port: int) -> None:
    """Build before and after the group exists, plain and wrapped; prints what is refused, in words."""
    model = make_model()
    early = make_scheduler(model)
    store = TCPStore("127.0.0.1", port, 2, rank == 0, timeout=timedelta(seconds=60))
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    train(DistributedDataParallel(model), early.optimizer)
    calls = {
        "step": early.step,
        "construction": lambda: make_scheduler(make_model()),
        "wrapped": lambda: make_scheduler(DistributedDataParallel(make_model())),
    }
    print(json.dumps({name: refusal(call) for name, call in calls.items()}))
    distributed.barrier()
    distributed.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_are_refused_at_construction_and_at_every_step():
    command = [sys.executable, __file__]
    port = str(free_port())
    ranks = [subprocess.Popen([*command, str(rank), port], stdout=subprocess.PIPE, text=True) for rank in range(2)]
    found = [json.loads(process.communicate(timeout=120)[0]) for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0]
    for rank in range(2):
        for name in ("step", "construction"):
            assert "single process without DDP or FSDP" in found[rank][name], (rank, name)
            assert "belongs to a group of 2" in found[rank][name]
        assert "wrapped in DistributedDataParallel" in found[rank]["wrapped"]


@pytest.fixture
def group_of_one():
    store = HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def test_a_group_of_one_is_accepted(group_of_one):
    scheduler = make_scheduler(make_model())
    train(scheduler.model, scheduler.optimizer)
    assert scheduler.step().index == 0


def test_a_wrapped_model_is_refused_whatever_the_group(group_of_one):
    inside = GrowableModel(DistributedDataParallel(make_host()), ["module.1"], example_input=torch.zeros(2, 3))
    with pytest.raises(ValueError, match="a part of the model is wrapped in DistributedDataParallel"):
        make_scheduler(inside)
    with pytest.raises(ValueError, match="the model is wrapped in DistributedDataParallel"):
        make_scheduler(DistributedDataParallel(make_model()))


class FullyShardedDataParallel(nn.Sequential):
    """Has the name that counts; the real one needs an accelerator."""


def test_sharded_models_are_known_by_name():
    with pytest.raises(ValueError, match="wrapped in FullyShardedDataParallel"):
        make_scheduler(GrowableModel(FullyShardedDataParallel(make_host()), ["0.1"], example_input=torch.zeros(2, 3)))


if __name__ == "__main__":
    rank_of_two(int(sys.argv[1]), int(sys.argv[2]))
