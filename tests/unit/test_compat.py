"""The opt-in import paths: each resolves to a module of headrace, and nothing is there without the opt-in."""

import importlib
import importlib.util
import subprocess
import sys

import pytest

from headrace.compat.nemo_rl import ALIASES, TRANSLATED, NemoRLFinder, install, resolve

NAMES = {
    "algorithms.async_utils": (
        "headrace.compat.async_utils",
        ["AsyncTrajectoryCollector", "ReplayBuffer"],
    ),
    "algorithms.interfaces": ("headrace.compat.losses", ["LossFunction", "LossType"]),
    "algorithms.loss.interfaces": ("headrace.compat.losses", ["LossFunction", "LossType"]),
    "data.llm_message_utils": (
        "headrace.compat.message_log",
        ["attach_message_log_view", "batched_message_log_to_flat_message", "decompose_message_log"],
    ),
    "data.multimodal_utils": ("headrace.compat.multimodal_utils", ["PackedTensor"]),
    "data.packing": ("headrace.compat.packing_algorithms", ["get_packer"]),
    "data.packing.algorithms": (
        "headrace.compat.packing_algorithms",
        ["ConcatenativePacker", "PackingAlgorithm", "SequencePacker", "get_packer"],
    ),
    "data_plane": ("headrace.compat.data_plane", ["KVBatchMeta", "build_data_plane_client"]),
    "data_plane.adapters.noop": ("headrace.compat.noop", ["NoOpDataPlaneClient"]),
    "data_plane.codec": ("headrace.compat.codec", ["materialize", "pack_jagged_fields"]),
    "data_plane.column_io": ("headrace.compat.column_io", ["kv_first_write", "read_columns", "round_up"]),
    "data_plane.factory": ("headrace.compat.factory", ["build_data_plane_client"]),
    "data_plane.interfaces": (
        "headrace.compat.interfaces",
        ["DataPlaneClient", "DataPlaneConfig", "KVBatchMeta"],
    ),
    "data_plane.observability": (
        "headrace.compat.observability",
        ["MetricsDataPlaneClient", "print_event"],
    ),
    "data_plane.preshard": ("headrace.compat.preshard", ["shard_meta_for_dp"]),
    "data_plane.schema": (
        "headrace.data_plane.schema",
        ["DP_TRAIN_FIELDS", "Layout", "PROMOTE_1D_FIELDS", "fields_with_optional_routed_experts"],
    ),
    "data_plane.worker_mixin": ("headrace.compat.worker_mixin", ["TQWorkerMixin"]),
    "distributed.batched_data_dict": (
        "headrace.compat.batched_data_dict",
        ["BatchedDataDict", "DynamicBatchingArgs", "SequencePackingArgs", "SlicedDataDict"],
    ),
    "distributed.named_sharding": ("headrace.compat.named_sharding", ["NamedSharding"]),
    "experience.sync_rollout_actor": ("headrace.experience.sync_rollout_actor", ["SyncRolloutActor"]),
    "models.automodel.data": (
        "headrace.compat.automodel_data",
        ["ProcessedInputs", "ProcessedMicrobatch", "get_microbatch_iterator", "process_global_batch"],
    ),
    "models.huggingface.common": (
        "headrace.compat.packing",
        ["get_flash_attention_kwargs", "pack_sequences"],
    ),
    "models.policy.lm_policy": ("headrace.models.policy.lm_policy", ["Policy"]),
    "models.policy.tq_policy": ("headrace.compat.tq_policy", ["TQPolicy"]),
    "utils.routed_experts_codec": ("headrace.compat.routed_experts_codec", []),
    "utils.timer": ("headrace.compat.timer", ["Timer"]),
}


@pytest.mark.parametrize("path", NAMES)
def test_a_documented_path_is_headraces_own_module_with_its_names(path: str) -> None:
    target, attributes = NAMES[path]
    module = importlib.import_module(f"nemo_rl.{path}")
    assert module is importlib.import_module(target)
    assert [name for name in attributes if not hasattr(module, name)] == []


@pytest.mark.parametrize("path", [path for path in NAMES if "." in path])
def test_a_module_can_be_imported_from_its_package(path: str) -> None:
    package, _, name = path.rpartition(".")
    space: dict[str, object] = {}
    exec(f"from nemo_rl.{package} import {name}", space)
    assert space[name] is importlib.import_module(f"nemo_rl.{path}")


def test_a_name_that_a_package_lacks_is_an_import_error() -> None:
    with pytest.raises(ImportError, match="nowhere"):
        exec("from nemo_rl.data_plane import nowhere")
    with pytest.raises(ImportError, match="nowhere"):
        exec("from nemo_rl.algorithms.async_utils import nowhere")


def test_every_alias_leads_to_a_module() -> None:
    paths = [*ALIASES, *TRANSLATED]
    assert [path for path in paths if importlib.util.find_spec(f"nemo_rl.{path}") is None] == []


def test_an_alias_keeps_its_own_name_and_spec() -> None:
    module = importlib.import_module("nemo_rl.data_plane.schema")
    assert module.__name__ == "headrace.data_plane.schema"
    assert module.__spec__ is not None
    assert module.__spec__.name == "headrace.data_plane.schema"


def test_a_package_on_the_way_is_empty_and_belongs_to_no_headrace_package() -> None:
    utils = importlib.import_module("nemo_rl.utils")
    importlib.import_module("nemo_rl.utils.routed_experts_codec")
    assert utils is not importlib.import_module("headrace.utils")
    assert not hasattr(importlib.import_module("headrace.utils"), "routed_experts_codec")


@pytest.mark.parametrize(
    "path", ["nemo_rl.nowhere", "nemo_rl.data_plane.nowhere", "nemo_rl.utils.checkpoint"]
)
def test_a_path_without_a_counterpart_is_not_found(path: str) -> None:
    assert importlib.util.find_spec(path) is None
    with pytest.raises(ModuleNotFoundError, match=path):
        importlib.import_module(path)


def test_other_names_are_none_of_the_finders_business() -> None:
    assert resolve("nemo_rlx.data_plane") is None
    assert resolve("json") is None
    assert NemoRLFinder().find_spec("data_plane", None) is None


def test_installing_twice_leaves_one_finder() -> None:
    install()
    assert sum(isinstance(finder, NemoRLFinder) for finder in sys.meta_path) == 1


def run(code: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_without_the_opt_in_there_is_no_such_package() -> None:
    done = run("import headrace.data_plane, headrace.compat\nimport nemo_rl")
    assert done.returncode == 1
    assert "No module named 'nemo_rl'" in done.stderr


def test_the_opt_in_loads_nothing_heavy_and_aliases_load_what_they_name() -> None:
    done = run(
        "import sys, headrace.compat.nemo_rl\n"
        "assert 'torch' not in sys.modules\n"
        "import nemo_rl.data_plane.codec\n"
        "assert nemo_rl.data_plane.codec is sys.modules['headrace.compat.codec']\n"
        "from nemo_rl.data_plane import KVBatchMeta\n"
        "import pickle\n"
        "meta = KVBatchMeta('p', 't', ['a'])\n"
        "assert pickle.loads(pickle.dumps(meta)) == meta\n"
        "assert 'transformers' not in sys.modules\n"
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_package_of_that_name_that_was_imported_before_is_not_mixed_with_headrace() -> None:
    done = run(
        "import sys, types\nsys.modules['nemo_rl'] = types.ModuleType('nemo_rl')\nimport headrace.compat.nemo_rl"
    )
    assert done.returncode == 1
    assert "nemo_rl is imported already" in done.stderr
