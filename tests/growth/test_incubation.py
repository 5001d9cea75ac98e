"""Incubation: passes that leave no trace, and the exact gradient that a seed in training hears."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import simic
from simic.growth.blend import straight_through
from simic.growth.incubation import override_alpha, shadow_loss
from simic.growth.isolation import evaluating, freeze_all_but, preserve_state
from simic.growth.model import GrowableModel
from simic.lifecycle.actions import Action
from simic.lifecycle.stages import Incubation, LifecycleConfig

X, Y = torch.randn(6, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 0, 1, 1, 0])


def make_host() -> nn.Sequential:
    torch.default_generator.manual_seed(0)
    return nn.Sequential(
        *(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Dropout(0.3)),
        *(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Dropout(0.3)),
        nn.Linear(4, 2),
    )


def in_training(
    incubation: Incubation, *slots: str, blueprint: str = "mlp_small", style: str = "linear-add"
) -> GrowableModel:
    """A model whose seeds are in the stage training, with weights that are no longer those of birth."""
    config = LifecycleConfig(incubation=incubation, min_training_decisions=0)
    model = GrowableModel(make_host(), slots, example_input=X, lifecycle=config)
    for slot in slots:
        model.execute(Action("germinate", slot, blueprint, style=style, alpha_target=0.7))
        model.execute(Action("advance", slot))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.seeds.parameters():
            parameter.normal_(0, 0.5, generator=generator)
    return model


def loss_of(model: nn.Module) -> torch.Tensor:
    return F.cross_entropy(model(X), Y)


def gradients(model: GrowableModel, module: nn.Module) -> list[torch.Tensor]:
    model.zero_grad()
    torch.default_generator.manual_seed(2)
    model.loss(lambda: loss_of(model)).backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in module.parameters()]


# Passes that leave no trace.


def test_an_undisturbed_pass_leaves_buffers_and_random_streams():
    host = make_host().train()
    before = {name: value.clone() for name, value in host.state_dict().items()}
    rng = torch.get_rng_state()
    with preserve_state(host):
        host(X)
        assert not torch.equal(host.state_dict()["1.running_mean"], before["1.running_mean"])
    assert all(torch.equal(value, before[name]) for name, value in host.state_dict().items())
    assert torch.equal(torch.get_rng_state(), rng)


def test_an_undisturbed_pass_does_not_break_a_graph_that_is_still_needed():
    host = make_host().train()
    loss = loss_of(host)
    with preserve_state(host):
        loss_of(host)
    loss.backward()


def test_exempt_buffers_do_change():
    host = make_host().train()
    with preserve_state(host, exempt=host[1]):
        host(X)
    assert host[1].num_batches_tracked == 1
    assert host[5].num_batches_tracked == 0


def test_evaluating_puts_every_mode_back():
    host = make_host().train()
    host[3].eval()
    modes = [part.training for part in host.modules()]
    with evaluating(host):
        assert not any(part.training for part in host.modules())
        assert not loss_of(host).requires_grad
    assert [part.training for part in host.modules()] == modes


def test_freeze_all_but_lets_one_part_learn_and_keeps_frozen_parts_frozen():
    host = make_host()
    host[8].requires_grad_(False)
    with freeze_all_but(host, host[4]):
        assert [p.requires_grad for p in host.parameters()] == [False] * 4 + [True] * 2 + [False] * 4
    assert [p.requires_grad for p in host.parameters()] == [True] * 8 + [False] * 2


class Boom(nn.Module):
    """Fails when it runs."""

    def forward(self, x):
        raise RuntimeError("boom")


@pytest.mark.parametrize("context", [preserve_state, evaluating, lambda host: freeze_all_but(host, host[0])])
def test_an_error_inside_a_pass_leaves_no_trace_either(context):
    host = make_host().train()
    before, rng = {name: value.clone() for name, value in host.state_dict().items()}, torch.get_rng_state()
    host.append(Boom())
    with pytest.raises(RuntimeError, match="boom"), preserve_state(host), context(host):
        host(X)
    assert all(torch.equal(value, before[name]) for name, value in host.state_dict().items())
    assert all(p.requires_grad for p in host.parameters())
    assert all(part.training for part in host.modules())
    assert torch.equal(torch.get_rng_state(), rng)


def test_a_failing_closure_leaves_the_model_as_it_was():
    model = in_training("shadow", "2")
    calls = []

    def closure():
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("boom")
        return loss_of(model)

    with pytest.raises(RuntimeError, match="boom"):
        model.loss(closure)
    assert all(p.requires_grad for p in model.parameters())
    seed = model.seed("2")
    assert seed is not None
    assert seed.override is None


def test_overrides_nest():
    seed = in_training("shadow", "2").seed("2")
    assert seed is not None
    with override_alpha(seed, 0.5):
        with override_alpha(seed, 0.0):
            assert seed.override == 0.0
        assert seed.override == 0.5
    assert seed.override is None


# What a seed hears.


@pytest.mark.parametrize("style", ["linear-add", "linear-multiply", "gated"])
def test_a_shadow_hears_the_true_loss_with_itself_at_its_alpha_target(style):
    model = in_training("shadow", "2", style=style)
    seed = model.seed("2")
    assert seed is not None
    heard = gradients(model, seed)
    # By hand: the host's parts in a row, with the seed at alpha 0.7 and the same dropout masks.
    twin = make_host()
    torch.default_generator.manual_seed(2)
    h = twin[:3](X)
    f = seed.branch(h)
    if style == "linear-multiply":
        s = h * (1 + 0.7 * torch.tanh(f))
    else:
        s = h + 0.7 * f * (1 if seed.gate is None else torch.sigmoid(seed.gate.linear(h)))
    expected = torch.autograd.grad(F.cross_entropy(twin[3:](s), Y), list(seed.parameters()))
    for got, wanted in zip(heard, expected, strict=True):
        assert wanted.abs().max() > 0
        torch.testing.assert_close(got, wanted)


def test_a_straight_through_seed_hears_the_gradient_at_the_host_s_own_activation():
    model = in_training("straight_through", "2")
    seed = model.seed("2")
    assert seed is not None
    heard = gradients(model, seed)
    twin = make_host()
    torch.default_generator.manual_seed(2)
    h = twin[:3](X)
    (at_h,) = torch.autograd.grad(F.cross_entropy(twin[3:](h), Y), h)
    expected = torch.autograd.grad(seed.branch(h.detach()), list(seed.branch.parameters()), grad_outputs=at_h)
    for got, wanted in zip(heard, expected, strict=True):
        assert wanted.abs().max() > 0
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("incubation", ["shadow", "straight_through"])
def test_the_host_s_gradient_is_that_of_a_host_without_seeds(incubation):
    model, twin = in_training(incubation, "2", "6"), make_host()
    heard = gradients(model, model.host)
    torch.default_generator.manual_seed(2)
    loss_of(twin).backward()
    for got, wanted in zip(heard, twin.parameters(), strict=True):
        assert wanted.grad is not None
        assert torch.equal(got, wanted.grad)


@pytest.mark.parametrize("incubation", ["shadow", "straight_through"])
def test_seeds_in_training_do_not_hear_each_other(incubation):
    pair = in_training(incubation, "2", "6")
    alone = in_training(incubation, "2")
    together, single = pair.seed("2"), alone.seed("2")
    assert together is not None
    assert single is not None
    single.load_state_dict(together.state_dict())
    for got, wanted in zip(gradients(pair, together), gradients(alone, single), strict=True):
        assert torch.equal(got, wanted)


def test_a_blending_seed_does_not_feel_a_seed_in_training():
    def blending_gradient(with_pupil: bool) -> list[torch.Tensor]:
        model = in_training("shadow", "2", "6")
        model.slot_state.gradient_norm[:] = 1.0
        model.execute(Action("advance", "2"))
        model.tick()
        if not with_pupil:
            model.execute(Action("prune", "6"))
        seed = model.seed("2")
        assert seed is not None
        return gradients(model, seed)

    for got, wanted in zip(blending_gradient(True), blending_gradient(False), strict=True):
        assert wanted.abs().max() > 0
        assert torch.equal(got, wanted)


def test_a_loss_costs_one_pass_and_one_more_per_pupil():
    def passes(model: GrowableModel) -> int:
        calls = []
        model.loss(lambda: calls.append(1) or loss_of(model))
        return len(calls)

    model = in_training("shadow", "2", "6")
    assert passes(model) == 3
    assert passes(in_training("straight_through", "2")) == 1
    assert passes(GrowableModel(make_host(), ["2"], example_input=X)) == 1
    with torch.no_grad():
        assert passes(model) == 1


def test_shadow_loss_without_pupils_is_the_loss():
    model = GrowableModel(make_host(), ["2"], example_input=X).eval()
    assert torch.equal(shadow_loss(model, [], lambda: loss_of(model)), loss_of(model))


# A seed that breaks must not break the host.


def test_straight_through_gives_the_host_s_value_whatever_the_branch():
    h, branch = torch.randn(3), torch.tensor([1.0, float("inf"), float("nan")])
    assert torch.equal(straight_through(h, branch), h)


@pytest.mark.parametrize("incubation", ["shadow", "straight_through"])
def test_a_seed_in_training_that_overflows_does_not_reach_the_host_s_loss(incubation):
    model, twin = in_training(incubation, "2"), make_host()
    with torch.no_grad():
        for parameter in model.seeds.parameters():
            parameter.fill_(1e30)
    heard = gradients(model, model.host)
    torch.default_generator.manual_seed(2)
    loss = model.loss(lambda: loss_of(model))
    torch.default_generator.manual_seed(2)
    twin_loss = loss_of(twin)
    twin_loss.backward()
    for got, wanted in zip(heard, twin.parameters(), strict=True):
        assert wanted.grad is not None
        assert torch.equal(got, wanted.grad)
    assert torch.equal(loss, twin_loss)


@pytest.mark.usefixtures("own_names")
@pytest.mark.parametrize("incubation", ["shadow", "straight_through"])
def test_a_seed_with_dropout_leaves_the_host_s_dropout_masks_alone(incubation):
    @simic.blueprint("with_dropout", topology="features")
    def build(shape):
        return nn.Sequential(nn.Dropout(0.5), simic.zeroed(nn.Linear(shape.features, shape.features)))

    model, twin = in_training(incubation, "2", blueprint="with_dropout"), make_host()
    for step in range(2):
        torch.default_generator.manual_seed(step)
        loss = model.loss(lambda: loss_of(model))
        torch.default_generator.manual_seed(step)
        assert torch.equal(loss, loss_of(twin))
