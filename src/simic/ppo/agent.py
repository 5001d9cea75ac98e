"""PPOAgent: a recurrent policy with masked heads that acts, learns by PPO, and is saved.

Shapes: T steps, N environments, H heads, R rows and W choices of the action tree, K the size of a recurrent state.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from simic.policy.acting import as_sequence, choose
from simic.policy.action_tree import TreeDistribution
from simic.policy.agent_state import (
    FORMAT,
    LEARNING,
    VERSION,
    check_agent_state,
    check_can_learn,
    check_scales,
    check_tensors,
    naming,
)
from simic.policy.blueprint_tables import share_blueprints
from simic.policy.network import Output, check_heads, unwrap
from simic.policy.segments import Pieces, split_for_pieces
from simic.ppo.batch import Batch, BatchStatistics, make_batch
from simic.ppo.config import PPOConfig
from simic.ppo.metrics import UpdateMetrics, collect_metrics
from simic.ppo.objective import Terms, mean_weights, ppo_terms, ratio_statistics, step_means
from simic.ppo.optimizer import clip_gradients, head_membership, load_optimizer, make_optimizer
from simic.ppo.rollout import Rollout
from simic.ppo.scales import ReturnScale, ValueScale
from simic.ppo.schedule import Schedule
from simic.storage.bundle import load_bundle, save_bundle
from simic.telemetry.anomalies import Thresholds


class DivergedError(RuntimeError):
    """Training diverged: losses or gradients are repeatedly not finite."""


class PolicyStep(NamedTuple):
    """The result of one decision for N environments."""

    action: np.ndarray  # (N, H)
    log_prob: np.ndarray  # (N, H), 0 for unused heads
    value: np.ndarray  # (N,) on the scale of (scaled) rewards
    state: Tensor  # (N, K), the input of the next decision


class PPOAgent:
    """A network with its optimizer, scales and random stream. The caller keeps the recurrent state of episodes."""

    def __init__(
        self,
        network: nn.Module,
        config: PPOConfig | None = None,
        *,
        thresholds: Thresholds | None = None,
        rng_seed: int = 0,
        device: torch.device | str | None = None,
    ) -> None:
        self.device = torch.device(device or "cpu")
        self.network, self.plain, self.config = network.to(self.device), unwrap(network), config or PPOConfig()
        self.schedule = Schedule(self.config)
        self.thresholds = thresholds or Thresholds()
        self.rng_seed, self.update_count, self.gradient_steps, self._skipped_in_a_row = rng_seed, 0, 0, 0
        heads = self.plain.tree.heads
        multipliers = self.config.head_entropy or dict.fromkeys(heads, 1.0)
        check_heads(multipliers, heads, "head_entropy")
        table = torch.tensor([multipliers[head] for head in heads], device=self.device)
        # Shares, so that the effect of the entropy coefficient does not grow with the number of heads.
        self._entropy_share = table / table.sum().clamp(min=1e-8)
        self.value_scale = ValueScale().to(self.device)
        self.return_scale = ReturnScale(self.config.gamma)
        self._parameters = list(self.plain.parameters())
        self._membership = head_membership(self._parameters, self.plain.head_parameters().values())
        self.optimizer = make_optimizer(self.plain, self.config)
        self.generator = torch.Generator().manual_seed(rng_seed)

    # Acting.

    def initial_state(self, num_envs: int) -> Tensor:
        """The recurrent state at the start of an episode (N, K)."""
        return self.plain.initial_state(num_envs)

    @torch.no_grad()
    def act(
        self,
        observation: dict[str, np.ndarray],
        mask: np.ndarray,
        state: Tensor,
        *,
        greedy: bool = False,
        generator: torch.Generator | None = None,
    ) -> PolicyStep:
        """One decision for N environments: observation parts (N, ...), mask (N, R, W), state (N, K)."""
        choice = choose(
            self.network,
            observation,
            mask,
            state.to(self.device),
            greedy=greedy,
            generator=generator or self.generator,
        )
        value = self.value_scale.denormalize(choice.value)
        return PolicyStep(choice.action.cpu().numpy(), choice.log_prob.cpu().numpy(), value.cpu().numpy(), choice.state)

    @torch.no_grad()
    def value(self, observation: dict[str, np.ndarray], state: Tensor) -> np.ndarray:
        """Values of N states (N,), on the scale of (scaled) rewards."""
        output = self.network(as_sequence(self.network, observation), state)
        return self.value_scale.denormalize(output.value)[0].cpu().numpy()

    # Learning.

    def update(self, rollout: Rollout) -> UpdateMetrics:
        """Learn from a rollout: update the scales, fix old probabilities and advantages, take gradient steps."""
        rollout.check(self.plain)
        self.set_learning_rate(self.schedule.learning_rate(self.update_count, self.learning_rate))
        if self.plain.reads_tables and self.network is self.plain:  # compiled, a new number of tables is a new graph
            rollout = replace(rollout, observation=share_blueprints(rollout.observation))
        rollout = self.update_scales(rollout).to(self.device)
        batch, statistics = self.prepare_batch(rollout)
        if self.config.normalize_values:
            self.value_scale.pop_art_update(batch.target, rollout.valid, self.plain.critic)
        entropy_weights = self.entropy_weights(statistics.head_entropy)
        measured, steps = statistics._asdict(), []
        skipped, stopped = 0, False
        for minibatch in self._all_minibatches(batch):
            for parameter in self._parameters:  # the optimizer's own method takes 30 times as long
                parameter.grad = None
            terms = self.backward(minibatch, entropy_weights)
            measured["kl"] = terms.kl
            norms = clip_gradients(self._parameters, self._membership, self.config)
            kl, loss, norm = torch.stack([terms.kl, terms.loss, norms[0]]).tolist()  # one transfer from the device
            if self.schedule.should_stop(kl):
                stopped = True
                break
            if self._step(isfinite(loss) and isfinite(norm)):
                steps.append((terms, norms))
            else:
                skipped += 1
        self.update_count += 1
        metrics = self._metrics(batch, measured | step_means(steps), taken=len(steps), skipped=skipped, stopped=stopped)
        self.set_learning_rate(self.schedule.adapted_learning_rate(self.learning_rate, metrics.kl_after))
        return metrics

    def update_scales(self, rollout: Rollout) -> Rollout:
        """Update the scales of observations and rewards from a rollout on the CPU. Returns it with scaled rewards."""
        if self.plain.config.normalize_observations:
            self.plain.update_normalizers(rollout.observation, rollout.valid)
        if not self.config.scale_rewards:
            return rollout
        self.return_scale.update(rollout.reward, rollout.first, rollout.valid)
        return replace(rollout, reward=rollout.reward / self.return_scale.scale)

    @torch.no_grad()
    def prepare_batch(self, rollout: Rollout) -> tuple[Batch, BatchStatistics]:
        """Old log-probabilities, values, advantages and value targets by the current network and scales.

        The probabilities during acting cannot be used: the normalizers have changed since. The agent is not changed.
        """
        output, pieces = self._whole_sequences(rollout)
        policy = TreeDistribution(self.plain.tree, output.logits, rollout.mask)
        value, state = self.value_scale.denormalize(output.value), None if pieces else output.state
        batch, statistics = make_batch(rollout, policy, value, state, self.config)
        return replace(batch, pieces=pieces), statistics

    @torch.no_grad()
    def refresh_advantages(self, batch: Batch) -> Batch:
        """The batch with advantages, value targets and the states at pieces' beginnings by the current network."""
        output, pieces = self._whole_sequences(batch.rollout)
        return replace(batch.with_values(self.value_scale.denormalize(output.value), self.config), pieces=pieces)

    def _whole_sequences(self, rollout: Rollout) -> tuple[Output, Pieces | None]:
        """The network's outputs from the beginning of every sequence, and the pieces into which it is cut."""
        length = self.config.sequence_length
        if length is None or length >= rollout.shape[0]:
            return self.network(rollout.observation, rollout.state, rollout.segments), None
        segments, row = split_for_pieces(rollout.first.numpy(), length, self.device)
        output = self.network(rollout.observation, rollout.state, segments)
        return output, Pieces(row, output.state)

    def entropy_weights(self, head_entropy: Tensor) -> Tensor:
        """Weight of each head's entropy in this update (H,), boosted for heads below the entropy floor."""
        weights = self.schedule.entropy_coefficient(self.update_count) * self._entropy_share
        return torch.where(head_entropy < self.config.entropy_floor, self.config.floor_boost * weights, weights)

    def minibatches(self, batch: Batch, ppo_epoch: int) -> Iterator[Batch]:
        """Whole environments, shuffled by a random stream of (rng_seed, update, ppo epoch)."""
        num_envs = batch.rollout.shape[1]
        order = np.random.default_rng([self.rng_seed, self.update_count, ppo_epoch]).permutation(num_envs)
        for chosen in np.array_split(order, min(self.config.num_minibatches, num_envs)):
            yield batch.environments(torch.from_numpy(chosen))

    def _all_minibatches(self, batch: Batch) -> Iterator[Batch]:
        for ppo_epoch in range(self.config.ppo_epochs):
            if ppo_epoch and self.config.recompute_advantages:
                batch = self.refresh_advantages(batch)
            yield from self.minibatches(batch, ppo_epoch)

    def backward(self, minibatch: Batch, entropy_weights: Tensor) -> Terms:
        """Add the gradients of a minibatch, computed in micro-batches. Returns the terms of its loss."""
        weights = mean_weights(minibatch)
        num_envs = minibatch.rollout.shape[1]
        total: list[Tensor] | None = None
        for part in torch.arange(num_envs).tensor_split(min(self.config.micro_batches, num_envs)):
            whole = len(part) == num_envs
            chosen = minibatch if whole else minibatch.environments(part)
            own = weights if whole else weights.environments(part)
            terms = ppo_terms(self.network, chosen, own, entropy_weights, self.value_scale.mean_std(), self.config)
            terms.loss.backward()
            values = [value.detach() for value in terms]
            total = values if total is None else [a + b for a, b in zip(total, values, strict=True)]
        assert total is not None
        return Terms(*total)

    def _step(self, finite: bool) -> bool:
        """Take the gradient step unless loss or gradient are not finite. Returns whether it was taken."""
        if not finite:
            self._skipped_in_a_row += 1
            if self._skipped_in_a_row >= self.config.max_skipped_steps:
                raise DivergedError(
                    f"{self._skipped_in_a_row} gradient steps in a row were not finite: lower the learning rate "
                    f"({self.learning_rate:g}) or look for rewards and observations that are out of range"
                )
            return False
        self.optimizer.step()
        self.gradient_steps += 1
        self._skipped_in_a_row = 0
        return True

    def _metrics(
        self, batch: Batch, measured: dict[str, Tensor], *, taken: int, skipped: int, stopped: bool
    ) -> UpdateMetrics:
        """The metrics of the update, transferred from the device at once."""
        return collect_metrics(
            measured | ratio_statistics(self.network, batch, self.thresholds),
            self.plain.tree.heads,
            batch.rollout.shape[1],
            self.thresholds,
            update_count=self.update_count,
            gradient_steps=self.gradient_steps,
            steps_taken=taken,
            stopped_early=stopped,
            skipped_steps=skipped,
            learning_rate=self.learning_rate,
            entropy_coefficient=self.schedule.entropy_coefficient(self.update_count - 1),
            reward_scale=float(self.return_scale.scale),
        )

    @property
    def learning_rate(self) -> float:
        """The current learning rate."""
        return self.optimizer.param_groups[0]["lr"]

    def set_learning_rate(self, rate: float) -> None:
        """Change the learning rate of all parameters."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    # Saving.

    def about(self) -> dict[str, Any]:
        """The description of this agent; only an agent with an equal one can load its state."""
        return {
            "network": type(self.plain).__name__,
            "heads": list(self.plain.tree.heads),
            "sizes": dict(self.plain.sizes),
            "policy": asdict(self.plain.config),
            "gamma": self.config.gamma,
        }

    def state_dict(self) -> dict[str, Any]:
        """The complete state, for acting and learning."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "about": self.about(),
            "network": self.plain.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "value_scale": self.value_scale.state_dict(),
            "return_scale": self.return_scale.state_dict(),
            "generator": self.generator.get_state(),
            "counts": [self.rng_seed, self.update_count, self.gradient_steps, self._skipped_in_a_row],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load another agent's state; one that does not fit is refused before anything changes."""
        state = check_agent_state(state, self.about())
        check_can_learn(state)
        check_tensors(state["network"], self.plain.state_dict())
        check_scales(state)
        self.plain.load_state_dict(state["network"])
        load_optimizer(self.optimizer, state["optimizer"])
        self.value_scale.load_state_dict(state["value_scale"])
        self.return_scale.load_state_dict(state["return_scale"])
        self.generator.set_state(state["generator"].cpu())
        self.rng_seed, self.update_count, self.gradient_steps, self._skipped_in_a_row = state["counts"]

    def save(self, path: str | Path) -> None:
        """Save the complete state to one file, without pickle."""
        save_bundle(path, self.state_dict())

    def save_controller(self, path: str | Path) -> None:
        """Save the policy without optimizer or random state, in a third of the size."""
        save_bundle(path, {name: part for name, part in self.state_dict().items() if name not in LEARNING})

    def load(self, path: str | Path) -> None:
        """Load what `save` wrote."""
        state = load_bundle(path)
        with naming(path):
            self.load_state_dict(state)
