"""GrowableModel: any nn.Module with slots at named submodules."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from numbers import Integral
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.optim import Optimizer

from simic.growth import state_dict as growth_state
from simic.growth.blueprints import menu, parameter_table
from simic.growth.budget import Budget, check_action, check_budget, count_flops
from simic.growth.contribution_errors import ContributionErrors
from simic.growth.copies import check_copy, copy_with_link, follow_growth, note_growth
from simic.growth.data_parallel import in_process_group, watch_output
from simic.growth.example import ExampleInput
from simic.growth.export import LiveSeeds, export_plain, warn_about_dropped_seeds
from simic.growth.exported import export_config, follow_export
from simic.growth.freezing import FROZEN_LIFECYCLE, allow_backward
from simic.growth.hooks import attach_seed, check_attached
from simic.growth.host_checks import check_host, warn_about_hidden_names
from simic.growth.host_saves import guard_save, warn_on_state_dict
from simic.growth.incubation import override_alpha, shadow_loss
from simic.growth.peft_files import write_peft
from simic.growth.report import SlotReport, growth_table, slot_reports, summarize, trainable_line
from simic.growth.seed import Seed, new_seed
from simic.growth.settings import describe_example, weight_dtype
from simic.growth.slot_discovery import KnownSites, Site, find_sites, reference_tensor, with_seats
from simic.growth.slot_patterns import Slots
from simic.lifecycle.actions import STYLES, Action, Column, Op
from simic.lifecycle.slots import SlotState, apply_actions, check_actions, plant_fossil, remove, tick
from simic.lifecycle.stages import LifecycleConfig, Stage


class GrowableModel(nn.Module):
    """Wraps a host so that seeds can grow behind and beside some of its submodules.

    The host keeps its class, its parameter names in `state_dict`, and its attributes, which are read, set and deleted
    through the wrapper. If both have a name, such as `loss`, the wrapper's is used; the host's is `model.host.loss`.

    Args:
        model: The host, any nn.Module. It is wrapped, not copied.
        slots: Submodules by name, suffix ("q_proj"), pattern (`"*.mlp"`, `re.compile(...)`) or class (`nn.Linear`), a
            list of these, a table from these to a topology, "linear" for every linear layer but the head, or "auto".
            `simic.find_slots(model, example_input)` lists what there is.
        example_input: A batch of at least one sample, as the host takes it: a tensor, a tuple of arguments or a mapping
            of keywords. Shapes of slots are found by running it.
        lifecycle: Times and limits of seeds.
        freeze_host: Only seeds train, and those for frozen hosts are offered: LoRA beside linear layers, adapters
            behind blocks. Make parts that train along trainable afterwards: `model.host.head.requires_grad_(True)`.
        rng_seed: Of the initial weights of seeds.
        blueprints: Names of those that may grow; by default all that fit.
        max_parameters: Budget that every controller keeps to: parameters of host and seeds together.
        max_growth: The same as a multiple of the host's parameters, such as 2.0.
        max_flops: Budget of operations of a forward pass over `example_input`.

    Raises:
        ValueError: A slot does not exist or cannot hold seeds, or its shape is ambiguous; the error says what to state.

    Example:
        >>> model = GrowableModel(net, slots="linear", example_input=x[:2], max_growth=3.0)
        >>> model.slot_names
        ('0',)
    """

    _built = False

    def __init__(
        self,
        model: nn.Module,
        slots: Slots | KnownSites = "auto",
        *,
        example_input: ExampleInput,
        lifecycle: LifecycleConfig | None = None,
        freeze_host: bool = False,
        rng_seed: int = 0,
        blueprints: Sequence[str] | None = None,
        max_parameters: int | None = None,
        max_growth: float | None = None,
        max_flops: float | None = None,
    ) -> None:
        super().__init__()
        if isinstance(model, GrowableModel):
            raise ValueError("the model is a GrowableModel already; wrap the host itself, once")
        check_host(model)
        if not isinstance(rng_seed, Integral) or rng_seed < 0:
            raise ValueError(f"rng_seed must be an integer and not negative, got {rng_seed!r}")
        self.lifecycle = lifecycle or (FROZEN_LIFECYCLE if freeze_host else LifecycleConfig())
        self.sites = with_seats(find_sites(model, slots, example_input), self.lifecycle.seeds_per_slot)
        self.host = model
        self.freeze_host = freeze_host
        self.seeds = nn.ModuleDict()
        self.slot_state = SlotState.dormant(1, len(self.sites))
        """State of the lifecycle in each slot, as arrays (1, S)."""
        self.contribution_errors: ContributionErrors = {}
        self.example_input = example_input
        self.example_description = describe_example(example_input)
        self.example_dtype = weight_dtype(model)
        self.blueprint_choice = None if blueprints is None else list(blueprints)
        """The menu as the user gave it; None for all that fit."""
        self.blueprint_names = menu(blueprints, [site.shape for site in self.sites], frozen=freeze_host)
        self.budget = Budget(max_parameters=max_parameters, max_growth=max_growth, max_flops=max_flops)
        self.host_flops = 0 if max_flops is None else count_flops(model, example_input)
        """Operations of a forward pass of the host alone, if the budget limits them."""
        check_budget(self)
        self.rng_seed: int = rng_seed
        self.germinations = 0
        self._handles: dict[str, list[Any]] = {}
        self.register_state_dict_pre_hook(check_copy)
        self.register_state_dict_post_hook(growth_state.publish_names)
        self.loaded_prefix = ""
        """Prefix of the names in the last state dict that was loaded."""
        self.register_load_state_dict_pre_hook(growth_state.restore)
        self.register_load_state_dict_post_hook(growth_state.publish_incompatible)
        warn_about_hidden_names(self)
        if freeze_host:
            model.requires_grad_(False)
        self._built = True

    @property
    def slot_names(self) -> tuple[str, ...]:
        """Names of the slots, in order."""
        return tuple(site.name for site in self.sites)

    @property
    def grown_slots(self) -> list[str]:
        """Names of the slots that hold a seed, in order."""
        return [site.name for site in self._grown_sites]

    @property
    def in_place(self) -> bool:
        """Whether the seeds are part of the host itself (see `in_place.py`) rather than of this wrapper alone."""
        return "seeds" not in self._modules

    @property
    def _grown_sites(self) -> list[Site]:
        return [site for site in self.sites if growth_state.seed_key(site.name) in self.seeds]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the host with its seeds: same arguments, same outputs."""
        if not torch.compiler.is_compiling():
            check_copy(self, runs=True)
        output = self.host(*args, **kwargs)
        if in_process_group():
            watch_output(self, output)
        allow_backward(self, output)
        return output

    def buffers(self, recurse: bool = True) -> Iterator[Tensor]:
        check_copy(self)  # code that averages a copy's weights reads its buffers too
        return super().buffers(recurse)

    def __deepcopy__(self, memo: dict[int, Any]) -> GrowableModel:
        return copy_with_link(self, memo)

    def follow(self, source: nn.Module) -> None:
        """Take over the growth of the model that this is a copy of; new seeds start with the source's weights.

        For averaged copies: `averaged.module.follow(model)`, then `averaged.update_parameters(model)`.

        Args:
            source: The model, or what torch.compile or DistributedDataParallel made of it.

        Raises:
            TypeError: The source is no GrowableModel.
            ValueError: It has other slots.
        """
        follow_growth(self, source)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load weights, and hold the seeds of the state dict: others are removed, missing ones are added.

        Args:
            state_dict: Of this model; or of the bare host, which means "no seeds" (with `strict=False` seeds stay).
            strict, assign: As in `torch.nn.Module.load_state_dict`.

        Returns:
            Missing and unexpected keys, as torch does.

        Raises:
            ValueError: The growth record is damaged or does not fit this model; nothing changes.
            RuntimeError: Names or shapes of weights do not fit.
        """
        if isinstance(state_dict, Mapping):
            state_dict = growth_state.prepare(self, state_dict, strict)
        return super().load_state_dict(state_dict, strict, assign)

    # Attributes of the host, through the wrapper.

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "host":
                raise
            return guard_save(self, name, getattr(self.host, name))

    def __setattr__(self, name: str, value: Any) -> None:
        if not self._belongs_to_host(name):
            super().__setattr__(name, value)
            return
        lost = [slot for slot in self.grown_slots if slot.startswith(name + ".") or slot == name]
        if lost and isinstance(value, nn.Module):
            raise ValueError(f"{name} holds the seeds of {', '.join(lost)}; prune them before it is replaced")
        setattr(self.host, name, value)

    def __delattr__(self, name: str) -> None:
        if self._belongs_to_host(name):
            delattr(self.host, name)
        else:
            super().__delattr__(name)

    def _belongs_to_host(self, name: str) -> bool:
        """Whether only the host has an attribute of this name."""
        if not self._built or hasattr(type(self), name) or name in self.__dict__:
            return False
        own = any(name in self.__dict__[kind] for kind in ("_parameters", "_buffers", "_modules"))
        return not own and hasattr(self.host, name)

    # Reading.

    def seed(self, slot: str | int) -> Seed | None:
        """The seed in a slot.

        Args:
            slot: Name or index.

        Returns:
            A module, or None if the slot is empty.
        """
        name = self.slot_names[slot] if isinstance(slot, int) else slot
        seed = dict(self.seeds.items()).get(growth_state.seed_key(name))
        assert seed is None or isinstance(seed, Seed)
        return seed

    def host_parameters(self) -> Iterator[nn.Parameter]:
        """Parameters of the host without those of seeds."""
        seeds = set(self.seeds.parameters())
        return (parameter for parameter in self.host.parameters() if parameter not in seeds)

    def blueprint_table(self) -> np.ndarray:
        """Parameters of every blueprint in every slot (S, B); -1 where it does not fit."""
        return parameter_table(self.blueprint_names, [site.shape for site in self.sites])

    def growth(self) -> list[SlotReport]:
        """What every slot holds, for code; `print_growth` prints the same.

        Returns:
            One row per slot, with `slot`, `stage`, `blueprint`, `alpha`, `parameters` and `contribution`.
        """
        return slot_reports(self)

    def print_growth(self, console: Console | None = None) -> None:
        """Print slot, stage, blueprint, alpha, parameters and contribution of every slot.

        Args:
            console: Where to; by default stdout.
        """
        (console or Console()).print(growth_table(self))

    def print_trainable_parameters(self) -> None:
        """Print how many parameters are trained, of how many, as PEFT does."""
        print(trainable_line(self))

    def extra_repr(self) -> str:
        return summarize(self) if self._built else ""

    @overload
    def export(self, *, live: LiveSeeds = "drop", merge: bool = False) -> nn.Module: ...

    @overload
    def export(self, *, live: LiveSeeds = "drop", config: bool = False, optimizer: Optimizer | None = None) -> Any: ...

    def export(
        self,
        *,
        live: LiveSeeds = "drop",
        merge: bool = False,
        config: bool = False,
        optimizer: Optimizer | None = None,
    ) -> Any:
        """A plain copy in evaluation mode, independent of simic, with the fossils as ordinary layers.

        Args:
            live: "drop" leaves live seeds out, with a warning if the output depends on them; "keep" keeps their alpha.
            merge: Fold seeds that are linear (LoRA, low_rank) into the weights of their layers.
            config: Also return what `simic.build_exported` needs.
            optimizer: Also return an optimizer that trains the copy, with this one's settings and state.

        Returns:
            The network, or (network, config), (network, optimizer), (network, config, optimizer).

        Raises:
            ValueError: `merge` was combined with `config` or `optimizer`.

        Example:
            >>> plain = model.export()
            >>> type(plain).__name__
            'Sequential'
        """
        if merge and (config or optimizer is not None):
            raise ValueError("merge=True leaves no layers of seeds that a config or an optimizer could tell about")
        memo: dict[int, Any] = {}
        plain = export_plain(self, live, memo, merge=merge)
        if live == "drop":
            warn_about_dropped_seeds(self)
        extras = [export_config(self, live)] if config else []
        extras += [] if optimizer is None else [follow_export(optimizer, self, plain, memo)]
        return (plain, *extras) if extras else plain

    def export_peft(self, directory: str | Path, *, live: LiveSeeds = "drop") -> None:
        """Write the seeds as a LoRA adapter in PEFT's format: `PeftModel.from_pretrained(host, directory)` loads it.

        Args:
            directory: Where to write.
            live: As in `export`.

        Raises:
            ValueError: There is no seed, or not all seeds are LoRA beside linear layers.
        """
        write_peft(self, directory, live)
        if live == "drop":
            warn_about_dropped_seeds(self)

    # Running.

    def switched_off(self, slot: str) -> AbstractContextManager[None]:
        """Run the network without the seed in this slot: `with model.switched_off("0"): ...`.

        Args:
            slot: Its name.

        Returns:
            A context manager.

        Raises:
            ValueError: There is no such slot, or no seed in it.
        """
        return override_alpha(self._seed_in(slot), 0.0)

    def switched_in(self, slot: str) -> AbstractContextManager[None]:
        """Run the network with the seed in this slot at its alpha target; used as `switched_off`.

        Args:
            slot: Its name.

        Returns:
            A context manager.

        Raises:
            ValueError: There is no such slot, or no seed in it.
        """
        seed = self._seed_in(slot)
        return override_alpha(seed, float(self.slot_state.alpha_target[0, self.slot_names.index(slot)]))

    def loss(self, closure: Callable[[], Tensor]) -> Tensor:
        """Compute the training loss as shadow incubation needs it; prefer `GrowthScheduler.loss`.

        Args:
            closure: A function without arguments that runs the model on a batch and returns the loss.

        Returns:
            The loss. Under shadow incubation its gradient also reaches seeds in stage training.
        """
        in_training = np.flatnonzero(self.slot_state.stage[0] == Stage.TRAINING)
        if self.lifecycle.incubation != "shadow" or not torch.is_grad_enabled() or not in_training.size:
            return closure()
        targets = self.slot_state.alpha_target[0]
        return shadow_loss(self, [(self._seed_in(self.slot_names[i]), float(targets[i])) for i in in_training], closure)

    # Changing.

    def execute(self, action: Action | np.ndarray) -> None:
        """Carry out one action, as a controller would.

        Args:
            action: An `Action`, or its row of indices (H,).

        Raises:
            IllegalActionError: The lifecycle or the budget does not allow it; nothing changes.

        Example:
            >>> model.execute(simic.Action("germinate", model.slot_names[0], "mlp_small"))
            >>> model.grown_slots == [model.slot_names[0]]
            True
        """
        names = self.slot_names
        row = action.encode(names, self.blueprint_names) if isinstance(action, Action) else np.asarray(action)
        check_actions(self.slot_state, row[None], self.lifecycle, names)
        check_action(self, row)
        check_attached(self.host, self._grown_sites)
        if row[Column.OP] == Op.GERMINATE:
            slot = int(row[Column.SLOT])
            self._attach(self.sites[slot], self.build_seed(slot, int(row[Column.BLUEPRINT])))
            self.germinations += 1
        apply_actions(self.slot_state, row[None], self.lifecycle)
        self.sync_with_slots()

    def plant(self, slot: str, blueprint: str, *, style: str = "linear-add", alpha: float = 1.0) -> None:
        """Put a newborn fossil into an empty slot: for training a grown architecture from scratch.

        Args:
            slot: Its name.
            blueprint: Name of a blueprint that fits.
            style: Curve and operator of the blend, as in `Action`.
            alpha: How far the seed is blended in, in (0, 1].

        Raises:
            ValueError: `alpha` is out of range, or a name is unknown.
            IllegalActionError: The slot is not empty, or the budget is exceeded.
        """
        if not 0 < alpha <= 1:
            raise ValueError(f"a fossil's alpha must be in (0, 1], got {alpha}")
        self.execute(Action("germinate", slot, blueprint, style=style))
        plant_fossil(self.slot_state, (0, self.slot_names.index(slot)), alpha)
        self.sync_with_slots()

    def tick(self) -> None:
        """Advance time by one decision: ramps move, seeds that were blended out are removed, cooldowns run."""
        tick(self.slot_state, self.lifecycle)
        self.sync_with_slots()

    def remove_live_seeds(self) -> None:
        """Remove every live seed at once, whatever its age: for a network that broke."""
        remove(self.slot_state, np.nonzero(self.slot_state.live))
        self.sync_with_slots()

    def build_seed(self, slot: int, blueprint_index: int) -> Seed:
        """A newborn seed for a slot, attached nowhere."""
        entropy = (self.rng_seed, slot, self.germinations)
        like = reference_tensor(self.host, self.sites[slot])
        training = self.host.training if self.in_place else self.training
        return new_seed(self.blueprint_names, blueprint_index, self.sites[slot], entropy, like, training=training)

    def newborn(self, slot: int) -> Seed:
        """A newborn seed of the same blueprint and operator as the one in this slot, attached nowhere."""
        seed = self.build_seed(slot, int(self.slot_state.blueprint[0, slot]))
        seed.set_operator(STYLES[self.slot_state.style[0, slot]].operator)
        return seed

    def set_seeds(self, seeds: Mapping[str, Seed], slot_state: SlotState, germinations: int) -> None:
        """Hold exactly these seeds, by slot name, in this state; a seed that is here already stays attached."""
        for site in self.sites:
            present, wanted = self.seed(site.name), seeds.get(site.name)
            if present is not None and present is not wanted:
                self._detach(site)
            if wanted is not None and present is not wanted:
                self._attach(site, wanted)
        self.slot_state, self.germinations = slot_state, germinations
        self.sync_with_slots()

    def sync_with_slots(self) -> None:
        """Make the modules agree with `slot_state`."""
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

    def _attach(self, site: Site, seed: Seed) -> None:
        self._handles[site.name] = attach_seed(self.host, site, seed)
        # Hooks run in order of registration, so those of later seats of the same submodule are registered again.
        for later in self._grown_sites:
            if later.submodule == site.submodule and later.seat > site.seat:
                self._unhook(later)
                self._handles[later.name] = attach_seed(self.host, later, self._seed_in(later.name))
        present = dict(self.seeds.items()) | {growth_state.seed_key(site.name): seed}
        # In order of slots, so that the order of parameters depends on what has grown, not on when.
        keys = [growth_state.seed_key(name) for name in self.slot_names]
        self.seeds = nn.ModuleDict({key: present[key] for key in keys if key in present})
        self._structure_changed()

    def _detach(self, site: Site) -> None:
        del self.seeds[growth_state.seed_key(site.name)]
        self._unhook(site)
        self._structure_changed()

    def _unhook(self, site: Site) -> None:
        for handle in self._handles.pop(site.name):
            handle.remove()

    def _structure_changed(self) -> None:
        note_growth(self)
        warn_on_state_dict(self.host, has_seeds=bool(self.seeds) and not self.in_place)
        if "torch._dynamo" in sys.modules:  # compiled graphs do not notice hooks that are added or removed
            torch.compiler.reset()

    def _seed_in(self, slot: str) -> Seed:
        if slot not in self.slot_names:
            raise ValueError(f"no slot is named {slot!r}; the slots are {', '.join(self.slot_names)}")
        seed = self.seed(slot)
        if seed is None:
            raise ValueError(f"slot {slot!r} holds no seed; germinate one first")
        return seed
