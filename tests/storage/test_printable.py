"""Foreign text on a terminal: visible, on one line, and never an instruction."""

import io
from collections import OrderedDict

import pytest
import torch
from rich.console import Console
from torch import nn

from simic.cli import main
from simic.growth.model import GrowableModel
from simic.storage.printable import printable
from simic.storage.run_directory import RunDirectory
from simic.telemetry.events import RunStarted
from simic.telemetry.recorder import Recorder


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain ü 漢 \\ [red]", "plain ü 漢 \\ [red]"),
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("\x1b[2J", "\\x1b[2J"),
        ("\x9b31m", "\\x9b31m"),
        ("two\nlines\r\tof it", "two lines  of it"),
        ("txt.\u202eexe", "txt.\\u202eexe"),
        ("\u2066\u200b\u2028\ufeff", "\\u2066\\u200b\\u2028\\ufeff"),
        ("\udcff", "\\udcff"),
        ("\x00\x7f", "\\x00\\x7f"),
    ],
)
def test_what_is_not_printed_is_shown_as_an_escape(text, shown):
    assert printable(text) == shown
    assert printable(shown) == shown


def test_a_long_text_is_cut():
    assert printable("x" * 100, 10) == "xxxxxxxxxx... (90 more characters)"


HOSTILE = "\x1b]0;owned\x07\u202e[red]"


def hostile_run(path) -> None:
    with Recorder(RunDirectory(path).create().path) as recorder:
        recorder.record(
            RunStarted(
                update=0,
                command=("simic", HOSTILE),
                config={"task": HOSTILE, "updates": HOSTILE},
                versions={},
                rng_seeds={},
                threads=1,
                pid=1,
                host=HOSTILE,
            )
        )


@pytest.mark.parametrize("command", ["runs", "inspect", "error"])
def test_commands_show_foreign_text_as_it_is(tmp_path, capsys, command):
    run = tmp_path / f"name{HOSTILE}"
    hostile_run(run)
    lines = {"runs": ["runs", "--root", str(tmp_path)], "inspect": ["inspect", str(run)]}
    if command == "error":
        with pytest.raises(SystemExit):
            main(["inspect", str(run / HOSTILE)])
    else:
        main(lines[command])
    said = "".join(capsys.readouterr())
    assert not set("\x1b\x07\u202e") & set(said)
    assert "[red]" in said or command == "runs"  # a narrow table cuts names


def test_names_of_slots_are_no_markup():
    name = "[red]\x1b[2J"
    host = nn.Sequential(OrderedDict({name: nn.Linear(3, 4), "out": nn.Linear(4, 2)}))
    output = io.StringIO()
    GrowableModel(host, [name], example_input=torch.zeros(2, 3)).print_growth(Console(file=output, width=120))
    assert "[red]\\x1b[2J" in output.getvalue()
