"""Makes `nemo_rl` importable in these tests."""

import headrace.compat.nemo_rl  # noqa: F401
