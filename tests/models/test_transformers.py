"""Every family computes what `transformers` computes: logits and gradients of tiny random models, in fp64."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from titanlite.batch import Batch
from titanlite.checkpoint.hf_folder import tensor_maker
from titanlite.checkpoint.state import model_state
from titanlite.config import Model
from titanlite.losses import cross_entropy
from titanlite.models import FAMILIES, get_model
from titanlite.models.decoder import Decoder, DecoderArgs
from titanlite.models.layers import LatentArgs, LinearScaling, NTKScaling, RopeScaling, YarnScaling
from titanlite.models.moe import MoEArgs

SIZES = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
ARGS = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "hidden_dim": 48, "vocab_size": 61}
LLAMA3_SCALING = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e4}
LATENT = {
    "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "num_key_value_heads": 4, "n_routed_experts": 8,
    "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_shared_experts": 2, "n_group": 4, "topk_group": 2, "num_mtp_layers": 0,
    "first_k_dense_replace": 1, "routed_scaling_factor": 2.5, "max_position_embeddings": 64,
}  # fmt: skip
V2 = {key: value for key, value in LATENT.items() if key != "num_mtp_layers"} | {"topk_method": "group_limited_greedy", "norm_topk_prob": False}
SIGMOID = MoEArgs(8, 3, 24, 2, score="sigmoid", scale=2.5, n_groups=4, top_groups=2, bias_speed=0.001)


def LONG(scaling):
    return DecoderArgs(**ARGS, rope_theta=1e4, norm_eps=1e-6, rope_scaling=scaling)


# name -> (class of transformers, its configuration, ours)
MODELS = {
    "llama": ("Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}, DecoderArgs(**ARGS, rope_theta=10000.0, norm_eps=1e-6)),
    "llama, long": (
        "Llama",
        {"rope_parameters": LLAMA3_SCALING | {"rope_theta": 10000.0}, "max_position_embeddings": 64},
        DecoderArgs(**ARGS, rope_theta=10000.0, norm_eps=1e-6, rope_scaling=RopeScaling(factor=4.0, original_max_position=16)),
    ),
    "qwen2": (
        "Qwen2",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rms_norm_eps": 1e-6},
        DecoderArgs(**ARGS, rope_theta=1e6, norm_eps=1e-6, qkv_bias=True),
    ),
    "qwen3": (
        "Qwen3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rms_norm_eps": 1e-6, "head_dim": 16, "tie_word_embeddings": True},
        DecoderArgs(**ARGS, rope_theta=1e6, norm_eps=1e-6, head_dim=16, qk_norm=True, tie_embeddings=True),
    ),
    "llama, linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}, LONG(LinearScaling(4.0))),
    "llama, ntk": (  # theirs follows the length, 32 tokens here: 4 * 32 / 16 - (4 - 1)
        "Llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}, "max_position_embeddings": 16},
        LONG(NTKScaling(5.0)),
    ),
    "llama, yarn": ("Llama", {"rope_parameters": YARN}, LONG(YarnScaling(4.0, 16))),
    "qwen3_moe": (
        "Qwen3Moe",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rms_norm_eps": 1e-6, "head_dim": 16, "num_experts": 6,
         "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True},
        DecoderArgs(**ARGS, rope_theta=1e6, norm_eps=1e-6, head_dim=16, qk_norm=True, moe=MoEArgs(6, 2, 24)),
    ),
    "deepseek_v3": (
        "DeepseekV3",
        LATENT | {"q_lora_rank": 24, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        DecoderArgs(**ARGS, rope_theta=1e4, norm_eps=1e-6, latent=LatentArgs(24, 16, 8, 4, 6), moe=SIGMOID, n_dense_layers=1),
    ),
    "deepseek_v3, long": (
        "DeepseekV3",
        LATENT | {"q_lora_rank": None, "rope_parameters": YARN | {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0}},
        DecoderArgs(
            **ARGS, rope_theta=1e4, norm_eps=1e-6, latent=LatentArgs(None, 16, 8, 4, 6), moe=SIGMOID, n_dense_layers=1,
            rope_scaling=YarnScaling(40.0, 16, grows=False),
        ),
    ),
    "deepseek_v3, of version 2": (
        "DeepseekV2",
        V2 | {"q_lora_rank": 24, "rope_parameters": YARN | {"factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.707}},
        DecoderArgs(
            **ARGS, rope_theta=1e4, norm_eps=1e-6, latent=LatentArgs(24, 16, 8, 4, 6), n_dense_layers=1,
            moe=MoEArgs(8, 3, 24, 2, normalize=False, scale=2.5, n_groups=4, top_groups=2, judges=1),
            rope_scaling=YarnScaling(40.0, 16, mscale=0.707, grows=False),
        ),
    ),
    "minimax": (
        "MiniMax",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 2,
         "intermediate_size": 24, "num_hidden_layers": 3, "block_size": 8, "router_jitter_noise": 0.0,
         "layer_types": ["linear_attention", "linear_attention", "full_attention"],
         **{f"{kind}_alpha_factor": 2.5 for kind in ("linear_attn", "full_attn", "mlp")},
         **{f"{kind}_beta_factor": 1.0 for kind in ("linear_attn", "full_attn", "mlp")}},
        DecoderArgs(
            **ARGS | {"n_layers": 3}, head_dim=16, rope_theta=1e4, norm_eps=1e-5, full_attention_every=3, residual_scale=2.5, moe=MoEArgs(6, 2, 24)
        ),
    ),
    "gpt_oss": (
        "GptOss",
        {"rope_parameters": YARN | {"truncate": False}, "head_dim": 8, "num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 5,
         "intermediate_size": 24, "layer_types": ["sliding_attention", "full_attention"], "max_position_embeddings": 64},
        DecoderArgs(
            **ARGS, head_dim=8, rope_theta=1e4, rope_scaling=YarnScaling(4.0, 16, truncate=False), qkv_bias=True, out_bias=True, window=5,
            sinks=True, moe=MoEArgs(6, 2, 24, bias=True, clamp=7.0),
        ),
    ),
}  # fmt: skip

def as_ours(theirs, folder: Path) -> dict[str, Tensor]:
    """What transformers saves of its model, by our names."""
    theirs.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_bytes())
    if config["rope_parameters"]["rope_type"] == "dynamic":  # which we cannot be asked for
        (folder / "config.json").write_text(json.dumps(config | {"rope_parameters": None}))
    cfg = Model(name="hf", hf_assets_path=str(folder))
    state = {key: torch.empty_like(tensor, device="cpu") for key, tensor in model_state([get_model(cfg, torch.float64)]).items()}
    make = tensor_maker(cfg, folder, state)
    for key, tensor in state.items():
        make(key, tensor)
    return {key.removeprefix("model."): tensor for key, tensor in state.items()}


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_are_those_of_transformers(name, tmp_path):
    import transformers

    kind, sizes, args = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES | sizes, attn_implementation="eager", experts_implementation="eager")
    theirs = getattr(transformers, f"{kind}ForCausalLM")(config).double()
    with torch.no_grad():
        for tensor in (*theirs.parameters(), *(b for name, b in theirs.named_buffers() if name.endswith("bias"))):
            tensor.add_(torch.randn_like(tensor), alpha=0.1)  # norms and biases at their start would hide much
    ours = Decoder(args).double()
    for module in ours.modules():
        if hasattr(module, "init_buffers"):
            module.init_buffers(torch.device("cpu"))
    ours.load_state_dict(as_ours(theirs, tmp_path), strict=not args.tie_embeddings)
    tokens = torch.randint(0, 61, (3, 33))
    batch = Batch(tokens[:, :-1], tokens[:, 1:], torch.arange(32).expand(3, 32), None)
    expected = theirs(input_ids=batch.tokens).logits
    logits = ours(batch.tokens, batch.positions)
    # fp64 but for their rotary angles, which are fp32 tables.
    torch.testing.assert_close(logits, expected, rtol=0, atol=2e-5)
    cross_entropy(logits, batch).backward()
    cross_entropy(expected, batch).backward()
    for parameter in theirs.parameters():
        parameter.data = parameter.grad
    gradients = as_ours(theirs, tmp_path)
    for n, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[n], rtol=0, atol=2e-5 * gradients[n].abs().max().item(), msg=n)


def test_every_family_is_compared():
    compared = {name.split(",")[0] for name in MODELS}
    assert {package.rsplit(".", 1)[1] for package in FAMILIES.values()} == compared
