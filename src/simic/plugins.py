"""Plugins: modules of users that register tasks, rewards, blueprints, controllers or policy networks when imported.

A plugin is loaded with `--plugin MODULE` (or `simic.load_plugins`), or announced by an installed package in the entry
point group `simic.plugins`. Saved files never name a module to import: a downloaded file cannot run code.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable
from importlib.metadata import entry_points
from pathlib import Path

GROUP = "simic.plugins"
_loaded: list[str] = []


class PluginError(ValueError):
    """A plugin that cannot be imported."""


def load_plugins(modules: Iterable[str] = ()) -> None:
    """Import the plugins of installed packages (entry points `simic.plugins`), then these modules, each once.

    A plugin is a module that registers tasks, rewards, blueprints, controllers or policy networks when it is imported.
    Importing it runs its code.

    Args:
        modules: Names of modules; also from the current directory.

    Raises:
        ValueError: A module cannot be imported (PluginError).

    Example:
        >>> simic.load_plugins(["my_module"])
    """
    announced = sorted(point.value.partition(":")[0] for point in entry_points(group=GROUP))
    for name in (*announced, *modules):
        if name not in _loaded:
            _import(name)
            _loaded.append(name)


def loaded_plugins() -> tuple[str, ...]:
    """The plugins of this process, in the order they were loaded; worker processes load the same."""
    return tuple(_loaded)


def plugin_files() -> tuple[Path, ...]:
    """The source files of the loaded plugins: results depend on them."""
    files = (getattr(sys.modules[name], "__file__", None) for name in _loaded)
    return tuple(Path(file) for file in files if file is not None)


def _import(name: str) -> None:
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)  # last: a plugin never shadows an installed package
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise PluginError(f"plugin {name} needs the module {error.name}, which is not installed") from error
        raise PluginError(
            f"there is no plugin module {name!r}: name it as in an import statement, from the directory it lies in"
        ) from None
    except Exception as error:
        raise PluginError(f"plugin {name} failed while it was imported ({type(error).__name__}: {error})") from error


def check_plugins(names: Iterable[str]) -> None:
    """Raise unless these plugins, which settings name, were loaded; settings alone never import a module."""
    missing = [name for name in names if name not in _loaded]
    if missing:
        flags = " ".join(f"--plugin {name}" for name in missing)
        raise PluginError(f"these settings need plugins that are not loaded: add {flags} (in Python: load_plugins)")
