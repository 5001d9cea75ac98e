"""References made from the source: settings from dataclasses, commands from their flags, names from docstrings."""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import re
import textwrap
from dataclasses import is_dataclass
from enum import Enum
from typing import Any, Literal, get_args, get_origin

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.ext.napoleon import Config, GoogleDocstring
from sphinx.util.docutils import SphinxDirective

import simic
from simic.cli import COMMANDS
from simic.commands.flags import Flag, flags_of
from simic.settings import Setting, flatten, plain_type, settings_of, to_tables

GROUPS: dict[str, str] = {
    "Grow a network": "GrowableModel GrowthScheduler Decision GrowthEvent find_slots save load build_exported",
    "Blueprints": "blueprint SlotShape zeroed",
    "Controllers": "controller HeuristicController HeuristicConfig LearnedController ScriptedController "
    "RandomController WaitController Facts Action Op Stage LifecycleConfig IllegalActionError",
    "Train and compare controllers": "train TrainingResult StopTraining preset RunConfig evaluate Comparison grow",
    "Tasks": "task family Task Data CropAndFlip",
    "Rewards": "reward reward_term RewardConfig Transition",
    "Policies": "policy_network ActorCritic PolicyConfig",
    "Files and plugins": "load_plugins save_bundle load_bundle read_tables",
}
"""Every public name of simic, in the order of the page."""
NAPOLEON = Config(napoleon_use_rtype=False, napoleon_use_ivar=True)
INTEGRATIONS = {"simic.integrations.lightning": "GrowthCallback", "simic.integrations.transformers": "attach"}


class Reference(SphinxDirective):
    """A directive that writes Markdown and parses it, headings included."""

    def text(self) -> str:
        """What stands in the place of the directive."""
        raise NotImplementedError

    def run(self) -> list[nodes.Node]:
        """The parsed Markdown."""
        return self.parse_text_to_nodes(self.text(), allow_section_headings=True)


class SettingsReference(Reference):
    """The settings of a config class, module:Class, by section."""

    required_arguments = 1

    def text(self) -> str:
        """A heading per section, an entry per setting."""
        module, _, name = self.arguments[0].partition(":")
        config = getattr(importlib.import_module(module), name)
        defaults, lines, section = flatten(to_tables(config())), list[str](), None
        for setting in settings_of(config):
            table = setting.name.rpartition(".")[0]
            if table != section:
                section = table
                lines += _section(config, table) if table else []
            lines += _entry(f"`{setting.name}`", _type(setting), _default(setting, defaults), setting.help)
        return "\n".join(lines)


def _section(config: type, table: str) -> list[str]:
    part: Any = config()
    for name in table.split("."):
        part = getattr(part, name)
    summary = (inspect.getdoc(type(part)) or "").partition("\n\n")[0]
    return ["", f"## {table}", "", summary, ""]


def _type(setting: Setting) -> str:
    kind = plain_type(setting.type)
    if choices := setting.metadata.get("choices"):
        return "one of " + ", ".join(f"`{choice}`" for choice in choices())
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(f"`{choice}`" for choice in get_args(kind))
    if get_origin(kind) is tuple:
        return f"list of {get_args(kind)[0].__name__}"
    text = getattr(kind, "__name__", str(kind)) if not get_args(kind) else str(kind)
    return text + (" or null" if type(None) in get_args(setting.type) else "")


def _default(setting: Setting, defaults: dict[str, Any]) -> str:
    if setting.name in defaults:
        value = defaults[setting.name]
    else:  # a table of named values: one entry each, or none
        value = {
            key.removeprefix(f"{setting.name}."): defaults[key] for key in defaults if key.startswith(setting.name)
        }
    return f"default `{value if isinstance(value, str) else json.dumps(value)}`"


def _entry(*parts: str) -> list[str]:
    *head, text = parts
    return [", ".join(part for part in head if part), f": {' '.join(text.split())}", ""]


class CommandReference(Reference):
    """All commands of the command line."""

    def text(self) -> str:
        """A heading per command, an entry per flag."""
        lines: list[str] = []
        for name, command in COMMANDS.items():
            flags = flags_of(command, show_all=False)
            positional = [flag.usage for flag in flags if flag.setting.metadata.get("positional")]
            usage = " ".join([f"simic {name}", *positional, "[FLAGS]"])
            lines += [f"## simic {name}", "", "```text", usage, "```", "", _description(command), ""]
            for flag in flags:
                if flag.shown:
                    lines += _flag(flag)
            if not all(flag.shown for flag in flags):
                lines += ["", "Every other setting is a flag too: [settings](configuration.md).", ""]
        return "\n".join(lines)


def _description(command: type) -> str:
    """The help text; its indented lines are commands."""
    text = inspect.getdoc(command) or ""
    return re.sub(r"\n((?:  .*(?:\n|$))+)", lambda match: f"\n```\n{textwrap.dedent(match[1])}\n```\n", text)


def _flag(flag: Flag) -> list[str]:
    action = flag.add_to(argparse.ArgumentParser(add_help=False))
    names = " ".join(f"`{option}`" for option in action.option_strings) or f"`{flag.usage}`"
    metavar = f"`{action.metavar}`" if action.metavar and action.option_strings else ""
    return _entry(f"{names} {metavar}".strip(), (action.help or "").replace("%%", "%"))


class APIReference(Reference):
    """Every public name of simic, and the integrations, from their docstrings."""

    def text(self) -> str:
        """A heading per group, an entry per name."""
        grouped = " ".join(GROUPS.values()).split()
        if missing := set(simic.__all__) - {"__version__"} ^ set(grouped):
            raise ExtensionError(f"GROUPS of docs/extensions/references.py and simic.__all__ differ: {sorted(missing)}")
        lines: list[str] = []
        for title, names in GROUPS.items():
            lines += [f"## {title}", "", *(line for name in names.split() for line in _documented("simic", name))]
        lines += ["## Integrations", ""]
        for module, names in INTEGRATIONS.items():
            lines += [line for name in names.split() for line in _documented(module, name)]
        return "\n".join(lines)


def _documented(module: str, name: str) -> list[str]:
    value = getattr(importlib.import_module(module), name)
    kind = "autofunction" if inspect.isfunction(value) else "autoclass"
    if isinstance(value, type) and issubclass(value, BaseException):
        kind = "autoexception"
    members = ["   :members:"] if kind == "autoclass" else []
    if is_dataclass(value) or (isinstance(value, type) and issubclass(value, Enum)):
        members.append("   :undoc-members:")  # fields whose name says it all
    return ["```{eval-rst}", f".. {kind}:: {module}.{name}", *members, "```", ""]


def read_sections(app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    """Show Args, Returns, Raises and Example of docstrings as fields; texts of attributes have no such parts."""
    if what in ("class", "exception", "function", "method"):
        lines[:] = GoogleDocstring(lines, NAPOLEON, app, what, name, thing, options).lines()


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.add_directive("settings-reference", SettingsReference)
    app.add_directive("command-reference", CommandReference)
    app.add_directive("api-reference", APIReference)
    app.connect("autodoc-process-docstring", read_sections)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
