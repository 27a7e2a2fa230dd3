"""A model's Hugging Face twin: config.json both ways, and where values lie."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from titanlite.config import Model
from titanlite.models import FAMILIES, HF_TYPES, get_args, get_family, get_hf
from titanlite.models.hf import args_from, config_from
from titanlite.models.hf_weights import Twin
from titanlite.models.layers import LinearScaling, NTKScaling, RopeScaling, YarnScaling
from titanlite.utils import ConfigError

LLAMA = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 61, "max_position_embeddings": 64,
}  # fmt: skip
QWEN3_MOE = LLAMA | {"model_type": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
GPT_OSS = LLAMA | {"model_type": "gpt_oss", "num_local_experts": 6, "num_experts_per_tok": 2}


def folder_of(tmp_path, config) -> Model:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return Model(name="hf", hf_assets_path=str(tmp_path))


def as_read_again(args, hf):
    return args_from(config_from(args, hf), hf, Path("config.json"))


@pytest.mark.parametrize("name", FAMILIES)
def test_every_flavor_is_the_same_after_config_json(name):
    for flavor in get_family(Model(name=name)).FLAVORS:
        cfg = Model(name=name, flavor=flavor)
        args, free = get_args(cfg), {"head_dim": None}
        if args.moe:  # what config.json of some families does not hold
            free["moe"] = dataclasses.replace(args.moe, balance_loss=0.0)
        again = as_read_again(args, get_hf(cfg))
        assert again.head_width == args.head_width or args.latent
        changed = {"head_dim": None} | ({"moe": dataclasses.replace(again.moe, balance_loss=0.0)} if again.moe else {})
        assert dataclasses.replace(again, **changed) == dataclasses.replace(args, **free), flavor


def test_every_family_can_be_told_from_config_json():
    assert set(HF_TYPES.values()) == FAMILIES.keys()


@pytest.mark.parametrize("scaling", [None, LinearScaling(4.0), RopeScaling(4.0, 2.0, 3.0, 1024), YarnScaling(4.0, 1024, 16.0, 2.0, truncate=False)])
def test_rotary_scalings_are_the_same_after_config_json(scaling):
    args = dataclasses.replace(get_args(Model()), rope_scaling=scaling)
    assert as_read_again(args, get_hf(Model())).rope_scaling == scaling


def test_a_rotary_scaling_that_config_json_lacks_is_refused():
    with pytest.raises(ConfigError, match="NTKScaling.*config.json has no such rotary scaling"):
        config_from(dataclasses.replace(get_args(Model()), rope_scaling=NTKScaling(2.0)), get_hf(Model()))


def test_sizes_come_from_config_json_and_the_configuration_overrides_them(tmp_path):
    old = {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "attention_bias": True}
    cfg = folder_of(tmp_path, LLAMA | old)
    args = get_args(cfg)
    assert (args.dim, args.n_layers, args.n_kv_heads, args.rope_theta, args.rope_scaling, args.norm_eps) == (32, 2, 2, 5e5, LinearScaling(2.0), 1e-5)
    assert args.tie_embeddings and args.qkv_bias and args.out_bias
    assert get_family(cfg) is get_family(Model(name="llama3"))
    assert get_args(dataclasses.replace(cfg, rope_theta=1e6, rope_scaling="none")).rope_scaling is None
    new = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}}
    assert get_args(folder_of(tmp_path, LLAMA | new)).rope_scaling == LinearScaling(2.0)


@pytest.mark.parametrize(
    "config, message",
    [
        (LLAMA | {"model_type": "mamba"}, "model_type='mamba' is not supported: expected one of llama, deepseek_v2, qwen2"),
        (LLAMA | {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported: expected 'silu'"),
        (LLAMA | {"mlp_bias": True}, "mlp_bias=True is not supported: expected False"),
        (LLAMA | {"attention_dropout": 0.1}, "attention_dropout=0.1 is not supported: expected 0"),
        (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported: expected 1"),
        (LLAMA | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type='dynamic' is not supported: expected 'default', 'linear'"),
        (LLAMA | {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}}, "rope_type='longrope' is not supported"),
        (LLAMA | {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling of type 'llama3' has no low_freq_factor"),
        (LLAMA | {"rope_scaling": {"rope_type": "linear", "factor": 8.0, "power": 2}}, r"rope_scaling of type 'linear'=\{'power': 2\} is not supported"),
        (LLAMA | {"rope_scaling": {"rope_type": "yarn", "factor": 8.0, "attention_factor": 3.0}}, "attention_factor=3.0 is not supported: expected .*1.2079"),
        (LLAMA | {"quantization_config": {"quant_method": "fp8"}}, "quantization_config='fp8' is not supported: .*dequantise them first"),
        ({**LLAMA, "hidden_size": None}, "config.json has no hidden_size"),
        (LLAMA | {"vocab_size": "many"}, "vocab_size='many': expected a number"),
        (LLAMA | {"tie_word_embeddings": 1}, "tie_word_embeddings=1: expected true or false"),
        (LLAMA | {"model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window=True is not supported: expected False"),
        (QWEN3_MOE | {"decoder_sparse_step": 2}, "decoder_sparse_step=2 is not supported: expected 1"),
        (QWEN3_MOE | {"mlp_only_layers": [0]}, r"mlp_only_layers=\[0\] is not supported"),
        (QWEN3_MOE | {"num_experts_per_tok": 7}, "top_k=7: a token cannot choose so many of n_experts=6"),
        (GPT_OSS | {"layer_types": ["full_attention", "full_attention"]}, "layer_types=.* is not supported: expected .*sliding_attention"),
        (GPT_OSS | {"swiglu_alpha": 1.5}, "swiglu_alpha=1.5 is not supported: expected 1.702"),
    ],
)
def test_what_config_json_asks_for_and_is_not_supported_is_an_error_by_name(config, message, tmp_path):
    with pytest.raises(ConfigError, match=message) as error:
        get_args(folder_of(tmp_path, config))
    assert "config.json" in str(error.value) and error.value.keys == ("model.hf_assets_path",)


@pytest.mark.parametrize("text, message", [("{", "config.json is not JSON"), ("[]", "config.json names no model_type"), (None, "config.json: No such file")])
def test_a_config_json_that_is_none_is_the_users_mistake(text, message, tmp_path):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        get_args(Model(name="hf", hf_assets_path=str(tmp_path)))


def test_a_model_of_hugging_face_needs_a_folder():
    with pytest.raises(ConfigError, match="model.name='hf' needs model.hf_assets_path"):
        get_args(Model(name="hf"))


TWINS = {
    "whole": (Twin("x"), [6, 4]),
    "turned heads": (Twin("x", head=4, turned=4), [12, 3]),
    "heads that turn in part": (Twin("x", head=6, turned=4), [12, 3]),
    "a bias of heads": (Twin("x", head=4, turned=4), [8]),
    "one of three, head by head": (Twin("x", head=4, lane=1, lanes=3), [8, 3]),
    "an expert": (Twin("x", expert=2), [4, 3, 5]),
    "by turns, transposed": (Twin("x", lane=1, lanes=2, transposed=True), [2, 3, 4]),
}


@pytest.mark.parametrize("name", TWINS)
def test_any_part_of_a_tensor_is_read_from_its_box_as_from_the_whole(name):
    twin, shape = TWINS[name]
    theirs = torch.arange(torch.Size(twin.shape(shape)).numel()).view(twin.shape(shape))
    ours = torch.full(shape, -1)
    for part, values in twin.pairs(ours, theirs):
        part.copy_(values)
    back = torch.full_like(theirs, -1)
    for part, values in twin.pairs(ours, back):
        values.copy_(part)
    assert torch.equal(back[back >= 0], theirs[back >= 0]) and (back >= 0).sum() == (ours >= 0).sum() > 0
    for rows in ([a, b] for a in range(shape[0]) for b in range(a + 1, shape[0] + 1)):
        start, size = [rows[0], *(1 for _ in shape[1:])], [rows[1] - rows[0], *(n - 1 for n in shape[1:])]
        cut = tuple(slice(s, s + n) for s, n in zip(start, size))
        if (box := twin.box(start, size)) is None:
            assert not (ours[cut] >= 0).any()
            continue
        found = theirs[tuple(slice(s, s + n) for s, n in zip(*box))]
        part = torch.full([len(found) // twin.lanes, *size[1:]] if twin.head else size, -1)
        for mine, values in twin.pairs(part, found, start[0]):
            mine.copy_(values)
        assert torch.equal(part[start[0] % twin.head :][: size[0]] if twin.head else part, ours[cut])
