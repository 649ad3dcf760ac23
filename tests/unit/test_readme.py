"""The README's example runs and prints what the README says."""

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def test_the_readme_example_prints_what_the_readme_says() -> None:
    text = README.read_text()
    match = re.search(r"```python\n(.*?)```\n\nIt prints\n\n```\n(.*?)```", text, re.DOTALL)
    assert match is not None
    code, printed = match.groups()
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == printed


def test_the_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= 150
