"""Shared code books: GComp's own way of agreeing on a code (`gcomp:book=shared`).

Both sides hold the book; the frame carries only its id. Book 1 is the prior that ships with the package, made
from real gradients by `bench/make_prior.py`. Later books come from histograms summed over all ranks.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

from ..engines import huffman
from ..engines.layout import segments_of
from ..errors import Corrupt
from .base import Context
from .prior import PRIOR_LENGTHS

PRIOR_ID = 1


@dataclass(frozen=True)
class Book:
    id: int
    lengths: torch.Tensor  # (256,) uint8


def make(histogram: torch.Tensor, limit: int = 8) -> Book:
    """The book of a (256,) histogram; its id follows from its lengths, so equal books have equal ids everywhere."""
    return of_lengths(torch.from_numpy(huffman.code_lengths(histogram.cpu().numpy(), limit)))


def of_lengths(lengths: torch.Tensor) -> Book:
    """The book of these (256,) code lengths; Corrupt if they are no complete code."""
    huffman.escape_length(lengths.numpy())
    digest = hashlib.blake2b(lengths.numpy().tobytes(), digest_size=4).digest()
    return Book(max(2, int.from_bytes(digest, "little")), lengths)


_known: dict[int, Book] = {PRIOR_ID: Book(PRIOR_ID, torch.tensor(PRIOR_LENGTHS, dtype=torch.uint8))}


def install(book: Book) -> None:
    """Makes a book known to this process; frames that use it can be decoded from now on."""
    _known[book.id] = book


def current(ctx: Context) -> Book:
    """The book that an encoder uses: the context's, or the prior."""
    book: Book = ctx.state.get("book") or _known[PRIOR_ID]
    install(book)
    return book


def lengths(book_id: int, numel: int) -> torch.Tensor:
    """The book's code lengths, once per segment of a tensor of that size."""
    if book_id not in _known:
        raise Corrupt(
            f"the frame uses code book {book_id:#010x}, which this process does not know: ranks refresh books together"
        )
    return _known[book_id].lengths.expand(segments_of(numel), 256).contiguous()
