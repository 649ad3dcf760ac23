"""`headrace init` makes a folder that trains at once, from the wheel alone."""

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from headrace.cli import app
from headrace.recipe_reference import recipe_schema
from headrace.utils.recipe import dump_recipe, load_recipe
from tiny_recipe import tiny_recipe
from wheel_session import InstalledWheel


def cli(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "120"})


def test_a_start_trains_at_once_from_the_wheel_and_its_reward_counts(
    installed_wheel: InstalledWheel, tmp_path: Path
) -> None:
    done = installed_wheel.headrace("init", "mine", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "next: cd mine && headrace train recipe.yaml"
    folder = tmp_path / "mine"
    assert {p.name for p in folder.iterdir()} == {
        "recipe.yaml",
        "reward.py",
        "problems.jsonl",
        "recipe.schema.json",
    }
    short = ("grpo.max_num_steps=2", "warm_start.steps=20", "logging.trackers=[]")
    done = installed_wheel.headrace("train", "recipe.yaml", *short, cwd=folder, timeout_s=280)
    assert (done.returncode, done.stderr) == (0, "")
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    (last,) = (line for line in lines if line["kind"] == "step" and line["step"] == 2)
    assert last["reward/letters"] == pytest.approx(last["reward/mean"])


@pytest.mark.slow
def test_the_start_learns_as_its_comment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli("init", "mine").exit_code == 0
    monkeypatch.chdir("mine")
    assert cli("train", "recipe.yaml", "logging.trackers=[]").exit_code == 0
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    rewards = [line["validation/sampled_reward"] for line in lines if line["kind"] == "validation"]
    assert rewards[0] < 0.6
    assert rewards[-1] > 0.8


def test_the_start_fits_the_schema_that_it_names(tmp_path: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="comes with headrace[ray]")
    assert cli("init", tmp_path / "mine").exit_code == 0
    text = (tmp_path / "mine" / "recipe.yaml").read_text()
    assert text.startswith("# yaml-language-server: $schema=recipe.schema.json\n")
    schema = json.loads((tmp_path / "mine" / "recipe.schema.json").read_text())
    assert schema == json.loads(json.dumps(recipe_schema()))
    jsonschema.validate(yaml.safe_load(text), schema)


def test_a_start_from_a_recipe_inherits_it_by_name_or_path(tmp_path: Path) -> None:
    assert cli("init", tmp_path / "a", "--from", "demo_moe").exit_code == 0
    assert load_recipe(tmp_path / "a" / "recipe.yaml").policy == load_recipe("demo_moe").policy
    assert cli("init", tmp_path / "b", "--from", tmp_path / "a" / "recipe.yaml").exit_code == 0
    assert load_recipe(tmp_path / "b" / "recipe.yaml").policy == load_recipe("demo_moe").policy


def test_a_start_from_a_recipe_of_mine_trains_with_its_data_and_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own $x"
    (own / "sets").mkdir(parents=True)
    for file, texts in (("q.jsonl", ("ab", "cd", "ef", "gh")), ("sets/v.jsonl", ("ij", "kl"))):
        rows = (json.dumps({"question": text, "answer": text}) for text in texts)
        (own / file).write_text("".join(f"{row}\n" for row in rows))
    (own / "rewards_of_mine.py").write_text("def one(prompt, completion, info):\n    return 1.0\n")
    values = yaml.safe_load(dump_recipe(tiny_recipe(Path("run"))))
    values["env"] = {"kind": "dataset", "path": "q.jsonl", "rewards": ["rewards_of_mine:one"]}
    del values["code_path"]
    values["data"] = {"validation": {"v": "sets/v.jsonl"}}
    (own / "mine.yaml").write_text(yaml.safe_dump(values))
    for here, source in ((own, "mine.yaml"), (tmp_path, own / "mine.yaml")):
        monkeypatch.chdir(here)
        made = cli("init", tmp_path / f"new {here.name}", "--from", source)
        assert made.exit_code == 0, made.output
        assert made.stdout.splitlines()[-1].startswith(f"next: cd '{tmp_path}/new {here.name}' && ")
        monkeypatch.chdir(tmp_path / f"new {here.name}")
        loaded = load_recipe("recipe.yaml")
        assert loaded.code_path == (str(Path.cwd()), str(own))
        assert loaded.data.validation["v"].path == str(own / "sets" / "v.jsonl")
        done = cli("train", "recipe.yaml", "grpo.max_num_steps=1", "grpo.num_prompts_per_step=4")
        assert done.exit_code == 0, done.output


def test_what_is_no_path_of_a_recipe_stays_and_a_set_keeps_the_form_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("train", "q.jsonl"):
        (tmp_path / name).touch()
    base = (
        "run_dir: r\npolicy: {model: {path: org/name}}\nenv: {kind: dataset}\ncode_path: [train, elsewhere]\n"
    )
    forms = {
        "q.jsonl": str(tmp_path / "q.jsonl"),
        "{path: q.jsonl, split: train}": {"path": str(tmp_path / "q.jsonl")},
    }
    for number, (form, expected) in enumerate(forms.items()):
        (tmp_path / "mine.yaml").write_text(f"{base}data: {{train: {form}}}\n")
        assert cli("init", f"new{number}", "--from", "mine.yaml").exit_code == 0
        text = (tmp_path / f"new{number}" / "recipe.yaml").read_text()
        made = yaml.safe_load(text)
        assert (made["data"]["train"], made["code_path"]) == (
            expected,
            [str(tmp_path / "train"), "elsewhere"],
        )
        assert "policy" not in made
        assert list(load_recipe(tmp_path / f"new{number}" / "recipe.yaml").data.train) == ["q"]


def test_a_wrong_use_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert cli("init", tmp_path / "mine").exit_code == 0
    (tmp_path / "broken.yaml").write_text("polcy: 1\n")
    wrong = {
        ("mine",): "mine: holds reward.py, recipe.yaml, ",
        ("file",): "file: cannot write there (File exists); give another name",
        ("new", "--from", "demo_moo"): "demo_moe ships with headrace: give this name alone",
        ("new", "--from", str(tmp_path / "broken.yaml")): "unknown key 'polcy'; did you mean 'policy'?",
    }
    for (name, *rest), expected in wrong.items():
        result = cli("init", tmp_path / name, *rest)
        assert (result.exit_code, result.stdout) == (2, "")
        assert expected in result.stderr
        assert result.stderr.count("\n") == 1
    assert not (tmp_path / "new").exists()
    assert cli("init").exit_code == 2
