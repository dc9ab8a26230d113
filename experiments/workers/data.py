"""Readers for the data sets, in the forms in which they are handed around. What is decoded once is kept as .npy files.

    cifar10/     six WebP mosaics of 100 x 100 pictures and labels.npz, or the official binary files (*.bin)
    cifar100/    the official binary files (train.bin, test.bin)
    wikitext2/   wiki.{train,valid,test}.tokens, plain or .xz
    sst2/        glue_{train,dev}.tsv with sentence and label, sst_sentences_test_labelled.tsv with label and sentence,
                 plain or .xz
    enwik8/      enwik8 or its beginning, plain or .xz
    minilm/      vocab.txt and model_fp16.safetensors (texts.py)

Where they come from: https://www.cs.toronto.edu/~kriz/cifar.html (binary version), WikiText-2 as in pytorch/examples
(word_language_model/data/wikitext-2), GLUE's SST-2, http://mattmahoney.net/dc/enwik8.zip, and the model
sentence-transformers/all-MiniLM-L6-v2.
"""

from __future__ import annotations

import hashlib
import lzma
import os
import re
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np

from gradzip.errors import Unsupported

Arrays = dict[str, np.ndarray]


def missing(path: Path, what: str) -> Unsupported:
    return Unsupported(f"{path} is not there: {what}; experiments/workers/data.py says where it comes from")


def cached(root: Path, name: str, make: Callable[[], Arrays]) -> Arrays:
    """The arrays of `make`, from files of an earlier call where there are some."""
    place = hashlib.blake2b(str(root.resolve()).encode(), digest_size=6).hexdigest()
    folder = Path(tempfile.gettempdir()) / f"gradzip-data-{os.getuid()}-{place}" / name
    if not folder.exists():
        arrays = make()
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as fresh:
            for key, value in arrays.items():
                np.save(Path(fresh) / f"{key}.npy", value)
            try:
                Path(fresh).rename(folder)  # whole or not at all: several processes may be at it
                Path(fresh).mkdir()
            except OSError:
                if not folder.exists():
                    raise
    return {path.stem: np.load(path) for path in sorted(folder.glob("*.npy"))}


def cifar(root: Path, classes: int, batches: int = 5) -> Arrays:
    """x_train and x_test (n, 32, 32, 3) uint8, y_train and y_test int64, in the official order.

    `batches`: the first so many of CIFAR-10's five files with 10,000 pictures to train with.
    """
    if classes == 10 and batches < 5:
        return cached(root, f"cifar10-{batches}", lambda: _cifar10(root, batches))
    make = _cifar10 if classes == 10 else _cifar100
    return cached(root, f"cifar{classes}", lambda: make(root))


def _cifar10(root: Path, batches: int = 5) -> Arrays:
    names = [f"data_batch_{i}" for i in range(1, batches + 1)] + ["test_batch"]
    for folder in (root / "cifar10", root / "cifar-10-batches-bin", root):
        if all((folder / f"{name}.webp").exists() for name in names):
            parts = [_mosaic(folder / f"{name}.webp") for name in names]
            labels = np.load(folder / "labels.npz")
            y, y_test = labels["y_train"][: 10000 * batches], labels["y_test"]
            return _pictures(np.concatenate(parts[:-1]), y, parts[-1], y_test)
        if all((folder / f"{name}.bin").exists() for name in names):
            read = [_records(folder / f"{name}.bin", 1) for name in names]
            x, y = np.concatenate([r[0] for r in read[:-1]]), np.concatenate([r[1] for r in read[:-1]])
            return _pictures(x, y, *read[-1])
    raise missing(root / "cifar10/data_batch_1.webp", "six files of CIFAR-10, .webp or .bin")


def _cifar100(root: Path) -> Arrays:
    for folder in (root / "cifar100", root / "cifar-100-binary"):
        if (folder / "train.bin").exists():
            return _pictures(*_records(folder / "train.bin", 2), *_records(folder / "test.bin", 2))
    raise missing(root / "cifar100/train.bin", "CIFAR-100's binary files")


def _mosaic(path: Path) -> np.ndarray:
    from PIL import Image

    mosaic = np.asarray(Image.open(path).convert("RGB"))
    return mosaic.reshape(100, 32, 100, 32, 3).transpose(0, 2, 1, 3, 4).reshape(10000, 32, 32, 3)


def _records(path: Path, labels: int) -> tuple[np.ndarray, np.ndarray]:
    """Pictures and the last of their labels."""
    rows = np.frombuffer(path.read_bytes(), np.uint8).reshape(-1, labels + 3072)
    return rows[:, labels:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), rows[:, labels - 1]


def _pictures(x: np.ndarray, y: np.ndarray, x_test: np.ndarray, y_test: np.ndarray) -> Arrays:
    labels = y.astype(np.int64), y_test.astype(np.int64)
    return {
        "x_train": np.ascontiguousarray(x), "y_train": labels[0],
        "x_test": np.ascontiguousarray(x_test), "y_test": labels[1],
    }  # fmt: skip


def text_of(root: Path, path: str) -> bytes:
    """A file's bytes, unpacked where it lies there as .xz."""
    plain, packed = root / path, root / f"{path}.xz"
    if plain.exists():
        return plain.read_bytes()
    if packed.exists():
        return lzma.open(packed).read()
    raise missing(plain, "text, plain or .xz")


def wikitext2(root: Path) -> Arrays:
    """Word numbers of train, valid and test, `<eos>` at each line's end; the vocabulary is that of all three."""
    return cached(root, "wikitext2", lambda: _wikitext2(root))


def _wikitext2(root: Path) -> Arrays:
    numbers: dict[str, int] = {}
    arrays = {}
    for split in ("train", "valid", "test"):
        lines = text_of(root, f"wikitext2/wiki.{split}.tokens").decode().split("\n")[:-1]
        words = (word for line in lines for word in (*line.split(), "<eos>"))
        arrays[split] = np.array([numbers.setdefault(word, len(numbers)) for word in words], np.int64)
    return arrays | {"vocabulary": np.array(len(numbers))}


def sst2(root: Path, split: str) -> list[tuple[str, int]]:
    """Sentences and labels of 'train' (67,349), 'dev' (872), or 'test' (1,821; GLUE's test part, which has labels)."""
    if split == "test":
        rows = text_of(root, "sst2/sst_sentences_test_labelled.tsv").decode().split("\n")[1:]
        return [(sentence.strip(), int(label)) for label, sentence in (row.split("\t", 1) for row in rows if row)]
    rows = text_of(root, f"sst2/glue_{split}.tsv").decode().split("\n")[1:]
    return [(sentence.strip(), int(label)) for sentence, label in (row.rsplit("\t", 1) for row in rows if row)]


def enwik8(root: Path) -> np.ndarray:
    """Bytes of the text, as uint8."""
    return cached(root, "enwik8", lambda: {"text": np.frombuffer(text_of(root, "enwik8/enwik8"), np.uint8)})["text"]


def enwik8_words(root: Path, vocabulary: int, size: int) -> np.ndarray:
    """The first bytes of the text as numbers of words, digits and signs; rare words are spelt letter by letter."""
    return cached(root, f"enwik8-words-{vocabulary}-{size}", lambda: _enwik8_words(root, vocabulary, size))["words"]


def _enwik8_words(root: Path, vocabulary: int, size: int) -> Arrays:
    found = re.findall(rb" ?[A-Za-z]+|[^A-Za-z]", enwik8(root)[:size].tobytes(), re.DOTALL)
    common = [word for word, _ in Counter(found).most_common() if len(word) > 1][: vocabulary - 256]
    numbers = {bytes([byte]): byte for byte in range(256)} | {word: 256 + i for i, word in enumerate(common)}
    words: list[int] = []
    for word in found:
        number = numbers.get(word)
        words.append(number) if number is not None else words.extend(word)
    return {"words": np.array(words, np.int32)}
