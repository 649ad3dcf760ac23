"""Ranks laid out on named axes."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.errors import ConfigError


class NamedSharding:
    """An N-dimensional arrangement of rank numbers, one name per axis, outermost first.

    >>> mesh = NamedSharding([[[0, 1], [2, 3]]], ["data_parallel", "pipeline_parallel", "tensor_parallel"])
    >>> mesh.get_ranks(data_parallel=0, pipeline_parallel=1).layout.tolist()
    [2, 3]
    >>> mesh.get_worker_coords(2)
    {'data_parallel': 0, 'pipeline_parallel': 1, 'tensor_parallel': 0}

    Raises:
        ConfigError: a ragged layout, ranks that are not integers or repeat, or names that do not match the
            axes.
    """

    def __init__(self, layout: npt.ArrayLike, names: Sequence[str]) -> None:
        self._layout = _integer_array(layout)
        self._names = list(names)
        if self._layout.ndim != len(self._names):
            raise ConfigError(
                f"the layout has {self._layout.ndim} axes and {len(self._names)} names ({self._names}); "
                "give one name per axis"
            )
        if len(set(self._names)) != len(self._names):
            raise ConfigError(f"axis names {self._names} repeat; give each axis its own")
        ranks, counts = np.unique(self._layout, return_counts=True)
        if (counts > 1).any():
            raise ConfigError(f"ranks {ranks[counts > 1].tolist()} stand in the layout more than once")

    @property
    def names(self) -> list[str]:
        return list(self._names)

    @property
    def shape(self) -> dict[str, int]:
        return dict(zip(self._names, self._layout.shape))

    @property
    def ndim(self) -> int:
        return self._layout.ndim

    @property
    def size(self) -> int:
        return self._layout.size

    @property
    def layout(self) -> npt.NDArray[np.int64]:
        return self._layout.copy()

    def get_axis_index(self, name: str) -> int:
        """Return an axis's place in `names`.

        Raises:
            ConfigError: an unknown axis.
        """
        if name not in self._names:
            raise ConfigError(f"axis '{name}' is unknown; the axes are {', '.join(self._names)}")
        return self._names.index(name)

    def get_axis_size(self, name: str) -> int:
        """Return how many ranks lie along an axis.

        Raises:
            ConfigError: an unknown axis.
        """
        return int(self._layout.shape[self.get_axis_index(name)])

    def get_ranks(self, **coords: int) -> "NamedSharding | int":
        """Return the arrangement over the axes that `coords` leaves open, or the rank if it names them all.

        Raises:
            ConfigError: an unknown axis.
            IndexError: a coordinate outside its axis.
        """
        index: list[Any] = [slice(None)] * self.ndim
        for name, coordinate in coords.items():
            size = self.get_axis_size(name)
            if not 0 <= coordinate < size:
                raise IndexError(f"axis '{name}' has size {size}; got coordinate {coordinate}")
            index[self.get_axis_index(name)] = coordinate
        chosen = self._layout[tuple(index)]
        left = [name for name in self._names if name not in coords]
        return NamedSharding(chosen, left) if left else int(chosen)

    def get_ranks_by_coord(self, **coords: int) -> list[int]:
        """Return the ranks at `coords` in ascending order; [] where a coordinate is outside its axis.

        Raises:
            ConfigError: an unknown axis.
        """
        if any(not 0 <= coordinate < self.get_axis_size(name) for name, coordinate in coords.items()):
            return []
        chosen = self.get_ranks(**coords)
        return [chosen] if isinstance(chosen, int) else sorted(chosen.layout.ravel().tolist())

    def get_worker_coords(self, worker_id: int) -> dict[str, int]:
        """Return a rank's coordinate on every axis.

        Raises:
            ConfigError: a rank that is not in the layout.
        """
        found = np.argwhere(self._layout == worker_id)
        if not len(found):
            raise ConfigError(f"rank {worker_id} is not in the layout of {self.size} ranks")
        return dict(zip(self._names, found[0].tolist()))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, NamedSharding):
            return NotImplemented
        return self._names == other._names and np.array_equal(self._layout, other._layout)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"NamedSharding({self.shape}, layout={self._layout.tolist()})"


def _integer_array(layout: npt.ArrayLike) -> npt.NDArray[np.int64]:
    try:
        array = np.asarray(layout)
    except ValueError as error:
        raise ConfigError(f"the layout is ragged ({error}); every axis needs one size") from error
    if array.dtype.kind not in "iuf" or not (array == np.floor(array)).all():
        raise ConfigError(f"the layout has dtype {array.dtype}; expected integer ranks")
    return array.astype(np.int64)
