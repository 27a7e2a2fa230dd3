"""`titanlite import` and `titanlite export`: models of transformers made runs, runs made folders that transformers reads."""

import json
import shutil

import pytest
import torch

import titanlite.train
from tests.checkpoint.hf_models import NAMES, load_model, read_header, save_model
from titanlite.checkpoint import hf_export
from titanlite.checkpoint.folder import list_steps
from titanlite.checkpoint.state import model_state
from titanlite.checkpoint.store import load
from titanlite.cli import main
from titanlite.config import load_config
from titanlite.generate import generate, load_run
from titanlite.huggingface import find_folder
from titanlite.models import get_model, get_plan
from titanlite.parallel.parallelize import allocate
from titanlite.verify.gang import Gang

TOKENS = torch.randint(0, 61, (2, 20), generator=torch.Generator().manual_seed(1))


def run(*words) -> int:
    return main([str(word) for word in words])


@pytest.fixture(scope="module")
def train():
    """`titanlite train` on a rank of its own."""
    gang = Gang(1)
    yield lambda *words: gang.run(_train, [str(word) for word in words])[0]
    gang.close()


def _train(words) -> int:
    return titanlite.train.train(*load_config(words[0], words[1:]))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A function from a model's name to its folder as transformers saved it."""
    root, made = tmp_path_factory.mktemp("saved"), {}
    return lambda name: made.setdefault(name, None) or made.update({name: save_model(name, root / name.replace(" ", "_"))}) or made[name]


def model_of(folder):
    cfg, _ = load_config(folder / "config.toml")
    model = get_model(cfg.model, getattr(torch, cfg.training.dtype))
    allocate(model, get_plan(cfg.model), torch.device("cpu"))
    load(folder / "checkpoint", 0, model_state([model]))
    return model


def weights_of(theirs):
    tensors = dict(theirs.named_parameters()) | {n: b for n, b in theirs.named_buffers() if n.endswith("bias")}
    return {name: tensor.tolist() for name, tensor in tensors.items()}


@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_a_model_of_transformers_computes_the_same_as_a_run_and_again_in_transformers(name, saved, tmp_path):
    theirs = load_model(saved(name))
    assert len(list(saved(name).glob("*.safetensors"))) > 1
    assert run("import", saved(name), tmp_path / "run") == 0
    logits = model_of(tmp_path / "run")(TOKENS, torch.arange(20).expand(2, 20))
    # fp32 sums in another order
    torch.testing.assert_close(logits, theirs(input_ids=TOKENS).logits, rtol=0, atol=5e-6)

    assert run("export", tmp_path / "run", "-o", tmp_path / "out", "--max-shard-gb", "0.00005") == 0
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    again = load_model(tmp_path / "out")
    assert weights_of(again) == weights_of(theirs)
    greedy = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    assert again.generate(TOKENS, **greedy).tolist() == theirs.generate(TOKENS, **greedy).tolist()


@pytest.fixture
def imported(saved, tmp_path):
    assert run("import", saved("llama"), tmp_path / "run") == 0
    return tmp_path / "run"


def test_an_imported_run_is_step_0_and_trains_on_from_its_weights(train, tmp_path):
    folder, text = tmp_path / "run", tmp_path / "a.txt"
    text.write_text("".join(f"line {i}\n" for i in range(2000)))
    model = save_model("llama", tmp_path / "bytes", vocab_size=257)
    settings = ("--training.dataset", "text", "--training.dataset_path", text, "--training.seq_len", 32, "--model.tokenizer", "byte")
    assert run("import", model, folder, *settings, "--training.mixed_precision_param", "float32", "--lr_scheduler.warmup_steps", 0) == 0
    assert list_steps(folder / "checkpoint") == [0]
    for steps in (2, 3):
        options = ("--training.steps", steps, "--lr_scheduler.total_steps", 9, "--metrics.log_freq", 1, "--metrics.enable_tensorboard", "false")
        assert train(folder / "config.toml", *options) == 0
    assert list_steps(folder / "checkpoint") == [0, 2, 3]
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    first = next(record for record in records if "loss" in record)
    theirs = load_model(model)
    data = torch.tensor([256, *text.read_bytes()])[: 8 * 32 + 1]  # not the rows of the step, but text like theirs
    loss = torch.nn.functional.cross_entropy(theirs(input_ids=data[:-1].view(8, 32)).logits.flatten(0, 1), data[1:])
    assert abs(first["loss"] - loss.item()) < 0.5 and first["step"] == 1
    assert run("generate", folder, "-p", "line", "--max_new_tokens", 4) == 0


def test_an_import_takes_the_runs_other_settings_from_a_file_and_the_command_line(saved, tmp_path):
    (tmp_path / "x.toml").write_text("[training]\nsteps = 7\nseq_len = 16\n[model]\nname = 'qwen3'\n")
    assert run("import", saved("llama"), tmp_path / "a" / "run", "--config", tmp_path / "x.toml", "--training.seq_len", 8, "--training.dtype", "bfloat16") == 0
    cfg, _ = load_config(tmp_path / "a" / "run" / "config.toml")
    assert (cfg.training.steps, cfg.training.seq_len, cfg.model.name, cfg.job.name) == (7, 8, "hf", "run")
    assert {p.dtype for p in model_of(tmp_path / "a" / "run").parameters()} == {torch.bfloat16}
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["run"]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_an_exported_models_dtype_is_what_was_asked_for(dtype, saved, tmp_path):
    assert run("import", saved("deepseek_v3"), tmp_path / "run") == 0
    assert run("export", tmp_path / "run", "-o", tmp_path / "out", "--dtype", dtype) == 0
    header = read_header(tmp_path / "out" / "model.safetensors")
    assert header.pop("__metadata__") == {"format": "pt"}
    bias = [name for name in header if name.endswith("e_score_correction_bias")]  # transformers keeps it in fp32
    assert bias and {header.pop(name)["dtype"] for name in bias} == {"F32"}
    assert {entry["dtype"] for entry in header.values()} == {{"float16": "F16", "bfloat16": "BF16", "float32": "F32"}[dtype]}
    assert json.loads((tmp_path / "out" / "config.json").read_bytes())["torch_dtype"] == dtype
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_bytes())
    assert index["weight_map"].keys() == header.keys() | set(bias)


def test_the_runs_own_export_dtype_is_the_default(saved, tmp_path):
    assert run("import", saved("llama"), tmp_path / "run", "--checkpoint.export_dtype", "bfloat16") == 0
    assert run("export", tmp_path / "run", "-o", tmp_path / "out") == 0
    assert read_header(tmp_path / "out" / "model.safetensors")["lm_head.weight"]["dtype"] == "BF16"


def test_an_export_keeps_what_an_imported_config_json_knew(saved, imported, tmp_path):
    config = json.loads((imported / "hf_assets" / "config.json").read_bytes()) | {"max_position_embeddings": 12345, "pad_token_id": 3}
    (imported / "hf_assets" / "config.json").write_text(json.dumps(config))
    assert run("export", imported, "-o", tmp_path / "out") == 0
    found = json.loads((tmp_path / "out" / "config.json").read_bytes())
    assert (found["max_position_embeddings"], found["pad_token_id"], found["architectures"]) == (12345, 3, ["LlamaForCausalLM"])


def test_experts_are_numbered_not_sorted_as_words(tmp_path):
    save_model("qwen3_moe", tmp_path / "model", num_experts=12)
    assert run("import", tmp_path / "model", tmp_path / "run") == 0
    ours, theirs = model_of(tmp_path / "run"), load_model(tmp_path / "model")
    assert torch.equal(ours.layers["0"].moe.experts.w2[10], theirs.model.layers[0].mlp.experts.down_proj[10])


def test_neither_command_touches_what_is_there_already(saved, imported, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    for words in (("import", saved("llama"), imported), ("export", imported, "-o", tmp_path / "out")):
        assert run(*words) == 2
        assert "exists already: give another folder, or remove it" in capsys.readouterr().err
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize(
    "words, message",
    [
        (("export", "RUN", "-o", "OUT", "--step", 3), "--step=3: .* holds 0"),
        (("export", "RUN", "-o", "OUT", "--max-shard-gb", 0), "--max-shard-gb=0.0: expected more than 0"),
        (("export", "OUT", "-o", "OUT"), "is not a run's folder"),
        (("import", "OUT", "RUN2"), "there is no folder"),
    ],
)
def test_a_mistake_on_the_command_line_is_answered_once(words, message, imported, tmp_path, capsys):
    import re

    places = {"RUN": imported, "OUT": tmp_path / "out", "RUN2": tmp_path / "run2"}
    assert run(*(places.get(word, word) for word in words)) == 2
    error = capsys.readouterr().err
    assert re.search(message, error) and "Traceback" not in error
    assert not (tmp_path / "out").exists() and not (tmp_path / "run2").exists()


def test_a_damaged_step_is_not_exported(imported, tmp_path, capsys):
    (data,) = (imported / "checkpoint" / "step-0").glob("*.distcp")
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    assert run("export", imported, "-o", tmp_path / "out") == 2
    assert "step-0 is damaged" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_an_export_whose_logits_differ_is_refused_unless_it_is_not_checked(imported, tmp_path, capsys, monkeypatch):
    plain = hf_export.config_from
    monkeypatch.setattr(hf_export, "config_from", lambda *args: plain(*args) | {"rms_norm_eps": 0.1})
    assert run("export", imported, "-o", tmp_path / "out") == 1
    assert "the exported model gives other logits than step 0, by up to " in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
    assert run("export", imported, "-o", tmp_path / "out", "--no-check") == 0


def test_a_model_of_the_hub_is_taken_from_its_cache(saved, tmp_path, monkeypatch):
    import huggingface_hub.constants

    snapshot = tmp_path / "models--someone--tiny" / "snapshots" / ("a" * 40)
    shutil.copytree(saved("llama"), snapshot)
    (tmp_path / "models--someone--tiny" / "refs").mkdir()
    (tmp_path / "models--someone--tiny" / "refs" / "main").write_text("a" * 40)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert find_folder("someone/tiny").resolve() == snapshot.resolve()


def test_a_model_of_the_hub_that_cannot_be_had_is_the_users_mistake(tmp_path, capsys, monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert run("import", "no-one/nothing", tmp_path / "run") == 2
    assert "no-one/nothing: there is no such folder, nor can it be had from the Hugging Face Hub" in capsys.readouterr().err


def test_greedy_tokens_of_an_exported_run_are_the_runs_own(train, tmp_path):
    """A run of a flavor, with the byte tokenizer."""
    (tmp_path / "x.toml").write_text(
        f"[job]\ndump_folder = '{tmp_path}'\nname = 'run'\n[training]\nsteps = 2\nseq_len = 32\nlocal_batch_size = 2\n"
        "[checkpoint]\nenable = true\n[activation_checkpoint]\nmode = 'none'\n[metrics]\nenable_tensorboard = false\n"
    )
    assert train(tmp_path / "x.toml") == 0
    assert run("export", tmp_path / "run", "-o", tmp_path / "out") == 0
    import transformers

    tokenizer, theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out"), load_model(tmp_path / "out")
    model, ours, _ = load_run(tmp_path / "run", None)
    text = "def naïve():\n\t\x00 é中 <|end|>"
    ids = tokenizer(text)["input_ids"]
    assert ids[:8] == ours.encode_prompt(text)[:8] and tokenizer("héllo\n")["input_ids"] == ours.encode_prompt("héllo\n")
    assert tokenizer.decode(tokenizer("héllo 中\n")["input_ids"][1:]) == "héllo 中\n"
    assert theirs.generation_config.eos_token_id == 256 and theirs.config.bos_token_id == 256
    prompt = ours.encode_prompt("def foo")
    expected = list(generate(model, prompt, max_new_tokens=12, end_id=256, temperature=0))
    found = theirs.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0, len(prompt) :].tolist()
    assert [i for i in found if i != 256] == expected and expected
