"""Text for character models: windows of a file, or of sentences of a small grammar.

Subjects and verbs agree across clauses and brackets match, so that models benefit from context.

Shapes: M windows of L characters.
"""

import re
from functools import cache
from pathlib import Path

import numpy as np

from simic.tasks.data import Data, as_data, deal
from simic.tasks.files import book_files, text_files

WINDOW_LENGTH = 32
"""Characters of a window."""
HELD_OUT_SHARE = 1 / 6
"""Share of the windows that go to validation, and again to test."""
GRAMMAR_RNG_SEED = 4
"""Rng seed of the generated text."""
GENERATED_CHARACTERS = 96_001
"""Length of the generated text: 3,000 windows."""
MAX_DEPTH = 6
"""At this nesting depth only the first, shortest expansion of a rule is used."""

GRAMMAR: dict[str, tuple[str, ...]] = {
    "sentence": ("<one>. ", "<many>. ", "<one>, and <many>. ", "<many>, but <one>. ", "<list>. "),
    "one": ("the <noun> <does>", "the <noun> that <does> <does>", "the <noun> (<aside>) <does>"),
    "many": ("the <noun>s <do>", "the <noun>s that <do> <do>", "the <noun>s (<aside>) <do>"),
    "aside": ("so they say", "<colour>", "<one>", "[<aside>] <aside>"),
    "noun": ("fox", "heron", "rabbit", "miller", "seed"),
    "does": ("sleeps", "sees the <noun>", "grows", "follows the <colour> <noun>s"),
    "do": ("sleep", "see the <noun>", "grow", "follow the <colour> <noun>s"),
    "colour": ("red", "grey", "golden"),
    "list": ("<item>", "<item>, <list>"),
    "item": ("one two three", "three two one", "{<item>}", "<colour> <item>"),
}
"""Rule -> its expansions, equally likely."""


@cache
def load_chars(*, train_size: int | None = None, data_dir: Path | None = None) -> Data:
    """Windows (M, 32) of a text; targets are the same windows shifted by one character.

    `data_dir` is a UTF-8 text file, or a directory that holds input.txt; without it the text is generated.
    """
    text = generate_text(GENERATED_CHARACTERS, rng_seed=GRAMMAR_RNG_SEED) if data_dir is None else _read(data_dir)
    return _windows(text, train_size)


@cache
def load_book(*, characters: int, train_size: int | None = None, data_dir: Path | None = None) -> Data:
    """The same of the first `characters` of Moby Dick, or of the book that `data_dir` is or holds."""
    return _windows(_read_file(book_files(data_dir)[0])[:characters], train_size)


def _windows(text: str, train_size: int | None) -> Data:
    vocabulary, tokens = np.unique(list(text), return_inverse=True)
    num_windows = (len(tokens) - 1) // WINDOW_LENGTH
    held_out = int(HELD_OUT_SHARE * num_windows)
    if not held_out:
        least = round(WINDOW_LENGTH / HELD_OUT_SHARE) + 1
        raise ValueError(f"a text needs at least {least} characters for its three splits, got {len(tokens)}")
    inputs = tokens[: num_windows * WINDOW_LENGTH].reshape(num_windows, WINDOW_LENGTH)
    targets = tokens[1 : num_windows * WINDOW_LENGTH + 1].reshape(num_windows, WINDOW_LENGTH)
    test, validation, train = deal((inputs, targets), (held_out, held_out), train_size=train_size)
    return as_data(train=train, validation=validation, test=test, num_classes=len(vocabulary))


def generate_text(num_characters: int, *, rng_seed: int) -> str:
    """Sentences of the grammar, cut to length; determined by the arguments."""
    if num_characters < 1:
        raise ValueError(f"num_characters must be at least 1, got {num_characters}")
    rng = np.random.default_rng(rng_seed)
    sentences, length = [], 0
    while length < num_characters:
        sentences.append(_expand("sentence", rng, MAX_DEPTH))
        length += len(sentences[-1])
    return "".join(sentences)[:num_characters]


def _expand(rule: str, rng: np.random.Generator, depth: int) -> str:
    expansions = GRAMMAR[rule]
    chosen = expansions[rng.integers(len(expansions))] if depth > 0 else expansions[0]
    return re.sub("<([a-z]+)>", lambda match: _expand(match[1], rng, depth - 1), chosen)


def _read(data_dir: Path) -> str:
    (path,) = text_files(data_dir)
    return _read_file(path)


def _read_file(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be UTF-8 text, got {error}: convert it first") from error
