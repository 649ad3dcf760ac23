"""The reward of recipe.yaml: change it, and train again with `overwrite=true`."""

from typing import Any


def letters(prompt: str, completion: str, info: dict[str, Any]) -> float:
    """Return the fraction of letters in their place; `info` holds the row of the data, its `answer` too."""
    answer = info["answer"]
    right = sum(given == wanted for given, wanted in zip(completion, answer))
    return right / max(len(answer), len(completion))
