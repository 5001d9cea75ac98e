"""How fast do simic's recurrent PPO and its masked heads run, against rl_games and sb3-contrib doing the same?

Run: python benchmarks/ppo.py [--rounds 8]

Update: 8 environments x 128 steps of CartPole without velocities under an untrained policy, so with many resets; then 4
passes of 4 minibatches of 256 steps, so 16 gradient steps, for both. sb3-contrib's RecurrentPPO is measured with its
default, an LSTM each for actor and critic, and with one that they share, as ours do. Hidden sizes are equal. After the
LSTM both have a linear actor and a critic of one hidden layer of 64: less than sb3's own two layers of 64 for each, and
in its favour. Before the LSTM ours has an encoder of 64 units, so an LSTM input of 64 where theirs is 2, and running
scales of observations, rewards and values, which theirs lacks.

rl_games' a2c_discrete is measured with one LSTM for actor and critic behind a layer of 64, as ours. Only what comes
after playing is timed. Both are measured with sequences of equal length, its seq_length and our sequence_length: each
sends no gradient back beyond the cuts. The headline, rl_games_update_64 and _256, is with 128, our default: nothing is
cut, and all gradients go back to the beginning of their episode. The keys with _cut_ are with shorter sequences, both
cut alike; its recurrent configs have between 2 and 32, that for this task has 4. The number of steps is the same for
every length; rl_games runs shorter sequences in fewer calls, because it makes one wherever any of them resets. In its
favour throughout: it takes values, old probabilities and the states at the cuts from playing, where ours makes two more
passes, for all of these under the new scales and for the measurements after the update; and its critic has no hidden
layer. In ours: its runner compiles the network unless told not to, and no network is compiled here.

Importing rl_games turns off the checks that torch's distributions make of their arguments, for the whole process. Each
peer runs as it does alone: rl_games without them, sb3-contrib with them. Ours uses none of these distributions. Without
the checks sb3-contrib acts about 1.5 times as fast.

Training: whole steps per second, playing and learning, the first updates of a fresh agent, hidden size 64, against its
default.

Acting: from the same logits and masks of the 8 heads of a growth controller (3 slots, 7 blueprints), each head for
itself, to sampled actions of 8 environments and their log-probabilities, against MaskableMultiCategorical. Laying the
flat logits out in rows is part of ours. The growth tree, in which heads depend on operation and slot, is timed as well,
from rows as the network makes them.

Everything is interleaved, one thread, best of several rounds, in processor seconds: nothing here waits, and what else
the machine does hardly counts.
"""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import torch
import tyro
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from rl_games.algos_torch.a2c_discrete import DiscreteA2CAgent  # pyright: ignore[reportMissingImports]
from rl_games.common.algo_observer import DefaultAlgoObserver  # pyright: ignore[reportMissingImports]
from rl_games.common.ivecenv import IVecEnv  # pyright: ignore[reportMissingImports]
from rl_games.common.tr_helpers import DefaultRewardsShaper  # pyright: ignore[reportMissingImports]
from sb3_contrib import RecurrentPPO
from sb3_contrib.common.maskable.distributions import MaskableMultiCategoricalDistribution
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.vec_env import DummyVecEnv
from torch.distributions import Distribution

from simic.gymnasium.collector import Collector, make_network
from simic.lifecycle.actions import HEAD_VALUES, HEADS
from simic.policy.action_tree import ActionTree, TreeDistribution
from simic.policy.network import GROWTH_TREE, PolicyConfig
from simic.ppo.agent import PPOAgent
from simic.ppo.config import PPOConfig

NUM_ENVS, NUM_STEPS, NUM_MINIBATCHES, PPO_EPOCHS = 8, 128, 4, 4
SEQUENCE_LENGTHS = (NUM_STEPS, 32, 16, 4)
"""Of rl_games and of ours beside it, the first for the headline."""
NUM_SLOTS, NUM_BLUEPRINTS = 3, 7
HEAD_SIZES = [{"slot": NUM_SLOTS, "blueprint": NUM_BLUEPRINTS}.get(h) or len(HEAD_VALUES[h]) for h in HEADS]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure."""

    rounds: int = 8
    """The best of so many counts."""
    training_updates: int = 3
    """Updates of a fresh agent in each round of whole training."""
    acting_repeats: int = 300
    """Decisions in each round of acting."""


def cart_pole() -> gym.Env:
    """CartPole that shows the position and the angle."""
    env = gym.make("CartPole-v1")
    space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    return gym.wrappers.TransformObservation(env, lambda observation: observation[[0, 2]], space)


def make_ours(hidden_size: int, sequence_length: int | None = None) -> tuple[PPOAgent, Collector]:
    """An untrained agent and what plays it."""
    envs = SyncVectorEnv([cart_pole] * NUM_ENVS, autoreset_mode=AutoresetMode.SAME_STEP)
    config = PPOConfig(
        ppo_epochs=PPO_EPOCHS, num_minibatches=NUM_MINIBATCHES, target_kl=None, sequence_length=sequence_length
    )
    agent = PPOAgent(make_network(envs, PolicyConfig(hidden_size=hidden_size)), config)
    return agent, Collector(envs, agent, NUM_STEPS)


def make_theirs(hidden_size: int, *, shared: bool) -> RecurrentPPO:
    """The same by sb3-contrib, with its logger silent."""
    policy: dict[str, Any] = {"lstm_hidden_size": hidden_size, "net_arch": {"pi": [], "vf": [64]}}
    if shared:
        policy |= {"shared_lstm": True, "enable_critic_lstm": False}
    model = RecurrentPPO(
        "MlpLstmPolicy",
        DummyVecEnv([cart_pole] * NUM_ENVS),
        n_steps=NUM_STEPS,
        batch_size=NUM_ENVS * NUM_STEPS // NUM_MINIBATCHES,
        n_epochs=PPO_EPOCHS,
        ent_coef=0.01,
        policy_kwargs=policy,
        seed=0,
        device="cpu",
    )
    model.set_logger(Logger(folder=None, output_formats=[]))
    return model


class RlGamesEnvs(IVecEnv):
    """The environments as rl_games wants them."""

    def __init__(self) -> None:
        self.envs = SyncVectorEnv([cart_pole] * NUM_ENVS, autoreset_mode=AutoresetMode.SAME_STEP)

    def reset(self) -> np.ndarray:
        """First observations."""
        return self.envs.reset(seed=0)[0]

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Observations, rewards, ends."""
        observation, reward, terminated, truncated, _ = self.envs.step(actions)
        return observation, reward.astype(np.float32), terminated | truncated, {}

    def get_env_info(self) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The spaces of one environment."""
        return {"observation_space": self.envs.single_observation_space, "action_space": self.envs.single_action_space}


def make_rl_games(hidden_size: int, sequence_length: int, directory: str) -> DiscreteA2CAgent:
    """The same by rl_games, silent; it writes its summaries to a directory."""
    envs = RlGamesEnvs()
    network = {
        "name": "actor_critic",
        "separate": False,
        "space": {"discrete": None},
        "mlp": {"units": [64], "activation": "tanh", "initializer": {"name": "default"}},
        "rnn": {"name": "lstm", "units": hidden_size, "layers": 1, "before_mlp": False},
    }
    config = {
        "name": "ppo",
        "env_name": "cart_pole",
        "env_info": envs.get_env_info(),
        "vec_env": envs,
        "features": {"observer": DefaultAlgoObserver()},
        "reward_shaper": DefaultRewardsShaper(),
        "device": "cpu",
        "num_actors": NUM_ENVS,
        "horizon_length": NUM_STEPS,
        "minibatch_size": NUM_ENVS * NUM_STEPS // NUM_MINIBATCHES,
        "mini_epochs": PPO_EPOCHS,
        "seq_length": sequence_length,
        "gamma": 0.99,
        "tau": 0.95,
        "learning_rate": 3e-4,
        "lr_schedule": None,
        "e_clip": 0.2,
        "clip_value": False,
        "entropy_coef": 0.01,
        "critic_coef": 1,
        "truncate_grads": True,
        "grad_norm": 0.5,
        **dict.fromkeys(("normalize_input", "normalize_value", "normalize_advantage"), True),
        "train_dir": directory,
        "print_stats": False,
    }
    with contextlib.redirect_stdout(io.StringIO()):
        agent = DiscreteA2CAgent("ppo", {"model": {"name": "discrete_a2c"}, "network": network, "config": config})
    agent.init_tensors()
    agent.obs = agent.env_reset()
    return agent


@contextlib.contextmanager
def checked_distributions(checked: bool) -> Iterator[None]:
    """Whether torch's distributions check their arguments, inside; they do again afterwards."""
    Distribution.set_default_validate_args(checked)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(True)


def best_seconds(jobs: dict[str, Callable[[], Callable[[], object]]], rounds: int) -> dict[str, float]:
    """The best time of each job, one after the other in every round; a job first prepares, which is not timed."""
    best = dict.fromkeys(jobs, float("inf"))
    for _ in range(rounds):
        for name, prepare in jobs.items():
            job = prepare()
            start = time.process_time()
            job()
            best[name] = min(best[name], time.process_time() - start)
    return best


def time_updates(hidden_size: int, rounds: int) -> dict[str, float]:
    """Seconds of an update by ours, sb3's default, its shared LSTM and rl_games, on rollouts of untrained policies."""

    def ours(length: int) -> Callable[[], object]:
        agent, collector = make_ours(hidden_size, length)
        rollout = collector.collect()
        return lambda: agent.update(rollout)

    def theirs(*, shared: bool) -> Callable[[], object]:
        model = make_theirs(hidden_size, shared=shared)
        _, callback = model._setup_learn(NUM_ENVS * NUM_STEPS)
        model.collect_rollouts(model.env, callback, model.rollout_buffer, n_rollout_steps=NUM_STEPS)  # pyright: ignore[reportArgumentType]
        return model.train

    def rl_games(length: int) -> Callable[[], object]:
        agent = make_rl_games(hidden_size, length, directory)
        agent.set_eval()
        with torch.no_grad():
            played = agent.play_steps_rnn()
        agent.play_steps_rnn = lambda: played  # its epoch plays and learns

        def learn() -> None:
            with checked_distributions(False):
                agent.train_epoch()

        return learn

    jobs: dict[str, Callable[[], Callable[[], object]]]
    jobs = {"default": lambda: theirs(shared=False), "shared": lambda: theirs(shared=True)}
    for length in SEQUENCE_LENGTHS:
        jobs |= {f"ours_{length}": partial(ours, length), f"rl_games_{length}": partial(rl_games, length)}
    with tempfile.TemporaryDirectory() as directory:
        return best_seconds(jobs, rounds)


def time_training(hidden_size: int, rounds: int, updates: int) -> dict[str, float]:
    """Seconds of playing and learning, from a fresh agent."""

    def ours() -> Callable[[], object]:
        agent, collector = make_ours(hidden_size)
        return lambda: [agent.update(collector.collect()) for _ in range(updates)]

    def theirs() -> Callable[[], object]:
        model = make_theirs(hidden_size, shared=False)
        return lambda: model.learn(updates * NUM_ENVS * NUM_STEPS)

    return best_seconds({"ours": ours, "default": theirs}, rounds)


def time_acting(rounds: int, repeats: int) -> dict[str, float]:
    """Seconds from logits and masks to actions and their log-probabilities, for all environments at once."""
    rng = np.random.default_rng(0)
    flat_logits = torch.from_numpy(rng.normal(size=(NUM_ENVS, sum(HEAD_SIZES))).astype(np.float32))
    flat_mask = torch.from_numpy(rng.random((NUM_ENVS, sum(HEAD_SIZES))) < 0.7)
    width, starts = max(HEAD_SIZES), np.cumsum([0, *HEAD_SIZES[:-1]])
    flat_mask[:, starts] = True  # at least one legal choice per head
    column = np.arange(width)
    exists = torch.from_numpy(column < np.array(HEAD_SIZES)[:, None])  # (H, W)
    place = torch.from_numpy(np.minimum(starts[:, None] + column, sum(HEAD_SIZES) - 1))  # (H, W)
    tree, generator = ActionTree.independent(HEAD_SIZES, HEADS), torch.Generator().manual_seed(0)
    grown = (NUM_ENVS, GROWTH_TREE.num_rows + NUM_SLOTS, width)
    grown_logits = torch.from_numpy(rng.normal(size=grown).astype(np.float32))
    grown_mask = torch.from_numpy(rng.random(grown) < 0.7) | (torch.arange(width) == 0)
    # A slot must be there to be pointed at.
    grown_mask[:, [row for row, head in enumerate(GROWTH_TREE.row_head) if HEADS[head] == "slot"], NUM_SLOTS:] = False
    grown_mask[:, 0, HEAD_SIZES[0] :] = False

    def ours() -> None:
        for _ in range(repeats):
            policy = TreeDistribution(tree, flat_logits[:, place], flat_mask[:, place] & exists)
            policy.log_prob(policy.sample(generator))

    def as_tree() -> None:
        for _ in range(repeats):
            policy = TreeDistribution(GROWTH_TREE, grown_logits, grown_mask)
            policy.log_prob(policy.sample(generator))

    def theirs() -> None:
        policy = MaskableMultiCategoricalDistribution(HEAD_SIZES)
        for _ in range(repeats):
            policy.proba_distribution(flat_logits)
            policy.apply_masking(flat_mask)
            policy.log_prob(policy.get_actions())

    with torch.no_grad():
        best = best_seconds({"ours": lambda: ours, "tree": lambda: as_tree, "sb3": lambda: theirs}, rounds)
    return {name: seconds / repeats for name, seconds in best.items()}


def main(options: Options) -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    Distribution.set_default_validate_args(True)  # see the top of the file
    result = {}
    for hidden_size in (64, 256):
        seconds = time_updates(hidden_size, options.rounds)
        own = seconds[f"ours_{NUM_STEPS}"]
        default, shared = seconds["default"] / own, seconds["shared"] / own
        print(
            f"update   LSTM {hidden_size:3d}: {own:.3f} s against {seconds['default']:.3f} s, "
            f"{default:.2f}x; with a shared LSTM {seconds['shared']:.3f} s, {shared:.2f}x",
            flush=True,
        )
        result[f"update_speedup_{hidden_size}"] = round(default, 3)
        result[f"update_speedup_shared_{hidden_size}"] = round(shared, 3)
        for length in SEQUENCE_LENGTHS:
            own, other = seconds[f"ours_{length}"], seconds[f"rl_games_{length}"]
            print(
                f"         sequences of {length:3d}: {own:.3f} s against {other:.3f} s of rl_games, {other / own:.2f}x",
                flush=True,
            )
            cut = "" if length == NUM_STEPS else f"_cut_{length}"
            result[f"rl_games_update_{hidden_size}{cut}"] = round(other / own, 3)
    seconds = time_training(64, options.rounds, options.training_updates)
    steps = options.training_updates * NUM_ENVS * NUM_STEPS
    result["training_speedup_64"] = round(seconds["default"] / seconds["ours"], 3)
    print(
        f"training LSTM  64: {steps / seconds['ours']:.0f} steps/s against {steps / seconds['default']:.0f}, "
        f"{result['training_speedup_64']:.2f}x",
        flush=True,
    )
    seconds = time_acting(options.rounds, options.acting_repeats)
    result["acting_speedup"] = round(seconds["sb3"] / seconds["ours"], 3)
    print(
        f"acting   {len(HEADS)} masked heads, {NUM_ENVS} environments: {1e6 * seconds['ours']:.0f} us against "
        f"{1e6 * seconds['sb3']:.0f} us, {result['acting_speedup']:.2f}x; growth tree {1e6 * seconds['tree']:.0f} us"
    )
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
