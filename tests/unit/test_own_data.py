"""Prompts from every kind of source, sets with weights, pass@k and maj@k, games of several turns, and long prompts."""

import json
import os
import subprocess
import sys
from collections import Counter
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

import datasets
import pytest

from headrace.algorithms.prompt_order import prompt_order
from headrace.config import (
    ByColumnConfig,
    CalculatorConfig,
    DataConfig,
    DatasetConfig,
    GuessNumberConfig,
    TrainSourceConfig,
    ValidationSourceConfig,
)
from headrace.environments.build import build_environment
from headrace.environments.interfaces import Environment, StepResult
from headrace.environments.sources import cell_value
from headrace.errors import ConfigError
from headrace.experience.chat import render_prompt, set_template_switches
from headrace.experience.prompt_room import prompts_that_fit
from headrace.experience.types import Message
from headrace.experience.validation import maj_at, pass_at, sets_of
from headrace.models.tokenizers import build_character_tokenizer
from tiny_recipe import tiny_recipe

ROWS = [{"prompt": f"{n}", "answer": f"{n}", "level": n} for n in range(6)]


def write(path: Path) -> Path:
    """Write ROWS in the format of the file's name."""
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    elif path.suffix == ".json":
        path.write_text(json.dumps(ROWS))
    elif path.suffix == ".csv":
        datasets.Dataset.from_list(ROWS).to_csv(str(path))
    elif path.suffix == ".parquet":
        datasets.Dataset.from_list(ROWS).to_parquet(str(path))
    else:
        datasets.Dataset.from_list(ROWS).save_to_disk(str(path))
    return path


def build(**data: Any) -> Environment:
    cfg = DataConfig.model_validate({"validation_size": 2, **data})
    return build_environment(DatasetConfig(), cfg, seed=0)


@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.csv", "x.parquet", "x"])
def test_every_format_gives_the_same_prompts(tmp_path: Path, name: str) -> None:
    environment = build(train=str(write(tmp_path / name)))
    prompts = [p for split in ("train", "validation") for p in environment.prompts(split)]
    found = sorted((p.messages[-1].content, p.answer, p.info["level"]) for p in prompts)
    assert found == [(row["prompt"], row["answer"], row["level"]) for row in ROWS]


@pytest.mark.parametrize("text", ["007", "1.50", "1e3", "nan", "inf", "-0", "", "1,000"])
def test_a_cell_that_python_writes_otherwise_stays_text(text: str) -> None:
    assert cell_value(text) == text


def test_messages_are_taken_as_they_are_and_a_system_prompt_is_not_said_twice(tmp_path: Path) -> None:
    talks = [[{"role": "system", "content": "s"}, {"role": "user", "content": f"{n}"}] for n in range(3)]
    path = tmp_path / "talks.jsonl"
    path.write_text("".join(json.dumps({"prompt": talk, "answer": 1}) + "\n" for talk in talks))
    environment = build(train=str(path), system_prompt="other", validation_size=1)
    assert {len(p.messages) for p in environment.prompts("train")} == {2}
    assert environment.prompts("train")[0].messages[0] == Message("system", "s")


def test_a_dataset_of_the_hub_is_read_from_what_was_downloaded(tmp_path: Path) -> None:
    repo = tmp_path / "hub" / "datasets--org--sums"
    snapshot = repo / "snapshots" / ("0" * 40)
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("0" * 40)
    snapshot.mkdir(parents=True)
    write(snapshot / "train.jsonl")
    script = (
        "from headrace.config import DataConfig, DatasetConfig\n"
        "from headrace.environments.build import build_environment\n"
        "data = DataConfig.model_validate({'train': 'org/sums', 'validation_size': 2})\n"
        "print(len(build_environment(DatasetConfig(), data, seed=0).prompts('train')))"
    )
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    for name in ("HF_HUB_CACHE", "HF_DATASETS_CACHE"):
        env.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=env, check=False
    )
    assert done.stdout == "4\n", done.stderr


def test_a_question_of_a_validation_set_does_not_train(tmp_path: Path) -> None:
    more = tmp_path / "more.jsonl"
    more.write_text('{"prompt": "3", "answer": "3"}\n{"prompt": "9", "answer": "9"}\n')
    environment = build(train=str(write(tmp_path / "x.jsonl")), validation=str(more))
    assert "3" not in {p.messages[-1].content for p in environment.prompts("train")}
    assert [p.messages[-1].content for p in environment.prompts("validation")] == ["3", "9"]


def test_sets_are_drawn_by_weight_and_each_is_gone_through_in_turn(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl")
    (tmp_path / "b.jsonl").write_text("".join(f'{{"prompt": "b{n}", "answer": "x"}}\n' for n in range(194)))
    data = DataConfig.model_validate(
        {
            "train": {
                "a": {"path": str(tmp_path / "a.jsonl"), "weight": 3},
                "b": {"path": str(tmp_path / "b.jsonl"), "weight": 1},
            },
            "validation_size": 1,
        }
    )
    prompts = build_environment(DatasetConfig(), data, seed=0).prompts("train")
    order = prompt_order(data, prompts, seed=0)
    assert order is not None
    drawn = [prompts[place] for epoch in range(3) for place in order(epoch)]
    assert len(drawn) == 3 * len(prompts)
    of_a = [p.uid for p in drawn if p.info["data_set"] == "a"]
    assert 0.7 < len(of_a) / len(drawn) < 0.8
    size = len({p.uid for p in prompts if p.info["data_set"] == "a"})
    assert all(len(set(of_a[i : i + size])) == size for i in range(0, len(of_a) - size, size))


def two_sets(
    folder: Path, first: list[dict[str, Any]], second: list[dict[str, Any]], **data: Any
) -> DataConfig:
    """Name sets `a` of weight 1 and `b` of weight 9, in files of these rows."""
    for name, rows in (("a", first), ("b", second)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    train = {name: {"path": str(folder / f"{name}.jsonl"), "weight": w} for name, w in (("a", 1), ("b", 9))}
    return DataConfig.model_validate({"train": train, "validation_size": 10, **data})


def rows_of(name: str, count: int, **more: Any) -> list[dict[str, Any]]:
    return [{"prompt": f"{name}{n}", "answer": "x", **more} for n in range(count)]


@pytest.mark.parametrize(
    ("first", "second", "kept"), [(200, 200, {"a": 10, "b": 90}), (200, 40, {"a": 60, "b": 40})]
)
def test_of_more_sets_the_prompts_of_train_size_keep_the_weights(
    tmp_path: Path, first: int, second: int, kept: dict[str, int]
) -> None:
    data = two_sets(tmp_path, rows_of("a", first), rows_of("b", second), train_size=100)
    data = data.model_copy(
        update={"validation": {"held": ValidationSourceConfig(path=str(tmp_path / "v.jsonl"))}}
    )
    (tmp_path / "v.jsonl").write_text('{"prompt": "v", "answer": "x"}\n')
    found = build_environment(DatasetConfig(), data, seed=0).prompts("train")
    assert Counter(p.data_set for p in found) == kept
    assert {p.uid for p in found} == {
        f"{name}-{n}" for name, count in kept.items() for n in range(1, count + 1)
    }
    bare = data.model_copy(
        update={"train": {k: v.model_copy(update={"weight": None}) for k, v in data.train.items()}}
    )
    shares = Counter(p.data_set for p in build_environment(DatasetConfig(), bare, seed=0).prompts("train"))
    assert abs(shares["a"] - 100 * first / (first + second)) <= 1, "without weights, by size"


def test_a_column_of_the_name_of_a_fact_about_prompts_changes_no_set(tmp_path: Path) -> None:
    named = {"data_set": "b", "place": "Paris", "task": "sums"}
    data = two_sets(tmp_path, rows_of("a", 60, **named), rows_of("b", 60))
    data = data.model_copy(
        update={"validation": {"held": ValidationSourceConfig(path=str(tmp_path / "v.jsonl"))}}
    )
    (tmp_path / "v.jsonl").write_text(json.dumps({"prompt": "v", "answer": "x", **named}) + "\n")
    environment = build_environment(DatasetConfig(), data, seed=0)
    prompts = environment.prompts("train")
    order = prompt_order(data, prompts, seed=0)
    assert order is not None
    drawn = Counter(prompts[place].uid[0] for place in order(0))
    assert drawn["a"] < 0.2 * drawn["b"]
    (held,) = sets_of(environment.prompts("validation"), data.validation, None)
    assert (held.name, len(held.prompts), held.prompts[0].place) == ("held", 1, "line 1")
    assert {key: held.prompts[0].info[key] for key in named} == named, (
        "what the data says reaches scoring code"
    )


def test_a_weight_that_no_prompt_can_follow_is_refused(tmp_path: Path) -> None:
    data = two_sets(tmp_path, rows_of("a", 60), rows_of("a", 60))
    prompts = build_environment(DatasetConfig(), data, seed=0).prompts("train")
    with pytest.raises(ConfigError, match=r"data\.train\.b\.weight=9\.0: no prompt of it is left"):
        prompt_order(data, prompts, seed=0)


def test_weights_beside_an_order_are_refused_unless_they_choose_what_is_kept(tmp_path: Path) -> None:
    words = r"order=my\.code:drawn decides what is drawn, so that train\.a\.weight has no effect"
    with pytest.raises(ValueError, match=words):
        two_sets(tmp_path, rows_of("a", 60), rows_of("b", 60), order="my.code:drawn")
    assert two_sets(tmp_path, rows_of("a", 60), rows_of("b", 60), order="my.code:drawn", train_size=20)


def by_column(folder: Path, game: str = "game", **train: Any) -> tuple[DataConfig, Environment]:
    rows = rows_of("p", 12, task="qa")
    (folder / "qa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "held.jsonl").write_text('{"prompt": "v", "answer": "x", "task": "qa"}\n')
    values = {
        "train": {"qa_rows": {"path": str(folder / "qa.jsonl"), **train}},
        "validation": {"held": {"path": str(folder / "held.jsonl"), "samples": 2}},
        "validation_size": 3,
        "train_size": 8,
    }
    data = DataConfig.model_validate(values)
    cfg = ByColumnConfig.model_validate(
        {"environments": {"qa": {"kind": "dataset"}, game: {"kind": "guess_number"}}}
    )
    return data, build_environment(cfg, data, seed=0)


def test_weights_that_would_never_draw_the_prompts_of_an_environment_are_refused(tmp_path: Path) -> None:
    data, environment = by_column(tmp_path)
    assert prompt_order(data, environment.prompts("train"), seed=0) is None
    data, environment = by_column(tmp_path, weight=1.0)
    with pytest.raises(
        ConfigError, match=r"8 of 16 training prompts .*\(game\).*data\.train\.qa_rows\.weight"
    ):
        prompt_order(data, environment.prompts("train"), seed=0)


def test_beside_validation_sets_the_prompts_of_an_environment_are_a_set_of_its_name(tmp_path: Path) -> None:
    data, environment = by_column(tmp_path)
    found = sets_of(environment.prompts("validation"), data.validation, 2)
    assert [(one.name, len(one.prompts), one.cfg.samples) for one in found] == [
        ("held", 1, 2),
        ("game", 2, 1),
    ]


def test_an_environment_with_prompts_of_its_own_is_not_called_as_a_set_of_data(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"env\.environments\.held makes prompts of its own.*rename one"):
        by_column(tmp_path, game="held")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("path", "other.jsonl"),
        ("question_key", "q"),
        ("answer_key", "a"),
        ("chat_template_kwargs", {"x": True}),
    ],
)
def test_a_key_of_an_inner_environment_that_nothing_reads_is_refused(
    tmp_path: Path, key: str, value: object
) -> None:
    (tmp_path / "x.jsonl").write_text('{"prompt": "p", "answer": "x", "task": "qa"}\n')
    (tmp_path / "v.jsonl").write_text('{"prompt": "v", "answer": "x", "task": "qa"}\n')
    cfg = ByColumnConfig.model_validate({"environments": {"qa": {"kind": "dataset", key: value}}})
    data = DataConfig(
        train={"x": TrainSourceConfig(path=str(tmp_path / "x.jsonl"))},
        validation={"v": ValidationSourceConfig(path=str(tmp_path / "v.jsonl"))},
    )
    with pytest.raises(ConfigError, match=rf"env\.environments\.qa\.{key}=.* is not read.*remove it"):
        build_environment(cfg, data, seed=0)
    usual = ByColumnConfig.model_validate({"environments": {"qa": DatasetConfig().model_dump()}})
    assert build_environment(usual, data, seed=0).prompts("train")[0].answer == "x"


def test_an_environment_whose_rows_are_all_beyond_train_size_makes_no_prompts_of_its_own(
    tmp_path: Path,
) -> None:
    rows = [{"prompt": f"{n}", "answer": f"{n}", "task": "qa" if n < 9 else "sums"} for n in range(12)]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "v.jsonl").write_text('{"prompt": "v", "answer": "x", "task": "qa"}\n')
    cfg = ByColumnConfig.model_validate(
        {"environments": {"qa": {"kind": "dataset"}, "sums": {"kind": "calculator"}}}
    )
    values = {"train": str(tmp_path / "x.jsonl"), "validation": str(tmp_path / "v.jsonl")}
    with pytest.raises(ConfigError, match=r"env\.environments\.sums: .*beyond data\.train_size=9; raise it"):
        build_environment(cfg, DataConfig.model_validate({**values, "train_size": 9}), seed=0)
    environment = build_environment(cfg, DataConfig.model_validate({**values, "train_size": 10}), seed=0)
    assert Counter(p.info["task"] for p in environment.prompts("train")) == {"qa": 9, "sums": 1}


@pytest.mark.parametrize("value", [["qa"], {"name": "qa"}, None, 3])
def test_a_column_that_holds_no_name_of_an_environment_is_one_line(tmp_path: Path, value: object) -> None:
    rows = [{"prompt": f"{n}", "answer": "x", "task": "qa" if n < 3 else value} for n in range(6)]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    cfg = ByColumnConfig.model_validate({"environments": {"qa": {"kind": "dataset"}}})
    data = DataConfig.model_validate({"train": str(tmp_path / "x.jsonl"), "validation_size": 1})
    with pytest.raises(ConfigError, match=r"x, line \d: column 'task' is .*expected one of qa"):
        build_environment(cfg, data, seed=0)


def test_an_inner_environment_that_no_row_names_reads_its_own_file(tmp_path: Path) -> None:
    rows = [{"q": f"{n}", "answer": "x"} for n in range(9)]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    inner = {"kind": "dataset", "path": str(tmp_path / "own.jsonl"), "question_key": "q"}
    cfg = ByColumnConfig.model_validate({"environments": {"qa": inner}})
    environment = build_environment(cfg, DataConfig(validation_size=2), seed=0)
    assert {p.data_set for p in environment.prompts("train")} == {"qa"}
    assert len(environment.prompts("train")) == 7


@pytest.mark.parametrize(("n", "right"), [(4, 0), (4, 1), (5, 2), (6, 6)])
def test_pass_at_k_is_the_share_of_all_choices_of_k_samples_with_a_right_one(n: int, right: int) -> None:
    samples = [i < right for i in range(n)]
    for k in range(1, n + 1):
        assert pass_at(n, right, k) == pytest.approx(
            fmean(any(chosen) for chosen in combinations(samples, k))
        )


def test_maj_at_k_takes_the_answer_of_most_and_shares_ties() -> None:
    assert maj_at(["4", "5", "4", "5", "5", "4"], [True, False] * 2 + [False, True], 3) == 0.5
    assert maj_at(["4", "5", "6", "6"], [True, False, False, False], 4) == 0
    assert maj_at(["4", "5"], [True, False], 2) == 0.5


def answer(environment: Environment, *texts: str) -> StepResult:
    """Have the environment judge a conversation in which the model says these texts, one a turn."""
    prompt = environment.prompts("train")[0]
    talk, result = list(prompt.messages), StepResult(0.0)
    for text in texts:
        talk.append(Message("assistant", text))
        (result,) = environment.step([prompt], [tuple(talk)], [False])
        talk.extend(result.observation)
    return result


def test_the_calculator_computes_and_the_last_number_is_the_answer() -> None:
    environment = build_environment(
        CalculatorConfig(terms=2), DataConfig(train_size=4, validation_size=2), seed=0
    )
    prompt = environment.prompts("train")[0]
    asked = answer(environment, "<calc>(12 + 8) * 3 / 4</calc>")
    assert (asked.done, asked.observation) == (False, (Message("user", "15"),))
    assert asked.correct is False, "if turns or tokens end here, no answer was given"
    for text in ("9**9**9", "1/0", "__import__('os')", "open('x')", "1" * 300):
        assert answer(environment, f"<calc>{text}</calc>").observation[0].content == "cannot be computed"
    right = answer(environment, "<calc>1+1</calc>", f"so it is {prompt.answer}")
    assert (right.reward, right.correct, right.done) == (1.0, True, True)
    assert answer(environment, "none").reward == 0


def test_the_game_tells_whether_a_guess_is_too_low_or_too_high() -> None:
    cfg = GuessNumberConfig(lowest=1, highest=9)
    environment = build_environment(cfg, DataConfig(train_size=3, validation_size=2), seed=0)
    secret = int(environment.prompts("train")[0].answer or 0)
    assert answer(environment, "0").observation[0].content == "too low"
    assert answer(environment, "0", "10").observation[0].content == "too high"
    assert answer(environment, "?").observation[0].content == "no number"
    assert answer(environment, "10", f"{secret}").reward == 1


def test_a_column_chooses_the_environment_and_makers_of_prompts_add_theirs(tmp_path: Path) -> None:
    path = tmp_path / "mixed.jsonl"
    kinds = ["exact", "number"] * 3
    path.write_text(
        "".join(f'{{"prompt": "p{n}", "answer": "{n}", "task": "{k}"}}\n' for n, k in enumerate(kinds))
    )
    environments = {
        "exact": {"kind": "dataset"},
        "number": {"kind": "dataset", "match": "last_number"},
        "game": {"kind": "guess_number"},
    }
    cfg = ByColumnConfig.model_validate({"environments": environments})
    data = DataConfig.model_validate({"train": str(path), "validation_size": 1, "train_size": 4})
    environment = build_environment(cfg, data, seed=0)
    prompts = [p for split in ("train", "validation") for p in environment.prompts(split)]
    assert {p.info["task"] for p in prompts} == {"exact", "number", "game"}
    talks = [(*p.messages, Message("assistant", f"it is {p.answer}")) for p in prompts]
    results = environment.step(prompts, talks, [False] * len(prompts))
    rewards = {p.info["task"]: r.reward for p, r in zip(prompts, results)}
    assert rewards == {"exact": 0.0, "number": 1.0, "game": 1.0}


def test_a_prompt_that_is_too_long_is_cut_at_its_beginning_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    texts = ["ab", "abc", "x" * 40 + "end"]
    path.write_text("".join(json.dumps({"prompt": text, "answer": "a"}) + "\n" for text in texts))
    recipe = tiny_recipe(tmp_path / "run")
    values = recipe.model_dump()
    values["env"] = {"kind": "dataset"}
    values["data"] = {"train": str(path), "validation_size": 1, "overlong_prompts": "truncate"}
    recipe = type(recipe).model_validate(values)
    tokenizer = build_character_tokenizer("abcdefghijklmnopqrstuvwxyz")
    environment = prompts_that_fit(recipe, tokenizer)
    prompts = [p for split in ("train", "validation") for p in environment.prompts(split)]
    (cut,) = (p for p in prompts if p.messages[-1].content.endswith("end"))
    room = recipe.policy.max_total_sequence_length - recipe.generation.max_new_tokens
    assert len(render_prompt(tokenizer, cut.messages)) == room
    assert "cut at their beginning" in str(environment.notice())  # type: ignore[attr-defined]


@pytest.mark.parametrize("overlong", ["refuse", "skip", "truncate"])
def test_a_prompt_with_a_character_that_the_tokenizer_lacks_is_named(tmp_path: Path, overlong: str) -> None:
    path = tmp_path / "odd.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": text, "answer": "a"}) + "\n" for text in ("ab", "ba", "aéb"))
    )
    recipe = tiny_recipe(tmp_path / "run")
    data = {"train": str(path), "validation_size": 1, "overlong_prompts": overlong}
    values = {**recipe.model_dump(), "env": {"kind": "dataset"}, "data": data}
    recipe = type(recipe).model_validate(values)
    with pytest.raises(
        ConfigError, match=r"^prompt 'odd-3' \(line 3\): the tokenizer does not know a character"
    ):
        prompts_that_fit(recipe, build_character_tokenizer("ab"))


def test_switches_reach_the_chat_template() -> None:
    tokenizer = build_character_tokenizer("abc")
    tokenizer.chat_template = "{{ 'a' if thinking else 'b' }}{{ messages[0]['content'] }}"
    message = [Message("user", "c")]
    plain = render_prompt(tokenizer, message)
    set_template_switches(tokenizer, {"thinking": True})
    assert tokenizer.decode(render_prompt(tokenizer, message)) == "ac"
    set_template_switches(tokenizer, {})
    assert render_prompt(tokenizer, message) == plain
