"""A model and optimizer to save, under FSDP2."""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from titanlite.checkpoint.state import model_state, optimizer_state


class Model(nn.Module):
    """Sizes that no number of ranks divides, one of them smaller than it."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.gate = nn.Linear(5, 1)
        self.register_buffer("load", torch.zeros(3))

    def forward(self, x):
        return self.gate(self.first(x).relu())


def build(seed):
    torch.manual_seed(seed)
    model = Model()
    fully_shard(model.first)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)


def train(model, optimizer, n_steps):
    torch.manual_seed(n_steps)
    for _ in range(n_steps):
        model(torch.randn(4, 6)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def full_state(model, optimizer):
    state = model_state([model]) | optimizer_state(optimizer, [model])
    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().tolist()
        for name, tensor in state.items()
    }
