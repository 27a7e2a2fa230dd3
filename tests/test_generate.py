import json
import re
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.ranks import run_ranks
from tests.runs import full
from titanlite import train
from titanlite.cli import main
from titanlite.config import load_config
from titanlite.generate import _choose, generate, load_run
from titanlite.models import get_model, get_plan
from titanlite.models.llama.model import Llama, LlamaArgs
from titanlite.parallel.parallelize import allocate

ARGS = LlamaArgs(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=48, vocab_size=61, rope_theta=10000.0)
NO_END = -1


def build() -> Llama:
    torch.manual_seed(0)
    model = Llama(ARGS)
    model.output.weight.data *= 20  # far from uniform, so that samples differ from one another
    return model.eval()


def greedy(prompt: list[int], n: int, **options) -> list[int]:
    return list(generate(build(), prompt, max_new_tokens=n, end_id=NO_END, temperature=0.0, **options))


def sampled(seed: int = 0, n: int = 20, **options) -> list[int]:
    return list(generate(build(), [1, 2, 3], max_new_tokens=n, end_id=NO_END, seed=seed, **options))


# The cache


@pytest.mark.parametrize("prompt_length", [1, 2, 7, 33])
def test_decoding_with_a_cache_gives_the_logits_of_whole_forward_passes(prompt_length):
    prompt = torch.randint(0, ARGS.vocab_size, (prompt_length,), generator=torch.Generator().manual_seed(1)).tolist()
    model, whole, cached = build(), build(), []
    model.output.register_forward_hook(lambda m, args, logits: cached.append(logits[0, -1].clone()))
    ids = list(generate(model, prompt, max_new_tokens=40, end_id=NO_END, temperature=0.0))
    tokens = torch.tensor([prompt + ids[:-1]])
    with torch.inference_mode():
        expected = whole(tokens, torch.arange(tokens.shape[1])[None])[0, prompt_length - 1 :]
    # fp32 sums in another order, relative to the largest logit.
    assert (torch.stack(cached) - expected).abs().max() < 1e-5 * expected.abs().max()
    assert ids == expected.argmax(-1).tolist()


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_a_cache_gives_every_family_the_logits_of_whole_forward_passes(name):
    cfg = load_config_of(name)
    torch.manual_seed(0)
    models = [get_model(cfg.model, torch.float64) for _ in range(2)]
    for model in models:
        allocate(model, get_plan(cfg.model), torch.device("cpu"))
        for n, parameter in model.named_parameters():
            parameter.data.normal_(0.0, 0.2, generator=torch.Generator().manual_seed(len(n)))
    logits = []
    models[0].output.register_forward_hook(lambda m, args, out: logits.append(out[0, -1].clone()))
    prompt = [5, 6, 7, 8, 9]
    ids = list(generate(models[0], prompt, max_new_tokens=20, end_id=NO_END, temperature=0.0))
    tokens = torch.tensor([prompt + ids[:-1]])
    with torch.inference_mode():
        expected = models[1](tokens, torch.arange(tokens.shape[1])[None])[0, 4:]
    assert (torch.stack(logits) - expected).abs().max() < 1e-12 * expected.abs().max()


def load_config_of(name):
    return load_config(Path(__file__).parents[1] / "train_configs" / f"{name}_debug.toml")[0]


def test_a_second_text_from_the_same_model_starts_with_an_empty_cache():
    model = build()
    texts = [list(generate(model, [5, 6], max_new_tokens=10, end_id=NO_END, temperature=0.0)) for _ in range(2)]
    assert texts[0] == texts[1] == greedy([5, 6], 10)


# Choosing


def test_greedy_decoding_does_not_depend_on_the_seed():
    assert greedy([1, 2, 3], 20, seed=1) == greedy([1, 2, 3], 20, seed=2)


def test_the_same_seed_gives_the_same_text_and_another_seed_another():
    assert sampled(seed=3) == sampled(seed=3)
    assert len({tuple(sampled(seed=seed)) for seed in range(5)}) == 5


def test_text_ends_before_the_end_token():
    ids = greedy([1, 2, 3], 20)
    end = ids[5]
    assert list(generate(build(), [1, 2, 3], max_new_tokens=20, end_id=end, temperature=0.0)) == ids[: ids.index(end)]


LOGITS = torch.tensor([0.15, 0.5, 0.05, 0.3]).log()


def frequencies(temperature: float, top_p: float, n: int = 4000) -> dict[int, float]:
    generator = torch.Generator().manual_seed(0)
    counts = Counter(_choose(LOGITS, temperature, top_p, generator) for _ in range(n))
    return {token: count / n for token, count in counts.items()}


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_temperature_divides_the_logits(temperature):
    expected = (LOGITS / temperature).softmax(-1).tolist()
    # 4,000 draws have a standard error below 0.008; five of them.
    assert frequencies(temperature, 1.0) == pytest.approx(dict(enumerate(expected)), abs=0.04)


@pytest.mark.parametrize("top_p, kept", [(0.01, {1}), (0.49, {1}), (0.79, {1, 3}), (0.81, {1, 3, 0}), (1.0, {0, 1, 2, 3})])
def test_top_p_keeps_the_smallest_set_of_likeliest_tokens_with_that_share(top_p, kept):
    total = sum(LOGITS.exp()[list(kept)].tolist())
    expected = {token: LOGITS.exp()[token].item() / total for token in kept}
    assert frequencies(1.0, top_p) == pytest.approx(expected, abs=0.04)


@pytest.mark.parametrize("temperature", [0.0, 1e-30])
def test_a_temperature_of_or_near_0_takes_the_likeliest(temperature):
    assert frequencies(temperature, 1.0, n=20) == {1: 1.0}


# From a run's folder


def _train(cfg) -> dict:
    """Trains, and gives back the weights that the last step left."""
    runs, setup_from = [], train.setup_from
    train.setup_from = lambda *args: runs.append(setup_from(*args)) or runs[0]
    code = train.train(cfg, {})
    return {"code": code, **{name: full(p) for part in runs[0][0].parts for name, p in part.named_parameters()}}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run of two ranks with FSDP, and its weights."""
    folder = tmp_path_factory.mktemp("generate")
    (folder / "text.txt").write_text("def f(x):\n    return x\n" * 400)
    (folder / "run.toml").write_text(
        f"[job]\ndump_folder = '{folder}/outputs'\n[training]\ndataset = 'text'\ndataset_path = '{folder}/text.txt'\n"
        "local_batch_size = 2\nseq_len = 32\nsteps = 3\nmixed_precision_param = 'float32'\n"
        "[checkpoint]\nenable = true\ninterval = 2\n[metrics]\nenable_tensorboard = false\n"
    )
    ranks = run_ranks(_train, 2, load_config(folder / "run.toml")[0])
    assert [rank.pop("code") for rank in ranks] == [0, 0]
    return folder / "outputs" / "run", ranks[0]


def test_the_weights_of_a_sharded_run_are_loaded_whole(trained):
    folder, weights = trained
    model, tokenizer, step = load_run(folder, None)
    assert step == 3 and tokenizer.end_id == 256
    assert {name: p.detach().double().numpy().tobytes() for name, p in model.named_parameters()} == {
        name: w.tobytes() for name, w in weights.items()
    }
    assert not any(p.is_meta for p in model.parameters()) and not any(b.is_meta for b in model.buffers())


def command(*words) -> int:
    return main(["generate", *map(str, words)])


def test_json_gives_prompt_ids_ids_text_and_step(trained, capsys):
    assert command(trained[0], "-p", "def é", "--json", "--max_new_tokens", 12, "--seed", 4) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["prompt_ids", "ids", "text", "step"]
    assert found["prompt_ids"] == [256, *"def é".encode()] and 0 < len(found["ids"]) <= 12 and found["step"] == 3
    assert found["text"] == bytes(found["ids"]).decode(errors="replace")


def test_streamed_text_is_prompt_and_text_of_the_same_seed(trained, capsys):
    options = ("-p", "def ", "--max_new_tokens", 30, "--seed", 4)
    command(trained[0], *options, "--json")
    text = json.loads(capsys.readouterr().out)["text"]
    command(trained[0], *options)
    assert capsys.readouterr().out == f"def {text}\n"


def test_any_step_of_the_run_can_be_asked_for(trained, capsys):
    for step in (2, 3):
        assert command(trained[0], "--step", step, "--json", "--max_new_tokens", 2) == 0
        assert json.loads(capsys.readouterr().out)["step"] == step


def test_an_empty_prompt_is_the_start_of_a_document(trained, capsys):
    assert command(trained[0], "--json", "--max_new_tokens", 2) == 0
    assert json.loads(capsys.readouterr().out)["prompt_ids"] == [256]


@pytest.mark.parametrize(
    "words, message",
    [
        (["--step", "7"], "--step=7: .*checkpoint holds 2, 3"),
        (["--temperature", "-1"], "--temperature=-1.0: expected 0 .* or more"),
        (["--temperature", "nan"], "--temperature=nan: expected 0 .* or more"),
        (["--top_p", "0"], "--top_p=0.0: expected a share above 0 and at most 1"),
        (["--top_p", "1.5"], "--top_p=1.5: expected a share above 0 and at most 1"),
        (["--max_new_tokens", "0"], "--max_new_tokens=0: expected at least 1"),
        (["--seed", str(2**64)], "--seed=18446744073709551616: expected a number of 64 bits"),
        (["-p", "\udcff"], "--prompt=.*: not UTF-8"),
    ],
)
def test_a_mistake_is_one_message_with_exit_code_2(trained, capsys, words, message):
    assert command(trained[0], *words) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1
    assert re.match(f"titanlite: error: {message}", err)


def test_a_folder_that_is_no_run_and_a_run_without_checkpoints_are_told_of(trained, tmp_path, capsys):
    assert command(tmp_path) == 2
    assert f"{tmp_path} is not a run's folder: it has no config.toml" in capsys.readouterr().err
    (tmp_path / "config.toml").write_text((trained[0] / "config.toml").read_text())
    assert command(tmp_path) == 2
    assert "holds no checkpoint: train with --checkpoint.enable" in capsys.readouterr().err
