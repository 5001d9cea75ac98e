"""Export of a grown model as a plain nn.Module of torch's classes: it saves and runs where simic is not installed."""

from __future__ import annotations

import copy
import operator
import warnings
from collections.abc import Iterable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor, fx, nn

from simic.growth.blend import OPERATORS
from simic.growth.example import call, tensors
from simic.growth.hooks import ignoring_padding, slots_with_masks
from simic.growth.host_hooks import release_host
from simic.growth.isolation import evaluating, plain_kernels, preserve_state
from simic.growth.merge import by_submodule, merge_seeds
from simic.growth.notices import warn_user
from simic.growth.report import blended_live_seeds, describe_seeds
from simic.growth.seed import Seed
from simic.growth.settings import fit_example
from simic.growth.slot_discovery import Site
from simic.growth.slot_patterns import submodules
from simic.lifecycle.slots import SlotState
from simic.lifecycle.stages import Stage

if TYPE_CHECKING:
    from simic.growth.model import GrowableModel

LiveSeeds = Literal["drop", "keep"]
"""What export does with live seeds: leave them out, or make them layers at their current alpha."""
_LAYER = "GrownLayer"
_READ_BACK_BY_CLASS = ("save_pretrained", "push_to_hub")
"""Methods whose files `from_pretrained` loads into the host's class, which ignores tensors it does not know."""


def export_plain(
    model: GrowableModel, live: LiveSeeds = "drop", memo: dict[int, Any] | None = None, *, merge: bool = False
) -> nn.Module:
    """A copy of the host with the seeds as part of their submodules, in evaluation mode and checked numerically.

    A seed behind a Sequential becomes its last layer; beside it, and at any other submodule, it becomes a child that a
    forward hook applies, so that the submodule keeps its class, its signature and its parameter names. Fossils are
    exported and, with live="keep", live seeds with alpha > 0. `memo`, if given, gets the copies as in `copy.deepcopy`.
    With `merge`, linear seeds are folded into the weights of their submodules where that is possible (see `merge.py`).
    """
    chosen = exported_sites(model, live)
    twin = copy.deepcopy(model, memo)
    seeds = {site: twin.seed(site.name) for site in twin.sites}
    twin.set_seeds({}, SlotState.dormant(1, len(seeds)), 0)
    if twin.in_place:
        release_host(twin)
    kept = [(site, seed) for site in chosen if (seed := seeds[site]) is not None]
    plain = graft_seeds(twin.host, merge_seeds(twin.host, kept) if merge else kept)
    dropped = [report.slot for report in blended_live_seeds(model)] if live == "drop" else []
    with ignoring_padding(model.host), plain_kernels():
        _verify(model, plain, dropped)
    _warn_about_positions(model, plain, [site.name for site in chosen])
    return plain


def exported_sites(model: GrowableModel, live: LiveSeeds) -> list[Site]:
    """The sites whose seeds become part of the exported network."""
    if live not in get_args(LiveSeeds):
        raise ValueError(f'live must be "drop" or "keep", got {live!r}')
    state = model.slot_state
    kept = state.stage[0] == Stage.FOSSILIZED
    if live == "keep":
        kept |= state.live[0] & (state.alpha[0] > 0)
    return [site for site, is_kept in zip(model.sites, kept, strict=True) if is_kept]


def graft_seeds(host: nn.Module, seeds: Iterable[tuple[Site, Seed]]) -> nn.Module:
    """Make seeds part of their submodules, for good; the host is returned in evaluation mode."""
    plain = host.eval()
    for name, own in by_submodule(seeds).items():
        _graft(plain, name, own)
    for part in plain.modules():
        if isinstance(part, nn.TransformerEncoder):
            part.use_nested_tensor = False  # grown parts need padded tensors
    _refuse_lossy_saves(plain)
    return plain


def warn_about_dropped_seeds(model: GrowableModel) -> None:
    """Warn the caller of `model.export()` about live seeds that were left out."""
    if dropped := blended_live_seeds(model):
        warnings.warn(
            f"export leaves out seeds that are not fossils: {describe_seeds(dropped)}; fossilize them first, or take "
            'them as they are with export(live="keep")',
            stacklevel=3,
        )


def _refuse_lossy_saves(plain: nn.Module) -> None:
    """Make methods raise whose files lose the grown layers when `from_pretrained` reads them."""
    for part in plain.modules():
        if any(isinstance(inner, fx.GraphModule) and type(inner).__name__ == _LAYER for inner in part.modules()):
            for name in _READ_BACK_BY_CLASS:
                if callable(getattr(type(part), name, None)):
                    vars(part)[name] = _raising(
                        f"{name} would lose what has grown: {type(part).__name__}.from_pretrained drops weights that "
                        "the class does not have; keep the network whole with torch.save(model, path) or "
                        "torch.export.save(torch.export.export(model, example), path)"
                    )


def _raising(message: str) -> fx.GraphModule:
    """A callable that raises, made of torch alone: it is saved with the model and loads without simic."""
    graph = fx.Graph()
    args = graph.placeholder("*args")
    graph.placeholder("**kwargs")
    # Always false, but an expression of an input: torch retraces a saved graph when it is loaded.
    is_none = graph.call_function(operator.eq, (args, None))
    graph.output(graph.call_function(torch._assert, (is_none, message)))
    return fx.GraphModule({}, graph, "Refusal")


def _warn_about_positions(model: GrowableModel, plain: nn.Module, grafted: list[str]) -> None:
    """Warn that grown parts which mix positions do not get the host's padding mask or key-value cache."""
    mixing = [name for name in slots_with_masks(model.host) if name in grafted]
    if not mixing:
        return
    for config in (getattr(plain, "config", None), getattr(plain, "generation_config", None)):
        if getattr(config, "use_cache", False):
            setattr(config, "use_cache", False)  # noqa: B010
    warn_user(
        f"the exported model's grown parts in {', '.join(mixing)} mix positions, and do not read a padding mask or a "
        "key-value cache: run it on sequences without padding and with use_cache=False, or keep the GrowableModel"
    )


def _graft(plain: nn.Module, name: str, seeds: list[tuple[Site, Seed]]) -> None:
    """Make the seeds of a submodule, in order, part of it."""
    submodule = plain.get_submodule(name)
    if type(submodule).forward is nn.Sequential.forward:
        assert isinstance(submodule, nn.Sequential)
        if any(seed.reads == "input" for _, seed in seeds):
            grown = _with_branches(submodule, seeds)
            for own_name in [other for other, part in submodules(plain).items() if part is submodule]:
                plain.set_submodule(own_name, grown)
        else:
            submodule.extend(_plain(_GrownLayer(seed, site)) for site, seed in seeds)
        return
    for site, seed in seeds:
        layer = _plain(_GrownHook(seed, site))
        submodule.add_module(_free_name(submodule), layer)
        submodule.register_forward_hook(layer, with_kwargs=True)


def _free_name(module: nn.Module) -> str:
    name = "grown"
    while hasattr(module, name):
        name += "_"
    return name


def _with_branches(sequential: nn.Sequential, seeds: list[tuple[Site, Seed]]) -> fx.GraphModule:
    """A Sequential and its seeds as one graph: a child of a Sequential gets the output of the last, not its input."""
    parts, graph = nn.Module(), fx.Graph()
    x = h = graph.placeholder("x")
    for name, child in sequential.named_children():
        parts.add_module(name, child)
        h = graph.call_module(name, (h,))
    for site, seed in seeds:
        name = _free_name(parts)
        parts.add_module(name, _plain(_GrownBranch(seed, site) if seed.reads == "input" else _GrownLayer(seed, site)))
        h = graph.call_module(name, (h, x) if seed.reads == "input" else (h,))
    graph.output(h)
    return fx.GraphModule(parts, graph, "GrownSequential").eval()


class _Grown(nn.Module):
    """The parts of a seed."""

    def __init__(self, seed: Seed, site: Site) -> None:
        super().__init__()
        self.branch, self.gate, self.reads = seed.branch, seed.gate, seed.reads
        self.site, self.operator, self.alpha = site, seed.operator, seed.alpha

    def blend(self, output: Tensor, read: Tensor) -> Tensor:
        h = self.site.to_seed(output)
        gate = None if self.gate is None else self.gate(h)
        branch = self.branch(self.site.to_seed(read))
        return self.site.from_seed(OPERATORS[self.operator](h, branch, self.alpha, gate))


class _GrownLayer(_Grown):
    """h -> the blended activation."""

    def forward(self, h: Tensor) -> Tensor:
        return self.blend(h, h)


class _GrownBranch(_Grown):
    """(h, x) -> the blended activation, with a branch that reads x."""

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return self.blend(h, x)


class _GrownHook(_Grown):
    """Forward hook: (module, args, kwargs, output) -> the output with its first tensor blended."""

    def forward(self, module: Any, args: Any, kwargs: Any, output: Any) -> Any:
        container = self.site.container
        h = output if container == "tensor" else output[0]
        read = h
        if self.reads == "input":
            assert self.site.input is not None
            key = self.site.input.key
            read = kwargs[key] if isinstance(key, str) else args[key]
        blended = self.blend(h, read)
        if container == "tensor":
            return blended
        if container == "tuple":
            return (blended,) + output[1:]  # noqa: RUF005 - a traced output cannot be unpacked
        return [blended] + output[1:] if container == "list" else output._replace(**{container: blended})  # noqa: RUF005


class _Tracer(fx.Tracer):
    """Keeps modules of torch and of the user whole, and traces into simic's."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return not any(type(part).__module__.partition(".")[0] == "simic" for part in m.modules())


def _plain(layer: _Grown) -> fx.GraphModule:
    """The same computation without simic's classes."""
    graph = fx.Graph()  # a copy, because the traced graph names its tracer, which is simic's, when it is saved
    graph.output(graph.graph_copy(_Tracer().trace(layer), {}))
    for node in graph.nodes:
        node.type = None  # annotations are strings here, which a saved graph cannot resolve
    return fx.GraphModule(layer, graph, _LAYER).eval()


def _verify(model: GrowableModel, plain: nn.Module, dropped: Iterable[str]) -> None:
    if model.example_input is None:
        raise ValueError(
            "export compares its result with this model on model.example_input, which could not be saved with it: set "
            "model.example_input = a batch as the host's forward takes it"
        )
    with ExitStack() as stack:
        for context in (preserve_state(model), evaluating(model), preserve_state(plain), evaluating(plain)):
            stack.enter_context(context)
        for slot in dropped:
            stack.enter_context(model.switched_off(slot))
        example = fit_example(model.example_input, model.example_dtype, model.host)
        expected = list(tensors(call(model, example)))
        try:
            got = list(tensors(call(plain, example)))
        except Exception:
            got = []
    same = len(expected) == len(got) and all(
        torch.allclose(a, b, rtol=_tolerance(a, 1e-4), atol=_tolerance(a, 1e-5), equal_nan=True)
        for a, b in zip(expected, got, strict=True)
        if not a.is_meta
    )
    if not same:
        raise RuntimeError(
            "the exported model does not compute what the grown one does; a slot's submodule may run its children in "
            "its own way: choose another slot or a submodule around it"
        )


def _tolerance(value: torch.Tensor, least: float) -> float:
    """A tolerance that half precision can keep."""
    return max(least, 8 * torch.finfo(value.dtype).eps) if value.is_floating_point() else least
