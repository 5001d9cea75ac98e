"""A grown model as a plain nn.Module, made of torch alone: it saves, exports and runs where simic is not installed."""

from __future__ import annotations

import copy
import operator
import warnings
from collections.abc import Iterable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import fx, nn

from simic.growth.hooks import ignoring_padding, slots_with_masks
from simic.growth.influence import plain_kernels
from simic.growth.isolation import evaluating, preserve_state
from simic.growth.notices import warn_user
from simic.growth.seed import Seed
from simic.growth.slot_discovery import Site, call, tensors
from simic.lifecycle.stages import Stage

if TYPE_CHECKING:
    from simic.growth.model import GrowableModel, SlotReport

Live = Literal["drop", "keep"]
"""What becomes of live seeds at export: they are left out, or become layers at their current alpha."""
_LAYER = "GrownLayer"
_READ_BACK_BY_CLASS = ("save_pretrained", "push_to_hub")
"""Methods whose files `from_pretrained` reads into the plain class, which ignores every tensor it does not know."""


def export_plain(model: GrowableModel, live: Live = "drop") -> nn.Module:
    """A copy of the host in which each seed belongs to its submodule, in evaluation mode and checked numerically.

    A seed behind a Sequential becomes its last layer; behind any other submodule it becomes a child that a forward
    hook applies, so that the submodule keeps its class, its signature and its parameter names. Seeds are fossils and,
    with live="keep", live ones that are heard.
    """
    if live not in get_args(Live):
        raise ValueError(f'live must be "drop" or "keep", got {live!r}')
    dropped = {report.slot for report in heard_live_seeds(model)} if live == "drop" else set()
    twin = copy.deepcopy(model)
    seeds = {site: twin.seed(site.name) for site in twin.sites}
    for site, seed in seeds.items():
        if seed is not None:
            twin._detach(site)
    plain, grafted = twin.host.eval(), list[str]()
    for index, (site, seed) in enumerate(seeds.items()):
        fossil = model.slot_state.stage[0, index] == Stage.FOSSILIZED
        if seed is not None and (fossil or seed.alpha > 0) and site.name not in dropped:
            _graft(plain.get_submodule(site.name), site, seed)
            grafted.append(site.name)
    for part in plain.modules():
        if isinstance(part, nn.TransformerEncoder):
            part.use_nested_tensor = False  # grown parts run on padded tensors
    with ignoring_padding(model.host), plain_kernels():
        _verify(model, plain, dropped)
    _warn_of_positions(model, plain, grafted)
    _refuse_lossy_saves(plain)
    return plain


def heard_live_seeds(model: GrowableModel) -> list[SlotReport]:
    """Seeds whose fate is open and that the output depends on: what export leaves out unless told to keep it."""
    is_live = dict(zip(model.slot_names, model.slot_state.live[0], strict=True))
    return [report for report in model.growth() if is_live[report.slot] and report.alpha > 0]


def warn_of_dropped(model: GrowableModel) -> None:
    """Tell the caller of `model.export()` what it left out."""
    if dropped := heard_live_seeds(model):
        warnings.warn(
            f"export leaves out seeds that are not fossils: {in_words(dropped)}; fossilize them first, or take them "
            'as they are with export(live="keep")',
            stacklevel=3,
        )


def in_words(reports: Iterable[SlotReport]) -> str:
    """Seeds in one line: slot, blueprint, stage and alpha of each."""
    return "; ".join(f"slot {r.slot!r} ({r.blueprint}, {r.stage}, alpha {r.alpha:.2f})" for r in reports)


def _refuse_lossy_saves(plain: nn.Module) -> None:
    """Let methods raise that would write what `from_pretrained` then drops, on every part that holds a grown layer."""
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
    """A callable that raises, made of torch alone: it is saved with the model and needs no simic when it is loaded."""
    graph = fx.Graph()
    args = graph.placeholder("*args")
    graph.placeholder("**kwargs")
    # Always false, yet an expression of an input: torch traces a saved graph anew when it loads it.
    is_none = graph.call_function(operator.eq, (args, None))
    graph.output(graph.call_function(torch._assert, (is_none, message)))
    return fx.GraphModule({}, graph, "Refusal")


def _warn_of_positions(model: GrowableModel, plain: nn.Module, grafted: list[str]) -> None:
    """Say that grown parts which mix positions run without the host's padding mask and key-value cache."""
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


def _graft(submodule: nn.Module, site: Site, seed: Seed) -> None:
    if type(submodule).forward is nn.Sequential.forward:
        assert isinstance(submodule, nn.Sequential)
        submodule.append(_plain_layer(seed, site))
        return
    name = "grown"
    while hasattr(submodule, name):
        name += "_"
    layer = _plain_hook(seed, site)
    submodule.add_module(name, layer)
    submodule.register_forward_hook(layer)


def _plain_layer(seed: Seed, site: Site) -> fx.GraphModule:
    """x -> the blended activation."""
    graph = fx.Graph()
    graph.output(_blend(graph, graph.placeholder("x"), seed, site))
    return fx.GraphModule(_parts(seed), graph, _LAYER).eval()


def _plain_hook(seed: Seed, site: Site) -> fx.GraphModule:
    """(module, args, output) -> the output with its first tensor blended; the form of a forward hook."""
    graph, container = fx.Graph(), site.container
    graph.placeholder("module")
    graph.placeholder("args")
    output = graph.placeholder("output")
    if container == "tensor":
        graph.output(_blend(graph, output, seed, site))
        return fx.GraphModule(_parts(seed), graph, _LAYER).eval()
    blended = _blend(graph, graph.call_function(operator.getitem, (output, 0)), seed, site)
    rest = graph.call_function(operator.getitem, (output, slice(1, None)))
    if container in ("tuple", "list"):
        first = (blended,) if container == "tuple" else [blended]
        graph.output(graph.call_function(operator.add, (first, rest)))
    else:
        graph.erase_node(rest)
        graph.output(graph.call_method("_replace", (output,), {container: blended}))
    return fx.GraphModule(_parts(seed), graph, _LAYER).eval()


def _blend(graph: fx.Graph, h: fx.Node, seed: Seed, site: Site) -> fx.Node:
    if site.order is None:
        return _blend_arranged(graph, h, seed)
    arranged = graph.call_method("permute", (h, list(site.order)))
    back = [site.order.index(dim) for dim in range(len(site.order))]
    return graph.call_method("permute", (_blend_arranged(graph, arranged, seed), back))


def _blend_arranged(graph: fx.Graph, h: fx.Node, seed: Seed) -> fx.Node:
    branch = graph.call_module("branch", (h,))
    if seed.operator == "add":
        return graph.call_function(torch.add, (h, branch), {"alpha": seed.alpha})
    if seed.operator == "multiply":
        factor = graph.call_function(torch.tanh, (branch,))
        return graph.call_function(torch.addcmul, (h, h, factor), {"value": seed.alpha})
    gate = graph.call_module("gate", (h,))
    return graph.call_function(torch.addcmul, (h, gate, branch), {"value": seed.alpha})


def _parts(seed: Seed) -> dict[str, Any]:
    parts = {"branch": _without_simic(seed.branch)}
    return parts if seed.gate is None else parts | {"gate": _without_simic(seed.gate)}


def _without_simic(module: nn.Module) -> nn.Module:
    """The same computation without a class of ours: traced into torch's own modules where there is one."""
    if not any(type(part).__module__.partition(".")[0] == "simic" for part in module.modules()):
        return module
    traced = fx.symbolic_trace(module)
    for node in traced.graph.nodes:
        node.type = None  # annotations are strings here, which a saved graph cannot name
    traced.recompile()
    return traced


def _verify(model: GrowableModel, plain: nn.Module, dropped: Iterable[str]) -> None:
    with ExitStack() as stack:
        for context in (preserve_state(model), evaluating(model), preserve_state(plain), evaluating(plain)):
            stack.enter_context(context)
        for slot in dropped:
            stack.enter_context(model.switched_off(slot))
        expected = list(tensors(call(model, model.example_input)))
        try:
            got = list(tensors(call(plain, model.example_input)))
        except Exception:
            got = []
    same = len(expected) == len(got) and all(
        torch.allclose(a, b, rtol=1e-4, atol=1e-5, equal_nan=True) for a, b in zip(expected, got, strict=True)
    )
    if not same:
        raise RuntimeError(
            "the exported model does not compute what the grown one does; a slot's submodule may run its children in "
            "a way of its own: choose another slot or a submodule around it"
        )
