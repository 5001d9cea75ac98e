"""LoRA seeds in the file format of PEFT: an adapter's config and its weights, without needing PEFT itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from simic.growth.export import LiveSeeds, exported_sites
from simic.growth.merge import by_submodule, is_transposed
from simic.growth.seed import Seed
from simic.growth.settings import trainable_names
from simic.storage.files import write_file

if TYPE_CHECKING:
    from simic.growth.model import GrowableModel

_PREFIX = "base_model.model."


def write_peft(model: GrowableModel, directory: str | Path, live: LiveSeeds = "drop") -> None:
    """Write `adapter_config.json` and `adapter_model.safetensors`; raises unless all seeds are LoRA."""
    kept = [(site, seed) for site in exported_sites(model, live) if (seed := model.seed(site.name)) is not None]
    found = by_submodule(kept)
    if not found:
        raise ValueError('there is no seed to write: fossilize one first, or use live="keep"')
    factors = {name: _joined([_factors(site.name, seed) for site, seed in own]) for name, own in found.items()}
    layers = {name: model.host.get_submodule(name) for name in factors}
    transposed = [is_transposed(layer) for layer in layers.values()]
    if any(isinstance(layer, nn.Linear) for layer in layers.values()) and any(transposed):
        raise ValueError(
            "PEFT's files have one flag fan_in_fan_out for all layers, but seeds grew at Linear and Conv1D"
        )
    other = [name for name, layer in layers.items() if not isinstance(layer, nn.Linear) and not is_transposed(layer)]
    if other:
        raise ValueError(f"PEFT's LoRA belongs to linear layers, but seeds grew at {', '.join(other)}")
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, (down, up) in factors.items():
        tensors[f"{_PREFIX}{name}.lora_A.weight"] = down.contiguous()
        tensors[f"{_PREFIX}{name}.lora_B.weight"] = up.contiguous()
    trained = _trained_modules(model)
    for name, module in trained.items():
        for key, value in module.state_dict(keep_vars=True).items():
            tensors[f"{_PREFIX}{name}.{key}"] = value.detach().cpu().contiguous()
    ranks = {name: len(down) for name, (down, _) in factors.items()}
    config = _config(ranks, sorted(trained), fan_in_fan_out=any(transposed))
    write_file(path / "adapter_model.safetensors", save(tensors, {"format": "pt"}))
    write_file(path / "adapter_config.json", json.dumps(config, indent=2).encode())


def _factors(slot: str, seed: Seed) -> tuple[Tensor, Tensor]:
    """The two matrices of a LoRA seed, A (rank, in) and B (out, rank), alpha included in B."""
    layers = list(seed.branch) if isinstance(seed.branch, nn.Sequential) else []
    linear = [layer for layer in layers if isinstance(layer, nn.Linear) and layer.bias is None]
    if seed.reads != "input" or seed.operator != "add" or len(layers) != 2 or len(linear) != 2:
        raise ValueError(
            f"the seed in slot {slot!r} ({seed.blueprint}, operator {seed.operator}) is no LoRA, so PEFT cannot load "
            "it; grow with blueprints=['lora_2', 'lora_8', 'lora_32'], or use export()"
        )
    down, up = (layer.weight.detach().cpu() for layer in linear)
    return down, up * seed.alpha


def _trained_modules(model: GrowableModel) -> dict[str, nn.Module]:
    """Submodules of the host whose own parameters are trained along, such as a new head: PEFT saves them whole."""
    names = dict.fromkeys(name.rpartition(".")[0] for name in trainable_names(model))
    if "" in names:
        raise ValueError("PEFT cannot save parameters that belong to the model itself; train those of a submodule")
    return {name: model.host.get_submodule(name) for name in names}


def _joined(factors: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Several LoRA seeds beside one layer as one, of the sum of their ranks."""
    return torch.cat([down for down, _ in factors]), torch.cat([up for _, up in factors], dim=1)


def _config(ranks: dict[str, int], trained: list[str], *, fan_in_fan_out: bool) -> dict[str, Any]:
    # PEFT multiplies by lora_alpha / r; with both equal the matrices are used as they are.
    common = max(ranks.values())
    pattern = {name: rank for name, rank in ranks.items() if rank != common}
    return {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": None,
        "inference_mode": True,
        "r": common,
        "lora_alpha": common,
        "lora_dropout": 0.0,
        "target_modules": sorted(ranks),
        "rank_pattern": pattern,
        "alpha_pattern": pattern,
        "bias": "none",
        "fan_in_fan_out": fan_in_fan_out,
        "modules_to_save": trained or None,
    }
