"""Tiny tasks, planted policies and scripted decisions for contests."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from simic.control.facts import Facts
from simic.control.learned import make_network
from simic.environment.config import EpisodeConfig, GovernorConfig
from simic.evaluation.candidates import Settings
from simic.lifecycle.actions import Action, Op
from simic.lifecycle.stages import LifecycleConfig
from simic.policy.config import PolicyConfig
from simic.policy.network import FactoredRecurrentActorCritic
from simic.ppo.agent import PPOAgent
from simic.ppo.config import PPOConfig
from simic.tasks.data import Data
from simic.tasks.hosts import plain_mlp_host, slot_names
from simic.tasks.task import Task

EAGER = {Op.FOSSILIZE: 9.0, Op.ADVANCE: 8.0, Op.GERMINATE: 7.0, Op.PRUNE: -9.0, Op.SET_ALPHA_TARGET: -9.0}
"""Logits of operations: fossilise if you can, else advance, else plant."""


def host_of_width(width: int) -> Any:
    return lambda: plain_mlp_host(4, width, 2, 2)


def make_data(label: Any, sizes: tuple[int, int, int] = (32, 64, 64), features: int = 4) -> Data:
    """Normal inputs, each with the class that `label` gives it."""
    generator, parts = torch.Generator().manual_seed(0), dict[str, Tensor]()
    for name, size in zip(("train", "validation", "test"), sizes, strict=True):
        x = torch.randn(size, features, generator=generator)
        parts |= {f"{name}_x": x, f"{name}_y": label(x).long()}
    return Data(**parts, num_classes=2)


def make_task(**changes: Any) -> Task:
    """Tell whether the first two of four numbers have the same sign; two slots."""
    task = Task(
        name="tiny",
        data=make_data(lambda x: x[:, 0] * x[:, 1] > 0),
        make_host=host_of_width(4),
        host_of_width=host_of_width,
        slots=slot_names(2),
        batch_size=16,
        learning_rate=1e-2,
    )
    return replace(task, **changes)


def make_settings(num_hosts: int = 3, horizon: int = 8, **lifecycle: Any) -> Settings:
    return Settings(
        rng_seeds=tuple(range(num_hosts)),
        episode=EpisodeConfig(horizon=horizon),
        lifecycle=LifecycleConfig(**lifecycle),
        governor=GovernorConfig(),
    )


def make_planted(logits: Mapping[Op, float], *, gain: float = 1.0, rng_seed: int = 1) -> FactoredRecurrentActorCritic:
    """A small network with these logits at birth; `gain` makes it care for what it sees."""
    with torch.random.fork_rng():
        torch.manual_seed(rng_seed)
        network = make_network(PolicyConfig(hidden_size=16, encoding_size=16))
    assert isinstance(network, FactoredRecurrentActorCritic)
    with torch.no_grad():
        network.op.weight *= gain
        for op, logit in logits.items():
            network.op.bias[op] = logit
    return network


def make_blind(logits: Mapping[Op, float]) -> FactoredRecurrentActorCritic:
    """A network that does the same whatever it sees: these operations, the first slot, the first blueprint."""
    network = make_planted(logits, gain=0.0)
    with torch.no_grad():
        for layer in (network.slot.query, network.blueprint.query, network.plain_context):
            layer.weight.zero_()
            layer.bias.zero_()
    return network


def save_network(path: Path, logits: Mapping[Op, float]) -> str:
    PPOAgent(make_planted(logits), PPOConfig()).save(path)
    return str(path)


def scripted(*script: Action) -> Any:
    """The same for all hosts, then wait."""

    def act(facts: Facts) -> np.ndarray:
        decision = int(facts.decision[0])
        action = script[decision] if decision < len(script) else Action()
        return np.stack([action.encode(facts.slot_names, facts.blueprint_names)] * facts.num_hosts)

    return act


def of(results: dict[str, Any], controller: str) -> list[dict[str, Any]]:
    """The episodes of a controller, without its name."""
    own = [dict(episode) for episode in results["episodes"] if episode["controller"] == controller]
    for episode in own:
        del episode["controller"]
    return own
