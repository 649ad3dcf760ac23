"""Packing algorithms as objects, by name: `get_packer("first_fit_decreasing", 4096).pack(lengths)`."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from enum import Enum

import numpy as np
import numpy.typing as npt

from headrace.distributed.balance import IntArray, descending_order
from headrace.distributed.bin_packing import (
    as_lengths,
    behind_the_middle,
    check_algorithm,
    check_fits,
    concatenate_rows,
    pack_shards,
    split_fullest,
)
from headrace.errors import ConfigError
from headrace.utils.rounding import round_up


def pack_rows(
    lengths: npt.ArrayLike,
    capacity: int,
    algorithm: str,
    *,
    min_bin_count: int = 1,
    bin_count_multiple: int = 1,
) -> list[IntArray]:
    """Return the row indices of each bin, ascending within a bin.

    No bin holds more than `capacity` tokens. The number of bins is at least `min_bin_count` and a multiple of
    `bin_count_multiple`; a bin is empty only where there are fewer rows than bins.

    >>> [b.tolist() for b in pack_rows([5, 3, 4, 4], 8, "first_fit_decreasing")]
    [[0, 1], [2, 3]]

    Raises:
        ConfigError: an unknown algorithm, a row longer than `capacity`, or a count below 1.
    """
    tokens = as_lengths(lengths)
    check_fits(tokens, tokens, capacity, knob="capacity")
    check_algorithm(algorithm)
    if min_bin_count < 0 or bin_count_multiple < 1:
        raise ConfigError(
            f"min_bin_count={min_bin_count} and bin_count_multiple={bin_count_multiple}; "
            "expected at least 0 and 1"
        )
    if algorithm == "concatenative":
        bin_of = concatenate_rows(tokens, capacity)
    else:
        order = descending_order(tokens)
        bin_of = pack_shards(tokens, np.zeros_like(tokens), 1, capacity, algorithm, order)
    choose = behind_the_middle if algorithm == "concatenative" else _every_other
    return _rows_of_bins(tokens, bin_of, min_bin_count, bin_count_multiple, choose)


def _rows_of_bins(
    tokens: IntArray,
    bin_of: IntArray,
    min_bin_count: int,
    bin_count_multiple: int,
    choose: Callable[[IntArray], npt.NDArray[np.bool_]],
) -> list[IntArray]:
    """Return the rows of each bin, after the fullest have been split until there are as many bins as asked for."""
    bins = round_up(max(int(bin_of.max(initial=-1)) + 1, min_bin_count), bin_count_multiple)
    split_fullest(tokens, bin_of, bins, choose)
    rows = np.argsort(bin_of, kind="stable")
    stops = np.cumsum(np.bincount(bin_of, minlength=bins))
    return [rows[start:stop] for start, stop in zip([0, *stops[:-1].tolist()], stops.tolist())]


def _every_other(lengths: IntArray) -> npt.NDArray[np.bool_]:
    """Choose about half of the tokens: of the rows in descending order, the pattern stay, go, go, stay."""
    turn = np.empty(len(lengths), dtype=np.int64)
    turn[descending_order(lengths)] = np.arange(len(lengths)) % 4
    return np.isin(turn, (1, 2))


class PackingAlgorithm(Enum):
    """Algorithms that `get_packer` knows."""

    CONCATENATIVE = "concatenative"
    FIRST_FIT_DECREASING = "first_fit_decreasing"
    FIRST_FIT_SHUFFLE = "first_fit_shuffle"
    MODIFIED_FIRST_FIT_DECREASING = "modified_first_fit_decreasing"


class SequencePacker(ABC):
    """Packs sequences into bins of at most `bin_capacity` tokens.

    The number of bins is at least `min_bin_count` and a multiple of `bin_count_multiple`; a bin is empty only
    where there are fewer sequences than bins.

    Raises:
        ConfigError: a capacity or multiple below 1, or a negative minimum.
    """

    def __init__(
        self,
        bin_capacity: int,
        collect_metrics: bool = False,
        min_bin_count: int | None = None,
        bin_count_multiple: int | None = None,
    ) -> None:
        self.bin_capacity = bin_capacity
        self.collect_metrics = collect_metrics
        self.min_bin_count = 0 if min_bin_count is None else min_bin_count
        self.bin_count_multiple = 1 if bin_count_multiple is None else bin_count_multiple
        if self.bin_capacity < 1 or self.min_bin_count < 0 or self.bin_count_multiple < 1:
            raise ConfigError(
                f"bin_capacity={bin_capacity}, min_bin_count={min_bin_count} and "
                f"bin_count_multiple={bin_count_multiple}; expected at least 1, 0 and 1"
            )
        self._packed: list[tuple[int, int]] = []

    def pack(self, sequence_lengths: Sequence[int]) -> list[list[int]]:
        """Return the indices of the sequences in each bin.

        Raises:
            ConfigError: a sequence longer than `bin_capacity`.
        """
        lengths = as_lengths(sequence_lengths)
        bins = [b.tolist() for b in self._bins(lengths)]
        if self.collect_metrics:
            self._packed.append((int(lengths.sum()), len(bins)))
        return bins

    def get_aggregated_metrics(self) -> dict[str, float]:
        """Return tokens, bins and fill over all calls of `pack`; empty unless `collect_metrics`."""
        if not self._packed:
            return {}
        tokens, bins = (sum(column) for column in zip(*self._packed))
        fill = tokens / (bins * self.bin_capacity) if bins else 0.0
        return {"tokens": float(tokens), "bins": float(bins), "fill": fill}

    def reset_metrics(self) -> None:
        self._packed.clear()

    def compute_metrics(
        self, sequence_lengths: Sequence[int], bins: Sequence[Sequence[int]]
    ) -> dict[str, float]:
        """Return tokens, bins and fill of one packing, the fullest and the emptiest bin, and the fewest bins possible.

        `fill` is the share of the bins' room that is used, `least_bins` the tokens in whole bins, without regard to
        where sequences end.
        """
        lengths = as_lengths(sequence_lengths).tolist()
        loads = [sum(lengths[row] for row in rows) for rows in bins]
        room = len(bins) * self.bin_capacity
        return {
            "tokens": float(sum(loads)),
            "bins": float(len(bins)),
            "fill": sum(loads) / room if room else 0.0,
            "fullest_bin_tokens": float(max(loads, default=0)),
            "emptiest_bin_tokens": float(min(loads, default=0)),
            "least_bins": float(-(-sum(loads) // self.bin_capacity)),
        }

    def print_metrics(self) -> None:
        """Write what `get_aggregated_metrics` returns to the terminal, one per line."""
        lines = [f"{name}: {value:g}" for name, value in self.get_aggregated_metrics().items()]
        sys.stdout.write(
            "".join(f"{line}\n" for line in lines or ["no metrics: nothing was packed and counted"])
        )

    @abstractmethod
    def _bins(self, lengths: IntArray) -> list[IntArray]: ...


class _NamedPacker(SequencePacker):
    _algorithm: PackingAlgorithm

    def _bins(self, lengths: IntArray) -> list[IntArray]:
        return pack_rows(
            lengths,
            self.bin_capacity,
            self._algorithm.value,
            min_bin_count=self.min_bin_count,
            bin_count_multiple=self.bin_count_multiple,
        )


class ConcatenativePacker(_NamedPacker):
    """Fills one bin after the other in the order of the sequences."""

    _algorithm = PackingAlgorithm.CONCATENATIVE


class FirstFitPacker(SequencePacker):
    """Puts each sequence, in the order in which they are given, into the first bin with room."""

    def _bins(self, lengths: IntArray) -> list[IntArray]:
        check_fits(lengths, lengths, self.bin_capacity, knob="bin_capacity")
        room: list[int] = []
        bin_of = np.zeros(len(lengths), dtype=np.int64)
        for row, length in enumerate(lengths.tolist()):
            bin_ = next((place for place, left in enumerate(room) if left >= length), len(room))
            if bin_ == len(room):
                room.append(self.bin_capacity)
            room[bin_] -= length
            bin_of[row] = bin_
        return _rows_of_bins(lengths, bin_of, self.min_bin_count, self.bin_count_multiple, _every_other)


class FirstFitDecreasingPacker(_NamedPacker, FirstFitPacker):
    """Puts each sequence, from the longest on, into the first bin with room."""

    _algorithm = PackingAlgorithm.FIRST_FIT_DECREASING


class ModifiedFirstFitDecreasingPacker(_NamedPacker):
    """First-fit-decreasing that first completes the bins of sequences longer than half a bin."""

    _algorithm = PackingAlgorithm.MODIFIED_FIRST_FIT_DECREASING


class FirstFitShufflePacker(_NamedPacker, FirstFitPacker):
    """Puts each sequence, in a random order that their number decides, into the first bin with room."""

    _algorithm = PackingAlgorithm.FIRST_FIT_SHUFFLE


_PACKERS: dict[PackingAlgorithm, type[SequencePacker]] = {
    PackingAlgorithm.CONCATENATIVE: ConcatenativePacker,
    PackingAlgorithm.FIRST_FIT_DECREASING: FirstFitDecreasingPacker,
    PackingAlgorithm.FIRST_FIT_SHUFFLE: FirstFitShufflePacker,
    PackingAlgorithm.MODIFIED_FIRST_FIT_DECREASING: ModifiedFirstFitDecreasingPacker,
}


def get_packer(
    algorithm: PackingAlgorithm | str,
    bin_capacity: int,
    collect_metrics: bool = False,
    min_bin_count: int | None = None,
    bin_count_multiple: int | None = None,
) -> SequencePacker:
    """Return the packer of an algorithm, given by member or by name in any case.

    >>> get_packer("concatenative", 5).pack([4, 1, 3, 2])
    [[0, 1], [2, 3]]

    Raises:
        ConfigError: an unknown algorithm.
    """
    if isinstance(algorithm, str):
        algorithm = PackingAlgorithm.__members__.get(algorithm.upper(), algorithm)
    if not isinstance(algorithm, PackingAlgorithm):
        known = ", ".join(a.value for a in PackingAlgorithm)
        raise ConfigError(f"packing algorithm '{algorithm}' is unknown; choose one of {known}")
    return _PACKERS[algorithm](bin_capacity, collect_metrics, min_bin_count, bin_count_multiple)


# It stands for `nemo_rl.data.packing`, too, a package with this one module.
__path__: list[str] = []
algorithms = sys.modules[__name__]
