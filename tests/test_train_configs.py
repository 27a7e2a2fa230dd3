import json
import re
from pathlib import Path

import pytest

from titanlite.config import load_config
from titanlite.rl.validate import validate_rl
from titanlite.validate import validate

FOLDER = Path(__file__).parents[1] / "train_configs"
FILES = sorted(FOLDER.rglob("*.toml"))
# What scripts/get_smollm2.py writes, for the recipe that trains it.
SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-05,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
    "vocab_size": 49152,
}


def world_sizes(path: Path) -> tuple[int, ...]:
    """The ranks that a recipe's first line says it is for; one that says nothing runs on 1, 2, 4 and 8."""
    found = re.search(r"on (one|[\d,]+) GPU", path.read_text().splitlines()[0])
    return (int(found[1].replace("one", "1").replace(",", "")),) if found else (1, 2, 4, 8)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_recipe_is_legal_on_the_ranks_it_is_for(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs/smollm2").mkdir(parents=True)
    (tmp_path / "outputs/smollm2/config.json").write_text(json.dumps(SMOLLM2))
    cfg, origins = load_config(path)
    for world_size in world_sizes(path):
        validate(cfg, world_size)
    if any(key.startswith("rl.") for key in origins):
        validate_rl(cfg)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_recipe_is_short_and_says_first_what_it_is(path):
    lines = path.read_text().splitlines()
    assert len(lines) <= 40 and lines[0].startswith("# ")


def test_there_are_recipes():
    assert FILES
