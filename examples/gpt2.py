"""Grow a GPT-2 from transformers on generated text, character by character: three lines more than an ordinary loop."""

import random
import warnings

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2LMHeadModel

from simic import GrowableModel, GrowthScheduler

ALPHABET = "0123456789*=;"
LENGTH = 24


def load_data() -> list[torch.Tensor]:
    """Rows of the multiplication table such as `7*8=56;` as token ids (N, LENGTH): training, validation and test."""
    rng = random.Random(0)
    pairs = [(rng.randrange(13), rng.randrange(13)) for _ in range(4000)]
    text = "".join(f"{a}*{b}={a * b};" for a, b in pairs)
    tokens = torch.tensor([ALPHABET.index(character) for character in text[: 900 * LENGTH]])
    return list(tokens.view(900, LENGTH).split([640, 130, 130]))


def next_character_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of every character given those before it."""
    logits = model(input_ids=tokens).logits
    return cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


@torch.no_grad()
def evaluate(model: nn.Module, tokens: torch.Tensor) -> dict[str, float]:
    """The loss, as the growth scheduler wants it."""
    return {"val_loss": next_character_loss(model, tokens).item()}


def train(controller, host_epochs: int) -> tuple[GrowableModel, float]:
    """The grown model and its test loss."""
    torch.manual_seed(0)
    train_tokens, validation, test = load_data()
    config = GPT2Config(
        vocab_size=len(ALPHABET),
        n_positions=LENGTH,
        n_embd=8,
        n_layer=2,
        n_head=2,
        bos_token_id=None,
        eos_token_id=None,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    host = GPT2LMHeadModel(config)
    model = GrowableModel(host, example_input={"input_ids": train_tokens[:2]})  # 1. wrap
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    scheduler = GrowthScheduler(model, optimizer, controller, evaluate=lambda: evaluate(model, validation))  # 2. plan

    for _ in range(host_epochs):
        model.train()
        for batch in train_tokens[torch.randperm(len(train_tokens))].split(32):
            loss = next_character_loss(model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        scheduler.step()  # 3. grow

    with warnings.catch_warnings():  # seeds may attend; this text has no padding, and no cache is used
        warnings.filterwarnings("ignore", "the exported model's grown parts")
        plain = model.export()
    return model, evaluate(plain, test)["val_loss"]


def main(host_epochs: int = 24, controller="heuristic") -> GrowableModel:
    """Train the same host without and with growth, and compare."""
    _, before = train("wait", host_epochs)
    model, after = train(controller, host_epochs)
    model.print_growth()
    print(f"test loss: {before:.3f} without growth, {after:.3f} with it")
    return model


if __name__ == "__main__":
    torch.set_num_threads(1)  # the tensors are so small that threads would only wait for each other
    main()
