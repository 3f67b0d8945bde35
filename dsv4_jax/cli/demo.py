"""`demo`: decodes real text through the cache, and says whether that equals a forward that has no cache."""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..errors import PlanError
from ..layout import CacheLayout
from ..plotting import save
from ..text import Tokenizer
from .demo_plot import picture
from .models import load
from .options import add_command, add_json, naming, option, refuse_same, start_jax
from .printing import Progress, present
from .values import given_path, output_folder, picture_file, positive

if TYPE_CHECKING:
    from .demo_accuracy import LayerAccuracy
    from .demo_passes import Served

__all__ = ["add_parser", "divergence", "exactness", "readable", "run", "say"]

_EXAMPLES = """
  dsv4-jax demo                                   a tiny random model, text of its own
  dsv4-jax demo --checkpoint checkpoints/small    a small trained model: it writes Python, too
  dsv4-jax demo --checkpoint DIR --text FILE      yours; bytes are its tokens if it has no tokenizer.json
  dsv4-jax demo --plot demo.png --json demo.json  a picture and all numbers
  dsv4-jax demo --keep demo-out                   keep the random model and the text
"""
Comparison: TypeAlias = Callable[[np.ndarray, np.ndarray], np.ndarray]
# Quantised rows change the logits by design; only the float32 cache must agree with the cache-free forward.
_TOLERANCE = 1e-4


def add_parser(commands: argparse._SubParsersAction) -> None:
    fails = "a logit differs from the cache-free forward's"
    summary = "decode real text through the cache and check it"
    parser = add_command(commands, "demo", summary, __doc__, _EXAMPLES, fails=fails)
    option(parser, "--checkpoint", given_path, "DIR", "default: a tiny random model")
    option(parser, "--text", given_path, "FILE", "default: a paragraph about the cache")
    option(parser, "--new-tokens", positive, "N", "per request", default=64)
    option(parser, "--chunk", positive, "N", "most tokens per step", default=64)
    option(parser, "--keep", output_folder, "DIR", "write the random model and the text there")
    option(parser, "--plot", picture_file, "PNG", "draw what is compared (needs matplotlib)")
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from .demo_accuracy import attention_accuracy
    from .demo_passes import continued, fast_to_compile, keep, random_model, read_prompts, serve, without_cache

    refuse_same({"--text": args.text, "--json": args.json, "--plot": args.plot})
    tokenizer = None
    if args.checkpoint and (args.checkpoint / "tokenizer.json").is_file():
        with naming("--checkpoint"):
            tokenizer = Tokenizer(args.checkpoint)
    prompts = read_prompts(args.text, tokenizer)
    start_jax()
    cfg, params = load(args.checkpoint) if args.checkpoint else random_model()
    if tokenizer is None and cfg.vocab_size < 256:
        raise PlanError(f"--checkpoint: a vocabulary of {cfg.vocab_size} has no room for bytes")
    written = keep(args.keep) if args.keep else []
    written += [path for path in (args.plot, args.json) if isinstance(path, pathlib.Path)]
    exact, quantised = CacheLayout(cfg, "f32", "f32"), CacheLayout(cfg, "fp8", "fp4")
    with Progress("float32 cache, compiling and decoding", 2 * len(prompts) * args.new_tokens) as progress:
        told = {"on_tokens": progress.advance}
        first = serve(params, exact, prompts, args.new_tokens, args.chunk, **told)
        progress.update("the same without a cache")
        reference = without_cache(params, exact, first.sequences, [len(rows) for rows in first.logits])
        progress.update("quantised cache")
        untimed = {"compiler_options": fast_to_compile()}
        script = first.sequences
        second = serve(params, quantised, prompts, args.new_tokens, args.chunk, script=script, **told, **untimed)
        progress.update("each layer of the quantised cache")
        layers = attention_accuracy(params, quantised, script[0], **untimed)
        if tokenizer is not None:
            progress.update("writing on two files")
        written_on = [] if tokenizer is None else continued(params, quantised, tokenizer, args.new_tokens)
    report: dict[str, Any] = {
        **exactness(first, reference),
        "model": str(args.checkpoint or "tiny, random"),
        "random": not args.checkpoint,
        "requests": _requests(first, prompts, reference, tokenizer),
        "continued": [each._asdict() for each in written_on],
        "quantised": _quantised(quantised, exact, layers, second, reference),
        "speed": _speed(first, random=not args.checkpoint),
        "written": [str(path) for path in written],
    }
    if args.plot:
        differences, divergences = _by_token(_largest, first, reference), _by_token(divergence, second, reference)
        save(picture(report, differences, divergences), args.plot)
    present(report, args.json, lambda console: say(console, report))
    return 0 if report["passed"] else 1


# What was found


def _by_token(compare: Comparison, served: Served, reference: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Compares the logits of every token of every request."""
    return [compare(want, got) for want, got in zip(reference, served.logits, strict=True)]


def _largest(want: np.ndarray, got: np.ndarray) -> np.ndarray:
    return np.abs(got - want).max(-1)


def divergence(want: np.ndarray, got: np.ndarray) -> np.ndarray:
    """Returns the Kullback-Leibler divergence of next-token distributions, in nats: [T, vocab] logits twice -> [T]."""

    def log_softmax(x: np.ndarray) -> np.ndarray:
        x = x.astype(np.float64) - x.max(-1, keepdims=True)
        return x - np.log(np.exp(x).sum(-1, keepdims=True))

    p, q = log_softmax(want), log_softmax(got)
    return (np.exp(p) * (p - q)).sum(-1)


def _same(want: np.ndarray, got: np.ndarray) -> np.ndarray:
    return want.argmax(-1) == got.argmax(-1)


def exactness(served: Served, reference: Sequence[np.ndarray]) -> dict[str, Any]:
    """The verdict, and how near it was: logits through the cache beside those without one."""
    worst = float(np.concatenate(_by_token(_largest, served, reference)).max())
    passed = worst <= _TOLERANCE
    return {
        "passed": passed,
        "verdict": f"decoding from the cache {'equals' if passed else 'does not equal'} a forward that has no cache",
        "max_logit_difference": worst,
        "tolerance": _TOLERANCE,
        "largest_logit": float(max(np.abs(rows).max() for rows in reference)),
        "tokens": sum(map(len, reference)),
        "same_likeliest_token": int(np.concatenate(_by_token(_same, served, reference)).sum()),
    }


def _requests(
    served: Served,
    prompts: Sequence[Sequence[int]],
    reference: Sequence[np.ndarray],
    tokenizer: Tokenizer | None,
) -> list[dict[str, Any]]:
    return [
        {
            "prompt_tokens": len(prompt),
            "new_tokens": len(sequence) - len(prompt),
            "prompt": readable(prompt, tokenizer),
            "generated": readable(sequence[len(prompt) :], tokenizer),
            "max_logit_difference": float(differences.max()),
        }
        for prompt, sequence, differences in zip(
            prompts, served.sequences, _by_token(_largest, served, reference), strict=True
        )
    ]


def readable(tokens: Iterable[int], tokenizer: Tokenizer | None = None) -> str:
    """Tokens as a line of text, bytes without a tokenizer; what is no printable character is a dot."""
    if tokenizer is None:
        text = bytes(token if token < 256 else 0 for token in tokens).decode("utf-8", errors="replace")
    else:
        text = " ".join(tokenizer.decode(list(tokens)).split())
    return "".join(c if c.isprintable() and c != "\ufffd" else " " if c.isspace() else "." for c in text)


def _quantised(
    layout: CacheLayout,
    exact: CacheLayout,
    layers: Sequence[LayerAccuracy],
    served: Served,
    reference: Sequence[np.ndarray],
) -> dict[str, Any]:
    neighbours = [divergence(rows[1:], rows[:-1]) for rows in reference]
    by_token = layout.cfg.num_hash_layers == len(layout.cfg.layer_types)
    return {
        "kv_format": layout.kv_row.name,
        "index_format": layout.index_row.name,
        "layers": [layer._asdict() | {"attention": layer.attention.name} for layer in layers],
        "kl_nats": float(np.concatenate(_by_token(divergence, served, reference)).mean()),
        "kl_nats_between_neighbours": float(np.concatenate(neighbours).mean()),
        "same_likeliest_token": float(np.concatenate(_by_token(_same, served, reference)).mean()),
        "experts": "by token" if by_token else "by router",
        "bytes_per_token": layout.bytes_per_token,
        "float32_bytes_per_token": exact.bytes_per_token,
    }


def _speed(served: Served, *, random: bool) -> dict[str, Any]:
    import jax

    device = jax.devices()[0]
    how = "the CPU reference" if device.platform == "cpu" else f"on {device.device_kind}"
    return {
        "of": f"{how}, {'a tiny random model' if random else 'this model'}, {len(served.sequences)} requests",
        "jax": jax.__version__,
        "prefill_tokens_per_s": served.prefill_rate,
        "decode_tokens_per_s": served.decode_rate,
    }


# What is said


def say(console: Console, report: dict[str, Any]) -> None:
    """The report in words, its verdict first."""

    def line(text: str) -> None:
        console.print(text, highlight=False)

    requests = report["requests"]
    line(f"{'[bold green]PASSED[/]' if report['passed'] else '[bold red]FAILED[/]'}: {report['verdict']}.")
    line(
        f"{report['tokens']:,} tokens of {len(requests)} requests: no logit differs by more than "
        f"{report['max_logit_difference']:.1e} ({report['tolerance']:.0e} is allowed, logits reach "
        f"{report['largest_logit']:.1f}); {report['same_likeliest_token']:,} likeliest next tokens are the same."
    )
    line("")
    meaning = " (it is random: what it writes means nothing)" if report["random"] else ""
    line(f"[bold]What the model read and wrote[/]{meaning}")
    width = console.width - 14
    for i, request in enumerate(requests):
        read, wrote = request["prompt"], request["generated"]
        line(f"  {i + 1} read   {escape(_end(f'...{read}' if len(read) > width else read, width))}")
        line(f"    wrote  {escape(wrote if len(wrote) <= width else wrote[: width - 3] + '...')}")
    line("")
    _say_quantised(console, report["quantised"])
    line("")
    for each in report["continued"]:
        tokens, cached = each["prompt_tokens"], each["cached"]
        line(f"[bold]It goes on[/] with this file, of whose {tokens} tokens {cached or 'none'} were in the cache:")
        console.print(escape(_last_lines(each["begun"], 3)), style="dim", highlight=False)
        console.print(escape(each["written"].rstrip()), highlight=False)
        line("")
    speed = report["speed"]
    line(
        f"[bold]Speed[/] of {escape(speed['of'])}: {speed['prefill_tokens_per_s']:,.0f} tokens/s of prefill, "
        f"{speed['decode_tokens_per_s']:,.0f} of decoding. It says nothing of other models or devices."
    )
    line(
        f"Written: {escape(', '.join(report['written']))}."
        if report["written"]
        else "Nothing was written (--keep DIR: the model and the text; --plot PNG: a picture)."
    )


def _last_lines(text: str, count: int) -> str:
    return "\n".join(["...", *text.rstrip().splitlines()[-count:]])


def _end(text: str, width: int) -> str:
    """The last characters that fit, behind three dots if there are more."""
    return text if len(text) <= width else f"...{text[3 - width :]}"


def _say_quantised(console: Console, quantised: dict[str, Any]) -> None:
    formats = f"{quantised['kv_format']} rows, {quantised['index_format']} index keys"
    table = Table("layer", title=f"[bold]A smaller cache[/]: {formats}", title_justify="left", title_style="")
    table.add_column("attention output differs from float32 by", justify="right")
    table.add_column("picks the same entries", justify="right")
    for layer in quantised["layers"]:
        same = layer["same_entries"]
        table.add_row(
            f"{layer['layer']} {layer['attention']}",
            f"{layer['output_error']:.1%}",
            "" if same is None else f"{same:.0%}",
        )
    console.print(table, highlight=False)
    held = {
        "by token": "Experts are looked up by token, so that only the cache differs.",
        "by router": "The router decides in both.",
    }[quantised["experts"]]
    console.print(
        f"Each layer is given the same input as float32. Over all layers the next-token predictions move by "
        f"{quantised['kl_nats']:.4f} nats (KL; {quantised['kl_nats_between_neighbours']:.2f} between neighbouring "
        f"tokens of this text). {held} A token takes {quantised['bytes_per_token']:,.1f} bytes in place of "
        f"{quantised['float32_bytes_per_token']:,.1f}.",
        highlight=False,
    )
