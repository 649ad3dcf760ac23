"""Seeds derived from names, so that every random draw has its own and none depends on what ran before."""

import hashlib


def derive_seed(seed: int, *parts: str | int) -> int:
    """Return a seed in [0, 2**63) that depends on every argument and on nothing else.

    Example: `derive_seed(run_seed, "rollout", step)` gives the same number in every process and session.
    """
    text = "\x1f".join(str(p) for p in (seed, *parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
