"""Settings as nested dataclasses: dotted names, help texts, checked changes. Config files and flags share these rules.

RunConfig(ppo=PPOConfig(clip_range=0.2))    ppo.clip_range    {"ppo": {"clip_range": 0.2}}    --ppo.clip-range 0.2
the dataclass                               dotted name       a table, as in files            the flag
"""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from simic.registry import nearest

Config = TypeVar("Config")
NOT_A_SETTING = "not_a_setting"
"""Metadata of a field that files and flags do not set; its value is the reason."""


class Setting(NamedTuple):
    """A field of a config that is not itself a config."""

    name: str
    """Dotted, from the outermost config."""
    type: Any
    help: str
    """The docstring below the field."""
    default: Any
    metadata: Mapping[str, Any]


@cache
def settings_of(config: type, prefix: str = "") -> tuple[Setting, ...]:
    """All settings of a config class, those of nested configs included, in the order of the fields."""
    hints, texts, found = get_type_hints(config), _docstrings(config), list[Setting]()
    for item in fields(config):
        name = f"{prefix}{item.name}"
        if is_dataclass(hints[item.name]):
            found += settings_of(hints[item.name], f"{name}.")
        elif NOT_A_SETTING not in item.metadata:
            found.append(Setting(name, hints[item.name], texts.get(item.name, ""), item.default, item.metadata))
    return tuple(found)


def _docstrings(config: type) -> dict[str, str]:
    """The string below each field; Python itself does not keep it."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(config))).body
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for field, text in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            found[getattr(field.target, "id", "")] = inspect.cleandoc(str(text.value.value))
    return found


def to_tables(config: Any) -> dict[str, Any]:
    """The settings of a config as JSON values, in nested tables."""
    tables = json.loads(json.dumps(asdict(config)))

    def drop_others(part: Any, table: dict[str, Any]) -> None:
        for item in fields(part):
            if NOT_A_SETTING in item.metadata:
                del table[item.name]
            elif is_dataclass(value := getattr(part, item.name)):
                drop_others(value, table[item.name])

    drop_others(config, tables)
    return tables


def nest(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Nested tables from settings by dotted name."""
    tables: dict[str, Any] = {}
    for dotted, value in settings.items():
        *parents, name = dotted.split(".")
        table = tables
        for parent in parents:
            table = table.setdefault(parent, {})
        table[name] = value
    return tables


def flatten(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by dotted name, from nested tables."""
    return {name: value for name, value, _ in differences(tables, {})}


def override(config: Config, settings: Mapping[str, Any]) -> Config:
    """A config with some settings changed, given as nested tables; an unknown key names the nearest valid one."""
    return replace(config, **check_settings(config, settings))  # pyright: ignore[reportArgumentType]


def check_settings(config: Any, settings: Mapping[str, Any], where: str = "", root: Any = None) -> dict[str, Any]:
    """The new values of fields that change. Names, types and sections are checked, but not how sections agree."""
    hints, known, changes = get_type_hints(type(config)), {item.name: item for item in fields(config)}, {}
    for key, value in settings.items():
        name = f"{where}{key}"
        if key not in known:
            names = [setting.name for setting in settings_of(type(root or config))]
            sections = dict.fromkeys(own.partition(".")[0] for own in names if "." in own)
            raise ValueError(f"there is no setting {_short(name)}; {nearest(name, [*names, *sections])}")
        if reason := known[key].metadata.get(NOT_A_SETTING):
            raise ValueError(f"{name} is not a setting: {reason}")
        current = getattr(config, key)
        if not is_dataclass(current):
            checked = check_value(name, value, hints[key])
            changes[key] = {**current, **checked} if isinstance(checked, dict) else checked
            continue
        if not isinstance(value, Mapping):
            raise ValueError(f"{name} must be a table of settings, got {_short(value)}")
        section = check_settings(current, value, f"{name}.", root or config)
        try:
            changes[key] = replace(current, **section)  # pyright: ignore[reportArgumentType]
        except ValueError as error:
            raise ValueError(f"{name}.{error}") from None
    return changes


def check_value(name: str, value: Any, hint: Any) -> Any:
    """The value as its type wants it, or an error that says what that is."""
    origin, choices = get_origin(hint), get_args(hint)
    if origin is Literal:
        return check_choice(name, value, choices)
    if origin in (Union, types.UnionType):
        return None if value is None else check_value(name, value, plain_type(hint))
    if origin is tuple and isinstance(value, (list, tuple)):
        return tuple(check_value(name, item, choices[0]) for item in value)
    if is_table(hint) and isinstance(value, Mapping):
        return {key: check_value(f"{name}.{key}", item, choices[1]) for key, item in value.items()}
    if hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if hint is int and type(value) is int and abs(value) >= 2**63:
        raise ValueError(f"{name} must be a 64-bit number, got one of {len(str(abs(value)))} digits")
    if hint is Path and isinstance(value, str):
        return Path(value)
    if origin is None and type(value) is hint:
        return value
    raise ValueError(f"{name} must be {getattr(hint, '__name__', hint)}, got {_short(value)}")


def check_choice(name: str, value: Any, choices: Iterable[str], *, hint: Callable[..., str] = nearest) -> Any:
    """The value, if it is one of the choices; an error names the nearest one."""
    choices = list(choices)
    if value not in choices:
        raise ValueError(f"{name} has no choice {_short(value)}; {hint(str(value), choices)}")
    return value


def plain_type(hint: Any) -> Any:
    """What an optional setting holds when it is not None; other types as they are."""
    arms = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    return next(arm for arm in arms if arm is not type(None))


def is_table(hint: Any) -> bool:
    """Whether a setting holds named values, such as weights by term."""
    return get_origin(hint) in (dict, Mapping)


class _Missing:
    """Stands for a setting that a config does not have."""

    def __repr__(self) -> str:
        return "missing"


MISSING = _Missing()


def differences(one: Mapping[str, Any], other: Mapping[str, Any], where: str = "") -> Iterable[tuple[str, Any, Any]]:
    """Settings in which nested tables differ: dotted name and both values; MISSING where a table lacks the setting."""
    for key in sorted(one.keys() | other.keys()):
        mine, theirs = one.get(key, MISSING), other.get(key, MISSING)
        if isinstance(mine, Mapping) and (isinstance(theirs, Mapping) or (theirs is MISSING and mine)):
            yield from differences(mine, {} if theirs is MISSING else theirs, f"{where}{key}.")
        elif mine != theirs:
            yield f"{where}{key}", mine, theirs


def _short(value: Any) -> str:
    """A value in an error message, at most 80 characters of it."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
