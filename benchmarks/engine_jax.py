"""Many MLP hosts with seeds as one jitted, vmapped JAX program: what benchmarks/engine.py compares the engine with.

Run: python benchmarks/engine_jax.py. It compares one training step, validation and ablations with plain PyTorch.

All hosts of a program are alike: same architecture, and the same two-layer GELU seeds in the same slots. One call is
one decision: a host epoch of AdamW with the gradient of each host clipped, validation, one ablation for each seed.

Shapes: N hosts, P parameters of a host with its seeds, F inputs, C classes, S batches of B samples, G seeds. Functions
that name no N are those of one host.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

# Before jax is imported, which makes its threads then: one of them, as everything here is measured with one.
os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
os.environ["JAX_PLATFORMS"] = "cpu"

try:
    import jax  # pyright: ignore[reportMissingImports]
except ModuleNotFoundError:
    sys.exit("benchmarks/engine.py compares with JAX, which is not installed: pip install simic-rl[bench]")
import jax.numpy as jnp  # pyright: ignore[reportMissingImports]
import numpy as np
import torch
from jax.flatten_util import ravel_pytree  # pyright: ignore[reportMissingImports]
from torch import nn

BETA1, BETA2, EPSILON, WEIGHT_DECAY, MAX_GRADIENT_NORM = 0.9, 0.999, 1e-8, 0.01, 5.0
HIDDEN = 16
"""Hidden units of a seed."""
ALPHA = 0.7
"""How far every seed is blended in."""
RATE, TOLERANCE = 2e-2, 1e-4
"""Of the comparison with PyTorch."""


class Architecture(NamedTuple):
    """An MLP with GELU, and the hidden layer behind which each of its seeds stands."""

    in_features: int
    width: int
    depth: int
    num_classes: int
    seeds: tuple[int, ...]


class HostData(NamedTuple):
    """The data of one host, or of N with a leading dimension."""

    train_x: Any  # (S * B, F)
    train_y: Any
    validation_x: Any
    validation_y: Any


class Training(NamedTuple):
    """What changes from decision to decision, of one host or of N."""

    parameters: Any  # (P,)
    mean: Any  # (P,) first moment of AdamW
    square: Any  # (P,)
    steps: Any
    key: Any


class Figures(NamedTuple):
    """What a controller learns about one host, or N, after a decision."""

    train_loss: Any
    loss: Any
    accuracy: Any
    without: Any  # (G,) accuracy without each seed


def initial_tree(architecture: Architecture, key: jax.Array, last: float = 0.0) -> dict[str, Any]:
    """Weights of one host; the last layer of a seed is normal with deviation `last`, so 0 gives newborn seeds."""
    width, keys = architecture.width, iter(jax.random.split(key, 99))

    def linear(fan_in: int, fan_out: int, scale: float | None = None) -> tuple[jax.Array, jax.Array]:
        deviation = fan_in**-0.5 if scale is None else scale
        return deviation * jax.random.normal(next(keys), (fan_in, fan_out)), jnp.zeros(fan_out)

    sizes = [architecture.in_features, *[width] * architecture.depth, architecture.num_classes]
    return {
        "host": [linear(a, b) for a, b in pairwise(sizes)],
        "seeds": [(linear(width, HIDDEN), linear(HIDDEN, width, last)) for _ in architecture.seeds],
    }


def forward(architecture: Architecture, tree: dict[str, Any], alpha: jax.Array, x: jax.Array) -> jax.Array:
    """Logits (B, C) of inputs (B, F); alpha (G,)."""
    gelu = partial(jax.nn.gelu, approximate=False)
    *hidden, (weight, bias) = tree["host"]
    for layer, (w, b) in enumerate(hidden):
        x = gelu(x @ w + b)
        for index, place in enumerate(architecture.seeds):
            if place == layer:
                (w1, b1), (w2, b2) = tree["seeds"][index]
                x = x + alpha[index] * (gelu(x @ w1 + b1) @ w2 + b2)
    return x @ weight + bias


def cross_entropy(logits: jax.Array, y: jax.Array) -> jax.Array:
    """Mean over the batch."""
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], axis=1).mean()


def accuracy(logits: jax.Array, y: jax.Array) -> jax.Array:
    """Share of right answers."""
    return (logits.argmax(1) == y).mean()


def adamw(training: Training, gradient: jax.Array, rate: jax.Array) -> Training:
    """One step with the gradient (P,) clipped."""
    gradient = gradient * jnp.minimum(1.0, MAX_GRADIENT_NORM / (jnp.sqrt((gradient**2).sum()) + 1e-6))
    steps = training.steps + 1
    mean = BETA1 * training.mean + (1 - BETA1) * gradient
    square = BETA2 * training.square + (1 - BETA2) * gradient**2
    scale = jnp.sqrt(square / (1 - BETA2**steps)) + EPSILON
    parameters = training.parameters * (1 - rate * WEIGHT_DECAY) - rate * mean / (1 - BETA1**steps) / scale
    return Training(parameters, mean, square, steps, training.key)


class Program:
    """N hosts of one architecture: `decide` trains and measures all of them once."""

    def __init__(self, architecture: Architecture, batch_size: int) -> None:
        self.architecture, self.batch_size = architecture, batch_size
        self._unravel = ravel_pytree(initial_tree(architecture, jax.random.key(0)))[1]
        self.decide = jax.jit(jax.vmap(self._decide), donate_argnums=0)
        self.train_step = jax.jit(jax.vmap(self._train_step))
        self.evaluate = jax.jit(jax.vmap(self._evaluate))

    def start(self, num_hosts: int, last: float = 0.0) -> Training:
        """The hosts before their first decision (N, ...)."""
        keys = jax.random.split(jax.random.key(1), num_hosts)
        flat = jax.vmap(lambda key: ravel_pytree(initial_tree(self.architecture, key, last))[0])(keys)
        return Training(flat, jnp.zeros_like(flat), jnp.zeros_like(flat), jnp.zeros(num_hosts), keys)

    def tree(self, parameters: jax.Array) -> dict[str, Any]:
        """The weights (P,) of one host by layer."""
        return self._unravel(parameters)

    def _decide(
        self, training: Training, data: HostData, alpha: jax.Array, rate: jax.Array
    ) -> tuple[Training, Figures]:
        key, own = jax.random.split(training.key)
        steps = len(data.train_y) // self.batch_size
        order = jax.random.permutation(own, len(data.train_y))[: steps * self.batch_size]
        order = order.reshape(steps, self.batch_size)

        def step(state: Training, chosen: jax.Array) -> tuple[Training, jax.Array]:
            return self._train_step(state, data.train_x[chosen], data.train_y[chosen], alpha, rate)

        training, losses = jax.lax.scan(step, training._replace(key=key), order)
        loss, metric, without = self._evaluate(training, data, alpha)
        return training, Figures(losses.mean(), loss, metric, without)

    def _train_step(
        self, training: Training, x: jax.Array, y: jax.Array, alpha: jax.Array, rate: jax.Array
    ) -> tuple[Training, jax.Array]:
        def loss_of(parameters: jax.Array) -> jax.Array:
            return cross_entropy(forward(self.architecture, self.tree(parameters), alpha, x), y)

        loss, gradient = jax.value_and_grad(loss_of)(training.parameters)
        return adamw(training, gradient, rate), loss

    def _evaluate(self, training: Training, data: HostData, alpha: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Loss, accuracy, and the accuracy without each seed (G,). The compiler shares what the passes share."""
        x, y, tree = data.validation_x, data.validation_y, self.tree(training.parameters)
        logits = forward(self.architecture, tree, alpha, x)
        seeds = range(len(self.architecture.seeds))
        off = [accuracy(forward(self.architecture, tree, alpha.at[g].set(0.0), x), y) for g in seeds]
        return cross_entropy(logits, y), accuracy(logits, y), jnp.stack(off) if off else jnp.zeros(0)


def episodes(
    architecture: Architecture, batch_size: int, data: HostData, rates: np.ndarray, horizon: int
) -> Callable[[], Callable[[], Figures]]:
    """Prepares whole episodes of the hosts of `data` (N, ...), whose learning rates (N,) anneal; compiles first."""
    program, data = Program(architecture, batch_size), HostData(*(jnp.asarray(part) for part in data))
    alpha = jnp.full((len(rates), len(architecture.seeds)), ALPHA)
    factors = (1 + np.cos(np.pi * np.arange(horizon) / horizon)) / 2
    rows = [jnp.asarray(rates * factor, dtype=jnp.float32) for factor in factors]
    jax.block_until_ready(program.decide(program.start(len(rates)), data, alpha, rows[0]))

    def prepare() -> Callable[[], Figures]:
        training = jax.block_until_ready(program.start(len(rates)))

        def play() -> Figures:
            state, figures = training, None
            for rate in rows:
                state, figures = program.decide(state, data, alpha, rate)
                figures = Figures(*map(np.asarray, figures))  # a controller reads them before it decides again
            assert figures is not None
            assert np.isfinite(figures.loss).all(), "the hosts of the JAX program diverged"
            return figures

        return play

    return prepare


class _TorchHost(nn.Module):
    """One host of a program in plain PyTorch."""

    def __init__(self, architecture: Architecture, tree: dict[str, Any]) -> None:
        super().__init__()
        self.places = architecture.seeds
        *hidden, self.head = [_torch_linear(*layer) for layer in tree["host"]]
        self.hidden = nn.ModuleList(hidden)
        self.seeds = nn.ModuleList(
            nn.Sequential(_torch_linear(*first), nn.GELU(), _torch_linear(*second)) for first, second in tree["seeds"]
        )

    def forward(self, x: torch.Tensor, off: int | None = None) -> torch.Tensor:
        for index, layer in enumerate(self.hidden):
            x = nn.functional.gelu(layer(x))
            for number, seed in enumerate(self.seeds):
                if self.places[number] == index and number != off:
                    x = x + ALPHA * seed(x)
        return self.head(x)

    def weights(self) -> list[np.ndarray]:
        """All weights in the order of a tree's leaves, transposed as JAX's."""
        return [own.detach().numpy().T for own in (*self.hidden.parameters(), *self.head.parameters())] + [
            own.detach().numpy().T for own in self.seeds.parameters()
        ]

    def train_and_measure(self, x: torch.Tensor, y: torch.Tensor, steps: int) -> list[float]:
        """Loss of the last of some steps; then loss, accuracy and ablations on the same samples."""
        optimizer, loss = torch.optim.AdamW(self.parameters(), lr=RATE, weight_decay=WEIGHT_DECAY), torch.zeros(())
        for _ in range(steps):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(self(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(self.parameters(), MAX_GRADIENT_NORM)
            optimizer.step()
        with torch.no_grad():
            outputs = [self(x, off) for off in (None, *range(len(self.seeds)))]
            after = nn.functional.cross_entropy(outputs[0], y)
        return [loss.item(), after.item(), *(float((out.argmax(1) == y).float().mean()) for out in outputs)]


def _torch_linear(weight: Any, bias: Any) -> nn.Linear:
    layer = nn.Linear(*weight.shape)
    layer.weight.data, layer.bias.data = torch.tensor(np.asarray(weight)).T.contiguous(), torch.tensor(np.asarray(bias))
    return layer


def check(num_hosts: int = 3, steps: int = 2) -> float:
    """Raise unless training steps, validation and ablations equal PyTorch's; returns the greatest difference."""
    architecture = Architecture(in_features=4, width=8, depth=2, num_classes=3, seeds=(0, 1))
    program, rng = Program(architecture, batch_size=64), np.random.default_rng(0)
    # Large inputs, so that gradients are clipped, and seeds that say something.
    x = 8 * rng.normal(size=(num_hosts, 64, architecture.in_features)).astype(np.float32)
    y = rng.integers(architecture.num_classes, size=(num_hosts, 64))
    training = start = program.start(num_hosts, last=0.5)
    alpha, loss = jnp.full((num_hosts, len(architecture.seeds)), ALPHA), jnp.zeros(num_hosts)
    for _ in range(steps):
        training, loss = program.train_step(training, x, y, alpha, jnp.full(num_hosts, RATE))
    after, metric, without = program.evaluate(training, HostData(x, y, x, y), alpha)
    worst = 0.0
    for n in range(num_hosts):
        host = _TorchHost(architecture, program.tree(start.parameters[n]))
        theirs = host.train_and_measure(torch.from_numpy(x[n]), torch.from_numpy(y[n]), steps)
        ours = jnp.array([loss[n], after[n], metric[n], *without[n]])
        weights = jax.tree.leaves(program.tree(training.parameters[n]))
        pairs = zip([*weights, ours], [*host.weights(), np.array(theirs)], strict=True)
        worst = max(worst, *(float(np.abs(np.asarray(own) - their).max()) for own, their in pairs))
    if not worst <= TOLERANCE:
        raise AssertionError(f"the JAX program must equal PyTorch to {TOLERANCE}, got a difference of {worst:.2g}")
    return worst


if __name__ == "__main__":
    print(f"JAX and PyTorch differ by at most {check():.1g}")
