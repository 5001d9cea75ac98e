"""PPOAgent: a recurrent, masked, multi-head policy that acts and learns.

Shapes: T steps, N environments, H heads, R rows and W choices of the action tree, K numbers of a state.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from simic.policy.acting import as_sequence, choose
from simic.policy.network import ActorCritic, check_heads, unwrap
from simic.policy.recurrence import state_health
from simic.policy.saved import FORMAT, VERSION, check_scales, check_tensors, naming
from simic.policy.tree import TreeDistribution
from simic.ppo import losses
from simic.ppo.config import KL_STOP, PPOConfig
from simic.ppo.metrics import UpdateMetrics, collect_metrics
from simic.ppo.objective import Batch, Terms, mean_weights, ppo_terms, ratio_figures, step_means
from simic.ppo.rollout import Rollout
from simic.ppo.saved import LEARNING, check_agent_state, check_learning
from simic.ppo.scales import ReturnScale, ValueScale
from simic.storage.bundle import load_bundle, save_bundle
from simic.telemetry.anomalies import Thresholds

KL_STEER = 1.5
"""Factor by which a learning rate that is steered by the KL changes."""
LEARNING_RATE_LIMITS = (1e-6, 1e-2)
"""A steered learning rate stays within."""


class DivergedError(RuntimeError):
    """Learning cannot go on: losses or gradients are not finite, again and again."""


class Decision(NamedTuple):
    """What the policy chose, for N environments."""

    action: np.ndarray  # (N, H)
    log_prob: np.ndarray  # (N, H), 0 where a head does not matter
    value: np.ndarray  # (N,) in units of (scaled) reward
    state: Tensor  # (N, K) to hand in at the next decision


class PPOAgent:
    """A network and all that it needs to learn. The state of an episode stays with the caller."""

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
        self.config.check_schedules()
        self.thresholds = thresholds or Thresholds()
        self.rng_seed, self.update_count, self.gradient_steps, self._skipped_in_a_row = rng_seed, 0, 0, 0
        heads = self.plain.tree.heads
        multipliers = self.config.head_entropy or dict.fromkeys(heads, 1.0)
        check_heads(multipliers, heads, "head_entropy")
        table = torch.tensor([multipliers[head] for head in heads], device=self.device)
        self._entropy_share = table / table.sum().clamp(min=1e-8)
        self.value_scale = ValueScale().to(self.device)
        self.return_scale = ReturnScale(self.config.gamma)
        self._parameters, self._head_parameters = list(self.plain.parameters()), self.plain.head_parameters()
        self.optimizer = make_optimizer(self.plain, self.config)
        self.generator = torch.Generator().manual_seed(rng_seed)

    # Acting.

    def initial_state(self, num_envs: int) -> Tensor:
        """The state at the start of an episode (N, K)."""
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
    ) -> Decision:
        """One decision for N environments: parts of the observation (N, ...), mask (N, R, W), state (N, K)."""
        choice = choose(
            self.network,
            observation,
            mask,
            state.to(self.device),
            greedy=greedy,
            generator=generator or self.generator,
        )
        value = self.value_scale.denormalize(choice.value)
        return Decision(choice.action.cpu().numpy(), choice.log_prob.cpu().numpy(), value.cpu().numpy(), choice.state)

    @torch.no_grad()
    def value(self, observation: dict[str, np.ndarray], state: Tensor) -> np.ndarray:
        """Values of N states (N,), in units of (scaled) reward."""
        output = self.network(as_sequence(self.network, observation), state)
        return self.value_scale.denormalize(output.value)[0].cpu().numpy()

    # Learning.

    def update(self, rollout: Rollout) -> UpdateMetrics:
        """Learn from a rollout: scales first, then old probabilities under them, then clipped gradient steps."""
        rollout.check(self.plain)
        self._set_learning_rate()
        rollout = self.learn_scales(rollout).to(self.device)
        batch, figures = self._anchor(rollout)
        entropy_weights = self._entropy_weights(figures["head_entropy"])
        steps: list[tuple[Terms, Tensor]] = []
        skipped, stopped = 0, False
        for ppo_epoch in range(self.config.ppo_epochs):
            if ppo_epoch and self.config.recompute_advantages:
                batch = self._fresh_advantages(batch)
            for minibatch in self._minibatches(batch, ppo_epoch):
                self.optimizer.zero_grad(set_to_none=True)
                terms = self._backward(minibatch, entropy_weights)
                figures["kl"] = terms.kl
                norms = self._clip()
                kl, finite = torch.stack([terms.kl, terms.loss.isfinite() & norms[0].isfinite()]).tolist()
                if self._too_far(kl):
                    stopped = True
                    break
                if self._step(bool(finite)):
                    steps.append((terms, norms))
                else:
                    skipped += 1
            if stopped:
                break
        self.update_count += 1
        metrics = self._metrics(batch, figures | step_means(steps), taken=len(steps), skipped=skipped, stopped=stopped)
        self._steer_learning_rate(metrics.kl_after)
        return metrics

    def _metrics(
        self, batch: Batch, figures: dict[str, Tensor], *, taken: int, skipped: int, stopped: bool
    ) -> UpdateMetrics:
        """Everything that was measured, fetched from the device at once."""
        return collect_metrics(
            figures | ratio_figures(self.network, batch, self.thresholds),
            self.plain.tree.heads,
            batch.rollout.shape[1],
            self.thresholds,
            update_count=self.update_count,
            gradient_steps=self.gradient_steps,
            steps_taken=taken,
            stopped_early=stopped,
            skipped_steps=skipped,
            learning_rate=self.learning_rate,
            entropy_coefficient=self.config.entropy_weight(self.update_count - 1),
            reward_scale=float(self.return_scale.scale),
        )

    def learn_scales(self, rollout: Rollout) -> Rollout:
        """Observation and reward scales see the rollout, on the CPU, before anything is computed from it."""
        if self.plain.config.normalize_observations:
            self.plain.update_normalizers(rollout.observation, rollout.valid)
        if not self.config.scale_rewards:
            return rollout
        self.return_scale.update(rollout.reward, rollout.first, rollout.valid)
        return replace(rollout, reward=rollout.reward / self.return_scale.scale)

    @torch.no_grad()
    def _anchor(self, rollout: Rollout) -> tuple[Batch, dict[str, Tensor]]:
        """Probabilities and values under the scales of now, and advantages from them."""
        output = self.network(rollout.observation, rollout.state, rollout.pieces())
        policy = TreeDistribution(self.plain.tree, output.logits, rollout.mask)
        value = self.value_scale.denormalize(output.value)
        raw = self._advantages(rollout, value)
        target = raw + value
        if self.config.normalize_values:
            self.value_scale.learn(target, rollout.valid, self.plain.critic)
        head_entropy, available = policy.head_entropy(rollout.action)
        available &= rollout.valid.unsqueeze(-1)
        free = available.any(-1)
        advantage, mean, std = losses.normalized(raw, free)
        batch = Batch(
            rollout=rollout,
            log_prob=policy.head_log_prob(rollout.action),
            value=value,
            target=target,
            advantage=advantage,
            matters=policy.matters(rollout.action) & free.unsqueeze(-1),
            available=available,
        )
        weights = losses.mean_weights(free)
        centre = (advantage * weights).sum()
        return_mean, return_variance = losses.moments(target, rollout.valid)
        return batch, {
            "advantage_mean": mean,
            "advantage_deviation": std,
            "normalized_advantage_mean": centre,
            "normalized_advantage_deviation": ((advantage - centre) ** 2 * weights).sum().sqrt(),
            "return_mean": return_mean,
            "return_deviation": return_variance.sqrt(),
            "value_mean": losses.moments(value, rollout.valid)[0],
            "explained_variance": 1 - losses.moments(raw, rollout.valid)[1] / return_variance.clamp(min=1e-8),
            **state_health(output.state, value.device),
            "decisions": rollout.valid.sum(),
            "forced_share": 1 - free.sum() / rollout.valid.sum().clamp(min=1),
            "entropy": (policy.entropy() * weights).sum(),
            # 0 / 0 is NaN: a head that never had a choice has no entropy, neither high nor low.
            "head_entropy": (head_entropy * available).sum((0, 1)) / available.sum((0, 1)),
        }

    def _advantages(self, rollout: Rollout, value: Tensor) -> Tensor:
        following = torch.cat([value[1:], torch.zeros_like(value[:1])])
        ended = rollout.terminated | rollout.truncated | ~rollout.valid
        return losses.advantages(
            rollout.reward,
            value,
            torch.where(rollout.truncated, rollout.next_value, following),
            rollout.terminated,
            ended,
            gamma=self.config.gamma,
            gae_lambda=self.config.gae_lambda,
        )

    @torch.no_grad()
    def _fresh_advantages(self, batch: Batch) -> Batch:
        rollout = batch.rollout
        value = self.value_scale.denormalize(self.network(rollout.observation, rollout.state, rollout.pieces()).value)
        raw = self._advantages(rollout, value)
        return replace(batch, advantage=losses.normalized(raw, batch.free)[0], target=raw + value)

    def _minibatches(self, batch: Batch, ppo_epoch: int) -> Iterator[Batch]:
        """Whole environments, shuffled by a stream of (rng_seed, update, ppo epoch)."""
        num_envs = batch.rollout.shape[1]
        order = np.random.default_rng([self.rng_seed, self.update_count, ppo_epoch]).permutation(num_envs)
        for chosen in np.array_split(order, min(self.config.num_minibatches, num_envs)):
            yield batch.environments(torch.from_numpy(chosen))

    def _backward(self, minibatch: Batch, entropy_weights: Tensor) -> Terms:
        """Gradients and figures of a minibatch, computed in micro-batches."""
        weights = mean_weights(minibatch)
        num_envs = minibatch.rollout.shape[1]
        total: list[Tensor] | None = None
        for part in torch.arange(num_envs).tensor_split(min(self.config.micro_batches, num_envs)):
            whole = len(part) == num_envs
            chosen = minibatch if whole else minibatch.environments(part)
            own = weights if whole else weights.environments(part)
            terms = ppo_terms(self.network, chosen, own, entropy_weights, self.value_scale.mean_std(), self.config)
            terms.loss.backward()
            figures = [figure.detach() for figure in terms]
            total = figures if total is None else [a + b for a, b in zip(total, figures, strict=True)]
        assert total is not None
        return Terms(*total)

    def _entropy_weights(self, head_entropy: Tensor) -> Tensor:
        """What the entropy of each head is worth in this update (H,); more for heads that fell below the floor."""
        weights = self.config.entropy_weight(self.update_count) * self._entropy_share
        return torch.where(head_entropy < self.config.entropy_floor, self.config.floor_boost * weights, weights)

    def _too_far(self, kl: float) -> bool:
        return self.config.target_kl is not None and kl > KL_STOP * self.config.target_kl

    def _clip(self) -> Tensor:
        """Clip gradients; their norms before that, of the whole network and of each head (1 + H,)."""
        heads = self._head_parameters
        norms = [nn.utils.get_total_norm([p.grad for p in own if p.grad is not None]) for own in heads.values()]
        whole = nn.utils.get_total_norm([p.grad for p in self._parameters if p.grad is not None])
        if self.config.max_head_gradient_norm is not None:
            for own in heads.values():
                nn.utils.clip_grad_norm_(own, self.config.max_head_gradient_norm)
            nn.utils.clip_grad_norm_(self._parameters, self.config.max_gradient_norm)
        else:
            nn.utils.clip_grads_with_norm_(self._parameters, self.config.max_gradient_norm, whole)
        return torch.stack([whole, *(norm.to(whole) for norm in norms)])

    def _step(self, finite: bool) -> bool:
        """Take the gradient step if loss and gradient are finite; whether it was taken."""
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

    # The learning rate.

    @property
    def learning_rate(self) -> float:
        """Adam's step size now."""
        return self.optimizer.param_groups[0]["lr"]

    def _set_learning_rate(self) -> None:
        if self.config.learning_rate_schedule == "linear":
            self._use_rate(self.config.learning_rate * (1 - self.config.progress(self.update_count)))

    def _steer_learning_rate(self, kl: float) -> None:
        """Faster if the policy hardly moved, slower if it moved too far."""
        if self.config.learning_rate_schedule != "kl" or self.config.target_kl is None:
            return
        low, high = LEARNING_RATE_LIMITS
        if kl > 2 * self.config.target_kl:
            self._use_rate(max(low, self.learning_rate / KL_STEER))
        elif 0 < kl < self.config.target_kl / 2:
            self._use_rate(min(high, self.learning_rate * KL_STEER))

    def _use_rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    # Keeping.

    def state_dict(self) -> dict[str, Any]:
        """Everything that learning and acting depend on."""
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

    def about(self) -> dict[str, Any]:
        """What another agent must have in common to take over this one's state."""
        return {
            "network": type(self.plain).__name__,
            "heads": list(self.plain.tree.heads),
            "sizes": dict(self.plain.sizes),
            "policy": asdict(self.plain.config),
            "gamma": self.config.gamma,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over another agent's state; one that does not fit is refused before anything changes."""
        check_agent_state(state, self.about())
        check_learning(state)
        check_tensors(state["network"], self.plain.state_dict())
        check_scales(state)
        self.plain.load_state_dict(state["network"])
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))  # torch would share its tensors
        self.value_scale.load_state_dict(state["value_scale"])
        self.return_scale._running = state["return_scale"]["_running"].cpu()
        self.return_scale.load_state_dict(state["return_scale"])
        self.generator.set_state(state["generator"].cpu())
        self.rng_seed, self.update_count, self.gradient_steps, self._skipped_in_a_row = state["counts"]

    def save(self, path: str | Path) -> None:
        """Write all of it to one file, without pickle."""
        save_bundle(path, self.state_dict())

    def save_controller(self, path: str | Path) -> None:
        """Write what it decides by to one file, a third of the size: who learns on from it begins a new run."""
        save_bundle(path, {name: part for name, part in self.state_dict().items() if name not in LEARNING})

    def load(self, path: str | Path) -> None:
        """Go on from what `save` wrote."""
        state = load_bundle(path)
        with naming(path):
            self.load_state_dict(state)


def make_optimizer(network: ActorCritic, config: PPOConfig) -> torch.optim.AdamW:
    """AdamW in which only the critic decays."""
    critic = list(network.critic.parameters())
    ids = {id(parameter) for parameter in critic}
    rest = [parameter for parameter in network.parameters() if id(parameter) not in ids]
    device = next(network.parameters()).device
    fused = device.type == "cuda"
    groups = [{"params": rest, "weight_decay": 0.0}, {"params": critic, "weight_decay": config.critic_weight_decay}]
    if not config.critic_weight_decay:  # one group takes half the time of two
        groups = [{"params": [*rest, *critic], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.learning_rate, eps=config.adam_epsilon, fused=fused, foreach=not fused)
