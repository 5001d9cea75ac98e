"""GrowableModel: any nn.Module with slots at named submodules."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

from simic.actions import STYLES, Action, Op
from simic.growth import topology
from simic.growth.blueprints import blueprints_for, count_parameters, get_blueprint, new_branch
from simic.growth.export import export_plain
from simic.growth.incubation import shadow_loss, speaking_with
from simic.growth.seed import Seed
from simic.growth.sites import (
    ExampleInput,
    Site,
    check_activation,
    find_sites,
    first_tensor,
    reference_tensor,
    with_first_tensor,
)
from simic.lifecycle import LifecycleConfig, Stage
from simic.passes import preserved_rng, undisturbed
from simic.slots import Slots, check_actions, execute, tick
from simic.terminal import printable


@dataclass(frozen=True, kw_only=True)
class SlotReport:
    """One line of the growth table. An unmeasured contribution is NaN."""

    slot: str
    stage: Stage
    blueprint: str | None
    alpha: float
    parameters: int
    contribution: float
    counterfactual: bool


class _SlotHook:
    """Lets a seed speak behind its submodule, as a forward hook."""

    def __init__(self, site: Site, seed: Seed) -> None:
        self.site, self.seed = site, seed

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        h = first_tensor(output)
        if h is None:
            raise ValueError(f"slot {self.site.name!r} must output a tensor, got {type(output).__name__}")
        check_activation(self.site, h)
        return with_first_tensor(output, self.seed(h))


class GrowableModel(nn.Module):
    """Wraps a host so that seeds can grow behind some of its submodules.

    The host keeps its class, its parameter names in `state_dict`, and its attributes, which are reachable through
    the wrapper; a name that both have, such as `loss`, is the wrapper's, and the host's is `model.host.loss`.
    `slots` lists submodule names, maps them to a topology, or is "auto".
    """

    def __init__(
        self,
        model: nn.Module,
        slots: Sequence[str] | Mapping[str, str] | str = "auto",
        *,
        example_input: ExampleInput,
        lifecycle: LifecycleConfig | None = None,
        rng_seed: int = 0,
    ) -> None:
        super().__init__()
        if isinstance(model, GrowableModel):
            raise ValueError("the model is a GrowableModel already; wrap the host itself, once")
        if not isinstance(rng_seed, Integral) or rng_seed < 0:
            raise ValueError(f"rng_seed must be an integer and not negative, got {rng_seed!r}")
        reserved = {topology.GROWTH_KEY, "seeds"} & {name.partition(".")[0] for name in model.state_dict()}
        if reserved:
            raise ValueError(f"the host's own {sorted(reserved)} would clash with the names of grown parts; rename it")
        self.sites = find_sites(model, slots, example_input)
        self.host = model
        self.seeds = nn.ModuleDict()
        self.lifecycle = lifecycle or LifecycleConfig()
        self.life = Slots.dormant(1, len(self.sites))
        """What the lifecycle knows of each slot, as arrays (1, S)."""
        self.example_input = example_input
        self.blueprint_names = blueprints_for({site.shape.topology for site in self.sites})
        self.rng_seed = rng_seed
        self.germinations = 0
        self._handles: dict[str, Any] = {}
        self.register_state_dict_post_hook(topology.publish_names)
        self.register_load_state_dict_pre_hook(topology.restore)

    @property
    def slot_names(self) -> tuple[str, ...]:
        """Names of the slots, in order."""
        return tuple(site.name for site in self.sites)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.host(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "host":
                raise
            return getattr(self.host, name)

    # What the slots hold.

    def seed(self, slot: str | int) -> Seed | None:
        """The seed in a slot, or None."""
        name = self.slot_names[slot] if isinstance(slot, int) else slot
        seed = dict(self.seeds.items()).get(topology.seed_key(name))
        assert seed is None or isinstance(seed, Seed)
        return seed

    def blueprint_table(self) -> np.ndarray:
        """Parameters of every blueprint in every slot (S, B); -1 where it does not fit."""
        return np.array(
            [
                [count_parameters(name, site.shape) if self._fits(name, site) else -1 for name in self.blueprint_names]
                for site in self.sites
            ]
        )

    def growth(self) -> list[SlotReport]:
        """What every slot holds now."""
        reports = []
        for index, name in enumerate(self.slot_names):
            seed = self.seed(name)
            reports.append(
                SlotReport(
                    slot=name,
                    stage=Stage(self.life.stage[0, index]),
                    blueprint=seed.blueprint if seed else None,
                    alpha=float(self.life.alpha[0, index]),
                    parameters=sum(p.numel() for p in seed.parameters()) if seed else 0,
                    contribution=float(self.life.contribution[0, index]),
                    counterfactual=bool(self.life.counterfactual[0, index]),
                )
            )
        return reports

    def print_growth(self, console: Console | None = None) -> None:
        """Print slot, stage, blueprint, alpha, parameters and contribution of every slot."""
        table = Table(title="Growth")
        for name in ("slot", "stage", "blueprint", "alpha", "parameters", "contribution"):
            table.add_column(name, overflow="fold")
        for row in self.growth():
            measured = "-" if np.isnan(row.contribution) else f"{row.contribution:+.4f}"
            table.add_row(
                Text(printable(row.slot)),
                str(row.stage),
                Text(printable(row.blueprint or "-")),
                f"{row.alpha:.2f}",
                f"{row.parameters:,}",
                f"{measured} (if blended in)" if row.counterfactual else measured,
            )
        host = sum(p.numel() for p in self.host.parameters())
        table.caption = f"host {host:,} parameters, grown {sum(r.parameters for r in self.growth()):,}"
        (console or Console()).print(table)

    # Change.

    def execute(self, action: Action | np.ndarray) -> None:
        """Carry out one action: an Action, or its row of indices. An illegal one raises and changes nothing."""
        names = self.slot_names
        row = action.encode(names, self.blueprint_names) if isinstance(action, Action) else np.asarray(action)
        check_actions(self.life, row[None], self.lifecycle, names)
        if row[0] == Op.GERMINATE:
            seed = self._build_seed(self.sites[row[1]], int(row[2]))
            self._attach(self.sites[row[1]], seed)
            self.germinations += 1
        execute(self.life, row[None], self.lifecycle)
        self._follow_life()

    def plant(self, slot: str, blueprint: str, *, style: str = "linear-add", alpha: float = 1.0) -> None:
        """Put a fossil into an empty slot at once: for training a grown architecture from scratch."""
        if not 0 < alpha <= 1:
            raise ValueError(f"a fossil's alpha must be in (0, 1], got {alpha}")
        self.execute(Action("germinate", slot, blueprint, style=style))
        at = (0, self.slot_names.index(slot))
        self.life.stage[at], self.life.alpha[at], self.life.alpha_target[at] = Stage.FOSSILIZED, alpha, alpha
        self.life.ramp_step[at] = self.life.ramp_length[at]
        self._follow_life()

    def tick(self) -> None:
        """Let one decision of time pass: ramps move, seeds that were blended out go, cooldowns run."""
        tick(self.life, self.lifecycle)
        self._follow_life()

    @contextmanager
    def switched_off(self, slot: str) -> Iterator[None]:
        """Run the network without the seed in this slot."""
        with speaking_with(self._present(slot), 0.0):
            yield

    @contextmanager
    def switched_in(self, slot: str) -> Iterator[None]:
        """Run the network with the seed in this slot at its alpha target."""
        with speaking_with(self._present(slot), float(self.life.alpha_target[0, self.slot_names.index(slot)])):
            yield

    def loss(self, closure: Callable[[], Tensor]) -> Tensor:
        """The loss that `closure` computes; under shadow incubation its gradient also teaches seeds in training."""
        in_training = np.flatnonzero(self.life.stage[0] == Stage.TRAINING)
        if self.lifecycle.incubation != "shadow" or not torch.is_grad_enabled():
            in_training = in_training[:0]
        pupils = [(self._present(self.slot_names[i]), float(self.life.alpha_target[0, i])) for i in in_training]
        return shadow_loss(self, pupils, closure) if pupils else closure()

    def export(self) -> nn.Module:
        """A plain copy in evaluation mode, independent of simic: fossils are part of it, live seeds are left out."""
        return export_plain(self)

    def _present(self, slot: str) -> Seed:
        if slot not in self.slot_names:
            raise ValueError(f"no slot is named {slot!r}; the slots are {', '.join(self.slot_names)}")
        seed = self.seed(slot)
        if seed is None:
            raise ValueError(f"slot {slot!r} holds no seed; germinate one first")
        return seed

    def _fits(self, blueprint: str, site: Site) -> bool:
        return site.shape.topology in get_blueprint(blueprint).topologies

    def _build_seed(self, site: Site, blueprint_index: int) -> Seed:
        """A new seed, checked to keep the slot's shape and to be an identity; torch's random stream is not used up."""
        if not 0 <= blueprint_index < len(self.blueprint_names):
            raise ValueError(f"a blueprint index must be below {len(self.blueprint_names)}, got {blueprint_index}")
        name = self.blueprint_names[blueprint_index]
        if not self._fits(name, site):
            fitting = [other for other in self.blueprint_names if self._fits(other, site)]
            raise ValueError(
                f"blueprint {name!r} does not fit slot {site.name!r} ({site.shape}); these do: {', '.join(fitting)}"
            )
        branch = new_branch(name, site.shape, (self.rng_seed, self.sites.index(site), self.germinations))
        reference = reference_tensor(self.host, site)
        branch.to(reference.device, reference.dtype).train(self.training)
        with preserved_rng():
            check_branch(name, branch, site, reference)
        return Seed(name, branch, site.shape)

    def _attach(self, site: Site, seed: Seed) -> None:
        present = dict(self.seeds.items()) | {topology.seed_key(site.name): seed}
        # In order of slots, so that the order of parameters depends on what has grown, not on when.
        keys = [topology.seed_key(name) for name in self.slot_names]
        self.seeds = nn.ModuleDict({key: present[key] for key in keys if key in present})
        hook = _SlotHook(site, seed)
        self._handles[site.name] = self.host.get_submodule(site.name).register_forward_hook(hook)
        _forget_compiled()

    def _detach(self, site: Site) -> None:
        del self.seeds[topology.seed_key(site.name)]
        self._handles.pop(site.name).remove()
        _forget_compiled()

    def _follow_life(self) -> None:
        """Make the modules what the arrays say."""
        for index, site in enumerate(self.sites):
            seed = self.seed(site.name)
            if seed is None:
                continue
            if not self.life.occupied[0, index]:
                self._detach(site)
                continue
            seed.alpha = float(self.life.alpha[0, index])
            seed.set_operator(STYLES[self.life.style[0, index]].operator)
            in_training = self.life.stage[0, index] == Stage.TRAINING
            seed.straight_through = bool(in_training and self.lifecycle.incubation == "straight_through")


def check_branch(name: str, branch: nn.Module, site: Site, reference: Tensor) -> None:
    """Raise unless a newborn branch keeps the slot's shape, can learn, and outputs exact zeros."""
    if not any(True for _ in branch.parameters()):
        raise ValueError(f"blueprint {name!r} has no parameters, so its seed could never become more than an identity")
    probe = torch.randn(site.example_shape, device=reference.device, dtype=reference.dtype)
    try:
        with torch.no_grad(), undisturbed(branch):
            output = branch(probe)
    except Exception as error:
        raise ValueError(f"blueprint {name!r} fails on slot {site.name!r} ({site.shape}): {error}") from error
    if not isinstance(output, Tensor) or output.shape != probe.shape:
        got = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise ValueError(
            f"blueprint {name!r} must preserve shape: in slot {site.name!r} it turned {tuple(probe.shape)} into {got}"
        )
    if output.count_nonzero():
        raise ValueError(
            f"blueprint {name!r} is not born as identity: its branch must output exact zeros at birth; "
            "set its last layer to zero, for instance with simic.zeroed(layer)"
        )


def _forget_compiled() -> None:
    # Compiled graphs do not notice hooks that come and go, so a change of structure starts them afresh.
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
