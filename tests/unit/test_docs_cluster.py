"""docs/cluster.md and its examples say what the code does."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from headrace.config import RecipeConfig
from headrace.data_plane import pack_columns
from headrace.data_plane.schema import FIELDS, Kind
from headrace.data_plane.store.blocks import MAX_BLOCK_BYTES, pack
from headrace.data_plane.store.columns import checked_put
from headrace.utils.shipped import shipped_recipes

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "cluster.md").read_text()
SLURM = ROOT / "examples" / "cluster" / "slurm.sh"
MANIFEST: dict[str, Any] = yaml.safe_load((ROOT / "examples" / "cluster" / "kuberay.yaml").read_text())
TABLE = dict(re.findall(r"^\| `(\w+)` \| (?:about )?(\d+) \|", PAGE, re.MULTILINE))

# Of the KubeRay API reference, ray.io/v1.
JOB_KEYS = {
    "entrypoint",
    "shutdownAfterJobFinishes",
    "ttlSecondsAfterFinished",
    "backoffLimit",
    "rayClusterSpec",
}
CLUSTER_KEYS = {"rayVersion", "headGroupSpec", "workerGroupSpecs"}
GROUP_KEYS = {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"}


def test_the_page_is_short() -> None:
    assert len(PAGE.splitlines()) <= 200


def test_the_calculation_of_store_memory_prints_what_the_page_says() -> None:
    match = re.search(r"```python\n(.*?)```\n\n```\n(.*?)```", PAGE, re.DOTALL)
    assert match is not None
    code, printed = match.groups()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == printed


def test_the_table_has_every_column_that_costs_bytes_per_token() -> None:
    expected = {
        name: str(spec.dtype.itemsize)
        for name, spec in FIELDS.items()
        if spec.kind is Kind.PER_TOKEN and not spec.broadcast and spec.dtype and not spec.trailing_dims
    }
    assert {**expected, "message_log": "4"} == TABLE


def test_blocks_as_they_are_stored_take_the_bytes_of_the_table() -> None:
    rows, tokens = 16, 4000
    columns: dict[str, Any] = {
        name: torch.zeros(rows, tokens, dtype=FIELDS[name].dtype) for name in TABLE if FIELDS[name].dtype
    }
    columns["message_log"] = [[{"role": "assistant", "content": 4 * tokens * "x"}]] * rows
    lengths = torch.full((rows,), tokens)
    wire = pack_columns(columns, lengths=lengths, rows=rows)
    packed = pack(checked_put([str(row) for row in range(rows)], "p", wire, None)[1])
    for name, blocks in packed.columns.items():
        per_token = sum(block.nbytes for block in blocks) / (rows * tokens)
        assert per_token == pytest.approx(int(TABLE[name]), rel=0.01), name
    assert f"blocks of at most {MAX_BLOCK_BYTES >> 20} MiB" in " ".join(PAGE.split())


def test_every_recipe_key_that_the_page_names_exists() -> None:
    sections = ("cluster", "policy", "data_plane", "checkpointing")
    named = set(re.findall(rf"`((?:{'|'.join(sections)})\.[a-z_.]+)", PAGE))
    assert {"cluster.num_nodes", "data_plane.timeout_s", "policy.parallel.tensor"} <= named
    assert len(keys_of([f"{key}=" for key in named])) == len(named)


def keys_of(words: list[str]) -> list[str]:
    """Return the recipe keys among words like `policy.workers=2`, each checked to exist."""
    keys = [word.partition("=")[0] for word in words if re.match(r"[a-z_.]+=", word)]
    for key in keys:
        model: Any = RecipeConfig
        for part in key.split("."):
            assert part in model.model_fields, key
            model = model.model_fields[part].annotation
    return keys


def test_the_slurm_script_is_bash_and_asks_for_keys_that_exist() -> None:
    subprocess.run(["bash", "-n", str(SLURM)], check=True)
    named = re.findall(r"\b(?:policy|data_plane|cluster|logging)\.\w+=", SLURM.read_text())
    assert {"policy.workers", "cluster.num_nodes", "data_plane.impl"} <= set(keys_of(named))


def choose_workers(*arguments: object) -> "subprocess.CompletedProcess[str]":
    """Run the part of the Slurm script that chooses the number of workers: most, fewest, step, recipe, settings."""
    match = re.search(r"<<'CHOOSE'\n(.*?)^CHOOSE$", SLURM.read_text(), re.DOTALL | re.MULTILINE)
    assert match is not None
    command = [sys.executable, "-c", match.group(1), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


# Nodes, GPUs of each, and workers by recipe: 256 samples in a batch, or 32 in microbatches of 8.
ALLOWED = [(1, 8, 4, 4), (2, 8, 8, 4), (1, 4, 2, 2), (1, 3, 2, 2), (2, 2, 2, 2), (4, 0, 4, 4)]


@pytest.mark.parametrize(("nodes", "gpus", "demo", "smollm2"), ALLOWED)
@pytest.mark.parametrize("recipe", shipped_recipes())
def test_the_slurm_script_takes_the_most_workers_that_a_shipped_recipe_allows(
    recipe: str, nodes: int, gpus: int, demo: int, smollm2: int
) -> None:
    workers = smollm2 if recipe == "smollm2_135m" else demo
    most = nodes * (gpus - 1) if gpus > 1 else nodes
    settings = ("data_plane.impl=transfer_queue", f"cluster.num_nodes={nodes}")
    done = choose_workers(most, nodes, nodes, recipe, *settings)
    assert (done.returncode, done.stdout) == (0, f"{workers}\n"), done.stderr
    said = f"{workers} workers, the most that the recipe allows; {most} workers: "
    assert (said in done.stderr) == (workers < most)


def test_a_number_of_workers_that_the_recipe_does_not_allow_ends_the_job_before_ray_starts() -> None:
    done = choose_workers(7, 7, 1, "demo_moe", "data_plane.impl=transfer_queue")
    assert (done.returncode, done.stdout) == (1, "")
    assert "train_global_batch_size=256 is not divisible by workers=7" in done.stderr
    text = SLURM.read_text()
    assert text.index("CHOOSE\n)") < text.index("ray_on ")


def test_the_manifest_has_the_fields_of_a_ray_job() -> None:
    assert (MANIFEST["apiVersion"], MANIFEST["kind"]) == ("ray.io/v1", "RayJob")
    assert set(MANIFEST["spec"]) == JOB_KEYS
    cluster = MANIFEST["spec"]["rayClusterSpec"]
    assert set(cluster) == CLUSTER_KEYS
    assert set(cluster["headGroupSpec"]) == {"rayStartParams", "template"}
    for group in cluster["workerGroupSpecs"]:
        assert set(group) == GROUP_KEYS
        assert group["minReplicas"] == group["replicas"] == group["maxReplicas"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        (container,) = group["template"]["spec"]["containers"]
        assert container["resources"]["requests"] == container["resources"]["limits"]
        assert not container["image"].endswith(":latest")


def test_the_manifest_asks_for_keys_that_exist() -> None:
    words = MANIFEST["spec"]["entrypoint"].split()
    assert words[:3] == ["headrace", "train", "/shared/recipe.yaml"]
    assert len(keys_of(words)) == len(words) - 3


def test_the_manifest_runs_the_pinned_ray() -> None:
    pinned = re.search(r"^ray==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    assert MANIFEST["spec"]["rayClusterSpec"]["rayVersion"] == pinned.group(1)
    assert f"rayproject/ray:{pinned.group(1)}-" in PAGE


def test_the_manifest_has_a_gpu_for_every_worker_and_one_for_the_rollouts() -> None:
    keys = dict(word.split("=") for word in MANIFEST["spec"]["entrypoint"].split() if "=" in word)
    groups = {group["groupName"]: group for group in MANIFEST["spec"]["rayClusterSpec"]["workerGroupSpecs"]}

    def gpus(group: dict[str, Any]) -> int:
        (container,) = group["template"]["spec"]["containers"]
        return group["replicas"] * int(container["resources"]["limits"]["nvidia.com/gpu"])

    assert int(keys["policy.workers"]) == gpus(groups["trainers"])
    assert int(keys["cluster.num_nodes"]) == groups["trainers"]["replicas"]
    assert gpus(groups["rollouts"]) == 1
