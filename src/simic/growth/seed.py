"""Seed: the module that grows in a slot. `new_seed` builds one, for a single model and for stacked hosts alike."""

from __future__ import annotations

from collections.abc import Sequence
from threading import get_ident

import torch
from torch import Tensor, is_grad_enabled, nn

from simic.growth.blend import OPERATORS, straight_through
from simic.growth.blueprints import BLUEPRINTS, fits, new_branch
from simic.growth.branch_layers import Gate
from simic.growth.isolation import preserve_state, preserved_rng
from simic.growth.slot_discovery import Site
from simic.growth.slot_shape import Reads, SlotShape


class Seed(nn.Module):
    """The branch of a blueprint with its blend operator, alpha and, for the gate operator, its gate."""

    def __init__(self, blueprint: str, branch: nn.Module, shape: SlotShape, reads: Reads = "output") -> None:
        super().__init__()
        self.blueprint = blueprint
        self.reads: Reads = reads
        self.shape = shape
        self.branch = branch
        self.gate: Gate | None = None
        self.operator = "add"
        self._overrides: dict[int, float] = {}  # alpha by thread id
        self.alpha = 0.0
        self.override_used: bool | None = None
        """Since the last override began: None without a forward pass, False if only other threads ran one."""
        self.straight_through = False
        """Whether a seed at alpha 0 gets the host's gradient (see `blend.straight_through`)."""

    @property
    def alpha(self) -> float:
        """How far the seed is blended in."""
        return self._alpha

    @alpha.setter
    def alpha(self, alpha: float) -> None:
        self._alpha = alpha
        self._note_alpha()

    @property
    def override(self) -> float | None:
        """While set, replaces alpha: 0 switches the seed off, its alpha target switches it in.

        It holds for the thread that set it; a pass in another thread uses the true alpha. A compiled graph cannot ask
        which thread runs it, so there it holds for all.
        """
        return self._overrides.get(get_ident())

    @override.setter
    def override(self, alpha: float | None) -> None:
        if alpha is None:
            self._overrides.pop(get_ident(), None)
        else:
            self._overrides[get_ident()] = alpha
        self._note_alpha()

    def _note_alpha(self) -> None:
        """Bring what compiled graphs read up to date: a number would be compiled in anew whenever it changes.

        `_in_use` is compiled in and says whether the branch runs; a seed that is switched off for a measurement runs,
        at alpha 0. The tensor is replaced, not overwritten, because a backward pass may still need the old one.
        """
        values = [self._alpha, *self._overrides.values()]
        self._in_use = any(values)
        self._alpha_tensor = torch.tensor(values[min(1, len(values) - 1)], dtype=torch.float64, device="cpu")

    def set_operator(self, operator: str) -> None:
        """Choose the blend operator; only "gate" has a gate."""
        self.operator = operator
        if operator != "gate":
            self.gate = None
        elif self.gate is None:
            self.gate = new_gate(self.shape, next(self.branch.parameters()))

    @property
    def is_inactive(self) -> bool:
        """Whether the branch need not run: it is not blended in, and gets no gradient."""
        if torch.compiler.is_compiling():
            return not self._in_use and not (self.straight_through and is_grad_enabled())
        override = self.override if self._overrides else None
        alpha = self.alpha if override is None else override
        return alpha == 0 and (not self.straight_through or override is not None or not is_grad_enabled())

    def forward(self, h: Tensor, x: Tensor | None = None) -> Tensor:
        """The submodule's output h with the seed blended in; a seed beside the submodule reads its input x."""
        if torch.compiler.is_compiling():
            return self._compiled_forward(h, x)
        override = self.override if self._overrides else None
        if self._overrides:
            self.override_used = override is not None or bool(self.override_used)
        if self.is_inactive:
            return h
        alpha = self.alpha if override is None else override
        if alpha == 0:
            with preserved_rng():  # so that the host's dropout masks are the same with and without the seed
                return straight_through(h, self._branch_output(h, x, detach=True))
        gate = self.gate(h) if self.gate is not None else None
        return OPERATORS[self.operator](h, self._branch_output(h, x), alpha, gate)

    def _compiled_forward(self, h: Tensor, x: Tensor | None) -> Tensor:
        """What `forward` computes, with alpha as a tensor; random numbers in a compiled graph are its own matter."""
        if self.is_inactive:
            return h
        if not self._in_use:
            return straight_through(h, self._branch_output(h, x, detach=True))
        alpha = self._alpha_tensor.to(h)
        gate = self.gate(h) if self.gate is not None else None
        blended = OPERATORS[self.operator](h, self._branch_output(h, x), alpha, gate)
        # A seed that is switched off adds nothing, not even 0 times infinity. Training needs no such care.
        return blended if is_grad_enabled() else torch.where(alpha == 0, h, blended)

    def _branch_output(self, h: Tensor, x: Tensor | None, *, detach: bool = False) -> Tensor:
        source = h
        if self.reads == "input":
            assert x is not None, "a seed beside a submodule needs the submodule's input"
            source = x
        output = self.branch(source.detach() if detach else source)
        if output.shape != h.shape:  # else a size of 1 would be broadcast
            raise ValueError(
                f"the seed of blueprint {self.blueprint!r} turns an input {tuple(source.shape)} into "
                f"{tuple(output.shape)}, its slot's submodule puts out {tuple(h.shape)}; inputs must have sizes that "
                "the submodule divides as it did in the traced pass"
            )
        return output


def new_seed(
    blueprint_names: Sequence[str],
    index: int,
    site: Site,
    entropy: Sequence[int],
    like: Tensor,
    *,
    training: bool = True,
    check: bool = True,
) -> Seed:
    """A newborn seed on the device and with the dtype of `like`; its weights depend on `entropy` alone.

    `check` runs the branch once to see that it keeps the slot's shape and outputs zeros; many seeds of one kind need
    it once. The global random state is not changed.
    """
    name = blueprint_at(blueprint_names, index, site)
    branch = new_branch(name, site.shape, entropy).to(like.device, like.dtype).train(training)
    if check:
        check_branch(name, branch, site, like)
    return Seed(name, branch, site.shape, BLUEPRINTS[name].reads)


def blueprint_at(blueprint_names: Sequence[str], index: int, site: Site) -> str:
    """The name of a blueprint; raise if there is none with that index or it does not fit the slot."""
    if not 0 <= index < len(blueprint_names):
        raise ValueError(f"a blueprint index must be below {len(blueprint_names)}, got {index}")
    name = blueprint_names[index]
    reads = BLUEPRINTS[name].reads
    if not fits(name, site.shape):
        fitting = ", ".join(other for other in blueprint_names if fits(other, site.shape))
        why = f": the submodule's input cannot be read, {site.why_no_input}" if reads == "input" else ""
        raise ValueError(f"blueprint {name!r} does not fit slot {site.name!r} ({site.shape}){why}; these do: {fitting}")
    return name


def new_gate(shape: SlotShape, like: Tensor) -> Gate:
    """A newborn gate on the device and with the dtype of `like`; the global random state is not changed."""
    with preserved_rng():
        return Gate(shape).to(like.device, like.dtype)


def check_branch(name: str, branch: nn.Module, site: Site, like: Tensor) -> None:
    """Raise unless a newborn branch puts out the slot's shape, can learn, and outputs exact zeros."""
    if not any(True for _ in branch.parameters()):
        raise ValueError(f"blueprint {name!r} has no parameters, so its seed could never become more than an identity")
    with torch.no_grad(), preserve_state(branch):
        read_shape = site.read_shape(BLUEPRINTS[name].reads)
        probe = torch.randn(read_shape, device=like.device, dtype=like.dtype)
        given = probe.clone()
        try:
            output = branch(given)
        except Exception as error:
            raise ValueError(f"blueprint {name!r} fails on slot {site.name!r} ({site.shape}): {error}") from error
    if not isinstance(output, Tensor) or output.shape != site.example_shape:
        got = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        rule = "preserve shape" if read_shape == site.example_shape else f"put out {site.example_shape}"
        raise ValueError(
            f"blueprint {name!r} must {rule}: in slot {site.name!r} it turned {tuple(probe.shape)} into {got}"
        )
    if like.is_meta:  # without values there is nothing more to see; weights are loaded later
        return
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
