"""Every name of the list is there with its arguments, or the guide says why not; and every one is called by a test."""

import ast
import dataclasses
import importlib.util
import inspect
import pkgutil
import re
import typing
from pathlib import Path
from typing import Any

import pytest
from nemo_rl_names import CALLED, Name, found, names

import headrace
from headrace.compat.nemo_rl import TRANSLATED
from headrace.metric_names import METRICS

GUIDE = Path(headrace.__file__).parents[2] / "docs" / "nemo_rl.md"

OTHER_PARAMETERS = {
    "data_plane.interfaces.KVBatchMeta.stamp_tags": {"scalars": "values"},
    "data_plane.interfaces.KVBatchMeta.with_fields": {"field_names": "names"},
}
"""Parameters that headrace's own classes call otherwise; the guide says so. By place they are the same."""


def not_served() -> dict[str, str]:
    """Return the names that the guide lists as not served, with its reasons."""
    section = GUIDE.read_text().partition("## Not served\n")[2].partition("\n## ")[0]
    return dict(re.findall(r"^\| `([\w.]+)` \| (.+) \|$", section, re.MULTILINE))


def served() -> list[Name]:
    return [n for n in names() if n.path not in not_served() and f"{n.module}.{n.owner}" not in not_served()]


def test_at_most_25_names_are_not_served_and_each_is_one_of_the_list_with_a_reason() -> None:
    known = {name.path for name in names()}
    assert set(not_served()) <= known
    assert len(not_served()) <= 25
    assert all(len(reason.split()) > 3 for reason in not_served().values())


@pytest.mark.parametrize("module", dict.fromkeys(name.module for name in names()))
def test_every_name_of_a_module_is_there_with_its_arguments(module: str) -> None:
    faults = [fault for name in served() if name.module == module for fault in faults_of(name)]
    assert faults == []


def faults_of(name: Name) -> list[str]:
    try:
        target = found(name)
    except AttributeError as error:
        return [f"{name.path}: {error}"]
    if name.kind == "class":
        return [] if not name.fields else field_faults(name, target)
    if name.kind == "constant":
        return []
    if isinstance(target, property):
        return [] if not name.parameters else [f"{name.path} is a property"]
    if name.is_async != inspect.iscoroutinefunction(target):
        return [f"{name.path}: async is {not name.is_async}"]
    return parameter_faults(name, target)


def parameter_faults(name: Name, target: Any) -> list[str]:
    own = inspect.signature(target).parameters
    takes_any = {kind for p in own.values() if (kind := p.kind) in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    renamed = OTHER_PARAMETERS.get(name.path, {})
    given = [p for p in own.values() if p.name not in ("self", "cls")]
    faults = []
    for place, (parameter, default) in enumerate(name.parameters):
        mine = own.get(renamed.get(parameter, parameter))
        if mine is None:
            if inspect.Parameter.VAR_KEYWORD not in takes_any:
                faults.append(f"{name.path} has no parameter '{parameter}'")
        elif parameter not in name.keyword_only and given[place] is not mine:
            faults.append(f"{name.path}: '{parameter}' is not in place {place}")
        elif default is None and mine.default is not mine.empty and mine.name not in ("dim_to_pack",):
            faults.append(f"{name.path}: '{parameter}' has a default")
        elif default is not None and not same_default(name, default, mine.default):
            faults.append(f"{name.path}: '{parameter}' is {mine.default!r} by default, not {default}")
    listed = {renamed.get(p, p) for p, _ in name.parameters}
    more = [p for p in given if p.name not in listed and p.default is p.empty and p.kind not in takes_any]
    return faults + [f"{name.path} wants '{p.name}'" for p in more]


def same_default(name: Name, text: str, default: Any) -> bool:
    try:
        wanted = ast.literal_eval(text)
    except ValueError:
        wanted = getattr(importlib.import_module("nemo_rl.data_plane"), text)
    return list(default) == list(wanted) if isinstance(wanted, list) else bool(default == wanted)


def field_faults(name: Name, target: Any) -> list[str]:
    if typing.is_typeddict(target):
        own = dict.fromkeys(target.__annotations__)
    elif dataclasses.is_dataclass(target):
        own = {f.name: f.default is f.default_factory for f in dataclasses.fields(target)}
    else:
        own = {n: f.is_required() for n, f in target.model_fields.items()}
    faults = [f"{name.path} has no field '{f}'" for f in name.fields if f.rstrip("?") not in own]
    required = {f for f, needed in own.items() if needed}
    return faults + [
        f"{name.path}: '{f}' has no default" for f in name.fields if f[-1] == "?" and f[:-1] in required
    ]


def table(heading: str) -> list[list[str]]:
    """Return the names in code type in the last column of a table of the guide."""
    section = GUIDE.read_text().partition(f"## {heading}\n")[2].partition("\n## ")[0]
    rows = [line.split(" | ")[-1] for line in section.splitlines() if line.startswith("| `")]
    return [re.findall(r"`([^`]+)`", row) for row in rows]


def test_the_recipe_keys_and_metrics_of_the_guide_are_headraces() -> None:
    keys = set(
        re.findall(r"^\| `([^`]+)` \|", (GUIDE.parent / "reference_keys.md").read_text(), re.MULTILINE)
    )
    named = {
        key.partition("=")[0] for row in table("Recipe keys") for key in row if "." in key or key in keys
    }
    assert len(named) > 60
    assert sorted(named - keys) == []
    metrics = {metric for row in table("Metrics") for metric in row}
    assert sorted(metrics - set(METRICS)) == []


def test_the_classes_and_functions_of_the_guide_can_be_found() -> None:
    paths = {text for row in table("Classes and functions") for text in row if text.startswith("headrace.")}
    assert len(paths) == 11
    has_megatron = importlib.util.find_spec("megatron") is not None
    for path in paths:
        if has_megatron or not path.startswith("headrace.models.megatron"):
            pkgutil.resolve_name(path)


def needs_a_call(name: Name) -> bool:
    if name.kind == "class":
        target = found(name)
        is_form = typing.is_typeddict(target) or getattr(target, "_is_protocol", False)
        return not is_form and not inspect.isabstract(target)
    owner_is_abstract = name.kind == "method" and (
        inspect.isabstract(owner := found(dataclasses.replace(name, name=name.owner)))
        or getattr(owner, "_is_protocol", False)
    )
    return name.kind != "constant" and not owner_is_abstract and not name.name.endswith(".__init__")


def test_every_function_method_and_constructor_that_is_served_is_called_by_a_test_here() -> None:
    for file in Path(__file__).parent.glob("test_nemo_rl_*.py"):
        if file.stem != Path(__file__).stem:
            importlib.import_module(file.stem)
    wanted = {name.path for name in served() if needs_a_call(name)}
    assert sorted(wanted - CALLED) == []
    assert sorted(CALLED - {name.path for name in names()}) == []


CORE = {
    "data.multimodal_utils": "headrace.distributed.multimodal",
    "data_plane": "headrace.data_plane",
    "data_plane.column_io": "headrace.data_plane.column_io",
    "data_plane.factory": "headrace.data_plane.factory",
    "data_plane.interfaces": "headrace.data_plane.interfaces",
    "data_plane.observability": "headrace.data_plane.observability",
    "data_plane.preshard": "headrace.data_plane.preshard",
    "data_plane.worker_mixin": "headrace.data_plane.worker_mixin",
    "distributed.batched_data_dict": "headrace.distributed.batched_data_dict",
    "models.policy.tq_policy": "headrace.models.policy.tq_policy",
    "utils.routed_experts_codec": "headrace.data_plane.routes_codec",
}
"""headrace's module beside the one that translates it."""


@pytest.mark.parametrize("path", CORE)
def test_a_translated_module_has_what_headraces_own_offers(path: str) -> None:
    own = importlib.import_module(CORE[path])
    translated = importlib.import_module(f"nemo_rl.{path}")
    assert translated is importlib.import_module(TRANSLATED[path])
    offered = getattr(own, "__all__", None) or [n for n in DOCUMENTED[path] if hasattr(own, n)]
    assert [name for name in offered if not hasattr(translated, name)] == []


DOCUMENTED = {
    "data.multimodal_utils": ["PackedTensor"],
    "data_plane.factory": ["build_data_plane_client"],
    "data_plane.observability": [
        "MetricsDataPlaneClient",
        "print_event",
        "DataPlaneEvent",
        "Snapshot",
        "OpTotals",
    ],
    "data_plane.preshard": ["shard_meta_for_dp"],
    "data_plane.worker_mixin": ["TQWorkerMixin"],
    "models.policy.tq_policy": ["TQPolicy"],
    "utils.routed_experts_codec": ["RouteShape", "check_routes", "missing_mark", "pack_routes", "wire_dtype"],
}
