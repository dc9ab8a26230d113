"""The rows of Accordion's Tables 1 and 2, with the number of seeds.

The paper checks every 10th of 300 epochs, and so do the long rows; the short ones every second of 18. Any fall of the
learning rate makes all layers critical, which is the paper's rule.
"""

from workers.running import Run


def _adaptive(low: str, high: str, epochs: int) -> str:
    return f"accordion ~ {low} ~ {high} ~ epochs={epochs},lr_drop=1"


def _net(
    task: str, low: int, *highs: int, seeds: int = 3, minutes: float = 2.0, epochs: int = 2
) -> list[tuple[Run, int]]:
    policies = {f"rank {low}": f"powersgd:rank={low}"}
    for high in highs:
        ranks = f"powersgd:rank={low}", f"powersgd:rank={high}"
        policies |= {f"rank {high}": ranks[1], f"accordion {low}/{high}": _adaptive(*ranks, epochs)}
    return [(Run("accordion", task, row, policy, minutes=minutes), seeds) for row, policy in policies.items()]


def _long(task: str, minutes: float, low: int, *highs: int) -> list[tuple[Run, int]]:
    return _net(task, low, *highs, seeds=1, minutes=minutes, epochs=10)


def _top_k(task: str, minutes: float, low: float, high: float) -> list[tuple[Run, int]]:
    """The paper's levels keep so many of all values."""
    codecs = f"topk:ratio={low}", f"topk:ratio={high}"
    names = f"top k {100 * low:g} %", f"top k {100 * high:g} %"
    policies = {names[0]: codecs[0], names[1]: codecs[1]}
    policies[f"accordion top k {100 * low:g}/{100 * high:g}"] = _adaptive(*codecs, 10)
    return [(Run("accordion", task, row, policy, minutes=minutes), 1) for row, policy in policies.items()]


# 300 epochs, in the order of value. Minutes of two runs side by side, by the short rows' seconds per epoch: 1.0 for
# VGG-19bn, 0.9 for ResNet-18, 1.7 for SENet; top k as ResNet-18 and SENet, and a third more.
LONG = [
    *_long("accordion-vgg19bn-300", 10.0, 4, 1, 2),
    *_long("accordion-resnet18-300", 9.0, 2, 1),
    *_long("accordion-senet-300", 17.0, 4, 1),
    *_top_k("accordion-resnet18-300", 12.0, 0.99, 0.1),
    *_top_k("accordion-senet-300", 23.0, 0.99, 0.1),
]
ROWS = [
    *_net("accordion-vgg19bn", 4, 1),
    *_net("accordion-vgg19bn", 4, 2, seeds=1)[1:],
    *_net("accordion-resnet18", 2, 1),
    *_net("accordion-senet", 4, 1, seeds=2),
    *LONG,
]

# Table 2, where --data has CIFAR-100: python experiments/series.py accordion-100
CIFAR100 = [
    *_long("accordion-resnet18-100", 9.0, 2, 1),
    *_long("accordion-senet-100", 17.0, 2, 1),
    *_top_k("accordion-resnet18-100", 12.0, 0.99, 0.25),
    *_top_k("accordion-senet-100", 23.0, 0.99, 0.25),
]
