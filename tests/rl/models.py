"""Decoders small enough that a step of reinforcement takes milliseconds: dense, and of experts."""

from titanlite.models.decoder import Decoder as Model
from titanlite.models.decoder import DecoderArgs, flops_per_token
from titanlite.models.moe import MoEArgs
from titanlite.models.plans import decoder_plan as plan

__all__ = ["FLAVORS", "Model", "flops_per_token", "plan"]

FLAVORS = {
    "dense": DecoderArgs(16, 2, 4, 2, 32, vocab_size=63),
    "experts": DecoderArgs(16, 2, 4, 2, 0, vocab_size=63, moe=MoEArgs(4, 2, 16)),
}
