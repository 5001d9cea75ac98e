"""What pretrained models are adapted to in benchmarks/adapters.py, and how well they do it.

    gpt-bible, gpt-austen   the character GPT of Moby Dick reads another text; quality is bits per character there,
                            forgetting is bits per character on Moby Dick
    minilm-order            the encoder MiniLM tells sentences of Jane Austen from those with six words in a row
                            shuffled; quality is accuracy, forgetting is the cosine distance of embeddings of Moby
                            Dick's sentences to those of the encoder before it was adapted

Models map a batch x to logits (B, C) or (B, C, T) for targets (B,) or (B, T).
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from char_gpt import WINDOW, encode, held_out_split, pretrained_gpt, windows
from texts import austen, bible, data_path, moby_dick, sentences
from torch import Tensor, nn

os.environ["HF_HUB_OFFLINE"] = "1"  # the encoder's files are here
Batch = tuple[Tensor, Tensor]
SHUFFLED_WORDS = 6
MAX_TOKENS = 16
"""Word pieces of a sentence that the encoder reads."""
EMBEDDING_SCALE = 10.0
"""Logits are those of normalized embeddings times this."""


class Sample(NamedTuple):
    """The data of one rng seed."""

    batches: list[Batch]
    validation: Batch
    test: Batch
    source: Batch
    """Data like those that the model was pretrained on, with targets only where it has some."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A pretrained model and what it is adapted to."""

    name: str
    tuned_on: str
    """The problem whose learning rates are used."""
    attention: str
    mlp: str
    """Regular expressions of the names of linear layers."""
    block: str
    """Regular expression whose group is the number of a layer's block."""
    head: str | None
    """The submodule that is trained in every arm."""
    load: Callable[[], nn.Module]
    """The pretrained model, nothing of it frozen; its head is new."""
    draw: Callable[[int, int], Sample]
    """The sample of (steps, rng seed)."""
    steps: int
    max_ablations: int | None = None
    """Seeds that growth switches off per decision to measure what they contribute; None for all."""
    forgetting: Callable[[nn.Module, Sample], float]
    higher_is_better: bool

    def layers(self, model: nn.Module, pattern: str) -> list[str]:
        """Names of the model's linear layers that match."""
        linear = (name for name, module in model.named_modules() if isinstance(module, nn.Linear))
        return [name for name in linear if re.search(pattern, name)]

    def quality(self, model: nn.Module, batch: Batch) -> float:
        """Accuracy in percent where that is the measure, else bits per target."""
        loss, accuracy = evaluate(model, batch)
        return 100 * accuracy if self.higher_is_better else loss / math.log(2)


@torch.no_grad()
def evaluate(model: nn.Module, batch: Batch) -> tuple[float, float]:
    """Mean loss and accuracy."""
    model.eval()
    loss = correct = 0.0
    for x, y in zip(*(part.split(32) for part in batch), strict=True):
        logits = model(x)
        loss += F.cross_entropy(logits, y, reduction="sum").item()
        correct += (logits.argmax(1) == y).sum().item()
    return loss / batch[1].numel(), correct / batch[1].numel()


# The character GPT.


def draw_windows(name: str, steps: int, rng_seed: int) -> Sample:
    """Windows of a random excerpt as long as what is read in training; the others are from the end of the text."""
    rng = np.random.default_rng((1, rng_seed))
    train, held_out = held_out_split(_tokens(name))
    length = 16 * steps * WINDOW
    start = rng.integers(max(len(train) - length, 1))
    excerpt, half = train[start : start + length], len(held_out) // 2
    batches = [_draw(excerpt, 16, rng) for _ in range(steps)]
    validation, test = (_draw(part, count, rng) for part, count in ((held_out[:half], 64), (held_out[half:], 192)))
    return Sample(batches, validation, test, _draw(held_out_split(_tokens("moby dick"))[1], 128, rng))


def _draw(tokens: np.ndarray, count: int, rng: np.random.Generator) -> Batch:
    return windows(tokens, rng.integers(len(tokens) - WINDOW, size=count))


@cache
def _tokens(name: str) -> np.ndarray:
    texts = {
        "moby dick": moby_dick,
        "bible": lambda: "\n".join(verse for verses in bible().values() for verse in verses),
        "austen": lambda: "\n".join(austen().values()),
    }
    return encode(texts[name]())


def source_bits(model: nn.Module, sample: Sample) -> float:
    """Bits per character on the source text."""
    return evaluate(model, sample.source)[0] / math.log(2)


# The encoder.


class Classifier(nn.Module):
    """A linear head on normalized mean embeddings of word pieces (B, L); 0 is padding."""

    def __init__(self, encoder: nn.Module, num_classes: int) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(384, num_classes)

    def embed(self, tokens: Tensor) -> Tensor:
        mask = tokens != 0
        hidden = self.encoder(input_ids=tokens, attention_mask=mask.long()).last_hidden_state
        return F.normalize((hidden * mask[..., None]).sum(1), dim=-1)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(EMBEDDING_SCALE * self.embed(tokens))


def load_classifier() -> Classifier:
    """The pretrained encoder without its unused pooler, and a new head."""
    from transformers import AutoModel, logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()  # it would name the pooler's weights, which are left out
    return Classifier(AutoModel.from_pretrained(data_path("minilm"), add_pooling_layer=False), 2)


@cache
def _tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(data_path("minilm"))


def _pieces(texts: Sequence[str]) -> Tensor:
    tokenized = _tokenizer()(list(texts), padding="max_length", truncation=True, max_length=MAX_TOKENS)
    return torch.tensor(tokenized["input_ids"])


@cache
def _sentences(name: str) -> list[str]:
    novels = {"moby dick": lambda: [moby_dick()], "austen": lambda: list(austen().values())}[name]()
    return [sentence for novel in novels for sentence in sentences(novel, least=8, most=12)]


def draw_sentences(steps: int, rng_seed: int) -> Sample:
    """Sentences, every second one shuffled; those for testing are never trained on at any rng seed."""
    rng = np.random.default_rng((2, rng_seed))
    order = np.random.default_rng(0).permutation(len(_sentences("austen")))
    held_out = len(order) // 4
    rows = {
        "train": rng.choice(order[2 * held_out :], 16 * steps, replace=False),
        "validation": rng.choice(order[:held_out], 128, replace=False),
        "test": rng.choice(order[held_out : 2 * held_out], 400, replace=False),
    }
    made = {part: _shuffle_half([_sentences("austen")[row] for row in chosen], rng) for part, chosen in rows.items()}
    batches = list(zip(*(part.split(16) for part in made["train"]), strict=True))
    others = rng.choice(len(_sentences("moby dick")), 96, replace=False)
    source = _pieces([_sentences("moby dick")[row] for row in others])
    return Sample(batches, made["validation"], made["test"], (source, torch.zeros(len(source))))


def _shuffle_half(texts: Sequence[str], rng: np.random.Generator) -> Batch:
    target = torch.arange(len(texts)) % 2
    changed = [_shuffle(text, rng) if shuffled else text for text, shuffled in zip(texts, target, strict=True)]
    return _pieces(changed), target


def _shuffle(text: str, rng: np.random.Generator) -> str:
    words = text.split()
    start = rng.integers(len(words) - SHUFFLED_WORDS + 1)
    words[start : start + SHUFFLED_WORDS] = rng.permutation(words[start : start + SHUFFLED_WORDS])
    return " ".join(words)


@torch.no_grad()
def embedding_drift(model: nn.Module, sample: Sample) -> float:
    """Mean cosine distance between embeddings of the source before and after adaptation."""
    # `embed` is reached through whatever the model is wrapped in.
    before, after = load_classifier().eval(), model.eval()
    classifier = next(module for module in after.modules() if isinstance(module, Classifier))
    distances = [1 - (before.embed(x) * classifier.embed(x)).sum(1) for x in sample.source[0].split(32)]
    return torch.cat(distances).mean().item()


_gpt = partial(
    Problem,
    tuned_on="gpt-bible",
    attention=r"\.(q|k|v|out)$",
    mlp=r"\.fc_(in|out)$",
    block=r"blocks\.(\d+)",
    head=None,
    load=pretrained_gpt,
    steps=64,
    forgetting=source_bits,
    higher_is_better=False,
)
PROBLEMS = {
    problem.name: problem
    for problem in (
        _gpt(name="gpt-bible", draw=partial(draw_windows, "bible")),
        _gpt(name="gpt-austen", draw=partial(draw_windows, "austen")),
        Problem(
            name="minilm-order",
            tuned_on="minilm-order",
            attention=r"attention\.(self|output)\.(query|key|value|dense)$",
            mlp=r"layer\.\d+\.(intermediate|output)\.dense$",
            block=r"layer\.(\d+)",
            head="head",
            load=load_classifier,
            draw=draw_sentences,
            steps=40,
            max_ablations=6,
            forgetting=embedding_drift,
            higher_is_better=True,
        ),
    )
}
