"""Small random models of transformers, saved as it saves them."""

import json
import struct
from pathlib import Path

import torch

from tests.models.test_transformers import MODELS, SIZES

NAMES = [name for name in MODELS if "ntk" not in name]  # which no config.json here may ask for


def save_model(name: str, folder: Path, **sizes) -> Path:
    """Of more than one file each."""
    import transformers

    kind, own, _ = MODELS[name]
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES | own | sizes)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for tensor in (*model.parameters(), *(b for n, b in model.named_buffers() if n.endswith("correction_bias"))):
            tensor.add_(torch.randn_like(tensor), alpha=0.1)  # norms and biases at their start would hide much
    model.save_pretrained(folder, max_shard_size="60KB")
    return folder


def load_model(folder: Path):
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )


def read_header(path: Path) -> dict:
    data = path.read_bytes()
    return json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
