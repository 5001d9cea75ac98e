"""Lower precision of forward passes: hosts learn as in float32, and float16 overflows concern one host alone."""

from functools import cache

import numpy as np
import pytest
import torch
from helpers.grown_hosts import KINDS, SLOTS, STYLE_OF, grown_hosts
from helpers.tiers import slow_but

from simic import Action
from simic.lifecycle.stages import INCUBATIONS, Incubation, Stage
from simic.stacked import precision
from simic.stacked.config import HostsConfig, Precision
from simic.stacked.hosts import StackedHosts
from simic.stacked.optimizer import OptimizerConfig, StackedOptimizer
from simic.stacked.parameters import StackedParameters
from simic.stacked.precision import INITIAL_SCALE, LossScale
from simic.stacked.snapshot import Snapshot
from simic.tasks.task import accuracy, mean_cross_entropy

LOW = pytest.mark.parametrize("low", ["bfloat16", "float16"])


@cache
def trained(kind: str, low: Precision, incubation: Incubation = "direct", steps: int = 30):
    """Losses (steps, N) of hosts whose seeds in the block are in training, then blended in."""
    hosts = grown_hosts(kind, incubation, config=HostsConfig(precision=low))
    x, y = KINDS[kind].draw(hosts.num_hosts, 32)
    losses = []
    for step in range(steps):
        if step in (0, steps // 3):
            blended = step > 0 or not hosts.lifecycle.has_training_stage
            hosts.slot_state.stage[:-1, 1] = Stage.BLENDING if blended else Stage.TRAINING
            hosts.slot_state.alpha[:-1, 1] = 0.5 * blended
            hosts.sync_with_slots()
        losses.append(hosts.train_step(x, y, torch.full((hosts.num_hosts,), 0.01)))
    return hosts, torch.stack(losses)


def tensors_of(hosts: StackedHosts) -> list[torch.Tensor]:
    matrices = [hosts.hosts, *(group.parameters for group in hosts.groups.values())]
    return [tensor for own in matrices for tensor in (own.rows, *own.optimizer_state.tensors())]


@LOW
@pytest.mark.parametrize("kind", slow_but(["features", "images"], KINDS))
def test_hosts_learn_as_in_float32(kind, low):
    hosts, losses = trained(kind, low)
    _, expected = trained(kind, "float32")
    assert losses.dtype == torch.float32
    assert {tensor.dtype for tensor in tensors_of(hosts)} == {torch.float32}
    assert all(tensor.isfinite().all() for tensor in tensors_of(hosts))
    assert not torch.equal(losses, expected), "the precision makes a difference"
    torch.testing.assert_close(losses[0], expected[0], rtol=0.02, atol=0.02)
    learned = (losses[0] - losses[-1]).mean()
    assert learned > 0.1
    assert float(learned) == pytest.approx(float((expected[0] - expected[-1]).mean()), rel=0.1)


@LOW
@pytest.mark.parametrize("incubation", INCUBATIONS)
def test_incubations_run_in_low_precision(incubation, low):
    hosts, losses = trained("features without norm", low, incubation, steps=6)
    x, y = KINDS["features without norm"].draw(hosts.num_hosts, 32)
    assert losses.isfinite().all()
    for figure in (*hosts.evaluate(x, y), hosts.evaluate_and_attribute(x, y)[2][:-1, 1], hosts.mean_gradient_norms()):
        assert figure.dtype == torch.float32
        assert figure.isfinite().all()


# The loss scale of float16.


def float16_hosts() -> tuple[StackedHosts, torch.Tensor, torch.Tensor]:
    """Four hosts, an mlp in every stem, whose gradients do not overflow at the initial scale."""
    own = KINDS["features"]
    hosts = StackedHosts(
        own.make_host, SLOTS, example_input=own.draw(2)[0], rng_seeds=range(4), loss=mean_cross_entropy,
        metric=accuracy, config=HostsConfig(precision="float16"),
    )  # fmt: skip
    action = Action("germinate", "stem", "mlp", STYLE_OF["add"])
    hosts.plant(np.stack([action.encode(SLOTS, hosts.blueprint_names)] * 4))
    x, y = own.draw(4, 16)
    scale_of(hosts).scale.fill_(256.0)
    return hosts, x, y


def scale_of(hosts: StackedHosts) -> LossScale:
    assert hosts.loss_scale is not None
    return hosts.loss_scale


RATE = torch.full((4,), 0.01)


@pytest.mark.parametrize("how", ["overflow", "not a number"])
def test_a_host_that_overflows_skips_its_step_alone(how):
    steady, x, y = float16_hosts()
    hosts, _, _ = float16_hosts()
    for each in (steady, hosts):
        each.train_step(x, y, RATE)
    if how == "overflow":
        scale_of(hosts).scale[2] = 2.0**100
    else:
        x = x.clone()
        x[2, 0, 0] = torch.nan
    before = [tensor.clone() for tensor in tensors_of(hosts)]
    scale = float(scale_of(hosts).scale[2])
    for each in (steady, hosts):
        each.train_step(x, y, RATE)
    others = [0, 1, 3]
    for now, old, expected in zip(tensors_of(hosts), before, tensors_of(steady), strict=True):
        assert torch.equal(now[2], old[2])
        assert torch.equal(now[others], expected[others])
        assert not torch.equal(now[others], old[others])
    assert scale_of(hosts).scale.tolist() == [256.0, 256.0, scale / 2, 256.0]
    assert scale_of(hosts).finite_steps.tolist() == [2, 2, 0, 2]
    assert hosts.mean_gradient_norms().isfinite().all()


def test_a_host_learns_again_once_its_scale_is_small_enough():
    hosts, x, y = float16_hosts()
    scale_of(hosts).scale[1] = 2.0**30
    losses = torch.stack([hosts.train_step(x, y, RATE) for _ in range(60)])
    assert scale_of(hosts).scale[1] < 2.0**30
    assert (losses[-1] < losses[0]).all()


def test_steps_do_not_depend_on_the_scale():
    rows = []
    for scale in (2.0**4, 2.0**10):
        hosts, x, y = float16_hosts()
        scale_of(hosts).scale.fill_(scale)
        for _ in range(3):
            hosts.train_step(x, y, RATE)
        assert scale_of(hosts).scale.tolist() == [scale] * 4
        rows.append(torch.cat([hosts.hosts.rows, hosts.mean_gradient_norms().view(-1, 4).T], dim=1))
    torch.testing.assert_close(*rows, rtol=0.02, atol=5e-3)


def test_many_finite_steps_double_the_scale(monkeypatch):
    monkeypatch.setattr(precision, "GROWTH_INTERVAL", 3)
    scale = LossScale(2, torch.device("cpu"))
    seen = []
    for finite in ([True, True], [True, False], [True, True], [True, True], [True, True]):
        scale.update(torch.tensor(finite))
        seen.append((scale.scale / INITIAL_SCALE).tolist())
    assert seen == [[1, 1], [1, 0.5], [2, 0.5], [2, 0.5], [2, 1]]
    assert scale.finite_steps.tolist() == [2, 0]


def test_a_snapshot_holds_the_scale():
    hosts, x, y = float16_hosts()
    scale_of(hosts).scale.copy_(torch.tensor([1.0, 2.0, 4.0, 8.0]))
    hosts.train_step(x, y, RATE)
    snapshot = Snapshot(hosts)
    for tensor in scale_of(hosts).tensors():
        tensor.fill_(64.0)
    snapshot.restore(hosts, np.array([True, False, False, True]))
    assert scale_of(hosts).scale.tolist() == [1.0, 64.0, 64.0, 8.0]
    assert scale_of(hosts).finite_steps.tolist() == [1, 64, 64, 1]


def test_a_reset_host_begins_with_the_initial_scale():
    hosts, x, y = float16_hosts()
    hosts.train_step(x, y, RATE)
    hosts.reset(np.array([1]), np.array([9]))
    assert scale_of(hosts).scale.tolist() == [256.0, INITIAL_SCALE, 256.0, 256.0]
    assert scale_of(hosts).finite_steps.tolist() == [1, 0, 1, 1]


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_scaled_gradients_are_scaled_back_before_clipping(name):
    """Host 1 overflows; host 0 makes the step it would make with a gradient that was never scaled."""
    results = []
    for scale in (None, LossScale(2, torch.device("cpu"))):
        matrix = StackedParameters(torch.ones(2, 3), {"w": torch.Size([3])})
        config = OptimizerConfig(name=name, max_gradient_norm=0.5)
        optimizer = StackedOptimizer([matrix], [np.arange(2)], [np.arange(2)], config, num_slots=0)
        gradient = torch.tensor([1.0, -2.0, 3.0, 1.0, 1.0, 1.0])
        if scale is not None:
            gradient = gradient * scale.scale.repeat_interleave(3)
            gradient[4] = torch.nan
        norms = optimizer.step(gradient, torch.tensor([0.1, 0.1]), None, scale)
        results.append((norms[0], matrix.rows[0], matrix.optimizer_state.mean[0]))
    torch.testing.assert_close(*results)
    assert torch.equal(matrix.rows[1], torch.ones(3))
    assert matrix.optimizer_state.steps.tolist() == [1, 0]
    assert norms.tolist()[1] == 0
