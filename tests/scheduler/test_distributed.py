"""One process in a group of its own: DistributedDataParallel is accepted around a model, other wrappers are refused."""

from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import SGD
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from simic import Action, GrowableModel, GrowthScheduler, ScriptedController

X = torch.linspace(-1, 1, 12).view(4, 3)


def make_host() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def make_model(host=None) -> GrowableModel:
    return GrowableModel(host or make_host(), ["1"], example_input=X)


def make_scheduler(model, controller: Any = "heuristic") -> GrowthScheduler:
    optimizer = SGD(model.parameters(), lr=0.1)
    return GrowthScheduler(model, optimizer, controller, evaluate=lambda: {"val_loss": float(model(X).sum())})


def train(model, optimizer, batches=1) -> None:
    for _ in range(batches):
        optimizer.zero_grad()
        model(X).sum().backward()
        optimizer.step()


@pytest.fixture
def group_of_one():
    distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def test_a_group_of_one_is_accepted(group_of_one):
    scheduler = make_scheduler(make_model())
    train(scheduler.model, scheduler.optimizer)
    assert scheduler.step().index == 0


def test_a_ddp_object_stands_for_the_model_inside(group_of_one):
    model = make_model()
    assert make_scheduler(DistributedDataParallel(model)).model is model


@pytest.mark.parametrize("given", ["ddp", "model"])
def test_a_seed_that_ddp_knows_may_be_pruned(group_of_one, given):
    """DDP waits for a gradient of everything in its buckets, so seeds must leave them."""
    model = make_model()
    model.execute(Action("germinate", "1", "mlp"))
    model.tick()
    ddp = DistributedDataParallel(model)
    controller = ScriptedController([Action("prune", "1")])
    scheduler = make_scheduler(ddp, controller) if given == "ddp" else make_scheduler(model, controller)
    train(ddp, scheduler.optimizer, batches=2)
    scheduler.step()
    assert model.grown_slots == []
    train(ddp, scheduler.optimizer, batches=3)


def test_ddp_around_a_larger_network_is_found_when_it_runs(group_of_one):
    model = make_model()
    model.plant("1", "mlp")
    outer = nn.Sequential(model, nn.Linear(2, 2))
    ddp = DistributedDataParallel(outer)
    optimizer = SGD(outer.parameters(), lr=0.1)
    scheduler = GrowthScheduler(model, optimizer, "wait", evaluate=lambda: {"val_loss": 1.0})
    train(ddp, optimizer, batches=2)
    scheduler.step()
    assert set(ddp._module_parameters) == {*model.host.parameters(), *outer[1].parameters()}


def test_averaged_weights_follow_the_model_inside_ddp(group_of_one):
    model = make_model()
    ddp = DistributedDataParallel(model)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    model.execute(Action("germinate", "1", "mlp"))
    with pytest.raises(RuntimeError, match="no longer match"):
        averaged.update_parameters(ddp)
    followed = averaged.module
    assert isinstance(followed, GrowableModel)
    followed.follow(ddp)
    averaged.update_parameters(ddp)
    assert followed.grown_slots == ["1"]


def test_ddp_inside_the_model_is_refused(group_of_one):
    inside = GrowableModel(DistributedDataParallel(make_host()), ["module.1"], example_input=X)
    with pytest.raises(
        ValueError, match=r"a part of the model is wrapped in Dist.*DistributedDataParallel\(GrowableModel\(host\)\)"
    ):
        make_scheduler(inside)


def test_data_parallel_is_refused():
    with pytest.raises(ValueError, match="the model is wrapped in DataParallel: start one process per device"):
        make_scheduler(DataParallel(make_model()))


class FullyShardedDataParallel(nn.Sequential):
    """Has the name that counts; the real one needs an accelerator."""


class DeepSpeedEngine(nn.Sequential):
    """Has the name that counts."""


@pytest.mark.parametrize("wrapper", [FullyShardedDataParallel, DeepSpeedEngine])
def test_sharded_models_are_known_by_name(wrapper):
    with pytest.raises(ValueError, match=f"a part of the model is wrapped in {wrapper.__name__}"):
        make_scheduler(GrowableModel(wrapper(make_host()), ["0.1"], example_input=X))
    with pytest.raises(ValueError, match=f"the model is wrapped in {wrapper.__name__}"):
        make_scheduler(wrapper(make_model()))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # torch's compiler
def test_one_graph_for_everything_is_refused_with_the_reason(group_of_one):
    """Without fullgraph=True the same model compiles, in one graph that ends before the hook."""
    graphs = []

    def backend(graph: torch.fx.GraphModule, example: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model = make_model()
    with pytest.raises(
        RuntimeError, match=r"(?s)seeds are averaged over processes.* compile .* without fullgraph=True"
    ):
        torch.compile(model, backend=backend, fullgraph=True)(X)
    compiled = torch.compile(model, backend=backend)
    for _ in range(3):
        assert torch.equal(compiled(X), model(X))
    assert len(graphs) == 1
