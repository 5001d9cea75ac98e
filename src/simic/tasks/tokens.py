"""Subword tokens of a text: windows for language models at the size of TinyStories (Eldan and Li 2023).

The tokens are byte-level BPE, trained on the training part alone, so that validation and test are new to the tokenizer
too. Training it and encoding the text take a while, so both are cached; what is found in the cache is checked.

Shapes: M windows of L tokens.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from simic.storage.files import read_file, write_file
from simic.tasks.data import Data, Samples, as_data, deal
from simic.tasks.files import story_files

if TYPE_CHECKING:
    from tokenizers import Tokenizer  # pyright: ignore[reportMissingImports]

END_OF_TEXT = "<|endoftext|>"
"""One token: what separates the stories in the file."""
MIN_VOCABULARY = 257
"""Every byte, and the end of a text."""
MAX_VOCABULARY = 1 << 16
"""Tokens are stored in two bytes."""
HELD_OUT_SHARE = 1 / 10
"""Share of the text that goes to validation, and again to test."""
MAX_HELD_OUT = 1_000
"""Windows of validation and of test: more would make every decision slow."""
TEXT_BYTES = 1 << 25
"""Bytes of the text that are read unless told; all of TinyStories would need tens of gigabytes as windows."""
CACHE_FORMAT = 1
MAX_HEADER_BYTES = 1 << 26


class Encoded(NamedTuple):
    """A text in tokens, and what they mean."""

    tokenizer: str  # its JSON
    parts: list[np.ndarray]  # training, validation and test


@cache
def load_tokens(
    *,
    data_dir: Path | None = None,
    train_size: int | None = None,
    vocabulary: int = 1024,
    length: int = 64,
    text_bytes: int = TEXT_BYTES,
) -> Data:
    """Windows (M, length) of a text; targets are the same windows shifted by one token.

    `data_dir` is a UTF-8 text file or a directory that holds one; its first `text_bytes` are read.
    """
    if length < 1:
        raise ValueError(f"length must be at least 1 token, got {length}")
    encoded = _encoded(data_dir, vocabulary, text_bytes)
    train, *held_out = (_windows(part, length) for part in encoded.parts)
    (train,) = deal(train, (), train_size=train_size)
    validation, test = ((x[:MAX_HELD_OUT], y[:MAX_HELD_OUT]) for x, y in held_out)
    num_classes = _read_tokenizer(encoded.tokenizer).get_vocab_size()
    return as_data(train=train, validation=validation, test=test, num_classes=num_classes)


def load_tokenizer(*, data_dir: Path | None = None, vocabulary: int = 1024, text_bytes: int = TEXT_BYTES) -> Tokenizer:
    """The tokenizer of `load_tokens`: `encode` turns a text into tokens, `decode` turns tokens into text."""
    return _read_tokenizer(_encoded(data_dir, vocabulary, text_bytes).tokenizer)


def _encoded(data_dir: Path | None, vocabulary: int, text_bytes: int) -> Encoded:
    if not MIN_VOCABULARY <= vocabulary <= MAX_VOCABULARY:
        raise ValueError(
            f"vocabulary must lie in {MIN_VOCABULARY}..{MAX_VOCABULARY} tokens (every byte is one), got {vocabulary}"
        )
    if text_bytes < 1:
        raise ValueError(f"text_bytes must be at least 1, got {text_bytes}")
    (path,) = story_files(data_dir)
    text = _read_text(path, text_bytes)
    place = _cache_place(text, vocabulary)
    found = _read_cache(place)
    if found is None:
        found = _encode(text, vocabulary)
        with suppress(OSError):  # without a cache the next process only needs longer
            _write_cache(place, found)
    return found


def _read_text(path: Path, text_bytes: int) -> str:
    with path.open("rb") as file:
        content, more = file.read(text_bytes), bool(file.read(1))
    try:
        # A character that is cut off at the end is left out.
        return codecs.getincrementaldecoder("utf-8")().decode(content, final=not more)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be UTF-8 text, got {error}: convert it first") from error


def _split(text: str) -> list[str]:
    """Training, validation and test: consecutive parts that end with a line, if one ends nearby."""
    cuts, nearby = [0], int(HELD_OUT_SHARE / 4 * len(text))
    for share in (1 - 2 * HELD_OUT_SHARE, 1 - HELD_OUT_SHARE):
        cut = int(share * len(text))
        line_end = text.find("\n", cut, cut + nearby)
        cuts.append(cut if line_end < 0 else line_end + 1)
    return [text[start:end] for start, end in pairwise([*cuts, len(text)])]


def _encode(text: str, vocabulary: int) -> Encoded:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # pyright: ignore[reportMissingImports]

    # Line by line: texts are long, and tokens that span lines would hardly be frequent.
    parts = [part.splitlines(keepends=True) for part in _split(text)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    with _one_thread():
        tokenizer.train_from_iterator(parts[0], trainer)
        ids = [[token for line in part for token in tokenizer.encode(line).ids] for part in parts]
    return Encoded(tokenizer.to_str(), [np.array(part, dtype=np.uint16) for part in ids])


@contextmanager
def _one_thread() -> Iterator[None]:
    """Keep the package from starting threads: it warns about them when a process is forked later."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _read_tokenizer(content: str) -> Tokenizer:
    from tokenizers import Tokenizer  # pyright: ignore[reportMissingImports]

    return Tokenizer.from_str(content)


def _windows(tokens: np.ndarray, length: int) -> Samples:
    """Inputs and targets (M, L) from consecutive tokens."""
    count = (len(tokens) - 1) // length
    if count < 1:
        raise ValueError(
            f"each of the three parts of a text needs at least {length + 1} tokens, got {len(tokens)}: use a longer "
            "text or a smaller length"
        )
    tokens = tokens.astype(np.int64)
    return tokens[: count * length].reshape(count, length), tokens[1 : count * length + 1].reshape(count, length)


# The cache: a header in JSON with the tokenizer, lengths and checksum, and the tokens of all parts, two bytes each.


def _cache_place(text: str, vocabulary: int) -> Path:
    import tokenizers  # pyright: ignore[reportMissingImports]

    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "simic" / "tokens"
    settings = json.dumps([CACHE_FORMAT, tokenizers.__version__, vocabulary])
    return root / hashlib.sha256(settings.encode() + b"\0" + text.encode()).hexdigest()


def _read_cache(place: Path) -> Encoded | None:
    """What is cached; None if there is nothing, or something else than `_write_cache` wrote."""
    try:
        header = json.loads(read_file(place.with_suffix(".json"), max_bytes=MAX_HEADER_BYTES))
        sizes, checksum, tokenizer = header["sizes"], header["sha256"], header["tokenizer"]
        content = read_file(place.with_suffix(".tokens"), max_bytes=2 * sum(sizes))
        if _checksum(tokenizer, content) != checksum:
            return None
        return Encoded(tokenizer, np.split(np.frombuffer(content, "<u2"), np.cumsum(sizes)[:-1]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _write_cache(place: Path, encoded: Encoded) -> None:
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    content = np.concatenate(encoded.parts).astype("<u2").tobytes()
    header = {
        "sizes": [len(part) for part in encoded.parts],
        "sha256": _checksum(encoded.tokenizer, content),
        "tokenizer": encoded.tokenizer,
    }
    write_file(place.with_suffix(".tokens"), content)
    write_file(place.with_suffix(".json"), json.dumps(header))


def _checksum(tokenizer: str, content: bytes) -> str:
    return hashlib.sha256(tokenizer.encode() + b"\0" + content).hexdigest()
