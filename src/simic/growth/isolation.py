"""Context managers for forward passes that must leave no trace: buffers, modes, random state and `requires_grad`.

Modes and buffers belong to the module, not to a thread: another thread that uses the module inside such a context finds
it in evaluation mode, and what it writes into buffers is lost.
"""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from threading import get_ident
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_pre_hooks


@contextmanager
def preserve_state(module: nn.Module, exempt: nn.Module | None = None) -> Iterator[None]:
    """Restore buffers (normalisation statistics), except those of `exempt`, and the global random state."""
    skipped = set(exempt.modules()) if exempt is not None else set()
    owners = [(owner, name) for owner in module.modules() if owner not in skipped for name in owner._buffers]
    originals = [owner._buffers[name] for owner, name in owners]
    # Clones are swapped in, rather than values copied back, so that an autograd graph over the originals stays valid.
    for (owner, name), buffer in zip(owners, originals, strict=True):
        owner._buffers[name] = None if buffer is None else buffer.clone()
    try:
        with preserved_rng():
            yield
    finally:
        for (owner, name), buffer in zip(owners, originals, strict=True):
            owner._buffers[name] = buffer


class RngState(NamedTuple):
    """Global random state of torch (CPU and every CUDA device), numpy and Python."""

    cpu: Tensor
    cuda: list[Tensor]  # one per device
    numpy: dict[str, Any]
    python: tuple[Any, ...]


@contextmanager
def preserved_rng() -> Iterator[None]:
    """Restore the global random state afterwards."""
    state = rng_state()
    try:
        yield
    finally:
        set_rng_state(state)


def rng_state() -> RngState:
    """The global random state."""
    return RngState(
        torch.get_rng_state(),
        torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        np.random.get_state(legacy=False),  # noqa: NPY002 - users may draw from it
        random.getstate(),
    )


def set_rng_state(state: RngState) -> None:
    """Set the global random state to what `rng_state` returned."""
    torch.set_rng_state(state.cpu)
    if state.cuda:
        torch.cuda.set_rng_state_all(state.cuda)
    np.random.set_state(state.numpy)  # noqa: NPY002
    random.setstate(state.python)


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; every submodule returns to its own mode afterwards."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for part, training in modes:
            part.training = training


class _Others:
    """Modules outside `known` that one thread has called: in evaluation mode until the end."""

    def __init__(self, known: nn.Module) -> None:
        self._own, self._thread, self._changed = set(known.modules()), get_ident(), []

    def visit(self, module: nn.Module) -> None:
        if module.training and module not in self._own and get_ident() == self._thread:
            found = [part for part in module.modules() if part.training and part not in self._own]
            self._changed += found
            for part in found:
                part.training = False

    def restore(self) -> None:
        for part in self._changed:
            part.training = True


_VISITORS: list[_Others] = []
_HOOK_ID = -1
"""Always the same, because compiled graphs are bound to the ids of global hooks; torch's own are not negative."""


def _visit(module: nn.Module, args: Any) -> None:
    if module.training:
        (_visit_outside_graph if torch.compiler.is_compiling() else _visit_all)(module)


def _visit_all(module: nn.Module) -> None:
    for others in tuple(_VISITORS):
        others.visit(module)


_visit_outside_graph = torch._disable_dynamo(_visit_all)  # pyright: ignore[reportPrivateImportUsage]


@contextmanager
def evaluating_others(known: nn.Module) -> Iterator[None]:
    """Evaluation mode for every module called in this thread that is not part of `known`.

    Which modules these are is known only when they are called: a network around `known`, a frozen encoder, a metric.
    """
    others = _Others(known)
    _VISITORS.append(others)
    _global_forward_pre_hooks[_HOOK_ID] = _visit
    try:
        with warnings.catch_warnings() if "torch._dynamo" in sys.modules else nullcontext():
            if "torch._dynamo" in sys.modules:  # compiled modules warn that global hooks run twice: harmless here
                warnings.filterwarnings("ignore", message=".*when there are global hooks on modules")
            yield
    finally:
        _VISITORS.remove(others)
        if not _VISITORS:
            _global_forward_pre_hooks.pop(_HOOK_ID, None)
        others.restore()


@contextmanager
def freeze_all_but(module: nn.Module, exempt: nn.Module | None = None) -> Iterator[None]:
    """Set `requires_grad` to False for every parameter of `module`, except those of `exempt`."""
    learning = set(exempt.parameters()) if exempt is not None else set()
    frozen = [p for p in module.parameters() if p.requires_grad and p not in learning]
    for parameter in frozen:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)


@contextmanager
def plain_kernels() -> Iterator[None]:
    """Disable torch's fused attention inference path, which skips submodules, and cuDNN, which needs training mode.

    Compiled modules run as they are written, because compiling them for a single pass with hooks takes long.
    """
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    eager = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    try:
        with torch.backends.cudnn.flags(enabled=False), eager:
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
