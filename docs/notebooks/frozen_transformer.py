# %% [markdown]
# # Adapters that grow in a frozen transformer
#
# A small GPT-2 is pretrained on one kind of text and then frozen. To learn a second kind, low-rank adapters (LoRA)
# grow beside its linear layers. simic decides beside which, measures what each is worth, and folds them into the
# weights at the end. With a downloaded model only the first cells change.

# %%
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from simic import GrowableModel, GrowthScheduler

torch.manual_seed(0)
LETTERS = 12


def make_text(rules, samples, length=24):
    """Sequences in which each letter follows from the one before by a rule, with a little noise."""
    text = torch.randint(LETTERS, (samples, length))
    for place in range(1, length):
        follows = rules[text[:, place - 1]]
        text[:, place] = torch.where(torch.rand(samples) < 0.9, follows, text[:, place])
    return text


first, second = torch.randperm(LETTERS), torch.randperm(LETTERS)
old_train, new_train, new_val = make_text(first, 512), make_text(second, 512), make_text(second, 128)
old_val = make_text(first, 128)
config = GPT2Config(vocab_size=LETTERS, n_positions=24, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
host = GPT2LMHeadModel(config)
print(f"{host.num_parameters():,} parameters")


# %% [markdown]
# ## Pretrain on the first kind of text


# %%
def train_epoch(model, optimizer, text):
    model.train()
    for rows in torch.randperm(len(text)).split(64):
        optimizer.zero_grad()
        model(input_ids=text[rows], labels=text[rows]).loss.backward()
        optimizer.step()


@torch.no_grad()
def loss(model, text):
    model.eval()
    return model(input_ids=text, labels=text).loss.item()


optimizer = torch.optim.AdamW(host.parameters(), lr=3e-3)
for _ in range(12):
    train_epoch(host, optimizer, old_train)
print(f"loss on the first kind {loss(host, old_val):.3f}, on the second {loss(host, new_val):.3f}")

# %% [markdown]
# ## Freeze it, and let adapters grow
#
# `freeze_host=True` leaves the host's weights as they are, and offers LoRA of ranks 2, 8 and 32. The rule
# `adapters` starts with rank 2 everywhere, keeps what contributes, and adds larger ones where gradients are large.

# %%
model = GrowableModel(
    host,
    slots="linear",
    example_input={"input_ids": new_train[:2]},
    freeze_host=True,
    blueprints=["lora_2", "lora_8", "lora_32"],
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
growth = GrowthScheduler(
    model, optimizer, "adapters", evaluate=lambda: {"val_loss": loss(model, new_val)}, horizon=12, max_ablations=3
)
for _ in range(12):
    train_epoch(model, optimizer, new_train)
    growth.step()
model.print_growth()
model.print_trainable_parameters()

# %% [markdown]
# What each layer's adapters are worth, as the loss without them minus the loss with them:

# %%
import matplotlib.pyplot as plt

worth = {report.slot: report.contribution for report in model.growth() if report.blueprint}
plt.barh(list(worth), list(worth.values()), color="#2f9e62")
plt.gca().invert_yaxis()
plt.xlabel("contribution (loss)")

# %% [markdown]
# ## Fold them in
#
# `merge=True` adds every LoRA to the weight of its layer. The result has the host's own class and size, and saves
# by `save_pretrained`. `model.export_peft(directory)` would write the adapters for PEFT instead.

# %%
merged = model.export(merge=True, live="keep")
print(type(merged).__name__, f"{merged.num_parameters():,} parameters")
print(f"loss on the second kind {loss(merged, new_val):.3f}, on the first {loss(merged, old_val):.3f} (forgotten)")
