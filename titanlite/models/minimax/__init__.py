"""MiniMax-Text-01 and M1 (arXiv 2501.08313, 2506.13585): lightning attention, every eighth block softmax, experts in all."""

from titanlite.models.decoder import Decoder as Model
from titanlite.models.decoder import DecoderArgs, flops_per_token
from titanlite.models.moe import MoEArgs
from titanlite.models.plans import decoder_plan as plan

__all__ = ["FLAVORS", "Model", "flops_per_token", "plan"]

FLAVORS = {
    "debugmodel": DecoderArgs(
        64, 4, 4, 2, 0, 257, head_dim=24, rope_theta=1e4, rotary_dim=12, full_attention_every=2, residual_scale=2.0,
        moe=MoEArgs(8, 2, 48, balance_loss=0.01),
    ),
    "456B": DecoderArgs(
        6144, 80, 64, 8, 0, 200064, head_dim=128, rope_theta=1e7, rotary_dim=64, full_attention_every=8, residual_scale=3.5565588200778455,
        moe=MoEArgs(32, 2, 9216, balance_loss=0.001),
    ),
}  # fmt: skip
