"""Files of prompts as programs and people write them: what is read, and what a line says of what cannot be."""

import csv
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.config import DataConfig, DatasetConfig, TrainSourceConfig
from headrace.environments.build import build_environment
from headrace.errors import ConfigError
from headrace.experience.types import Prompt

ROWS = "".join(f"{n}+1=,{n + 1}\n" for n in range(4))
CSV = f"prompt,answer\n{ROWS}"


def prompts_of(path: str, **keys: Any) -> list[Prompt]:
    data = DataConfig.model_validate({"validation_size": 1, "train": {"sums": {"path": path, **keys}}})
    environment = build_environment(DatasetConfig(), data, seed=0)
    found = [prompt for split in ("train", "validation") for prompt in environment.prompts(split)]
    return sorted(found, key=lambda prompt: prompt.uid)


def line_about(path: Path, **keys: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        prompts_of(str(path), **keys)
    return str(caught.value).replace(f"{path}", path.name)


@pytest.mark.parametrize(
    "data",
    [
        CSV.replace("\n", "\r\n").encode(),
        CSV.replace("\n", "\r").encode(),
        CSV.encode("utf-8-sig"),
        f"\n\n{CSV}".encode(),
        CSV.replace("\n", "\n\n").encode(),
        CSV.replace("\n", ",,\n").encode(),
    ],
    ids=["CRLF", "CR", "BOM", "empty lines before the header", "empty lines", "empty columns at the end"],
)
def test_a_csv_file_of_another_program_has_the_same_prompts(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "sums.csv"
    path.write_bytes(data)
    asked = [prompt.messages[-1].content for prompt in prompts_of(str(path))]
    assert asked == [f"{n}+1=" for n in range(4)]


def test_a_cell_may_be_as_long_as_a_prompt(tmp_path: Path) -> None:
    path, long = tmp_path / "sums.csv", "1" * 200_000
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([("prompt", "answer"), (f"{long},", 1), ("2", 2)])
    assert len(prompts_of(str(path))[0].messages[-1].content) == 200_001


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (
            CSV.replace("answer", "answer,answer").replace("=,", "=,0,").encode(),
            "data.train.sums.path=sums.csv, line 1: two columns are called 'answer'; rename one of them",
        ),
        (
            CSV.replace("2+1", '"2+1').encode(),
            "line 4: not valid CSV (unexpected end of data); mend the row that begins there",
        ),
        (CSV.replace("2+1", '"2"+1').encode(), "line 4: not valid CSV"),
        (CSV.replace("2+1", "2±1").encode("latin-1"), "line 4: not UTF-8 text; save the file as UTF-8"),
        (CSV.encode("utf-16"), "line 1: not UTF-8 text; save the file as UTF-8"),
    ],
    ids=["a column twice", "an open quote", "text behind a quote", "Latin-1", "UTF-16"],
)
def test_a_csv_file_that_cannot_be_read_is_told_with_the_line(tmp_path: Path, data: bytes, line: str) -> None:
    path = tmp_path / "sums.csv"
    path.write_bytes(data)
    assert line in line_about(path)


@pytest.mark.parametrize("text", ["", "[", "{}", '[{"prompt": NaN}]'])
def test_a_json_file_that_cannot_be_read_is_told_by_its_key(tmp_path: Path, text: str) -> None:
    path = tmp_path / "sums.json"
    path.write_text(text)
    assert line_about(path).startswith("data.train.sums.path=sums.json")


@pytest.mark.parametrize(
    ("kind", "said"), [("numpy.int64", "3"), ("numpy.float32", "3.0"), ("decimal.Decimal", "3")]
)
def test_a_number_of_any_kind_is_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, said: str
) -> None:
    library, module = kind.partition(".")[0], f"rows_of_{kind.replace('.', '_')}"
    (tmp_path / f"{module}.py").write_text(
        f"import {library}\ndef rows(): return [{{'prompt': str(n), 'answer': {kind}(3)}} for n in range(2)]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert [prompt.answer for prompt in prompts_of(f"{module}:rows")] == [said, said]


def test_a_decimal_of_parquet_is_an_answer(tmp_path: Path) -> None:
    table = pa.table({"prompt": ["1", "2"], "answer": [Decimal("1.50"), Decimal("2.00")]})
    pq.write_table(table, tmp_path / "sums.parquet")
    assert [prompt.answer for prompt in prompts_of(str(tmp_path / "sums.parquet"))] == ["1.50", "2.00"]


def test_a_saved_dataset_whose_facts_are_damaged_is_told_by_its_key(tmp_path: Path) -> None:
    folder = tmp_path / "sums"
    datasets.Dataset.from_list([{"prompt": "1", "answer": "1"}]).save_to_disk(str(folder))
    (folder / "dataset_info.json").write_text("[]")
    assert line_about(folder).startswith("data.train.sums.path=sums: not a Hugging Face dataset")


def test_the_keys_of_a_set_without_a_name_can_be_set_under_the_name_that_messages_have() -> None:
    short = {"path": "sums.csv", "columns": {"prompt": "task", "answer": "sum"}}
    own = {"sums": {"columns": {"answer": "total"}, "size": 3}}
    merged = DataConfig.model_validate({"train": {**short, **own}}).train
    columns = {"prompt": "task", "answer": "total"}
    assert merged == {"sums": TrainSourceConfig(path="sums.csv", columns=columns, size=3)}


def test_a_file_that_is_not_there_is_told_with_the_folder_from_which_its_path_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "sums.csv").write_text(CSV)
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert f"which counts from the working directory {tmp_path}/elsewhere" in line_about(Path("sums.csv"))
    assert line_about(tmp_path / "nope.csv").endswith("check the path")


def test_a_split_of_a_file_is_told_to_have_no_effect(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "sums.csv").write_text(CSV)
    assert len(prompts_of(f"{tmp_path}/sums.csv", split="test", revision="v2")) == 4
    assert caplog.messages == [
        "no effect: data.train.sums.split=test (a file has none)",
        "no effect: data.train.sums.revision=v2 (a file has none)",
    ]
