"""Names of earlier versions: recipes are told the new one, and run directories go on being read."""

from pathlib import Path

import pytest
import yaml

from headrace.errors import ConfigError
from headrace.report import read_metrics
from headrace.utils.recipe import changed_keys, dump_recipe, load_recipe, read_resolved
from headrace.utils.renamed import METRICS, RECIPE_KEYS, with_new_keys
from tiny_recipe import tiny_recipe


def with_old_keys(path: Path) -> dict[str, object]:
    """Return the resolved tiny recipe as an earlier version wrote it."""
    values = read_resolved(dump_recipe(tiny_recipe(path)))
    for old, new in RECIPE_KEYS.items():
        *sections, name = new.split(".")
        section = values
        for part in sections:
            section = section[part]
        section[old.rpartition(".")[2]] = section.pop(name)
    return values


@pytest.mark.parametrize("old", RECIPE_KEYS)
def test_a_recipe_with_an_old_key_is_refused_with_the_new_one(old: str, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(dump_recipe(tiny_recipe(tmp_path)))
    with pytest.raises(ConfigError, match=f"unknown key '{old}'; it is called '{RECIPE_KEYS[old]}'"):
        load_recipe(tmp_path / "r.yaml", [f"{old}=0.5"])


def test_the_config_of_an_old_run_reads_as_the_recipe_that_it_was(tmp_path: Path) -> None:
    old = with_old_keys(tmp_path)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(old))
    recipe = load_recipe(tmp_path / "config.yaml", of_a_run=True)
    assert recipe == tiny_recipe(tmp_path)
    assert changed_keys(with_new_keys(old), recipe.model_dump(mode="json")) == []
    with pytest.raises(ConfigError, match="it is called"):
        load_recipe(tmp_path / "config.yaml")


@pytest.mark.parametrize("old", METRICS)
def test_a_report_of_an_old_run_has_the_metric_under_its_new_name(old: str, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(f'{{"kind": "step", "step": 1, "{old}": 0.5}}\n')
    assert read_metrics(tmp_path) == [{"kind": "step", "step": 1, METRICS[old]: 0.5}]
