"""HostTrainings: the decision cycle of N hosts that train side by side.

One step is: execute actions, tick the lifecycle, train one host epoch, validate and measure contributions, let the
governor restore broken hosts, compute rewards.

Shapes: N hosts, S slots, H heads of an action, K host epochs of history.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from simic.control.architecture import architecture_of
from simic.control.facts import FIGURES, HISTORY, TRAINING_FACTS, USUAL_RATE, Facts
from simic.control.governor import Governor, Verdict
from simic.control.legality import Masks
from simic.environment.attribution import EpisodeAttribution, attribute_episodes
from simic.environment.config import EpisodeConfig, GovernorConfig
from simic.environment.metric_errors import binomial_error, variance_error
from simic.environment.seeding import tells_data
from simic.lifecycle.actions import HEADS, Column
from simic.lifecycle.slots import note_contributions, to_measure
from simic.lifecycle.stages import LifecycleConfig
from simic.rewards.schemes import RewardBreakdown, RewardConfig, compute_reward, earned_next
from simic.rewards.score import RENT_WEIGHT, quality, score
from simic.rewards.transition import Transition
from simic.stacked.config import HostsConfig
from simic.stacked.copying import copy_hosts
from simic.stacked.data import StackedData
from simic.stacked.hosts import StackedHosts
from simic.stacked.optimizer import OptimizerConfig
from simic.stacked.snapshot import Snapshot
from simic.tasks.task import Length, Task
from simic.tasks.variation import HostTask

EVALUATION_CHUNK = 256
"""Samples of every host per forward pass in evaluation: bounds the memory."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of one decision, for every host (N,)."""

    facts: Facts
    """The state after the decision."""
    reward: RewardBreakdown | None
    """None if the trainings compute no rewards."""
    ended: np.ndarray
    """The episode terminated, at its horizon or by the governor; there is no value to bootstrap from."""
    verdict: np.ndarray
    """Codes of `governor.Verdict`."""


class HostTrainings:
    """N hosts of one task, trained as one stack while a controller grows them."""

    def __init__(
        self,
        task: Task,
        rng_seeds: Sequence[int],
        *,
        episode: EpisodeConfig | None = None,
        lifecycle: LifecycleConfig | None = None,
        reward: RewardConfig | None = None,
        governor: GovernorConfig | None = None,
        hosts: HostsConfig | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        """One host per rng seed, on `device` (the CPU if None). Without `reward` no rewards are computed."""
        self.task, self.reward = task, reward
        self.length = _length(task, episode or EpisodeConfig())
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
            device=device,
            config=hosts,
        )
        self.data = StackedData(
            [own.data for own in drawn],
            rng_seeds,
            batch_size=task.batch_size,
            device=self.hosts.device,
            augment=task.augment,
        )
        self.governor = Governor(len(rng_seeds), governor or GovernorConfig())
        self.snapshot = Snapshot(self.hosts)
        self._blueprint_parameters = self.hosts.blueprint_table()
        self._architecture = architecture_of(nn.Sequential(*self.hosts.segments), self.hosts.sites)
        n = self.hosts.num_hosts
        self._rate, self._tells_data = np.zeros(n), np.zeros(n, dtype=bool)
        self._decision = np.zeros(n, dtype=np.int64)
        self._previous_action = np.zeros((n, len(HEADS)), dtype=np.int64)
        self._history = {name: np.full((n, HISTORY), np.nan) for name in FIGURES}
        self._training = {name: np.full(n, np.nan) for name in TRAINING_FACTS}
        self._first = np.zeros((2, n))  # loss and metric at the start of the episode
        self._earned = np.zeros(n)
        self._describe_training(np.arange(n), rng_seeds, drawn)
        self._begin(np.arange(n))

    @property
    def num_hosts(self) -> int:
        """N."""
        return self.hosts.num_hosts

    def reset(self, hosts: np.ndarray, rng_seeds: Sequence[int]) -> Facts:
        """Replace the hosts with these indices by fresh ones at the start of an episode; returns the facts of all N."""
        drawn = [self.task.draw(int(rng_seed)) for rng_seed in rng_seeds]
        self.hosts.reset(hosts, np.asarray(rng_seeds))
        self.data.reset(hosts, [own.data for own in drawn], rng_seeds)
        self.governor.reset(hosts)
        self._describe_training(hosts, rng_seeds, drawn)
        self._decision[hosts], self._previous_action[hosts], self._earned[hosts] = 0, 0, 0
        for values in self._history.values():
            values[hosts] = np.nan
        self._begin(hosts)
        return self.facts()

    def copy_hosts(self, sources: ArrayLike, targets: ArrayLike, origin: HostTrainings | None = None) -> None:
        """Make the hosts `targets` (M,) exact copies of the hosts `sources` (M,) of `origin`, by default of these.

        A copy has the same future as its source if it gets the same actions, up to rounding, which depends on the place
        in a stack: weights, seeds, optimizer, data, coming batches, measurements and the governor's memory are copied.
        `origin` trains hosts of the same task, with the same settings.
        """
        other = self if origin is None else origin
        rows, own = checked_copy(sources, other.num_hosts, targets, self.num_hosts)
        if other.task != self.task or other.length != self.length or other.hosts.lifecycle != self.hosts.lifecycle:
            raise ValueError(
                f"hosts can be copied only between trainings of the same task with the same settings, got "
                f"{other.task.name} and {self.task.name}: build both with the same arguments"
            )
        copy_hosts(self.hosts, other.hosts, rows, own)
        self.data.copy_hosts(other.data, rows, own)
        self.governor.copy_hosts(other.governor, rows, own)
        self.snapshot.copy_hosts(other.snapshot, rows, own)
        self._first[:, own] = other._first[:, rows]
        for name in ("_rate", "_tells_data", "_decision", "_previous_action", "_earned"):
            getattr(self, name)[own] = getattr(other, name)[rows]
        for ours, theirs in ((self._history, other._history), (self._training, other._training)):
            for name, values in ours.items():
                values[own] = theirs[name][rows]

    def step(self, actions: np.ndarray, masks: Masks | None = None) -> Outcome:
        """One decision of every host (N, H); an illegal action raises and changes nothing.

        `masks` are those of the current facts: with them legality is not computed again.
        """
        before = self.facts()
        self.hosts.execute(actions, None if masks is None else masks.slot)
        self.hosts.tick()
        train_loss, val_loss, metric, switched = self._train_and_validate()
        measured = to_measure(self.hosts.slot_state)
        self._decision += 1
        # Removing a seed may cost quality on purpose, so the loss history from before says nothing about divergence.
        self.governor.reset(np.flatnonzero((self.hosts.slot_state.alpha < before.slots.alpha).any(1)))
        verdict = self._govern(val_loss, train_loss)
        broken = verdict != Verdict.OK
        # Contributions measured in a broken network do not hold for the restored one.
        note_contributions(self.hosts.slot_state, measured & ~broken[:, None], metric, switched)
        final = (self._decision >= self.length.host_epochs) & ~broken
        ended = final | broken
        if ended.any():  # at the end of an episode the exported network counts, without live seeds
            exported_loss, exported_metric = self._evaluate("validation", exported=True)
            val_loss[ended], metric[ended] = exported_loss[ended], exported_metric[ended]
        self._append_history(np.arange(self.num_hosts), val_loss, metric, train_loss)
        self._previous_action = actions.copy()
        after, paid = self.facts(), None
        if self.reward is not None:
            paid = compute_reward(self._transition(actions, before, after, final, broken), self.reward)
            self._earned = earned_next(self._earned, paid, self.reward.gamma)
        return Outcome(facts=after, reward=paid, ended=ended, verdict=verdict)

    def facts(self) -> Facts:
        """The current state of all hosts, as copies."""
        n = self.num_hosts
        return Facts(
            slots=self.hosts.slot_state.copy(),
            lifecycle=self.hosts.lifecycle,
            slot_names=self.hosts.slot_names,
            blueprint_names=self.hosts.blueprint_names,
            blueprint_parameters=self._blueprint_parameters,
            host_parameters=np.full(n, self.hosts.host_parameters),
            seed_parameters=self.hosts.seed_parameters(),
            decision=self._decision.copy(),
            horizon=np.full(n, self.length.told_host_epochs),
            previous_action=self._previous_action.copy(),
            random_guess_loss=np.full(n, self.task.random_guess_loss),
            host_gradient_norm=self.hosts.host_gradient_norm.copy(),
            architecture=self._architecture,
            **{name: values.copy() for name, values in (self._history | self._training).items()},
        )

    def parameters(self, *, exported: np.ndarray | bool = False) -> np.ndarray:
        """Parameters of every network (N,), without live seeds where `exported` (N,)."""
        left_out = np.reshape(exported, (-1, 1)) & self.hosts.slot_state.live
        return self.hosts.host_parameters + np.where(left_out, 0, self.hosts.seed_parameters()).sum(1)

    def quality(self) -> np.ndarray:
        """Quality on validation data (N,); after the end of an episode that of the exported network."""
        return self._quality(self._history["val_loss"][:, -1], self._history["val_accuracy"][:, -1])

    def score(self, *, exported: np.ndarray | bool = False) -> np.ndarray:
        """Score of the current quality (N,); rent is due for live seeds except where `exported` (N,)."""
        rent_weight = RENT_WEIGHT if self.reward is None else self.reward.rent_weight
        return score(self.quality(), self.parameters(exported=exported), self.hosts.host_parameters, rent_weight)

    def test_quality(self) -> np.ndarray:
        """Quality of the exported networks on the test split (N,): for evaluation only."""
        return self._quality(*self._evaluate("test", exported=True))

    def attribute(self, which: np.ndarray) -> EpisodeAttribution:
        """Shapley values and interactions of all seeds, live ones included, of the hosts `which` (mask (N,)).

        Costs up to 2^S passes over the validation split.
        """
        return attribute_episodes(self.hosts, [(x, y) for x, y, _ in self._chunks("validation")], which)

    def _quality(self, loss: np.ndarray, metric: np.ndarray) -> np.ndarray:
        return quality(metric, loss, self.task.random_guess_loss, ~np.isnan(self._first[1]))

    def _describe_training(self, hosts: np.ndarray, rng_seeds: Sequence[int], drawn: Sequence[HostTask]) -> None:
        """What is known of the training of fresh hosts before it begins."""
        self._rate[hosts] = [own.learning_rate for own in drawn]
        self._tells_data[hosts] = [tells_data(int(rng_seed)) for rng_seed in rng_seeds]
        for values in self._training.values():
            values[hosts] = np.nan
        samples = np.array([own.traits.get("data_size", len(own.data.train_x)) for own in drawn], dtype=float)
        new = {
            "batches": self.data.steps_per_host_epoch,
            "train_samples": np.where(self._tells_data[hosts], samples, np.nan),
            "learning_rate": self._relative_rate(self._rate)[hosts],
            "first_learning_rate": self._relative_rate(self._rate)[hosts],
            "adaptive": self.hosts.optimizer_config.name != "sgd",
        }
        for name, value in new.items():
            self._training[name][hosts] = value

    def _relative_rate(self, rate: np.ndarray) -> np.ndarray:
        """Learning rates over the optimizer's usual one."""
        config = self.hosts.optimizer_config
        return rate / (1 - config.beta1) / USUAL_RATE["sgd"] if config.name == "sgd" else rate / USUAL_RATE["adaptive"]

    def _note_training(self, train_loss: np.ndarray, square: np.ndarray, weights: np.ndarray) -> None:
        """Note what a host epoch told: mean and mean square of the batches' losses, and the hosts' norms (N,)."""
        with np.errstate(all="ignore"):  # hosts may have diverged
            noise = np.sqrt(np.maximum(square - train_loss**2, 0)) / np.abs(train_loss)
        self._training["loss_noise"] = np.where(self._tells_data, noise, np.nan)
        self._training["host_weight_norm"] = weights

    def _begin(self, hosts: np.ndarray) -> None:
        """Validate fresh hosts and save their weights as the first good ones."""
        val_loss, metric = self._evaluate("validation")
        self._first[0, hosts], self._first[1, hosts] = val_loss[hosts], metric[hosts]
        self._append_history(hosts, val_loss, metric, np.full(self.num_hosts, np.nan))
        self.snapshot.save(self.hosts, np.isin(np.arange(self.num_hosts), hosts))

    def _train_and_validate(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """One host epoch, then the figures after it: mean training loss, validation loss and metric (N,).

        The last result is the metric with each measured seed switched on or off (N, S).
        """
        losses, squares = self._train()
        validation = self._mean_over("validation", self.hosts.evaluate_and_attribute)
        # One transfer from the device per decision.
        train_loss, val_loss, metric, switched, norms, square, weights = _to_numpy(
            *(losses, *validation, self.hosts.mean_gradient_norms()),
            *(squares, torch.linalg.vector_norm(self.hosts.hosts.rows, dim=1)),
        )
        self.hosts.report_gradients(norms)
        self._note_training(train_loss, square, weights)
        return train_loss, val_loss, metric, switched

    def _train(self) -> tuple[Tensor, Tensor]:
        """One host epoch of every host; mean and mean square of the batches' losses (N,)."""
        used = self._rate * self.length.rate_factor(self._decision)
        rate = torch.from_numpy(used).to(self.hosts.hosts.rows)
        self._training["learning_rate"] = self._relative_rate(used)
        total, squares = torch.zeros_like(rate), torch.zeros_like(rate)
        for x, y in self.data.batches():
            losses = self.hosts.train_step(x, y, rate)
            total += losses
            squares.addcmul_(losses, losses)
        return total / self.data.steps_per_host_epoch, squares / self.data.steps_per_host_epoch

    def _evaluate(self, split: str, *, exported: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Loss and metric (N,)."""
        loss, metric = _to_numpy(*self._mean_over(split, partial(self.hosts.evaluate, exported=exported)))
        return loss, metric

    def _mean_over(self, split: str, evaluate: Callable[[Tensor, Tensor], tuple[Tensor, ...]]) -> list[Tensor]:
        """Means over the samples of a split of the figures that `evaluate` computes from a chunk."""
        totals: list[Tensor] = []
        for x, y, weight in self._chunks(split):
            parts = [weight * own for own in evaluate(x, y)]
            totals = [total + part for total, part in zip(totals, parts, strict=True)] if totals else parts
        return totals

    def _chunks(self, split: str) -> Iterator[tuple[Tensor, Tensor, float]]:
        """A split of every host (N, B, ...) in chunks, each with its share of the samples."""
        size = self.data.size(split)
        for start in range(0, size, EVALUATION_CHUNK):
            x, y = self.data.split(split, slice(start, start + EVALUATION_CHUNK))
            yield x, y, x.shape[1] / size

    def _govern(self, val_loss: np.ndarray, train_loss: np.ndarray) -> np.ndarray:
        """Verdicts (N,); broken hosts get their last good weights back, trusted ones are saved."""
        random_guess = np.full(self.num_hosts, self.task.random_guess_loss)
        verdict = self.governor.judge(val_loss, train_loss, random_guess)
        self.snapshot.restore(self.hosts, verdict != Verdict.OK)
        self.snapshot.save(self.hosts, self.governor.trusted)
        return verdict

    def _append_history(
        self, hosts: np.ndarray, val_loss: np.ndarray, metric: np.ndarray, train_loss: np.ndarray
    ) -> None:
        new = {"val_loss": val_loss, "val_accuracy": metric, "train_loss": train_loss, "parameters": self.parameters()}
        for name, values in self._history.items():
            values[hosts] = np.concatenate([values[hosts, 1:], new[name][hosts, None]], axis=1)
        count, is_regression = self.data.num_targets("validation"), self.task.data.is_regression
        error = variance_error(metric, count) if is_regression else binomial_error(metric, count)
        self._training["metric_error"][hosts] = np.where(self._tells_data, error, np.nan)[hosts]

    def _transition(
        self, actions: np.ndarray, before: Facts, after: Facts, final: np.ndarray, broken: np.ndarray
    ) -> Transition:
        return Transition(
            op=actions[:, Column.OP],
            slot=actions[:, Column.SLOT],
            slots_before=before.slots,
            slots_after=after.slots,
            loss_before=before.val_loss[:, -1],
            loss_after=after.val_loss[:, -1],
            metric_before=before.val_accuracy[:, -1],
            metric_after=after.val_accuracy[:, -1],
            parameters_before=before.host_parameters + before.seed_parameters.sum(1),
            parameters_after=self.parameters(exported=final | broken),
            host_parameters=after.host_parameters,
            seed_parameters_after=after.seed_parameters,
            final=final,
            rolled_back=broken,
            decision=before.decision,
            horizon=np.full(self.num_hosts, self.length.host_epochs),
            random_guess_loss=after.random_guess_loss,
            first_loss=self._first[0].copy(),
            first_metric=self._first[1].copy(),
            earned=self._earned.copy(),
        )


def _length(task: Task, episode: EpisodeConfig) -> Length:
    """A task's own length comes before that of the settings."""
    if task.length is not None:
        return task.length
    return Length(host_epochs=episode.horizon, anneal=episode.anneal)


def _to_numpy(*values: Tensor) -> list[np.ndarray]:
    """Several tensors as float64 arrays, in one transfer."""
    together = torch.cat([value.detach().flatten() for value in values]).cpu().double().numpy()
    parts = np.split(together, np.cumsum([value.numel() for value in values])[:-1])
    return [part.reshape(value.shape) for part, value in zip(parts, values, strict=True)]


def checked_copy(
    sources: ArrayLike, num_sources: int, targets: ArrayLike, num_targets: int
) -> tuple[np.ndarray, np.ndarray]:
    """Sources and targets of copied hosts as arrays (M,); raise if they do not fit each other or name no host."""
    rows, own = np.asarray(sources, dtype=np.int64), np.asarray(targets, dtype=np.int64)
    if rows.shape != own.shape or rows.ndim != 1:
        raise ValueError(f"every target needs one source, got {rows.size} sources for {own.size} targets")
    for name, hosts, number in (("sources", rows, num_sources), ("targets", own, num_targets)):
        if hosts.size and not (hosts.min() >= 0 and hosts.max() < number):
            raise ValueError(f"{name} must be hosts from 0 to {number - 1}, got {hosts.tolist()}")
    if len(np.unique(own)) < len(own):
        raise ValueError(f"a host can be the copy of one source only: targets must differ, got {own.tolist()}")
    return rows, own
