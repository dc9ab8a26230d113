"""The papers' numbers, beside which docs/results.md puts ours."""

from __future__ import annotations

from typing import NamedTuple


class Published(NamedTuple):
    value: float  # accuracy in per cent, or perplexity
    sent: float  # MB per epoch (PowerSGD), million floats in all (Accordion)
    milliseconds: float  # per batch; Accordion: seconds in all


# Vogels et al., "PowerSGD", NeurIPS 2019, Tables 3 and 4: 300 epochs on 16 GPUs with NCCL, mean of three seeds.
POWERSGD_CIFAR = {
    "plain": Published(94.3, 1023, 312),
    "rank 1": Published(93.6, 4, 229),
    "rank 2": Published(94.4, 8, 239),
    "rank 4": Published(94.5, 14, 260),
    "rank 7": Published(94.6, 24, 285),
    "random block, medium": Published(93.3, 24, 243),
    "random k, medium": Published(94.0, 24, 540),
    "sign + norm, medium": Published(93.9, 32, 429),
    "top k, medium": Published(94.4, 32, 444),
    "random block, high": Published(87.8, 8, 240),
    "random k, high": Published(92.6, 8, 534),
    "top k, high": Published(93.6, 8, 411),
}
# Table 3, 90 epochs; a vocabulary of 28,869 words.
POWERSGD_LSTM = {
    "plain": Published(91, 7730, 300),
    "rank 1": Published(102, 25, 131),
    "rank 2": Published(93, 38, 141),
    "rank 4": Published(91, 64, 134),
}

# Agarwal et al., "Accordion", MLSys 2021, Table 1 (CIFAR-10) and Table 2 (CIFAR-100): 300 epochs on 4 nodes.
ACCORDION = {
    "accordion-resnet18": {
        "rank 2": Published(94.5, 2418.4, 3509),
        "rank 1": Published(94.1, 1350.4, 3386),
        "accordion 2/1": Published(94.5, 1571.8, 3398),
    },
    "accordion-vgg19bn": {
        "rank 4": Published(93.4, 6752.0, 3613),
        "rank 1": Published(68.6, 2074.9, 3158),
        "accordion 4/1": Published(92.9, 2945.1, 3220),
    },
    "accordion-senet": {
        "rank 4": Published(94.5, 4361.3, 4689),
        "rank 1": Published(94.2, 1392.6, 4134),
        "accordion 4/1": Published(94.5, 2264.4, 4298),
    },
    "accordion-resnet18-100": {
        "rank 2": Published(71.7, 2426.3, 3521),
        "rank 1": Published(70.0, 1355.7, 3388),
        "accordion 2/1": Published(71.8, 1566.3, 3419),
    },
    "accordion-senet-100": {  # ranks 2 and 1, unlike Table 1's
        "rank 2": Published(72.5, 2878.1, 5217),
        "rank 1": Published(71.5, 1683.1, 4994),
        "accordion 2/1": Published(72.4, 2175.6, 5074),
    },
}

# The same tables over top k, which keeps so many of all values; billion floats with positions, of all workers.
ACCORDION_TOP_K = {
    "accordion-resnet18-300": {
        "top k 99 %": Published(94.2, 2626.1, 33672),
        "top k 10 %": Published(93.1, 262.8, 7957),
        "accordion top k 99/10": Published(93.9, 976.7, 9356),
    },
    "accordion-senet-300": {
        "top k 99 %": Published(94.6, 2648.7, 29977),
        "top k 10 %": Published(93.8, 267.9, 8055),
        "accordion top k 99/10": Published(94.5, 869.8, 13071),
    },
    "accordion-resnet18-100": {
        "top k 99 %": Published(72.4, 2636.9, 53460),
        "top k 25 %": Published(71.3, 659.4, 6176),
        "accordion top k 99/25": Published(72.3, 923.6, 14223),
    },
    "accordion-senet-100": {
        "top k 99 %": Published(72.8, 2659.5, 30312),
        "top k 25 %": Published(71.9, 671.9, 7376),
        "accordion top k 99/25": Published(72.7, 966.1, 10689),
    },
}
ACCORDION_LONG = {
    f"{task}-300": ACCORDION[task] for task in ("accordion-resnet18", "accordion-vgg19bn", "accordion-senet")
}

# GComp, SoCC 2024: ResNet-50 on ImageNet and BERT-base on SST, 4 A100s at 10 Gbit/s.
GCOMP_RATE = {"ResNet-50": 32.9, "BERT-base": 36.5}  # per cent of float32, means over training
GCOMP_ZEROS = {"ResNet-50": "46 / 50.5 / 52", "BERT-base": "37.5 / 39.5 / 57"}  # per cent at steps 1000, 2000, 3000
GCOMP_STALE = {  # Figure 12: native / with escape, by source of the book and data
    "S1": {"S1": "31.8 / 31.8", "S2": "51.2 / 50.5", "S3": "31.5 / 31.4", "S4": "46.2 / 34.7"},
    "S2": {"S1": "51.9 / 41.4", "S2": "44.3 / 44.3", "S3": "63.2 / 45.7", "S4": "53.3 / 41.7"},
    "S3": {"S1": "32.9 / 32.9", "S2": "54.2 / 54.3", "S3": "30.2 / 30.3", "S4": "40.3 / 36.2"},
    "S4": {"S1": "32.3 / 32.3", "S2": "48.8 / 49.2", "S3": "32.6 / 32.7", "S4": "32.7 / 32.8"},
}

# Wang et al., "Espresso", EuroSys 2023, Figures 12 and 13: gain over FP32 if compression cost nothing; read off.
ESPRESSO_BOUND = {
    "bert-base + randomk, NVLink": 2.26 / 1.30 - 1,
    "gpt2 + efsignsgd, NVLink": 11.3 / 6.8 - 1,
    "ugatit + dgc, NVLink": 117 / 45 - 1,
    "vgg16 + randomk, PCIe": 13.5 / 3.3 - 1,
    "lstm + efsignsgd, PCIe": 19.2 / 9.9 - 1,
    "resnet101 + dgc, PCIe": 10.0 / 7.8 - 1,
}

# GComp, Figure 14, per cent of the mantissa's size by sample: one level, four levels, zeros pruned, both; read off.
GCOMP_ABLATION = {
    "S1": (47.6, 40, 30, 20.5),
    "S2": (51, 41, 41.5, 30.3),
    "S3": (51.5, 42, 33, 21),
    "S4": (46.8, 40, 29, 20.2),
}
