"""Flags from dataclasses: every field of a command is a flag, and so is every setting of its config.

    out: Path | None                    --out PATH
    quiet: bool                         --quiet, --no-quiet
    episodes: tuple[str, ...]           --episodes A B, or --episodes A --episodes B
    ppo.clip_range: float               --ppo.clip-range 0.1
    reward.weights: dict[str, float]    --reward.weights.intervention 0, one flag per entry

The docstring below a field is the help text of its flag. Only flags that were given end up in the result, so that
settings from presets and files stay as they are.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, field
from typing import Any, Literal, NamedTuple, NoReturn, TypeVar, get_args, get_origin

from simic.plugins import load_plugins
from simic.registry import nearest, nearest_entry
from simic.settings import Setting, check_choice, check_value, is_table, plain_type, settings_of

Command = TypeVar("Command")
POSITIONAL = {"positional": True}
"""Metadata of a field that is given without a flag."""
MAX_METAVAR = 60
"""Longer lists of choices go into the help text, where they are wrapped."""
PLUGIN = {"flag": "--plugin", "metavar": "MODULE"}
"""Metadata of the field for the names of plugins, which are loaded before other values are checked."""


@dataclass(frozen=True, kw_only=True)
class ConfigFlags:
    """Metadata of the field that takes the given settings of a config, by dotted name.

    A field of the command replaces a setting of the same name.
    """

    config: type
    short: Mapping[str, str] = field(default_factory=dict)
    """Short flags, and the settings they stand for."""
    common: Sequence[str] = ()
    """Flags that --help shows, where --help-all shows all; none if --help shows all."""
    variable: Sequence[str] = ()
    """Sections whose settings take several values, separated by commas."""


class Variants(tuple[Any, ...]):
    """Several values that were given for one setting."""


class Flag(NamedTuple):
    """A flag, and the setting that it sets."""

    text: str
    """As typed: --ppo.clip-range. Without dashes for a positional argument."""
    setting: Setting
    field: str
    """The field of the command that takes the value, or that takes all settings of its config."""
    shown: bool = True
    variable: bool = False

    @property
    def kind(self) -> Any:
        """The type of one value: of an item, where the setting is a tuple, of an entry, where it is a table."""
        kind = plain_type(self.setting.type)
        if is_table(kind):
            return get_args(kind)[1]
        return get_args(kind)[0] if get_origin(kind) is tuple else kind

    @property
    def choices(self) -> tuple[str, ...]:
        """The names that are valid; none if other values are too."""
        if get_origin(self.kind) is Literal:
            return get_args(self.kind)
        names = self.setting.metadata.get("choices", tuple)
        return tuple(names())

    @property
    def is_optional(self) -> bool:
        """Whether the command runs without it."""
        return self.setting.default is not MISSING

    @property
    def usage(self) -> str:
        """How a positional argument stands in the usage line."""
        name = self.text.upper()
        return self.setting.metadata.get("usage") or (f"[{name}]" if self.is_optional else name)

    def add_to(self, parser: argparse.ArgumentParser) -> argparse.Action:
        """Make the parser accept it; returns what the parser knows of it."""
        options, text = dict[str, Any](), self.setting.help
        if self.kind is bool:
            is_own = self.field == self.setting.name  # then no file can have set it
            options["action"] = "store_true" if is_own else argparse.BooleanOptionalAction
        else:
            choices = f"{{{','.join(self.choices)}}}" if self.choices else ""
            if len(choices) > MAX_METAVAR:
                choices, text = "NAME", f"{text} One of {', '.join(self.choices)}."
            kind = {str: "TEXT"}.get(self.kind) or getattr(self.kind, "__name__", "").upper()
            options["metavar"] = self.setting.metadata.get("metavar") or choices or kind
        if get_origin(plain_type(self.setting.type)) is tuple:
            options |= {"nargs": "+", "action": "extend"}
        if self.text.startswith("--"):
            options |= {"dest": self.text, "default": argparse.SUPPRESS}
        elif self.is_optional:
            options |= {"nargs": "?", "default": argparse.SUPPRESS}
        return parser.add_argument(
            self.text, help=text.replace("%", "%%") if self.shown else argparse.SUPPRESS, **options
        )

    def read(self, given: Any) -> Any:
        """The value of what was given, or an error that says what is expected."""
        if isinstance(given, list):
            return tuple(map(self.read, given))
        if isinstance(given, bool):
            return given
        if self.variable and "," in given:
            return Variants(map(self.read, given.split(",")))
        if given.lower() in ("none", "null") and type(None) in get_args(self.setting.type):
            return None
        if self.kind in (int, float):
            with suppress(ValueError):  # what is no number is refused below
                given = self.kind(given)
        value = check_value(self.text, given, self.kind)
        is_registered = "choices" in self.setting.metadata and self.field != self.setting.name
        hint = nearest_entry if is_registered else nearest
        return check_choice(self.text, value, self.choices, hint=hint) if self.choices else value


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def parse_command(command: type[Command], args: Sequence[str], *, prog: str) -> Command:
    """A command from its arguments. --help and --help-all print and exit."""
    _load_plugins(command, args)  # first: flags list the names that they register
    flags = flags_of(command, show_all="--help-all" in args)
    args = [_normalized(arg, flags) for arg in args]
    flags += _entry_flags(args, flags)
    positional = [flag for flag in flags if flag.setting.metadata.get("positional")]
    usage = " ".join([prog, *(flag.usage for flag in positional), "[FLAGS]"])
    parser = _Parser(usage=usage, description=inspect.getdoc(command), allow_abbrev=False, add_help=False)
    parser.formatter_class = lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=8)
    parser.add_argument("-h", "--help", action="help", help="Print this help.")
    if "--help-all" in args or not all(flag.shown for flag in flags):
        parser.add_argument("--help-all", action="help", help="Print the help of all flags: one for every setting.")
    for flag in flags:
        flag.add_to(parser)
    namespace, unknown = parser.parse_known_args(args)
    if unknown:
        name = unknown[0].partition("=")[0]
        near = nearest(name.lstrip("-"), [flag.text.lstrip("-") for flag in flags])
        raise ValueError(f"{prog} has no flag {name}; {near if len(flags) < 40 else near.partition('valid ones')[0]}")
    given = vars(namespace)
    values: dict[str, Any] = {}
    for flag in flags:
        if flag.text in given:
            target = values if flag.field == flag.setting.name else values.setdefault(flag.field, {})
            target[flag.setting.name] = flag.read(given[flag.text])
    return command(**values)


def _load_plugins(command: type, args: Sequence[str]) -> None:
    for own in settings_of(command):
        if own.metadata.get("flag") == PLUGIN["flag"]:
            parser = _Parser(allow_abbrev=False, add_help=False)
            Flag(PLUGIN["flag"], own, own.name).add_to(parser)
            load_plugins(vars(parser.parse_known_args(args)[0]).get(PLUGIN["flag"], ()))


def flags_of(command: type, *, show_all: bool) -> list[Flag]:
    """The flags of a command's own fields, and of the settings of its config."""
    found: list[Flag] = []
    for own in settings_of(command):
        config: ConfigFlags | None = own.metadata.get("config")
        if config is None:
            text = own.name if own.metadata.get("positional") else own.metadata.get("flag", _flag_text(own.name))
            found.append(Flag(text, _with_default(own), own.name))
            continue
        names = {flag.setting.name for flag in found}
        settings = {setting.name: setting for setting in settings_of(config.config) if setting.name not in names}
        for text, name in (*config.short.items(), *((_flag_text(name), name) for name in settings)):
            setting = settings[name] if config.common else _with_default(settings[name])
            if is_table(setting.type):
                text += ".NAME"
            shown = show_all or not config.common or text in config.common
            found.append(Flag(text, setting, own.name, shown, name.partition(".")[0] in config.variable))
    return found


def _flag_text(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _with_default(setting: Setting) -> Setting:
    """The setting with its default in the help text."""
    default = setting.default
    if default is MISSING or default in (None, False, ()):
        return setting
    words = " ".join(default) if isinstance(default, tuple) else default
    return setting._replace(help=f"{setting.help} Default: {words}.")


def _normalized(arg: str, flags: Sequence[Flag]) -> str:
    """An argument with dashes in the place of underscores where it is a flag; names of entries stay as they are."""
    if not arg.startswith("--"):
        return arg
    name, equals, value = arg.partition("=")
    text = name.replace("_", "-")
    for flag in flags:
        if flag.text.endswith(".NAME") and text.startswith(table := flag.text.removesuffix("NAME")):
            text = table + name[len(table) :]
    return f"{text}{equals}{value}"


def _entry_flags(args: Sequence[str], flags: Sequence[Flag]) -> list[Flag]:
    """Flags for the entries of tables that the arguments name: --reward.weights.intervention."""
    found = {}
    for flag in flags:
        for text in (arg.partition("=")[0] for arg in args):
            if flag.text.endswith(".NAME") and text.startswith(table := flag.text.removesuffix("NAME")):
                entry = flag.setting._replace(name=f"{flag.setting.name}.{text.removeprefix(table)}")
                found[text] = flag._replace(text=text, setting=entry, shown=False)
    return list(found.values())
