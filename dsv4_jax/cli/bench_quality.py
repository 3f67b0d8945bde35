"""What `bench quality` measures: a trained checkpoint on real text, in every format of the cache."""

from __future__ import annotations

import argparse
import importlib.util
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, get_args

import numpy as np
from rich.table import Column, Table

from ..config import DSV4Config
from ..errors import OptionError
from ..formats import INDEX_FORMATS, KV_FORMATS
from ..layout import KeySplit
from .inputs import open_regular, read_tokens
from .models import FORMS, check, check_drafts, load
from .options import naming, option
from .printing import Progress
from .values import given_path, positive, short

__all__ = ["OPTIONS", "acceptance_table", "add_options", "draw", "listed", "measured", "picture", "quality_table"]

OPTIONS = ("checkpoint", "text", "tokens", "weights", "kv_format", "index_format")
_RULES = ((0.0, "coupled"), (1.0, "coupled"), (1.0, "standard"))  # temperatures of drafts, and what keeps them
# Tokens, context, requests side by side and tokens of a chunk, where they are not given: in full, and in a quick run.
_SIZES = {False: (1 << 20, 4096, 64, 4096), True: (1 << 12, 1024, 4, 256)}
_DECODED = 32  # one token of so many is fed in a step of its own


def add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "quality", "a trained checkpoint on real text: loss, KL and picked entries by format; with --drafts acceptance"
    )
    option(group, "--checkpoint", given_path, "DIR", "config.json, safetensors")
    text = "tokens (.npy) or a text (default: the source files of this package)"
    option(group, "--text", given_path, "FILE", text)
    option(group, "--tokens", positive, "N", "most tokens of the text (default: 1,048,576; of a quick run 4,096)")
    for name, known in (("--weights", FORMS), ("--kv-format", KV_FORMATS), ("--index-format", INDEX_FORMATS)):
        option(group, name, listed(tuple(known)), "NAME,...", f"of {', '.join(known)} (default: all)")


def listed(known: Sequence[str]) -> Callable[[str], list[str]]:
    """Returns what reads names of these, with commas between them."""

    def parsed(text: str) -> list[str]:
        names = list(dict.fromkeys(text.split(",")))
        if wrong := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"{short(wrong[0])} is none of {', '.join(known)}")
        return names

    return parsed


def measured(args: argparse.Namespace, quick: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Returns (table, row) of what was asked for, each when it is known.

    Raises:
        OptionError: at once: no checkpoint or text, or sizes that do not fit them or the device.
    """
    import jax

    from ..bench.acceptance import measure_acceptance
    from ..bench.quality import Feeding, Form, measure_quality, reference_bytes, variants, windows_of
    from .bench_steps import fits

    if args.checkpoint is None:
        raise OptionError("quality: needs a trained --checkpoint")
    with naming("--checkpoint"):
        cfg = DSV4Config.from_hf(args.checkpoint)
    check_drafts(cfg, args.drafts or 0)
    weights, numerics = args.weights or FORMS, args.numerics or ["plain"]
    if "released" in numerics and "released" not in weights:
        raise OptionError(f"--numerics: released ones are of --weights released, got {','.join(weights)}")
    each = {form: numerics if form == "released" else ["plain"] for form in FORMS if form in weights}
    forms = [Form(form, rounding) for form in each for rounding in each[form]]
    for form in each:
        check(args.checkpoint, cfg, form, drafts=bool(args.drafts))
    implementations = args.implementations or [None]
    for name in ("batch", "context"):
        if len(getattr(args, name) or ()) > 1:
            raise OptionError(f"--{name}: quality is measured at one")
    tokens, context, requests, chunk = _SIZES[quick]
    context = args.context[0] if args.context else min(context, cfg.max_position_embeddings)
    if not _DECODED <= context <= cfg.max_position_embeddings:
        raise OptionError(f"--context: {context}, of {_DECODED} to {cfg.max_position_embeddings} for this model")
    with naming("--text"):
        windows = windows_of(_text(args, cfg), context, args.tokens or tokens)
    requests = min(args.batch[0] if args.batch else requests, len(windows))
    feeding = Feeding(windows, requests, args.chunk if args.chunk > 1 else chunk, max(context // _DECODED, 1))
    references = 1 + ("float32" in weights and len(forms) > 1)
    fits(f"what {feeding.tokens} tokens are compared with", references * reference_bytes(cfg, feeding))
    splits = [args.key_split] if args.key_split else list(get_args(KeySplit))
    chosen = variants(args.kv_format or list(KV_FORMATS), args.index_format or list(INDEX_FORMATS), splits)
    compilers = max(1, min(8, (os.cpu_count() or 2) // 2)) if jax.default_backend() == "gpu" else 1

    def loaded(form: Form, drafts: bool = False) -> Any:
        return load(args.checkpoint, form.weights, drafts=drafts, numerics=form.numerics)[1]

    def rows() -> Iterator[tuple[str, dict[str, Any]]]:
        total = len(implementations) * (len(forms) * len(chosen) + len(_RULES) * bool(args.drafts))
        with Progress("text", total) as progress:
            for name in implementations:
                how: dict[str, Any] = dict(implementation=name, compilers=compilers, on_start=progress.update)
                for row in measure_quality(cfg, loaded, forms, chosen, feeding, **how):
                    yield "quality", row
                    progress.advance()
                if args.drafts:
                    params = loaded(forms[-1], drafts=True)
                    for temperature, rule in _RULES:
                        progress.update(f"drafts at temperature {temperature:g}")
                        given: Any = dict(rule=rule, numerics=forms[-1].numerics, implementation=name)
                        found = measure_acceptance(cfg, params, feeding, args.drafts, temperature, **given)
                        yield from (("acceptance", {"weights": forms[-1].weights} | row) for row in found)
                        progress.advance()

    return rows()


def _text(args: argparse.Namespace, cfg: DSV4Config) -> np.ndarray:
    """The tokens of the text, of this model's vocabulary."""
    path: pathlib.Path | None = args.text
    if path is not None and path.suffix == ".npy":
        tokens = read_tokens(path)
    else:
        if importlib.util.find_spec("tokenizers") is None:
            raise OptionError("a text needs the extra text (pip install 'dsv4_jax[text]'); token ids (.npy) do not")
        from ..text.tokenizer import Tokenizer

        tokenizer = Tokenizer(args.checkpoint)
        if path is None:
            root = pathlib.Path(__file__).parents[1]
            files = sorted(root.rglob("*.py"))
            texts = [f"# {file.relative_to(root.parent).as_posix()}\n{file.read_text('utf-8')}" for file in files]
        else:
            with open_regular(path, "--text") as file:
                texts = [file.read().decode(errors="replace")]
        tokens = np.concatenate([np.asarray(tokenizer.encode(text)) for text in texts])
    if tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) < cfg.vocab_size:
        raise OptionError(f"a token outside the vocabulary 0..{cfg.vocab_size - 1}")
    return tokens


# Tables


def quality_table(rows: list[dict[str, Any]]) -> Table:
    first = rows[0]
    text = f"{first['tokens']:,} tokens in {first['windows']} windows of {first['context']:,}"
    title = f"{text}; ± is half an interval of 95 %"
    split = Column("key split", no_wrap=True)
    table = Table("weights", "rows", "index keys", split, title=title, title_justify="left")
    for name in ("loss", "change", "KL", "KL, decode", "same token", "same entries"):
        table.add_column(name, justify="right", no_wrap=True)
    last = _form(first)
    for row in rows:
        if _form(row) != last:
            table.add_section()
            last = _form(row)
        formats = row["kv_format"], row["index_format"], row["key_split"]
        cells = [last.removesuffix(" weights"), *formats, f"{row['loss']:.4f}"]
        forms = {"loss_change": "+.4f", "kl": ".1e", "decoded_kl": ".1e", "same_token": ".2%", "same_entries": ".1%"}
        table.add_row(*cells, *(_interval(row, name, form) for name, form in forms.items()))
    return table


def acceptance_table(rows: list[dict[str, Any]]) -> Table:
    head = "DSpark's stages" if rows[0]["head"] == "dspark" else "the MTP layer"
    title = f"drafts of {head} at {rows[0]['places']:,} places of the text"
    table = Table("temperature", "kept by the rule", "draft", title=title, title_justify="left")
    for name in ("accepted", "of those whose predecessors were", "tokens a step with so many"):
        table.add_column(name, justify="right")
    for row in rows:
        cells = [f"{row['temperature']:g}", row["rule"] or "", str(row["draft"]), _interval(row, "accepted", ".1%")]
        table.add_row(*cells, _interval(row, "accepted_after_others", ".1%"), f"{row['tokens_a_step']:.2f}")
    return table


def _form(row: dict[str, Any]) -> str:
    """A row's weights, or its numerics where these are not plain: they say what the weights are."""
    return f"{row['numerics']} numerics" if row.get("numerics") else f"{row['weights']} weights"


def _interval(row: dict[str, Any], name: str, form: str) -> str:
    mean, half = row.get(name), row.get(f"{name}_half")
    if mean is None or not np.isfinite(mean):
        return ""
    return f"{mean:{form}}" + ("" if half is None else f" ±{half:{form.replace('+', '')}}")


# The picture


def draw(rows: list[dict[str, Any]], path: pathlib.Path, *, device: str) -> None:
    """Writes the picture of the rows of "quality". Raises `FileError`."""
    from ..plotting import save

    save(picture(rows, device=device), path)


def picture(rows: list[dict[str, Any]], *, device: str) -> Any:
    """Draws KL and the entries picked alike by row format and index format, a row of panels for each weights."""
    from ..plotting import figure, legend_below, look, style, tick

    compared = [row for row in rows if row["against"] == "float32 rows"]
    shown = [row for row in compared if row["key_split"] == compared[0]["key_split"]]
    if not shown:
        raise OptionError("--plot: nothing was compared with float32 rows")
    forms = list(dict.fromkeys(map(_form, shown)))
    kinds = [name for name in KV_FORMATS if any(row["kv_format"] == name for row in shown)]
    keys = [name for name in INDEX_FORMATS if any(row["index_format"] == name for row in shown)]
    first = rows[0]
    detail = (
        f"{device}; {first['tokens']:,} tokens of real text, context {first['context']:,}; bars are intervals of 95 %"
    )
    with style():
        made = figure("What a format of the cache costs", detail, 1.2 + len(forms) * (0.7 + 0.42 * len(kinds)))
        panels = made.subplots(len(forms), 2, squeeze=False, width_ratios=(3, 2))
        for (left, right), form in zip(panels, forms, strict=True):
            for i, key in enumerate(keys):
                own = [row for row in shown if (_form(row), row["index_format"]) == (form, key)]
                for axes, name, factor in ((left, "kl", 1.0), (right, "same_entries", 100.0)):
                    mine = [row for row in own if row.get(name) is not None and np.isfinite(row[name])]
                    axes.errorbar(
                        [factor * row[name] for row in mine],
                        [kinds.index(row["kv_format"]) + 0.14 * (i - (len(keys) - 1) / 2) for row in mine],
                        xerr=[factor * (row[f"{name}_half"] or 0) for row in mine],
                        **{**look(i, markers=True), "linestyle": "none"},
                        label=f"{key} index keys",
                    )
            for axes, title in ((left, f"KL, nats a token; {form}"), (right, "Entries picked alike, %")):
                axes.set(title=title, ylim=(len(kinds) - 0.5, -0.5))
                tick(axes.yaxis, range(len(kinds)), lambda at: kinds[at])
            left.set_xlim(left=0)
        legend_below(made, [panels[0, 0]])
    return made
