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
from headrace.data_plane.adapters.local_chunks import chunk_from_leaf
from headrace.data_plane.checks import checked_leaves
from headrace.data_plane.packed_payload import MAX_BLOCK_BYTES, pack
from headrace.data_plane.schema import FIELDS, Kind

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
    leaves = checked_leaves(pack_columns(columns, lengths=lengths, rows=rows), rows)
    ids = [str(row) for row in range(rows)]
    packed = pack({name: chunk_from_leaf(name, leaf, ids) for name, leaf in leaves.items()}, "block")
    for name, blocks in packed.columns.items():
        per_token = sum(block.nbytes for block in blocks) / (rows * tokens)
        assert per_token == pytest.approx(int(TABLE[name]), rel=0.01), name
    assert f"at\nmost {MAX_BLOCK_BYTES >> 20} MiB" in PAGE


def test_every_recipe_key_that_the_page_names_exists() -> None:
    sections = ("cluster", "policy", "data_plane", "checkpointing")
    named = set(re.findall(rf"`((?:{'|'.join(sections)})\.[a-z_.]+)", PAGE))
    assert {"cluster.num_nodes", "data_plane.timeout_s", "policy.parallel.tensor"} <= named
    for key in named:
        model: Any = RecipeConfig
        for part in key.split("."):
            assert part in model.model_fields, key
            model = model.model_fields[part].annotation


def test_the_slurm_script_is_bash_and_asks_for_keys_that_exist() -> None:
    subprocess.run(["bash", "-n", str(SLURM)], check=True)
    for section, name in re.findall(r"^  (\w+)\.(\w+)=", SLURM.read_text(), re.MULTILINE):
        assert name in RecipeConfig.model_fields[section].annotation.model_fields  # type: ignore[union-attr]


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
