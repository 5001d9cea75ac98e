"""Seeds under DistributedDataParallel (DDP): their gradients are averaged over ranks at the end of every backward pass.

DDP sorts parameters into buckets when it is built and expects a gradient of each in every pass, but seeds come and go,
and one that is incubated has no part in the network's own pass. So seeds stay out of DDP's buckets, which therefore
never need to be rebuilt:

    forward of the DDP object     GrowableModel.forward puts a hook on its output
    backward, host                DDP averages the host's gradients bucket by bucket
    backward, end                 the hook's callback averages the seeds' gradients in one all-reduce

Both are done when `backward()` returns, so clipping and gradient scalers see averages. In `no_sync()` neither happens.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from simic.growth.example import tensors

if TYPE_CHECKING:
    from simic.growth.model import GrowableModel

Layout = tuple[tuple[str, torch.Size], ...]


class RanksDisagreeError(RuntimeError):
    """The processes that train one model together do not hold, or do, the same; raised on each of them."""


@dataclass
class _Link:
    """What is known of the DDP object around a model."""

    ddp: weakref.ref[DistributedDataParallel] | None = None
    queued: bool = False
    """Whether the running backward pass will end with an average."""
    frozen: bool | None = None
    """In a further pass: whether the host is frozen for good."""
    checked: Layout | None = None
    """Seeds that were last compared between ranks."""


# Outside the models, so that pickling and copying them is not affected.
_LINKS: weakref.WeakKeyDictionary[GrowableModel, _Link] = weakref.WeakKeyDictionary()


def in_process_group() -> bool:
    """Whether this process has joined a group."""
    return distributed.is_available() and distributed.is_initialized()


def ddp_around(model: GrowableModel) -> DistributedDataParallel | None:
    """The DDP object in which a model last ran, or which was announced by `link_ddp`."""
    link = _LINKS.get(model)
    return link.ddp() if link is not None and link.ddp is not None else None


def link_ddp(model: GrowableModel, ddp: DistributedDataParallel) -> None:
    """Note that a model runs inside a DDP object, and take the model's seeds out of its buckets."""
    link = _LINKS.setdefault(model, _Link())
    if link.ddp is None or link.ddp() is not ddp:
        link.ddp = weakref.ref(ddp)
        _leave_out_seeds(ddp)
    if model.seeds and not ddp.modules_buffers:  # DDP would not look for buffers again
        ddp._assign_modules_buffers()


def unwrap_model(model: Any) -> tuple[Any, DistributedDataParallel | None]:
    """What is inside DistributedDataParallel and torch.compile, in any order, and the DDP object if there is one."""
    ddp = None
    while isinstance(model, nn.Module):
        if isinstance(model, DistributedDataParallel):
            ddp, model = model, model.module
        elif (compiled := model._modules.get("_orig_mod")) is not None:  # inside what torch.compile returned
            model = compiled
        else:
            break
    return model, ddp


def watch_output(model: GrowableModel, output: Any) -> None:
    """Called with every output of a model in a process group: its backward pass ends with an average, where due."""
    if torch.compiler.is_compiling():  # with fullgraph=True this is the error
        torch._dynamo.graph_break(
            msg="seeds are averaged over processes by a hook on the output, which no graph can hold: in a process "
            "group, compile a model that grows without fullgraph=True"
        )
    _watch_output(model, output)


@torch._disable_dynamo  # pyright: ignore[reportPrivateImportUsage] - the public one would import the compiler now
def _watch_output(model: GrowableModel, output: Any) -> None:
    ddp, link = DistributedDataParallel._get_active_ddp_module(), _LINKS.setdefault(model, _Link())
    group, averages = distributed.group.WORLD, False
    if isinstance(ddp, DistributedDataParallel):
        link_ddp(model, ddp)
        group, averages = ddp.process_group, ddp.require_backward_grad_sync
    # Around a frozen host there is no DDP, which refuses a model without trainable parameters, or one without a part.
    averages = averages or (_is_frozen(model) if link.frozen is None else link.frozen)
    if not averages or not torch.is_grad_enabled() or distributed.get_world_size(group) == 1:
        return
    if isinstance(ddp, DistributedDataParallel) and ddp._join_config.enable:
        raise ValueError(
            "join() lets ranks run different numbers of batches, but seeds are averaged by all ranks together: give "
            "every rank the same number, for instance with DistributedSampler(drop_last=True)"
        )
    link.queued = False  # a backward pass that failed never came to its end

    def queue(_: Tensor) -> None:
        if not link.queued:
            link.queued = True
            torch.autograd.Variable._execution_engine.queue_callback(lambda: _average_seeds(model, link, group))

    for tensor in tensors(output):
        if tensor.requires_grad:
            tensor.register_hook(queue)


@contextmanager
def further_pass(model: GrowableModel) -> Iterator[None]:
    """Run another pass whose gradients belong to the backward pass of the one before: DDP prepares once for both."""
    ddp, link = ddp_around(model), _LINKS.setdefault(model, _Link())
    link.frozen = _is_frozen(model)  # asked before the host is frozen for this pass alone
    broadcasts = ddp is None or ddp.require_forward_param_sync  # of buffers, in the next pass
    try:
        with nullcontext() if ddp is None else ddp.no_sync():
            yield
    finally:
        link.frozen = None
        if ddp is not None:
            ddp.require_forward_param_sync = broadcasts


def _is_frozen(model: GrowableModel) -> bool:
    seeds = set(model.seeds.parameters())  # which may be part of the host
    return not any(parameter.requires_grad and parameter not in seeds for parameter in model.host.parameters())


def _leave_out_seeds(ddp: DistributedDataParallel) -> None:
    """Build DDP's buckets anew if they hold parameters of seeds, which are averaged here, or of seeds that are gone."""
    models = [model for model, link in _LINKS.items() if link.ddp is not None and link.ddp() is ddp]
    seeds = {parameter for model in models for parameter in model.seeds.parameters()}
    named = dict(ddp.module.named_parameters(remove_duplicate=False))
    kept = set(named.values()) - seeds
    if kept.issuperset(ddp._module_parameters):
        return
    ddp._remove_autograd_hooks()
    if not any(parameter.requires_grad for parameter in kept):  # buckets cannot be empty, so DDP is left without a part
        ddp.require_backward_grad_sync = False
        return
    hooks = ddp._comm_hooks
    ddp.parameters_to_ignore = {*ddp.parameters_to_ignore, *(name for name, p in named.items() if p in seeds)}
    ddp._module_parameters = [parameter for parameter in ddp._module_parameters if parameter in kept]
    # What unpickling does: it builds buckets from the present parameters, without communication.
    ddp.__setstate__({"process_group": ddp.process_group})
    ddp._has_rebuilt_buckets = False
    ddp._comm_hooks = []
    for hook, state in hooks:
        ddp.register_comm_hook(state, hook)


def _average_seeds(model: GrowableModel, link: _Link, group: Any) -> None:
    """Replace every gradient of a seed by its mean over ranks; one that no rank has stays None."""
    link.queued = False
    named = list(model.seeds.named_parameters())
    layout = tuple((name, parameter.shape) for name, parameter in named)
    # Through the CPU a comparison is cheap. Elsewhere it would wait for the device in every pass.
    if "gloo" in str(distributed.get_backend_config(group)) or layout != link.checked:
        _check_layout(layout, group, named)
        link.checked = layout
    ordered = sorted((parameter for _, parameter in named), key=_kind)  # stable: the same order on every rank
    for _, alike in groupby(ordered, key=_kind):
        _average(list(alike), group)


def _kind(parameter: Tensor) -> tuple[str, str]:
    return str(parameter.dtype), str(parameter.device)


@torch.no_grad()
def _average(parameters: list[nn.Parameter], group: Any) -> None:
    """Average gradients of one dtype in one flat tensor; its last entries count the ranks that have a gradient."""
    present = parameters[0].new_tensor([float(parameter.grad is not None) for parameter in parameters])
    parts = [p.grad.reshape(-1) if p.grad is not None else p.new_zeros(p.numel()) for p in parameters]
    flat = torch.cat([*parts, present])
    distributed.all_reduce(flat, group=group)
    *sums, counts = flat.split([*(parameter.numel() for parameter in parameters), len(parameters)])
    for parameter, total, count in zip(parameters, sums, counts.tolist(), strict=True):
        if count:
            mean = (total / distributed.get_world_size(group)).view_as(parameter)
            if parameter.grad is None:
                parameter.grad = mean
            else:
                parameter.grad.copy_(mean)


def _check_layout(layout: Layout, group: Any, named: list[tuple[str, nn.Parameter]]) -> None:
    """Raise on every rank if seeds differ between ranks: an all-reduce of different sizes would hang."""
    on_cpu = "gloo" in str(distributed.get_backend_config(group))
    device = torch.device("cpu") if on_cpu or not named else named[0][1].device
    digest = int.from_bytes(hashlib.blake2b(repr(layout).encode(), digest_size=7).digest(), "big")
    own = torch.tensor([digest], device=device)
    found = [torch.empty_like(own) for _ in range(distributed.get_world_size(group))]
    distributed.all_gather(found, own, group=group)
    if any(other.item() != digest for other in found):
        layouts: list[Any] = [None] * len(found)
        distributed.all_gather_object(layouts, sorted({name.split(".")[0] for name, _ in layout}), group=group)
        described = "; ".join(f"rank {rank}: {', '.join(slots) or 'none'}" for rank, slots in enumerate(layouts))
        raise RanksDisagreeError(
            f"ranks hold different seeds in the same backward pass ({described}): change a model on every rank alike, "
            "and let GrowthScheduler.step() do it where you can"
        )
