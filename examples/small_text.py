"""The text of examples/train_small.py: Python code whose licence allows it, cut into tokens.

CPython's standard library (PSF licence), and the packages of `PACKAGES`: wheels of Python alone, from the package index
by name and version, under MIT, BSD or Apache licences. Nothing of them is imported or run. Of each at most `MAX_BYTES`
are taken, so that no one style dominates; tests, vendored code, tables of data, files that name a GPL, and files with
the same content are left out. `prepare` writes what it took into a manifest; the texts themselves are not kept in this
repository.

Held out: every file whose path's SHA-256 begins with a byte below `HELD_OUT`, and all of `UNSEEN`.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
import re
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

__all__ = [
    "BEGIN",
    "END",
    "VOCABULARY",
    "Text",
    "prepare",
    "read_tokens",
    "read_wheel",
    "save_tokenizer",
    "tokens_of",
    "write_tokens",
]

VOCABULARY, BEGIN, END = 4096, 0, 1
MARKS = ("<|begin|>", "<|end|>")
# Newlines end a token, indentation is one, and words take the space before them.
_PIECES = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|[ \t]*[\r\n]+|\s+(?!\S)|\s+"
MAX_BYTES, HELD_OUT, SAMPLE_BYTES = 3_800_000, 5, 24_000_000
PACKAGES = (
    "accelerate==1.15.0", "alembic==1.20.1", "apache-airflow-core==3.3.2", "attrs==26.1.0", "babel==2.18.0",
    "bokeh==3.10.2", "celery==5.7.0", "cinder==29.0.0", "cirq-core==1.7.0", "click==8.5.1", "dask==2026.8.0",
    "datasets==5.2.0", "diffusers==0.42.1", "distributed==2026.8.0", "django==6.1.3", "djangorestframework==3.18.3",
    "fastapi==0.165.0", "flask==3.1.3", "flax==0.12.12", "glance==33.0.0", "gymnasium==1.4.0",
    "homeassistant==2025.1.4", "httpx==0.28.1", "ipython==9.18.1", "jax==0.11.2", "jinja2==3.1.6", "keras==3.15.1",
    "keystone==30.0.0", "kombu==5.7.0", "lightning==2.6.6", "luigi==3.8.1", "marshmallow==4.4.0", "meson==1.12.1",
    "mkdocs==1.6.1", "mne==1.13.2", "nbconvert==7.17.2", "networkx==3.7", "neutron==29.0.0", "nilearn==0.14.1",
    "nltk==3.10.4", "nova==34.0.0", "numpyro==0.22.0", "openstack-heat==27.0.1", "optax==0.2.8", "peft==0.21.2",
    "pennylane==0.45.1", "pip==26.3", "poetry==2.5.1", "prefect==3.9.1", "pydantic==2.14.3", "pygments==2.21.0",
    "pymatgen==2026.10.24", "pymc==6.4.0", "pytest==9.2.0", "redis==8.1.0", "requests==2.34.2", "rich==15.0.0",
    "scrapy==2.19.0", "setuptools==84.2.1", "sktime==1.2.0", "sphinx==9.1.1", "sqlglot==30.30.0", "starlette==1.10.0",
    "streamlit==1.67.0", "sympy==1.14.0", "textual==8.2.8", "transformers==5.23.0", "trio==0.35.0", "twisted==26.10.0",
    "urllib3==2.8.0", "wagtail==8.0.1", "werkzeug==3.1.9", "xarray==2026.9.0",
)  # fmt: skip
UNSEEN = ("httpx", "luigi", "marshmallow", "mkdocs")
_LEFT_OUT = re.compile(
    r"(^|/)(tests?|testing|_?vendor(ed)?|third_party|_?extern(al|als)?|site-packages|lib2to3|idlelib|locale|migrations)/"
    r"|(^|/)test_[^/]*\.py$|_pb2(_grpc)?\.py$"
)
_LICENCES = re.compile(r"\b(MIT|BSD|Apache)\b")
_REFUSED = re.compile(rb"\b[AL]?GPL|General Public License", re.I)


class Text(NamedTuple):
    """A file: where from, its path there, and what it says."""

    package: str
    path: str
    content: str


def prepare(folder: pathlib.Path, manifest: pathlib.Path) -> dict[str, Any]:
    """Downloads, trains the tokenizer, and writes `tokenizer.json`, `train.npy` and `held_out.npy` into `folder`.

    Returns what it wrote as `manifest`: versions, licences and digests of the packages, the held-out files, and counts.
    """
    import tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    wheels = folder / "wheels"
    files, sources, seen = [], [], set()
    for package in ("python", *PACKAGES):
        found, about = read_wheel(_downloaded(package, wheels), package) if "==" in package else _standard_library()
        taken = []
        for text in found:
            digest = hashlib.sha256(text.content.encode()).hexdigest()
            if digest not in seen:
                seen.add(digest)
                taken.append(text)
        files += taken
        sources.append(about | {"files": len(taken), "bytes": sum(len(text.content.encode()) for text in taken)})
    files.sort(key=lambda text: _digest(f"{text.package}/{text.path}"))
    tokenizer = _trained(tokenizers, files)
    tokenizer.save(str(folder / "tokenizer.json"))
    splits: dict[str, list[Text]] = {"train": [], "held_out": []}
    for text in files:
        splits["held_out" if _held_out(text) else "train"].append(text)
    counts = {}
    for split, texts in splits.items():
        tokens = _tokens(tokenizer, texts)
        np.save(folder / f"{split}.npy", tokens)
        counts[split] = {
            "files": len(texts),
            "bytes": sum(len(text.content.encode()) for text in texts),
            "tokens": tokens.size,
            "sha256": hashlib.sha256(tokens.tobytes()).hexdigest(),
        }
    held_out = {f"{text.package}/{text.path}": _digest(text.content) for text in splits["held_out"]}
    facts = {"sources": sources, "unseen": UNSEEN, **counts, "held_out_files": held_out}
    manifest.write_text(json.dumps(facts, indent=1) + "\n")
    return facts


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _held_out(text: Text) -> bool:
    return text.package in UNSEEN or int(_digest(f"{text.package}/{text.path}")[:2], 16) < HELD_OUT


def _downloaded(package: str, wheels: pathlib.Path) -> pathlib.Path:
    name, version = package.split("==")
    pattern = f"{name.replace('-', '_')}-{version}-py*-none-any.whl"
    if not (found := sorted(wheels.glob(pattern))):
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", wheels]
        subprocess.run([*map(str, command), package], check=True)
        found = sorted(wheels.glob(pattern))
    return found[0]


def _standard_library() -> tuple[list[Text], dict[str, Any]]:
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    found = ((name, (root / name).read_bytes()) for name in names if not _LEFT_OUT.search(name))
    about = {"name": "python", "version": sys.version.split()[0], "licence": "PSF-2.0"}
    return _limited("python", found, 1 << 30), about


def read_wheel(path: pathlib.Path, package: str) -> tuple[list[Text], dict[str, Any]]:
    """The files taken of a package "name==version", and what is noted of it. Raises `SystemExit`: another licence."""
    name, version = package.split("==")
    with zipfile.ZipFile(path) as wheel:
        about = next(n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
        head = wheel.read(about).decode(errors="replace").split("\n\n")[0]
        said = re.findall(r"^(?:License-Expression:|Classifier: License ::|License:) (.*)$", head, re.M)
        licence = next((text.strip() for text in said if _LICENCES.search(text)), None)
        if licence is None or any("GPL" in text for text in said):
            raise SystemExit(f"{package}: its licence is {said}, not known to be MIT, BSD or Apache")
        names = sorted(n for n in wheel.namelist() if n.endswith(".py") and not _LEFT_OUT.search(n))
        texts = _limited(name, ((n, wheel.read(n)) for n in names), MAX_BYTES)
    about = {"name": name, "version": version, "licence": licence.removeprefix("OSI Approved :: ")}
    return texts, about | {"sha256": hashlib.sha256(path.read_bytes()).hexdigest()}


def _limited(package: str, found: Iterator[tuple[str, bytes]], most: int) -> list[Text]:
    """Keeps texts that read like code written by people, in the order of their paths' digests, up to `most` bytes."""
    texts, left = [], most
    for path, data in sorted(found, key=lambda file: _digest(file[0])):
        if not 200 <= len(data) <= 200_000 or len(data) > left or _REFUSED.search(data[:4000]):
            continue
        try:
            content = data.decode().replace("\r\n", "\n")
        except UnicodeDecodeError:
            continue
        lines = content.split("\n")
        if max(map(len, lines)) > 1000 or len(content) > 100 * len(lines) or "\0" in content:
            continue
        texts.append(Text(package, path, content))
        left -= len(data)
    return texts


def _trained(tokenizers: Any, files: list[Text]) -> Any:
    """Byte-level BPE; every text can be said."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(_PIECES), "isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(MARKS),
        show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    sample, left = [], SAMPLE_BYTES
    for text in files:
        if left > 0 and not _held_out(text):
            sample.append(text.content)
            left -= len(text.content)
    tokenizer.train_from_iterator(sample, trainer)
    return tokenizer


def _tokens(tokenizer: Any, texts: list[Text]) -> np.ndarray:
    """Encodes the texts one after the other, each with its path as a comment before it: uint16."""
    parts = []
    for first in range(0, len(texts), 500):
        said = [f"# {text.path}\n{text.content}" for text in texts[first : first + 500]]
        for encoding in tokenizer.encode_batch(said, add_special_tokens=False):
            parts.append(np.array([BEGIN, *encoding.ids, END], np.uint16))
    return np.concatenate(parts)


def save_tokenizer(folder: pathlib.Path, to: pathlib.Path) -> None:
    """`tokenizer.json` of `prepare`, and how to use it: a turn is the beginning of a file, to be completed."""
    (to / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    template = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": MARKS[BEGIN],
        "eos_token": MARKS[END],
        "add_bos_token": True,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
        "chat_template": template,
    }
    (to / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    ends = {"bos_token_id": BEGIN, "eos_token_id": END}
    (to / "generation_config.json").write_text(json.dumps(ends, indent=2) + "\n")


def write_tokens(tokens: np.ndarray, path: pathlib.Path) -> None:
    """Writes tokens for the way to another machine: two arrays of bytes, compressed, about half of what they were."""
    import lzma

    data = tokens.astype("<u2").view(np.uint8).reshape(-1, 2).T.tobytes()
    path.write_bytes(lzma.compress(data, preset=6))


def tokens_of(folder: pathlib.Path, split: str) -> np.ndarray:
    """Reads "train" or "held_out" of a folder, whichever form it has them in."""
    packed = folder / f"{split}.xz"
    return read_tokens(packed if packed.exists() else folder / f"{split}.npy")


def read_tokens(path: pathlib.Path) -> np.ndarray:
    """Reads the tokens of `prepare`, or of `write_tokens` (a name that ends in .xz); uint16."""
    if path.suffix != ".xz":
        return np.load(path)
    import lzma

    data = np.frombuffer(lzma.decompress(path.read_bytes()), np.uint8)
    return np.ascontiguousarray(data.reshape(2, -1).T).view("<u2").reshape(-1)
