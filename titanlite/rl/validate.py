"""What reinforcement cannot do, told before anything is started. No torch: a launcher asks, too."""

import math

from titanlite.config import Config
from titanlite.utils import ConfigError

_AT_LEAST = {
    "group_size": 1, "prompts_per_step": 1, "max_new_tokens": 1, "n_slots": 1, "minibatches": 1, "warm_up_steps": 0, "warm_up_lr_scale": 0,
    "most_refills": 0, "most_barren_steps": 0, "advantage_eps": 0, "overlong_buffer_tokens": 0, "critic_lr": 0, "critic_warm_up_steps": 0,
    "value_clip": 0, "clip_low": 0, "clip_high": 0, "dual_clip": 1, "kl_coef": 0, "kl_reward_coef": 0, "rollout_low": 0, "rollout_high": 0,
    "off_policy_kl": 0, "validation_problems": 0, "validation_freq": 1, "reward_workers": 1, "reward_memory_gb": 0,
}  # fmt: skip

# A key of a layout of the trainer, its value without that, and why reinforcement does not go with it: "" where it does.
LAYOUTS = {
    "parallelism.data_parallel_shard_degree": (-1, ""),
    "parallelism.data_parallel_replicate_degree": (1, ""),
    "parallelism.data_parallel_sharding": ("zero3", ""),
    "parallelism.tensor_parallel_degree": (1, ""),
    "parallelism.context_parallel_degree": (1, ""),
    "parallelism.pipeline_parallel_degree": (1, ""),
    "parallelism.expert_parallel_degree": (1, ""),
    "parallelism.expert_tensor_parallel_degree": (1, ""),
    "training.loss_chunk_tokens": (0, "it makes no logprobs of single tokens"),
    "model.mtp_depth": (None, "tokens further ahead than the next one have no rewards"),
}


def validate_rl(cfg: Config) -> None:
    """Raises ConfigError where reinforcement cannot do what is asked, whatever the number of ranks."""
    rl = cfg.rl
    for name, least in _AT_LEAST.items():
        value = getattr(rl, name)
        if value is not None and not value >= least:  # NaN is not
            raise ConfigError(f"rl.{name}={value}: must be at least {least}", f"rl.{name}")
    for name in ("temperature", "reward_timeout_s"):
        if not 0 < getattr(rl, name) < math.inf:
            raise ConfigError(f"rl.{name}={getattr(rl, name)}: must be above 0, and finite", f"rl.{name}")
    for name in ("gamma", "gae_lambda"):
        if not 0 <= getattr(rl, name) <= 1:
            raise ConfigError(f"rl.{name}={getattr(rl, name)}: must be in [0, 1]", f"rl.{name}")
    for name, whole in (("top_p", (1.0,)), ("top_k", (0, -1))):
        if getattr(rl, name) not in whole:
            raise ConfigError(
                f"rl.{name}={getattr(rl, name)}: training samples are drawn from the whole distribution, whose logprobs the trainer computes: of a cut "
                f"one they are others, ratios would be wrong and what is cut off never learnt; use {whole[0]}, and rl.temperature",
                f"rl.{name}",
            )
    for key, (without, why_not) in LAYOUTS.items():
        section, name = key.split(".")
        value = getattr(getattr(cfg, section), name)
        if why_not and value not in (without, 0):
            raise ConfigError(f"{key}={value}: not in reinforcement, {why_not}: {'leave it out' if without is None else f'use {without}'}", key)
    if rl.max_new_tokens >= cfg.training.seq_len:
        raise ConfigError(
            f"rl.max_new_tokens={rl.max_new_tokens} must be below training.seq_len={cfg.training.seq_len}: a row holds a prompt and its sample",
            "rl.max_new_tokens",
            "training.seq_len",
        )
    if rl.overlong_buffer_tokens > rl.max_new_tokens:
        raise ConfigError(
            f"rl.overlong_buffer_tokens={rl.overlong_buffer_tokens} are the last of rl.max_new_tokens={rl.max_new_tokens}: use at most so many",
            "rl.overlong_buffer_tokens",
            "rl.max_new_tokens",
        )
    if rl.rollout_low > rl.rollout_high:
        raise ConfigError(f"rl.rollout_low={rl.rollout_low} must be at most rl.rollout_high={rl.rollout_high}", "rl.rollout_low", "rl.rollout_high")
    if rl.prompts_per_step < rl.minibatches:
        raise ConfigError(f"rl.minibatches={rl.minibatches} share rl.prompts_per_step={rl.prompts_per_step} groups: use fewer", "rl.minibatches")
    _check_advantages(cfg)


def _check_advantages(cfg: Config) -> None:
    rl = cfg.rl
    if rl.advantage != "gae" and rl.baseline == "none" and rl.deviation != "none":
        raise ConfigError(
            f"rl.deviation={rl.deviation!r} divides rewards by their group's spread, which may be 0, and rl.baseline='none' leaves them as they are: "
            "use rl.deviation='none', or a baseline",
            "rl.deviation",
            "rl.baseline",
        )
    if rl.group_size == 1 and (rl.dynamic_sampling or rl.advantage != "gae" and rl.baseline != "none"):
        what = "rl.dynamic_sampling=true" if rl.dynamic_sampling else f"rl.baseline={rl.baseline!r}"
        raise ConfigError(f"rl.group_size=1 has nothing to compare with ({what}): use 2 or more", "rl.group_size", "rl.baseline", "rl.dynamic_sampling")
    if rl.overlong_filter and rl.advantage == "group" and rl.kl_reward != "none":
        raise ConfigError(
            f"rl.kl_reward={rl.kl_reward!r} counts in a group's rewards, also of samples that rl.overlong_filter leaves out, whose divergence is not "
            "computed: use rl.kl_loss, or rl.overlong_filter=false",
            "rl.kl_reward",
            "rl.overlong_filter",
        )
