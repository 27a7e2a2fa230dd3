"""Qwen3 (arXiv 2505.09388), dense: queries and keys are normed over each head."""

from dataclasses import replace

from titanlite.models.decoder import Decoder as Model
from titanlite.models.decoder import DecoderArgs, flops_per_token
from titanlite.models.plans import decoder_plan as plan

__all__ = ["FLAVORS", "Model", "flops_per_token", "plan"]


def _args(dim: int, n_layers: int, n_heads: int, n_kv_heads: int, hidden_dim: int, tie_embeddings: bool = False) -> DecoderArgs:
    return DecoderArgs(
        dim, n_layers, n_heads, n_kv_heads, hidden_dim, 151936,
        head_dim=128, norm_eps=1e-6, rope_theta=1e6, qk_norm=True, tie_embeddings=tie_embeddings,
    )  # fmt: skip


FLAVORS = {
    "debugmodel": replace(_args(128, 4, 4, 2, 352), vocab_size=257, head_dim=64),
    "0.6B": _args(1024, 28, 16, 8, 3072, True),
    "1.7B": _args(2048, 28, 16, 8, 6144, True),
    "4B": _args(2560, 36, 32, 8, 9728, True),
    "8B": _args(4096, 36, 32, 8, 12288),
    "14B": _args(5120, 40, 40, 8, 17408),
    "32B": _args(5120, 64, 64, 8, 25600),
}
