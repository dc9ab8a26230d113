"""Tensors of well-known models as tables: name, shape, and multiply-adds per sample, in the order of the forward pass.

Written from the models' published architectures; tests compare parameter and tensor counts with the published ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Layer:
    name: str
    shape: tuple[int, ...]
    work: float = 0.0  # multiply-adds per sample that this parameter takes part in
    last: bool = False  # its gradient is complete only at the end of backward, wherever it stands


def _conv(name: str, out: int, into: int, kernel: int, side: int) -> Layer:
    return Layer(f"{name}.weight", (out, into, kernel, kernel), out * into * kernel**2 * side**2)


def _pair(name: str, width: int) -> Iterator[Layer]:
    yield Layer(f"{name}.weight", (width,))
    yield Layer(f"{name}.bias", (width,))


def _linear(name: str, out: int, into: int, times: int = 1) -> Iterator[Layer]:
    yield Layer(f"{name}.weight", (out, into), out * into * times)
    yield Layer(f"{name}.bias", (out,))


def _transposed(name: str, into: int, out: int, times: int) -> Iterator[Layer]:
    """GPT-2 stores its linear layers as (in, out)."""
    yield Layer(f"{name}.weight", (into, out), out * into * times)
    yield Layer(f"{name}.bias", (out,))


def resnet(blocks: tuple[int, int, int, int]) -> Iterator[Layer]:
    """ResNet with bottlenecks, stride in the 3x3 convolution, 224x224 images, 1000 classes."""
    yield _conv("conv1", 64, 3, 7, 112)
    yield from _pair("bn1", 64)
    into, side = 64, 56
    for stage, count in enumerate(blocks, 1):
        width = 32 << stage
        for block in range(count):
            name = f"layer{stage}.{block}"
            halves = stage > 1 and block == 0
            yield _conv(f"{name}.conv1", width, into, 1, side)
            yield from _pair(f"{name}.bn1", width)
            side //= 2 if halves else 1
            yield _conv(f"{name}.conv2", width, width, 3, side)
            yield from _pair(f"{name}.bn2", width)
            yield _conv(f"{name}.conv3", 4 * width, width, 1, side)
            yield from _pair(f"{name}.bn3", 4 * width)
            if block == 0:
                yield _conv(f"{name}.downsample.0", 4 * width, into, 1, side)
                yield from _pair(f"{name}.downsample.1", 4 * width)
            into = 4 * width
    yield from _linear("fc", 1000, into)


def vgg16() -> Iterator[Layer]:
    number, into, side = 0, 3, 224
    for width, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            yield _conv(f"features.{number}", width, into, 3, side)
            yield Layer(f"features.{number}.bias", (width,))
            number, into = number + 2, width
        number, side = number + 1, side // 2
    for name, out, wide in (
        ("classifier.0", 4096, 512 * 49),
        ("classifier.3", 4096, 4096),
        ("classifier.6", 1000, 4096),
    ):
        yield from _linear(name, out, wide)


def bert_base(tokens: int = 1) -> Iterator[Layer]:
    """BERT-base with both pre-training heads; the decoder shares the word embedding."""
    width, words = 768, 30522
    yield Layer("bert.embeddings.word_embeddings.weight", (words, width), words * width * tokens, last=True)
    yield Layer("bert.embeddings.position_embeddings.weight", (512, width))
    yield Layer("bert.embeddings.token_type_embeddings.weight", (2, width))
    yield from _pair("bert.embeddings.LayerNorm", width)
    for i in range(12):
        name = f"bert.encoder.layer.{i}"
        for part in ("self.query", "self.key", "self.value", "output.dense"):
            yield from _linear(f"{name}.attention.{part}", width, width, tokens)
        yield from _pair(f"{name}.attention.output.LayerNorm", width)
        yield from _linear(f"{name}.intermediate.dense", 4 * width, width, tokens)
        yield from _linear(f"{name}.output.dense", width, 4 * width, tokens)
        yield from _pair(f"{name}.output.LayerNorm", width)
    yield from _linear("bert.pooler.dense", width, width)
    yield Layer("cls.predictions.bias", (words,))
    yield from _linear("cls.predictions.transform.dense", width, width, tokens)
    yield from _pair("cls.predictions.transform.LayerNorm", width)
    yield from _linear("cls.seq_relationship", 2, width)


def gpt2(tokens: int = 1) -> Iterator[Layer]:
    """GPT-2 with 124 M parameters; the head shares the token embedding."""
    width, words = 768, 50257
    yield Layer("transformer.wte.weight", (words, width), words * width * tokens, last=True)
    yield Layer("transformer.wpe.weight", (1024, width))
    for i in range(12):
        name = f"transformer.h.{i}"
        yield from _pair(f"{name}.ln_1", width)
        for part, into, out in (("attn.c_attn", width, 3 * width), ("attn.c_proj", width, width)):
            yield from _transposed(f"{name}.{part}", into, out, tokens)
        yield from _pair(f"{name}.ln_2", width)
        for part, into, out in (("mlp.c_fc", width, 4 * width), ("mlp.c_proj", 4 * width, width)):
            yield from _transposed(f"{name}.{part}", into, out, tokens)
    yield from _pair("transformer.ln_f", width)


def lstm(tokens: int = 1) -> Iterator[Layer]:
    """The word-level language model of PyTorch's examples: two layers, 1500 wide, tied, with WikiText-2's words."""
    width, words = 1500, 33278
    yield Layer("encoder.weight", (words, width), words * width * tokens, last=True)
    for layer in range(2):
        yield Layer(f"rnn.weight_ih_l{layer}", (4 * width, width), 4 * width * width * tokens)
        yield Layer(f"rnn.weight_hh_l{layer}", (4 * width, width), 4 * width * width * tokens)
        yield Layer(f"rnn.bias_ih_l{layer}", (4 * width,))
        yield Layer(f"rnn.bias_hh_l{layer}", (4 * width,))
    yield Layer("decoder.bias", (words,))


def ugatit() -> Iterator[Layer]:
    """U-GAT-IT's two generators (4 blocks each way) and four discriminators, 256x256 images."""
    for name in ("genA2B", "genB2A"):
        yield from _generator(name)
    for name, layers in (("disGA", 7), ("disGB", 7), ("disLA", 5), ("disLB", 5)):
        yield from _discriminator(name, layers)


def _generator(g: str) -> Iterator[Layer]:
    yield _conv(f"{g}.DownBlock.1", 64, 3, 7, 256)
    yield _conv(f"{g}.DownBlock.5", 128, 64, 3, 128)
    yield _conv(f"{g}.DownBlock.9", 256, 128, 3, 64)
    for block in range(4):
        for half in (1, 5):
            yield _conv(f"{g}.DownBlock.{12 + block}.conv_block.{half}", 256, 256, 3, 64)
    yield Layer(f"{g}.gap_fc.weight", (1, 256), 256)
    yield Layer(f"{g}.gmp_fc.weight", (1, 256), 256)
    yield _conv(f"{g}.conv1x1", 256, 512, 1, 64)
    yield Layer(f"{g}.conv1x1.bias", (256,))
    yield Layer(f"{g}.FC.0.weight", (256, 64 * 64 * 256), 256 * 64 * 64 * 256)
    yield Layer(f"{g}.FC.2.weight", (256, 256), 256 * 256)
    yield Layer(f"{g}.gamma.weight", (256, 256), 256 * 256)
    yield Layer(f"{g}.beta.weight", (256, 256), 256 * 256)
    for block in range(1, 5):
        for half in (1, 2):
            yield _conv(f"{g}.UpBlock1_{block}.conv{half}", 256, 256, 3, 64)
            yield Layer(f"{g}.UpBlock1_{block}.norm{half}.rho", (1, 256, 1, 1))
    for at, out, side in ((2, 128, 128), (7, 64, 256)):
        yield _conv(f"{g}.UpBlock2.{at}", out, 2 * out, 3, side)
        for part in ("rho", "gamma", "beta"):
            yield Layer(f"{g}.UpBlock2.{at + 1}.{part}", (1, out, 1, 1))
    yield _conv(f"{g}.UpBlock2.11", 3, 64, 7, 256)


def _discriminator(d: str, layers: int) -> Iterator[Layer]:
    into, out, side = 3, 64, 256
    for i in range(layers - 1):
        side = side // 2 if i < layers - 2 else side - 1
        yield _conv(f"{d}.model.{3 * i + 1}", out, into, 4, side)
        yield Layer(f"{d}.model.{3 * i + 1}.bias", (out,))
        into, out = out, 2 * out
    yield Layer(f"{d}.gap_fc.weight", (1, into), into)
    yield Layer(f"{d}.gmp_fc.weight", (1, into), into)
    yield _conv(f"{d}.conv1x1", into, 2 * into, 1, side)
    yield Layer(f"{d}.conv1x1.bias", (into,))
    yield _conv(f"{d}.conv", 1, into, 4, side - 1)


MODELS: dict[str, Callable[[], Iterator[Layer]]] = {
    "resnet50": lambda: resnet((3, 4, 6, 3)),
    "resnet101": lambda: resnet((3, 4, 23, 3)),
    "vgg16": vgg16,
    "ugatit": ugatit,
    "bert-base": bert_base,
    "gpt2": gpt2,
    "lstm": lstm,
}
