"""Llama 3 (The Llama 3 herd of models, arXiv 2407.21783) with Llama's native parameter names."""

from titanlite.models.decoder import Decoder, DecoderArgs, flops_per_token
from titanlite.models.layers import RopeScaling

__all__ = ["FLAVORS", "Llama", "LlamaArgs", "flops_per_token"]

Llama, LlamaArgs = Decoder, DecoderArgs

FLAVORS = {
    "debugmodel": LlamaArgs(128, 4, 4, 2, 352, 257, rope_theta=10000.0),
    "1B": LlamaArgs(2048, 16, 32, 8, 8192, 128256, rope_scaling=RopeScaling(factor=32.0), tie_embeddings=True),
    "3B": LlamaArgs(3072, 28, 24, 8, 8192, 128256, rope_scaling=RopeScaling(factor=32.0), tie_embeddings=True),
    "8B": LlamaArgs(4096, 32, 32, 8, 14336, 128256, rope_scaling=RopeScaling()),
    "70B": LlamaArgs(8192, 80, 64, 8, 28672, 128256, rope_scaling=RopeScaling()),
    "405B": LlamaArgs(16384, 126, 128, 8, 53248, 128256, rope_scaling=RopeScaling()),
}
