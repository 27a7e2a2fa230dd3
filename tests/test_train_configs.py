import re
from pathlib import Path

import pytest

from titanlite.config import load_config
from titanlite.validate import validate

FOLDER = Path(__file__).parents[1] / "train_configs"
FILES = sorted(FOLDER.rglob("*.toml"))
# file name -> the ranks it is for; others run on 1, 2, 4 and 8
WORLD_SIZES = {
    "llama3_1b.toml": (1, 8),
    "llama3_3b.toml": (8,),
    "llama3_8b.toml": (8,),
    "llama3_70b.toml": (128,),
    "llama3_405b.toml": (1024,),
}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_recipe_is_legal_on_the_ranks_it_is_for(path):
    cfg, _ = load_config(path)
    for world_size in world_sizes(path):
        validate(cfg, world_size)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_recipe_is_short_and_says_first_what_it_is(path):
    lines = path.read_text().splitlines()
    assert len(lines) <= 40 and lines[0].startswith("# ")


def test_there_are_recipes():
    assert FILES
