"""Every key a TOML file may hold, with its default; loading, command-line overrides, and where each value came from.

The names are torchtitan v0.2.2's where the thing is the same. Precedence: defaults < `extends` < file < command line.
"""

import contextlib
import dataclasses
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

from titanlite.config_file import expected, read_toml
from titanlite.utils import ConfigError, is_utf8, nearest


@dataclass(frozen=True)
class Job:
    name: str = ""  # the run's name; empty: the TOML file's stem
    dump_folder: str = "./outputs"  # runs are kept here; the run's folder is dump_folder/name
    description: str = ""  # free text, kept with the run
    print_config: bool = False  # print the resolved configuration at the start


@dataclass(frozen=True)
class Model:
    name: str = "llama3"  # a family under titanlite/models, an import path `my_pkg.my_family`, or hf: what hf_assets_path's config.json says
    flavor: str = "debugmodel"  # a size of that family; not used with name = "hf"
    vocab_size: int | None = None  # None: the flavor's own, or of a debug model as many as a Hugging Face tokenizer has
    tie_embeddings: bool | None = None  # share tok_embeddings.weight with output.weight; None: as the flavor says
    attention: Literal["sdpa", "flex"] | None = None  # flex: CUDA only, for documents and context parallel at long sequences; None: sdpa
    rope_theta: float | None = None  # base of the rotary frequencies; None: the flavor's own, as below
    rope_scaling: Literal["none", "linear", "ntk", "yarn", "llama3"] | None = None  # how they are stretched for a longer context
    rope_scaling_factor: float | None = None  # by how much
    rope_original_seq_len: int | None = None  # the context that the model was trained on, which yarn and llama3 start from
    mtp_depth: int | None = None  # tokens beyond the next one that are predicted in training too; None: as the flavor says, 0
    moe_capacity_factor: float | None = None  # rows an expert takes of a rank's microbatch, over an even share; None: no token is dropped
    tokenizer: Literal["byte", "bpe", "hf"] | None = None  # bpe: trained on the run's data; None: hf if there are assets, else byte
    hf_assets_path: str | None = None  # a Hugging Face folder: its tokenizer.json is used, and config.json with name = "hf"


    @property
    def title(self) -> str:
        """What messages call it."""
        return str(self.hf_assets_path) if self.name == "hf" else f"{self.name} {self.flavor}"


@dataclass(frozen=True)
class Optimizer:
    name: Literal["AdamW"] = "AdamW"
    lr: float = 8e-4  # the highest learning rate
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    implementation: Literal["for-loop", "foreach", "fused"] = "fused"


@dataclass(frozen=True)
class LRScheduler:
    warmup_steps: int = 200  # steps of linear warm-up
    total_steps: int | None = None  # steps the schedule spans; None: training.steps
    decay_ratio: float | None = None  # last share of the steps that decays (the rest is stable); None: all after warm-up
    decay_type: Literal["linear", "sqrt", "cosine"] = "linear"
    min_lr_factor: float = 0.0  # the rate at the end, as a share of optimizer.lr


DataFormat = Literal["stdlib", "stdlib_heldout", "text", "jsonl", "parquet", "hf", "hf_stream", "megatron", "tokens", "c4", "c4_test", "c4_validation"]


@dataclass(frozen=True)
class DataSource:
    format: DataFormat
    path: str | None = None  # a file, folder, glob or URL; for hf and hf_stream a folder or a name on the Hub; for megatron the files' common prefix
    weight: float = 1.0  # its share of rows, relative to the others'
    text_key: str = "text"  # the key or column that holds the text
    split: str = "train"  # of a Hugging Face dataset
    subset: str | None = None  # of a dataset on the Hub, its configuration's name

    @property
    def is_stream(self) -> bool:
        return self.format == "hf_stream" or self.format in ("c4", "c4_validation") and self.path is None


@dataclass(frozen=True)
class Data:
    sources: tuple[DataSource, ...] = ()  # [[data.sources]], to mix several; empty: training.dataset alone
    packing: Literal["split", "best_fit"] = "split"  # documents go on in the next row; best_fit: only those longer than a row are cut
    epochs: int | None = None  # the run ends when the data were read so often, or at training.steps; None: only then


@dataclass(frozen=True)
class DataLoader:
    num_workers: int = 0  # processes that read and tokenize; 0: the training process itself
    pin_memory: bool = False
    prefetch_factor: int | None = None  # steps each worker prepares ahead; None: 2


@dataclass(frozen=True)
class Training:
    dataset: DataFormat = "stdlib"  # Python's standard library, or a format; [[data.sources]] instead for more than one
    dataset_path: str | None = None  # as data.sources has it
    text_key: str = "text"  # the key or column that holds the text
    skip_bad_records: bool = False  # count and skip records that cannot be read, instead of stopping
    local_batch_size: int = 8  # rows a rank takes through the model at once
    global_batch_size: int = -1  # rows a step over all ranks; -1: local_batch_size * data-parallel degree
    seq_len: int = 2048  # tokens a row
    loss_chunk_tokens: int = 0  # logits of so many tokens exist at once, in the loss only; 0: of all
    mtp_loss_weight: float = 0.3  # of the tokens that model.mtp_depth adds, in the gradient; the logged loss is of next tokens
    max_norm: float = 1.0  # gradients are scaled down to this global norm; 0: not at all
    steps: int = 10000
    enable_cpu_offload: bool = False  # keep sharded parameters, gradients and optimizer state in CPU memory
    dtype: Literal["bfloat16", "float32", "float64"] = "float32"  # of the parameters the optimizer holds
    mixed_precision_param: Literal["bfloat16", "float32", "float64"] = "bfloat16"  # of the forward and backward pass
    mixed_precision_reduce: Literal["float32"] = "float32"  # of gradient reduction
    gc_freq: int = 50  # steps between garbage collections (automatic ones are off)
    dataloader: DataLoader = field(default_factory=DataLoader)


@dataclass(frozen=True)
class Parallelism:
    data_parallel_replicate_degree: int = 1  # copies of the model; with shard degree > 1 this is HSDP
    data_parallel_shard_degree: int = -1  # FSDP2 shards; -1: all ranks that are left
    data_parallel_sharding: Literal["zero1", "zero2", "zero3"] = "zero3"  # shards optimizer state; + gradients; + parameters
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"  # default: always with zero3, else never
    tensor_parallel_degree: int = 1
    enable_async_tensor_parallel: bool = False  # CUDA with compile: overlap tensor parallel's communication
    pipeline_parallel_degree: int = 1
    pipeline_parallel_schedule: Literal[
        "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
    ] = "1F1B"  # GPipe and 1F1B have one stage a rank, the last two have two, the others two or more
    pipeline_parallel_schedule_csv: str | None = None  # a file that says what each rank does, instead of a named schedule
    pipeline_parallel_microbatch_size: int = 1  # rows; a step's rows are run in microbatches of so many
    pipeline_parallel_layers_per_stage: int | None = None  # decides the number of stages; None: one or two a rank
    pipeline_parallel_first_stage_less_layers: int = 1  # blocks that the embedding stands for
    pipeline_parallel_last_stage_less_layers: int = 1  # blocks that the head stands for
    module_fqns_per_model_part: tuple[tuple[str, ...], ...] | None = None  # the modules of each stage by name, instead of by counts
    pipeline_parallel_force_recompute: bool = False  # recompute under schedules that split backward, where it costs several times its usual
    context_parallel_degree: int = 1
    context_parallel_method: Literal["allgather", "ring", "ulysses"] = "allgather"  # keys are gathered, go round, or sequence is traded for heads
    context_parallel_load_balancer: Literal["headtail", "none"] = "headtail"  # a piece from either end for each rank; none: one piece
    expert_parallel_degree: int = 1
    expert_tensor_parallel_degree: int = 1
    expert_parallel_comm_backend: Literal["standard", "deepep"] = "standard"  # how tokens travel; deepep: an extra for CUDA, not verified


@dataclass(frozen=True)
class ActivationCheckpoint:
    mode: Literal["none", "full", "selective"] = "selective"
    selective_ac_option: str = "2"  # "op": keep the dear operators' results; N: every N-th block is recomputed


@dataclass(frozen=True)
class Compile:
    enable: bool = False  # compile each block, and the loss
    components: tuple[Literal["model", "loss"], ...] = ("model", "loss")
    backend: str = "inductor"


@dataclass(frozen=True)
class Checkpoint:
    enable: bool = False
    folder: str = "checkpoint"  # inside the run's folder; or a URL that fsspec knows, s3://bucket/runs say, and job.name in it
    interval: int = 500  # steps between saves; the last step is always saved
    keep_latest_k: int = 10  # older ones are deleted; 0: keep all
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"  # written by a thread; by a process of its own
    max_failed_saves: int = 3  # saves in a row; one more stops the run
    exclude_from_loading: tuple[str, ...] = ()  # what keeps its initial values: "optimizer", "model.output", patterns of keys, "data", "rng"
    load_step: int = -1  # goes back to this step, later ones are moved into abandoned/; -1: the newest
    last_save_model_only: bool = False  # the last save leaves out what is needed to go on training
    initial_load_path: str | None = None  # weights that a new run starts from: a checkpoint's folder .../step-N; see initial_load_in_hf
    initial_load_in_hf: bool = False  # initial_load_path is a Hugging Face folder; without it model.hf_assets_path is
    last_save_in_hf: bool = False  # the last step is also exported, as a Hugging Face folder hf/step-N in the run's folder
    export_dtype: Literal["float16", "bfloat16", "float32"] = "float32"  # of weights in a Hugging Face folder


@dataclass(frozen=True)
class Validation:
    enable: bool = False
    dataset: DataFormat = "stdlib_heldout"
    dataset_path: str | None = None
    local_batch_size: int = 8
    seq_len: int = 2048
    freq: int = 10  # steps between validations; the last step is always validated
    steps: int = -1  # batches a validation; -1: the whole data set


@dataclass(frozen=True)
class Metrics:
    log_freq: int = 10  # steps between log lines
    enable_tensorboard: bool = True
    save_tb_folder: str = "tb"  # inside the run's folder


@dataclass(frozen=True)
class RL:
    task: str = "arithmetic"  # one of titanlite.rl.tasks, reasoning_gym:NAME, or an import path my_pkg.my_tasks:MyTask
    task_options: tuple[str, ...] = ()  # "name=value" each, for the task
    chat: bool = False  # a prompt is a user's message: it is put by the chat template of model.hf_assets_path
    group_size: int = 8  # samples of a prompt
    prompts_per_step: int = 16
    max_new_tokens: int = 16  # of a sample, all its turns together
    n_slots: int = 64  # samples that a rank draws together
    minibatches: int = 1  # optimizer steps that a step's samples are dealt out to
    validation_problems: int = 0  # held-out problems, answered greedily every validation_freq steps, at the start and at the end; 0: none
    validation_freq: int = 10
    warm_up_steps: int = 0  # steps on the task's demonstrations before, of training.steps
    warm_up_lr_scale: float = 1.0  # their learning rate, over optimizer.lr's
    reward_timeout_s: float = 10.0  # after it a reward has failed
    reward_workers: int = 1  # processes of a rank that make rewards
    reward_memory_gb: float = 8.0  # that such a process may hold; 0: no limit
    dynamic_sampling: bool = False  # groups whose samples all got the same reward are replaced
    most_refills: int = 10  # rounds of replacing, before a step goes on with what it has
    most_barren_steps: int = 10  # steps in a row without anything to learn from; one more stops the run
    advantage: Literal["group", "returns", "gae"] = "group"  # a sample's in its group; a token's rewards to come, REINFORCE++; PPO's, with a critic
    baseline: Literal["none", "mean", "leave_one_out"] = "mean"  # what rewards are compared with in their group; not with gae
    deviation: Literal["none", "population", "sample"] = "population"  # what they are divided by; none: Dr. GRPO
    advantage_eps: float = 1e-6
    whiten: bool = False  # advantages over all tokens of a step, REINFORCE++
    gamma: float = 1.0  # what a reward is worth a token earlier, in returns and gae
    gae_lambda: float = 0.95  # 1: what comes is measured, 0: the critic's forecast of it
    critic_lr: float = 1e-5  # the critic's highest learning rate; the rest is the policy's
    critic_warm_up_steps: int = 0  # steps of reinforcement in which only the critic learns
    value_clip: float = 0.2  # how far a forecast may gain by moving in a step; inf: without bounds
    aggregation: Literal["token", "sequence", "constant"] = "token"  # how tokens' losses make one; constant: over max_new_tokens
    overlong_buffer_tokens: int = 0  # the last tokens before max_new_tokens, over which a sample loses up to 1; 0: it loses nothing
    overlong_filter: bool = False  # samples that were cut are not trained on
    temperature: float = 1.0  # of sampling, and so of every logprob
    top_p: float = 1.0  # cuts no tokens off, and must not: the trainer's logprobs are of whole distributions
    top_k: int = 0  # as top_p
    policy_loss: Literal["ppo", "gspo", "gspo_token", "cispo", "reinforce"] = "ppo"
    clip_low: float = 0.2  # ratios below 1 - this, and above 1 + clip_high, are clipped
    clip_high: float = 0.2
    dual_clip: float | None = None  # a bad sample's ratio counts as this at most
    kl_loss: Literal["none", "k2", "k3", "k3_weighted"] = "none"  # a penalty for leaving the reference; k3 is GRPO's
    kl_coef: float = 0.001
    kl_reward: Literal["none", "k1", "k2", "k3"] = "none"  # the same in each token's reward
    kl_reward_coef: float = 0.001
    entropy_coef: float = 0.0  # of a bonus for entropy
    rollout_correction: Literal["none", "truncate", "mask"] = "none"  # of generator and trainer not being the same
    rollout_correction_of: Literal["token", "sequence"] = "token"
    rollout_low: float = 0.5  # ratios of trainer to generator below it are masked
    rollout_high: float = 2.0  # above it truncated or masked
    off_policy_kl: float | None = None  # bad samples that drifted further, in nats a token, are left out


@dataclass(frozen=True)
class Profiling:
    enable_profiling: bool = False  # traces of some steps by torch.profiler, for Perfetto or chrome://tracing
    save_traces_folder: str = "profile_traces"  # inside the run's folder
    profile_freq: int = 10  # steps between traces
    profiler_active: int = 1  # steps in a trace
    profiler_warmup: int = 3  # steps before it that the profiler runs without keeping anything
    enable_memory_snapshot: bool = False  # of CUDA memory, every profile_freq steps and where it runs out
    save_memory_snapshot_folder: str = "memory_snapshot"


@dataclass(frozen=True)
class Comm:
    init_timeout_seconds: int = 300  # for a collective until the first step has ended
    train_timeout_seconds: int = 100  # after it


@dataclass(frozen=True)
class Debug:
    seed: int = 0  # initial weights, order of samples
    deterministic: bool = False  # deterministic kernels only
    moe_force_load_balance: bool = False  # every expert gets as many tokens, whatever the router says: for measurements


@dataclass(frozen=True)
class Config:
    job: Job = field(default_factory=Job)
    model: Model = field(default_factory=Model)
    optimizer: Optimizer = field(default_factory=Optimizer)
    lr_scheduler: LRScheduler = field(default_factory=LRScheduler)
    data: Data = field(default_factory=Data)
    training: Training = field(default_factory=Training)
    parallelism: Parallelism = field(default_factory=Parallelism)
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    compile: Compile = field(default_factory=Compile)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    validation: Validation = field(default_factory=Validation)
    metrics: Metrics = field(default_factory=Metrics)
    rl: RL = field(default_factory=RL)
    profiling: Profiling = field(default_factory=Profiling)
    comm: Comm = field(default_factory=Comm)
    debug: Debug = field(default_factory=Debug)


def training_sources(cfg: Config) -> tuple[DataSource, ...]:
    """`data.sources`, or the one that `training.dataset` is short for."""
    t = cfg.training
    return cfg.data.sources or (DataSource(t.dataset, t.dataset_path, text_key=t.text_key),)


class Help(Exception):
    """`--help` was among the overrides: its text."""


# Dotted key -> "file:line" or "the command line"; a key not in it stands at its default, one not in KEYS is torchtitan's and has no effect.
Origins = Mapping[str, str]


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> tuple[Config, Origins]:
    """The configuration of a TOML file with dotted command-line `overrides` on top, and where each value came from.

    Raises ConfigError for a missing file, a syntax error, an unknown key, a wrong type or a value that is not allowed.
    """
    path = Path(path)
    found = read_toml(path, KEYS, SECTIONS)
    cfg = Config()
    for key, (value, _) in found.items():
        if key in KEYS:
            cfg = _replace(cfg, key, value)
    origins = {key: origin for key, (_, origin) in found.items()}
    if overrides:
        cfg, given = _apply_overrides(cfg, overrides)
        origins |= dict.fromkeys(given, "the command line")
    if not cfg.job.name:
        cfg = _replace(cfg, "job.name", path.stem)
        origins["job.name"] = f"the name of {path}"
    for key, value in to_dict(cfg).items():
        if isinstance(value, str) and not is_utf8(value):
            raise ConfigError(f"{origins[key]}: {key} = {value!r}: not UTF-8")
    return cfg, origins


def defaults_help() -> str:
    """Every key with its default, as `--help` shows it."""
    try:
        _parse(Config(), ["--help"])
    except Help as text:
        return str(text)
    raise AssertionError("--help gave no text")


def to_dict(cfg: Config) -> dict[str, Any]:
    """Dotted key -> value, in the order of declaration."""
    return {key: _get(cfg, key) for key in KEYS}


def override(cfg: Config, values: Mapping[str, Any]) -> Config:
    """`cfg` with the given dotted keys changed."""
    for key, value in values.items():
        assert key in KEYS, key
        cfg = _replace(cfg, key, value)
    return cfg


def to_toml(cfg: Config) -> str:
    """A TOML file that gives this configuration again, whatever the defaults become (None has no TOML form: left out)."""
    lines, section = [], None
    for key, value in to_dict(cfg).items():
        prefix, name = key.rsplit(".", 1)
        if value is None:
            continue
        if prefix != section:
            section = prefix
            lines += ["", f"[{section}]"]
        lines.append(f"{name} = {_as_toml(value)}")
    return "\n".join(lines[1:]) + "\n"


def _as_toml(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_as_toml, value))}]"
    if dataclasses.is_dataclass(value):
        return f"{{{', '.join(f'{k} = {_as_toml(v)}' for k, v in vars(value).items() if v is not None)}}}"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # JSON has it raw, TOML has not


def _leaves(cls: type, prefix: str = "") -> dict[str, Any]:
    leaves = {}
    for name, kind in get_type_hints(cls).items():
        leaves |= _leaves(kind, f"{prefix}{name}.") if dataclasses.is_dataclass(kind) else {prefix + name: kind}
    return leaves


KEYS: dict[str, Any] = _leaves(Config)  # dotted key -> type
SECTIONS = {key[:dot] for key in KEYS for dot in range(len(key)) if key[dot] == "."}


def _get(cfg: Any, key: str) -> Any:
    for name in key.split("."):
        cfg = getattr(cfg, name)
    return cfg


def _replace(cfg: Any, key: str, value: Any) -> Any:
    name, _, rest = key.partition(".")
    return dataclasses.replace(cfg, **{name: _replace(getattr(cfg, name), rest, value) if rest else value})


def _apply_overrides(cfg: Config, overrides: Sequence[str]) -> tuple[Config, set[str]]:
    """`--section.key value` on top of `cfg`, parsed by tyro; also `--section.flag`, `--section.no-flag`, `--section.flag true`."""
    given: dict[str, tuple[str, list[str]]] = {}  # key -> the option as it was written, its values; the last one counts
    key = None
    for word in overrides:
        if word in ("-h", "--help"):
            _parse(cfg, ["--help"])
        elif word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            key = _normal(name)
            if key.startswith("data.sources"):
                raise ConfigError(f"--{name}: sources are listed in a TOML file, as [[data.sources]]; for one there are --training.dataset and --training.dataset_path")
            if key not in KEYS:
                raise ConfigError(f"unknown option --{name}{nearest(key, KEYS)} (options are --section.key value)")
            given[key] = name, [value] if equals else []
        elif key is None:
            raise ConfigError(f"unexpected {word!r} (options are --section.key value)")
        else:
            given[key][1].append(word)
    options = {key: _option(key, name, values) for key, (name, values) in given.items()}
    try:
        return _parse(cfg, sum(options.values(), [])), set(given)
    except ConfigError:
        for key, (name, values) in given.items():
            written = " ".join([f"--{name}", *values])
            _parse(cfg, options[key], f"{written}: expected {expected(KEYS[key], values)}")
        raise


def _option(key: str, name: str, values: list[str]) -> list[str]:
    """The words that tyro understands."""
    if not _is_bool(key):
        return [f"--{key}={values[0]}"] if len(values) == 1 else [f"--{key}", *values]
    negated = _key(name) != key
    word = "false" if negated else " ".join(values or ["true"]).lower()
    optional = KEYS[key] is not bool
    if (negated and values) or word not in ("true", "false", *(["none"] if optional else [])):
        raise ConfigError(f"--{name} {' '.join(values)}: expected {'no value' if negated else 'true, false or no value'}")
    if optional:
        return [f"--{key}={word.capitalize()}"]
    head, _, last = key.rpartition(".")
    return [f"--{key}" if word == "true" else f"--{head}.no_{last}"]


def _parse(cfg: Config, args: list[str], problem: str = "") -> Config:
    """`cfg` with tyro's `args` on top. Raises Help where they ask for it, ConfigError of `problem` where they are wrong."""
    import tyro

    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            return tyro.cli(Config, default=cfg, args=args, use_underscores=True, prog="titanlite train CONFIG.toml")
    except SystemExit as e:
        if e.code in (0, None):
            raise Help(printed.getvalue()) from None
        raise ConfigError(problem or f"on the command line: {' '.join(args)}\n{printed.getvalue().rstrip()}") from None


def _key(name: str) -> str:
    return name.replace("-", "_")


def _normal(name: str) -> str:
    """The key an option names, `--checkpoint.no-enable` included."""
    key = _key(name)
    head, _, last = key.rpartition(".")
    positive = f"{head}.{last.removeprefix('no_')}"
    return positive if key not in KEYS and positive in KEYS and _is_bool(positive) else key


def _is_bool(key: str) -> bool:
    return bool in (KEYS[key], *get_args(KEYS[key]))
