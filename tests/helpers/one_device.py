"""OneDevice: proves on the `meta` device that a computation leaves no tensor on the CPU, and counts what it reads."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

MOVES = {"_to_copy", "copy_", "_pin_memory"}
"""Operations whose purpose is to move a tensor between devices."""


class OneDevice(TorchDispatchMode):
    """Fails where an operation mixes `meta` and CPU tensors; answers every read of a meta tensor with zeros.

    A real accelerator refuses the mixture as well; plain meta kernels let some of it pass. Scalars of no dimension may
    stay on the CPU, as on CUDA, unless a result is read one number at a time. `reads` counts transfers to the CPU.
    `nothing_on_cpu` fails where an operation computes or creates floating-point numbers there as well.
    """

    def __init__(self, *, nothing_on_cpu: bool = False) -> None:
        super().__init__()
        self.reads, self.nothing_on_cpu = 0, nothing_on_cpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.name().partition("::")[2].partition(".")[0]
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        devices = {tensor.device.type for tensor in tensors if tensor.dim()}
        on_meta = any(tensor.is_meta for tensor in tensors)
        if name == "_local_scalar_dense" and on_meta:
            self.reads += 1
            return True if args[0].dtype == torch.bool else 0.0
        if name == "_to_copy" and on_meta and torch.device(kwargs.get("device") or "meta").type == "cpu":
            self.reads += 1
            return torch.ones(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        if name not in MOVES and devices == {"cpu", "meta"}:
            where = [(tuple(tensor.shape), tensor.device.type) for tensor in tensors]
            raise AssertionError(f"{func} mixes devices: {where}")
        out = func(*args, **kwargs)
        # lift_fresh wraps an array of numpy on its way to the device.
        if self.nothing_on_cpu and name != "lift_fresh" and any(_is_array_on_cpu(leaf) for leaf in tree_leaves(out)):
            raise AssertionError(f"{func} leaves its result on the CPU")
        return out


def _is_array_on_cpu(result: Any) -> bool:
    return isinstance(result, torch.Tensor) and result.is_cpu and result.is_floating_point() and result.dim() > 0
