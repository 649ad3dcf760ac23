"""`headrace config` and `headrace recipes`; the generated references are those of the code."""

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from headrace.cli import app
from headrace.config_commands import complete_key, complete_recipe
from headrace.recipe_reference import keys_reference, metrics_reference, recipe_schema
from headrace.utils.recipe import load_recipe
from headrace.utils.shipped import shipped_recipes
from wheel_session import InstalledWheel

DOCS = Path(__file__).parents[2] / "docs"
MINE = """\
defaults: demo_moe
run_dir: mine
env: {kind: dataset, path: q.jsonl}
data: {train_size: 9}
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    (tmp_path / "mine.yaml").write_text(MINE)
    return tmp_path / "mine.yaml"


def cli(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "120"})


def test_every_recipe_in_the_wheel_is_listed_with_a_line_and_valid_by_its_name(
    installed_wheel: InstalledWheel, tmp_path: Path
) -> None:
    listed = installed_wheel.headrace("recipes", cwd=tmp_path).stdout.splitlines()
    assert [line.split()[0] for line in listed] == list(shipped_recipes())
    assert all(len(line.split()) > 5 for line in listed)
    code = (
        "from headrace.utils.recipe import load_recipe\nfrom headrace.utils.shipped import shipped_recipes\n"
        "import os\nfor name in shipped_recipes():\n"
        "    path = getattr(load_recipe(name).env, 'path', None)\n    assert path is None or os.path.isfile(path), path"
    )
    done = installed_wheel.python("-c", code, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_recipe_may_start_from_one_that_ships_and_a_file_of_the_same_name_wins(
    mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load_recipe(mine).policy == load_recipe("demo_moe").policy
    monkeypatch.chdir(mine.parent)
    (mine.parent / "demo_moe_r3").write_text(MINE)
    assert load_recipe("demo_moe_r3").run_dir == "mine"


def test_show_prints_a_recipe_that_reads_back_equal_and_says_where_each_value_comes_from(mine: Path) -> None:
    shown = cli("config", "show", mine, "algorithm=dapo", "seed=3", "env.match=contains").output
    values = yaml.safe_load(shown)
    assert values == yaml.safe_load(yaml.safe_dump(load_recipe_dump(mine)))
    origin = {line.partition(":")[0].strip(): line.rpartition("  # ")[2] for line in shown.splitlines()}
    assert origin["seed"] == origin["match"] == "override"
    assert origin["train_size"] == "mine.yaml"
    assert origin["characters"] == "demo_moe.yaml"
    assert origin["overlong_penalty"] == "algorithm=dapo"
    assert origin["resume"] == "default"
    assert "task" not in origin  # of the other kind of environment


def load_recipe_dump(path: Path) -> object:
    return load_recipe(path, ["algorithm=dapo", "seed=3", "env.match=contains"]).model_dump(mode="json")


ODD = {
    "x: y": 2,
    "a.b": {"c.d": 1, "#e": [1, "a # b"]},
    "1": 4,
    "yes": 5,
    "t": "x\ny\n",
    "u": ["p\nq"],
    "...": "...",
}


def test_show_prints_a_recipe_whatever_free_settings_are_called(mine: Path) -> None:
    env = {"kind": "reasoning_gym", "task": "spell_backward", "config": ODD, "prompt_from": "metadata.word"}
    values = {"defaults": "demo_moe", "run_dir": "r", "env": env}
    mine.write_text(yaml.safe_dump(values))
    for options in ((), ("--changed",)):
        mine.with_name("shown.yaml").write_text(cli("config", "show", mine, *options).output)
        assert load_recipe(mine.with_name("shown.yaml")).env == load_recipe(mine).env


@pytest.mark.parametrize("algorithm", [(), ("algorithm=dapo",)])
def test_show_says_of_a_computed_default_that_it_is_one_and_of_a_short_form_where_it_stands(
    mine: Path, algorithm: tuple[str, ...]
) -> None:
    mine.write_text(
        f"{MINE.replace(', path: q.jsonl', '')}  train: q.jsonl\n".replace(
            "data: {train_size: 9}\n", "data:\n"
        )
    )
    shown = cli("config", "show", mine, *algorithm).output
    assert f"code_path: [{mine.parent}]  # default\n" in shown
    assert "      path: q.jsonl  # mine.yaml\n" in shown


def test_show_changed_leaves_the_defaults_out(mine: Path) -> None:
    shown = cli("config", "show", mine, "--changed").output
    assert "# default" not in shown
    assert "resume" not in yaml.safe_load(shown)
    mine.write_text(shown)
    assert load_recipe(mine).data.train_size == 9


def test_validate_says_what_has_no_effect(mine: Path) -> None:
    result = cli("config", "validate", mine, "policy.dynamic_batching.train_mb_tokens=99")
    assert result.exit_code == 0
    assert result.output.splitlines() == [
        "no effect: policy.dynamic_batching.train_mb_tokens=99 (needs policy.dynamic_batching.enabled=true)",
        f"{mine}: valid",
    ]


def test_diff_prints_the_keys_that_differ(mine: Path) -> None:
    lines = cli("config", "diff", "demo_moe", mine).output.splitlines()
    assert "data.train_size: 8192 -> 9" in lines
    assert "env.kind: reasoning_gym -> dataset" in lines
    assert not any(line.startswith("policy") for line in lines)
    assert cli("config", "diff", mine, mine).output == "no difference\n"


def test_the_schema_knows_every_key_with_its_meaning_and_allows_what_recipes_allow() -> None:
    schema = json.loads(cli("config", "schema").output)
    assert schema == json.loads(json.dumps(recipe_schema()))
    optimizer = schema["$defs"]["OptimizerConfig"]
    assert optimizer["properties"]["lr"]["description"]
    assert optimizer["additionalProperties"] is False
    assert "defaults" in schema["properties"]
    assert all("required" not in part for part in schema["$defs"].values())


@pytest.mark.parametrize("name", shipped_recipes())
def test_a_shipped_recipe_fits_the_schema(name: str) -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="comes with headrace[ray]")
    from headrace.utils.shipped import FOLDER

    values = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    jsonschema.validate(values, recipe_schema())
    with pytest.raises(jsonschema.ValidationError, match="polcy"):
        jsonschema.validate({**values, "polcy": {}}, recipe_schema())


@pytest.mark.parametrize(
    ("file", "made", "command"),
    [
        ("reference_keys.md", keys_reference, "headrace config keys"),
        ("reference_metrics.md", metrics_reference, "headrace config metrics"),
    ],
)
def test_the_references_are_current(file: str, made: object, command: str) -> None:
    assert callable(made)
    assert (DOCS / file).read_text() == made(), f"run: {command} > docs/{file}"


def test_shells_complete_recipes_keys_and_files(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(mine.parent)
    (mine.parent / "more").mkdir()
    assert complete_recipe("demo") == ["demo_moe", "demo_moe_r3"]
    assert complete_recipe("m") == ["mine.yaml", "more/"]
    assert complete_key("policy.optimizer.l") == ["policy.optimizer.lr="]
    words = {"COMP_WORDS": "headrace train demo_moe logging.prog", "COMP_CWORD": "3"}
    result = CliRunner().invoke(
        app, [], env={**words, "_HEADRACE_COMPLETE": "complete_bash"}, prog_name="headrace"
    )
    assert result.output.split() == ["logging.progress="]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ("validate", "demo_moo"),
            "demo_moo: cannot read the recipe (No such file or directory); demo_moe ships",
        ),
        (("validate", "configs/demo_moe.yaml"), "demo_moe ships with headrace: give this name alone"),
        (("show", "demo_moe", "polcy.workers=2"), "unknown key 'polcy'; did you mean 'policy'?"),
        (("diff", "demo_moe", "nowhere"), "nowhere: cannot read the recipe"),
        (
            ("validate", "demo_moe", "policy.workers=3"),
            "train_global_batch_size=256 is not divisible by workers=3",
        ),
        (("sho", "demo_moe"), "no such command 'sho'. Did you mean 'show'?"),
        (("diff", "demo_moe"), "missing argument 'OTHER'; see headrace config diff --help"),
    ],
)
def test_a_wrong_use_is_one_line(arguments: tuple[str, ...], expected: str) -> None:
    result = cli("config", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert expected in result.stderr
    assert result.stderr.count("\n") == 1
