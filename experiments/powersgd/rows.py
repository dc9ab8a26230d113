"""The rows of PowerSGD's Tables 3 and 4, with the number of seeds."""

from workers.running import Run

CIFAR, CIFAR_32, LSTM = "powersgd-cifar", "powersgd-cifar-32", "powersgd-wikitext"
CIFAR_300, LSTM_90 = "powersgd-cifar-300", "powersgd-wikitext-90"  # at the paper's length

# Medium: the bytes of rank 7, but for sign (1 bit) and top k (the study's k: 1/64 of the values with their positions).
# High: the bytes of rank 2, and 1/272. Of 11,173,962 values 9,610 are in vectors, which travel as they are.
_CIFAR = {
    "plain": "plain",
    "rank 2": "powersgd:rank=2",
    "rank 7": "powersgd:rank=7",
    "top k, high": f"topk:ratio={1 / 272:.6f}",
    "random k, high": "randomk:ratio=0.00651",
    "random block, high": "randomblock:ratio=0.00651",
    "top k, medium": f"topk:ratio={1 / 64}",
    "random k, medium": "randomk:ratio=0.02278",
    "random block, medium": "randomblock:ratio=0.02278",
    "sign + norm, medium": "sign",
    "rank 1": "powersgd:rank=1",
    "rank 4": "powersgd:rank=4",
}
# With more steps: plain training, the paper's rank 2, and most with the bytes of rank 7.
_MORE_STEPS = ("plain", "rank 2", "rank 7", "sign + norm, medium", "top k, medium", "random block, medium")
_LSTM = {"plain": "plain", "rank 4": "powersgd:rank=4", "rank 2": "powersgd:rank=2", "rank 1": "powersgd:rank=1"}

# What says most comes first; three seeds of plain training and rank 2.
_LONG = (
    *("plain", "rank 2", "rank 1", "rank 4", "rank 7", "random block, medium", "random k, medium"),
    *("sign + norm, medium", "top k, medium", "random block, high", "random k, high", "top k, high"),
)

# Minutes of two runs side by side: 300 epochs of 1.3 s, and 90 of 4.2 s, as README.md's plan has them, times two.
ROWS = [
    *((Run("powersgd", LSTM, row, policy, minutes=3.0), 1) for row, policy in _LSTM.items()),
    *((Run("powersgd", CIFAR, row, policy, minutes=2.2), 1) for row, policy in _CIFAR.items()),
    *((Run("powersgd", CIFAR_32, row, _CIFAR[row], minutes=5.5), 1) for row in _MORE_STEPS),
    *((Run("powersgd", CIFAR_300, row, _CIFAR[row], minutes=13.0), 3 if row in ("plain", "rank 2") else 1)
      for row in _LONG),
    *((Run("powersgd", LSTM_90, row, policy, minutes=12.6), 1) for row, policy in _LSTM.items()),
]  # fmt: skip
