"""A reward of your own on data of your own: more vowels, better. Run: python examples/own_reward.py"""

import json
import sys
from pathlib import Path

import headrace

WORDS = (
    "river",
    "water",
    "channel",
    "stone",
    "wheel",
    "mill",
    "weir",
    "lake",
    "spring",
    "brook",
    "pond",
    "ditch",
)


def vowels(completion: str) -> float:
    return sum(letter in "aeiou" for letter in completion) / 8


def main(folder: Path, *overrides: str) -> headrace.RunResult:
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / "words.jsonl"
    data.write_text("".join(json.dumps({"prompt": word}) + "\n" for word in WORDS))
    settings = (
        f"run_dir={folder / 'run'}",
        f"data.train={{words: {{path: {data}}}}}",
        "data.train_size=null",
        "data.validation_size=4",
        "warm_start.enabled=false",  # there are no right answers to learn from
        "policy.optimizer.lr=1e-3",
        "grpo.max_num_steps=20",
    )
    return headrace.train("demo_moe", reward=vowels, overrides=[*settings, *overrides])


if __name__ == "__main__":
    print(main(Path("runs/own_reward"), *sys.argv[1:]).metrics["reward/mean"])
