"""`dsv4-jax generate`: what it prints and reports, as `model.generate` draws it; what it refuses before it loads."""

from __future__ import annotations

import argparse
import itertools
import json
import pathlib
import random
from typing import ClassVar

import numpy as np
import pytest

from dsv4_jax import CacheLayout, DSV4Config, init_cache, model
from dsv4_jax.cli import generate as command
from dsv4_jax.cli import main
from dsv4_jax.cli.answers import StopText, TextStream
from dsv4_jax.cli.engine import DeviceMemory, choose_size, shared_tokens
from dsv4_jax.cli.prompts import given_prompts
from dsv4_jax.config import AttentionType
from dsv4_jax.errors import OptionError
from dsv4_jax.manager import KVCacheManager
from dsv4_jax.model.generate import StepOutput
from dsv4_jax.text.tokenizer import Tokenizer

from ..model import released
from .refusals import refused

CFG = DSV4Config.tiny(layer_types=(AttentionType.CSA,), hc_sinkhorn_iters=1, vocab_size=300, num_mtp_layers=1)
BEGIN, END = "<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>"
USER, ASSISTANT = "<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>"
SPECIAL = [BEGIN, END, USER, ASSISTANT, "<think>", "</think>"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("checkpoint")
    model.save_hf(CFG, model.init_params(CFG, 1, mtp=True), path)
    (path / "generation_config.json").write_text('{"eos_token_id": 1}')
    return path


@pytest.fixture(scope="module")
def with_text(checkpoint, tmp_path_factory) -> pathlib.Path:
    """The same with a tokenizer: a token a byte, and a few special ones."""
    tokenizers = pytest.importorskip("tokenizers")
    path = tmp_path_factory.mktemp("text")
    for file in checkpoint.iterdir():
        (path / file.name).symlink_to(file)
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    words = {name: i for i, name in enumerate([*SPECIAL, *letters])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"bos_token": {"content": BEGIN}, "add_bos_token": True}))
    return path


def ids_of(path: pathlib.Path, text: str) -> list[int]:
    import tokenizers

    return tokenizers.Tokenizer.from_file(str(path / "tokenizer.json")).encode(text).ids


class Script:
    """In the place of `model.generate`: draws what it is told, two tokens of every prompt a step."""

    def __init__(self, *answers: list[int], interrupt_after: int | None = None):
        self.answers, self.interrupt_after, self.prompts = answers, interrupt_after, []

    def __call__(self, params, cache, managers, prompts, *, max_new_tokens, stop_tokens, on_step=None, **options):
        self.params, self.cache, self.managers, self.options = params, cache, managers, options
        self.layout = managers[0].layout
        if on_step is None or max_new_tokens == 1:  # of the compilation; of what is shared
            return [], cache
        self.prompts, live = prompts, set(range(len(prompts)))
        for at in range(0, max_new_tokens, 2):
            if self.interrupt_after == at:
                raise KeyboardInterrupt
            drawn, ended = {}, []
            for i in sorted(live):
                tokens = self.answers[i][at : min(at + 2, max_new_tokens)]
                stop = next((n for n, token in enumerate(tokens) if token in stop_tokens), None)
                drawn[i] = tokens[:stop]
                if stop is not None or at + 2 >= max_new_tokens:
                    ended.append(i)
            live -= {*ended, *(on_step(StepOutput(0 if at else 3, drawn, tuple(ended))) or ())}
        return [], cache


@pytest.fixture
def script(monkeypatch):
    def install(*answers: list[int], **options) -> Script:
        script = Script(*answers, **options)
        monkeypatch.setattr(model, "generate", script)
        return script

    return install


def generate(path: pathlib.Path, *argv) -> list[str]:
    return ["generate", "--checkpoint", str(path), *map(str, argv)]


@pytest.mark.slow
def test_answers_are_those_of_the_model(checkpoint, tmp_path, capsys, monkeypatch):
    """Three prompts, two at a time, all beginning with the same block: each as alone in a cache that finds nothing."""
    called, real = [], model.generate

    def noted(params, cache, managers, prompts, **options):
        called.append((params, managers[0], prompts, options))
        return real(params, cache, managers, prompts, **options)

    monkeypatch.setattr(model, "generate", noted)
    same = np.random.default_rng(0).integers(2, 300, 40).tolist()
    prompts = [[*same, 7, 8, 9], [*same[:20], 5], same]
    np.save(tmp_path / "p.npy", np.array(prompts[0]))
    (tmp_path / "p.jsonl").write_text(f"{prompts[2]}\n\n".replace("[", '{"tokens": [').replace("]", "]}"))
    argv = generate(checkpoint, "--tokens", tmp_path / "p.npy", "--tokens", ",".join(map(str, prompts[1])))
    argv += ["--prompt-file", str(tmp_path / "p.jsonl"), "--max-batch", "2", "--max-new-tokens", "6"]
    argv += ["--block-tokens", "16", "--kv-format", "f32", "--index-format", "f32"]
    assert main([*argv, "--json", str(tmp_path / "answers.json")]) == 0
    out, err = capsys.readouterr()
    report = json.loads((tmp_path / "answers.json").read_text())
    (params, manager, _, options) = called[-1]
    prompts = [prompts[2], *prompts[:2]]  # files come before --tokens
    for i, (prompt, answer) in enumerate(zip(prompts, report["answers"], strict=True)):
        fresh = KVCacheManager(manager.layout, manager.size, policy=manager.policy)
        cache = init_cache(fresh.layout, fresh.size)
        drawn, _ = real(params, cache, fresh, [prompt], **options | {"on_step": None})
        assert [answer["tokens"]] == drawn and answer["prompt_tokens"] == len(prompt)
        assert (answer["end"], answer["text"]) == ("length", None)
        named = ",".join(map(str, prompt[:20]))[:37]
        tokens = ",".join(map(str, drawn[0]))
        assert f"[{i + 1}] '{named}...': 6 tokens, length\n{tokens}\n\n" in out
    assert report["max_batch"] == 2 and report["prefix_caching"] and report["cached_tokens"] >= 3 * 16
    fed = report["prompt_tokens"] + report["cached_tokens"]
    assert fed == sum(map(len, prompts)) + 17 and report["new_tokens"] == 18  # and what begins all of them, once more
    assert report["chunk_tokens"] == 128 and report["decode_calls"] and report["compile_s"] > report["decode_s"]
    assert " tokens of prompts (" in err and "first token after" in err


def test_one_prompt_streams(checkpoint, script, capsys, monkeypatch):
    shown = []
    monkeypatch.setattr("dsv4_jax.cli.answers._write", shown.append)
    script([5, 6, 7, 8, 9, 1, 3])
    assert main(generate(checkpoint, "--tokens", "1,2,3", "--max-new-tokens", "5")) == 0
    assert shown == ["5,6", ",7,8", ",9\n"]
    shown.clear()
    assert main(generate(checkpoint, "--tokens", "1,2,3", "--max-new-tokens", "7")) == 0
    assert shown == ["5,6", ",7,8", ",9\n"], "token 1 is the checkpoint's end"
    capsys.readouterr()
    assert main(generate(checkpoint, "--tokens", "1,2,3", "--stop-tokens", "8,300", "--json")) == 0
    (answer,) = json.loads(capsys.readouterr().out)["answers"]
    assert (answer["tokens"], answer["end"], answer["first_token_s"] > 0) == ([5, 6, 7], "stop", True)
    assert main(generate(checkpoint, "--tokens", "1", "--stop-tokens", "none", "--max-new-tokens", "6", "--json")) == 0
    (answer,) = json.loads(capsys.readouterr().out)["answers"]
    assert (answer["tokens"], answer["end"]) == ([5, 6, 7, 8, 9, 1], "length")


def test_a_closed_stdout(checkpoint, script, monkeypatch):
    script([10, 11])
    monkeypatch.setattr("sys.stdout", None)
    assert main(generate(checkpoint, "--tokens", "1", "--max-new-tokens", "2")) == 0


def test_options_reach_the_model(checkpoint, script):
    asked = script([5, 6])
    argv = generate(checkpoint, "--tokens", "1,2", "--max-new-tokens", "2", "--implementation", "xla")
    drawing = ["--temperature", "0.5", "--top-k", "7", "--top-p", "0.9", "--seed", "3"]
    assert main([*argv, "--drafts", "2", *drawing]) == 0
    assert asked.options["sampling"] == model.Sampling(0.5, 7, 0.9) and asked.options["seed"] == 3
    assert (asked.options["drafts"], asked.options["implementation"]) == (2, "xla")
    assert asked.layout.include_mtp and asked.layout.draft_tokens == 2 and "mtp" in asked.params
    assert main([*argv, "--decode-steps", "9", "--chunk", "7"]) == 0
    assert (asked.options["drafts"], asked.options["decode_steps"], asked.options["chunk_tokens"]) == (0, 2, 7)
    assert not asked.layout.include_mtp and asked.layout.draft_tokens == 0 and "mtp" not in asked.params


@pytest.mark.slow
def test_several_devices(checkpoint, script, capsys):
    """Heads are split for few prompts; else the devices have prompts of their own, side by side in all as asked for."""
    asked, many = script(*[[5, 6]] * 9), generate(checkpoint, *["--tokens", "1,2"] * 9, "--max-new-tokens", "2")
    for argv, mesh, slots in (
        ([*many, "--devices", "2"], {"data": 2, "tensor": 1}, 5),
        ([*many, "--devices", "2", "--max-batch", "8", "--pool"], {"data": 1, "tensor": 2}, 8),
    ):
        assert main([*argv, "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        found = {leaf.sharding.mesh for leaf in asked.cache.arrays.values()}
        assert [dict(mesh.shape) for mesh in found] == [mesh] and len(asked.managers) == mesh["data"]
        assert {manager.size.num_slots for manager in asked.managers} == {slots}
        assert (report["devices"], report["tensor"]) == (mesh["data"] * mesh["tensor"], mesh["tensor"])
        assert report["max_batch"] == slots * mesh["data"]
        ranks = mesh["tensor"] if "--pool" in argv else 1
        assert report["pool_ranks"] == asked.cache.pool_axis.size == asked.managers[0].size.pool_ranks == ranks


@pytest.mark.parametrize(("prompts", "shown"), [(1, "5,6\n"), (2, "[1] '9': 2 tokens, interrupted\n5,6\n\n[2]")])
def test_what_was_drawn_before_ctrl_c_stays(checkpoint, script, capsys, prompts, shown):
    script([5, 6, 7, 8], [6, 7, 8, 9], interrupt_after=2)
    assert main(generate(checkpoint, *["--tokens", "9"] * prompts)) == 130
    out, err = capsys.readouterr()
    assert out.startswith(shown) and out.count("\n") == {1: 1, 2: 6}[prompts] and err == "interrupted\n"


def test_text(with_text, script, capsys):
    """Prompts are put with the token that begins a text; an answer is text, ended by tokens or by strings."""
    answer = ids_of(with_text, "déjà vu: once, twice")
    asked = script([*answer, 1, 0], answer)
    assert main(generate(with_text, "--prompt", "Hé!")) == 0
    assert capsys.readouterr().out == "déjà vu: once, twice\n"
    assert asked.prompts == [[0, *ids_of(with_text, "Hé!")]]
    argv = generate(with_text, "--prompt", "a", "--stop", "once more", "--stop", "à v", "--json")
    assert main(argv) == 0
    (report,) = json.loads(capsys.readouterr().out)["answers"]
    assert (report["text"], report["end"], report["prompt"]) == ("déj", "stop", "a")
    assert report["tokens"] == ids_of(with_text, "déjà v")
    assert main(generate(with_text, "--prompt", "a", "--stop", "once more", "--max-new-tokens", "15")) == 0
    assert capsys.readouterr().out == "déjà vu: once\n", "what was held back comes with the end"
    assert main(generate(with_text, "--prompt", "a\nb", "--tokens", "4", "--max-new-tokens", "2")) == 0
    assert capsys.readouterr().out.startswith("[1] 'a\\nb': 2 tokens, length\nd\ufffd\n\n[2] '4': 2 tokens, length\n")


def test_chat(with_text, script, capsys, tmp_path):
    asked = script([ids_of(with_text, "no")[0], 1])
    assert main(generate(with_text, "--prompt", "why?", "--chat")) == 0
    assert asked.prompts == [[0, 2, *ids_of(with_text, "why?"), 3, 5]]
    assert main(generate(with_text, "--prompt", "why?", "--chat", "think")) == 0
    assert asked.prompts[0][-2:] == [3, 4]
    for file in with_text.iterdir():
        (tmp_path / file.name).symlink_to(file)
    template = tmp_path / "chat_template.jinja"
    template.write_text("{% for m in messages %}{{ m | tojson }}{% break %}{% endfor %}{{ thinking }}{{ bos_token }}")
    assert main(generate(tmp_path, "--prompt", "w<y?", "--chat")) == 0
    assert asked.prompts == [[*ids_of(with_text, '{"role": "user", "content": "w<y?"}False'), 0]]
    for text, problem in (
        ("{{", "template fails"),
        ("{{ raise_exception('not so') }}", "not so"),
        ("{{ 1 // 0 }}", ""),
    ):
        template.write_text(text)
        capsys.readouterr()
        refused(capsys, generate(tmp_path, "--prompt", "a", "--chat"), "--chat: ", problem)


@pytest.mark.every_case
@pytest.mark.parametrize("template", [None, "{{ m }}"])
def test_thinking_says_how_hard(with_text, script, capsys, tmp_path, template):
    script([1])
    path = a_chat(with_text, tmp_path, template=template and template.replace("m", "messages[0].content"))
    assert main(generate(path, "--prompt", "a", "--chat", "think")) == 0
    said = next(line for line in capsys.readouterr().err.splitlines() if line.startswith("--chat think: "))
    assert ("low" in said and "high" in said) if template is None else "chat template" in said
    assert main(generate(path, "--prompt", "a", "--chat")) == 0
    assert "--chat think" not in capsys.readouterr().err


def a_chat(with_text: pathlib.Path, path: pathlib.Path, *, template: str | None = None, **config) -> pathlib.Path:
    """`with_text` with another tokenizer_config.json and chat template, in `path`."""
    for file in with_text.iterdir():
        if file.name != "tokenizer_config.json":
            (path / file.name).symlink_to(file)
    configure(path, **config)
    if template is not None:
        (path / "chat_template.jinja").write_text(template, encoding="utf-8")
    return path


def configure(path: pathlib.Path, **config) -> None:
    (path / "tokenizer_config.json").write_text(json.dumps({"bos_token": BEGIN, "eos_token": END} | config))


ASKED = "w\u00ed<y? \u65e5\n"
# Template -> what transformers 5.23 makes of it; None: it raises.
TEMPLATES = {
    "{% if tools is not none %}TOOLS{% endif %}{% if documents is not none %}DOCS{% endif %}A": "A",
    "{% if tools is defined and tools is none %}B{% endif %}": "B",
    "{% for m in messages %}{% generation %}{{ m.content }}{% set x=1 %}{% endgeneration %}{{ x }};{% endfor %}": ASKED
    + ";",
    "{% generation %}\n  {% if add_generation_prompt %}\n  yes\n  {% endif %}\n{% endgeneration %}\nend": "  yes\nend",
    "{{ strftime_now('%Y') | length }}{{ strftime_now('%%') }}": "4%",
    "{% macro f(x) %}{{ strftime_now('%%') }}{{ x }}{% endmacro %}{{ f('a') }}": "%a",
    "{{ messages | tojson }}": '[{"role": "user", "content": "w\u00ed<y? \u65e5\\n"}]',
    "{{ {'b': 'x&y', 'a': 1} | tojson(indent=1, sort_keys=True) }}": '{\n "a": 1,\n "b": "x&y"\n}',
    "{{ {'b': '\u00e9', 'a': 1} | tojson(true, separators=(',', ':')) }}": '{"b":"\\u00e9","a":1}',
    "{{ 'x\u00e9' | tojson(ensure_ascii=True) }}": '"x\\u00e9"',
    "{{ bos_token }}{{ eos_token }}{{ pad_token is defined }}{{ sep_token is defined }}": f"{BEGIN}{END}FalseFalse",
    "{{ thinking }}{{ enable_thinking }}{{ add_generation_prompt }}": "FalseFalseTrue",
    "{% for m in messages %}{{ m.content | trim }}{% break %}{% endfor %}": ASKED.strip(),
    "{{ messages[0].content.split('\\n')[0][2:] }}{{ messages[0].role | upper }}": "<y? \u65e5USER",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = 3 %}{% endfor %}{{ ns.n }}": "3",
    "{{ messages.append(1) }}": None,
    "{{ raise_exception('no') }}": None,
    "{{ messages | tojson(0, 1, 2, 3, 4) }}": None,
    "{{ ''.__class__.__mro__ }}": None,
}


def ids_of_chat(path: pathlib.Path, template: str | None, messages: list[dict]) -> list[int]:
    (path / "chat_template.jinja").unlink(missing_ok=True)
    if template is not None:
        (path / "chat_template.jinja").write_text(template, encoding="utf-8")
    return Tokenizer(path).encode_chat(messages, False)


@pytest.mark.every_case
def test_templates_are_put_as_by_transformers(with_text, tmp_path):
    asked = [{"role": "user", "content": ASKED}]
    path = a_chat(with_text, tmp_path)
    for template, wanted in TEMPLATES.items():
        if wanted is None:
            with pytest.raises(OptionError, match="--chat: the checkpoint's chat template fails"):
                ids_of_chat(path, template, asked)
        else:
            assert ids_of_chat(path, template, asked) == ids_of(path, wanted), template
    (path / "chat_template.jinja").unlink()
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    for template, wanted in TEMPLATES.items():
        options = {"chat_template": template, "thinking": False, "enable_thinking": False, "return_dict": False}
        try:
            ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, **options)
        except Exception:
            ids = None
        assert ids == (None if wanted is None else ids_of(path, wanted)), template


@pytest.mark.every_case
def test_several_templates(with_text, tmp_path):
    """The one named "default", of tokenizer_config.json or of files, which win; else it is said that none is."""
    asked, names = [{"role": "user", "content": "a"}], ["tool_use", "default", "rag"]
    texts = [{"name": name, "template": f"{name}: {{{{ messages[0].content }}}}"} for name in names]
    path = a_chat(with_text, tmp_path, chat_template=texts)
    assert Tokenizer(path).encode_chat(asked, False) == ids_of(path, "default: a")
    configure(path, chat_template={text["name"]: text["template"] for text in texts})
    assert Tokenizer(path).encode_chat(asked, False) == ids_of(path, "default: a")
    for wrong, problem in (
        ([texts[0], texts[2]], r"none of the checkpoint's chat templates is the default: \['rag', 'tool_use'\]"),
        ([{"name": "default"}], "chat_template in tokenizer_config.json is "),
        (7, "chat_template in tokenizer_config.json is 7"),
    ):
        configure(path, chat_template=wrong)
        with pytest.raises(OptionError, match=f"--chat: {problem}"):
            Tokenizer(path).encode_chat(asked, False)
        assert Tokenizer(path).encode("b") == ids_of(path, "b"), "texts that are no questions need no template"
    (more := path / "additional_chat_templates").mkdir()
    (more / "rag.jinja").write_text("file")
    with pytest.raises(OptionError, match=r"none of the checkpoint's chat templates is the default: \['rag'\]"):
        Tokenizer(path).encode_chat(asked, False)
    assert ids_of_chat(path, "{{ messages[0].content }}!", asked) == ids_of(path, "a!")


MARKED = f"x{ASSISTANT}</think>y{USER}"


@pytest.mark.every_case
def test_what_users_type_is_never_a_mark(with_text, tmp_path):
    """Without a template, and with those that write texts as they are, trimmed, or as JSON, in every role."""
    path = a_chat(with_text, tmp_path)
    assert len(as_bytes(path, MARKED)) == len(MARKED.encode()) and min(as_bytes(path, MARKED)) > 5
    for content in (MARKED, f" {MARKED}", f'"{MARKED}\n', "<think>", "<", "think>", BEGIN * 3):
        asked, text = [{"role": "user", "content": content}], as_bytes(path, content)
        assert ids_of_chat(path, None, asked) == [0, 2, *text, 3, 5]
        template = (
            "{{ bos_token }}<\uff5cUser\uff5c>{{ messages[0].content }}{{ '<\uff5cAssistant\uff5c>' ~ '<think>' }}"
        )
        assert ids_of_chat(path, template, asked) == [0, 2, *text, 3, 4]
        assert ids_of_chat(path, template.replace("content", "content | trim"), asked) == [
            0,
            2,
            *as_bytes(path, content.strip()),
            3,
            4,
        ]
        assert ids_of_chat(path, template.replace("content", "content | tojson"), asked) == [
            0,
            2,
            *as_bytes(path, json.dumps(content, ensure_ascii=False)),
            3,
            4,
        ]
        cut = template.replace("content", "content[1:9]").replace(
            "<\uff5cUser\uff5c>", "{{ messages[0].content | length }}"
        )
        assert ids_of_chat(path, cut, asked) == [0, *as_bytes(path, f"{len(content)}{content[1:9]}"), 3, 4]
    halves = [{"role": "user", "content": "<think"}, {"role": "tool", "content": ">"}]
    for template, wanted in (
        ("{% for m in messages %}{{ m.content }}{% endfor %}<think>", [*as_bytes(path, "<think>"), 4]),
        ("<{{ messages[0].content[1:] }}></think>", [*as_bytes(path, "<think>"), 5]),
    ):
        assert ids_of_chat(path, template, halves) == wanted


def test_a_mark_that_the_merges_make_too_is_refused(with_text, tmp_path):
    path, whole = a_chat(with_text, tmp_path), json.loads((with_text / "tokenizer.json").read_text())
    whole["model"]["ignore_merges"], whole["pre_tokenizer"]["use_regex"] = True, False
    (path / "tokenizer.json").unlink()
    (path / "tokenizer.json").write_text(json.dumps(whole))
    with pytest.raises(OptionError, match="--checkpoint: its tokenizer has no ids for <think> as text, only as a mark"):
        ids_of_chat(path, None, [{"role": "user", "content": "<think>"}])
    assert ids_of_chat(path, None, [{"role": "user", "content": "a"}])[2:-2] == ids_of(path, "a")


@pytest.mark.every_case
def test_roles_calls_and_results_are_text_too(with_text, tmp_path):
    call = {"type": "function", "id": MARKED, "function": {"name": MARKED, "arguments": {"a": [MARKED, 1, None]}}}
    messages = [
        {"role": "system", "content": MARKED},
        {"role": "user", "content": [{"type": "text", "text": MARKED}, {"type": "text", "text": "<think>"}]},
        {"role": "assistant", "content": "", "reasoning_content": MARKED, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": MARKED, "content": MARKED},
    ]
    template = (
        "{% for m in messages %}{{ eos_token if m.role == 'system' else '<\uff5cUser\uff5c>' }}"
        "{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for part in m.content if part.type == 'text' %}{{ part.text }}{% endfor %}{% endif %}"
        "{{ m.reasoning_content }}{% for c in m.tool_calls or [] %}"
        "{{ c.id ~ c.function.name }}<think>{{ c.function.arguments | tojson }}{% endfor %}"
        "{% if m.tool_call_id == messages[2].tool_calls[0].id %}</think>{% endif %}{% endfor %}"
    )
    path = a_chat(with_text, tmp_path)
    marked = as_bytes(path, MARKED)
    arguments = as_bytes(path, json.dumps({"a": [MARKED, 1, None]}, ensure_ascii=False))
    assert ids_of_chat(path, template, messages) == [
        1,
        *marked,
        2,
        *marked,
        *as_bytes(path, "<think>"),
        2,
        *marked,
        *marked,
        *marked,
        4,
        *arguments,
        2,
        *marked,
        5,
    ]
    with pytest.raises(OptionError, match=r"--chat: .* has no chat_template\.jinja: only one question"):
        ids_of_chat(path, None, messages)


@pytest.mark.every_case
def test_templates_that_change_texts_are_refused(with_text, tmp_path):
    """What they make of a text is no longer seen to be one; what they find in it decides on their marks."""
    path = a_chat(with_text, tmp_path)
    for template in (
        "{{ messages[0].content | upper }}",
        "{{ messages[0].content | replace('y', '<think>') }}",
        "{{ messages[0].content.split('</think>')[-1] }}",
        "{% if '<think>' in messages[0].content %}<think>{% endif %}{{ messages[0].content }}",
        "{% if messages[0].content != 'y<think>' %}{{ raise_exception('') }}{% endif %}a",
        "{{ messages[0].content | tojson(true) }}\u00e9",
    ):
        with pytest.raises(OptionError, match="--chat: the checkpoint's chat template changes the text of a message"):
            ids_of_chat(path, template, [{"role": "user", "content": "y<think>" if "</" not in template else MARKED}])
    wrapped = "<{{ messages[0].content | lower }}>"  # harmless characters, and together a mark
    with pytest.raises(OptionError, match="--chat: the checkpoint's chat template changes the text of a message"):
        ids_of_chat(path, wrapped, [{"role": "user", "content": "THINK"}])
    harmless = f"<think>{wrapped}</think>"
    assert ids_of_chat(path, harmless, [{"role": "user", "content": "Why?"}]) == [4, *ids_of(path, "<why?>"), 5]


def as_bytes(path: pathlib.Path, text: str) -> list[int]:
    """A token a byte, whatever the bytes spell."""
    whole = json.loads((path / "tokenizer.json").read_text())
    whole["added_tokens"] = []
    import tokenizers

    return tokenizers.Tokenizer.from_str(json.dumps(whole)).encode(text).ids


def test_refusals(checkpoint, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "load", None)  # nothing is loaded before all is known to be right
    (lines := tmp_path / "lines.jsonl").write_text('"ok"\n{"tokens": "x"}\n')
    (bad := tmp_path / "bad.txt").write_bytes(b"a\n\xff\n")
    (tmp_path / "empty.txt").touch()
    for argv, *parts in (
        ([], "--prompt, --prompt-file, --tokens: give at least one"),
        (["--prompt", ""], "--prompt: an empty prompt"),
        (["--prompt-file", tmp_path / "empty.txt"], "give at least one"),
        (["--prompt-file", bad], "--prompt-file", "line 2: not UTF-8"),
        (["--prompt-file", lines], "--prompt-file", "line 2: {'tokens': 'x'} is neither"),
        (["--prompt-file", tmp_path], "is a directory"),
        (["--tokens", "1,x"], "argument --tokens: 'x' is not an integer"),
        (["--tokens", tmp_path / "none.npy"], "--tokens", "none.npy"),
        (["--tokens", "1,300"], "--tokens: token 300 is outside the vocabulary 0..299"),
        (["--tokens", "1", "--max-new-tokens", "99999"], "--tokens, --max-new-tokens: 1 tokens and 99999 new ones"),
        (["--tokens", "1", "--temperature", "-1"], "--temperature must be finite and at least 0"),
        (["--tokens", "1", "--top-p", "0"], "--top-p must be in (0, 1]"),
        (["--tokens", "1", "--top-p", "x"], "argument --top-p: 'x' is not a number"),
        (["--tokens", "1", "--stop", "a"], "--stop: ends texts"),
        (["--tokens", "1", "--chat"], "--chat: puts texts"),
        (["--tokens", "1", "--weights", "released"], "--weights: wq_a"),
        (["--tokens", "1", "--drafts", "4"], "argument --drafts: invalid choice: 4"),
        (["--tokens", "1", "--drafts", "2", "--chunk", "2"], "--chunk: a token and its 2 drafts are 3, got 2"),
        (["--tokens", "1", "--devices", "8"], "--devices, --tensor: 4 experts do not divide by 8 devices"),
        (["--tokens", "1", "--tensor", "2"], "--tensor: 1 devices do not divide by 2"),
        (["--tokens", "1", "--implementation", "cuda"], "--implementation: ", "cuda", "cannot run"),
        (["--tokens", "1", "--pool"], "--pool: blocks are shared by devices that share the heads"),
    ):
        refused(capsys, generate(checkpoint, *argv), *parts)
    monkeypatch.setattr(command, "device_bytes", lambda: 10_000)
    refused(
        capsys,
        generate(checkpoint, "--tokens", "1"),
        "--weights: float32 weights take ",
        "jax has 9.77 KiB of",
        "do not fit on 4 devices either",
    )
    needed = model.device_bytes(CFG, "float32")
    monkeypatch.setattr(command, "device_bytes", lambda: needed - 1)
    refused(capsys, generate(checkpoint, "--tokens", "1"), "--weights: ", "; --devices 2 would hold them")
    monkeypatch.setattr(command, "device_bytes", lambda: needed + 1000)
    refused(
        capsys, generate(checkpoint, "--tokens", "1"), "--max-new-tokens: a cache for 128 tokens", "has 900 B for it"
    )
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    refused(capsys, generate(checkpoint, "--prompt", "a"), "need the extra text (pip install 'dsv4_jax[text]')")


def test_checkpoints_that_do_not_run_are_named(capsys, tmp_path, monkeypatch):
    """Before anything is loaded or its room computed; FP8 checkpoints are loaded as released if not told otherwise."""
    monkeypatch.setattr(command, "load", lambda *_, **options: pytest.fail("loaded"))
    monkeypatch.setattr(command, "weight_bytes", lambda *_, **options: pytest.fail("computed"))
    released.write(tmp_path, released.with_fp8_experts(released.tensors()))
    argv = generate(tmp_path, "--tokens", "1")
    refused(
        capsys, argv, "--checkpoint: the checkpoint's routed experts are FP8 (e4m3", "only FP4 experts run", "bfloat16"
    )
    released.write(tmp_path, released.tensors() | {"mtp.0.head.weight": ("BF16", np.ones((4, 128), np.uint16))})
    refused(capsys, [*argv, "--drafts", "1"], "--checkpoint: ", "of its own (mtp.0.head.weight)", "without drafts")
    fields = json.loads((tmp_path / "config.json").read_text())
    for stages in (1, 3):
        fields |= {"dspark_block_size": 5, "num_nextn_predict_layers": stages}
        (tmp_path / "config.json").write_text(json.dumps(fields))
        refused(
            capsys, [*argv, "--drafts", "1"], "--drafts: config field 'dspark_block_size': ", "three stages (DSpark)"
        )
    with pytest.raises(pytest.fail.Exception, match="computed"):
        main(argv)


def test_checkpoints_without_text(checkpoint, with_text, capsys, tmp_path):
    refused(capsys, generate(checkpoint, "--prompt", "a"), "--checkpoint: ", "has no tokenizer.json", "--tokens")
    (tmp_path / "config.json").symlink_to(checkpoint / "config.json")
    (tmp_path / "tokenizer.json").write_text('{"version": 1}')
    refused(capsys, generate(tmp_path, "--prompt", "a"), "--checkpoint: ", "tokenizer.json is no tokenizer")
    odd = json.loads((with_text / "tokenizer.json").read_text())
    odd["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}  # at which the package panics
    (tmp_path / "tokenizer.json").write_text(json.dumps(odd))
    refused(capsys, generate(tmp_path, "--prompt", "a"), "--checkpoint: ", "tokenizer.json is no tokenizer")
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.json").symlink_to(with_text / "tokenizer.json")
    lacks = f"--chat: {tmp_path} has no chat_template.jinja, and DeepSeek-V4's own encoding needs"
    refused(capsys, generate(tmp_path, "--prompt", "a", "--chat"), f"{lacks} tokenizer_config.json with a bos_token")
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "e"}')
    refused(capsys, generate(tmp_path, "--prompt", "a", "--chat"), f"{lacks} bos_token in tokenizer_config.json")
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>", "add_bos_token": true}')
    refused(capsys, generate(tmp_path, "--prompt", "a", "--chat"), f"{lacks} <s> in tokenizer.json")
    refused(capsys, generate(tmp_path, "--prompt", "a"), "before each text, but tokenizer.json has no token <s>")
    (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": true}')
    refused(capsys, generate(tmp_path, "--prompt", "a"), "before each text, but it names no bos_token")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": BEGIN}))
    (tmp_path / "tokenizer.json").unlink()
    short = json.loads((with_text / "tokenizer.json").read_text())
    short["added_tokens"] = [token for token in short["added_tokens"] if token["content"] != ASSISTANT]
    del short["model"]["vocab"][ASSISTANT]
    (tmp_path / "tokenizer.json").write_text(json.dumps(short))
    refused(capsys, generate(tmp_path, "--prompt", "a", "--chat"), f"{lacks} {ASSISTANT} in tokenizer.json")
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.json").symlink_to(with_text / "tokenizer.json")
    refused(capsys, generate(tmp_path, "--prompt", "\udcff"), "--prompt: '\\udcff' is no Unicode text")
    refused(capsys, generate(tmp_path, "--prompt", "a", "--stop", ""), "--stop: an empty text")
    (tmp_path / "tokenizer_config.json").write_text("[]")
    refused(capsys, generate(tmp_path, "--prompt", "a"), "--checkpoint: ", "tokenizer_config.json holds []")
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "\\ud800"}')
    refused(capsys, generate(tmp_path, "--prompt", "a"), "--checkpoint: bos_token of its tokenizer_config.json")
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{{ \'\\ud800\' }}"}')
    refused(capsys, generate(tmp_path, "--prompt", "a", "--chat"), "--checkpoint: its tokenizer has no ids for")
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, "2"]}')
    refused(capsys, generate(tmp_path, "--tokens", "1"), "--stop-tokens: eos_token_id in ", "is [1, '2'], no ids")


def test_all_of_a_prompt_is_fed(with_text, tmp_path):
    """Whatever a tokenizer was trained to cut or fill up; and no mark of an editor's."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(with_text / "tokenizer.json"))
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer(tmp_path).encode("four") == ids_of(with_text, "four")
    (lines := tmp_path / "lines.jsonl").write_bytes(b'\xef\xbb\xbf"a"\r\n')
    args = argparse.Namespace(prompt=[], prompt_file=lines, tokens=[], chat=None)
    assert [content for _, content in given_prompts(args)] == ["a"]


# Parts


class Bytes:
    """A tokenizer of a token a byte, and of words that drop the space where a text begins."""

    words: ClassVar[dict[int, bytes]] = {256: b" wor", 257: b"ld", 258: b""}

    def decode(self, ids: list[int]) -> str:
        text = b"".join(self.words.get(token, bytes([token % 256])) for token in ids).decode(errors="replace")
        return text.removeprefix(" ")


@pytest.mark.parametrize(
    "ids",
    [
        [*"déjà \U0001f4a5 vu".encode()],
        [258, 256, 257, 258, 256, 257, 0xC3, 0xA9],
        [0xF0, 0x9F, 65, 0x9F, 0xC3],
        [256, 0xFF, 0xFF, 256, *"\ufffd".encode(), 256, 258, 0xE2, 0x82],
    ],
    ids=["characters", "words", "broken", "replacement"],
)
def test_pieces_add_up_to_the_text(ids):
    stream, tokenizer = TextStream(Bytes()), Bytes()
    pieces = [stream.add(token) for token in ids]
    assert "".join(pieces) + stream.end() == tokenizer.decode(ids)
    assert not any(piece.endswith("\ufffd") for piece in pieces), "a character is shown when it is complete"
    if ids[0] == ord("d"):
        assert pieces == ["d", "", "é", "j", "", "à", " ", "", "", "", "\U0001f4a5", " ", "v", "u"]


def test_stop_strings_are_found_across_pieces():
    def run(pieces, *stops):
        stop = StopText(stops)
        shown = []
        for piece in pieces:
            shown.append(stop.add(piece))
            if stop.found:
                return shown, True
        return [*shown, stop.end()], False

    assert run(["ab", "c", "d"], "bc") == (["a", ""], True)
    assert run(["ab", "b", "c"], "bc") == (["a", "b", ""], True)
    assert run(["ab", "x"], "bc", "xyz") == (["a", "b", "x"], False)
    assert run(["one two"], "two", "one") == ([""], True)
    assert run(["anything"]) == (["anything", ""], False)


def test_the_stop_string_that_ends_first_wins_however_text_is_cut():
    """Of several that end at the same place the longest, by definition: against all places of all texts."""
    rng, compared = random.Random(0), 0
    cases = [("aaaabaaabbbb", ["ba", "abaa"]), ("baa", ["baa", "a"]), ("xabc", ["bc", "abc", "c"])]
    for _ in range(300):
        text = "".join(rng.choices("ab", k=rng.randrange(1, 12)))
        cases.append((text, ["".join(rng.choices("ab", k=rng.randrange(1, 5))) for _ in range(3)]))
    for text, stops in cases:
        ends = range(1, len(text) + 1)
        found = next((start for end in ends for start in range(end) if text[start:end] in stops), None)
        for _ in range(5):
            cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randrange(5)))
            stop, shown = StopText(stops), ""
            for start, end in itertools.pairwise([0, *cuts, len(text)]):
                shown += "" if stop.found else stop.add(text[start:end])
            shown += "" if stop.found else stop.end()
            assert (shown, stop.found) == (text[:found], found is not None), (text, stops, cuts)
            compared += 1
    assert compared == 5 * 303


def test_the_cache_is_what_prompts_need_and_fits():
    layout = CacheLayout(CFG, "f32", "f32", block_tokens=16)
    needs = [10, 40, 17]  # 1, 3 and 2 blocks
    size = choose_size(layout, needs, 2, DeviceMemory(1 << 40, 0))
    assert (size.num_blocks, size.num_slots, size.max_blocks_per_request, size.num_snapshots) == (5, 2, 3, 0)
    assert choose_size(layout, needs, 3, DeviceMemory(1 << 40, 0), snapshots=True).num_snapshots == 4
    memory = DeviceMemory(int(layout.total_bytes(size) / 0.9) + 1001, 1000)
    assert choose_size(layout, needs, 3, memory) == size
    with pytest.raises(OptionError, match="a cache for 40 tokens, prompt included, takes"):
        choose_size(layout, needs, 3, DeviceMemory(2000, 1000))


def test_what_prompts_share():
    assert shared_tokens([[1, 2, 3, 4, 5], [1, 2, 3, 9, 9, 9], [1, 2, 3, 4]], 2) == 2
    assert shared_tokens([[1, 2, 3]] * 2, 2) == 2
    assert shared_tokens([[1, 2]] * 2, 2) is None, "the last token is always computed"
    assert shared_tokens([[1, 2, 3], [1, 2, 4], [5]], 2) == 0
    assert shared_tokens([[1, 2, 3]], 2) is None
