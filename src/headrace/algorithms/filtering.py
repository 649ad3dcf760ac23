"""Dynamic sampling: keep the groups that teach something, refill with new prompts, and never lose a row.

A group whose rewards are all equal has advantages of 0. After each round of rollouts `select_groups` divides all rows
held so far into rows to keep, spare rows to hold, and the rest, which is cleared; at most `needed` groups are held
between rounds. When enough are kept, or `max_refills` rounds are over, `complete_batch` says which rows train.

Pure functions over per-row lists, in order of arrival. A prompt that occurs twice has two group keys.
Source: DAPO, arXiv:2503.14476, section 3.2.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from headrace.errors import ConfigError, SchemaError
from headrace.utils.targets import check_parameters, load_callable, user_code

Groups = list[list[int]]
"""Row positions, group by group."""


@dataclass(frozen=True)
class Selection:
    """The rows to hold, each list in ascending order; all others are to be cleared.

    `keep`: rows of groups that train. `spare`: rows of zero-variance groups, held in case the rounds run out.
    `missing_groups`: how many more groups the batch needs.
    """

    keep: list[int]
    spare: list[int]
    missing_groups: int


def differ(rewards: Sequence[float]) -> bool:
    return len(set(rewards)) > 1


def divide_groups(
    rewards: Sequence[float],
    group_keys: Sequence[Hashable],
    valid: Sequence[bool] | None = None,
    trains: Callable[[Sequence[float]], bool] = differ,
) -> tuple[Groups, Groups]:
    """Return the groups whose valid rows have rewards that differ (or that `trains` takes), and the others.

    `rewards` are scaled and clipped ones (`rewards.scaled_rewards`). `valid` is False for a row that will be masked out
    of the loss; a group with fewer than two valid rows is one of the others.

    >>> divide_groups([1.0, 0.0, 1.0, 1.0], ["a", "a", "b", "b"])
    ([[0, 1]], [[2, 3]])

    Raises:
        SchemaError: lists of different lengths, or groups of different sizes.
    """
    for name, column in (("rewards", rewards), ("valid", valid)):
        if column is not None and len(column) != len(group_keys):
            raise SchemaError(f"got {len(column)} {name} for {len(group_keys)} rows; expected one per row")
    groups = _grouped(range(len(group_keys)), group_keys)
    other = next((rows for rows in groups if len(rows) != len(groups[0])), None)
    if other is not None:
        raise SchemaError(
            f"groups of different sizes: {group_keys[groups[0][0]]!r} has {len(groups[0])} rows, "
            f"{group_keys[other[0]]!r} has {len(other)}; every prompt needs "
            "grpo.num_generations_per_prompt samples"
        )
    divided: tuple[Groups, Groups] = ([], [])
    for rows in groups:
        values = [float(rewards[row]) for row in rows if valid is None or valid[row]]
        divided[not (len(values) > 1 and trains(values))].append(rows)
    return divided


def own_filter(target: str) -> Callable[[Sequence[float]], bool]:
    """Return the filter of `grpo.dynamic_sampling.target`.

    Raises:
        ConfigError: it cannot be called so; when called, also that it raises, or returns no truth value.
    """
    key = "grpo.dynamic_sampling.target"
    function, who = load_callable(target, key), f"{key}={target}"
    check_parameters(function, ("rewards",), who, example="(rewards)")

    def trains(rewards: Sequence[float]) -> bool:
        with user_code(who):
            found = function(rewards=list(rewards))
        if type(found).__name__ not in ("bool", "bool_"):
            raise ConfigError(
                f"{who} returned {found!r:.40} of type {type(found).__name__}; expected True or False"
            )
        return bool(found)

    return trains


def select_groups(
    rewards: Sequence[float],
    group_keys: Sequence[Hashable],
    *,
    needed: int,
    valid: Sequence[bool] | None = None,
    trains: Callable[[Sequence[float]], bool] = differ,
) -> Selection:
    """Decide over all rows held so far; the first groups to arrive win.

    With `needed=2` and groups a (1, 0), b (1, 1), c (0, 1), d (1, 0), two rows each, a and c are kept and nothing
    is missing. Without c and d, a is kept, b is spare, and one group is missing.

    Raises:
        SchemaError: see `divide_groups`.
    """
    varied, equal = divide_groups(rewards, group_keys, valid, trains)
    missing = max(needed - len(varied), 0)
    keep, spare = (sorted(chain.from_iterable(part)) for part in (varied[:needed], equal[:missing]))
    return Selection(keep, spare, missing)


def refill_groups(missing: int, *, useful: int, drawn: int, most: int) -> int:
    """Return how many groups to draw so that about `missing` of them train, `most` at most.

    Of `drawn` groups so far, `useful` ones had rewards that differ; without any, as many as there is room for.

    >>> refill_groups(2, useful=4, drawn=16, most=16), refill_groups(2, useful=0, drawn=16, most=16)
    (8, 16)
    """
    return min(most, -(-missing * drawn // useful)) if useful else most


def complete_batch(
    keep: Sequence[int], spare: Sequence[int], group_keys: Sequence[Hashable], *, needed: int
) -> tuple[list[int], list[float]]:
    """Return the rows of exactly `needed` groups, and their weights: 1 for kept ones, 0 for spare ones that fill up.

    A step's number of rows has to divide into global batches and ranks; so a batch that came out short is filled up,
    not cut. Multiply the weights into `sample_mask`: then a spare row weighs nothing in the loss, its denominators, the
    advantages' statistics and the metrics. Spare groups are spread evenly among the kept ones, so that no global batch
    of the step is left without signal while another has plenty.

    >>> complete_batch([0, 1], [2, 3], ["a", "a", "b", "b"], needed=2)
    ([0, 1, 2, 3], [1.0, 1.0, 0.0, 0.0])

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
    weighted = [(row, weight) for _, weight, rows in chosen for row in rows]
    return [row for row, _ in weighted], [weight for _, weight in weighted]


def _grouped(rows: Iterable[int], group_keys: Sequence[Hashable]) -> Groups:
    groups: dict[Hashable, list[int]] = {}
    for row in rows:
        groups.setdefault(group_keys[row], []).append(row)
    return list(groups.values())
