"""Weight decay of the critic only, and gradient clipping as a whole and per head."""

import math
from typing import Any

import pytest
import torch
from helpers.rollouts import flat_agent, growth_agent, play, stir

from simic.ppo.config import PPOConfig
from simic.ppo.optimizer import FusedAdamW, load_optimizer, make_optimizer

ONE_STEP: dict[str, Any] = {"ppo_epochs": 1, "num_minibatches": 1}


def parameters(agent) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in agent.plain.named_parameters()}


def watch_steps(agent) -> list[dict[str, torch.Tensor]]:
    """The gradients that the optimizer gets, one entry per step, filled as they come."""
    seen = []

    def look(*_):
        seen.append({name: p.grad.clone() for name, p in agent.plain.named_parameters() if p.grad is not None})

    agent.optimizer.register_step_pre_hook(look)
    return seen


def norm_of(gradients) -> float:
    return math.sqrt(sum((gradient.double() ** 2).sum().item() for gradient in gradients))


def test_weight_decay_touches_the_critic_only():
    """Two agents that differ in it: after one step their critics differ by rate x decay x weight, nothing else does."""
    rate, decay = 0.01, 0.5
    plain, decaying = (stir(flat_agent(learning_rate=rate, critic_weight_decay=d, **ONE_STEP)) for d in (0.0, decay))
    rollout, _ = play(plain, 10, 3)
    plain.value_scale.decay = decaying.value_scale.decay = 0.5
    for agent in (plain, decaying):
        agent.update(rollout)
    reference = stir(flat_agent(**ONE_STEP))
    batch, _ = reference.prepare_batch(reference.update_scales(rollout))
    reference.value_scale.pop_art_update(batch.target, rollout.valid, reference.plain.critic)  # before the step
    started = parameters(reference)
    for name, value in parameters(plain).items():
        difference = value - parameters(decaying)[name]
        expected = rate * decay * started[name] if name.startswith("critic.") else torch.zeros(1)
        assert torch.allclose(difference, expected.expand_as(difference), atol=1e-6), name
    assert any(name.startswith("critic.") for name in started)


def test_the_optimizer_is_made_of_the_config():
    agent = flat_agent()
    optimizer = make_optimizer(agent.plain, PPOConfig(adam_epsilon=1e-3, learning_rate=0.2, critic_weight_decay=0.1))
    assert [(g["weight_decay"], g["eps"], g["lr"]) for g in optimizer.param_groups] == [
        (0, 1e-3, 0.2),
        (0.1, 1e-3, 0.2),
    ]
    assert [(g["foreach"], g["fused"]) for g in optimizer.param_groups] == [(False, True)] * 2
    grouped = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in agent.plain.parameters())


def test_gradients_are_clipped_as_a_whole_and_norms_recorded_before():
    free, held = (stir(growth_agent(max_gradient_norm=limit, **ONE_STEP)) for limit in (1e9, 0.01))
    rollout, _ = play(free, 12, 4)
    seen = [watch_steps(agent) for agent in (free, held)]
    metrics = [agent.update(rollout) for agent in (free, held)]
    true_norm = norm_of(seen[0][0].values())
    assert true_norm > 0.02
    assert norm_of(seen[1][0].values()) == pytest.approx(0.01, rel=1e-3)
    for name, gradient in seen[0][0].items():
        assert torch.allclose(seen[1][0][name], gradient * 0.01 / true_norm, atol=1e-6)
    for record in metrics:
        assert record.gradient_norm == pytest.approx(true_norm, rel=1e-4)
    names = {id(p): name for name, p in free.plain.named_parameters()}
    for head, own in free.plain.head_parameters().items():
        expected = norm_of(seen[0][0][names[id(p)]] for p in own if names[id(p)] in seen[0][0])
        assert metrics[1].head_gradient_norm[head] == pytest.approx(expected, rel=1e-4)


def test_gradients_are_clipped_per_head_if_asked():
    agents = [stir(growth_agent(max_gradient_norm=1e9, max_head_gradient_norm=h, **ONE_STEP)) for h in (None, 1e-3)]
    rollout, _ = play(agents[0], 12, 4)
    seen = [watch_steps(agent) for agent in agents]
    metrics = [agent.update(rollout) for agent in agents]
    of_heads = {id(p) for own_ in agents[1].plain.head_parameters().values() for p in own_}
    for head, parameters_ in agents[1].plain.head_parameters().items():
        names = [name for name, p in agents[1].plain.named_parameters() if any(p is q for q in parameters_)]
        found = norm_of(seen[1][0][name] for name in names if name in seen[1][0])
        assert found == pytest.approx(min(1e-3, metrics[0].head_gradient_norm[head]), rel=1e-2)
    for name, p in agents[1].plain.named_parameters():
        if id(p) not in of_heads and name in seen[0][0]:
            assert torch.allclose(seen[0][0][name], seen[1][0][name], atol=1e-6)
    assert metrics[0].head_gradient_norm == pytest.approx(metrics[1].head_gradient_norm, rel=1e-4)


def test_a_state_saved_with_other_kernels_loads():
    """The choice of kernels is this device's; everything else is the saved one."""
    old, new = flat_agent(**ONE_STEP), flat_agent(**ONE_STEP)
    for group in old.optimizer.param_groups:
        group["fused"], group["foreach"] = False, True
    rollout, _ = play(old, 6, 2)
    old.update(rollout)
    new.load_state_dict(old.state_dict())
    assert [(g["foreach"], g["fused"]) for g in new.optimizer.param_groups] == [(False, True)]
    for agent in (old, new):
        agent.update(rollout)
    for name, value in parameters(old).items():
        assert torch.allclose(value, parameters(new)[name], atol=1e-6), name


def test_the_direct_step_is_that_of_torch():
    """To the last bit, with weight decay in one group, a parameter that gets gradients later, and a saved state."""
    agent = stir(flat_agent())
    config = PPOConfig(adam_epsilon=1e-3, learning_rate=0.2, critic_weight_decay=0.1)
    own = make_optimizer(agent.plain, config)
    assert isinstance(own, FusedAdamW)
    parameters_ = [p for group in own.param_groups for p in group["params"]]
    twins = {p: torch.nn.Parameter(p.detach().clone()) for p in parameters_}
    groups = [group | {"params": [twins[p] for p in group["params"]]} for group in own.param_groups]
    theirs = torch.optim.AdamW(groups)
    generator = torch.Generator().manual_seed(0)
    for step in range(4):
        for index, (p, twin) in enumerate(twins.items()):
            if index or step > 1:
                p.grad = torch.randn(p.shape, generator=generator)
                twin.grad = p.grad.clone()
        own.step()
        theirs.step()
        if step == 2:
            load_optimizer(own, own.state_dict())
        for p, twin in twins.items():
            assert torch.equal(p, twin)
    assert [own.state[p]["step"].item() for p in parameters_[:2]] == [2, 4]
