"""What goes with an exported network: a config that builds it again, and its optimizer.

plain, config = model.export(config=True)         # config holds JSON values: keep it beside the weights
plain = simic.build_exported(Net(), config)       # the same architecture, for plain.load_state_dict(weights)

plain, optimizer = model.export(optimizer=optimizer)    # training goes on with the same moments
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from simic.growth.blend import OPERATORS
from simic.growth.blueprints import BLUEPRINTS
from simic.growth.export import LiveSeeds, exported_sites, graft_seeds
from simic.growth.seed import Seed, new_seed
from simic.growth.settings import describe_site, read_site
from simic.growth.slot_discovery import Site, reference_tensor

if TYPE_CHECKING:
    from simic.growth.model import GrowableModel

FORMAT = "simic-exported"
VERSION = 1
_OWN_KEYS = "simic_"
"""How keys begin that GrowthScheduler adds to parameter groups."""


def export_config(model: GrowableModel, live: LiveSeeds) -> dict[str, Any]:
    """The grown parts of `model.export(live=live)` as JSON values."""
    parts = []
    for site in exported_sites(model, live):
        seed = model.seed(site.name)
        assert seed is not None
        own = {"blueprint": seed.blueprint, "operator": seed.operator, "alpha": seed.alpha}
        parts.append({"site": describe_site(site), "seat": site.seat, **own})
    return {"format": FORMAT, "version": VERSION, "grown": parts}


def build_exported(host: nn.Module, config: Mapping[str, Any]) -> nn.Module:
    """Give a freshly built host the grown parts that `export(config=True)` described.

    Args:
        host: A network of the exported one's host class; it is changed in place.
        config: The second value of `model.export(config=True)`, which may have been a JSON file in between.

    Returns:
        The host in evaluation mode, made of torch's and the host's classes. Its weights are those of newborn parts:
        load the exported network's state dict.

    Raises:
        ValueError: The config does not fit, or a blueprint of your own is not registered. The host is left as it was.

    Example:
        >>> plain, config = model.export(config=True)
        >>> missing = simic.build_exported(make_net(), config).load_state_dict(plain.state_dict())
    """
    from simic.growth.model import GrowableModel  # which imports this module

    if not isinstance(config, Mapping):
        raise TypeError(
            f"config must be the table that export(config=True) gave, got a {type(config).__name__}; if it is in a "
            "file, read that with json.load"
        )
    if not isinstance(host, nn.Module) or isinstance(host, GrowableModel):
        raise TypeError(f"host must be the plain network, freshly built, got a {type(host).__name__}")
    try:
        if config["format"] != FORMAT or config["version"] != VERSION:
            raise ValueError(f"its format is {config['format']!r:.40}, version {config['version']!r:.40}")
        parts = [(read_site({**part["site"], "seat": part["seat"]}), part) for part in config["grown"]]
        seeds = [(site, _build_seed(host, site, part)) for site, part in parts]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"the config does not fit this host, or export(config=True) did not make it: {error}"
        ) from None
    return graft_seeds(host, seeds)


def _build_seed(host: nn.Module, site: Site, part: Mapping[str, Any]) -> Seed:
    host.get_submodule(site.submodule)  # AttributeError names what is missing
    if part["operator"] not in OPERATORS or not 0 <= part["alpha"] <= 1:
        raise ValueError(f"{part['operator']!r:.40} at alpha {part['alpha']!r:.40} is no way to blend")
    BLUEPRINTS.check("the config", part["blueprint"])
    seed = new_seed((part["blueprint"],), 0, site, (0,), reference_tensor(host, site), training=False, check=False)
    seed.set_operator(part["operator"])
    seed.alpha = float(part["alpha"])
    return seed


def follow_export(optimizer: Optimizer, model: GrowableModel, plain: nn.Module, copies: Mapping[int, Any]) -> Optimizer:
    """A copy of an optimizer that trains an exported network with the state of the model's parameters.

    `copies` are the copies by id of what they are copies of. Seeds that were left out are forgotten; what the optimizer
    trains besides the model stays as it is. Groups with the same settings become one, in the order of
    `plain.parameters()`, so that the state dict also loads into a new optimizer over these.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, got a {type(optimizer).__name__}")
    order = {parameter: place for place, parameter in enumerate(plain.parameters())}
    own = set(model.parameters())
    known = {p: copies[id(p)] if p in own else p for group in optimizer.param_groups for p in group["params"]}
    twin = copy.deepcopy(optimizer, {id(before): after for before, after in known.items()})
    wanted = {after for before, after in known.items() if after in order or before not in own}
    names = {parameter: name for name, parameter in plain.named_parameters()}
    merged: list[dict[str, Any]] = []
    for group in twin.param_groups:
        options = {k: v for k, v in group.items() if k not in ("params", "param_names") and not k.startswith(_OWN_KEYS)}
        params = [parameter for parameter in group["params"] if parameter in wanted]
        like = next((other for other in merged if _same(options, other["options"])), None)
        if like is not None:
            like["params"] += params
        elif params:
            merged.append({"options": options, "params": params, "named": "param_names" in group})
    twin.param_groups.clear()
    for group in merged:
        params = sorted(group["params"], key=lambda parameter: order.get(parameter, len(order)))
        named = {"param_names": [names.get(p, f"other.{i}") for i, p in enumerate(params)]} if group["named"] else {}
        twin.param_groups.append({"params": params, **named, **group["options"]})
    for parameter in [parameter for parameter in twin.state if parameter not in wanted]:
        del twin.state[parameter]
    return twin


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    if one.keys() != other.keys():
        return False
    return all(
        torch.equal(torch.as_tensor(value), torch.as_tensor(other[name]))
        if isinstance(value, Tensor) or isinstance(other[name], Tensor)
        else value == other[name]
        for name, value in one.items()
    )
