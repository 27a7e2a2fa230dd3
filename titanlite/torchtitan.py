"""What a key of torchtitan v0.2.2 is called here, or why it is missing: its TOML files run as they are where nothing they ask for is. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

DEFAULTS_THAT_DIFFER: dict[str, tuple[Any, Any, str]] = {  # key -> (torchtitan's, ours, why)
    "metrics.enable_tensorboard": (False, True, "curves are there when they are wanted"),
    "model.hf_assets_path": ("./tests/assets/tokenizer", None, "without assets tokens are bytes"),
    "training.dataset": ("c4_test", "stdlib", "Python's own library is on every machine"),
    "validation.dataset": ("c4_validation", "stdlib_heldout", "the same"),
    "checkpoint.last_save_model_only": (True, False, "a finished run can be prolonged"),
    "debug.seed": (None, 0, "two runs of one file are the same run"),
    "job.description": ("default job", "", "nothing was said"),
    "parallelism.pipeline_parallel_schedule_csv": ("", None, "the same"),
}


@dataclass(frozen=True)
class Lacking:
    default: Any  # torchtitan's
    why: str  # it is not here, or what is here instead
    only_with: str = ""  # a key without which it means nothing there either
    harmless: bool = False  # whatever its value


_SECTION_OF_ITS_OWN = "a run here is configured by the sections that it reads; fork, or set model.name to an import path of your own"
_RECORDER = "PyTorch's flight recorder is set by its own environment variables, TORCH_FR_BUFFER_SIZE and TORCH_FR_DUMP_TEMP_FILE"
_FLOAT8 = "linear layers are not converted to float8"
_FT = "replicas that come and go are not supported; checkpoints are elastic: resume on another number of ranks"
_RECOMPUTE = "recompute is none, full, every N-th block or by operator"

LACKING: dict[str, Lacking] = {
    "job.config_file": Lacking(None, "the file is the command's first argument"),
    "job.save_config_file": Lacking(None, "every run keeps config.toml in its folder", harmless=True),
    "job.custom_config_module": Lacking("", _SECTION_OF_ITS_OWN),
    "metrics.disable_color_printing": Lacking(False, "nothing is printed in colours", harmless=True),
    "metrics.save_for_all_ranks": Lacking(False, "metrics are of the whole job; each rank has a log of its own"),
    "metrics.enable_wandb": Lacking(False, "metrics go to metrics.jsonl and TensorBoard files; Weights & Biases reads the latter (wandb sync)"),
    "model.converters": Lacking([], _FLOAT8),
    "model.print_after_conversion": Lacking(False, _FLOAT8, harmless=True),
    "optimizer.early_step_in_backward": Lacking(False, "the step is refused as a whole where a gradient is not finite, so it comes after backward"),
    "training.gc_debug": Lacking(False, "collections are not debugged"),
    "training.dataloader.persistent_workers": Lacking(False, "workers live as long as the run", harmless=True),
    "parallelism.disable_loss_parallel": Lacking(False, "logits stay split over the vocabulary under tensor parallel"),
    "parallelism.pipeline_parallel_expert_parallel_overlap": Lacking(True, "DualPipeV does not overlap experts' communication", harmless=True),
    "checkpoint.enable_ft_dataloader_checkpoints": Lacking(True, _FT, only_with="fault_tolerance.enable"),
    "checkpoint.initial_load_model_only": Lacking(True, "a run goes on with everything under its own job.name; initial_load_path gives weights"),
    "checkpoint.initial_load_in_hf_quantized": Lacking(False, "quantised weights are not read"),
    "checkpoint.enable_first_step_checkpoint": Lacking(False, "checkpoint.interval = 1 saves the first step, too"),
    "checkpoint.create_seed_checkpoint": Lacking(False, "every layout starts from the same weights without one"),
    "checkpoint.load_only": Lacking(False, "checkpoint.initial_load_path reads without saving over it; checkpoint.enable = false saves nothing"),
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": Lacking(["moe.router.gate"], _RECOMPUTE),
    "activation_checkpoint.early_stop": Lacking(False, _RECOMPUTE),
    "activation_checkpoint.memory_budget": Lacking(0.5, _RECOMPUTE),
    "activation_checkpoint.visualize_memory_budget_pareto": Lacking(False, _RECOMPUTE),
    "activation_checkpoint.preserve_rng_state": Lacking(True, "no block draws random numbers", harmless=True),
    "activation_checkpoint.determinism_check": Lacking("default", _RECOMPUTE),
    "activation_checkpoint.debug": Lacking(False, _RECOMPUTE),
    "quantize.linear.float8.enable_fsdp_float8_all_gather": Lacking(False, _FLOAT8, only_with="model.converters"),
    "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp": Lacking(False, _FLOAT8, only_with="model.converters"),
    "quantize.linear.float8.recipe_name": Lacking(None, _FLOAT8, only_with="model.converters"),
    "quantize.linear.float8.filter_fqns": Lacking([], _FLOAT8, only_with="model.converters"),
    "quantize.linear.float8.emulate": Lacking(False, _FLOAT8, only_with="model.converters"),
    "quantize.linear.mx.mxfp8_dim1_cast_kernel_choice": Lacking("triton", _FLOAT8, only_with="model.converters"),
    "quantize.linear.mx.recipe_name": Lacking("mxfp8_cublas", _FLOAT8, only_with="model.converters"),
    "quantize.linear.mx.filter_fqns": Lacking(["output"], _FLOAT8, only_with="model.converters"),
    "quantize.grouped_mm.float8.fqns": Lacking([], _FLOAT8, only_with="model.converters"),
    "quantize.grouped_mm.mx.recipe_name": Lacking("mxfp8", _FLOAT8, only_with="model.converters"),
    "quantize.grouped_mm.mx.fqns": Lacking([], _FLOAT8, only_with="model.converters"),
    "comm.trace_buf_size": Lacking(20000, _RECORDER),
    "comm.save_traces_folder": Lacking("comm_traces", _RECORDER),
    "comm.save_traces_file_prefix": Lacking("rank_", _RECORDER),
    "comm.mode": Lacking("default", "benchmarks/scale.py runs one rank of many on a fake process group"),
    "memory_estimation.enable": Lacking(False, "memory is not estimated"),
    "memory_estimation.disable_fake_mode": Lacking(False, "memory is not estimated", only_with="memory_estimation.enable"),
    "fault_tolerance.enable": Lacking(False, _FT),
    "fault_tolerance.process_group": Lacking("gloo", _FT, only_with="fault_tolerance.enable"),
    "fault_tolerance.process_group_timeout_ms": Lacking(10000, _FT, only_with="fault_tolerance.enable"),
    "fault_tolerance.replica_id": Lacking(0, _FT, only_with="fault_tolerance.enable"),
    "fault_tolerance.group_size": Lacking(0, _FT, only_with="fault_tolerance.enable"),
    "fault_tolerance.min_replica_size": Lacking(1, _FT, only_with="fault_tolerance.enable"),
    "fault_tolerance.semi_sync_method": Lacking(None, _FT, only_with="fault_tolerance.enable"),
    "experimental.custom_import": Lacking("", _SECTION_OF_ITS_OWN),
    "experimental.custom_args_module": Lacking("", _SECTION_OF_ITS_OWN),
    "validation.dataloader.num_workers": Lacking(0, "validation reads in the training process"),
    "validation.dataloader.persistent_workers": Lacking(False, "validation reads in the training process", harmless=True),
    "validation.dataloader.pin_memory": Lacking(False, "validation reads in the training process", harmless=True),
    "validation.dataloader.prefetch_factor": Lacking(None, "validation reads in the training process", harmless=True),
    "debug.deterministic_warn_only": Lacking(False, "debug.deterministic stops at an operation that is not"),
}

# key -> (ours, theirs -> ours where values have other names)
RENAMED: dict[str, tuple[str, dict[Any, Any]]] = {
    "model.tokenizer_path": ("model.hf_assets_path", {}),
    "parallelism.context_parallel_rotate_method": ("parallelism.context_parallel_method", {"allgather": "allgather", "alltoall": "ring"}),
}

SECTIONS = {key[:dot] for key in (*LACKING, *RENAMED) for dot in range(len(key)) if key[dot] == "."}


def is_missed(key: str, value: Any, table: Mapping[str, Any]) -> bool:
    """Whether a key of LACKING asks for something; `table` holds what the file sets, dotted."""
    lacking = LACKING[key]
    if lacking.harmless or value == lacking.default:
        return False
    return not lacking.only_with or bool(table.get(lacking.only_with, LACKING[lacking.only_with].default))
