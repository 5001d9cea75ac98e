"""Flags from dataclasses: names, values, help, and what is refused."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from simic.commands.flags import POSITIONAL, ConfigFlags, Variants, parse_command


@dataclass(frozen=True, kw_only=True)
class Inner:
    """A section."""

    rate: float = 0.5
    """The rate."""
    kind: Literal["one", "two"] = "one"
    """The kind."""
    limit: int | None = None
    """The limit, 10 % more or less."""
    weights: dict[str, float] = field(default_factory=dict)
    """Weights by name."""
    fast: bool = True
    """Be fast."""


@dataclass(frozen=True, kw_only=True)
class Outer:
    """A config."""

    count: int = 3
    """How many."""
    names: tuple[str, ...] = ()
    """Names."""
    inner: Inner = field(default_factory=Inner)


@dataclass(frozen=True, kw_only=True)
class Example:
    """An example."""

    path: Path = field(metadata=POSITIONAL)
    """Where."""
    count: int = 7
    """How many, of the command."""
    settings: dict[str, Any] = field(
        default_factory=dict,
        metadata={
            "config": ConfigFlags(
                config=Outer, short={"--rate": "inner.rate"}, common=("--rate", "--names"), variable=("inner",)
            )
        },
    )
    """Settings."""


def parse(*args: str) -> Example:
    return parse_command(Example, args, prog="simic example")


@dataclass(frozen=True, kw_only=True)
class Optional:
    """A command that runs without arguments."""

    path: Path = field(default=Path("runs"), metadata=POSITIONAL)
    """Where."""


def test_an_argument_with_a_default_may_be_left_out(capsys):
    assert parse_command(Optional, [], prog="simic optional").path == Path("runs")
    assert parse_command(Optional, ["x"], prog="simic optional").path == Path("x")
    with pytest.raises(SystemExit):
        parse_command(Optional, ["--help"], prog="simic optional")
    said = capsys.readouterr().out
    assert "usage: simic optional [PATH] [FLAGS]" in said
    assert "Where. Default: runs." in said


def test_only_given_flags_are_settings():
    assert parse("x") == Example(path=Path("x"))
    assert parse("x", "--count", "3").count == 3  # the command's own, not the config's


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--inner.rate", "1"], {"inner.rate": 1.0}),
        (["--rate=.25"], {"inner.rate": 0.25}),
        (["--inner.kind", "two"], {"inner.kind": "two"}),
        (["--inner.limit", "-3"], {"inner.limit": -3}),
        (["--inner.limit", "none"], {"inner.limit": None}),
        (["--inner.weights.a_b", "1", "--inner.weights.c=2"], {"inner.weights.a_b": 1.0, "inner.weights.c": 2.0}),
        (["--no-inner.fast"], {"inner.fast": False}),
        (["--names", "a", "b", "--names", "c"], {"names": ("a", "b", "c")}),
        (["--inner.rate", "1,2"], {"inner.rate": Variants((1.0, 2.0))}),
    ],
)
def test_values(args, expected):
    settings = parse("x", *args).settings
    assert settings == expected
    assert list(map(type, settings.values())) == list(map(type, expected.values()))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "the following arguments are required: PATH"),
        (["x", "--count", "many"], "--count must be int, got 'many'"),
        (["x", "--count", "1,2"], "--count must be int, got '1,2'"),
        (["x", "--inner.rate", "none"], "--inner.rate must be float, got 'none'"),
        (["x", "--inner.weights.a", "b"], "--inner.weights.a must be float, got 'b'"),
        (["x", "--inner.kind", "tow"], "--inner.kind has no choice 'tow'; did you mean two?"),
        (["x", "--kind", "one"], "simic example has no flag --kind; did you mean inner.kind?"),
        (["x", "--names"], "argument --names: expected at least one argument"),
        (["x", "y"], "simic example has no flag y; valid ones are path, count,"),
    ],
)
def test_what_is_wrong_is_named_with_the_remedy(args, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        parse(*args)


def test_help_shows_common_flags_and_help_all_shows_all(capsys):
    for option, others in (("--help", False), ("--help-all", True)):
        with pytest.raises(SystemExit) as stopped:
            parse(option)
        assert stopped.value.code == 0
        said = capsys.readouterr().out
        for part in ("usage: simic example PATH [FLAGS]", "--count INT", "Default: 7.", "--rate FLOAT", "--help-all"):
            assert part in said
        for part in ("--inner.kind {one,two}", "10 % more", "--inner.weights.NAME FLOAT", "--no-inner.fast"):
            assert (part in said) == others
