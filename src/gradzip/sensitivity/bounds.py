"""How far an optimizer moves a parameter per unit of gradient.

Every optimizer here works element by element: theta' = A - u(g), where g is the fresh gradient. A Bound is a Lipschitz
constant of u, so that by the mean value theorem any error d of g moves theta' by at most bound * d, however large d is.
Weight decay, coupled or not, and `maximize` only shift or mirror g: a supremum over all g holds for them too. The same
goes for foreach, fused, capturable and differentiable, which change how u is evaluated, not what it is.

**SGD** is linear: u' is lr times the coefficient of the fresh gradient.

**Adagrad and RMSprop** divide by a root that contains g: u = lr g / (s + e), s^2 = w^2 + c g^2, with w^2 what is known
before (the sum; alpha * v). u' = lr (e + w^2 / s) / (s + e)^2 falls with s >= w: the worst g is 0, and
|u'| <= lr / (w + e) <= lr / max(w, e).

**Adam** has m = b1 m0 + (1-b1) g over that root: u = lr (r2/c1) m / (s + e) with c1 = 1 - b1^t, r2 = sqrt(1 - b2^t),
e = eps r2, s^2 = w^2 + (1-b2) g^2, w^2 = b2 v0. In x = sqrt(1-b2) g / w and k = b1 m0 sqrt(1-b2) / ((1-b1) w):

    |u'| = lr (r2/c1) (1-b1) |e + s z(x)| / (s + e)^2,    z(x) = (1 - k x) / (1 + x^2),    s = w sqrt(1 + x^2)

m0 and v0 are made of the same past gradients, so by Cauchy-Schwarz |k| <= K = b1 / sqrt(b2 - b1^2) (see `_pull`).
At e = 0 the last fraction is |1 - k x| / (1 + x^2)^(3/2) / w, at most F/w with

    F = (1 + K x) / (1 + x^2)^(3/2)   at the root x of  2 K x^2 + 3 x = K.

F / max(w, e) bounds it for every e. For e <= w: w (e + F w q^2) <= F (w q + e)^2 with q = sqrt(1 + x^2), since F >= 1.
For e >= w: with a = w q / e, the fraction times e is (1 + a |z|) / (1 + a)^2. That is at most 1, or Z^2 / (4 (Z-1))
where Z = max |z| = (1 + sqrt(1 + K^2)) / 2 exceeds 2; then it is <= Z/2 <= (2 + K) / 4 < (1 + K/2) / 1.25^(3/2) <= F.

**amsgrad** has s^2 = max(vmax, v_t). Where vmax wins, s is constant and |u'| is that of e + s over (s + e)^2. Elsewhere
s >= W = sqrt(vmax) and |z| <= Z, so (e + s Z) / (s + e)^2 <= Z / max(W, e). Z takes the place of F, vmax of b2 v0.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from torch.optim import SGD, Adagrad, RMSprop

from .survey import Case, warn_lossless


class Bound(NamedTuple):
    """|theta' change| <= gain / max(sqrt(decay * second), rest) * |g change|; gain / rest where there is no second.

    It holds for all parameters of a group that have made equally many steps (`Case.likeness`).
    """

    gain: float
    rest: float = 1.0
    second: str | None = None  # the name of a tensor in the state, which is not there before the first step
    decay: float = 1.0


def bound(case: Case) -> Bound | None:
    """The bound of a parameter's coming step; None where there is none (then the gradient must stay lossless)."""
    if case.kind is SGD:
        return Bound(case.number("lr") * abs(fresh_gradient(case)))
    if case.kind is Adagrad:
        return Bound(adagrad_lr(case), case.number("eps"), "sum")
    if case.kind is RMSprop:
        return _rmsprop(case)
    return _adam(case)


def fresh_gradient(case: Case) -> float:
    """SGD: how often the fresh gradient counts in the update."""
    momentum = case.number("momentum")
    if momentum == 0:
        return 1.0
    in_buffer = 1.0 if case.tensor("momentum_buffer") is None else 1 - case.number("dampening")
    return 1 + momentum * in_buffer if case.group["nesterov"] else in_buffer


def adagrad_lr(case: Case) -> float:
    return case.number("lr") / (1 + case.steps * case.number("lr_decay"))


def _rmsprop(case: Case) -> Bound | None:
    if case.group["centered"]:
        warn_lossless("RMSprop(centered=True)", "its denominator may vanish")
        return None
    if case.number("alpha") > 1:
        warn_lossless("RMSprop with alpha above 1", "its denominator may vanish")
        return None
    # Momentum adds g / denominator to its buffer with weight 1: the fresh gradient's part is the same.
    return Bound(case.number("lr"), case.number("eps"), "square_avg", case.number("alpha"))


def _adam(case: Case) -> Bound | None:
    pull = _pull(case)
    if pull is None:
        return None
    b1, b2 = case.betas
    root2 = math.sqrt(1 - b2 ** (case.steps + 1))
    rest = case.number("eps") * root2
    if case.group["amsgrad"]:
        second, decay = "max_exp_avg_sq", 1.0
        factor = (1 + math.sqrt(1 + pull * pull)) / 2
    else:
        second, decay = "exp_avg_sq", b2
        factor = growth(pull)
    if rest > 0:
        # Squares of tiny gradients underflow in v, but not in m: k may exceed K by that much (at most 2^-124 per step
        # was lost from v, also where subnormals are flushed).
        factor += pull * 2.0**-62 / math.sqrt(1 - b2) / rest
    gain = case.number("lr") * root2 * (1 - b1) / (1 - b1 ** (case.steps + 1)) * factor
    return Bound(gain, rest, second, decay)


def growth(pull: float) -> float:
    """F of the text above: the largest (1 + K x) / (1 + x^2)^(3/2)."""
    x = 2 * pull / (3 + math.sqrt(9 + 8 * pull * pull))  # the root of 2 K x^2 + 3 x = K, without cancellation
    return float((1 + pull * x) / (1 + x * x) ** 1.5)


def _pull(case: Case) -> float | None:
    """K: the largest |b1 m0| sqrt(1-b2) / ((1-b1) sqrt(b2 v0)) that past gradients can have led to.

    If m^2 <= R v, then after an update with b1 and b2 it holds with R b1^2 / b2 + (1-b1)^2 / (1-b2) in place of R, by
    Cauchy-Schwarz; R starts at 0. The betas may have been moved by a scheduler or by hand: the worst of the range known
    from the group and the optimizer's defaults is taken.
    """
    b1, b2 = case.betas
    cycled = [case.number(key) for key in ("base_momentum", "max_momentum") if key in case.group]
    low1, high1 = _range(b1, case.defaults["betas"][0], *cycled)
    low2, high2 = _range(b2, case.defaults["betas"][1])
    if high1 == 0:
        return 0.0
    ratio = high1 * high1 / low2 if low2 else math.inf
    if ratio >= 1:
        warn_lossless(f"{case.kind.__name__} with beta1^2 >= beta2", "its first moment may outgrow its second")
        return None
    lost = 2.0**-22 / (1 - high2)  # float32 rounding in v: 4 roundings a step, remembered for 1 / (1-b2) steps
    if lost >= 0.5:
        warn_lossless(f"{case.kind.__name__} with beta2={high2:g}", "float32 cannot average over that many steps")
        return None
    past = (1 - low1) ** 2 / (1 - high2) * (1 - ratio**case.steps) / (1 - ratio)
    rounding = (1 + 2.0**-22 / (1 - math.sqrt(ratio))) / math.sqrt(1 - lost)
    return b1 / (1 - b1) * math.sqrt(past * (1 - b2) / b2) * rounding


def _range(*values: float) -> tuple[float, float]:
    return min(values), max(values)
