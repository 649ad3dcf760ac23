"""What `scale` cannot run, as arithmetic: measured curves, assumptions with their sources, seconds of a step.

Pure. A curve is the seconds of one part of a step by number of ranks, each rank with `ROWS_PER_RANK` rows.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class Assumption(NamedTuple):
    """A number that no measurement here gives."""

    value: float
    unit: str
    source: str


ROWS_PER_RANK = Assumption(1000, "rows", "10 million samples on 10,000 ranks")
STEP_S = Assumption(300, "s", "a step of long answers on this many ranks: minutes of generation")
SHARE = Assumption(0.05, "of a step", "what the control plane may take")
ROUND_TRIP_S = Assumption(0.2e-3, "s", "TCP within a data centre: 0.1 to 0.3 ms")
NIC_BYTES_PER_S = Assumption(12.5e9, "B/s", "100 Gbit/s Ethernet, the driver's or the index's node")
TOKENS = Assumption(1000, "tokens", "length of a row; says how many rows a block holds")
ROWS_PER_BLOCK = Assumption(256, "rows", "blocks.py: a sixteenth of a put, at 1,000 tokens a row")
STAGES = Assumption(3, "dispatches", "tq_policy.py: previous logprobs, reference logprobs, training")
PUT_ROWS = Assumption(4096, "rows", "rows that a rollout actor puts at once")
TIMEOUT_S = Assumption(120, "s", "config.py: data_plane.timeout_s")
DRIVER_BYTES = Assumption(64 * 2**30, "B", "host memory that a driver may take")
GROUP_RANKS = Assumption(256, "ranks", "ranks under one driver and one index, of several")
INDEX_PARTS = Assumption(16, "indexes", "parts of the books, by a hash of the sample id")

ASSUMPTIONS: dict[str, Assumption] = {
    name: value for name, value in list(globals().items()) if isinstance(value, Assumption)
}


@dataclass(frozen=True)
class Curve:
    """Measured seconds by ranks: linear below them, and beyond them growing by the power of the last two."""

    points: Mapping[int, float]

    @property
    def power(self) -> float:
        """Growth between the last two measured points: 1 is linear in ranks, so constant per rank."""
        (x0, y0), (x1, y1) = sorted(self.points.items())[-2:]
        return float(np.log(y1 / y0) / np.log(x1 / x0))

    def value(self, ranks: float) -> float:
        """Return seconds at a number of ranks."""
        known = sorted(self.points.items())
        if ranks < known[0][0]:
            return known[0][1] * ranks / known[0][0]
        if ranks > known[-1][0]:
            return float(known[-1][1] * (ranks / known[-1][0]) ** self.power)
        x, y = np.log(np.array(known, float)).T
        return float(np.exp(np.interp(np.log(ranks), x, y)))

    def as_json(self) -> dict[str, object]:
        """Return points and growth."""
        return {
            "seconds": {str(k): round(v, 6) for k, v in self.points.items()},
            "power": round(self.power, 3),
        }


def blocks_of_a_rank(ranks: float) -> float:
    """Return how many of a column's blocks hold rows of one rank, whose rows lie scattered over all blocks."""
    blocks = max(ranks * ROWS_PER_RANK.value / ROWS_PER_BLOCK.value, 1e-9)
    return float(blocks * -np.expm1(-ROWS_PER_RANK.value / blocks))


class ScatteredCurve(Curve):
    """Seconds of what each rank asks of the index: beyond the points, per rank, linear in the blocks that it meets."""

    def value(self, ranks: float) -> float:
        """Return seconds at a number of ranks."""
        known = sorted(self.points.items())[-2:]
        if ranks <= known[-1][0]:
            return super().value(ranks)
        blocks, per_rank = zip(*((blocks_of_a_rank(n), seconds / n) for n, seconds in known))
        slope, constant = np.polyfit(blocks, per_rank, 1)
        return float(ranks * (constant + slope * blocks_of_a_rank(ranks)))


@dataclass(frozen=True)
class Costs:
    """Curves of a step's parts, by ranks. Each counts the whole step: all stages, all rows, all ranks."""

    driver: Mapping[str, Curve]
    index: Mapping[str, Curve]
    driver_bytes_per_row: float
    message_bytes_per_row: float

    def driver_s(self, ranks: float) -> float:
        """Seconds of the driver in a step."""
        return sum(curve.value(ranks) for curve in self.driver.values())

    def index_s(self, ranks: float) -> float:
        """Seconds of the index in a step."""
        return sum(curve.value(ranks) for curve in self.index.values())

    def network_s(self, ranks: float) -> float:
        """Seconds of messages over the driver's network card, and of round trips one after the other."""
        sent = ranks * ROWS_PER_RANK.value * self.message_bytes_per_row * STAGES.value
        return sent / NIC_BYTES_PER_S.value + 3 * STAGES.value * ROUND_TRIP_S.value

    def step_s(self, ranks: float) -> float:
        """Seconds that a step waits for the control plane: stages are barriers, so its parts add up."""
        return self.driver_s(ranks) + self.index_s(ranks) + self.network_s(ranks)

    def driver_memory_bytes(self, ranks: float) -> float:
        """Memory that a step's metadata takes in the driver."""
        return ranks * ROWS_PER_RANK.value * self.driver_bytes_per_row

    def grouped_step_s(self, ranks: float, group_ranks: float) -> float:
        """Seconds when groups of ranks have a driver and an index each, and a root that dispatches to the groups."""
        groups = np.ceil(ranks / group_ranks)
        return self.step_s(min(group_ranks, ranks)) + self.driver["dispatch"].value(max(groups, 1))


def breaks_at(cost: Callable[[float], float], limit: float, largest: float = 1e6) -> float:
    """Return the ranks at which a growing cost reaches a limit, or `largest`."""
    low, high = 1.0, largest
    if cost(high) < limit:
        return largest
    while high / low > 1.001:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if cost(middle) < limit else (low, middle)
    return low
