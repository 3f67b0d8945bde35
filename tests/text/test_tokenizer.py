"""Text to ids: marks are tokens where the checkpoint puts them, and nowhere else."""

from __future__ import annotations

import importlib.util
import json
import pathlib
import sys

import pytest

from dsv4_jax.errors import CheckpointError, RequestError
from dsv4_jax.text import BYTE_TOKENS, Tokenizer, save_byte_tokenizer

from .folders import ASSISTANT, BEGIN, END, USER, ids_of


@pytest.fixture(scope="module")
def with_text(tmp_path_factory) -> pathlib.Path:
    """A folder with a tokenizer of a token a byte."""
    if importlib.util.find_spec("tokenizers") is None:  # then DeepSeek's package reads them
        pytest.importorskip("deepseek_recipe")
    path = tmp_path_factory.mktemp("text")
    save_byte_tokenizer(path)
    return path


MARKED = f"x{ASSISTANT}</think>y{USER}"


def test_a_mark_that_the_merges_make_too_is_refused(with_text, tmp_path):
    whole = json.loads((with_text / "tokenizer.json").read_text())
    whole["model"]["ignore_merges"], whole["pre_tokenizer"]["use_regex"] = True, False
    (tmp_path / "tokenizer.json").write_text(json.dumps(whole))
    with pytest.raises(RequestError, match="the tokenizer has no ids for <think> as text, only as a mark"):
        Tokenizer(tmp_path).encode_marked("<think>", [])
    assert Tokenizer(tmp_path).encode_marked("a", []) == ids_of("a")


def test_all_of_a_prompt_is_fed(with_text, tmp_path):
    """Whatever a tokenizer was trained to cut or fill up; and no mark of an editor's."""
    whole = json.loads((with_text / "tokenizer.json").read_text())
    whole["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    whole["padding"] = {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None}
    whole["padding"] |= {"pad_id": 0, "pad_type_id": 0, "pad_token": BEGIN}
    (tmp_path / "tokenizer.json").write_text(json.dumps(whole))
    assert Tokenizer(tmp_path).encode("four") == ids_of("four")


def test_a_byte_is_a_token(with_text):
    """All bytes, as the package that reads it has them, behind the marks; with none in front."""
    tokenizer, marks = Tokenizer(with_text), BYTE_TOKENS - 256
    text = "".join(map(chr, range(128))) + "d\u00e9j\u00e0 \u65e5 \U0001f4a5"
    assert tokenizer.encode(text) == [marks + byte for byte in text.encode()]
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode(f"{BEGIN}a{END}{USER}{ASSISTANT}") == [0, marks + ord("a"), 1, 2, 3]
    lone = [tokenizer.decode([marks + byte]) for byte in range(256)]
    assert lone == [bytes([byte]).decode(errors="replace") for byte in range(256)]


@pytest.mark.parametrize("package", ["tokenizers", "deepseek_recipe"])
def test_bytes_of_ids(with_text, tmp_path, monkeypatch, package):
    """Of a mark those of its name. Special ones are no text, others are; ids of nothing are nothing."""
    pytest.importorskip(package)
    whole = json.loads((with_text / "tokenizer.json").read_text())
    whole["added_tokens"] = [token | {"special": token["content"] != "<think>"} for token in whole["added_tokens"]]
    (tmp_path / "tokenizer.json").write_text(json.dumps(whole))
    if package != "tokenizers":
        monkeypatch.setitem(sys.modules, "tokenizers", None)
    tokenizer, marks = Tokenizer(tmp_path), BYTE_TOKENS - 256
    assert [tokenizer.bytes_of(marks + byte) for byte in range(256)] == [bytes([byte]) for byte in range(256)]
    assert [tokenizer.bytes_of(i) for i in (0, 4, 5, BYTE_TOKENS)] == [BEGIN.encode(), b"<think>", b"</think>", b""]
    assert [tokenizer.is_special(i) for i in (0, 4, 5, marks, BYTE_TOKENS)] == [True, False, True, False, False]
    assert tokenizer.decode([0, 4, marks + 97, 5]) == "<think>a"


def test_marks_are_where_they_are_said_to_be(with_text):
    tokenizer = Tokenizer(with_text)
    text = f"{BEGIN}{USER}{MARKED}<think>"
    ends = [0, len(BEGIN), len(BEGIN + USER), len(text) - len("<think>"), len(text)]
    marks = [(ends[0], ends[1]), (ends[1], ends[2]), (ends[3], ends[4])]
    assert tokenizer.encode_marked(text, marks) == [0, 2, *ids_of(MARKED), 4]
    assert tokenizer.encode_marked(MARKED, []) == ids_of(MARKED)
    for wrong in ([marks[1], marks[0]], [(0, len(text) + 1)], [(-1, 3)], [(3, 2)]):
        with pytest.raises(RequestError, match="marks must be ranges of 0"):
            tokenizer.encode_marked(text, wrong)
    with pytest.raises(CheckpointError, match="has no token xyz"):
        tokenizer.encode_marked("a xyz", [(2, 5)])


def test_what_is_no_text_is_refused(with_text):
    tokenizer = Tokenizer(with_text)
    for call in (
        lambda: tokenizer.encode("\ud800"),
        lambda: tokenizer.encode(7),
        lambda: tokenizer.encode_marked("\ud800", []),
        lambda: tokenizer.decode([-1]),
        lambda: tokenizer.decode(["a"]),
    ):
        with pytest.raises(RequestError):
            call()
