"""Make untrusted text (file and slot names, settings, messages) safe to print to a terminal."""

from __future__ import annotations

MAX_CHARACTERS = 2_000
"""Longer messages would hide what was printed before."""


def printable(text: object, max_characters: int = MAX_CHARACTERS) -> str:
    """One line of visible characters: white space becomes a space, other unprintable characters become escapes.

    Control characters move the cursor or change the terminal's title, bidirectional overrides change how text reads.
    For rich, pass the result with `markup=False` or through `rich.markup.escape`.
    """
    line = str(text)
    if len(line) > max_characters:
        line = f"{line[:max_characters]}... ({len(line) - max_characters:,} more characters)"
    return "".join(character if character.isprintable() else _visible(character) for character in line)


def _visible(character: str) -> str:
    return " " if character.isspace() and character.isascii() else character.encode("unicode_escape").decode()
