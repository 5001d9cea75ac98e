"""Text from files, as a terminal may show it: file and slot names, settings and messages can come from anybody."""

from __future__ import annotations

MAX_CHARACTERS = 2_000
"""Characters of one message; more would hide what stands before it."""


def printable(text: object, max_characters: int = MAX_CHARACTERS) -> str:
    """One line of visible characters: white space becomes a space, everything else that is not printed an escape.

    Control characters move the cursor or change the terminal's title, bidirectional overrides let text read other
    than it is. For rich, pass the result with `markup=False` or through `rich.markup.escape`.
    """
    line = str(text)
    if len(line) > max_characters:
        line = f"{line[:max_characters]}... ({len(line) - max_characters:,} more characters)"
    return "".join(character if character.isprintable() else _visible(character) for character in line)


def _visible(character: str) -> str:
    return " " if character.isspace() and character.isascii() else character.encode("unicode_escape").decode()
