"""On PYTHONPATH while `gradzip profile` runs: Python imports this module at its start, in every rank of the script.

Whatever other sitecustomize the machine has is run as well.
"""

import importlib.machinery
import importlib.util
import os
import sys

_here = os.path.dirname(os.path.abspath(__file__))
_others = [path for path in sys.path if os.path.abspath(path or ".") != _here]
_spec = importlib.machinery.PathFinder.find_spec("sitecustomize", _others)
if _spec is not None and _spec.loader is not None:
    _spec.loader.exec_module(importlib.util.module_from_spec(_spec))

if "GRADZIP_PROFILE" in os.environ and "RANK" in os.environ:
    from gradzip.planner import measure

    measure.install(measure.Settings.from_environment())
