"""Weights of a Hugging Face folder in a new run, under any layout, and folders that are not what they should be."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import titanlite.resume
import titanlite.train
from tests.checkpoint.hf_models import read_header, save_model
from tests.runs import full
from titanlite.checkpoint.folder import list_steps
from titanlite.checkpoint.hf_folder import checked_tensors, load_hf, tensor_maker
from titanlite.checkpoint.state import model_state
from titanlite.checkpoint.store import load, save
from titanlite.cli import main
from titanlite.config import Config, Model, load_config, override
from titanlite.models import get_model, get_plan
from titanlite.parallel.parallelize import allocate
from titanlite.resume import load_initial
from titanlite.trainer import join, setup
from titanlite.utils import ConfigError
from titanlite.verify.gang import Gang

SMALL = (
    "[training]\nlocal_batch_size = 4\nseq_len = 32\nsteps = 2\n[activation_checkpoint]\nmode = 'none'\n[checkpoint]\ninitial_load_in_hf = true\n"
    "[metrics]\nenable_tensorboard = false\n"
)
# name -> (model, what it is changed by, keys under parallelism)
LAYOUTS = {
    "fsdp of heads cut anywhere": ("llama", {}, {"data_parallel_shard_degree": 4}),
    "fsdp and tensor parallel, tied": ("qwen3", {}, {"data_parallel_shard_degree": 2, "tensor_parallel_degree": 2}),
    "biases": ("qwen2", {}, {"data_parallel_shard_degree": 2, "tensor_parallel_degree": 2}),
    "heads that do not divide": ("llama", {"num_key_value_heads": 1}, {"data_parallel_shard_degree": 2, "tensor_parallel_degree": 2}),
    "stages, tied": ("qwen3", {"num_hidden_layers": 3}, {"pipeline_parallel_degree": 2, "data_parallel_shard_degree": 2}),
    "experts dealt out": ("qwen3_moe", {}, {"expert_parallel_degree": 2, "data_parallel_shard_degree": 4}),
    "experts cut": ("gpt_oss", {}, {"tensor_parallel_degree": 2, "expert_tensor_parallel_degree": 2, "data_parallel_shard_degree": 2}),
    "latents": ("deepseek_v3", {}, {"tensor_parallel_degree": 2, "expert_parallel_degree": 2, "data_parallel_shard_degree": 2}),
    "lightning": ("minimax", {}, {"tensor_parallel_degree": 2, "data_parallel_shard_degree": 2}),
}


@pytest.fixture(scope="module")
def gang():
    gang = Gang(4)
    yield gang
    gang.close()


def config_of(folder, tmp_path, **keys) -> Config:
    (tmp_path / "x.toml").write_text(SMALL)
    cfg = override(load_config(tmp_path / "x.toml")[0], {"model.name": "hf", "model.hf_assets_path": str(folder), "model.tokenizer": "byte"})
    return override(cfg, {f"parallelism.{key}": value for key, value in keys.items()})


def _loaded(cfg: Config) -> dict[str, np.ndarray]:
    run = setup(cfg, join(cfg))
    load_initial(run)
    return {name: full(tensor) for name, tensor in model_state(run.parts).items()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_folder_is_loaded_bit_for_bit_under_any_layout(layout, gang, tmp_path):
    name, sizes, keys = LAYOUTS[layout]
    cfg = config_of(save_model(name, tmp_path / "model", **sizes), tmp_path, **keys)
    found = {}
    for part in gang.run(_loaded, cfg):
        for key, whole in part.items():
            assert key not in found or np.array_equal(found[key], whole), key
            found[key] = whole
    state = model_state([whole_model(cfg.model, "meta")])
    make = tensor_maker(cfg.model, tmp_path / "model", state)
    assert found.keys() == state.keys()
    for key in state:
        alone = torch.empty(state[key].shape, dtype=state[key].dtype)
        make(key, alone)
        assert np.array_equal(found[key], alone.double().numpy()), key


def whole_model(cfg: Model, device: str):
    model = get_model(cfg, torch.float32)
    allocate(model, get_plan(cfg), torch.device(device))
    return model


def _train(cfg: Config) -> int:
    titanlite.resume.SHARD_BYTES = 20_000  # so that each rank has files to write
    return titanlite.train.train(cfg, {})


def test_a_folder_is_trained_and_the_last_step_exported_by_all_ranks(gang, tmp_path):
    """Under tensor and pipeline parallel, whose ranks hold parts; what they write is what one rank writes."""
    model = save_model("llama", tmp_path / "model", vocab_size=257)
    cfg = config_of(model, tmp_path, tensor_parallel_degree=2, pipeline_parallel_degree=2)
    settings = {"checkpoint.enable": True, "checkpoint.last_save_in_hf": True, "checkpoint.export_dtype": "bfloat16", "job.dump_folder": str(tmp_path)}
    cfg = override(cfg, settings)
    assert gang.run(_train, cfg) == [0] * 4
    folder = tmp_path / "x"
    assert list_steps(folder / "checkpoint") == [2]
    assert main(["export", str(folder), "-o", str(tmp_path / "one"), "--step", "2", "--max-shard-gb", "0.00002"]) == 0
    shared = folder / "hf" / "step-2"
    names = sorted(path.name for path in shared.iterdir())
    assert names == sorted(path.name for path in (tmp_path / "one").iterdir()) and len(names) > 6
    assert all((shared / name).read_bytes() == (tmp_path / "one" / name).read_bytes() for name in names)
    before, after = ({n: t for path in folder.glob("*.safetensors") for n, t in load_file(path).items()} for folder in (model, shared))
    assert after["lm_head.weight"].dtype == torch.bfloat16 and not torch.equal(before["lm_head.weight"].bfloat16(), after["lm_head.weight"])


def test_a_run_begins_with_the_weights_of_another_runs_step(gang, tmp_path):
    model = save_model("llama", tmp_path / "model")
    assert main(["import", str(model), str(tmp_path / "first")]) == 0
    cfg = config_of(model, tmp_path)
    path = str(tmp_path / "first" / "checkpoint" / "step-0")
    other = override(cfg, {"checkpoint.initial_load_in_hf": False, "checkpoint.initial_load_path": path})
    (first, *_), (second, *_) = gang.run(_loaded, cfg), gang.run(_loaded, other)
    assert first.keys() == second.keys() and all(np.array_equal(first[key], second[key]) for key in first)


def test_a_step_is_made_in_the_memory_of_its_largest_tensor(tmp_path):
    state = {f"model.{i}": torch.empty(n, 3, dtype=dtype, device="meta") for i, (n, dtype) in enumerate([(2, torch.float32), (5, torch.bfloat16), (3, torch.float32)])}
    places = {}

    def make(key: str, tensor: Tensor) -> None:
        places[key] = tensor.data_ptr()
        tensor.fill_(float(key[-1]))

    save(tmp_path, 0, state, extra={}, keep_latest_k=0, make=make)
    assert len(set(places.values())) == 1 and places.keys() == state.keys()
    loaded = {key: torch.empty_like(tensor, device="cpu") for key, tensor in state.items()}
    load(tmp_path, 0, loaded)  # which compares fingerprints
    assert all((tensor == float(key[-1])).all() for key, tensor in loaded.items())


@pytest.fixture
def folder(tmp_path):
    return save_model("llama", tmp_path / "model")


def first_file(folder):
    return min(folder.glob("*.safetensors"))


def _lose_a_shard(folder):
    first_file(folder).unlink()


def _cut_a_shard(folder):
    first_file(folder).write_bytes(first_file(folder).read_bytes()[:-5])


def _lengthen_a_shard(folder):
    first_file(folder).write_bytes(first_file(folder).read_bytes() + b"12345")


def _cut_a_header(folder):
    first_file(folder).write_bytes(first_file(folder).read_bytes()[:20])


def _no_header(folder):
    first_file(folder).write_bytes(b"\x04\x00\x00\x00\x00\x00\x00\x00{{{{")


def _no_weights(folder):
    for path in folder.glob("model*"):
        path.unlink()


def _no_index(folder):
    (folder / "model.safetensors.index.json").write_text("[]")


def _change(name, change):
    def damage(folder):
        for path in folder.glob("*.safetensors"):
            tensors = load_file(path)
            if name in tensors:
                new = change(tensors.pop(name))
                save_file(tensors | ({} if new is None else {name: new}), path)

    return damage


def _add(folder):
    tensors = load_file(first_file(folder))
    save_file(tensors | {"model.layers.0.self_attn.extra.weight": torch.zeros(3)}, first_file(folder))


def _more_layers(folder):
    tensors = load_file(first_file(folder))
    save_file(tensors | {"model.layers.2.input_layernorm.weight": torch.zeros(32)}, first_file(folder))


DAMAGE = {
    "lost shard": (_lose_a_shard, "model-00001-of-0000..safetensors: No such file or directory: model.safetensors.index.json names it"),
    "cut shard": (_cut_a_shard, r"has \d+ bytes instead of \d+: it is cut"),
    "long shard": (_lengthen_a_shard, r"has \d+ bytes instead of \d+: not as it was written"),
    "cut header": (_cut_a_header, "is not a safetensors file, or cut: it has 20 bytes"),
    "no header": (_no_header, "is not a safetensors file"),
    "no weights": (_no_weights, "model.safetensors: No such file or directory: a Hugging Face folder has it, or model.safetensors.index.json"),
    "no index": (_no_index, "is not an index of safetensors"),
    "another shape": (_change("model.norm.weight", lambda t: t[:-1].clone()), r"model.norm.weight has shape \[31\] instead of \[32\]"),
    "transposed": (_change("model.layers.1.mlp.up_proj.weight", lambda t: t.T.contiguous()), r"up_proj.weight has shape \[32, 48\] instead of \[48, 32\]"),
    "lost tensor": (_change("model.norm.weight", lambda t: None), "lacks model.norm.weight, which model.safetensors.index.json says it holds"),
    "extra tensor": (_add, r"model.layers.0.self_attn.extra.weight \[3\] belongs to no part of the model"),
    "extra layer": (_more_layers, r"model.layers.2.input_layernorm.weight \[32\] belongs to no part of the model"),
    "8 bits": (_change("model.norm.weight", lambda t: t.to(torch.float8_e4m3fn)), "model.norm.weight has dtype F8_E4M3: expected one of F64, F32, F16, BF16"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_folder_that_is_not_as_it_was_written_is_the_users_mistake(damage, folder, tmp_path, capsys):
    spoil, message = DAMAGE[damage]
    spoil(folder)
    with pytest.raises(ConfigError, match=message):
        checked_tensors(Model(name="hf", hf_assets_path=str(folder)), folder)
    assert main(["import", str(folder), str(tmp_path / "run")]) == 2
    assert "Traceback" not in capsys.readouterr().err and sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_a_missing_tensor_is_named_where_there_is_no_index(folder):
    tensors = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items() if "k_proj" not in name}
    _no_weights(folder)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"2 tensors differ:\n  model.layers.0.self_attn.k_proj.weight \[16, 32\] is missing"):
        checked_tensors(Model(name="hf", hf_assets_path=str(folder)), folder)


def test_nothing_is_loaded_from_a_folder_of_another_model(folder):
    cfg = Model(name="hf", hf_assets_path=str(folder))
    model = whole_model(cfg, "cpu")
    for parameter in model.parameters():
        parameter.data.fill_(7.0)
    _change("model.norm.weight", lambda t: t[:-1].clone())(folder)
    with pytest.raises(ConfigError):
        load_hf(cfg, folder, model_state([model]))
    assert all((parameter == 7.0).all() for parameter in model.parameters())


def test_a_tied_head_that_lies_in_the_folder_too_is_not_used(tmp_path):
    folder = save_model("qwen3", tmp_path / "model")
    tensors = load_file(first_file(folder))
    save_file(tensors | {"lm_head.weight": torch.zeros(61, 32)}, first_file(folder))
    assert "lm_head.weight" in read_header(first_file(folder))
    cfg = Model(name="hf", hf_assets_path=str(folder))
    model = whole_model(cfg, "cpu")
    load_hf(cfg, folder, model_state([model]))
    assert model.output.weight is model.tok_embeddings.weight and model.output.weight.abs().sum() > 0


def test_a_family_by_name_takes_weights_that_compute_the_same_and_no_others(folder, monkeypatch):
    from titanlite.models import get_args
    from titanlite.models.llama.model import FLAVORS

    hf = Model(name="hf", hf_assets_path=str(folder))
    sizes = get_args(hf)
    monkeypatch.setitem(FLAVORS, "tiny", replace(sizes, head_dim=None))
    assert checked_tensors(Model(flavor="tiny"), folder).keys() == checked_tensors(hf, folder).keys()
    monkeypatch.setitem(FLAVORS, "tiny", replace(sizes, rope_theta=5.0))
    with pytest.raises(ConfigError, match="config.json says rope_theta=10000.0; llama3 tiny has 5.0: use model.name='hf', or another flavor"):
        checked_tensors(Model(flavor="tiny"), folder)
    assert checked_tensors(Model(flavor="tiny", rope_theta=7.0), folder)  # a key was set to say so
    with pytest.raises(ConfigError, match="model_type='llama', but qwen3 debugmodel is 'qwen3': use model.name='hf'"):
        checked_tensors(Model(name="qwen3"), folder)


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(folder, tmp_path, capsys):
    debug = tmp_path / "debug.toml"
    debug.write_text("")
    from titanlite.data.tokenizer_files import export_tokenizer

    export_tokenizer(Model(), tmp_path, folder)  # of 257 tokens
    assert main(["import", str(folder), str(tmp_path / "run")]) == 2
    assert "model.vocab_size=61 is smaller than the tokenizer's 257 tokens" in capsys.readouterr().err


@pytest.mark.parametrize(
    "keys, message",
    [
        ({"checkpoint.initial_load_in_hf": True}, "checkpoint.initial_load_in_hf=true needs a Hugging Face folder: set checkpoint.initial_load_path"),
        ({"checkpoint.initial_load_path": "some/model"}, "is not a checkpoint's folder .*set checkpoint.initial_load_in_hf=true"),
        ({"checkpoint.last_save_in_hf": True}, "checkpoint.last_save_in_hf=true needs checkpoint.enable=true"),
        (
            {"checkpoint.last_save_in_hf": True, "checkpoint.enable": True, "model.rope_scaling": "ntk", "model.rope_scaling_factor": 2.0},
            "NTKScaling.*config.json has no such rotary scaling",
        ),
    ],
)
def test_keys_that_cannot_be_met_are_refused_at_the_start(keys, message):
    from titanlite.validate import validate

    with pytest.raises(ConfigError, match=message):
        validate(override(Config(), keys), 1)


def test_a_step_that_is_exported_twice_lies_beside_the_first(gang, tmp_path):
    cfg = config_of(save_model("llama", tmp_path / "model", vocab_size=257), tmp_path)
    cfg = override(cfg, {"checkpoint.enable": True, "checkpoint.last_save_in_hf": True, "job.dump_folder": str(tmp_path)})
    assert gang.run(_train, cfg) == [0] * 4
    shutil.rmtree(tmp_path / "x" / "checkpoint")
    assert gang.run(_train, cfg) == [0] * 4
    assert sorted(path.name for path in (tmp_path / "x" / "hf").iterdir()) == ["step-2", "step-2-1"]
    assert json.loads((tmp_path / "x" / "hf" / "step-2" / "config.json").read_bytes())["model_type"] == "llama"
