"""HostTrainings: the decision cycle of N hosts, as in the design: act, tick, train, judge, govern, reward, observe.

Shapes: N hosts, S slots, H heads of an action, K host epochs of history.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from simic.control.facts import FIGURES, HISTORY, Facts
from simic.control.governor import Governor, Verdict
from simic.environment.attribution import EpisodeAttribution, attribute_episodes
from simic.environment.config import EpisodeConfig, GovernorConfig
from simic.lifecycle.actions import HEADS
from simic.lifecycle.slots import SlotState, note_contributions, to_measure
from simic.lifecycle.stages import LifecycleConfig
from simic.rewards.schemes import RewardBreakdown, RewardConfig, compute_reward, earned_next
from simic.rewards.transition import Transition
from simic.stacked.data import StackedData
from simic.stacked.hosts import StackedHosts
from simic.stacked.optimizer import OptimizerConfig
from simic.stacked.snapshot import Snapshot
from simic.tasks.task import Task

EVALUATION_CHUNK = 256
"""Validation samples of every host that go through the network at once."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one decision led to, for every host (N,)."""

    facts: Facts
    """What is known after it: what the next decision is taken on."""
    reward: RewardBreakdown
    ended: np.ndarray
    """The episode is over, at its horizon or by the governor; nothing follows that a value could stand for."""
    verdict: np.ndarray
    """What the governor said: codes of `governor.Verdict`."""
    attribution: EpisodeAttribution | None
    """How the seeds, live ones included, share the validation metric, where an episode reached its horizon."""


class HostTrainings:
    """N hosts of one task that learn side by side while somebody decides how they grow."""

    def __init__(
        self,
        task: Task,
        rng_seeds: Sequence[int],
        *,
        episode: EpisodeConfig | None = None,
        lifecycle: LifecycleConfig | None = None,
        reward: RewardConfig | None = None,
        governor: GovernorConfig | None = None,
    ) -> None:
        self.task = task
        self.episode, self.reward = episode or EpisodeConfig(), reward or RewardConfig()
        drawn = [task.draw(int(rng_seed)) for rng_seed in rng_seeds]
        self.hosts = StackedHosts(
            task.make_host,
            task.slots,
            example_input=task.data.train_x[:2],
            rng_seeds=rng_seeds,
            loss=task.loss,
            metric=task.metric,
            lifecycle=lifecycle,
            optimizer=OptimizerConfig(name=task.optimizer),
            batch_size=task.batch_size,
        )
        self.data = StackedData([own.data for own in drawn], rng_seeds, batch_size=task.batch_size)
        self.governor = Governor(len(rng_seeds), governor or GovernorConfig())
        self.snapshot = Snapshot(self.hosts)
        self._rate = np.array([own.learning_rate for own in drawn])
        self._blueprint_parameters = self.hosts.blueprint_table()
        n = self.hosts.num_hosts
        self._decision = np.zeros(n, dtype=np.int64)
        self._previous_action = np.zeros((n, len(HEADS)), dtype=np.int64)
        self._history = {name: np.full((n, HISTORY), np.nan) for name in FIGURES}
        self._first = np.zeros((2, n))  # loss and metric at the start of the episode
        self._earned = np.zeros(n)
        self._begin(np.arange(n))

    @property
    def num_hosts(self) -> int:
        """N."""
        return self.hosts.num_hosts

    def reset(self, hosts: np.ndarray, rng_seeds: Sequence[int]) -> Facts:
        """Begin new episodes in some places; what is known then, of all."""
        drawn = [self.task.draw(int(rng_seed)) for rng_seed in rng_seeds]
        self.hosts.reset(hosts, np.asarray(rng_seeds))
        self.data.reset(hosts, [own.data for own in drawn], rng_seeds)
        self.governor.reset(hosts)
        self._rate[hosts] = [own.learning_rate for own in drawn]
        self._decision[hosts], self._previous_action[hosts], self._earned[hosts] = 0, 0, 0
        for values in self._history.values():
            values[hosts] = np.nan
        self._begin(hosts)
        return self.facts()

    def step(self, actions: np.ndarray) -> Outcome:
        """One decision for every host; an illegal action raises and changes nothing."""
        before, figures_before = self.hosts.slot_state.copy(), self._figures()
        self.hosts.execute(actions)
        self.hosts.tick()
        train_loss = self._train()
        self.hosts.report_gradients()
        val_loss, metric, switched = self._attribute()
        measured = to_measure(self.hosts.slot_state)
        self._decision += 1
        # A seed that leaves may take much of the host's skill with it, on purpose: what was usual before is no measure.
        self.governor.reset(np.flatnonzero((self.hosts.slot_state.alpha < before.alpha).any(1)))
        verdict = self._govern(val_loss, train_loss)
        broken = verdict != Verdict.OK
        # What was measured in a broken network says nothing of the one that was restored.
        note_contributions(self.hosts.slot_state, measured & ~broken[:, None], metric, switched)
        final = (self._decision >= self.episode.horizon) & ~broken
        if final.any() or broken.any():
            self._judge_exported(final | broken, val_loss, metric)
        self._remember(np.arange(self.num_hosts), val_loss, metric, train_loss)
        self._previous_action = actions.copy()
        facts = self._step_facts(actions, before, figures_before, final, broken)
        breakdown = compute_reward(facts, self.reward)
        self._earned = earned_next(self._earned, breakdown, self.reward.gamma)
        return Outcome(
            facts=self.facts(),
            reward=breakdown,
            ended=final | broken,
            verdict=verdict,
            attribution=self._attribute_seeds(final) if final.any() and self.episode.attribute_at_end else None,
        )

    def facts(self) -> Facts:
        """What is known now."""
        n = self.num_hosts
        return Facts(
            slots=self.hosts.slot_state.copy(),
            lifecycle=self.hosts.lifecycle,
            slot_names=self.task.slots,
            blueprint_names=self.hosts.blueprint_names,
            blueprint_parameters=self._blueprint_parameters,
            host_parameters=np.full(n, self.hosts.host_parameters),
            seed_parameters=self.hosts.seed_parameters(),
            decision=self._decision.copy(),
            horizon=np.full(n, self.episode.horizon),
            previous_action=self._previous_action.copy(),
            random_guess_loss=np.full(n, self.task.random_guess_loss),
            host_gradient_norm=self.hosts.host_gradient_norm.copy(),
            **{name: values.copy() for name, values in self._history.items()},
        )

    def parameters(self, *, exported: np.ndarray | bool = False) -> np.ndarray:
        """Parameters of every network (N,), without live seeds where it is `exported` (N,)."""
        left_out = np.reshape(exported, (-1, 1)) & self.hosts.slot_state.live
        return self.hosts.host_parameters + np.where(left_out, 0, self.hosts.seed_parameters()).sum(1)

    def test_metric(self) -> np.ndarray:
        """Metric of the exported networks on the test split (N,): for evaluation only."""
        return self._evaluate("test", exported=True)[1]

    # The parts of the cycle.

    def _begin(self, hosts: np.ndarray) -> None:
        """Judge fresh hosts, and take them for good."""
        val_loss, metric = self._evaluate("validation")
        self._first[0, hosts], self._first[1, hosts] = val_loss[hosts], metric[hosts]
        self._remember(hosts, val_loss, metric, np.full(self.num_hosts, np.nan))
        which = np.isin(np.arange(self.num_hosts), hosts)
        self.snapshot.save(self.hosts, which)

    def _train(self) -> np.ndarray:
        """One host epoch of every host; the mean loss (N,)."""
        share = self._decision / self.episode.horizon
        factor = (1 + np.cos(np.pi * share)) / 2 if self.episode.anneal else np.ones(self.num_hosts)
        rate = torch.from_numpy(self._rate * factor).to(self.hosts.hosts.rows)
        total = torch.zeros_like(rate)
        for x, y in self.data.batches():
            total += self.hosts.train_step(x, y, rate)
        return _numbers(total / self.data.steps_per_host_epoch)

    def _attribute(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Validation loss and metric (N,), and the metric with each seed to measure switched the other way (N, S)."""
        loss, metric = np.zeros(self.num_hosts), np.zeros(self.num_hosts)
        flipped = np.zeros(self.hosts.slot_state.stage.shape)
        for x, y, weight in self._chunks("validation"):
            part = self.hosts.evaluate_and_attribute(x, y)
            loss += weight * _numbers(part[0])
            metric += weight * _numbers(part[1])
            flipped += weight * part[2]
        return loss, metric, flipped

    def _attribute_seeds(self, which: np.ndarray) -> EpisodeAttribution:
        return attribute_episodes(self.hosts, [(x, y) for x, y, _ in self._chunks("validation")], which)

    def _evaluate(self, split: str, *, exported: bool = False) -> tuple[np.ndarray, np.ndarray]:
        loss, metric = np.zeros(self.num_hosts), np.zeros(self.num_hosts)
        for x, y, weight in self._chunks(split):
            part = self.hosts.evaluate(x, y, exported=exported)
            loss += weight * _numbers(part[0])
            metric += weight * _numbers(part[1])
        return loss, metric

    def _chunks(self, split: str) -> Iterator[tuple[Tensor, Tensor, float]]:
        """A split of every host (N, B, ...) piece by piece, each with its share of the samples."""
        size = self.data.size(split)
        for start in range(0, size, EVALUATION_CHUNK):
            x, y = self.data.split(split, slice(start, start + EVALUATION_CHUNK))
            yield x, y, x.shape[1] / size

    def _govern(self, val_loss: np.ndarray, train_loss: np.ndarray) -> np.ndarray:
        """The governor's verdicts (N,); broken hosts get their last good weights back, good ones are remembered."""
        random_guess = np.full(self.num_hosts, self.task.random_guess_loss)
        verdict = self.governor.judge(val_loss, train_loss, random_guess)
        self.snapshot.restore(self.hosts, verdict != Verdict.OK)
        self.snapshot.save(self.hosts, self.governor.trusted)
        return verdict

    def _judge_exported(self, which: np.ndarray, val_loss: np.ndarray, metric: np.ndarray) -> None:
        """At the end of an episode the exported network counts, without live seeds."""
        exported_loss, exported_metric = self._evaluate("validation", exported=True)
        val_loss[which], metric[which] = exported_loss[which], exported_metric[which]

    def _remember(self, hosts: np.ndarray, val_loss: np.ndarray, metric: np.ndarray, train_loss: np.ndarray) -> None:
        seen = {"val_loss": val_loss, "val_accuracy": metric, "train_loss": train_loss, "parameters": self.parameters()}
        for name, values in self._history.items():
            values[hosts] = np.concatenate([values[hosts, 1:], seen[name][hosts, None]], axis=1)

    def _figures(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Validation loss, metric and parameters before a decision."""
        return self._history["val_loss"][:, -1].copy(), self._history["val_accuracy"][:, -1].copy(), self.parameters()

    def _step_facts(
        self,
        actions: np.ndarray,
        slots_before: SlotState,
        before: tuple[np.ndarray, np.ndarray, np.ndarray],
        final: np.ndarray,
        broken: np.ndarray,
    ) -> Transition:
        n = self.num_hosts
        return Transition(
            op=actions[:, 0],
            slot=actions[:, 1],
            slots_before=slots_before,
            slots_after=self.hosts.slot_state.copy(),
            loss_before=before[0],
            metric_before=before[1],
            parameters_before=before[2],
            loss_after=self._history["val_loss"][:, -1].copy(),
            metric_after=self._history["val_accuracy"][:, -1].copy(),
            parameters_after=self.parameters(exported=final | broken),
            host_parameters=np.full(n, self.hosts.host_parameters),
            seed_parameters_after=self.hosts.seed_parameters(),
            final=final,
            rolled_back=broken,
            decision=self._decision - 1,
            horizon=np.full(n, self.episode.horizon),
            random_guess_loss=np.full(n, self.task.random_guess_loss),
            first_loss=self._first[0].copy(),
            first_metric=self._first[1].copy(),
            earned=self._earned.copy(),
        )


def _numbers(values: Tensor) -> np.ndarray:
    return values.detach().double().cpu().numpy()
