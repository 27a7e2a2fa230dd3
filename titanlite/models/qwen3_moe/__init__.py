"""Qwen3 (arXiv 2505.09388) of experts: Qwen3 with a mixture of experts in every block."""

from titanlite.models.decoder import Decoder as Model
from titanlite.models.decoder import DecoderArgs, flops_per_token
from titanlite.models.moe import MoEArgs
from titanlite.models.plans import decoder_plan as plan

__all__ = ["FLAVORS", "Model", "flops_per_token", "plan"]


def _args(dim: int, n_layers: int, n_heads: int, n_kv_heads: int, moe: MoEArgs, vocab_size: int = 151936, head_dim: int = 128) -> DecoderArgs:
    return DecoderArgs(
        dim, n_layers, n_heads, n_kv_heads, 0, vocab_size, head_dim=head_dim, norm_eps=1e-6, rope_theta=1e6, qk_norm=True, moe=moe
    )  # fmt: skip


FLAVORS = {
    "debugmodel": _args(64, 4, 4, 2, MoEArgs(8, 2, 48, balance_loss=0.01), vocab_size=257, head_dim=32),
    "30B-A3B": _args(2048, 48, 32, 4, MoEArgs(128, 8, 768, balance_loss=0.001)),
    "235B-A22B": _args(4096, 94, 64, 4, MoEArgs(128, 8, 1536, balance_loss=0.001)),
}
