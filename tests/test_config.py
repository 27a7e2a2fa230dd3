import ast
import dataclasses
import math
from pathlib import Path
from typing import get_args

import pytest

import titanlite
from titanlite.config import KEYS, Config, DataSource, Help, defaults_help, load_config, to_dict, to_toml
from titanlite.utils import ConfigError, explain


@pytest.fixture
def toml(tmp_path):
    """Writes a TOML file and returns its path."""

    def write(text, name="run.toml"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def mistake(path, *overrides) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value)


# Precedence


def test_an_empty_file_gives_the_defaults_and_the_name_of_the_file(toml):
    cfg, origins = load_config(toml("", "my_run.toml"))
    assert cfg == dataclasses.replace(Config(), job=dataclasses.replace(Config().job, name="my_run"))
    assert set(origins) == {"job.name"} and origins["job.name"].startswith("the name of ")


def test_the_command_line_wins_over_the_file_the_file_over_extends_and_extends_over_defaults(toml):
    base = toml("[training]\nsteps = 1\nseq_len = 2\nlocal_batch_size = 3\n", "base.toml")
    path = toml('extends = "base.toml"\n[training]\nsteps = 4\nseq_len = 5\n')
    cfg, origins = load_config(path, ["--training.steps", "6"])
    t = cfg.training
    assert (t.steps, t.seq_len, t.local_batch_size, t.gc_freq) == (6, 5, 3, 50)
    assert origins["training.steps"] == "the command line"
    assert origins["training.seq_len"] == f"{path}:4"
    assert origins["training.local_batch_size"] == f"{base}:4"
    assert "training.gc_freq" not in origins


def test_extends_makes_chains_with_paths_relative_to_each_file(toml, tmp_path):
    toml("[optimizer]\nlr = 1.0\nbeta1 = 0.1\nbeta2 = 0.2\n", "bases/root.toml")
    toml('extends = "root.toml"\n[optimizer]\nlr = 2.0\nbeta1 = 0.3\n', "bases/middle.toml")
    cfg, origins = load_config(toml('extends = "bases/middle.toml"\n[optimizer]\nlr = 3.0\n'))
    assert (cfg.optimizer.lr, cfg.optimizer.beta1, cfg.optimizer.beta2) == (3.0, 0.3, 0.2)
    assert origins["optimizer.beta1"].endswith("middle.toml:4") and origins["optimizer.beta2"].endswith("root.toml:4")


def test_a_run_is_named_after_the_file_given_not_after_the_one_it_extends(toml):
    toml("[training]\nsteps = 1\n", "base.toml")
    assert load_config(toml('extends = "base.toml"\n', "child.toml"))[0].job.name == "child"


def test_an_empty_name_on_the_command_line_means_the_name_of_the_file_too(toml):
    assert load_config(toml("[job]\nname = 'given'\n"), ["--job.name", ""])[0].job.name == "run"


def test_the_last_of_two_equal_options_counts(toml):
    assert load_config(toml(""), ["--training.steps", "3", "--training.steps=4"])[0].training.steps == 4


# Command line


@pytest.mark.parametrize(
    "words, value",
    [
        (["--checkpoint.enable"], True),
        (["--checkpoint.enable", "true"], True),
        (["--checkpoint.enable", "True"], True),
        (["--checkpoint.enable=true"], True),
        (["--checkpoint.enable", "false"], False),
        (["--checkpoint.enable=False"], False),
        (["--checkpoint.no-enable"], False),
        (["--checkpoint.no_enable"], False),
        (["--checkpoint.enable", "false", "--checkpoint.enable"], True),
        (["--checkpoint.enable", "--checkpoint.no-enable"], False),
    ],
)
@pytest.mark.parametrize("in_file", ["true", "false"])
@pytest.mark.parametrize("section, name", [("checkpoint", "enable"), ("model", "tie_embeddings")], ids=["bool", "bool or None"])
def test_a_boolean_takes_every_form(toml, words, value, in_file, section, name):
    words = [word.replace("checkpoint", section).replace("enable", name) for word in words]
    cfg, origins = load_config(toml(f"[{section}]\n{name} = {in_file}\n"), [*words, "--training.steps", "3"])
    assert getattr(getattr(cfg, section), name) is value and cfg.training.steps == 3
    assert origins[f"{section}.{name}"] == "the command line"


@pytest.mark.parametrize(
    "words, message",
    [
        (["--checkpoint.enable", "yes"], "--checkpoint.enable yes: expected true, false or no value"),
        (["--checkpoint.enable=1"], "--checkpoint.enable 1: expected true, false or no value"),
        (["--checkpoint.enable=true", "false"], "--checkpoint.enable true false: expected true, false or no value"),
        (["--checkpoint.no-enable", "true"], "--checkpoint.no-enable true: expected no value"),
        (["--checkpoint.no-enable=false"], "--checkpoint.no-enable false: expected no value"),
        (["--checkpoint.enable", "None"], "--checkpoint.enable None: expected true, false or no value"),
        (["--model.tie-embeddings", "yes"], "--model.tie-embeddings yes: expected true, false or no value"),
    ],
)
def test_a_boolean_takes_nothing_else(toml, words, message):
    assert mistake(toml(""), *words) == message


@pytest.mark.parametrize("name", ["--training.seq-len", "--training.seq_len"])
@pytest.mark.parametrize("equals", [True, False])
def test_hyphens_stand_for_underscores_and_equals_for_a_space(toml, name, equals):
    assert load_config(toml(""), [f"{name}=64"] if equals else [name, "64"])[0].training.seq_len == 64


@pytest.mark.parametrize(
    "words, key, value",
    [
        (["--training.global_batch_size", "-1"], "training.global_batch_size", -1),
        (["--optimizer.eps", "1e-08"], "optimizer.eps", 1e-8),
        (["--optimizer.lr", "3"], "optimizer.lr", 3.0),
        (["--training.max_norm", "inf"], "training.max_norm", math.inf),
        (["--compile.components", "loss"], "compile.components", ("loss",)),
        (["--compile.components", "loss", "model"], "compile.components", ("loss", "model")),
        (["--compile.components"], "compile.components", ()),
        (["--training.dataloader.num_workers", "2"], "training.dataloader.num_workers", 2),
        (["--job.description", "true"], "job.description", "true"),
        (["--job.description=--odd [text] = é"], "job.description", "--odd [text] = é"),
        (["--model.vocab_size", "512"], "model.vocab_size", 512),
        (["--model.vocab_size", "None"], "model.vocab_size", None),
        (["--model.tie_embeddings", "None"], "model.tie_embeddings", None),
    ],
)
def test_values_of_every_type_are_read_from_the_command_line(toml, words, key, value):
    found = to_dict(load_config(toml("[model]\nvocab_size = 300\n"), words)[0])[key]
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    "words, message",
    [
        (["--training.stepz", "3"], "unknown option --training.stepz; did you mean 'training.steps'? (options are --section.key value)"),
        (["--steps", "3"], "unknown option --steps; did you mean 'training.steps'? (options are --section.key value)"),
        (["--training.lr", "3"], "unknown option --training.lr; did you mean 'optimizer.lr'? (options are --section.key value)"),
        (["--zzz.qqq", "3"], "unknown option --zzz.qqq (options are --section.key value)"),
        (["--job.no-name", "x"], "unknown option --job.no-name; did you mean 'job.name'? (options are --section.key value)"),
        (["--training.steps", "3", "other.toml"], "--training.steps 3 other.toml: expected a whole number"),
        (["--training.steps", "three"], "--training.steps three: expected a whole number"),
        (["--training.steps", "1.5"], "--training.steps 1.5: expected a whole number"),
        (["--training.steps", "3", "4"], "--training.steps 3 4: expected a whole number"),
        (["--training.steps"], "--training.steps: expected a whole number"),
        (["--optimizer.lr", "high"], "--optimizer.lr high: expected a number"),
        (["--model.vocab-size", "x"], "--model.vocab-size x: expected a whole number"),
        (["--optimizer.implementation", "fuzed"], "--optimizer.implementation fuzed: expected one of 'for-loop', 'foreach', 'fused'; did you mean 'fused'?"),
        (["--model.tokenizer", "bp"], "--model.tokenizer bp: expected one of 'byte', 'bpe', 'hf'; did you mean 'bpe'?"),
        (["--compile.components", "model", "los"], "--compile.components model los: expected a list, each one of 'model', 'loss'; did you mean 'loss'?"),
        (["--job.name", "\udcff"], "the command line: job.name = '\\udcff': not UTF-8"),
    ],
)  # fmt: skip
def test_a_mistake_on_the_command_line_gives_what_was_written_what_is_allowed_and_the_nearest_name(toml, words, message):
    assert mistake(toml(""), "--optimizer.beta1", "0.5", *words) == message


def test_a_word_before_the_first_option_is_named(toml):
    assert mistake(toml(""), "other.toml") == "unexpected 'other.toml' (options are --section.key value)"


def test_help_shows_every_key_and_the_files_values(toml):
    with pytest.raises(Help) as caught:
        load_config(toml("[training]\nsteps = 1234\n"), ["--help"])
    assert "1234" in str(caught.value)
    text = defaults_help()
    assert [key for key in KEYS if f"--{key}" not in text] == ["data.sources"]


# Lists of tables

SOURCES = """
[[data.sources]]
path = "a \\"quoted\\".txt"
format = "text"
[[data.sources]] # the second
path = "b"
weight = 3
format = "hf"
subset = "en"
[training]
steps = 3
"""


def test_sources_are_a_list_of_tables_that_loads_again(toml):
    cfg, origins = load_config(path := toml(SOURCES))
    assert cfg.data.sources == (DataSource("text", 'a "quoted".txt'), DataSource("hf", "b", 3.0, subset="en"))
    assert origins["data.sources"] == f"{path}:2" and origins["training.steps"] == f"{path}:11"
    assert again(cfg, toml) == cfg


def test_sources_may_stand_in_one_line(toml):
    cfg, _ = load_config(toml("data.sources = [{path = 'a', format = 'text'}]\n"))
    assert cfg.data.sources == (DataSource("text", "a"),)


@pytest.mark.parametrize("words", [["--data.sources", "a"], ["--data.sources.0.weight=2"]])
def test_sources_on_the_command_line_are_refused_with_what_to_use(toml, words):
    assert "sources are listed in a TOML file, as [[data.sources]]; for one there are --training.dataset" in mistake(toml(SOURCES), *words)


@pytest.mark.parametrize(
    "text, message",
    [
        (SOURCES.replace("weight = 3", "wieght = 3"), ":7: unknown key 'wieght' in data.sources[1]; did you mean 'weight'?"),
        (SOURCES.replace("weight = 3", "weight = '3'"), ":7: data.sources[1].weight = '3': expected a number"),
        (SOURCES.replace('"hf"', '"hff"'), ":8: data.sources[1].format = 'hff': expected one of 'stdlib', 'stdlib_heldout', 'text', 'jsonl', 'parquet', 'hf', 'hf_stream', 'megatron', 'tokens', 'c4', 'c4_test', 'c4_validation'; did you mean 'hf'?"),
        (SOURCES.replace('format = "hf"\n', ""), ":5: data.sources[1] has no format: expected a table with format, path, weight, text_key, split, subset"),
        ("\n[data]\nsources = [\n{path = 'a', format = 'txt'}]\n", ":3: data.sources[0].format = 'txt': expected one of"),
        ("\n[data]\nsources = ['a']\n", ":3: data.sources[0] = 'a': expected a table with format, path,"),
        ("\n[data.sources]\npath = 'a'\n", ":2: data.sources = {'path': 'a'}: expected a list, each a table with format, path,"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_source_gives_its_own_line(toml, text, message):
    path = toml(text)
    assert mistake(path).startswith(f"{path}{message}")


# Mistakes in files


@pytest.mark.parametrize(
    "text, message",
    [
        ("[training]\nstep = 3\n", ":2: unknown key 'training.step'; did you mean 'training.steps'?"),
        ("[training]\nlr = 1e-3\n", ":2: unknown key 'training.lr'; did you mean 'optimizer.lr'?"),
        ("[training]\nzzzzzzz = 1\n", ":2: unknown key 'training.zzzzzzz'"),
        ("\nsteps = 3\n", ":2: unknown key 'steps'; did you mean 'training.steps'?"),
        ("extend = 'base.toml'\n", ":1: unknown key 'extend'; did you mean 'extends'?"),
        ("[training]\nextends = 'base.toml'\n", ":2: unknown key 'training.extends'; did you mean 'extends'?"),
        ("\n[trainning]\nsteps = 3\n", ":2: unknown section [trainning]; did you mean 'training'?"),
        ("[profilingg]\nenable_profiling = true\n", ":1: unknown section [profilingg]; did you mean 'profiling'?"),
        ("[training.data_loader]\n", ":1: unknown section [training.data_loader]; did you mean 'training.dataloader'?"),
        ("training = 3\n", ":1: training = 3: expected a section, [training]"),
        ("[[training]]\nsteps = 3\n", ":1: training = [{'steps': 3}]: expected a section, [training]"),
        ("[training.steps]\n", ":1: training.steps = {}: expected a whole number"),
        ('"training.steps" = 3\n', ':1: unknown key "training.steps": in quotes it is one name, not a path'),
        ("[training]\nsteps = 'three'\n", ":2: training.steps = 'three': expected a whole number"),
        ("[training]\nsteps = 3.0\n", ":2: training.steps = 3.0: expected a whole number"),
        ("[training]\nsteps = true\n", ":2: training.steps = True: expected a whole number"),
        ("[model]\nvocab_size = '9'\n", ":2: model.vocab_size = '9': expected a whole number"),
        ("[optimizer]\nlr = '1e-3'\n", ":2: optimizer.lr = '1e-3': expected a number"),
        ("[optimizer]\nlr = true\n", ":2: optimizer.lr = True: expected a number"),
        ("[checkpoint]\nenable = 1\n", ":2: checkpoint.enable = 1: expected true or false"),
        ("[checkpoint]\nenable = 'true'\n", ":2: checkpoint.enable = 'true': expected true or false"),
        ("[job]\nname = 3\n", ":2: job.name = 3: expected a string"),
        ("[job]\nname = 1979-05-27\n", ":2: job.name = datetime.date(1979, 5, 27): expected a string"),
        ("[compile]\ncomponents = 'model'\n", ":2: compile.components = 'model': expected a list, each one of 'model', 'loss'"),
        ("[compile]\ncomponents = ['model', 'los']\n", ":2: compile.components = ['model', 'los']: expected a list, each one of 'model', 'loss'; did you mean 'loss'?"),
        ("[optimizer]\nimplementation = 'fuze'\n", ":2: optimizer.implementation = 'fuze': expected one of 'for-loop', 'foreach', 'fused'; did you mean 'fused'?"),
        ("[training]\nsteps = 3\nsteps = 4\n", ":3: not TOML: Cannot overwrite a value"),
        ("[training]\nsteps = 3\n[training]\nseq_len = 4\n", ":3: not TOML: Cannot declare ('training',) twice"),
        ("[training\nsteps = 3\n", ":1: not TOML: Expected ']' at the end of a table declaration"),
        ("[training]\nsteps = \n", ":2: not TOML: Invalid value"),
        ("[job]\ndescription = '''\nnever closed\n", ":3: not TOML: Expected \"'''\""),
        (b"[job]\nname = '\xff'\n", ": not UTF-8 at byte 14"),
        ("extends = 3\n", ":1: extends = 3: expected the path of a TOML file, relative to this one"),
        ("# first\nextends = 'run.toml'\n", ":2: extends = 'run.toml' leads back to itself"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_file_gives_its_line_what_was_given_what_is_allowed_and_the_nearest_name(toml, text, message):
    path = toml(text)
    assert mistake(path) == f"{path}{message}"


def test_a_mistake_in_the_file_extended_is_told_of_with_that_files_name(toml):
    base = toml("[training]\nstep = 3\n", "base.toml")
    assert mistake(toml('extends = "base.toml"\n')).startswith(f"{base}:2: unknown key 'training.step'")


def test_a_file_that_extends_a_missing_one_a_folder_or_itself_by_a_detour_is_refused(toml, tmp_path):
    path = toml('\nextends = "nope.toml"\n')
    assert mistake(path) == f"{path}:2: extends = 'nope.toml': there is no file {tmp_path}/nope.toml"
    assert "there is no file" in mistake(toml('extends = "."\n'))
    toml('extends = "b.toml"\n', "a.toml"), toml('extends = "./x/../a.toml"\n', "b.toml"), (tmp_path / "x").mkdir()
    assert mistake(tmp_path / "a.toml") == f"{tmp_path}/b.toml:1: extends = './x/../a.toml' leads back to itself"


def test_a_missing_file_and_a_folder_are_named(tmp_path):
    assert mistake(tmp_path / "nope.toml") == f"cannot read the configuration {tmp_path}/nope.toml: No such file or directory"
    assert mistake(tmp_path) == f"cannot read the configuration {tmp_path}: Is a directory"


def test_a_byte_order_mark_is_no_mistake(toml):
    assert load_config(toml(b"\xef\xbb\xbf[training]\r\nsteps = 3\r\n"))[0].training.steps == 3


@pytest.mark.parametrize(
    "text, key, line",
    [
        ("training.steps = 3\n", "training.steps", 1),
        ("training . steps = 3\n", "training.steps", 1),
        ("\n# steps = 1\n[training] # here\n  steps = 3 # steps = 4\n", "training.steps", 4),
        ("[ training ]\n'steps' = 3\n", "training.steps", 2),
        ('["training"]\n"steps" = 3\n', "training.steps", 2),
        ("\ntraining = { steps = 3, seq_len = 4 }\n", "training.seq_len", 2),
        ("[training]\ndataloader.num_workers = 1\ndataloader.pin_memory = true\n", "training.dataloader.pin_memory", 3),
        ("[training]\nsteps = 1\n[training.dataloader]\nnum_workers = 1\n", "training.dataloader.num_workers", 4),
        ("[job]\ndescription = '''\nsteps = 1\n[training]\nsteps = 2\n'''\n[training]\nsteps = 3\n", "training.steps", 8),
        ('[job]\ndescription = """\n\\"""\nname = 1\n"""\nname = "x"\n', "job.name", 6),
        ('[compile]\ncomponents = [\n  "model", # ["x"]\n  "loss",\n]\nenable = true\n', "compile.enable", 6),
        ('[compile]\ncomponents = [\n  "model",\n  "loss",\n]\nenable = true\n', "compile.components", 2),
        ("[job]\r\nname = 'x'\r\n\r\ndescription = 'y'\r\n", "job.description", 4),
        ("[job]\nname = 'a\u2028b\u0085c'\ndescription = 'y'\n", "job.description", 3),
    ],
)
def test_the_line_of_a_key_is_right(toml, text, key, line):
    path = toml(text)
    assert load_config(path)[1][key] == f"{path}:{line}"


def test_the_line_is_right_where_text_inside_a_string_looks_like_the_wrong_key(toml):
    path = toml("[job]\ndescription = '''\n[training]\nstep = 3\n'''\n[training]\n\nstep = 4\n")
    assert mistake(path).startswith(f"{path}:8: unknown key 'training.step'")


def test_explain_adds_where_each_key_involved_was_set(toml):
    path = toml("[training]\nseq_len = 7\n")
    error = ConfigError("they do not fit", "training.seq_len", "training.steps", "optimizer.lr")
    origins = load_config(path, ["--optimizer.lr", "1"])[1]
    assert explain(error, origins).splitlines() == [
        "titanlite: error: they do not fit",
        f"  training.seq_len is set at {path}:2",
        "  optimizer.lr is set at the command line",
    ]


# The resolved configuration


def again(cfg, toml):
    return load_config(toml(to_toml(cfg), "saved.toml"))[0]


def test_the_resolved_configuration_loads_again_as_it_is(toml):
    path = toml("[training]\nsteps = 7\nglobal_batch_size = 64\n[model]\nvocab_size = 300\n[compile]\ncomponents = []\n")
    cfg, _ = load_config(path, ["--optimizer.eps", "1e-08", "--checkpoint.enable", "--training.dataloader.num-workers", "3"])
    assert again(cfg, toml) == cfg
    assert again(again(cfg, toml), toml) == cfg


@pytest.mark.parametrize(
    "text",
    ['"', "'", "\\", "\\\\n", '"""', "'''", "é ü 漢字 🙂", "a\nb\r\nc\td", "#x = [y]", "\x00\x01\x1b\x1f\x7f\x85\u2028", " ", "true"],
)
def test_any_string_loads_again(toml, text):
    cfg = dataclasses.replace(Config(), job=dataclasses.replace(Config().job, name="x", description=text))
    assert again(cfg, toml) == cfg


@pytest.mark.parametrize("number", [1e-8, 1e22, 1e-300, 0.1, 3.0, -0.0, math.inf, 2**-1074, 1 / 3])
def test_any_float_loads_again_bit_for_bit(toml, number):
    cfg = dataclasses.replace(Config(), job=dataclasses.replace(Config().job, name="x"))
    cfg = dataclasses.replace(cfg, training=dataclasses.replace(cfg.training, max_norm=number))
    assert repr(again(cfg, toml).training.max_norm) == repr(number)


def test_every_key_is_written_out_so_that_later_defaults_change_nothing(toml):
    cfg, _ = load_config(toml(""))
    written = load_config(toml(to_toml(cfg), "saved.toml"))[1]
    assert set(written) == {key for key, value in to_dict(cfg).items() if value is not None}


def test_a_key_that_may_be_none_is_none_by_default_since_toml_cannot_say_it():
    may_be_none = [key for key, kind in KEYS.items() if type(None) in get_args(kind)]
    assert may_be_none and all(to_dict(Config())[key] is None for key in may_be_none)


def test_every_key_is_read_by_some_code_or_is_text_for_people():
    read = set()
    for path in Path(titanlite.__file__).parent.rglob("*.py"):
        if path.name not in ("config.py", "config_file.py", "torchtitan.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Attribute):
                    read.add(node.attr)
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    read.add(node.value.rsplit(".", 1)[-1])
    assert {key for key in KEYS if key.rsplit(".", 1)[-1] not in read} == {"job.description"}
