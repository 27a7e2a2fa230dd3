"""torchtitan v0.2.2's keys, which titanlite answers by name: taken, renamed, of no effect, or refused with the reason."""

from pathlib import Path

import pytest

from titanlite.cli import main
from titanlite.config import KEYS, Config, Model, load_config, to_dict
from titanlite.models import get_args, get_family
from titanlite.torchtitan import DEFAULTS_THAT_DIFFER, LACKING, RENAMED
from titanlite.utils import ConfigError

# As a file of theirs for a model of experts: whatever stands at their defaults, and what means nothing without its switch.
THEIRS = """
[job]
dump_folder = "./outputs"
print_config = false

[profiling]
enable_profiling = true
save_traces_folder = "profile_trace"
profile_freq = 100

[metrics]
disable_color_printing = false
enable_wandb = false

[model]
name = "qwen3"
flavor = "30B-A3B"
converters = []

[parallelism]
context_parallel_rotate_method = "alltoall"
pipeline_parallel_schedule_csv = ""

[checkpoint]
export_dtype = "float16"

[quantize.linear.float8]
filter_fqns = ["output", "router.gate"]

[quantize.grouped_mm.float8]
fqns = ["experts"]
"""


@pytest.fixture
def theirs(tmp_path):
    def write(text: str):
        (tmp_path / "theirs.toml").write_text(text)
        return tmp_path / "theirs.toml"

    return write


def test_a_file_of_theirs_is_read_as_it_is(theirs):
    cfg, origins = load_config(theirs(THEIRS))
    assert (cfg.profiling.profile_freq, cfg.checkpoint.export_dtype, cfg.parallelism.context_parallel_method) == (100, "float16", "ring")
    assert get_family(cfg.model).__name__ == "titanlite.models.qwen3_moe" and get_args(cfg.model).moe.n_experts == 128
    assert origins["parallelism.context_parallel_method"].endswith(":21 (parallelism.context_parallel_rotate_method)")
    assert origins.keys() - KEYS == {
        "metrics.disable_color_printing", "metrics.enable_wandb", "model.converters", "quantize.linear.float8.filter_fqns", "quantize.grouped_mm.float8.fqns",
    }  # fmt: skip


@pytest.mark.parametrize(
    "line, message",
    [
        ("[metrics]\nenable_wandb = true", "theirs.toml:2: metrics.enable_wandb = True: titanlite has no such key: metrics go to metrics.jsonl"),
        ("[quantize.linear.float8]\nfilter_fqns = ['x']\n[model]\nconverters = ['float8']", "quantize.linear.float8.filter_fqns = .'x'.: .*: linear layers are not converted to float8"),
        ("[fault_tolerance]\nenable = true", "fault_tolerance.enable = True: titanlite has no such key: replicas"),
        ("[parallelism]\ncontext_parallel_rotate_method = 'broadcast'", "'broadcast': here parallelism.context_parallel_method, of torchtitan's values"),
        ("[metrics]\nenable_wandbb = true", "unknown key 'metrics.enable_wandbb'"),
        ("[quantizee]\nx = 1", r"unknown section \[quantizee\]"),
    ],
)
def test_what_a_file_asks_for_and_is_missing_is_refused_with_the_reason(theirs, line, message):
    with pytest.raises(ConfigError, match=message):
        load_config(theirs(line))


def test_every_key_of_a_file_is_answered(theirs, capsys):
    assert main(["config", "--from-torchtitan", str(theirs(THEIRS))]) == 0
    printed = capsys.readouterr().out
    assert "is parallelism.context_parallel_method = 'ring'" in printed
    assert "metrics.enable_wandb = False" in printed and "has no effect" in printed and printed.endswith("it runs as it is\n")
    assert "debug.seed, not set" in printed and "default here 0, there None" in printed

    assert main(["config", "--from-torchtitan", str(theirs("[metrics]\nenable_wandb = true\nlogfreq = 3\n[optimizer]\nname = 'Muon'\n"))]) == 2
    printed = capsys.readouterr().out.splitlines()
    assert "MISSING metrics go to" in printed[0] and "MISSING neither torchtitan v0.2.2 nor titanlite has this key" in printed[1]
    assert "MISSING expected" in printed[2] and printed[-1] == "3 of these ask for what is missing here"


def test_their_names_are_never_ours_too():
    assert not (LACKING.keys() | RENAMED.keys()) & KEYS.keys()
    assert {ours for ours, _ in RENAMED.values()} <= KEYS.keys()


def test_defaults_that_differ_are_listed_as_they_are():
    ours = to_dict(Config())
    assert {key: value for key, (_, value, _) in DEFAULTS_THAT_DIFFER.items()} == {key: ours[key] for key in DEFAULTS_THAT_DIFFER}
    text = Path("docs/from-torchtitan.md").read_text()
    assert [key for key in (*DEFAULTS_THAT_DIFFER, *LACKING, *RENAMED) if f"`{key}`" not in text] == []


@pytest.mark.parametrize("name, flavor", [("qwen3", "debugmodel_moe"), ("qwen3", "235B-A22B"), ("gpt_oss", "20b"), ("deepseek_v3", "16B"), ("llama3", "405B")])
def test_flavors_have_their_names(name, flavor):
    assert get_args(Model(name=name, flavor=flavor)).n_layers > 0
