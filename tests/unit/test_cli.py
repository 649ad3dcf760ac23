"""The command line: help, plans, and one line with the right exit code for everything that goes wrong."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_report import write_run
from typer.testing import CliRunner, Result

import headrace
from full_disk import files_of_at_most
from headrace.cli import app
from headrace.errors import ConfigError
from headrace.length_spec import parse_lengths

RECIPE = """\
run_dir: RUN_DIR
policy:
  model: {config: {model_type: qwen3_moe}}
  train_global_batch_size: 16
  train_micro_batch_size: 4
grpo: {num_prompts_per_step: 4, num_generations_per_prompt: 4}
env: {kind: reasoning_gym, task: spell_backward}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.replace("RUN_DIR", str(tmp_path / "run")))
    return path


def headrace_cli(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "120"})


def process(
    *arguments: str | Path, code: str = "from headrace.cli import main; main()"
) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("command", [(), ("train",), ("eval",), ("doctor",), ("plan",), ("report",)])
def test_every_command_has_help_with_an_example(command: tuple[str, ...]) -> None:
    result = headrace_cli(*command, "--help")
    assert result.exit_code == 0
    assert "Example" in result.output
    assert " ".join(("  headrace", *command)) in result.output


def test_without_a_command_the_help_is_shown() -> None:
    assert "Commands" in headrace_cli().output


def test_a_terminal_that_does_not_know_its_width_gets_the_usual_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "0")
    assert "Commands" in process("--help")[1]


@pytest.mark.parametrize("group", ["config", "data", "store"])
def test_a_group_without_its_command_shows_its_help_and_says_what_is_missing(group: str) -> None:
    result = headrace_cli(group)
    assert (result.exit_code, result.stderr) == (
        2,
        f"headrace: error: missing command; see headrace {group} --help\n",
    )
    assert "Commands" in result.stdout


def test_the_version_is_shown() -> None:
    assert headrace_cli("--version").output == f"headrace {headrace.__version__}\n"


def test_help_and_plan_load_neither_torch_nor_transformers() -> None:
    code = (
        "import sys\nfrom headrace.cli import app\nfrom typer.testing import CliRunner\n"
        "for words in (['--help'], ['plan', '5,6,7']):\n"
        "    assert CliRunner().invoke(app, words).exit_code == 0\n"
        "print(sorted({'torch', 'transformers', 'matplotlib', 'tensorboard'} & set(sys.modules)))"
    )
    assert process(code=code) == (0, "[]\n", "")


def test_the_module_and_the_script_run_alike() -> None:
    as_module = subprocess.run(
        [sys.executable, "-m", "headrace.cli", "--version"], capture_output=True, text=True, check=True
    )
    assert as_module.stdout == process("--version")[1]


WRONG = {
    "a mistyped key": (("polcy.workers=2",), "unknown key 'polcy'; did you mean 'policy'?"),
    "a wrong type": (("policy.workers=two",), "policy.workers='two': expected a valid integer"),
    "no equals sign": (("overwrite",), "override 'overwrite': expected key=value"),
    "a contradiction": (("policy.workers=3",), "train_global_batch_size=16 is not divisible by workers=3"),
    "an unwritable run_dir": (("run_dir=/proc/x",), "run_dir=/proc/x: cannot write there"),
    "a run_dir below a file": (("run_dir=FILE/x",), "cannot write there (Not a directory)"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_is_one_line_and_exit_code_2(recipe: Path, name: str) -> None:
    overrides, expected = WRONG[name]
    result = headrace_cli("train", recipe, *(o.replace("FILE", str(recipe)) for o in overrides))
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("headrace: error: ")
    assert expected in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("train", "nowhere.yaml"), "nowhere.yaml: cannot read the recipe (No such file or directory)"),
        (("eval", "nowhere"), "nowhere: cannot read the recipe"),
        (("report", "nowhere"), "nowhere/metrics.jsonl: cannot read it"),
        (("plan", "5,x"), "LENGTHS '5,x': 'x' is not a whole number"),
        (("plan", "5," * 200 + "x"), "...': 'x' is not a whole number"),
        (("plan", "mine.yaml"), "of a recipe: headrace plan --memory RECIPE"),
        (("plan", "5," + "9" * 5000), "is not a whole number"),
        (("plan", "9,5", "--budget", "8"), "row 0 has 9 tokens"),
        (("plan", "5", "--algorithm", "best"), "best"),
        (("plan", "5", "--ranks", "0"), "--ranks': 0 is not a whole number from 1 to 1,000,000"),
        (("plan", "10,20,-3"), "LENGTHS '10,20,-3' has a row of -3 tokens; expected 1 or more"),
        (("plan", "5", "--algorithm", "first_fit_shuffle"), "expected one of first_fit_decreasing, "),
        (("trace-check", "nope"), "nope: no run there"),
    ],
)
def test_other_commands_fail_alike(arguments: tuple[str, ...], expected: str) -> None:
    result = headrace_cli(*arguments)
    assert result.exit_code == 2
    assert expected in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_run_directory_of_another_run_is_refused_with_the_remedy(recipe: Path, tmp_path: Path) -> None:
    write_run(tmp_path / "run", 3)
    result = headrace_cli("train", recipe)
    assert result.exit_code == 2
    assert "overwrite=true" in result.stderr


@pytest.mark.parametrize("place", [0, 1, 2])
def test_debug_shows_the_traceback_wherever_it_stands(recipe: Path, place: int) -> None:
    words = ["train", str(recipe), "polcy.workers=2"]
    words.insert(place, "--debug")
    code, _, err = process(*words)
    assert code == 1
    assert "Traceback" in err
    assert err.rstrip().splitlines()[-1].startswith("headrace.errors.ConfigError: ")


def test_an_error_of_another_kind_exits_with_1_and_a_line() -> None:
    code = (
        "from headrace import cli\nfrom headrace.errors import CapacityExceeded\n"
        "@cli.app.command()\ndef full(): raise CapacityExceeded('the store is full;\\nraise it')\n"
        "cli.main()"
    )
    assert process("full", code=code) == (1, "", "headrace: error: the store is full; raise it\n")


def test_an_unexpected_error_is_one_line_that_points_to_debug() -> None:
    code = "from headrace import cli\n@cli.app.command()\ndef broken(): raise KeyError('a\\nb')\ncli.main()"
    expected = "headrace: unexpected KeyError: 'a\\nb'; add --debug to see where\n"
    assert process("broken", code=code) == (1, "", expected)
    assert "Traceback" in process("broken", "--debug", code=code)[2]


def test_ctrl_c_outside_a_loop_is_one_line_and_130() -> None:
    code = (
        "import os, signal, time\nfrom headrace import cli\n"
        # Whoever started the tests may have ignored it.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "@cli.app.command()\ndef slow():\n    os.kill(os.getpid(), signal.SIGINT)\n    time.sleep(5)\n"
        "cli.main()"
    )
    assert process("slow", code=code) == (130, "", "headrace: interrupted\n")


def test_ctrl_c_while_modules_load_is_one_line_and_130() -> None:
    code = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "def interrupt(event, about):\n"
        "    if event == 'import' and about[0] == 'typer': os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.addaudithook(interrupt)\n"
        "from headrace.__main__ import main\n"
        "main()"
    )
    assert process("--version", code=code) == (130, "", "headrace: interrupted\n")


@pytest.mark.parametrize("debug", [(), ("--debug",)], ids=str)
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("trian", "x"), "no such command 'trian'. Did you mean 'train'? See headrace --help"),
        (("help", "nope"), "no such command 'nope'; see headrace --help"),
        (("train",), "missing argument 'CONFIG'; see headrace train --help"),
        (("plan", "--nope"), "no such option: --nope; see headrace plan --help"),
        (
            ("plan", "5,3", "--gpu-gib", "8"),
            "--gpu-gib has no effect without --memory; see headrace plan --help",
        ),
        (
            ("plan", "--memory", "x", "--budget", "8"),
            "--budget has no effect with --memory; see headrace plan --help",
        ),
        (("plan", "1", "2"), "got unexpected extra argument(s) (2); see headrace plan --help"),
        (("--nope",), "no such option: --nope; see headrace --help"),
    ],
)
def test_a_command_line_that_cannot_be_read_is_one_line_too(
    arguments: tuple[str, ...], expected: str, debug: tuple[str, ...]
) -> None:
    result = headrace_cli(*debug, *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"headrace: error: {expected}\n"


def test_help_is_a_command_too() -> None:
    assert headrace_cli("help").stdout == headrace_cli("--help").stdout
    assert headrace_cli("help", "plan").stdout == headrace_cli("plan", "--help").stdout != ""


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "headrace", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"headrace {headrace.__version__}\n"


def test_a_plan_is_explained() -> None:
    result = headrace_cli("plan", "5,3,4,4", "--budget", "8", "--ranks", "2")
    assert result.exit_code == 0
    assert "4 rows, 16 tokens, 2 ranks" in result.output


@pytest.mark.parametrize("algorithm", ["concatenative", "first_fit_decreasing", "dynamic"])
def test_every_way_to_cut_can_be_explained(algorithm: str) -> None:
    result = headrace_cli("plan", "uniform:40:1:64", "--budget", "128", "--algorithm", algorithm)
    assert result.exit_code == 0
    assert "40 rows" in result.output


def test_a_plan_rounds_rows_up() -> None:
    assert headrace_cli("plan", "5", "--budget", "8", "--pad-multiple", "8").exit_code == 0
    assert "8 after rounding" in headrace_cli("plan", "5", "--budget", "7", "--pad-multiple", "8").stderr


def test_lengths_come_from_a_list_a_file_or_a_distribution(tmp_path: Path) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text("5 6\n7,8\n\n9,\n")
    assert parse_lengths("5, 6,7") == [5, 6, 7]
    assert parse_lengths(str(file)) == [5, 6, 7, 8, 9]
    drawn = parse_lengths("lognormal:2001:200:1500", seed=1)
    assert len(drawn) == 2001
    assert 1 <= min(drawn) <= max(drawn) <= 1500
    assert 180 < sorted(drawn)[1000] < 220
    assert drawn == parse_lengths("lognormal:2001:200:1500", seed=1)
    assert drawn != parse_lengths("lognormal:2001:200:1500", seed=2)
    assert set(parse_lengths("uniform:500:3:5")) == {3, 4, 5}


@pytest.mark.parametrize(
    "text",
    ["", "5,-1", "0", "1.5", "lognormal:5:9", "uniform:5:9:3", "lognormal:0:1:2", "uniform:5:x:9", "."],
)
def test_lengths_of_another_form_are_refused_with_the_forms(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^LENGTHS '.*expected|^LENGTHS '0' has a row of 0 tokens"):
        parse_lengths(text)


def test_a_report_that_cannot_be_written_prints_its_tables_and_says_so_in_a_line(tmp_path: Path) -> None:
    write_run(tmp_path, 12)
    with files_of_at_most(0):
        result = headrace_cli("report", tmp_path)
    assert result.exit_code == 1
    assert "rollout" in result.stdout
    assert result.stderr.startswith(
        f"headrace: error: {tmp_path}/timings.txt: cannot write it (File too large); make room"
    )
    assert result.stderr.count("\n") == 1


DAMAGED = {
    "no JSON": ("oops", "not valid JSON"),
    "no number": (
        '{"kind": "step", "step": 2, "reward/mean": "high"}',
        "reward/mean is 'high', not a number",
    ),
    "NaN": ('{"kind": "step", "step": 2, "reward/mean": NaN}', "NaN is no JSON number"),
    "no step": ('{"kind": "step"}', "has no step"),
    "no object": ("3", "expected a JSON object; got int"),
    "no UTF-8": ("\udcff", "not UTF-8 text"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_line_of_the_metrics_is_named(tmp_path: Path, name: str) -> None:
    write_run(tmp_path, 3)
    line, fault = DAMAGED[name]
    log = tmp_path / "metrics.jsonl"
    content = log.read_bytes().split(b"\n")
    content.insert(1, line.encode(errors="surrogateescape"))
    log.write_bytes(b"\n".join(content))
    result = headrace_cli("report", tmp_path)
    assert result.exit_code == 2
    assert f"{log}, line 2: " in result.stderr
    assert fault in result.stderr
    assert "mend or remove the line" in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_run_whose_recipe_is_damaged_is_named_with_the_line(tmp_path: Path) -> None:
    write_run(tmp_path, 3)
    (tmp_path / "config.yaml").write_text("seed: 0\npolicy: [1\n")
    result = headrace_cli("eval", tmp_path)
    assert result.exit_code == 2
    assert f"{tmp_path}/config.yaml: not valid YAML: line 3, column 1" in result.stderr


def test_a_report_prints_the_tables_and_names_the_plots(tmp_path: Path) -> None:
    write_run(tmp_path, 12)
    result = headrace_cli("report", tmp_path)
    assert result.exit_code == 0
    assert re.search(r"rollout +3\.60 s +300\.0 ms +12", result.output)
    assert f"plots: {tmp_path / 'report.png'}, {tmp_path / 'reward.png'}" in result.output
    assert (tmp_path / "timings.txt").read_text().split()[0] == "stage"


def test_the_doctor_exits_with_0() -> None:
    result = headrace_cli("doctor")
    assert result.exit_code == 0
    assert "packed attention" in result.output
