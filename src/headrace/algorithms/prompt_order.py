"""Orders of training prompts beside the usual one: by the weights of their sets, or by a function of the user's."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from headrace.config import DataConfig
from headrace.errors import ConfigError
from headrace.experience.types import Prompt
from headrace.utils.seeding import derive_seed
from headrace.utils.targets import check_parameters, load_callable, user_code

Order = Callable[[int], Sequence[int]]
"""From an epoch's number to the places of its prompts, as many as there are prompts."""


def prompt_order(data: DataConfig, prompts: Sequence[Prompt], *, seed: int) -> Order | None:
    """Return the order that the recipe asks for; None: every prompt once in each epoch.

    Raises:
        ConfigError: `data.order` names nothing that can be called so, or weights with which prompts are never drawn.
    """
    weights = {name: source.weight for name, source in data.train.items() if source.weight is not None}
    if data.order is not None:
        return _own_order(data.order, prompts, seed)
    if not weights:
        return None
    _check_weights(weights, prompts)
    return _weighted_order(weights, prompts, seed, shuffle=data.shuffle)


def _check_weights(weights: Mapping[str, float], prompts: Sequence[Prompt]) -> None:
    counts = Counter(prompt.data_set for prompt in prompts)
    for name in weights:
        if not counts[name]:
            raise ConfigError(
                f"data.train.{name}.weight={weights[name]}: no prompt of it is left to train on, since all are in "
                "other sets too, held out, too long, or more than data.train_size; change that, or remove the set"
            )
    if others := [name for name in counts if name not in weights]:
        raise ConfigError(
            f"{sum(counts[name] for name in others)} of {len(prompts)} training prompts are the environment's own "
            f"({', '.join(others)}), have no weight beside data.train.{next(iter(weights))}.weight, and would never be "
            "drawn; remove the weights, or name an order (data.order) in place of them"
        )


def _own_order(target: str, prompts: Sequence[Prompt], seed: int) -> Order:
    function, who = load_callable(target, "data.order"), f"data.order={target}"
    values = {"prompts": list(prompts), "epoch": 0, "seed": seed}
    taken = check_parameters(function, values, who, example="(prompts, epoch, seed)")

    def order(epoch: int) -> Sequence[int]:
        values["epoch"] = epoch
        with user_code(who):
            given = {name: value for name, value in values.items() if taken is None or name in taken}
            places = [int(place) for place in function(**given)]
        count = len(prompts)
        if len(places) != count or not all(0 <= place < count for place in places):
            span = f"{min(places, default=0)} to {max(places, default=0)}"
            raise ConfigError(
                f"{who} returned {len(places)} places of {span} for epoch {epoch}; expected {count} of 0 to {count - 1}"
            )
        return places

    order(0)
    return order


def _weighted_order(
    weights: Mapping[str, float], prompts: Sequence[Prompt], seed: int, *, shuffle: bool
) -> Order:
    """Each place of an epoch draws a set by weight, and takes the set's next prompt; a set is gone through in turn."""
    names, shares = list(weights), np.array(list(weights.values()))
    places = {name: [i for i, prompt in enumerate(prompts) if prompt.data_set == name] for name in names}

    def drawn(epoch: int) -> list[int]:
        rng = np.random.default_rng(derive_seed(seed, "sets", epoch))
        return rng.choice(len(names), size=len(prompts), p=shares / shares.sum()).tolist()  # type: ignore[no-any-return]

    def at(number: int, position: int) -> int:
        own = places[names[number]]
        turn, index = divmod(position, len(own))
        if not shuffle:
            return own[index]
        if turns.get(number, (-1,))[0] != turn:
            rng = np.random.default_rng(derive_seed(seed, "set-order", names[number], turn))
            turns[number] = turn, rng.permutation(len(own)).tolist()
        return own[turns[number][1][index]]

    turns: dict[int, tuple[int, list[int]]] = {}

    def order(epoch: int) -> Sequence[int]:
        positions = [0] * len(names)
        for earlier in range(epoch):
            counts = np.bincount(drawn(earlier), minlength=len(names)).tolist()
            positions = [n + count for n, count in zip(positions, counts)]
        found = []
        for number in drawn(epoch):
            found.append(at(number, positions[number]))
            positions[number] += 1
        return found

    return order
