"""Every exception that gradzip raises on purpose.

GradzipError
├── CodecError (also ValueError)
│   ├── Unsupported    the request makes no sense: wrong dtype, unknown codec, missing floor
│   ├── Truncated      a payload ends before its own header says it does
│   └── Corrupt        a payload contradicts itself, or was made by another version
├── EngineError        an engine was asked for by name and is not there
├── PeerError          another rank is dead, differs from this one, or failed
├── PlanError (also ValueError)    a profile or plan cannot be used: damaged, of another model, or for no such cluster
├── ReportError (also ValueError)  a run cannot be shown: its file is damaged, or holds no run
└── EmulationError     hosts cannot be emulated on this machine, or not like this

GradzipWarning (a UserWarning) is the category of its warnings: training goes on, but less is gained than could be.
"""

import difflib
import warnings
from collections.abc import Iterable


class GradzipError(Exception):
    """Base of all gradzip errors: `except gradzip.GradzipError` catches them all."""


class CodecError(GradzipError, ValueError):
    """A tensor cannot be encoded, or a payload cannot be decoded."""


class Unsupported(CodecError):
    """The request itself is wrong; the message says what to change."""


class Truncated(CodecError):
    """The payload is shorter than it says it is."""


class Corrupt(CodecError):
    """The payload contradicts itself."""


class EngineError(GradzipError, RuntimeError):
    """An engine was named explicitly and is not available on this machine."""


class PeerError(GradzipError, RuntimeError):
    """Another rank died, failed, or disagrees with this one."""


class EmulationError(GradzipError, RuntimeError):
    """Hosts cannot be emulated here; the message says what is missing."""


class PlanError(GradzipError, ValueError):
    """A profile or a plan cannot be used; the message names the entry, or what does not fit."""


class ReportError(GradzipError, ValueError):
    """The record of a run cannot be read; the message names file and line."""


def nearest(word: str, known: Iterable[str]) -> str:
    """', did you mean ...?' if something known is near: the end of many messages."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f", did you mean {close[0]!r}?" if close else ""


class GradzipWarning(UserWarning):
    """Something keeps gradzip from doing its best; the message names it."""


def warn(text: str) -> None:
    """A GradzipWarning without a line of source: where gradzip noticed it says nothing to the user."""
    warnings.warn_explicit(text, GradzipWarning, "gradzip", 0)
