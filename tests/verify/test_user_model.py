"""A fork's own model, found by import path."""

import sys
import textwrap

import pytest

from titanlite.config import load_config
from titanlite.utils import ConfigError
from titanlite.verify.command import verify_command

FAMILY = """
from dataclasses import dataclass, replace
import torch
from torch import nn
from titanlite.models.layers import Attention
from titanlite.parallel.plan import ParallelPlan

@dataclass(frozen=True)
class Args:
    vocab_size: int = 97
    dim: int = 32
    n_heads: int = 4
    n_kv_heads: int = 4
    hidden_dim: int = 64
    tie_embeddings: bool = False

class Layer(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.norm = nn.LayerNorm(args.dim)
        self.mix = Attention(args.dim, args.n_heads, args.n_kv_heads, args.dim // args.n_heads, 10000.0, None)
        self.up = nn.Linear(args.dim, args.hidden_dim)
        self.down = nn.Linear(args.hidden_dim, args.dim)

    def forward(self, x, positions, documents):
        x = x + self.mix(self.norm(x), positions, documents)
        return x + self.down(self.up(x).relu())

class Model(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.embed = nn.Embedding(args.vocab_size, args.dim)
        self.stack = nn.ModuleDict({str(i): Layer(args) for i in range(2)})
        self.head = nn.Linear(args.dim, args.vocab_size, bias=False)

    def forward(self, tokens, positions, documents=None):
        x = self.embed(tokens)
        for layer in self.stack.values():
            x = layer(x, positions, documents)
        return self.head(x)

    def init_parameter(self, name, full, generator):
        full.normal_(0.0, 0.1, generator=generator)

FLAVORS = {"tiny": Args()}

def plan(args):
    return ParallelPlan(blocks="BLOCKS", first=("embed",), last=("head",), head="head")

def flops_per_token(args, seq_len):
    return 1
"""


@pytest.fixture
def user_config(tmp_path, monkeypatch):
    def make(blocks: str):
        package = tmp_path / "their_package"
        package.mkdir()
        (package / "__init__.py").write_text("")
        (package / "family.py").write_text(textwrap.dedent(FAMILY).replace("BLOCKS", blocks))
        (tmp_path / "theirs.toml").write_text('[model]\nname = "their_package.family"\nflavor = "tiny"\n')
        monkeypatch.syspath_prepend(str(tmp_path))
        return load_config(tmp_path / "theirs.toml")[0]

    yield make
    for name in [n for n in sys.modules if n.startswith("their_package")]:
        del sys.modules[name]


def test_a_model_by_import_path_is_verified(user_config, capsys):
    assert verify_command(user_config("stack.*"), ["fsdp=2", "hsdp=2x2,recompute=full,chunk=40"], full=False, plant=None) == 0
    assert "2 layouts, 0 differ" in capsys.readouterr().out


def test_a_plan_that_matches_nothing_is_one_message(user_config):
    with pytest.raises(ConfigError, match=r"blocks pattern 'stak\.\*' matches no module of Model; did you mean 'stack"):
        verify_command(user_config("stak.*"), ["fsdp=2"], full=False, plant=None)


def test_a_model_without_a_tensor_plan_refuses_tensor_parallel(user_config):
    with pytest.raises(ConfigError, match="tensor_parallel_degree=2: .* has no tensor-parallel plan"):
        verify_command(user_config("stack.*"), ["tp=2"], full=False, plant=None)
