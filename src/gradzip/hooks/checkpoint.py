"""A handle's state in a checkpoint of torch.distributed.checkpoint."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import torch

from .. import saved
from ..errors import Unsupported
from ..feedback import Value


def read_codecs(field: str, value: object) -> dict[str, str]:
    """The codec that each parameter had, from its field of the state."""
    try:
        codecs = json.loads(saved.text(field, value))
    except json.JSONDecodeError as error:
        raise Unsupported(f"the state's {field!r} is not JSON ({error}): {saved.CURE}") from None
    if not isinstance(codecs, dict) or not all(isinstance(codec, str) for codec in codecs.values()):
        raise saved.refuse(field, codecs, "a codec for each parameter")
    return codecs


def read_checkpoint(path: str | Path, prefix: str, rank: int) -> dict[str, Value]:
    """All that was saved under `prefix`, but for what belongs to other ranks."""
    # They take a second to load, and few need them.
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = FileSystemReader(path)
    start = f"{prefix}." if prefix else ""
    wanted: dict[str, Any] = {}
    for key, entry in reader.read_metadata().state_dict_metadata.items():
        name = key.removeprefix(start)
        if not key.startswith(start) or re.match(rf"rank(?!{rank}/)\d+/", name):
            continue
        wanted[name] = (
            torch.empty(entry.size, dtype=entry.properties.dtype) if isinstance(entry, TensorStorageMetadata) else 0
        )
    if "world_size" not in wanted:
        raise Unsupported(f"{path} holds no state of a handle under {prefix!r}: which key was it saved under?")
    template = {prefix: wanted} if prefix else wanted
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # on purpose: ranks read what is their own
        load(template, storage_reader=reader, no_dist=True)
    return template[prefix] if prefix else wanted
