"""What stands on the page of results: its titles, what each is about, and which rows belong there."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["DETAIL", "FIRST", "HEAD", "MEASURING", "SECTIONS", "Section"]

HEAD = """\
# Benchmark results

Made by `python benchmarks/render.py` from the records in [records/](records/README.md); do not edit it.
"""
FIRST = """\
# How fast it is

Made by `python benchmarks/render.py` from the records in [records/](records/README.md); do not edit it. All lines
of all records, kernel by kernel, with commits, commands and ceilings, are on the page of results, which the same
command writes beside this one (`RESULTS.md`) and `make docs` shows on the site. Why kernels take as long as they do is
in [docs/kernels.md](../docs/kernels.md).

"""
MEASURING = """\

## Measuring

What a user measures is `dsv4-jax bench`: ops, a decode step, whole layers ([docs/cli.md](../docs/cli.md)). The scripts
here measure the rest; `--help` of each says what and how, `--json FILE` writes a record.

| script | what |
| --- | --- |
| `kernels.py` | every kernel by itself in CUDA graphs, checked, beside peers (cases: `problems.py`) |
| `bench_mesh.py`, `generate_mesh.py`, `bench_exchange.py` | models and exchanges over two GPUs or more |
| `bench_generate.py`, `bench_context.py` | prompts continued by the command; attention along a pool axis |
| `bench_swap.py`, `bench_store.py`, `bench_transport.py` | blocks to host memory, to a disk, from another host |
| `bench_manager.py`, `bench_policies.py` | the manager's own time; what eviction policies find on traces |
| `timeline.py`, `compile_step.py`, `beside.py` | when kernels of a step run; what XLA makes of a step |
| `torch_ops.py` | the ops in plain torch, as a baseline |
| `render.py` | this page, from records |
| `on_gpu.sh`, `on_gpu_wheel.sh`, `on_many_gpus.sh` | all of it in order of worth |
"""
DETAIL = """\
# Line by line

Each table shows the latest measurement of every line and names its records below. What bounds the kernels, and what
was tried, is in [docs/kernels.md](../docs/kernels.md). Times are in microseconds unless a heading says otherwise.
*Ratio* is our time over the peer's: below 1 ours is shorter. *Required* and *goal* are the project's targets.
"""


class Section(NamedTuple):
    """What of the records stands under a title: these ops, this table, the facts on this subject."""

    title: str
    about: str
    ops: tuple[str, ...] = ()
    table: str = ""
    subject: str = ""
    inline: bool = False  # facts as one sentence
    picture: str = ""  # as Markdown, below its rows


SECTIONS = (
    Section(
        "attend (one decoded token a request, fp8 rows)",
        "Batch: tokens. Beside a window of 128 rows `csa-flash` reads 512 entries, `csa-pro` and "
        "`hca-flash-128k` 1,024, "
        '`hca-flash-1m` 8,192, `swa` none. The default is `key_split="throughput"`; where a line has two figures, they '
        "are of the default and of `latency`. FlashMLA was timed on the same kind of machine.",
        ops=("attend",),
    ),
    Section(
        "index_scores (64 heads x 128)",
        "Batch: tokens, each with the keys of its context; `prefill`: tokens of one request. Queries rounded to FP4, "
        "as the model's are, take FP8 products, `bf16 queries` bf16 ones. DeepGEMM's keys are fp8.",
        ops=("index_scores",),
    ),
    Section(
        "top_k (exact, sorted)",
        "One score for four tokens of context; `flash` keeps 512, `pro` 1,024. vLLM's result is not sorted.",
        ops=("top_k",),
    ),
    Section(
        "append and the compressors",
        "`append`: norm, RoPE, rounding and store of fp8 rows (vLLM's kernel does the queries, too). Batch: rows; in a "
        "prefill, tokens of one request. `warm`: everything the kernel touches is in L2.",
        ops=("append", "compress_csa", "compress_index", "compress_hca"),
    ),
    Section("gather (fp8 rows to bf16)", "Batch: rows, at random places.", ops=("gather",)),
    Section(
        "The store of KVPool",
        "`KVPool.set_kv_buffer`: K and V of 8 heads x 128 at random rows; every byte is compared.",
        ops=("kv_store",),
    ),
    Section(
        "The experts of a MoE layer",
        "V4-Flash, 256 experts, top 6, FP4 weights x bf16 rows (`moe_e4m3`: rounded to e4m3), both products. Batch: "
        "tokens, routed at random; the megabytes are those of the experts they choose.",
        ops=("moe", "moe_e4m3", "route"),
    ),
    Section(
        "Dense products with FP8 weights",
        "Rows x columns of the weights, e4m3 with a scale per 128 x 128; `/8`: in so many groups, each with its own "
        "columns. Batch: rows, bf16 (DeepGEMM's are quantised before). The megabytes are those of the weights.",
        ops=("dense_fp8", "dense_e4m3", "dense_bf16"),
    ),
    Section(
        "Queries of a long chunk",
        "The product and the last steps of a query in one kernel. Batch: tokens of one request.",
        ops=("queries",),
    ),
    Section(
        "From block to block: hyper-connections",
        "A block's output into the four streams, what the next one reads mixed and normalised, in one kernel. `first`: "
        "no output yet; `head`: before the head; `bf16`: streams and outputs of the released numerics. Batch: tokens; "
        "the megabytes are those of streams, outputs, weights and x.",
        ops=("hyper_connection",),
    ),
    Section(
        "Between GPUs",
        "Each exchange is the operand of the next; KiB are those a GPU sends to one other, float32. "
        "`all_gather, sum_to_owner`: the mean of the two. `launched`: outside of a command buffer. xla: psum; "
        "all-gather and reduce-scatter. Batch: GPUs.",
        ops=("exchange",),
    ),
    Section(
        "Whole decode steps",
        "The attention stack with real projection sizes in bf16, fp8 rows, fp4 index keys: one executable, one command "
        "buffer, the cache updated in place. The floor is what the step's bytes and FLOPs take at the ceilings of the "
        "same run. The host's times below: Flash, 64 requests of 128 Ki tokens; the last four of a call alone.",
        table="steps",
        subject="dispatch",
    ),
    Section(
        "Whole layers with weights as released",
        "Decode steps of a model's first layers and its head, one executable: FP8 dense matrices, FP4 experts, fp8 "
        "rows, fp4 index keys. The floor is what its bytes and FLOPs take at the ceilings of the same run: dense "
        "matrices (`fp8`), the experts that the tokens choose (`fp4`; how many a layer, on average, in their column), "
        "other weights, the head, the streams between blocks, and the rows that are read. Times of a layer are the "
        "step's over its layers, the head's share in them. Launches: fusions and custom calls, one of several kernels "
        "counted once. Below: what several devices were compared with one in, and their memory.",
        table="models",
        subject="mesh",
    ),
    Section(
        "Attention along a pool axis",
        "`benchmarks/bench_context.py`, one device, 64 heads, 128 Ki tokens; kernels' times of a call. *plain*: "
        '`ops.attend`. *context*: cut into eight parts, as `key_split="context"` does. *parts/2*: what two ranks '
        "compute, on one. *share/2*: what one of two computes, without the exchange. *top_k* of all scores, *merge/n* "
        "of n ranks' candidates.",
        subject="context",
    ),
    Section(
        "Prompts continued by `dsv4-jax generate`",
        "Random prompts through a checkpoint of the first layers, drawn, written and loaded as any other, beside the "
        "step of as many requests that `bench model` times. Host: the median of each part of a decoding call; they run "
        "while the device computes the call before.",
        table="generate",
    ),
    Section(
        "Sampling",
        "`sample` by itself on logits of a step, us by what rows ask for. None: no settings, the likeliest tokens.",
        table="sampling",
    ),
    Section(
        "Requests through an engine's thread",
        "The same prompts as of `generate`, added to an `Engine`; a step's time as their reader sees it.",
        table="engine",
    ),
    Section(
        "Streams of a server",
        "`benchmarks/bench_serve.py`: prompts that nobody sent before, answers of a fixed length streamed to as many "
        "clients at once, through `dsv4-jax serve` and through an `Engine` alone; medians of rounds, of first tokens "
        "and times between tokens also the 99th percentile over streams. `aiperf`: NVIDIA's load generator asks the "
        "same server for as much; its streams do not begin at once, but each when another ends.",
        table="serve",
    ),
    Section(
        "What formats cost on real text",
        "The trained model of `checkpoints/small`, fed with held-out text through the cache as a server feeds prompts. "
        "Loss in nats a token, its change and KL divergence against the same weights with float32 rows and keys (of "
        "the first line of other weights: against float32 weights); the share of tokens whose likeliest successor is "
        "the same, and of picked entries that are. After ±: half an interval of 95 % over windows.",
        table="quality",
        picture="![KL divergence by row and key format](../docs/pictures/quality.svg)",
    ),
    Section(
        "Drafts accepted on real text",
        "By the MTP layer of the same model, or DSpark's stages, at places of that text. *After others*: of the drafts "
        "whose predecessors were accepted. Tokens a step: with so many drafts.",
        table="acceptance",
    ),
    Section(
        "Block swap (pinned host memory)",
        "Shares are of one large copy in the same run. *Calls in a row* include the host: a jitted call with its ids. "
        "`launch per layer and leaf` is FastDeploy's scheme.",
        table="swap",
        subject="swap",
    ),
    Section("The manager (host, no device)", "Flash layout.", subject="manager"),
    Section(
        "Equality",
        "Random mixes of requests, each compared with a lone, cold run of its own: tokens, logits and cache bytes.",
        subject="equality",
        inline=True,
    ),
    Section(
        "What a trace shows",
        "V4-Flash in the simulator, which replays a trace through the real manager; `benchmarks/bench_policies.py`. "
        "Memory is what a name says, device and host. The endless cache has found what any request had before; the "
        "clairvoyant one knows the trace and has the memory of that line (`dsv4_jax/simulate/bounds.py`). Times are "
        "those of steps of attention alone.",
        table="simulate",
    ),
    Section(
        "The storage tier",
        "Shares are of the faster disk of the same round: the median, and from the least to the most of the rounds. "
        "Required: 70 % in both directions.",
        table="store",
        subject="store",
    ),
    Section(
        "Records between hosts",
        "`benchmarks/bench_transport.py`: two processes of one machine, block records of V4-Flash (450,048 bytes) at "
        "scattered places of pools of 512; medians. *Verified*: checksums are compared where they arrive. Required of "
        "NIXL: 120 us for one record, 1.2 GB/s for 256.",
        subject="transport",
    ),
)
