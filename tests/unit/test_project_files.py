"""Workflows and Dockerfiles, which nothing else runs here: what they name is there, and they keep plain rules."""

import json
import re
import shlex
import tomllib
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from headrace.cli import app
from headrace.utils.shipped import shipped_recipes

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))


def steps(workflow: Path) -> list[dict[str, Any]]:
    jobs = yaml.safe_load(workflow.read_text())["jobs"].values()
    return [step for job in jobs for step in job["steps"]]


def words(script: str) -> list[list[str]]:
    """Return the commands of a shell script, each as its words."""
    joined = script.replace("\\\n", " ")
    parts = re.split(r"\n|&&|\|\|", joined)
    return [found for part in parts if (found := shlex.split(part, comments=True))]


def check_command(command: list[str], folder: Path) -> None:
    """Hold a command's targets, files, extras and recipes to what is there."""
    program = Path(command[0]).name
    if program == "make":
        assert set(command[1:]) <= TARGETS, command
    if program == "headrace":
        known: Any = get_command(app)
        for word in command[1:]:
            if hasattr(known, "commands"):
                assert word in known.commands, command
                known = known.commands[word]
        if command[1] in ("train", "config"):
            assert set(command) & set(shipped_recipes()), command
    for word, value in pairwise(command):
        if word in ("-c", "-r") and program in ("pip", "python"):
            assert (folder / value.replace("$GITHUB_WORKSPACE/", "")).is_file(), command
    for extras in re.findall(r"\[([a-z,]+)\]", " ".join(command)):
        assert set(extras.split(",")) <= PROJECT["optional-dependencies"].keys(), command


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_names_targets_files_and_commands_that_are_there(workflow: Path) -> None:
    whole = yaml.safe_load(workflow.read_text())
    assert whole["permissions"] == {"contents": "read"}
    assert True in whole, "`on` is read as a truth value"
    lowest, highest = re.findall(r"3\.\d+", PROJECT["requires-python"])
    for job in whole["jobs"].values():
        for version in job.get("strategy", {}).get("matrix", {}).get("python", []):
            assert lowest <= version < highest
    for step in steps(workflow):
        assert ("uses" in step) != ("run" in step)
        if "uses" in step:
            assert re.fullmatch(r"[\w-]+/[\w-]+@v\d+", step["uses"])
            if file := step.get("with", {}).get("cache-dependency-path"):
                assert (ROOT / file).is_file()
        for command in words(step.get("run", "")):
            check_command(command, ROOT)


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_a_dockerfile_keeps_plain_rules_and_names_what_is_there(dockerfile: Path) -> None:
    text = dockerfile.read_text()
    head = [line.removeprefix("# ") for line in text.splitlines() if line.startswith("# docker")]
    assert f"-f docker/{dockerfile.name}" in head[0]
    instructions = [
        line.split(None, 1)
        for line in re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ").splitlines()
        if line.strip()
    ]
    kinds = [kind for kind, _ in instructions]
    assert set(kinds) <= {"FROM", "RUN", "WORKDIR", "COPY", "ENV", "USER", "ENTRYPOINT", "CMD"}
    assert kinds[0] == "FROM"
    assert kinds.index("COPY") < kinds.index("USER") < kinds.index("ENTRYPOINT"), "it does not run as root"
    for kind, rest in instructions:
        if kind == "FROM":
            name, _, tag = rest.partition(":")
            assert re.search(r"\d", tag), f"{name} needs a version"
        if kind in ("ENTRYPOINT", "CMD"):
            assert isinstance(json.loads(rest), list)
        if kind == "RUN":
            commands = words(rest)
            for command in commands:
                check_command(command, ROOT)
                if command[:2] == ["apt-get", "install"]:
                    assert {"-y", "--no-install-recommends"} <= set(command)
                    assert ["rm", "-rf", "/var/lib/apt/lists/*"] in commands
                if command[:2] == ["pip", "install"]:
                    assert "--no-cache-dir" in command
    entry = [json.loads(rest)[0] for kind, rest in instructions if kind == "ENTRYPOINT"]
    assert entry == [*PROJECT["scripts"]]
    for line in head[1:]:
        _, _, arguments = line.partition(f"headrace:{dockerfile.stem} ")
        command = ["headrace", *shlex.split(arguments)]
        if "my.yaml" not in command:
            check_command(command, ROOT)


def test_hooks_before_a_commit_name_files_that_are_there() -> None:
    repos = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    words = [word for repo in repos for hook in repo["hooks"] for word in shlex.split(hook["entry"])]
    files = [word for word in words if word.startswith("tests/")]
    assert files
    assert all((ROOT / file).is_file() for file in files)


def test_what_a_wrong_target_or_extra_would_say() -> None:
    for command in (["make", "tests"], ["headrace", "trian"], ["headrace", "config", "valid", "demo_moe"]):
        with pytest.raises(AssertionError):
            check_command(command, ROOT)
    with pytest.raises(AssertionError):
        check_command(["pip", "install", ".[trian]"], ROOT)
    with pytest.raises(AssertionError):
        check_command(["pip", "install", "-c", "constrain.txt", "."], ROOT)
