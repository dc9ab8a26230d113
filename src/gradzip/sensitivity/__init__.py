"""What of a gradient the optimizer can feel: the floors of near mode, the reaches of paper mode.

All of it follows from parameters, optimizer state and hyper-parameters, which are equal on all ranks under DDP, so
every rank knows it without a word on the wire.

    survey.py   which optimizers and parameters can be analysed, and the warning about the others
    bounds.py   how far each optimizer moves a parameter per unit of gradient: the mathematics
    near.py     floors and rules: those bounds as integer constants on exponent fields
    paper.py    reaches: GComp's Table 2
"""

from .near import Grids, floors, rules
from .paper import reaches
from .survey import why_lossless

__all__ = ["Grids", "floors", "reaches", "rules", "why_lossless"]
