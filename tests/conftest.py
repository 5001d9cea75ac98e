"""What all tests share: one thread, so that runs on a busy machine are quick and sums come in one order."""

import torch

torch.set_num_threads(1)
