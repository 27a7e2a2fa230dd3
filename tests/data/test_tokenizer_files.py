"""A run's tokenizer in a Hugging Face folder, and messages put by its chat template."""

import json

import pytest

from titanlite.config import Model
from titanlite.data.chat import chat_prompt, chat_reply
from titanlite.data.tokenizer import BPE_END, build_tokenizer
from titanlite.data.tokenizer_files import FILES, copy_assets, export_tokenizer
from titanlite.utils import ConfigError

TEXT = "def naïve(x):\n\treturn  é中 \x00"
TEMPLATE = (
    "{% for message in messages %}\n{{ bos_token }}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


class Lines(list):
    fingerprint = "lines"


@pytest.fixture(params=["byte", "bpe"])
def exported(request, tmp_path):
    """(our tokenizer, the folder it was exported to, the marks)"""
    cfg = Model(tokenizer=request.param, vocab_size=300 if request.param == "bpe" else None)
    ours = build_tokenizer(cfg, tmp_path, Lines(["def naive(x): return x\n"] * 50))
    folder = tmp_path / "out"
    folder.mkdir()
    return ours, folder, export_tokenizer(cfg, tmp_path, folder)


def test_transformers_gives_our_ids_and_our_text(exported):
    import transformers

    ours, folder, marks = exported
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert theirs(TEXT)["input_ids"] == ours.encode_prompt(TEXT)
    assert theirs.decode(theirs(TEXT)["input_ids"], skip_special_tokens=True) == TEXT
    assert (theirs.bos_token, theirs.eos_token, theirs.eos_token_id) == (BPE_END, BPE_END, ours.end_id)
    assert len(theirs) == ours.vocab_size
    assert marks == json.loads((folder / "generation_config.json").read_bytes()) == {"bos_token_id": ours.end_id, "eos_token_id": ours.end_id}


def test_we_read_what_we_have_exported(exported):
    ours, folder, _ = exported
    again = build_tokenizer(Model(hf_assets_path=str(folder)), None, None)
    assert again.encode_document(TEXT).tolist() == ours.encode_document(TEXT).tolist()
    assert (again.vocab_size, again.end_id) == (ours.vocab_size, ours.end_id)


def test_every_file_of_a_tokenizer_is_copied_and_no_other(tmp_path):
    source, to = tmp_path / "source", tmp_path / "to"
    source.mkdir(), to.mkdir()
    for name in (*FILES, "model.safetensors", "modeling_evil.py"):
        (source / name).write_text(name)
    copy_assets(source, to)
    assert {path.name: path.read_text() for path in to.iterdir()} == {name: name for name in FILES}


@pytest.fixture
def chat(exported):
    _, folder, _ = exported
    cfg = Model(hf_assets_path=str(folder))
    return folder, lambda message: chat_prompt(cfg, build_tokenizer(cfg, None, None), message)


@pytest.mark.parametrize("place", ["file", "settings", "settings, by name"])
def test_a_message_is_put_as_transformers_puts_it(place, chat):
    import transformers

    folder, prompt = chat
    settings = json.loads((folder / "tokenizer_config.json").read_bytes())
    if place == "file":
        (folder / "chat_template.jinja").write_text(TEMPLATE)
    else:
        settings["chat_template"] = TEMPLATE if place == "settings" else [{"name": "tool_use", "template": "no"}, {"name": "default", "template": TEMPLATE}]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    options = {"add_generation_prompt": True, "return_dict": False}
    assert prompt("Grüße!") == theirs.apply_chat_template([{"role": "user", "content": "Grüße!"}], **options)


def test_a_reply_follows_what_was_drawn_as_the_whole_talk_would_read(chat):
    import transformers

    folder, prompt = chat
    turn = "{{ bos_token }}{{ m['role'] }}\n{{ m['content'] }}{{ eos_token }}"
    (folder / "chat_template.jinja").write_text(f"{{% for m in messages %}}{turn}.{{% endfor %}}{{% if add_generation_prompt %}}{{{{ bos_token }}}}assistant\n{{% endif %}}")
    cfg = Model(hf_assets_path=str(folder))
    tokenizer = build_tokenizer(cfg, None, None)
    said = [*tokenizer.encode_prompt("4 or 5")[1:], tokenizer.end_id]
    talk = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4 or 5"}, {"role": "user", "content": "which?"}]
    theirs = transformers.AutoTokenizer.from_pretrained(folder).apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    assert tokenizer.backend.decode([*prompt("2+2?"), *said, *chat_reply(cfg, tokenizer, "which?")], skip_special_tokens=False) == theirs


def test_without_a_chat_template_a_message_cannot_be_put(chat):
    with pytest.raises(ConfigError, match="--chat needs a chat template: model.hf_assets_path=.* has none"):
        chat[1]("hello")
    with pytest.raises(ConfigError, match="--chat needs a chat template"):
        chat_prompt(Model(), build_tokenizer(Model(), None, None), "hello")


def test_a_chat_template_that_fails_is_told(chat):
    (chat[0] / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(ConfigError, match="the chat template of .* fails"):
        chat[1]("hello")
