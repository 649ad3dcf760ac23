"""Digests that bind routes to the tokens they belong to, so that copies can be compared wherever they are.

The digest of a set of tokens is a sum mod 2^64 over its tokens, so it depends neither on the order of samples nor on
how they are cut into microbatches and ranks, and digests of parts add up. Each term hashes a token's routes, its id and
its position in its sample, with a number of its sample's name as salt: routes that move by one token, or to a sample
whose tokens are the same, change the sum.
"""

import hashlib
from collections.abc import Sequence

import torch

from headrace.data_plane.routes_codec import row_digests

_WORD = 1 << 64
# Odd 64-bit constants with well mixed bits, as signed numbers.
_TOKEN, _PLACE = -7046029254386353131, -4265267296055464877
_FIRST, _SECOND = -4658895280553007687, -7723592293110705685


def sample_salts(sample_ids: Sequence[str]) -> torch.Tensor:
    """Return a 64-bit number per sample id, int64 (N,)."""
    words = [hashlib.blake2b(name.encode(), digest_size=8).digest() for name in sample_ids]
    return torch.tensor([int.from_bytes(word, "little", signed=True) for word in words], dtype=torch.int64)


def bound_digests(
    ids: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor, salts: torch.Tensor | int = 0
) -> torch.Tensor:
    """Return a 64-bit content hash per token, int64 (T,), of `ids` (T, L, k) of any integer dtype.

    Per token: its id in `tokens`, its place in its sample in `positions`, its sample's number (`sample_salts`) in
    `salts`, or one number for all.
    """
    mixed = row_digests(ids) + (tokens + 1) * _TOKEN + (positions + 1) * _PLACE + salts
    mixed = (mixed ^ (mixed >> 29)) * _FIRST
    return (mixed ^ (mixed >> 32)) * _SECOND


def as_word(total: torch.Tensor | int) -> int:
    """Return a wrapped sum as a number in [0, 2^64); waits for the device."""
    return int(total) % _WORD
