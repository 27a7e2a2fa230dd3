"""gpt-oss's Hugging Face twin."""

from typing import Any

from titanlite.models.decoder import DecoderArgs
from titanlite.models.hf import REQUIRED, SIZES, HFFamily
from titanlite.models.hf_weights import Twin, decoder_twins, split_name

# The experts of gate and up by turns in one tensor, and all weights transposed.
EXPERTS = {
    "w1": ("gate_up_proj", 0, 2, True), "w3": ("gate_up_proj", 1, 2, True), "w2": ("down_proj", 0, 1, True),
    "b1": ("gate_up_proj_bias", 0, 2, False), "b3": ("gate_up_proj_bias", 1, 2, False), "b2": ("down_proj_bias", 0, 1, False),
}  # fmt: skip


def twins(name: str, args: DecoderArgs) -> list[Twin]:
    layer, module, leaf = split_name(name)
    if module.startswith("moe.experts."):
        theirs, lane, lanes, transposed = EXPERTS[module.removeprefix("moe.experts.")]
        return [Twin(f"{layer}mlp.experts.{theirs}", lane=lane, lanes=lanes, transposed=transposed)]
    if module == "moe.router.gate":
        return [Twin(f"{layer}mlp.router.{leaf}")]
    if module == "attention.sink":
        return [Twin(f"{layer}self_attn.sinks")]
    return decoder_twins(name, args)


def _written(args: DecoderArgs) -> dict[str, Any]:
    return {"layer_types": [("sliding_attention", "full_attention")[i % 2] for i in range(args.n_layers)]}


HF = (
    HFFamily(
        "gpt_oss",
        "GptOssForCausalLM",
        {name: key for name, key in SIZES.items() if name != "hidden_dim"} | {"window": ("sliding_window", 128)},
        moe={
            "n_experts": ("num_local_experts", REQUIRED),
            "top_k": ("num_experts_per_tok", REQUIRED),
            "hidden_dim": ("intermediate_size", REQUIRED),
            "clamp": ("swiglu_limit", 7.0),
            "balance_loss": ("router_aux_loss_coef", 0.001),
        },
        fixed={"hidden_dim": 0, "qkv_bias": True, "out_bias": True, "sinks": True},
        fixed_moe={"bias": True},
        only={"attention_bias": True, "swiglu_alpha": 1.702},
        written=_written,
        rope_theta=150000.0,
        twins=twins,
    ),
)
