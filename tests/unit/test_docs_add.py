"""The pages on how to add something: the diff applies to this source, and the example prints what the page says."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("add_a_*.md"))


def block(page: Path, language: str) -> str:
    """Return the one fenced block of a language."""
    (text,) = re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)
    return str(text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_diff_applies_and_the_example_prints_what_the_page_says(page: Path, tmp_path: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__")
    for folder in ("src", "tests/contract"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    apply = ["git", "apply", "-"]
    subprocess.run(apply, input=block(page, "diff"), text=True, check=True, cwd=tmp_path)
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "src")}
    example = [sys.executable, "-c", block(page, "python")]
    done = subprocess.run(example, capture_output=True, text=True, check=False, cwd=tmp_path, env=env)
    assert done.stdout == block(page, "text"), done.stderr


def test_there_is_a_page_for_a_column_a_store_a_loss_and_a_generator() -> None:
    assert [page.stem for page in PAGES] == ["add_a_column", "add_a_generator", "add_a_loss", "add_a_store"]
