"""Planted answers: hosts of which it is known which growth pays, and why.

The first hosts share a stem with two flaws. It squeezes some inputs through a layer that is too narrow, and makes waves
of the others that nothing combines:

    x[0:8] -> narrow, 2 features ---+-> body -> head        all linear, so that the host cannot tell either class
    x[8:10] -> sin(10 x), 2 waves --+

What the narrow layer throws away only a seed beside the stem can keep (width). What the waves tell together only a seed
behind the stem can see (depth): beside it, it would have to make the waves itself.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from helpers.tiny_comparison import make_task
from simic.control.plan import Plan
from simic.tasks.data import Data
from simic.tasks.task import Length, Task

HORIZON = 24
"""Decisions per episode."""
SQUEEZED, NARROW, WAVES, BODY = 8, 2, 2, 24
"""Inputs that the stem squeezes, features it squeezes them into, inputs it makes waves of, and the width of the body,
which makes the host large enough for seeds in proportion."""
FREQUENCY = 10.0
"""Of the waves: normal inputs cover some 12 half-periods, too many for one hidden layer on the inputs themselves."""
MEDIAN_LENGTH = 7.344
"""Median of the sum of 8 squared normal inputs."""
NEVER = Plan(max_seeds=0)


class Planted(NamedTuple):
    """A host, the plan that is right for it, and plans that are wrong for the planted reason."""

    make_task: Callable[[], Task]
    right: Plan
    wrong: dict[str, Plan]
    lead: float
    """Points of score that the right plan is ahead of each wrong one, at the lower end of the interval."""
    seeds_per_slot: int = 1


class SqueezeAndWave(nn.Module):
    """The stem with two flaws."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Linear(SQUEEZED, NARROW)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((self.narrow(x[..., :SQUEEZED]), torch.sin(FREQUENCY * x[..., SQUEEZED:])), -1)


def is_long(x: Tensor) -> Tensor:
    """Whether the squeezed inputs are long, all together: two projections of eight hardly tell."""
    return x[:, :SQUEEZED].square().sum(1) > MEDIAN_LENGTH


def is_same_sign(x: Tensor) -> Tensor:
    """Whether the two waves have the same sign."""
    return torch.sin(FREQUENCY * x[:, SQUEEZED:]).prod(1) > 0


def flawed_task(label: Callable[[Tensor], Tensor], num_classes: int = 2) -> Task:
    """Label normal inputs, with the host of the flawed stem."""

    def make_host() -> nn.Sequential:
        body, head = nn.Linear(NARROW + WAVES, BODY), nn.Linear(BODY, num_classes)
        return nn.Sequential(OrderedDict(stem=SqueezeAndWave(), body=body, head=head))

    data = draw_data((512, 512, 512), SQUEEZED + WAVES, lambda x, train: label(x), num_classes)
    return make_task(
        data=data, make_host=make_host, host_of_width=None, slots=("stem",), learning_rate=2e-2, batch_size=32
    )


def needs_width() -> Task:
    return flawed_task(is_long)


def needs_depth() -> Task:
    return flawed_task(is_same_sign)


def needs_both() -> Task:
    """Four classes: each kind of seed tells two pairs of them apart."""
    return flawed_task(lambda x: 2 * is_long(x).int() + is_same_sign(x).int(), 4)


def too_few_data() -> Task:
    """A plane in 16 dimensions from 96 samples, three of ten labelled wrongly: large networks learn these by heart."""

    def label(x: Tensor, train: bool) -> Tensor:
        wrong = torch.rand(len(x), generator=torch.Generator().manual_seed(1)) < 0.3
        return (x[:, :4].sum(1) > 0) ^ (wrong & train)

    return make_task(
        data=draw_data((96, 512, 512), 16, label),
        make_host=lambda: nn.Sequential(OrderedDict(stem=nn.Linear(16, 8), head=nn.Linear(8, 2))),
        host_of_width=None,
        slots=("stem",),
        learning_rate=1e-2,
        batch_size=16,
    )


def cut_in_half() -> Task:
    """Depth pays, but training ends half way, without notice: a seed that is not part of the host by then is lost."""
    return replace(needs_depth(), length=Length(host_epochs=HORIZON // 2, planned=HORIZON, anneal=False))


def draw_data(
    sizes: tuple[int, int, int], features: int, label: Callable[[Tensor, bool], Tensor], num_classes: int = 2
) -> Data:
    """Normal inputs, each with the class that `label(x, whether they are for training)` gives it."""
    generator, parts = torch.Generator().manual_seed(0), dict[str, Tensor]()
    for name, size in zip(("train", "validation", "test"), sizes, strict=True):
        x = torch.randn(size, features, generator=generator)
        parts |= {f"{name}_x": x, f"{name}_y": label(x, name == "train").long()}
    return Data(**parts, num_classes=num_classes)


BEHIND, BESIDE = {"mlp": Plan(blueprints=("mlp",))}, {"widen": Plan(blueprints=("widen",))}
BEHIND_TWICE = {"mlp_large twice": Plan(max_seeds=2, interval=1, reads="output", size=1.0)}
BESIDE_TWICE = {"widen_large twice": Plan(max_seeds=2, interval=1, reads="input", size=1.0)}
BOTH = Plan(max_seeds=2, interval=1, reads="both", size=0.6)
LATE = {"late": Plan(blueprints=("mlp",), first=9)}
"""In time to fossilize in a whole episode, not in half of one."""
LARGE = {name: Plan(blueprints=(name,)) for name in ("mlp_large", "widen_large")}

PLANTED = {
    "width": Planted(needs_width, BESIDE["widen"], {"never": NEVER} | BEHIND | BEHIND_TWICE, 20, seeds_per_slot=2),
    "depth": Planted(needs_depth, BEHIND["mlp"], {"never": NEVER} | BESIDE, 40),
    "depth, two seats": Planted(
        needs_depth, BEHIND["mlp"], {"never": NEVER} | BESIDE | BESIDE_TWICE, 40, seeds_per_slot=2
    ),
    "both": Planted(needs_both, BOTH, {"never": NEVER} | BEHIND_TWICE | BESIDE_TWICE, 20, seeds_per_slot=2),
    "too few data": Planted(too_few_data, NEVER, LARGE, 5),
    "cut in half": Planted(cut_in_half, BEHIND["mlp"], {"never": NEVER} | LATE, 40),
}
