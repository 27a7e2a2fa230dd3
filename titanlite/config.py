"""Every key a TOML file may hold, with its default; loading, command-line overrides, and where each value came from.

The names are torchtitan v0.2.2's where the thing is the same. Precedence: defaults < `extends` < file < command line.
"""

import contextlib
import dataclasses
import io
import json
import re
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import tomli

from titanlite.utils import ConfigError, nearest


@dataclass(frozen=True)
class Job:
    name: str = ""  # the run's name; empty: the TOML file's stem
    dump_folder: str = "./outputs"  # runs are kept here; the run's folder is dump_folder/name
    description: str = ""  # free text, kept with the run
    print_config: bool = False  # print the resolved configuration at the start


@dataclass(frozen=True)
class Model:
    name: str = "llama3"  # a family under titanlite/models, or an import path `my_pkg.my_family`
    flavor: str = "debugmodel"  # a size of that family
    vocab_size: int | None = None  # None: the flavor's own
    tie_embeddings: bool | None = None  # share tok_embeddings.weight with output.weight; None: as the flavor says
    tokenizer: Literal["byte", "bpe", "hf"] | None = None  # bpe: trained on the run's data; None: hf if there are assets, else byte
    hf_assets_path: str | None = None  # a folder with tokenizer.json


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


@dataclass(frozen=True)
class DataLoader:
    num_workers: int = 0  # processes that read and tokenize; 0: the training process itself
    persistent_workers: bool = False  # unused workers are kept between passes (validation)
    pin_memory: bool = False
    prefetch_factor: int | None = None  # steps each worker prepares ahead; None: 2


@dataclass(frozen=True)
class Training:
    dataset: Literal["stdlib", "stdlib_heldout", "text", "jsonl"] = "stdlib"  # Python's standard library, text or JSONL files
    dataset_path: str | None = None  # a file, folder or glob for text and jsonl
    text_key: str = "text"  # the key of a JSONL record that holds the text
    skip_bad_records: bool = False  # count and skip records that cannot be read, instead of stopping
    local_batch_size: int = 8  # rows a rank takes through the model at once
    global_batch_size: int = -1  # rows a step over all ranks; -1: local_batch_size * data-parallel degree
    seq_len: int = 2048  # tokens a row
    max_norm: float = 1.0  # gradients are scaled down to this global norm; 0: not at all
    steps: int = 10000
    enable_cpu_offload: bool = False  # keep sharded parameters, gradients and optimizer state in CPU memory
    dtype: Literal["bfloat16", "float32", "float64"] = "float32"  # of the parameters the optimizer holds
    mixed_precision_param: Literal["bfloat16", "float32"] = "bfloat16"  # of the forward and backward pass
    mixed_precision_reduce: Literal["float32"] = "float32"  # of gradient reduction
    gc_freq: int = 50  # steps between garbage collections (automatic ones are off)
    dataloader: DataLoader = field(default_factory=DataLoader)


@dataclass(frozen=True)
class Parallelism:
    data_parallel_replicate_degree: int = 1  # copies of the model; with shard degree > 1 this is HSDP
    data_parallel_shard_degree: int = -1  # FSDP2 shards; -1: all ranks that are left
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"  # default: always
    tensor_parallel_degree: int = 1
    pipeline_parallel_degree: int = 1
    context_parallel_degree: int = 1
    expert_parallel_degree: int = 1
    expert_tensor_parallel_degree: int = 1


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
    folder: str = "checkpoint"  # inside the run's folder
    interval: int = 500  # steps between saves; the last step is always saved
    keep_latest_k: int = 10  # older ones are deleted; 0: keep all
    async_mode: Literal["disabled", "async"] = "disabled"  # async: written by a thread while training goes on
    load_step: int = -1  # -1: the newest
    last_save_model_only: bool = False  # the last save leaves out what is needed to go on training


@dataclass(frozen=True)
class Validation:
    enable: bool = False
    dataset: Literal["stdlib", "stdlib_heldout", "text", "jsonl"] = "stdlib_heldout"
    dataset_path: str | None = None
    local_batch_size: int = 8
    seq_len: int = 2048
    freq: int = 10  # steps between validations; the last step is always validated
    steps: int = -1  # batches a validation; -1: the whole data set
    dataloader: DataLoader = field(default_factory=DataLoader)


@dataclass(frozen=True)
class Metrics:
    log_freq: int = 10  # steps between log lines
    enable_tensorboard: bool = True
    save_tb_folder: str = "tb"  # inside the run's folder


@dataclass(frozen=True)
class Comm:
    init_timeout_seconds: int = 300  # for a collective until the first step has ended
    train_timeout_seconds: int = 100  # after it


@dataclass(frozen=True)
class Debug:
    seed: int = 0  # initial weights, order of samples
    deterministic: bool = False  # deterministic kernels only


@dataclass(frozen=True)
class Config:
    job: Job = field(default_factory=Job)
    model: Model = field(default_factory=Model)
    optimizer: Optimizer = field(default_factory=Optimizer)
    lr_scheduler: LRScheduler = field(default_factory=LRScheduler)
    training: Training = field(default_factory=Training)
    parallelism: Parallelism = field(default_factory=Parallelism)
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    compile: Compile = field(default_factory=Compile)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    validation: Validation = field(default_factory=Validation)
    metrics: Metrics = field(default_factory=Metrics)
    comm: Comm = field(default_factory=Comm)
    debug: Debug = field(default_factory=Debug)
