"""The documents lead where they say and name what exists; their snippets run. Commands: test_docs_commands.py."""

import ast
import contextlib
import dataclasses
import io
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from docs_pages import DOCS, PAGES, ROOT, Block, blocks, headings, links, prose
from docs_plan import BLOCKS, name_of
from headrace.config import RecipeConfig
from headrace.metric_names import METRICS, meaning_of
from headrace.utils.recipe import load_recipe
from tiny_models import tiny_model

NAME = {page: name_of(page) for page in PAGES}
MKDOCS: dict[str, Any] = yaml.load((ROOT / "mkdocs.yml").read_text(), yaml.BaseLoader)


# Links and names.


def nav_files(entry: Any) -> list[str]:
    """Return the files of a part of the site's navigation."""
    if isinstance(entry, str):
        return [entry]
    return [
        file for item in (entry.values() if isinstance(entry, dict) else entry) for file in nav_files(item)
    ]


def test_every_page_is_in_the_navigation_once_and_every_entry_is_a_page() -> None:
    pages = {page.relative_to(DOCS).as_posix() for page in PAGES if page.is_relative_to(DOCS)}
    listed = nav_files(MKDOCS["nav"])
    assert len(listed) == len(set(listed))
    assert pages - set(listed) == set()
    assert set(listed) - pages == set()


@pytest.mark.parametrize("page", PAGES, ids=NAME.get)
def test_links_lead_to_files_and_headings_that_exist(page: Path) -> None:
    for target in links(page):
        file, _, anchor = target.partition("#")
        place = page if not file else (page.parent / file).resolve()
        assert place.exists(), target
        assert not anchor or anchor in headings(place), target


REFERENCE = (DOCS / "reference_keys.md").read_text()
KEYS = {
    *re.findall(r"^\| `([^`]+)` \|", REFERENCE, re.MULTILINE),
    *re.findall(r"^## `([^`]+)`", REFERENCE, re.MULTILINE),
}
KEY = re.compile(rf"`((?:{'|'.join(RecipeConfig.model_fields)})(?:\.[a-z_]+)+)(?:=[^`]*)?`")
GROUPS = sorted({name.partition("/")[0] for name in METRICS if "/" in name})
METRIC = re.compile(rf"`((?:{'|'.join(GROUPS)})/[\w@./*]*[\w*])`")


def is_key(name: str) -> bool:
    """Return whether a recipe has a key or section; a module of the package may begin with the same word."""
    module = ROOT / "src" / "headrace" / name.replace(".", "/")
    return name in KEYS or module.with_suffix(".py").exists() or module.parent.with_suffix(".py").exists()


def is_metric(name: str) -> bool:
    stem = name.removesuffix("*")
    return (
        meaning_of(name) != name or name.endswith(".py") or any(known.startswith(stem) for known in METRICS)
    )


@pytest.mark.parametrize("page", PAGES, ids=NAME.get)
def test_recipe_keys_and_metrics_that_a_page_names_exist(page: Path) -> None:
    text = prose(page)
    if page.name in ("moving.md", "nemo_rl.md"):  # whose first column has names of other trainers
        text = re.sub(r"^\|[^|]*\|", "|", text, flags=re.MULTILINE)
    assert {key for key in KEY.findall(text) if not is_key(key)} == set()
    assert {name for name in METRIC.findall(text) if not is_metric(name)} == set()


# Snippets.


SNIPPETS = [page for page in PAGES if (NAME[page], "python") not in BLOCKS and page.name != "nemo_rl.md"]


@pytest.mark.parametrize(
    "page", [p for p in SNIPPETS if any(b.language == "python" for b in blocks(p))], ids=NAME.get
)
def test_python_of_a_page_runs_from_top_to_bottom_and_prints_what_the_page_says(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if page.name == "operations.md":
        pytest.importorskip("opentelemetry.sdk.trace", reason="needs headrace[opentelemetry]")
    torch.manual_seed(0)
    names: dict[str, Any] = {"model": tiny_model("qwen3_moe"), "ids": torch.arange(6)[None]}
    python, *rest = (b for b in blocks(page) if b.language in ("python", "text"))
    for block, following in zip([python, *rest], [*rest, None]):
        if block.language == "python":
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(ast.parse(block.text), NAME[page], "exec"), names)
            said = following.text if following is not None and following.language == "text" else ""
            assert printed.getvalue() == said


def test_a_script_written_against_nemo_rl_puts_its_rows_with_one_line_more() -> None:
    (block,) = (b for b in blocks(DOCS / "nemo_rl.md") if b.language == "python")
    given = (
        "import torch\nids, mask = torch.ones(2, 3, dtype=torch.long), torch.ones(2, 3, dtype=torch.uint8)\n"
    )
    code = f"{given}{block.text}\nprint(meta.sample_ids)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "['a_g0', 'a_g1']\n", done.stderr


YAML = [
    b for page in PAGES if (NAME[page], "yaml") not in BLOCKS for b in blocks(page) if b.language == "yaml"
]


@pytest.mark.parametrize("block", YAML, ids=lambda b: f"{b.page.stem}: {b.text[:30].strip()!r}")
def test_yaml_of_a_page_is_a_part_of_a_recipe(block: Block, tmp_path: Path) -> None:
    values = yaml.safe_load(block.text)
    if isinstance(values, list):  # a rule of Prometheus
        assert "alert" in values[0]
        return
    base = {"run_dir": "r", "env": {"kind": "dataset", "path": "d"}, "generation": {"max_new_tokens": 8}}
    policy = {"model": {"path": "m"}, "max_total_sequence_length": 1024, "train_global_batch_size": 256}
    grpo = {"num_prompts_per_step": 32, "num_generations_per_prompt": 8}
    whole = {**base, "policy": policy, "grpo": grpo, **values}
    whole["policy"] = {**policy, **values.get("policy", {})}
    if whole["policy"].get("router_replay"):
        whole["generation"] = {"max_new_tokens": 8}
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(whole))
    load_recipe(tmp_path / "r.yaml")


# Tables of equivalents.


def test_arguments_of_trl_that_the_page_names_are_its_own() -> None:
    trl = pytest.importorskip("trl")
    known = {f.name for f in dataclasses.fields(trl.GRPOConfig)} | {"reward_funcs", "train_dataset"}
    table = (DOCS / "moving.md").read_text().split("Arguments of `GRPOConfig`.")[1].split("| TRL metric |")[0]
    named = [
        name
        for row in re.findall(r"^\| (.*?) \|", table, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", row)
    ]
    assert set(named) - known == set()
    assert len(named) > 35


# The site.


@pytest.mark.slow
def test_the_site_builds_strictly_and_its_pages_fetch_nothing(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="needs headrace[docs]")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) >= len(nav_files(MKDOCS["nav"]))
    fetched = re.compile(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=[\"']?(https?:)?//")
    assert [page.name for page in pages if fetched.search(page.read_text())] == []
    assert not any("fonts.g" in sheet.read_text() for sheet in tmp_path.rglob("*.css"))
