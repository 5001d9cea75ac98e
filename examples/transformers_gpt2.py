"""A tiny GPT-2 that grows while transformers' Trainer trains it on the characters of Python's own documentation."""

from pydoc_data.topics import topics

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from simic.integrations.transformers import attach  # 1

LENGTH, TEXT = 32, "".join(topics.values())[:40_000]
ALPHABET = sorted(set(TEXT))


def main(epochs: int = 10, folder: str = "runs/transformers_gpt2"):
    """Train; the folder then holds checkpoints that a second run could resume."""
    torch.manual_seed(0)
    tokens = torch.tensor([ALPHABET.index(letter) for letter in TEXT]).split(LENGTH)[:-1]
    data = [{"input_ids": row, "labels": row} for row in tokens]
    config = GPT2Config(vocab_size=len(ALPHABET), n_positions=LENGTH, n_embd=16, n_layer=2, n_head=2)
    config.bos_token_id = config.eos_token_id = None
    args = TrainingArguments(
        folder,
        num_train_epochs=epochs,
        per_device_train_batch_size=32,
        learning_rate=5e-3,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        report_to="none",
        use_cpu=True,
    )
    trainer = Trainer(GPT2LMHeadModel(config), args, train_dataset=data[::2], eval_dataset=data[1::10])
    growth = attach(trainer, controller="heuristic")  # 2: let it grow; seeds, optimizer and checkpoints follow
    trainer.train()
    growth.model.print_growth()  # 3: see what has grown; growth.export() is a plain network without simic
    return trainer


if __name__ == "__main__":
    main()
