"""The source tree keeps the rules of tests/architecture.py, and the checker finds every breach of them."""

import re
import tomllib
from pathlib import Path

import pytest

import headrace
from architecture import (
    BROAD_EXCEPTS,
    LOCAL_IMPORTS,
    broad_excepts,
    check_source,
    check_tree,
    import_circle,
    layer_of,
    local_imports,
    module_name,
    packages_from_outside,
)
from headrace.data_plane.adapters import TESTED

PACKAGE = Path(headrace.__file__).parent


def test_the_package_keeps_every_rule() -> None:
    violations = check_tree(PACKAGE)
    assert not violations, "\n" + "\n".join(map(str, violations))


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert import_circle(PACKAGE) == []


def test_a_circle_of_imports_is_found_also_of_those_for_type_checking(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("from headrace import b\n")
    (tmp_path / "b.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from headrace.a import X\n"
    )
    assert set(import_circle(tmp_path)) == {"headrace.a", "headrace.b"}


def test_every_allowed_local_import_is_still_there() -> None:
    assert LOCAL_IMPORTS - local_imports(PACKAGE) == set()


def test_every_allowed_handler_of_all_exceptions_is_still_there() -> None:
    assert BROAD_EXCEPTS - broad_excepts(PACKAGE) == set()


BREACHES = {
    "an import that goes up": (
        "data_plane/codec.py",
        "from headrace.models.interfaces import LossFn",
        "layer",
    ),
    "the same through the package": ("utils/timer.py", "from headrace import cli", "layer"),
    "the same, relative": ("models/policy/x.py", "from ...algorithms import step", "layer"),
    "the same for types only": (
        "distributed/planner.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import headrace.data_plane.codec",
        "layer",
    ),
    "the same by name": ("utils/x.py", "import importlib\nimportlib.import_module('headrace.cli')", "layer"),
    "torch in utils": ("utils/timer.py", "import torch", "layer"),
    "tensordict below the data plane": (
        "distributed/planner.py",
        "from tensordict import TensorDict",
        "layer",
    ),
    "transformers below models": ("data_plane/codec.py", "import transformers.modeling_utils", "layer"),
    "rich below the command line": (
        "algorithms/grpo.py",
        "from rich.console import Console",
        "layer",
    ),
    "ray elsewhere": ("data_plane/factory.py", "import ray", "layer"),
    "the queue outside its adapter": ("data_plane/factory.py", "import transfer_queue", "layer"),
    "vllm elsewhere": ("models/generation/hf.py", "from vllm import LLM", "layer"),
    "an unknown dependency": ("algorithms/grpo.py", "import pandas", "layer"),
    "a module in no layer": ("rewards.py", "import math", "layer"),
    "an import of a module in no layer": ("cli.py", "import headrace.nowhere", "layer"),
    "an import inside a function": ("utils/x.py", "def _f():\n    import math", "local-import"),
    "the same in a method": (
        "utils/x.py",
        "class _A:\n    def f(self):\n        from pathlib import Path",
        "local-import",
    ),
    "the same by a computed name": (
        "utils/x.py",
        "from importlib import import_module\ndef _f(n):\n    import_module(n)",
        "local-import",
    ),
    "a print": ("utils/x.py", "print('x')", "print"),
    "a bare except": ("utils/x.py", "try:\n    pass\nexcept:\n    pass", "broad-except"),
    "except Exception": ("utils/x.py", "try:\n    pass\nexcept Exception:\n    raise", "broad-except"),
    "the same in a tuple": (
        "utils/x.py",
        "try:\n    pass\nexcept (ValueError, BaseException):\n    pass",
        "broad-except",
    ),
    "suppress(Exception)": (
        "utils/x.py",
        "import contextlib\nwith contextlib.suppress(Exception):\n    pass",
        "broad-except",
    ),
    "a hard .cuda()": ("models/x.py", "def _f(t):\n    return t.cuda()", "cuda"),
    "a long file": ("utils/x.py", "\n" * 601, "file-length"),
    "a long function": ("utils/x.py", "def _f():\n" + "    x = 1\n" * 60, "function-length"),
    "a class without a docstring": ("utils/x.py", "class A:\n    x = 1", "docstring"),
}


@pytest.mark.parametrize("name", BREACHES)
def test_a_breach_is_found(name: str) -> None:
    file, source, rule = BREACHES[name]
    assert {v.rule for v in check_source(file, source)} >= {rule}


ALLOWED = {
    "an import that goes down": (
        "algorithms/grpo.py",
        "from headrace.data_plane.codec import materialize",
    ),
    "an import that goes sideways": ("experience/x.py", "from headrace.environments import interfaces"),
    "the version": ("cli.py", "from headrace import __version__"),
    "ray where it belongs": ("distributed/worker_groups.py", "import ray"),
    "the queue in its adapter": (
        "data_plane/adapters/transfer_queue_cluster.py",
        "import transfer_queue as tq",
    ),
    "an import on the list": (
        "trackers/tensorboard.py",
        "def _f():\n    from torch.utils.tensorboard import SummaryWriter",
    ),
    "a function without a docstring": ("utils/x.py", "def f(): ..."),
    "a public method of a private class": ("utils/x.py", "class _A:\n    def f(self): ..."),
    "an overridden method": (
        "utils/x.py",
        "class A:\n    'A.'\n    @override\n    def f(self): ...",
    ),
    "an exception by name": ("utils/x.py", "try:\n    pass\nexcept (OSError, ValueError):\n    pass"),
    "a function of 60 lines": ("utils/x.py", "def _f():\n" + "    x = 1\n" * 59),
    "asking about CUDA": ("models/x.py", "import torch\nx = torch.cuda.is_available()"),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_what_is_allowed_is_not_reported(name: str) -> None:
    file, source = ALLOWED[name]
    assert check_source(file, source) == []


def test_files_and_layers_are_named_by_module() -> None:
    assert module_name("utils/__init__.py") == "headrace.utils"
    assert module_name("__init__.py") == "headrace"
    assert module_name("data_plane/adapters/local.py") == "headrace.data_plane.adapters.local"
    assert layer_of("headrace.data_plane.adapters.local") == 2
    assert layer_of("headrace.nowhere") is None


# Packages that go by another name where they are installed from, or that come with one that is declared.
DISTRIBUTIONS = {
    "PIL": "matplotlib",
    "mlflow": "mlflow-skinny",
    "mooncake": "mooncake-transfer-engine-non-cuda",
    "megatron": "megatron-core",
    "opentelemetry": "opentelemetry-sdk",
    "transfer_queue": "TransferQueue",
    "pydantic_core": "pydantic",
    "triton": "torch",
    "yaml": "PyYAML",
    "zmq": "pyzmq",
}


def requirements() -> dict[str, str]:
    """What pyproject.toml declares, extras included: name in lower case, with dashes, and version."""
    project = tomllib.loads((PACKAGE.parent.parent / "pyproject.toml").read_text())["project"]
    lines = [
        *project["dependencies"],
        *(line for extra in project["optional-dependencies"].values() for line in extra),
    ]
    split = (re.fullmatch(r"([A-Za-z0-9._-]+)(.*)", line) for line in lines)
    return {found[1].lower().replace("_", "-"): found[2] for found in split if found}


def test_every_package_that_is_imported_is_declared() -> None:
    names = {DISTRIBUTIONS.get(root, root) for root in packages_from_outside(PACKAGE)}
    assert {name.lower().replace("_", "-") for name in names} - set(requirements()) == set()


def test_the_transfer_queue_that_is_declared_is_the_one_that_is_tested() -> None:
    assert requirements()["transferqueue"] == f"=={TESTED[-1]}"
