"""Qwen2.5 (arXiv 2412.15115): queries, keys and values have biases."""

from titanlite.models.decoder import Decoder as Model
from titanlite.models.decoder import DecoderArgs, flops_per_token
from titanlite.models.plans import decoder_plan as plan

__all__ = ["FLAVORS", "Model", "flops_per_token", "plan"]


def _args(dim: int, n_layers: int, n_heads: int, n_kv_heads: int, hidden_dim: int, vocab_size: int, tie_embeddings: bool = False) -> DecoderArgs:
    return DecoderArgs(
        dim, n_layers, n_heads, n_kv_heads, hidden_dim, vocab_size,
        norm_eps=1e-6, rope_theta=1e6, qkv_bias=True, tie_embeddings=tie_embeddings,
    )  # fmt: skip


FLAVORS = {
    "debugmodel": _args(128, 4, 4, 2, 352, 257),
    "0.5B": _args(896, 24, 14, 2, 4864, 151936, True),
    "1.5B": _args(1536, 28, 12, 2, 8960, 151936, True),
    "3B": _args(2048, 36, 16, 2, 11008, 151936, True),
    "7B": _args(3584, 28, 28, 4, 18944, 152064),
    "14B": _args(5120, 48, 40, 8, 13824, 152064),
    "32B": _args(5120, 64, 40, 8, 27648, 152064),
    "72B": _args(8192, 80, 64, 8, 29568, 152064),
}
