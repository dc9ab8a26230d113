"""Block-scaled codes of the C++ engine, behind the interface of engines/reference_scaled.py."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from ..errors import Unsupported
from . import native
from .scaled_layout import Parts

NAME = "native"

_library = native._library
_library.gz_scaled_code.restype = ctypes.c_int64
_library.gz_scaled_code.argtypes = [
    *(ctypes.c_int32, ctypes.c_int32, ctypes.c_int32, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p),
    *(ctypes.c_uint64, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int32),
]


def code(parts: Parts, terms: Sequence[torch.Tensor | None], divisor: int = 1, out: torch.Tensor | None = None) -> None:
    """Codes all parts: their own values, or the sum of terms in their order, divided; into a frame, or into `outs`."""
    parts.check([*terms, out])
    if parts.places.size == 0:
        return
    form, array = parts.form, parts.array
    addresses = (ctypes.c_void_p * len(terms))(*(None if term is None else term.data_ptr() for term in terms))
    code = _library.gz_scaled_code(
        form.kind, form.block, form.hadamard, array.ctypes.data, len(array), addresses, len(terms), divisor,
        None if out is None else out.data_ptr(), parts.places.size, native.threads(),
    )  # fmt: skip
    if code < 0:
        raise Unsupported(f"the native engine refused a block-scaled frame of {form} (code {code})")
