"""A model's Hugging Face twin: sizes in config.json, both ways, and the names its weights have there.

A family says what differs in its own `hf.py`, as an HFFamily. Whatever config.json asks for and a family has not is an error by name.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titanlite.models.decoder import DecoderArgs
from titanlite.models.hf_weights import Twin, decoder_twins
from titanlite.models.layers import LatentArgs, LinearScaling, RopeScaling, Scaling, YarnScaling
from titanlite.models.moe import MoEArgs
from titanlite.utils import ConfigError

REQUIRED = object()  # in place of a value for a key that config.json leaves out
Names = Mapping[str, tuple[str, Any]]  # our name -> (its key in config.json, what its absence there means)

SIZES: Names = {
    "dim": ("hidden_size", REQUIRED),
    "n_layers": ("num_hidden_layers", REQUIRED),
    "n_heads": ("num_attention_heads", REQUIRED),
    "n_kv_heads": ("num_key_value_heads", None),
    "hidden_dim": ("intermediate_size", REQUIRED),
    "vocab_size": ("vocab_size", REQUIRED),
    "head_dim": ("head_dim", None),
    "norm_eps": ("rms_norm_eps", 1e-6),
    "tie_embeddings": ("tie_word_embeddings", False),
}
BIASES: Names = {"qkv_bias": ("attention_bias", False), "out_bias": ("attention_bias", False)}
FULL_ATTENTION = {"use_sliding_window": False}
# Of no consequence for what is computed here.
UNUSED = {
    "_name_or_path", "architectures", "attention_dropout", "auto_map", "aux_loss_alpha", "block_size", "bos_token_id", "dtype", "eos_token_id",
    "ep_size", "head_dim", "hidden_act", "initializer_range", "layer_types", "max_position_embeddings", "max_window_layers", "model_type",
    "num_key_value_heads", "num_local_experts", "num_mtp_layers", "num_nextn_predict_layers", "output_router_logits", "pad_token_id",
    "pretraining_tp", "qk_head_dim", "rope_parameters", "rope_scaling", "rope_theta", "router_aux_loss_coef", "seq_aux", "sliding_window",
    "torch_dtype", "transformers_version", "use_cache",
}  # fmt: skip


@dataclass(frozen=True)
class HFFamily:
    """What a family is called there, and which keys of config.json hold which of its sizes."""

    model_type: str
    architecture: str
    sizes: Names
    moe: Names = field(default_factory=dict)
    latent: Names = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)  # our sizes that this family's config.json does not hold
    fixed_moe: Mapping[str, Any] = field(default_factory=dict)
    only: Mapping[str, Any] = field(default_factory=dict)  # key of config.json -> the one value that is supported
    derived: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda config: {}  # our sizes that no one key of config.json holds
    also: Callable[[DecoderArgs], dict[str, Any]] = lambda args: {}  # further keys of config.json, which are not read
    written: Callable[[DecoderArgs], dict[str, Any]] = lambda args: {}  # further keys, which are checked when read
    rope_theta: float = 10000.0  # where config.json has none
    twins: Callable[[str, DecoderArgs], list[Twin]] = decoder_twins
    fits: Callable[[DecoderArgs], bool] = lambda args: True  # where a family has several twins: whether these sizes are of this one


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a Hugging Face folder."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}: a Hugging Face folder has one", "model.hf_assets_path") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}", "model.hf_assets_path") from error
    if not isinstance(config, dict) or "model_type" not in config:
        raise ConfigError(f"{path} names no model_type", "model.hf_assets_path")
    return config


def args_from(config: Mapping[str, Any], family: HFFamily, path: Path) -> DecoderArgs:
    """The sizes that config.json, which `path` names in messages, gives. Raises ConfigError where it asks for what is not supported."""
    if quantization := config.get("quantization_config"):
        method = quantization.get("quant_method", quantization) if isinstance(quantization, dict) else quantization
        _refuse(path, "quantization_config", method, "weights that are not quantised: dequantise them first, to bfloat16 say")
    for key, value in {"hidden_act": "silu", "attention_dropout": 0, "partial_rotary_factor": 1, **family.only}.items():
        if key in config and config[key] != value:
            _refuse(path, key, config[key], repr(value))
    sizes = _read(config, family.sizes, path) | dict(family.fixed) | family.derived(config)
    sizes["n_kv_heads"] = sizes.get("n_kv_heads") or sizes["n_heads"]
    try:
        if family.moe:
            sizes["moe"] = MoEArgs(**_read(config, family.moe, path), **family.fixed_moe)
        if family.latent:
            sizes["latent"] = LatentArgs(**_read(config, family.latent, path))
        args = DecoderArgs(**sizes, **_read_rope(config, family, path))
    except (AssertionError, TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path}: {error}", "model.hf_assets_path") from error
    for key, value in family.written(args).items():
        if config.get(key, value) != value:
            _refuse(path, key, config[key], repr(value))
    return args


def unused_keys(config: Mapping[str, Any], family: HFFamily, args: DecoderArgs) -> list[str]:
    """Keys of config.json that nothing here reads or knows to be of no consequence."""
    known = {key for names in (family.sizes, family.moe, family.latent) for key, _ in names.values()}
    return sorted(config.keys() - known - UNUSED - family.only.keys() - family.written(args).keys())


def config_from(args: DecoderArgs, family: HFFamily) -> dict[str, Any]:
    """config.json of a model of these sizes."""
    config = {"architectures": [family.architecture], "model_type": family.model_type, "hidden_act": "silu", "attention_dropout": 0.0}
    for names, ours in ((family.sizes, args), (family.moe, args.moe), (family.latent, args.latent)):
        for name, (key, _) in names.items():
            config[key] = getattr(ours, name)
    config["head_dim"] = args.head_width if args.latent is None else args.latent.rope_dim
    scaling = _write_scaling(args.rope_scaling)
    config |= {"rope_theta": args.rope_theta, "rope_scaling": scaling}
    return config | family.also(args) | dict(family.only) | family.written(args)


def _read(config: Mapping[str, Any], names: Names, path: Path) -> dict[str, Any]:
    found = {}
    for ours, (key, absent) in names.items():
        # transformers writes the number of experts under either name.
        value = config.get(key, config.get("num_local_experts") if key == "num_experts" else None)
        found[ours] = absent if value is None else value
        if found[ours] is REQUIRED:
            raise ConfigError(f"{path} has no {key}", "model.hf_assets_path")
        wanted = type(absent) if type(absent) in (bool, float, int) else int
        given = found[ours]
        if given is not None and type(given) is not wanted and not (wanted is float and type(given) is int):
            raise ConfigError(f"{path}: {key}={given!r}: expected {'true or false' if wanted is bool else 'a number'}", "model.hf_assets_path")
    return found


def _read_rope(config: Mapping[str, Any], family: HFFamily, path: Path) -> dict[str, Any]:
    """rope_theta and rope_scaling, as config.json of any age holds them."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = float(rope.pop("rope_theta", config.get("rope_theta") or family.rope_theta))
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    rope.pop("type", None)
    if rope.pop("partial_rotary_factor", 1) != 1:
        _refuse(path, "partial_rotary_factor", config.get("rope_parameters"), "1")
    original = rope.pop("original_max_position_embeddings", None) or config.get("max_position_embeddings")
    if kind == "default":
        return {"rope_theta": theta, "rope_scaling": None}
    try:
        if kind == "linear":
            scaling: Scaling = LinearScaling(float(rope.pop("factor")))
        elif kind == "llama3":
            scaling = RopeScaling(*(float(rope.pop(key)) for key in ("factor", "low_freq_factor", "high_freq_factor")), original)
        elif kind == "yarn":
            scaling = _read_yarn(rope, original, family, path)
        else:
            _refuse(path, "rope_type", kind, "'default', 'linear', 'llama3' or 'yarn'")
    except KeyError as error:
        raise ConfigError(f"{path}: rope_scaling of type {kind!r} has no {error.args[0]}", "model.hf_assets_path") from error
    if rope:
        _refuse(path, f"rope_scaling of type {kind!r}", rope, "no such key")
    return {"rope_theta": theta, "rope_scaling": scaling}


def _read_yarn(rope: dict[str, Any], original: int, family: HFFamily, path: Path) -> YarnScaling:
    """Takes what it reads out of `rope`. DeepSeek's files ask for larger scores (mscale) where others ask for longer vectors."""
    mscale = 1.0
    if family.latent:
        mscale, other = (float(rope.pop(key, 0)) for key in ("mscale_all_dim", "mscale"))
        if not mscale or mscale != other:
            _refuse(path, "rope_scaling.mscale_all_dim", mscale, f"mscale={other}, and not 0")
    scaling = YarnScaling(
        float(rope.pop("factor")), original, float(rope.pop("beta_fast", 32)), float(rope.pop("beta_slow", 1)), rope.pop("truncate", True),
        mscale=mscale, grows=not family.latent,
    )  # fmt: skip
    given = rope.pop("attention_factor", None)
    if given is not None and (family.latent or not math.isclose(given, scaling.magnitude, rel_tol=1e-6)):
        _refuse(path, "rope_scaling.attention_factor", given, f"0.1 ln(factor) + 1 = {scaling.magnitude:.6g}")
    return scaling


def _write_scaling(scaling: Scaling | None) -> dict[str, Any] | None:
    match scaling:
        case None:
            return None
        case LinearScaling():
            return {"rope_type": "linear", "factor": scaling.factor}
        case RopeScaling():
            written = dataclasses.asdict(scaling)
            written.pop("magnitude")
            return {"rope_type": "llama3", "original_max_position_embeddings": written.pop("original_max_position"), **written}
        case YarnScaling():
            written = {"rope_type": "yarn", "factor": scaling.factor, "original_max_position_embeddings": scaling.original_max_position}
            written |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow, "truncate": scaling.truncate}
            return written if scaling.grows else written | {"mscale": scaling.mscale, "mscale_all_dim": scaling.mscale}
    raise ConfigError(f"{scaling}: config.json has no such rotary scaling: only the run itself can go on with it", "model.name", "model.flavor")


def _refuse(path: Path, key: str, value: Any, supported: str) -> None:
    raise ConfigError(f"{path}: {key}={value!r} is not supported: expected {supported}", "model.hf_assets_path")
