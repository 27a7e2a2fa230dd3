"""gpt-oss (arXiv 2508.10925): attention with sinks, in every other block over a window; biases everywhere."""

from titanlite.models.decoder import Decoder as Model
from titanlite.models.decoder import DecoderArgs, flops_per_token
from titanlite.models.layers import YarnScaling
from titanlite.models.moe import MoEArgs
from titanlite.models.plans import decoder_plan as plan

__all__ = ["FLAVORS", "Model", "flops_per_token", "plan"]


def _args(n_layers: int, n_experts: int) -> DecoderArgs:
    return DecoderArgs(
        2880, n_layers, 64, 8, 0, 201088, head_dim=64, rope_theta=150000.0, rope_scaling=YarnScaling(32.0, 4096, truncate=False),
        qkv_bias=True, out_bias=True, window=128, sinks=True, moe=MoEArgs(n_experts, 4, 2880, balance_loss=0.001, bias=True, clamp=7.0),
    )  # fmt: skip


FLAVORS = {
    "debugmodel": DecoderArgs(
        64, 4, 4, 2, 0, 257, head_dim=24, rope_theta=1e4, qkv_bias=True, out_bias=True, window=8, sinks=True,
        moe=MoEArgs(12, 2, 48, balance_loss=0.01, bias=True, clamp=7.0),
    ),
    "20B": _args(24, 32),
    "120B": _args(36, 128),
}  # fmt: skip
