# %% [markdown]
# # Grow your own CNN
#
# A small convolutional network for handwritten digits, and three lines that let it grow. We look at what grew,
# what each part is worth, and take the result away as a plain PyTorch module.

# %%
import torch
from sklearn.datasets import load_digits
from torch import nn

from simic import GrowableModel, GrowthScheduler, find_slots

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
x = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
y = torch.tensor(labels)
order = torch.randperm(len(x))
train, val, test = order[:1000], order[1000:1400], order[1400:]


def make_net():
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU()),
        nn.Sequential(nn.Conv2d(4, 4, 3, stride=2, padding=1), nn.ReLU()),
        nn.Sequential(nn.Conv2d(4, 4, 3, stride=2, padding=1), nn.ReLU()),
        nn.Flatten(),
        nn.Linear(16, 10),
    )


sum(parameter.numel() for parameter in make_net().parameters())

# %% [markdown]
# ## Where can it grow?
#
# `find_slots` lists the submodules and what may grow there. `slots="auto"` takes the blocks of the network.

# %%
print(find_slots(make_net(), x[:2]))

# %% [markdown]
# ## The training loop
#
# Ordinary PyTorch. `train_network` is used twice: with the heuristic, and with a controller that only waits. Both
# networks have the same initial weights and see the same batches.


# %%
def accuracy(model, rows):
    model.eval()
    with torch.no_grad():
        return (model(x[rows]).argmax(1) == y[rows]).float().mean().item()


def train_network(controller, host_epochs=40):
    torch.manual_seed(1)
    model = GrowableModel(make_net(), slots="auto", example_input=x[:2], max_growth=6.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)

    def validate():
        out = model(x[val])
        return {
            "val_loss": nn.functional.cross_entropy(out, y[val]),
            "val_accuracy": (out.argmax(1) == y[val]).float().mean(),
        }

    growth = GrowthScheduler(model, optimizer, controller, evaluate=validate, horizon=host_epochs)
    for _ in range(host_epochs):
        model.train()
        for rows in train[torch.randperm(len(train))].split(100):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
        growth.step()
    return model, growth


model, growth = train_network("heuristic")
model.print_growth()

# %% [markdown]
# The contribution of a part is the validation accuracy with it minus the accuracy without it. `plot` shows the
# course: the metric, the stages of each slot, and the number of parameters.

# %%
growth.plot()

# %% [markdown]
# ## Against the host alone
#
# An honest comparison also asks what a *wider* host would have reached: see [Results](../results.md) for that,
# over many hosts and with intervals. Here is one host, once.

# %%
alone, _ = train_network("wait")
for name, network in (("host alone", alone), ("grown", model)):
    parameters = sum(parameter.numel() for parameter in network.parameters())
    print(f"{name:10}  {parameters:5} parameters  test accuracy {accuracy(network, test):.3f}")

# %% [markdown]
# ## Take it away
#
# The exported network is made of ordinary layers. simic is not needed to run it.

# %%
plain = model.export(live="keep")
print(torch.allclose(plain(x[test]), model.eval()(x[test]), atol=1e-5))
plain
