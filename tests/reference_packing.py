"""Naive, row-by-row truth for packing, planning and batches: loops over Python lists, no NumPy, no tensors."""

from collections.abc import Callable, Sequence


def first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Return row indices per bin: each row, from the longest on, into the first bin with room."""
    return _first_fit(sorted(range(len(lengths)), key=lambda i: -lengths[i]), lengths, capacity)


def _first_fit(order: Sequence[int], lengths: Sequence[int], capacity: int) -> list[list[int]]:
    bins: list[list[int]] = []
    room: list[int] = []
    for row in order:
        for index, left in enumerate(room):
            if lengths[row] <= left:
                bins[index].append(row)
                room[index] -= lengths[row]
                break
        else:
            bins.append([row])
            room.append(capacity - lengths[row])
    return bins


def modified_first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Return row indices per bin by the five phases of Johnson and Garey (1985), for positive lengths."""
    rows = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    large = [i for i in rows if 2 * lengths[i] > capacity]
    left = [i for i in rows if 2 * lengths[i] <= capacity]
    bins = [[i] for i in large]

    def room(b: list[int]) -> int:
        return capacity - sum(lengths[i] for i in b)

    def is_medium(i: int) -> bool:
        return 3 * lengths[i] > capacity

    def is_small(i: int) -> bool:
        return not is_medium(i) and 6 * lengths[i] > capacity

    for b in bins:
        _place_longest(b, left, is_medium, lengths, room(b))
    for b in reversed(bins):
        small = [i for i in left if is_small(i)]
        if len(b) > 1 or len(small) < 2 or lengths[small[-1]] + lengths[small[-2]] > room(b):
            continue
        b.append(small[-1])
        left.remove(small[-1])
        _place_longest(b, left, is_small, lengths, room(b))
    for b in bins:
        while _place_longest(b, left, lambda i: True, lengths, room(b)):
            pass
    return bins + _first_fit(left, lengths, capacity)


def _place_longest(
    bin_: list[int], left: list[int], wanted: Callable[[int], bool], lengths: Sequence[int], room: int
) -> bool:
    for row in left:
        if wanted(row) and lengths[row] <= room:
            bin_.append(row)
            left.remove(row)
            return True
    return False


def concatenative(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Return row indices per bin: rows in order, a new bin where the next row does not fit."""
    bins: list[list[int]] = []
    used = 0
    for row, length in enumerate(lengths):
        if not bins or used + length > capacity:
            bins.append([])
            used = 0
        bins[-1].append(row)
        used += length
    return bins


def rounded(length: int, multiple: int) -> int:
    """Return the next multiple."""
    while length % multiple:
        length += 1
    return length


def contiguous_shards(rows: Sequence[int], shards: int, batch_size: int) -> list[list[int]]:
    """Return each shard's rows: slice k of every global batch, one after the other."""
    result: list[list[int]] = [[] for _ in range(shards)]
    for start in range(0, len(rows), batch_size):
        part = batch_size // shards
        for shard in range(shards):
            result[shard].extend(rows[start + shard * part : start + (shard + 1) * part])
    return result


def dynamic_boundaries(position_lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Return [start, stop) position ranges whose rows times longest padded length fit the budget, greedily."""
    ranges: list[list[int]] = []
    for position in range(len(position_lengths)):
        start = ranges[-1][0] if ranges else 0
        longest = max(position_lengths[start : position + 1])
        if ranges and (position + 1 - start) * longest <= budget:
            ranges[-1][1] = position + 1
        else:
            ranges.append([position, position + 1])
    return ranges


def put_at(values: Sequence[object], places: Sequence[int]) -> list[object]:
    """Return the list in which `values[i]` stands at `places[i]`."""
    result: list[object] = [None] * len(values)
    for value, place in zip(values, places):
        result[place] = value
    return result
