"""What is trained: model, data, optimizer and schedule of each task, all of it on one device.

A task's learning rate is a function of the part of training that is over. Everything random comes from the run's seed,
so runs of one seed see the same data in the same order, whatever is compressed.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from gradzip.optim import EFMomentum

from . import data
from .data import enwik8_words
from .pictures import NETS, Pictures, for_workers
from .texts import Bert, Gpt, WordLstm, sentences
from .training import Batch, shares, stepped_rate


class Task(ABC):
    """`workers` batches per step; a rate for each moment; one figure in the end."""

    workers, epochs, batch = 4, 10, 128
    metric, higher_is_better = "accuracy", True
    graph = True  # forward and backward may be captured on a GPU
    long = False  # at the paper's length: where codecs are linear, one worker stands for all
    as_one = False  # that is so in this run
    precise = False  # float32 on a GPU as well
    kept: tuple[str, ...] = ()  # attributes that a run which is broken off needs to go on
    model: nn.Module
    optimizer: torch.optim.Optimizer
    steps: int  # per epoch

    def __init__(self, root: Path, device: torch.device, seed: int, limit: int | None) -> None:
        """`limit`: a tiny form of the task with so many samples, to see whether everything works."""
        self.root, self.device, self.limit = root, device, limit
        self.tiny = limit is not None
        if self.tiny:
            self.batch = 4
        self.stands_for = self.workers
        if self.as_one:
            self.workers, self.batch = 1, self.workers * self.batch
        if self.precise:
            torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
        self.rng = torch.Generator(device).manual_seed(seed)
        torch.manual_seed(seed)

    @abstractmethod
    def batches(self, epoch: int, step: int) -> Iterator[Batch]:
        """One for each worker."""

    @abstractmethod
    def loss(self, *batch: torch.Tensor) -> torch.Tensor: ...

    @abstractmethod
    def evaluate(self) -> float: ...

    @abstractmethod
    def rate(self, epoch: float) -> float: ...

    def before_step(self) -> None:  # noqa: B027  # most tasks do nothing
        """What is done to the mean gradients before the optimizer sees them."""

    def cast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda" and not self.precise)

    def state_dict(self) -> dict[str, Any]:
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        return state | {"rng": self.rng.get_state()} | {name: getattr(self, name) for name in self.kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.rng.set_state(state["rng"].cpu())
        for name in self.kept:
            setattr(self, name, state[name])

    def groups(self, decay: float) -> list[dict[str, object]]:
        """No weight decay for biases and norms, as in PowerSGD's study."""
        matrices = [p for p in self.model.parameters() if p.dim() > 1]
        vectors = [p for p in self.model.parameters() if p.dim() <= 1]
        return [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]


def triangle(peak: float, epoch: float, warm: float, epochs: float) -> float:
    """Linear up to the peak and down to zero."""
    return peak * min(epoch / warm if warm else 1.0, (epochs - epoch) / (epochs - warm))


class _Cifar(Task):
    net, classes, kept = "resnet18", 10, ("_shares",)

    def __init__(self, root: Path, device: torch.device, seed: int, limit: int | None) -> None:
        super().__init__(root, device, seed, limit)
        self.pictures = Pictures(root, device, self.classes, limit)
        self.model = NETS[self.net](self.classes, 16 if self.tiny else 64).to(device)
        if self.as_one:
            for_workers(self.model, self.stands_for)
        self.optimizer = self.make_optimizer()
        self._shares = shares(torch.arange(len(self.pictures)), self.workers, self.batch)
        self.steps = len(self._shares)
        if not self.steps:
            raise ValueError(f"{len(self.pictures)} pictures are no step of {self.workers} workers x {self.batch}")

    def make_optimizer(self) -> torch.optim.Optimizer:
        return EFMomentum(self.groups(1e-4), lr=0.1, momentum=0.9)

    def batches(self, epoch: int, step: int) -> Iterator[Batch]:
        if step == 0:
            order = torch.randperm(len(self.pictures), device=self.device, generator=self.rng)
            self._shares = shares(order, self.workers, self.batch)
        x, y = self.pictures.batch(self._shares[step].view(-1), self.rng)
        yield from zip(x.split(self.batch), y.split(self.batch))

    def loss(self, *batch: torch.Tensor) -> torch.Tensor:
        x, y = batch
        with self.cast():
            logits = self.model(x)
        return F.cross_entropy(logits.float(), y)

    def evaluate(self) -> float:
        self.model.eval()
        with torch.no_grad(), self.cast():
            right = [(self.model(x).argmax(1) == y).sum() for x, y in self.pictures.test()]
        self.model.train()
        return 100 * float(torch.stack(right).sum()) / len(self.pictures.y_test)


class PowerSgdCifar(_Cifar):
    """PowerSGD's study: 16 workers, a tenth of the rate at half and at 5/6 of training; 0.1 x 4, not 0.1 x 16.

    The warm-up begins at 0 instead of 0.1. With the paper's rates plain training went to a loss of 5.9 within ten steps
    and ended at 49 %, with 0.1 to 0.4 at 60 %: 432 steps are too few to come back from there. (Batch norms at the end
    of blocks started at 1 then, see pictures.py.)
    """

    workers, epochs = 16, 18

    def rate(self, epoch: float) -> float:
        return stepped_rate(0.4, epoch, self.epochs / 6, (self.epochs / 2, self.epochs * 5 / 6))


class PowerSgdCifar32(PowerSgdCifar):
    """The same with four times the steps: 32 pictures for each worker. 0.4 is then the paper's 0.1 for every 128."""

    batch = 32


class PowerSgdLong(_Cifar):
    """PowerSGD's study at its own length, rate and initial values: 7200 steps, 0.1 x 16 after 5 epochs from 0.1."""

    net, workers, epochs, long = "resnet18-published", 16, 300, True

    def rate(self, epoch: float) -> float:
        return stepped_rate(1.6, epoch, self.epochs / 60, (self.epochs / 2, self.epochs * 5 / 6), start=0.1)


class AccordionCifar(_Cifar):
    """Accordion's study: 4 workers, 0.1 x 4 after a linear warm-up from 0, the same drops."""

    workers, epochs = 4, 18

    def rate(self, epoch: float) -> float:
        return stepped_rate(0.4, epoch, self.epochs / 6, (self.epochs / 2, self.epochs * 5 / 6))


class AccordionVgg(AccordionCifar):
    net = "vgg19bn"


class AccordionSenet(AccordionCifar):
    net = "senet18-normed"


class AccordionLong(_Cifar):
    """Accordion's study at its own length: 29,100 steps, 0.1 x 4 after 5 epochs from 0.1, nets as published."""

    net, workers, epochs, long = "resnet18-published", 4, 300, True

    def rate(self, epoch: float) -> float:
        return stepped_rate(0.4, epoch, self.epochs / 60, (self.epochs / 2, self.epochs * 5 / 6), start=0.1)


class AccordionLongVgg(AccordionLong):
    net = "vgg19bn"


class AccordionLongSenet(AccordionLong):
    net = "senet18"


class AccordionLong100(AccordionLong):
    classes = 100


class AccordionLongSenet100(AccordionLong100):
    net = "senet18"


class GcompCifar(_Cifar):
    """torch's SGD with momentum, whose grids near mode knows; a short schedule that ends at a rate of zero."""

    workers, epochs = 4, 10

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.groups(5e-4), lr=0.1, momentum=0.9)

    def rate(self, epoch: float) -> float:
        return triangle(0.4, epoch, 0.2 * self.epochs, self.epochs)


class Resnet50Cifar(GcompCifar):
    """ResNet-50 on the same pictures, for as long as the clock says: the rate rises and stays."""

    net, batch = "resnet50", 32

    def rate(self, epoch: float) -> float:
        return 0.1 * min(1.0, (epoch * self.steps + 1) / 40)


class GcompCifarPrecise(GcompCifar):
    """Float32, as in GComp's study."""

    precise = True


class WikiText(Task):
    """PowerSGD's language model: 16 workers with 16 texts each, 30 words a step, rate 1.25 x 16, clipped at 0.4.

    The paper has 64 texts for each worker and 90 epochs. A fourth of that gives four times the steps of an epoch, which
    a short schedule needs: after 402 steps of the paper's batch the perplexity was still 719.

    One worker with the texts of all stands for the 16. With nothing like batch norm in it, its gradient is their mean;
    and low-rank projection is linear, so that factors and the mean of the workers' residuals follow from that mean.
    """

    workers, epochs, batch, length = 1, 10, 16 * 16, 30
    metric, higher_is_better, graph = "perplexity", False, False
    kept = ("_states",)

    def __init__(self, root: Path, device: torch.device, seed: int, limit: int | None) -> None:
        super().__init__(root, device, seed, limit)
        arrays = data.wikitext2(root)
        self.vocabulary = int(arrays["vocabulary"])
        words = None if limit is None else 40 * limit
        train, test = (torch.from_numpy(arrays[split])[:words].to(device) for split in ("train", "test"))
        streams = self.workers * self.batch
        self.words = train[: train.numel() // streams * streams].view(streams, -1).t().contiguous()  # (time, streams)
        self.test = test[: test.numel() // 10 * 10].view(10, -1).t().contiguous()
        self.model = WordLstm(self.vocabulary, *((32, 1, 0.0) if self.tiny else ())).to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.25)
        self.steps = (len(self.words) - 1) // self.length
        self._states: list[tuple[torch.Tensor, torch.Tensor]] = []

    def rate(self, epoch: float) -> float:
        return stepped_rate(20.0, epoch, self.epochs / 8, (self.epochs * 2 / 3, self.epochs * 8 / 9), start=1.25)

    def batches(self, epoch: int, step: int) -> Iterator[Batch]:
        if step == 0:
            self._states = [self.model.start(self.batch) for _ in range(self.workers)]
        start = step * self.length
        x, y = self.words[start : start + self.length], self.words[start + 1 : start + 1 + self.length]
        for worker in range(self.workers):
            own = slice(worker * self.batch, (worker + 1) * self.batch)
            yield x[:, own], y[:, own], torch.tensor(worker)

    def loss(self, *batch: torch.Tensor) -> torch.Tensor:
        x, y, worker = batch
        with self.cast():
            logits, state = self.model(x, self._states[int(worker)])
        self._states[int(worker)] = (state[0].detach(), state[1].detach())
        return F.cross_entropy(logits.flatten(0, 1).float(), y.flatten())

    def before_step(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.4)

    def evaluate(self) -> float:
        self.model.eval()
        state, total, count = self.model.start(10), torch.zeros((), device=self.device), 0
        with torch.no_grad(), self.cast():
            for start in range(0, len(self.test) - 1, self.length):
                y = self.test[start + 1 : start + 1 + self.length]
                logits, state = self.model(self.test[start : start + len(y)], state)
                total += F.cross_entropy(logits.flatten(0, 1).float(), y.flatten(), reduction="sum")
                count += y.numel()
        self.model.train()
        return math.exp(min(float(total) / count, 50.0))


class WikiTextLong(WikiText):
    """PowerSGD's language model at its own length and batch: 64 texts for each of 16 workers, 90 epochs."""

    batch, epochs = 16 * 64, 90

    def rate(self, epoch: float) -> float:
        return stepped_rate(20.0, epoch, self.epochs / 18, (self.epochs * 2 / 3, self.epochs * 8 / 9), start=1.25)


class Sst2(Task):
    """all-MiniLM-L6-v2 (6 layers, width 384) fine-tuned on SST-2 by AdamW: 4 workers with 32 phrases each."""

    workers, epochs, batch, length = 4, 1, 32, 64
    kept = ("_shares",)

    def __init__(self, root: Path, device: torch.device, seed: int, limit: int | None) -> None:
        super().__init__(root, device, seed, limit)
        self.x, self.y = (torch.from_numpy(a)[:limit].to(device) for a in sentences(root, "train", self.length))
        self.x_dev, self.y_dev = (torch.from_numpy(a)[:limit].to(device) for a in sentences(root, "dev", self.length))
        self.model = Bert.pretrained(root / "minilm").to(device)
        self.optimizer = self.make_optimizer()
        self._shares = shares(torch.arange(len(self.y)), self.workers, self.batch)
        self.steps = len(self._shares)

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.groups(0.01), lr=1e-4)

    def rate(self, epoch: float) -> float:
        return triangle(1e-4, epoch, 0.1 * self.epochs, self.epochs)

    def batches(self, epoch: int, step: int) -> Iterator[Batch]:
        if step == 0:
            order = torch.randperm(len(self.y), device=self.device, generator=self.rng)
            self._shares = shares(order, self.workers, self.batch)
        for index in self._shares[step]:
            yield self.x[index], self.y[index]

    def loss(self, *batch: torch.Tensor) -> torch.Tensor:
        x, y = batch
        with self.cast():
            logits = self.model(x)
        return F.cross_entropy(logits.float(), y)

    def evaluate(self) -> float:
        self.model.eval()
        with torch.no_grad(), self.cast():
            pairs = zip(self.x_dev.split(128), self.y_dev.split(128))
            right = [(self.model(x).argmax(1) == y).sum() for x, y in pairs]
        self.model.train()
        return 100 * float(torch.stack(right).sum()) / len(self.y_dev)


class Sst2Precise(Sst2):
    """Float32, as in GComp's study."""

    precise = True


class Sst2Sgd(Sst2):
    """The same by SGD with momentum."""

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.groups(0.0), lr=0.005, momentum=0.9)

    def rate(self, epoch: float) -> float:
        return triangle(0.005, epoch, 0.1 * self.epochs, self.epochs)


class Enwik(Task):
    """A GPT of 10.8 M parameters on the bytes of enwik8 by AdamW: 4 workers with 16 texts of 256 bytes each."""

    workers, epochs, batch, length = 4, 1, 16, 256
    metric, higher_is_better = "bits per byte", False
    part = 40_000_000  # bytes of the text that count, however many there are: batches depend on it
    held_out = 1 << 20  # bytes at their end
    looked_at = 64  # texts at once when it is evaluated

    def __init__(self, root: Path, device: torch.device, seed: int, limit: int | None) -> None:
        super().__init__(root, device, seed, limit)
        text = torch.from_numpy(data.enwik8(root)[: self.part])
        self.text, self.test = text[: -self.held_out].to(device), text[-self.held_out :].to(device)
        size = (64, 2, 2) if self.tiny else (384, 6, 6)
        self.model = Gpt(256, *size, self.length).to(device)
        self.optimizer = torch.optim.AdamW(self.groups(0.1), lr=1e-3, betas=(0.9, 0.95))
        self.steps = 800 if limit is None else max(1, limit // (self.workers * self.batch))

    def rate(self, epoch: float) -> float:
        return triangle(1e-3, epoch, 0.1 * self.epochs, self.epochs)

    def batches(self, epoch: int, step: int) -> Iterator[Batch]:
        count = self.workers * self.batch
        starts = torch.randint(len(self.text) - self.length - 1, (count, 1), device=self.device, generator=self.rng)
        window = self.text[starts + torch.arange(self.length + 1, device=self.device)].long()
        yield from zip(window[:, :-1].split(self.batch), window[:, 1:].split(self.batch))

    def loss(self, *batch: torch.Tensor) -> torch.Tensor:
        x, y = batch
        with self.cast():
            logits = self.model(x)
        return F.cross_entropy(logits.flatten(0, 1).float(), y.flatten())

    def evaluate(self) -> float:
        self.model.eval()
        count = 256 if self.limit is None else 16
        windows = self.test[: count * (self.length + 1)].view(count, -1).long()
        with torch.no_grad():
            losses = [self.loss(part[:, :-1], part[:, 1:]) for part in windows.split(self.looked_at)]
        self.model.train()
        return float(torch.stack(losses).mean()) / math.log(2)


class Gpt124(Enwik):
    """GPT-2 small, 124 M parameters, on the words of enwik8: 4 workers with 8 texts of 256 words and signs each."""

    batch, metric = 8, "loss"
    held_out = 1 << 16  # words at the end
    looked_at = 16  # whose logits are 0.8 GB

    def __init__(self, root: Path, device: torch.device, seed: int, limit: int | None) -> None:
        Task.__init__(self, root, device, seed, limit)
        vocabulary = VOCABULARY if limit is None else 2048
        words = torch.from_numpy(enwik8_words(root, vocabulary, PART if limit is None else limit * 1000))
        self.text, self.test = words[: -self.held_out].to(device), words[-self.held_out :].to(device)
        size = (64, 2, 2) if self.tiny else (768, 12, 12)
        with device:  # not on the host first: 124 M random numbers take it seconds
            self.model = Gpt(vocabulary, *size, self.length)
        self.optimizer = torch.optim.AdamW(self.groups(0.1), lr=3e-4, betas=(0.9, 0.95))
        self.steps = 1000

    def rate(self, epoch: float) -> float:
        return 3e-4 * min(1.0, (epoch * self.steps + 1) / 20)  # the runs are ended by the clock: warm up and stay

    def evaluate(self) -> float:
        return super().evaluate() * math.log(2)


VOCABULARY, PART = 50257, 16 << 20  # words that have a number, bytes of the text that are read

TASKS: dict[str, type[Task]] = {
    "powersgd-cifar": PowerSgdCifar,
    "powersgd-cifar-32": PowerSgdCifar32,
    "powersgd-wikitext": WikiText,
    "accordion-resnet18": AccordionCifar,
    "accordion-vgg19bn": AccordionVgg,
    "accordion-senet": AccordionSenet,
    "powersgd-cifar-300": PowerSgdLong,
    "powersgd-wikitext-90": WikiTextLong,
    "accordion-resnet18-300": AccordionLong,
    "accordion-vgg19bn-300": AccordionLongVgg,
    "accordion-senet-300": AccordionLongSenet,
    "accordion-resnet18-100": AccordionLong100,
    "accordion-senet-100": AccordionLongSenet100,
    "resnet50-cifar": Resnet50Cifar,
    "gcomp-cifar-float32": GcompCifarPrecise,
    "gcomp-sst2-float32": Sst2Precise,
    "gcomp-cifar": GcompCifar,
    "gcomp-sst2-adamw": Sst2,
    "gcomp-sst2-sgd": Sst2Sgd,
    "gcomp-enwik8": Enwik,
    "gpt2-enwik8": Gpt124,
}
