"""The rows of Accordion's Tables 1 and 2, with the number of seeds.

The paper checks every 10th of 300 epochs; here every second of 18. Any fall of the learning rate makes all layers
critical, which is the paper's rule.
"""

from workers.running import Run


def _adaptive(low: int, high: int) -> str:
    return f"accordion ~ powersgd:rank={low} ~ powersgd:rank={high} ~ epochs=2,lr_drop=1"


def _net(task: str, low: int, *highs: int, seeds: int = 3) -> list[tuple[Run, int]]:
    policies = {f"rank {low}": f"powersgd:rank={low}"}
    for high in highs:
        policies |= {f"rank {high}": f"powersgd:rank={high}", f"accordion {low}/{high}": _adaptive(low, high)}
    return [(Run("accordion", task, row, policy, minutes=2.0), seeds) for row, policy in policies.items()]


ROWS = [
    *_net("accordion-vgg19bn", 4, 1, 2),
    *_net("accordion-resnet18", 2, 1),
    *_net("accordion-senet", 4, 1),
]

# Table 2, where --data has CIFAR-100: python experiments/series.py accordion-100
CIFAR100 = [*_net("accordion-resnet18-100", 2, 1), *_net("accordion-senet-100", 2, 1)]
