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

from simic.growth import state_dict as growth_state
from simic.growth.blueprints import BLUEPRINTS, blueprints_for, count_parameters, new_branch
from simic.growth.copies import check_copy, copy_with_link, follow_growth, note_growth
from simic.growth.export import Live, export_plain, warn_of_dropped
from simic.growth.hooks import attach_seed, check_attached, seeds_within
from simic.growth.host_saves import guarded, watch_state_dict
from simic.growth.incubation import override_alpha, shadow_loss
from simic.growth.isolation import preserve_state, preserved_rng
from simic.growth.notices import warn_of_shared_names
from simic.growth.seed import Seed
from simic.growth.slot_discovery import ExampleInput, Site, find_sites, reference_tensor
from simic.lifecycle.actions import STYLES, Action, Op
from simic.lifecycle.slots import SlotState, check_actions, execute, remove, tick
from simic.lifecycle.stages import LifecycleConfig, Stage
from simic.storage.printable import printable


@dataclass(frozen=True, kw_only=True)
class SlotReport:
    """One line of the growth table. An unmeasured contribution is NaN."""

    slot: str
    stage: Stage
    blueprint: str | None
    alpha: float
    parameters: int
    contribution: float
    contribution_age: int
    """Decisions since it was measured, the last one included; fossils take turns, see `slots.to_measure`."""
    counterfactual: bool


class GrowableModel(nn.Module):
    """Wraps a host so that seeds can grow behind some of its submodules.

    The host keeps its class, its parameter names in `state_dict`, and its attributes, which are read, set and deleted
    through the wrapper; a name that both have, such as `loss`, is the wrapper's, and the host's is `model.host.loss`.
    `slots` lists submodule names, maps them to a topology, or is "auto".
    """

    _built = False

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
        if grown := seeds_within(model):
            raise ValueError(
                f"the host has seeds of another GrowableModel in slots {', '.join(grown)}, as a copy of `model.host` "
                "does; build the host anew, wrap model.export(), or copy the GrowableModel as a whole"
            )
        if not isinstance(rng_seed, Integral) or rng_seed < 0:
            raise ValueError(f"rng_seed must be an integer and not negative, got {rng_seed!r}")
        reserved = {growth_state.GROWTH_KEY, "seeds"} & {
            name.split(".")[1] for name in model.state_dict(prefix="host.")
        }
        if reserved:
            raise ValueError(f"the host's own {sorted(reserved)} would clash with the names of grown parts; rename it")
        self.sites = find_sites(model, slots, example_input)
        self.host = model
        self.seeds = nn.ModuleDict()
        self.lifecycle = lifecycle or LifecycleConfig()
        self.slot_state = SlotState.dormant(1, len(self.sites))
        """What the lifecycle knows of each slot, as arrays (1, S)."""
        self.example_input = example_input
        self.blueprint_names = blueprints_for({site.shape.topology for site in self.sites})
        self.rng_seed = rng_seed
        self.germinations = 0
        self._handles: dict[str, list[Any]] = {}
        self.register_state_dict_pre_hook(check_copy)
        self.register_state_dict_post_hook(growth_state.publish_names)
        self._loaded_under = ""  # the prefix of the last load's names
        self.register_load_state_dict_pre_hook(growth_state.restore)
        self.register_load_state_dict_post_hook(growth_state.publish_incompatible)
        warn_of_shared_names(self)
        self._built = True

    @property
    def slot_names(self) -> tuple[str, ...]:
        """Names of the slots, in order."""
        return tuple(site.name for site in self.sites)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            check_copy(self, runs=True)
        return self.host(*args, **kwargs)

    def buffers(self, recurse: bool = True) -> Iterator[Tensor]:
        check_copy(self)  # what averages a copy's weights reads its buffers too
        return super().buffers(recurse)

    def __deepcopy__(self, memo: dict[int, Any]) -> GrowableModel:
        return copy_with_link(self, memo)

    def follow(self, source: GrowableModel) -> None:
        """Take over the growth of the model that this is a copy of; what is new starts with the source's weights.

        For averaged copies: `averaged.module.follow(model)`, then `averaged.update_parameters(model)`.
        """
        follow_growth(self, source)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "host":
                raise
            return guarded(self, name, getattr(self.host, name))

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As torch's; the seeds become those that the state dict says (see `topology`). A refusal changes nothing."""
        if isinstance(state_dict, Mapping):
            state_dict = growth_state.prepare(self, state_dict, strict)
        return super().load_state_dict(state_dict, strict, assign)

    def __setattr__(self, name: str, value: Any) -> None:
        if not self._belongs_to_host(name):
            super().__setattr__(name, value)
            return
        lost = [slot for slot in self.slot_names if slot.startswith(name + ".") or slot == name]
        lost = [slot for slot in lost if self.seed(slot) is not None]
        if lost and isinstance(value, nn.Module):
            raise ValueError(f"{name} holds the seeds of {', '.join(lost)}; prune them before it is replaced")
        setattr(self.host, name, value)

    def __delattr__(self, name: str) -> None:
        if self._belongs_to_host(name):
            delattr(self.host, name)
        else:
            super().__delattr__(name)

    def _belongs_to_host(self, name: str) -> bool:
        """Whether a name means the host's attribute: only the host has it."""
        if not self._built or hasattr(type(self), name) or name in self.__dict__:
            return False
        own = any(name in self.__dict__[kind] for kind in ("_parameters", "_buffers", "_modules"))
        return not own and hasattr(self.host, name)

    # What the slots hold.

    def seed(self, slot: str | int) -> Seed | None:
        """The seed in a slot, or None."""
        name = self.slot_names[slot] if isinstance(slot, int) else slot
        seed = dict(self.seeds.items()).get(growth_state.seed_key(name))
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
                    stage=Stage(self.slot_state.stage[0, index]),
                    blueprint=seed.blueprint if seed else None,
                    alpha=float(self.slot_state.alpha[0, index]),
                    parameters=sum(p.numel() for p in seed.parameters()) if seed else 0,
                    contribution=float(self.slot_state.contribution[0, index]),
                    contribution_age=int(self.slot_state.contribution_age[0, index]),
                    counterfactual=bool(self.slot_state.counterfactual[0, index]),
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
            if row.contribution_age > 1 and measured != "-":
                measured += f" ({row.contribution_age} decisions ago)"
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
        check_actions(self.slot_state, row[None], self.lifecycle, names)
        self._check_attached()
        if row[0] == Op.GERMINATE:
            seed = self._build_seed(self.sites[row[1]], int(row[2]))
            self._attach(self.sites[row[1]], seed)
            self.germinations += 1
        execute(self.slot_state, row[None], self.lifecycle)
        self._follow_life()

    def plant(self, slot: str, blueprint: str, *, style: str = "linear-add", alpha: float = 1.0) -> None:
        """Put a fossil into an empty slot at once: for training a grown architecture from scratch."""
        if not 0 < alpha <= 1:
            raise ValueError(f"a fossil's alpha must be in (0, 1], got {alpha}")
        self.execute(Action("germinate", slot, blueprint, style=style))
        at = (0, self.slot_names.index(slot))
        self.slot_state.stage[at], self.slot_state.alpha[at], self.slot_state.alpha_target[at] = (
            Stage.FOSSILIZED,
            alpha,
            alpha,
        )
        self.slot_state.ramp_step[at] = self.slot_state.ramp_length[at]
        self._follow_life()

    def tick(self) -> None:
        """Let one decision of time pass: ramps move, seeds that were blended out go, cooldowns run."""
        tick(self.slot_state, self.lifecycle)
        self._follow_life()

    def remove_live_seeds(self) -> None:
        """Take every seed whose fate is open out at once, whatever its age: for a network that broke."""
        remove(self.slot_state, np.nonzero(self.slot_state.live))
        self._follow_life()

    def newborn(self, slot: int) -> Seed:
        """A seed as the one in this slot was when it was born, attached nowhere."""
        seed = self._build_seed(self.sites[slot], int(self.slot_state.blueprint[0, slot]))
        seed.set_operator(STYLES[self.slot_state.style[0, slot]].operator)
        return seed

    @contextmanager
    def switched_off(self, slot: str) -> Iterator[None]:
        """Run the network without the seed in this slot."""
        with override_alpha(self._present(slot), 0.0):
            yield

    @contextmanager
    def switched_in(self, slot: str) -> Iterator[None]:
        """Run the network with the seed in this slot at its alpha target."""
        with override_alpha(self._present(slot), float(self.slot_state.alpha_target[0, self.slot_names.index(slot)])):
            yield

    def loss(self, closure: Callable[[], Tensor]) -> Tensor:
        """The loss that `closure` computes; under shadow incubation its gradient also teaches seeds in training."""
        in_training = np.flatnonzero(self.slot_state.stage[0] == Stage.TRAINING)
        if self.lifecycle.incubation != "shadow" or not torch.is_grad_enabled():
            in_training = in_training[:0]
        pupils = [(self._present(self.slot_names[i]), float(self.slot_state.alpha_target[0, i])) for i in in_training]
        return shadow_loss(self, pupils, closure) if pupils else closure()

    def export(self, *, live: Live = "drop") -> nn.Module:
        """A plain copy in evaluation mode, independent of simic, with the fossils as ordinary layers.

        Live seeds are left out, with a warning if the output depends on them; `live="keep"` takes them at their alpha.
        """
        plain = export_plain(self, live)
        if live == "drop":
            warn_of_dropped(self)
        return plain

    def _check_attached(self) -> None:
        for site in self.sites:
            if self.seed(site.name) is not None:
                check_attached(self.host, site)

    def _present(self, slot: str) -> Seed:
        if slot not in self.slot_names:
            raise ValueError(f"no slot is named {slot!r}; the slots are {', '.join(self.slot_names)}")
        seed = self.seed(slot)
        if seed is None:
            raise ValueError(f"slot {slot!r} holds no seed; germinate one first")
        return seed

    def _fits(self, blueprint: str, site: Site) -> bool:
        return site.shape.topology in BLUEPRINTS[blueprint].topologies

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
        present = dict(self.seeds.items()) | {growth_state.seed_key(site.name): seed}
        # In order of slots, so that the order of parameters depends on what has grown, not on when.
        keys = [growth_state.seed_key(name) for name in self.slot_names]
        self.seeds = nn.ModuleDict({key: present[key] for key in keys if key in present})
        note_growth(self)
        self._handles[site.name] = attach_seed(self.host, site, seed)
        watch_state_dict(self.host, has_seeds=True)
        _forget_compiled()

    def _detach(self, site: Site) -> None:
        del self.seeds[growth_state.seed_key(site.name)]
        note_growth(self)
        for handle in self._handles.pop(site.name):
            handle.remove()
        watch_state_dict(self.host, has_seeds=bool(self.seeds))
        _forget_compiled()

    def _follow_life(self) -> None:
        """Make the modules what the arrays say."""
        for index, site in enumerate(self.sites):
            seed = self.seed(site.name)
            if seed is None:
                continue
            if not self.slot_state.occupied[0, index]:
                self._detach(site)
                continue
            seed.alpha = float(self.slot_state.alpha[0, index])
            seed.set_operator(STYLES[self.slot_state.style[0, index]].operator)
            in_training = self.slot_state.stage[0, index] == Stage.TRAINING
            seed.straight_through = bool(in_training and self.lifecycle.incubation == "straight_through")


def check_branch(name: str, branch: nn.Module, site: Site, reference: Tensor) -> None:
    """Raise unless a newborn branch keeps the slot's shape, can learn, and outputs exact zeros."""
    if not any(True for _ in branch.parameters()):
        raise ValueError(f"blueprint {name!r} has no parameters, so its seed could never become more than an identity")
    probe = torch.randn(site.example_shape, device=reference.device, dtype=reference.dtype)
    given = probe.clone()
    try:
        with torch.no_grad(), preserve_state(branch):
            output = branch(given)
    except Exception as error:
        raise ValueError(f"blueprint {name!r} fails on slot {site.name!r} ({site.shape}): {error}") from error
    if not isinstance(output, Tensor) or output.shape != probe.shape:
        got = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise ValueError(
            f"blueprint {name!r} must preserve shape: in slot {site.name!r} it turned {tuple(probe.shape)} into {got}"
        )
    if not torch.equal(given, probe):
        raise ValueError(
            f"blueprint {name!r} overwrites its input, which is the host's own activation: "
            "its first layer must not work in place, for instance nn.ReLU() instead of nn.ReLU(inplace=True)"
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
