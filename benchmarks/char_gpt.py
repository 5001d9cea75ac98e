"""A small character GPT of plain linear layers, pretrained on Moby Dick and kept in data/.

Shapes: B windows of T characters, d features, V characters.
"""

from __future__ import annotations

import math
import os

import numpy as np
import torch
import torch.nn.functional as F
from texts import DATA_DIR, moby_dick
from torch import Tensor, nn

WINDOW, WIDTH, NUM_BLOCKS, NUM_HEADS = 64, 128, 4, 4
ALPHABET = "\n" + "".join(map(chr, range(32, 127)))
"""Characters of the model: a new line and printable ASCII."""
REPLACED = str.maketrans({"\N{EM DASH}": "--", "\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"'})
"""Dash and quotation marks that ASCII lacks."""
HELD_OUT_SHARE = 0.1
"""Share of a text, at its end, that no model is trained on."""
PRETRAINING_STEPS, PRETRAINING_BATCH, PRETRAINING_RATE = 3000, 24, 2e-3


class Block(nn.Module):
    """Causal self-attention, then an MLP; both residual, after a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_attention, self.norm_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.fc_in, self.fc_out = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, d)
        normed = self.norm_attention(x)
        q, k, v = (layer(normed).unflatten(2, (NUM_HEADS, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.fc_out(F.gelu(self.fc_in(self.norm_mlp(x))))


class CharGPT(nn.Module):
    """Logits (B, V, T) of the next character, from characters (B, T)."""

    def __init__(self) -> None:
        super().__init__()
        self.characters, self.positions = nn.Embedding(len(ALPHABET), WIDTH), nn.Embedding(WINDOW, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(NUM_BLOCKS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(ALPHABET))
        for table in (self.characters, self.positions):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.characters(tokens) + self.positions.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x))).transpose(1, 2)


def encode(text: str) -> np.ndarray:
    """Characters as numbers; those that the model does not know are left out."""
    numbers = {character: number for number, character in enumerate(ALPHABET)}
    return np.array([numbers[each] for each in text.translate(REPLACED) if each in numbers], dtype=np.int64)


def held_out_split(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What may be trained on, and the end of the text."""
    cut = round((1 - HELD_OUT_SHARE) * len(tokens))
    return tokens[:cut], tokens[cut:]


def windows(tokens: np.ndarray, starts: np.ndarray) -> tuple[Tensor, Tensor]:
    """Windows (B, T) that begin at `starts`, and the characters that follow each of theirs."""
    taken = torch.from_numpy(tokens[starts[:, None] + np.arange(WINDOW + 1)])
    return taken[:, :-1], taken[:, 1:]


def pretrained_gpt() -> CharGPT:
    """The model that was trained on Moby Dick; the first call trains it, which takes some minutes."""
    torch.manual_seed(0)
    model, path = CharGPT(), DATA_DIR / f"char_gpt_{WIDTH}x{NUM_BLOCKS}_{PRETRAINING_STEPS}.pt"
    if not path.exists():
        pretrain(model)
        partial = path.with_suffix(f".{os.getpid()}")
        torch.save(model.state_dict(), partial)
        partial.replace(path)
    model.load_state_dict(torch.load(path, weights_only=True))
    return model


def pretrain(model: CharGPT) -> None:
    """Train on Moby Dick with AdamW under a cosine schedule."""
    tokens, _ = held_out_split(encode(moby_dick()))
    rng = np.random.default_rng(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PRETRAINING_RATE, weight_decay=0.1)
    for step in range(PRETRAINING_STEPS):
        warm_up, decay = min(1.0, (step + 1) / 100), 0.5 * (1 + math.cos(math.pi * step / PRETRAINING_STEPS))
        for group in optimizer.param_groups:
            group["lr"] = PRETRAINING_RATE * warm_up * decay
        x, y = windows(tokens, rng.integers(len(tokens) - WINDOW, size=PRETRAINING_BATCH))
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 500 == 0:
            print(f"pretraining on Moby Dick: step {step + 1}, {loss.item() / math.log(2):.3f} bits per character")
