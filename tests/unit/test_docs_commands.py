"""Each command of the documents is run, or read where docs_plan.py says why it cannot be run here."""

import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from docs_pages import PAGES, ROOT, Command, commands, named_commands
from docs_plan import BLOCKS, COMMANDS, By, Read, Run, decision_on, name_of, plan
from headrace.cli import app
from headrace.utils.recipe import dump_recipe, load_recipe
from headrace.utils.shipped import shipped_recipes
from tiny_recipe import tiny_recipe

NAME = {page: name_of(page) for page in PAGES}
ALL = [command for page in PAGES for command in commands(page)]
NAMED = [command for page in PAGES for command in named_commands(page)]
RUN = [command for command in ALL if isinstance(decision_on(command), Run)]
# Recipes that a reader writes; here they stand for a tiny one.
OWN_RECIPES = ("mine.yaml", "recipe.yaml", "RECIPE.yaml")
# Programs of others; what follows them is looked at only where it names files of the checkout.
OTHERS = ("cd", "python", "kubectl", "sbatch", "torchrun")


@pytest.mark.parametrize("page", PAGES, ids=NAME.get)
def test_it_is_decided_whether_a_block_is_run_and_by_what(page: Path) -> None:
    for what, decision in plan(page):
        match decision:
            case By(test):
                assert (ROOT / test).is_file(), what
                if test.endswith(".md"):
                    assert [d for _, d in plan(ROOT / test) if isinstance(d, Run)], what
                    assert what in [line for line, d in plan(ROOT / test) if isinstance(d, Run)]
            case Read(why):
                assert why
            case None:
                pytest.fail(f"{what!r} of {NAME[page]} is in no list: tests/docs_plan.py")


def test_the_list_names_no_command_or_block_that_has_gone() -> None:
    listed = {(page, start) for page, starts in COMMANDS.items() for start in starts}
    fitting = {
        (NAME[c.page], max((s for s in COMMANDS[NAME[c.page]] if c.line.startswith(s)), key=len)) for c in ALL
    }
    assert listed == fitting
    for (page, language), decisions in BLOCKS.items():
        found = [d for _, d in plan(ROOT / page)]
        assert all(d in found for d in decisions), (page, language)


def parse(words: tuple[str, ...]) -> None:
    """Read a command line as `headrace` does, without running it; a mistake is an error of typer's."""
    found: Any = typer.main.get_command(app)
    rest = [word for word in words[1:] if word != "--debug"]
    context = None
    while hasattr(found, "commands"):
        context = typer.Context(found, parent=context)
        found, rest = found.commands[rest[0]], rest[1:]
    found.make_context(words[1], list(rest), parent=context)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the recipes that a reader writes, and runs of two steps in runs/{mine,a,b}."""
    folder = tmp_path_factory.mktemp("reader")
    recipe = tiny_recipe(
        Path("runs/mine"),
        batching="packed",
        policy={"train_global_batch_size": 64},
        grpo={"num_prompts_per_step": 16, "max_num_steps": 2},
        checkpointing={"save_period": 1, "keep_top_k": None},
    )
    for name in OWN_RECIPES:
        (folder / name).write_text(dump_recipe(recipe))
    done = CliRunner().invoke(app, ["train", str(folder / "mine.yaml"), f"run_dir={folder}/runs/mine"])
    assert done.exit_code == 0, done.stderr
    for name in ("a", "b"):
        shutil.copytree(folder / "runs" / "mine", folder / "runs" / name)
    return folder


@pytest.mark.parametrize("command", [*ALL, *NAMED], ids=lambda c: f"{c.page.stem}: {c.line[:50]}")
def test_a_command_exists_with_its_options_and_keys(command: Command, written: Path) -> None:
    program, *words = command.words
    if program == "make":
        assert words[0] in re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    elif program == "pip":
        extras = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
        asked = re.findall(r"\[([\w,]+)\]", words[-1])
        assert {extra for part in asked for extra in part.split(",")} <= set(extras)
    elif program == "headrace":
        try:
            parse(command.words)
        except typer.BadParameter as error:  # prose may name a command without its arguments
            if command in ALL or type(error).__name__ != "MissingParameter":
                raise
        if words[0] == "train" and {*words[1:2]} & {*OWN_RECIPES, *shipped_recipes()}:
            recipe = written / words[1] if words[1] in OWN_RECIPES else words[1]
            load_recipe(recipe, [word for word in words[2:] if "=" in word])
    else:
        files = [word for word in words if re.match(r"(examples|tests|benchmarks|docs)/\S+\.\w+$", word)]
        assert all((ROOT / file).exists() for file in files)
        assert program in OTHERS, command.line


@pytest.fixture
def folder(written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the reader's folder, which is the working directory."""
    copy = shutil.copytree(written, tmp_path / "reader")
    monkeypatch.chdir(copy)
    return copy


def call(words: list[str], said: str) -> None:
    """Run a command line as its reader does; what it prints on stderr is no error."""
    program, *rest = words
    if program == "cd":
        os.chdir(rest[0])
    elif program == "headrace" and rest[0] == "dashboard":
        look_at_the_page(rest)
    elif program == "headrace":
        done = CliRunner().invoke(app, rest)
        assert done.exit_code == 0, (said, done.stdout[-2000:], done.stderr, done.exception)
        assert "error" not in done.stderr, said
    else:
        rest = [str(ROOT / word) if word.startswith("examples/") else word for word in rest]
        end = subprocess.run([sys.executable, *rest], capture_output=True, text=True, check=False)
        assert end.returncode == 0, (said, end.stderr)


def look_at_the_page(words: list[str]) -> None:
    """Start the live page, ask for it, and end it as Ctrl-C does."""
    command = [sys.executable, "-m", "headrace", *words]
    with subprocess.Popen(command, stdout=-1, stderr=-1, text=True) as process:
        assert process.stdout is not None
        address = process.stdout.readline().split(" at ")[1].strip()
        page = urllib.request.urlopen(f"{address}api/runs/0").read()
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=20)
    assert b"reward/mean" in page
    assert (process.returncode, told) == (0, "")


def told(page: Path, *, slow: bool) -> list[tuple[Command, Run]]:
    found = [(command, decision_on(command)) for command in commands(page)]
    return [(c, d) for c, d in found if isinstance(d, Run) and (slow or not d.slow)]


@pytest.mark.parametrize("page", sorted({c.page for c in RUN if told(c.page, slow=False)}), ids=NAME.get)
def test_commands_run_one_after_the_other(page: Path, folder: Path) -> None:
    for command, run in told(page, slow=False):
        call(run.words(command), command.line)


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", sorted({c.page for c, d in [(c, decision_on(c)) for c in RUN] if d.slow}), ids=NAME.get
)
def test_commands_that_take_longer_run_too(page: Path, folder: Path) -> None:
    for command, run in told(page, slow=True):
        call(run.words(command), command.line)
