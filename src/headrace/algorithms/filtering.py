"""Dynamic sampling: keep the groups that teach something, refill with new prompts, and never lose a row.

A group whose rewards are all equal has advantages of 0. The loop rolls out prompts round by round; after each
round `select_groups` divides every row held so far, those of earlier rounds included, into rows to keep,
spare rows to hold, and rows to clear from the store. At most `needed` groups are held between rounds. When
enough groups are kept, or `max_refills` rounds are over, `complete_batch` says which rows train.

Pure functions over per-row lists, in order of arrival; both loops use them. Group keys are compared for
equality only, and a prompt that occurs twice has two keys. Source: DAPO, arXiv:2503.14476, section 3.2.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from headrace.errors import SchemaError


@dataclass(frozen=True)
class Selection:
    """Every row held, by what to do with it; each list holds row positions in ascending order.

    `keep`: rows of groups that train. `spare`: rows of zero-variance groups, held in case the rounds run out.
    `drop`: all other rows; clear them now. `missing_groups`: how many more groups the batch needs.
    `zero_variance_groups` counts the groups of equal rewards among those given, `surplus_groups` the dropped
    groups that would have trained.
    """

    keep: list[int]
    spare: list[int]
    drop: list[int]
    missing_groups: int
    zero_variance_groups: int
    surplus_groups: int

    @property
    def is_complete(self) -> bool:
        return self.missing_groups == 0


@dataclass(frozen=True)
class CompletedBatch:
    """The rows that train, group after group, and each row's weight: 1.0, or 0.0 for one that only fills up.

    Multiply the weights into `sample_mask`. Then a dummy microbatch weighs nothing in the loss, its denominators, the
    advantages' statistics and the metrics. `drop` holds spare rows that are not needed; clear them.
    """

    rows: list[int]
    weights: list[float]
    drop: list[int]

    @property
    def has_signal(self) -> bool:
        """Whether any row has weight; if none has, an optimizer step is weight decay and momentum only."""
        return any(self.weights)


def zero_variance_rows(
    rewards: Sequence[float], group_keys: Sequence[Hashable], valid: Sequence[bool] | None = None
) -> list[bool]:
    """Return for each row whether the valid rows of its group all have the same reward.

    A group with fewer than two valid rows counts as one of equal rewards.

    >>> zero_variance_rows([1.0, 0.0, 1.0, 1.0], ["a", "a", "b", "b"])
    [False, False, True, True]

    Raises:
        SchemaError: lists of different lengths.
    """
    _check_lengths(rewards, group_keys, valid)
    groups = _grouped(range(len(group_keys)), group_keys)
    equal = {group_keys[rows[0]]: not _varies(rows, rewards, valid) for rows in groups}
    return [equal[key] for key in group_keys]


def select_groups(
    rewards: Sequence[float],
    group_keys: Sequence[Hashable],
    *,
    needed: int,
    valid: Sequence[bool] | None = None,
) -> Selection:
    """Decide over all rows held so far; the first groups to arrive win.

    With `needed=2` and groups a (1, 0), b (1, 1), c (0, 1), d (1, 0), two rows each, a and c are kept, b and
    d dropped, and nothing is missing. Without c and d, a is kept, b is spare, and one group is missing.

    Args:
        rewards: Scaled and clipped rewards (`rewards.scaled_rewards`), one per row.
        group_keys: The group of each row; all groups have the same number of rows.
        needed: Groups of a full batch.
        valid: False for a row that will be masked out of the loss; it does not make its group vary.

    Raises:
        SchemaError: lists of different lengths, or groups of different sizes.
    """
    _check_lengths(rewards, group_keys, valid)
    groups = _grouped(range(len(group_keys)), group_keys)
    _check_sizes(groups, group_keys)
    varied = [rows for rows in groups if _varies(rows, rewards, valid)]
    equal = [rows for rows in groups if not _varies(rows, rewards, valid)]
    missing = max(needed - len(varied), 0)
    return Selection(
        keep=_flat(varied[:needed]),
        spare=_flat(equal[:missing]),
        drop=_flat(varied[needed:] + equal[missing:]),
        missing_groups=missing,
        zero_variance_groups=len(equal),
        surplus_groups=len(varied[needed:]),
    )


def refill_groups(missing: int, *, useful: int, drawn: int, most: int) -> int:
    """Return how many groups to draw so that about `missing` of them train, `most` at most.

    Of `drawn` groups so far, `useful` ones had rewards that differ; without any, as many as there is room for.

    >>> refill_groups(2, useful=4, drawn=16, most=16), refill_groups(2, useful=0, drawn=16, most=16)
    (8, 16)
    """
    return min(most, -(-missing * drawn // useful)) if useful else most


def complete_batch(
    keep: Sequence[int], spare: Sequence[int], group_keys: Sequence[Hashable], *, needed: int
) -> CompletedBatch:
    """Return exactly `needed` groups: the kept ones, filled up with spare ones of weight 0.

    The number of rows of a step is fixed, because it has to divide into global batches and ranks; so a batch
    that came out short is filled up, not cut. Fillers are spread evenly among the kept groups, so that no
    global batch of the step is left without signal while another has plenty.

    >>> complete_batch([0, 1], [2, 3], ["a", "a", "b", "b"], needed=2).weights
    [1.0, 1.0, 0.0, 0.0]

    Args:
        keep: Row positions, from `select_groups`.
        spare: Row positions, from `select_groups`.
        group_keys: The group of every row that the positions refer to.
        needed: Groups of a full batch.

    Raises:
        SchemaError: fewer than `needed` groups in all, or more than `needed` kept.
    """
    kept, spares = _grouped(keep, group_keys), _grouped(spare, group_keys)
    short = needed - len(kept)
    if not 0 <= short <= len(spares):
        raise SchemaError(
            f"a batch of {needed} groups cannot be made of {len(kept)} kept and {len(spares)} spare ones; "
            "the first round must roll out grpo.num_prompts_per_step groups, and select_groups keeps no more"
        )
    chosen = [((n + 0.5) / len(kept), 1.0, rows) for n, rows in enumerate(kept)]
    chosen += [((n + 0.5) / short, 0.0, rows) for n, rows in enumerate(spares[:short])]
    # A stable sort by place: where a kept and a spare group share one, the kept one comes first.
    chosen.sort(key=lambda group: group[0])
    return CompletedBatch(
        rows=[row for _, _, rows in chosen for row in rows],
        weights=[weight for _, weight, rows in chosen for _ in rows],
        drop=_flat(spares[short:]),
    )


def _grouped(rows: Iterable[int], group_keys: Sequence[Hashable]) -> list[list[int]]:
    groups: dict[Hashable, list[int]] = {}
    for row in rows:
        groups.setdefault(group_keys[row], []).append(row)
    return list(groups.values())


def _varies(rows: Sequence[int], rewards: Sequence[float], valid: Sequence[bool] | None) -> bool:
    return len({float(rewards[row]) for row in rows if valid is None or valid[row]}) > 1


def _flat(groups: Iterable[Iterable[int]]) -> list[int]:
    return sorted(row for rows in groups for row in rows)


def _check_lengths(
    rewards: Sequence[float], group_keys: Sequence[Hashable], valid: Sequence[bool] | None
) -> None:
    for name, column in (("rewards", rewards), ("valid", valid)):
        if column is not None and len(column) != len(group_keys):
            raise SchemaError(f"got {len(column)} {name} for {len(group_keys)} rows; expected one per row")


def _check_sizes(groups: Sequence[Sequence[int]], group_keys: Sequence[Hashable]) -> None:
    other = next((rows for rows in groups if len(rows) != len(groups[0])), None)
    if other is not None:
        raise SchemaError(
            f"groups of different sizes: {group_keys[groups[0][0]]!r} has {len(groups[0])} rows, "
            f"{group_keys[other[0]]!r} has {len(other)}; every prompt needs "
            "grpo.num_generations_per_prompt samples"
        )
