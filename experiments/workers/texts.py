"""Text models: the LSTM of PowerSGD's study, a GPT, and a small pretrained BERT with its tokenizer."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from . import data

_PARTS = ("weight", "bias")


class WordLstm(nn.Module):
    """Three layers of 650 units, word embedding and output tied (Merity et al.'s language model, simplified)."""

    def __init__(self, vocabulary: int, width: int = 650, layers: int = 3, dropout: float = 0.4) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, layers, dropout=dropout)
        self.bias, self.dropout = nn.Parameter(torch.zeros(vocabulary)), nn.Dropout(dropout)
        nn.init.uniform_(self.words.weight, -0.1, 0.1)

    def start(self, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        zeros = self.bias.new_zeros(self.lstm.num_layers, batch, self.lstm.hidden_size)
        return zeros, zeros.clone()

    def forward(
        self, words: torch.Tensor, state: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """(length, batch) words; logits, and the state after them."""
        out, state = self.lstm(self.dropout(self.words(words)), state)
        return F.linear(self.dropout(out), self.words.weight, self.bias), state


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Rotary positions for queries or keys (..., length, width): pairs are turned by an angle that grows with place."""
    half = x.shape[-1] // 2
    slow = 1000.0 ** (-torch.arange(half, device=x.device) / half)
    angle = torch.arange(x.shape[-2], device=x.device)[:, None] * slow
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class GptBlock(nn.Module):
    def __init__(self, width: int, heads: int, rotary: bool = False) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.heads, self.rotary = heads, rotary
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if self.rotary:
            q, k = rotated(q), rotated(k)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """A decoder as GPT-2's. 12 blocks of width 768 and 50,257 tokens are its 124 M parameters.

    `rotary`: relative positions instead of learned ones, and matrices of blocks that keep the size of what they
    multiply. Short runs do without the plateau at the loss of pairs of letters, whose end is a matter of chance.
    """

    def __init__(self, vocabulary: int, width: int, blocks: int, heads: int, length: int, rotary: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = None if rotary else nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(GptBlock(width, heads, rotary) for _ in range(blocks)))
        self.norm = nn.LayerNorm(width)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                by_size = rotary and isinstance(module, nn.Linear)
                nn.init.normal_(module.weight, std=module.weight.shape[1] ** -0.5 if by_size else 0.02)
        for block in self.blocks:
            assert isinstance(block, GptBlock)
            for last in (block.out, block.down):
                size = last.weight.shape[1] ** -0.5 if rotary else 0.02
                nn.init.normal_(last.weight, std=size / (2 * blocks) ** 0.5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        if self.places is not None:
            x = x + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        return F.linear(self.norm(self.blocks(x)), self.tokens.weight)


class BertLayer(nn.Module):
    def __init__(self, width: int, inner: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.mix, self.mix_norm = nn.Linear(width, width), nn.LayerNorm(width, eps=1e-12)
        self.up, self.down, self.norm = nn.Linear(width, inner), nn.Linear(inner, width), nn.LayerNorm(width, eps=1e-12)
        self.heads, self.dropout = heads, nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        shape = (*x.shape[:2], self.heads, -1)
        q, k, v = (f(x).view(shape).transpose(1, 2) for f in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).reshape(x.shape)
        x = self.mix_norm(x + self.dropout(self.mix(mixed)))
        return self.norm(x + self.dropout(self.down(F.gelu(self.up(x)))))


class Bert(nn.Module):
    """A BERT encoder with the mean over its tokens and a linear layer of two classes on top."""

    def __init__(self, vocabulary: int, width: int, layers: int, heads: int, inner: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(512, width)
        self.kinds, self.norm = nn.Parameter(torch.zeros(width)), nn.LayerNorm(width, eps=1e-12)
        self.layers = nn.ModuleList(BertLayer(width, inner, heads, dropout) for _ in range(layers))
        self.dropout, self.head = nn.Dropout(dropout), nn.Linear(width, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(batch, length) tokens, 0 behind the last."""
        there = tokens != 0
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.norm(self.words(tokens) + self.places(places) + self.kinds))
        for layer in self.layers:
            x = layer(x, there[:, None, None, :])
        mean = (x * there[:, :, None]).sum(1) / there.sum(1, keepdim=True)
        logits: torch.Tensor = self.head(self.dropout(mean))
        return logits

    @classmethod
    def pretrained(cls, folder: Path) -> Bert:
        """all-MiniLM-L6-v2's weights; the head is new, from torch's generator."""
        weights, config = (
            safetensors(folder / "model_fp16.safetensors"),
            json.loads((folder / "config.json").read_text()),
        )
        layers = config["num_hidden_layers"]
        sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
        model = cls(*(config[size] for size in sizes))
        named = {"words": "word_embeddings", "places": "position_embeddings", "norm": "LayerNorm"}
        state = {f"{ours}.{part}": f"embeddings.{theirs}.{part}" for ours, theirs in named.items() for part in _PARTS}
        inside = {
            "query": "attention.self.query", "key": "attention.self.key", "value": "attention.self.value",
            "mix": "attention.output.dense", "mix_norm": "attention.output.LayerNorm",
            "up": "intermediate.dense", "down": "output.dense", "norm": "output.LayerNorm",
        }  # fmt: skip
        for i in range(layers):
            for ours, theirs in inside.items():
                for part in _PARTS:
                    state[f"layers.{i}.{ours}.{part}"] = f"encoder.layer.{i}.{theirs}.{part}"
        own = model.state_dict()
        for ours, theirs in state.items():
            if ours in own:
                own[ours].copy_(weights[theirs])
        own["kinds"].copy_(weights["embeddings.token_type_embeddings.weight"][0])
        return model


def safetensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a .safetensors file, as float32: a length, a JSON table, the bytes."""
    raw = np.fromfile(path, np.uint8)
    length = int(raw[:8].view(np.int64)[0])
    table = json.loads(raw[8 : 8 + length].tobytes())
    kinds = {"F16": np.float16, "F32": np.float32}
    found = {}
    for name, entry in table.items():
        if name != "__metadata__" and entry["dtype"] in kinds:
            start, stop = (8 + length + offset for offset in entry["data_offsets"])
            values = raw[start:stop].view(kinds[entry["dtype"]]).astype(np.float32).reshape(entry["shape"])
            found[name.removeprefix("bert.")] = torch.from_numpy(values)
    return found


class WordPieces:
    """BERT's uncased tokenizer: words and punctuation, then the longest pieces that the vocabulary has."""

    def __init__(self, vocabulary: str) -> None:
        self._numbers = {piece: number for number, piece in enumerate(vocabulary.split("\n"))}
        self._first, self._last, self._unknown = (self._numbers[piece] for piece in ("[CLS]", "[SEP]", "[UNK]"))

    def __call__(self, sentence: str, length: int) -> list[int]:
        """Token numbers, `length` of them, 0 behind the last."""
        numbers = [number for word in self._words(sentence) for number in self._pieces(word)]
        numbers = [self._first, *numbers[: length - 2], self._last]
        return numbers + [0] * (length - len(numbers))

    def _words(self, sentence: str) -> list[str]:
        plain = unicodedata.normalize("NFD", sentence.lower())
        plain = "".join(c for c in plain if unicodedata.category(c) != "Mn")
        return "".join(f" {c} " if _punctuation(c) else c for c in plain).split()

    def _pieces(self, word: str) -> list[int]:
        numbers, start = list[int](), 0
        while start < len(word):
            for stop in range(len(word), start, -1):
                number = self._numbers.get(("##" if start else "") + word[start:stop])
                if number is not None:
                    break
            else:
                return [self._unknown]
            numbers.append(number)
            start = stop
        return numbers


def _punctuation(c: str) -> bool:
    return (not c.isalnum() and 33 <= ord(c) <= 126) or unicodedata.category(c).startswith("P")


def sentences(root: Path, split: str, length: int) -> tuple[np.ndarray, np.ndarray]:
    """SST-2 as (n, length) int64 tokens and labels."""

    def make() -> data.Arrays:
        tokenize = WordPieces(data.text_of(root, "minilm/vocab.txt").decode())
        rows = data.sst2(root, split)
        tokens = np.array([tokenize(sentence, length) for sentence, _ in rows], np.int64)
        return {"tokens": tokens, "labels": np.array([label for _, label in rows], np.int64)}

    arrays = data.cached(root, f"sst2-{split}-{length}", make)
    return arrays["tokens"], arrays["labels"]
