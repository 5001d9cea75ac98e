"""Grow a ResNet from transformers on small images: three lines more than an ordinary training loop."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy, interpolate
from transformers import ResNetConfig, ResNetForImageClassification

from simic import GrowableModel, GrowthScheduler


def load_data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """scikit-learn's digits at twice their size (N, 1, 16, 16), and labels (N,): training, validation and test."""
    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8)[order] / 16
    x, y = interpolate(images, scale_factor=2), torch.tensor(labels)[order]
    return list(zip(x.split([1000, 397, 400]), y.split([1000, 397, 400]), strict=True))


@torch.no_grad()
def evaluate(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> dict[str, float]:
    """Loss and accuracy, as the growth scheduler wants them."""
    logits = model(pixel_values=x).logits
    accuracy = (logits.argmax(1) == y).float().mean()
    return {"val_loss": cross_entropy(logits, y).item(), "val_accuracy": accuracy.item()}


def train(controller, host_epochs: int) -> tuple[GrowableModel, float]:
    """The grown model and its test accuracy."""
    torch.manual_seed(0)
    (train_x, train_y), validation, test = load_data()
    config = ResNetConfig(num_channels=1, embedding_size=3, hidden_sizes=[3, 6], depths=[1, 1], layer_type="basic")
    config.num_labels = 10
    host = ResNetForImageClassification(config)
    model = GrowableModel(host, example_input={"pixel_values": train_x[:2]})  # 1. wrap
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = GrowthScheduler(model, optimizer, controller, evaluate=lambda: evaluate(model, *validation))  # 2. plan

    for _ in range(host_epochs):
        model.train()
        for batch in torch.randperm(len(train_x)).split(50):
            loss = model(pixel_values=train_x[batch], labels=train_y[batch]).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        scheduler.step()  # 3. grow

    return model, evaluate(model.export(), *test)["val_accuracy"]


def main(host_epochs: int = 30, controller="heuristic") -> GrowableModel:
    """Train the same host without and with growth, and compare."""
    _, before = train("wait", host_epochs)
    model, after = train(controller, host_epochs)
    model.print_growth()
    print(f"test accuracy: {before:.1%} without growth, {after:.1%} with it")
    return model


if __name__ == "__main__":
    torch.set_num_threads(1)  # the tensors are so small that threads would only wait for each other
    main()
