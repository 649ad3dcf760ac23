"""Questions from files: what is read, how answers match, and errors with path, line, key and remedy."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import pytest

from headrace.config import DataConfig, DatasetConfig
from headrace.environments.build import build_environment
from headrace.environments.dataset import last_number
from headrace.environments.interfaces import Environment
from headrace.errors import ConfigError
from headrace.experience.types import Message

SMALL = DataConfig(train_size=100, validation_size=2)
ROWS = [{"question": f"{i} + {i}?", "answer": f"{2 * i}"} for i in range(10)]


def write(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows), encoding="utf-8")
    return path


def build(path: Path, data: DataConfig = SMALL, *, seed: int = 0, **cfg: Any) -> Environment:
    return build_environment(DatasetConfig(path=str(path), **cfg), data, seed=seed)


def rewards(environment: Environment, texts: dict[str, str]) -> list[float]:
    """Judge one text per question, the same one for each of its rows."""
    prompts = [p for p in environment.prompts("train") if p.messages[-1].content in texts]
    talks = [(*p.messages, Message("assistant", texts[p.messages[-1].content])) for p in prompts]
    return [r.reward for r in environment.step(prompts, talks, [False] * len(prompts))]


def one_question(tmp_path: Path, answer: Any, match: str) -> Environment:
    """Build an environment whose training questions all have the same answer."""
    rows = [{"question": f"q{i}", "answer": answer} for i in range(3)]
    data = DataConfig(train_size=2, validation_size=1)
    return build(write(tmp_path / "q.jsonl", rows), data, match=match)


def score(environment: Environment, text: str) -> float:
    prompt = environment.prompts("train")[0]
    return environment.step([prompt], [(*prompt.messages, Message("assistant", text))], [False])[0].reward


def test_every_row_is_in_exactly_one_split(tmp_path: Path) -> None:
    environment = build(write(tmp_path / "sums.jsonl", ROWS))
    train, validation = environment.prompts("train"), environment.prompts("validation")
    assert (len(train), len(validation)) == (8, 2)
    assert sorted(p.messages[0].content for p in train + validation) == [r["question"] for r in ROWS]
    assert {p.uid for p in train + validation} == {f"sums-{i}" for i in range(1, 11)}
    assert all(p.answer == str(2 * int(p.uid.split("-")[1]) - 2) for p in train)


def test_seeds_share_the_validation_rows_and_shuffle_the_others(tmp_path: Path) -> None:
    path = write(tmp_path / "sums.jsonl", ROWS)
    first, second = build(path, seed=0), build(path, seed=1)
    assert first.prompts("validation") == second.prompts("validation")
    assert first.prompts("train") != second.prompts("train")
    assert sorted(p.uid for p in first.prompts("train")) == sorted(p.uid for p in second.prompts("train"))


def test_at_most_train_size_rows_are_kept(tmp_path: Path) -> None:
    environment = build(write(tmp_path / "sums.jsonl", ROWS), DataConfig(train_size=3, validation_size=2))
    assert len(environment.prompts("train")) == 3


def test_a_repeated_question_counts_once_with_its_first_answer(tmp_path: Path) -> None:
    rows = [*ROWS, {"question": ROWS[0]["question"], "answer": "other"}]
    environment = build(write(tmp_path / "sums.jsonl", rows))
    prompts = environment.prompts("train") + environment.prompts("validation")
    assert len(prompts) == 10
    assert "other" not in {p.answer for p in prompts}


def test_keys_blank_lines_numbers_and_a_byte_order_mark_are_understood(tmp_path: Path) -> None:
    path = tmp_path / "odd.jsonl"
    lines = [
        "",
        json.dumps({"q": "one?", "a": 1}),
        "  ",
        json.dumps({"q": "two?", "a": 2.5}),
        '{"q": "ü?", "a": "3"}\r',
        "",
    ]
    path.write_text("\ufeff" + "\n".join(lines), encoding="utf-8")
    environment = build(path, DataConfig(train_size=9, validation_size=1), question_key="q", answer_key="a")
    prompts = environment.prompts("train") + environment.prompts("validation")
    assert {(p.messages[0].content, p.answer) for p in prompts} == {
        ("one?", "1"),
        ("two?", "2.5"),
        ("ü?", "3"),
    }
    assert {p.uid for p in prompts} == {"odd-2", "odd-4", "odd-5"}


def test_a_line_separator_inside_a_string_does_not_end_the_line(tmp_path: Path) -> None:
    rows = [json.dumps({"question": f"a\u2028b\x0b{i}", "answer": "x"}, ensure_ascii=False) for i in range(3)]
    environment = build(write(tmp_path / "s.jsonl", rows), DataConfig(train_size=9, validation_size=1))
    assert len(environment.prompts("train")) == 2


def test_a_surrogate_pair_and_an_escaped_backslash_are_text_like_any_other(tmp_path: Path) -> None:
    rows = ['{"question": "\\ud83d\\ude00", "answer": "a"}', '{"question": "\\\\ud800", "answer": "b"}']
    environment = build(write(tmp_path / "s.jsonl", rows), DataConfig(validation_size=1))
    prompts = environment.prompts("train") + environment.prompts("validation")
    assert {p.messages[0].content for p in prompts} == {"\U0001f600", "\\ud800"}


def test_all_rows_of_a_file_train_unless_train_size_says_fewer(tmp_path: Path) -> None:
    rows = [{"question": f"q{i}", "answer": "x"} for i in range(2400)]
    assert len(build(write(tmp_path / "many.jsonl", rows), DataConfig()).prompts("train")) == 2400 - 256


def test_a_number_of_a_saved_dataset_that_is_none_is_refused_by_row(tmp_path: Path) -> None:
    rows = [{"question": "x", "answer": 1.5}, {"question": "y", "answer": float("nan")}]
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(ConfigError, match=r"saved, row 1: key 'answer' is nan"):
        build(tmp_path / "saved", DataConfig(validation_size=1))


def test_a_home_directory_that_nobody_has_is_named() -> None:
    with pytest.raises(ConfigError, match=r"env.path=~nosuchuser/x.jsonl: no home directory is known"):
        build(Path("~nosuchuser/x.jsonl"))


def test_a_saved_hugging_face_dataset_is_read_like_a_file(tmp_path: Path) -> None:
    datasets.Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "saved"))
    environment = build(tmp_path / "saved")
    assert len(environment.prompts("train")) == 8
    assert rewards(environment, {r["question"]: r["answer"] for r in ROWS}) == [1.0] * 8


# Matching.


@pytest.mark.parametrize(
    ("match", "answer", "text", "reward"),
    [
        ("exact", "Paris", " Paris\n", 1.0),
        ("exact", "Paris", "Paris.", 0.0),
        ("exact", "Paris", "paris", 0.0),
        ("exact", "Paris", "", 0.0),
        ("contains", "Paris", "It is Paris.", 1.0),
        ("contains", " Paris ", "It is Paris.", 1.0),
        ("contains", "Paris", "It is Lyon.", 0.0),
        ("last_number", "1200", "3 x 400 = 1,200.0", 1.0),
        ("last_number", 72, "First 10, then 72.", 1.0),
        ("last_number", "so 5 + 3 = 8. #### 8", "8 apples", 1.0),
        ("last_number", "-4", "it is -4", 1.0),
        ("last_number", "4", "10-4", 1.0),
        ("last_number", "4", "it is -4", 0.0),
        ("last_number", "0.1", ".10", 1.0),
        ("last_number", "1e3", "1000", 1.0),
        ("last_number", "4", "no number", 0.0),
        ("last_number", "4", "4 or 5", 0.0),
        ("last_number", "5", "The answer is \u22125", 0.0),
        ("last_number", "-5", "The answer is \u22125", 1.0),
        ("last_number", "\u22125", "it is -5", 1.0),
        ("last_number", "-0.5", "so x = -.5", 1.0),
        ("last_number", "0.5", "so x = \u2212.5", 0.0),
    ],
)
def test_answers_match_by(tmp_path: Path, match: str, answer: Any, text: str, reward: float) -> None:
    assert score(one_question(tmp_path, answer, match), text) == reward


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1,2,3", "3"),
        ("1,234,567.8", "1234567.8"),
        ("v2 +7", "7"),
        ("x", None),
        ("12,34", "34"),
        ("12,3456", "3456"),
        ("1,234,5678", "5678"),
        ("(-.5)", "-0.5"),
        ("5-.5", "0.5"),
        ("10\u221220", "20"),
        ("1e\u22122", "0.01"),
        (".5e1", "5"),
        ("1,200.", "1200"),
    ],
)
def test_the_last_number_of_a_text(text: str, number: str | None) -> None:
    found = last_number(text)
    assert (found is None) if number is None else str(found) == number


# Faults.


@pytest.mark.parametrize(
    ("rows", "cfg", "message"),
    [
        ([], {}, r"env.path=.*f.jsonl: the file has no rows"),
        (["", "  "], {}, r"env.path=.*f.jsonl: the file has no rows"),
        ([*ROWS, "{oops"], {}, r"f.jsonl, line 11: not valid JSON .*write one JSON object per line"),
        ([*ROWS, "[" * 100_000], {}, r"f.jsonl, line 11: not valid JSON"),
        ([*ROWS, '{"question": "x", "answer": NaN}'], {}, r"line 11: not valid JSON \(NaN is no JSON number"),
        (['{"question": "x", "answer": -Infinity}', *ROWS], {}, r"line 1: not valid JSON \(-Infinity is"),
        ([*ROWS, '{"question": "x", "answer": 1e999}'], {}, r"line 11: .*1e999 is too large a number"),
        (
            [*ROWS, '{"question": "x", "answer": 1, "other": [{"a": -2E400}]}'],
            {},
            r"line 11: .*-2E400 is too",
        ),
        ([*ROWS, '{"question": "x", "answer": ' + "7" * 5000 + "}"], {}, r"line 11: .*has 5000 digits\)"),
        (
            [*ROWS, '{"question": "\\ud800", "answer": "y"}'],
            {},
            r"line 11: .*\\ud800 is half a surrogate pair",
        ),
        ([*ROWS, '{"question": "x", "answer": "y", "\\uDFFF": 1}'], {}, r"line 11: .*half a surrogate pair"),
        ([*ROWS, [1, 2]], {}, r"f.jsonl, line 11: expected a JSON object; got list"),
        (
            [*ROWS, {"question": "x"}],
            {},
            r"line 11: missing key 'answer' \(keys there: question\); set env.answer_key",
        ),
        ([{}], {}, r"line 1: missing key 'question' \(keys there: none\); set env.question_key"),
        (
            ROWS,
            {"question_key": "prompt"},
            r"line 1: missing key 'prompt' .*question, answer.*set env.question_key",
        ),
        (
            [*ROWS, {"question": "x", "answer": None}],
            {},
            r"line 11: key 'answer' is None; expected text or a number",
        ),
        ([*ROWS, {"question": "x", "answer": True}], {}, r"line 11: key 'answer' is True; expected text"),
        (
            [*ROWS, {"question": ["x"], "answer": "y"}],
            {},
            r"line 11: key 'question' is \['x'\]; expected text",
        ),
        ([*ROWS, {"question": " ", "answer": "y"}], {}, r"line 11: key 'question' is empty"),
        ([*ROWS, {"question": "x", "answer": ""}], {}, r"line 11: key 'answer' is empty"),
        (ROWS[:2], {}, r"has 2 distinct questions, and data.validation_size=2 leaves none"),
        ([ROWS[0]] * 9, {}, r"has 1 distinct questions, and data.validation_size=2"),
        (
            [*ROWS, {"question": "x", "answer": "none"}],
            {"match": "last_number"},
            r"line 11: key 'answer' holds no number",
        ),
    ],
)
def test_a_faulty_file_is_one_line_with_its_place(
    tmp_path: Path, rows: list[Any], cfg: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        build(write(tmp_path / "f.jsonl", rows), **cfg)
    assert "\n" not in str(error.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"env.path=.*nowhere.jsonl: cannot read it .*check the path"):
        build(tmp_path / "nowhere.jsonl")


def test_a_binary_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_bytes(b"\xff\xfe\x00\x01")
    said = r"b.jsonl, line 1: not UTF-8 text; write one JSON object per line, in UTF-8$"
    with pytest.raises(ConfigError, match=said):
        build(tmp_path / "b.jsonl")


def test_a_folder_that_holds_no_dataset_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"not a Hugging Face dataset made by save_to_disk") as error:
        build(tmp_path)
    assert "\n" not in str(error.value)


def test_of_a_saved_dataset_with_several_splits_train_is_taken_and_without_one_a_split_is_asked_for(
    tmp_path: Path,
) -> None:
    data = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": data, "test": data}).save_to_disk(str(tmp_path / "saved"))
    assert len(build(tmp_path / "saved").prompts("train")) == 8
    assert len(build(tmp_path / "saved" / "test").prompts("train")) == 8
    datasets.DatasetDict({"a": data, "b": data}).save_to_disk(str(tmp_path / "other"))
    with pytest.raises(ConfigError, match=r"has no split 'train' \(it has a, b\); add one to the path"):
        build(tmp_path / "other")


def test_a_fault_in_a_saved_dataset_names_the_row(tmp_path: Path) -> None:
    rows = [*ROWS[:3], {"question": "x", "answer": None}]
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(ConfigError, match=r"saved, row 3: key 'answer' is None"):
        build(tmp_path / "saved")
