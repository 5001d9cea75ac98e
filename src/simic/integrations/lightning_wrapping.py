"""A GrowableModel inside a LightningModule: found, or wrapped around a submodule whose input is found by itself."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn

from simic.growth.example import ExampleInput, call, map_tensors, tensors
from simic.growth.isolation import evaluating, preserve_state
from simic.growth.model import GrowableModel
from simic.lifecycle.stages import LifecycleConfig

SAMPLES = 2
"""Samples of a batch that are kept as the example input."""


def find_growable(module: LightningModule, name: str | None) -> tuple[str, GrowableModel] | None:
    """The GrowableModel at or in the submodule `name`, or in the whole module, with its name; None if there is none."""
    inside = module if name is None else get_part(module, name)
    prefix = f"{name}." if name else ""
    found = [(prefix + path, part) for path, part in inside.named_modules() if isinstance(part, GrowableModel)]
    if len(found) > 1:
        names = ", ".join(repr(path.rstrip(".")) for path, _ in found)
        raise ValueError(f"{type(module).__name__} holds several GrowableModels, {names}: name one with module=...")
    return (found[0][0].rstrip("."), found[0][1]) if found else None


def choose_part(module: LightningModule, name: str | None) -> str:
    """The submodule to wrap: the one named, or the only one with parameters."""
    if name is not None:
        get_part(module, name)
        return name
    candidates = [child for child, part in module.named_children() if any(True for _ in part.parameters())]
    if len(candidates) == 1:
        return candidates[0]
    owner = type(module).__name__
    if not candidates:
        raise ValueError(
            f"{owner} has no submodule with parameters when the callback's setup runs: build the network in __init__, "
            "or build a GrowableModel around it yourself in configure_model"
        )
    raise ValueError(
        f"{owner} has several submodules with parameters, {', '.join(map(repr, candidates))}: say which one grows with "
        f"GrowthCallback(module={candidates[0]!r}), or put all of them into one submodule"
    )


def get_part(module: LightningModule, name: str) -> nn.Module:
    """A submodule by name; raises if there is none."""
    try:
        return module.get_submodule(name) if name else module
    except AttributeError:
        known = ", ".join(repr(child) for child, _ in module.named_children()) or "none"
        raise ValueError(
            f"{type(module).__name__} has no submodule {name!r} when the callback's setup runs; it has {known}. One "
            "that is built later, in setup or configure_model, has to be wrapped there: GrowableModel(...)"
        ) from None


def wrap_part(
    module: LightningModule, name: str, slots: Any, example: ExampleInput, settings: Mapping[str, Any]
) -> GrowableModel:
    """Put a GrowableModel around the submodule `name`, wherever in the module that is used."""
    part = get_part(module, name)
    example = map_tensors(example, lambda _, tensor: tensor.to(_device(part)))
    places = [(parent, child) for parent in module.modules() for child, at in parent._modules.items() if at is part]
    wrapped = GrowableModel(part, slots, example_input=example, **settings)
    for parent, child in places:
        setattr(parent, child, wrapped)
    return wrapped


def describe_build(name: str, model: GrowableModel, slots: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """How to wrap a fresh network in the same way, of types that a checkpoint may hold; None for what is not."""
    found = {
        "example_input": model.example_input,
        "slots": dict(slots) if isinstance(slots, Mapping) else [s.submodule for s in model.sites if not s.seat],
        "settings": {name: value for name, value in settings.items() if name != "lifecycle"},
        "lifecycle": dataclasses.asdict(model.lifecycle),
    }
    return {"module": name} | {name: value if _is_plain(value) else None for name, value in found.items()}


def rebuild(module: LightningModule, build: Mapping[str, Any]) -> None:
    """Wrap a submodule as `describe_build` says, unless the module wraps it itself."""
    if isinstance(get_part(module, build["module"]), GrowableModel):
        return
    if missing := [name for name, value in build.items() if value is None]:
        raise ValueError(
            f"the checkpoint does not hold {' and '.join(missing)} of the network that was wrapped, because of their "
            "type: pass callback=GrowthCallback(..., example_input=...) as in the training"
        )
    settings = build["settings"] | {"lifecycle": LifecycleConfig(**build["lifecycle"])}
    wrap_part(module, build["module"], build["slots"], build["example_input"], settings)


def _is_plain(value: Any) -> bool:
    if type(value) is dict:
        return all(map(_is_plain, value.values()))
    if type(value) in (tuple, list):
        return all(map(_is_plain, value))
    return value is None or type(value) in (Tensor, bool, int, float, str)


def check_slots(model: GrowableModel, slots: Any) -> None:
    """Raise if a network that was wrapped before has other slots than those that are named."""
    present = {site.submodule for site in model.sites}
    names = set(slots) if isinstance(slots, (list, tuple, set, Mapping)) else present
    known = {name for name, _ in model.host.named_modules()}
    if names <= known and names != present:
        raise ValueError(
            f"the network is a GrowableModel already, with the slots {', '.join(sorted(present))}; leave slots out, or "
            f"name these, got {', '.join(map(str, slots))}"
        )


def find_example(trainer: Trainer, module: LightningModule, name: str) -> ExampleInput:
    """What the submodule `name` is called with, by `example_input_array` or by a step on the first batch."""
    part = get_part(module, name)
    if module.example_input_array is not None:
        array = map_tensors(module.example_input_array, lambda _, tensor: tensor.to(_device(part)))
        example = _captured(module, part, lambda: call(module, array), f"forward of {type(module).__name__}")
        return _required(example, name, "forward with example_input_array")
    for step, source in _steps(trainer, module):
        batch, batch_size = _first_batch(module, source, _device(part))
        if batch is None:
            continue
        arguments = (batch, 0)[: len(inspect.signature(getattr(module, step)).parameters)]
        example = _captured(module, part, lambda step=step, given=arguments: getattr(module, step)(*given), step)
        return _few_samples(part, _required(example, name, step), batch_size)
    raise ValueError(
        f"nothing tells what {name!r} is called with: set example_input_array in {type(module).__name__}, or pass "
        "GrowthCallback(example_input=...)"
    )


def _first_batch(module: LightningModule, source: Any, device: torch.device) -> tuple[Any, int | None]:
    """A batch as the steps get it, and the size of batches if that is known; None where data can be read only once."""
    try:
        with preserve_state(module):
            loader = CombinedLoader(source.dataloader(), "sequential").flattened[0]
            if iter(loader) is loader:
                return None, None
            batch = module._apply_batch_transfer_handler(next(iter(loader)), device=device, dataloader_idx=0)
    except Exception as error:
        raise ValueError(
            f"the first batch cannot be read when the callback's setup runs ({type(error).__name__}: {error}), so the "
            "network's input is not known: set example_input_array, or pass GrowthCallback(example_input=...)"
        ) from error
    return batch, getattr(loader, "batch_size", None)


class _Reached(BaseException):  # no Exception, so that no handler in the user's code stops it
    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.arguments, self.keywords = args, kwargs


def _captured(module: LightningModule, part: nn.Module, run: Callable[[], Any], described: str) -> ExampleInput | None:
    """The arguments of the first call of a submodule in `run`, which ends there; None if it is never called."""

    def stop(part: nn.Module, args: Any, kwargs: Any) -> None:
        raise _Reached(args, kwargs)

    def ignore(*args: Any, **kwargs: Any) -> None:
        """Stands for `log`, which would raise: no loop runs yet."""

    handle = part.register_forward_pre_hook(stop, with_kwargs=True)
    vars(module).update(log=ignore, log_dict=ignore)
    try:
        with preserve_state(module), evaluating(module):
            run()
    except _Reached as reached:
        return _as_example(part, reached.arguments, reached.keywords)
    except Exception as error:
        raise ValueError(
            f"{described} fails before the network is called, so its input is not known "
            f"({type(error).__name__}: {error}): set example_input_array, or pass GrowthCallback(example_input=...)"
        ) from error
    finally:
        handle.remove()
        del module.log, module.log_dict
    return None


def _as_example(part: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ExampleInput:
    if kwargs:  # positional arguments by name, because an example is either of the two
        names = list(inspect.signature(part.forward).parameters)
        return map_tensors(dict(zip(names, args, strict=False)) | dict(kwargs), lambda _, tensor: tensor.detach())
    return map_tensors(args[0] if len(args) == 1 else args, lambda _, tensor: tensor.detach())


def _required(example: ExampleInput | None, name: str, described: str) -> ExampleInput:
    if example is None:
        raise ValueError(f"{described} does not call {name!r}: pass its input as GrowthCallback(example_input=...)")
    return example


def _steps(trainer: Trainer, module: LightningModule) -> list[tuple[str, Any]]:
    """Steps of the module that may show the input, each with the source of its data."""
    sources = {
        TrainerFn.FITTING: [
            ("validation_step", trainer.fit_loop.epoch_loop.val_loop._data_source),
            ("training_step", trainer.fit_loop._data_source),
        ],
        TrainerFn.VALIDATING: [("validation_step", trainer.validate_loop._data_source)],
        TrainerFn.TESTING: [("test_step", trainer.test_loop._data_source)],
        TrainerFn.PREDICTING: [("predict_step", trainer.predict_loop._data_source)],
    }
    steps = sources[trainer.state.fn] if trainer.state.fn is not None else []
    # Lightning's own predict_step calls the module; the other steps do nothing unless the user writes them.
    return [
        (step, source)
        for step, source in steps
        if source.is_defined() and (step == "predict_step" or is_overridden(step, module))
    ]


def _few_samples(part: nn.Module, example: ExampleInput, batch_size: int | None) -> ExampleInput:
    """The first samples of an example whose tensors all have the batch first, if the network accepts so few."""
    if batch_size is None or any(tensor.dim() == 0 or len(tensor) != batch_size for tensor in tensors(example)):
        return example
    few = map_tensors(example, lambda _, tensor: tensor[:SAMPLES].clone())
    try:
        with preserve_state(part), evaluating(part):
            call(part, few)
    except Exception:  # the network expects this very batch size
        return example
    return few


def _device(part: nn.Module) -> torch.device:
    return next((parameter.device for parameter in part.parameters()), torch.device("cpu"))
