"""Grow a small convolutional network on scikit-learn's digits in Lightning: five lines, numbered here, do it."""

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from simic.integrations.lightning import GrowthCallback  # 1


class LitCNN(LightningModule):
    def __init__(self):
        super().__init__()
        blocks = [nn.Sequential(nn.Conv2d(c, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()) for c in (1, 4)]
        self.net = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 10))

    def training_step(self, batch, batch_idx, name="train_loss"):
        self.log(name, loss := nn.functional.cross_entropy(self.net(batch[0]), batch[1]), prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.training_step(batch, batch_idx, "val_loss")

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main(host_epochs=30, controller="heuristic"):  # 2
    seed_everything(0)
    images, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
    train, val = random_split(TensorDataset(images.float().view(-1, 1, 8, 8) / 16, labels), (1397, 400))
    growth = GrowthCallback(slots=["0", "1"], controller=controller, verbose=True)  # 3
    trainer = Trainer(max_epochs=host_epochs, logger=False, enable_checkpointing=False, callbacks=[growth])  # 4
    trainer.fit(LitCNN(), DataLoader(train, batch_size=50, shuffle=True), DataLoader(val, batch_size=400))
    return growth.model  # 5


if __name__ == "__main__":
    main()
