"""What growing costs: GrowableModel against the same network written by hand in plain PyTorch, per training step,
and the governor's share of a host epoch.

Run: python benchmarks/overhead.py. Interleaved, one thread; the ratio of the fastest steps is reported.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from simic import GrowableModel
from simic.scheduler.model_governor import ModelGovernor

Grown = Literal["nothing", "behind", "beside"]
SLOTS = ("stem", "block1", "block2")
WIDTH_EMPTY, WIDTH_GROWN = 60, 27  # both networks then have about 100,000 parameters
BATCH, IMAGE = 32, 16
PAIRS, WARM_UP, STEPS = 16, 5, 40


class Block(nn.Sequential):
    """Convolution, normalisation, ReLU."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__(nn.Conv2d(channels, width, 3, stride, 1), nn.GroupNorm(3, width), nn.ReLU())


class Residual(nn.Sequential):
    """What the blueprint `conv_double` adds, as one would write it by hand."""

    def __init__(self, width: int) -> None:
        super().__init__(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.GroupNorm(1, width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
        )


class Beside(nn.Sequential):
    """What the blueprint `widen` adds, as one would write it by hand."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__(
            nn.Conv2d(channels, width, 3, stride, 1, bias=False),
            nn.GroupNorm(1, width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
        )


class Plain(nn.Module):
    """The network by hand: without more, with three residual parts behind its blocks, or with three beside them."""

    def __init__(self, width: int, grown: Grown = "nothing") -> None:
        super().__init__()
        sizes = [(3, width, 1), (width, width, 2), (width, 2 * width, 2)]
        self.stem, self.block1, self.block2 = (Block(*size) for size in sizes)
        self.head = nn.Linear(2 * width, 10)
        self.behind = nn.ModuleList([Residual(size[1]) for size in sizes]) if grown == "behind" else None
        self.beside = nn.ModuleList([Beside(*size) for size in sizes]) if grown == "beside" else None

    def forward(self, x: Tensor) -> Tensor:
        for index, segment in enumerate((self.stem, self.block1, self.block2)):
            h = segment(x)
            if self.behind is not None:
                h = h + self.behind[index](h)
            if self.beside is not None:
                h = h + self.beside[index](x)
            x = h
        return self.head(x.mean((2, 3)))


def training_step(model: nn.Module) -> Callable[[], None]:
    """A closure that takes one step of SGD on fixed data."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(BATCH, 3, IMAGE, IMAGE, generator=generator)
    y = torch.randint(10, (BATCH,), generator=generator)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def ratio(make_growable: Callable[[], nn.Module], make_plain: Callable[[], nn.Module]) -> float:
    """Seconds of a step of the first over those of the second, each the best of many interleaved steps.

    Where a network happens to lie in memory changes its speed by several percent, so each kind is built anew often.
    """
    best = [float("inf"), float("inf")]
    for pair in range(PAIRS):
        order = (0, 1) if pair % 2 else (1, 0)
        makers = (make_growable, make_plain)
        steps = {which: training_step(makers[which]()) for which in order}
        for turn in range(WARM_UP + STEPS):
            for which in order if turn % 2 else order[::-1]:
                start = time.perf_counter()
                steps[which]()
                if turn >= WARM_UP:
                    best[which] = min(best[which], time.perf_counter() - start)
    return best[0] / best[1]


def governor_share(make: Callable[[], GrowableModel], shape: tuple[int, ...], batches: int) -> float:
    """Seconds that the governor takes for a host epoch over those of the epoch itself, each the best of several.

    The epoch is training alone, without validation, with AdamW, whose state is copied too.
    """
    epoch, governing = float("inf"), float("inf")
    for _ in range(4):
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        governor = ModelGovernor(model, optimizer)
        x, y = torch.randn(shape), torch.randint(10, shape[:1])
        for _ in range(10):
            start = time.perf_counter()
            for _ in range(batches):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
            trained = time.perf_counter()
            governor.weights_finite()
            governor.judge({"val_loss": 1.0, "val_accuracy": 0.5})
            governor.save_good_state()
            epoch, governing = min(epoch, trained - start), min(governing, time.perf_counter() - trained)
    return governing / epoch


def small_mlp() -> GrowableModel:
    """As in the README: the smallest host that one would train, so the worst case for bookkeeping."""
    host = nn.Sequential(nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 10))
    return GrowableModel(host, example_input=torch.zeros(1, 64))


def growable(width: int, grown: Grown = "nothing") -> GrowableModel:
    """The host with three slots, empty or each holding a fossil."""
    model = GrowableModel(Plain(width), SLOTS, example_input=torch.randn(2, 3, IMAGE, IMAGE))
    for slot in SLOTS if grown != "nothing" else ():
        model.plant(slot, "conv_double" if grown == "behind" else "widen")
    return model


def main() -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    result = {}
    cases: tuple[tuple[str, int, Grown], ...] = (
        ("empty_slots_ratio", WIDTH_EMPTY, "nothing"),
        ("three_fossils_ratio", WIDTH_GROWN, "behind"),
        ("beside_fossil_ratio", WIDTH_GROWN, "beside"),
    )
    for key, width, grown in cases:
        ours_count, plain_count = (
            sum(p.numel() for p in make(width, grown).parameters()) for make in (growable, Plain)
        )
        assert ours_count == plain_count, f"not the same network: {ours_count} and {plain_count} parameters"
        result[key] = round(ratio(partial(growable, width, grown), partial(Plain, width, grown)), 4)
        print(f"{key}: {result[key]} ({plain_count:,} parameters)")
    # As many batches as in the README's example (1,000 samples) and in examples/resnet.py.
    shares = {
        "small MLP": governor_share(small_mlp, (50, 64), 20),
        "convolutional host, 100,000 parameters": governor_share(
            lambda: growable(WIDTH_EMPTY), (50, 3, IMAGE, IMAGE), 20
        ),
    }
    for name, share in shares.items():
        print(f"governor, {name}: {share:.2%} of a host epoch of 20 batches")
    result["governor_ratio"] = round(1 + max(shares.values()), 4)
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
