"""The learner on another device: one whole update runs on `meta`, where a tensor left on the CPU is found."""

import pytest
import torch
from helpers.one_device import OneDevice
from helpers.rollouts import flat_agent, growth_agent, play

from simic.policy.masked_categorical import MaskedCategorical
from simic.policy.normalization import Normalizer, widest_float
from simic.ppo.agent import PPOAgent
from simic.ppo.config import ImitationConfig, IQLConfig
from simic.ppo.imitation import imitate
from simic.ppo.offline import learn_offline

MAKERS = pytest.mark.parametrize("make", [flat_agent, growth_agent])
META = torch.device("meta")


def twin_on_meta(make, **config):
    """A rollout of an agent on the CPU, and an agent like it on the meta device."""
    here = make(**config)
    rollout = play(here, 8, 4, resets=0.3)[0]
    assert rollout.first[1:].any()  # sequences are cut
    return rollout, PPOAgent(make(**config).plain, here.config, device=META)


@MAKERS
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"surrogate": "per_head", "micro_batches": 2, "max_head_gradient_norm": 0.5},
        {"value_clip_range": 0.2, "critic_weight_decay": 0.1},
        {"sequence_length": 3, "micro_batches": 2},
    ],
)
def test_one_whole_update_stays_on_its_device(make, config):
    rollout, agent = twin_on_meta(make, ppo_epochs=1, num_minibatches=2, target_kl=1.0, **config)
    with OneDevice() as watch:
        metrics = agent.update(rollout)
    assert all(parameter.is_meta for parameter in agent.plain.parameters())
    assert metrics.steps_taken == agent.gradient_steps == 2
    # One for each gradient step, which may have to be refused, and one for all metrics together.
    assert watch.reads == 3


def test_episodes_that_are_not_cut_stay_on_their_device_too():
    config = {"target_kl": 1.0, "ppo_epochs": 2, "num_minibatches": 1, "recompute_advantages": True}
    agent = PPOAgent(flat_agent().plain, flat_agent(**config).config, device=META)
    with OneDevice():
        agent.update(play(flat_agent(), 4, 2, resets=0.0)[0])


@MAKERS
def test_learning_from_records_stays_on_its_device(make):
    rollout, agent = twin_on_meta(make)
    with OneDevice():
        imitate(agent, [rollout], ImitationConfig(passes=1, held_out=0.25))
        learn_offline(agent, [rollout], IQLConfig(steps=1))


def test_a_tensor_left_on_the_cpu_is_found():
    with OneDevice() as watch:
        with pytest.raises(AssertionError, match="mixes devices"):
            torch.cat([torch.zeros(1, device=META), torch.zeros(1)])
        assert float(torch.zeros((), device=META)) == 0.0
    assert watch.reads == 1


@pytest.mark.parametrize(("kind", "dtype"), [("mps", torch.float32), ("cuda", torch.float64), ("meta", torch.float64)])
def test_statistics_have_the_widest_precision_of_a_device(kind, dtype):
    assert widest_float(torch.device(kind)) == dtype


def test_statistics_on_a_device_without_float64_come_back_wide(monkeypatch):
    """As on MPS: what goes there is narrow, and what comes back can be saved as before."""
    narrow = torch.device("meta")
    monkeypatch.setattr(
        "simic.policy.normalization.widest_float", lambda device: torch.float32 if device == narrow else torch.float64
    )
    normal = Normalizer(3)
    normal.update(torch.randn(5, 3))
    assert {buffer.dtype for buffer in normal.to("meta").buffers()} == {torch.float32}
    assert {normal.to_empty(device="cpu").mean.dtype} == {torch.float64}


def test_draws_do_not_depend_on_the_device():
    logits, mask = torch.randn(50, 4), torch.ones(50, 4, dtype=torch.bool)
    generator = torch.Generator().manual_seed(3)
    there = MaskedCategorical(logits.to(META), mask.to(META))
    assert there.sample(generator).is_meta
    after = generator.get_state()
    generator.manual_seed(3)
    MaskedCategorical(logits, mask).sample(generator)
    assert torch.equal(generator.get_state(), after)
