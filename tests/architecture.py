"""The rules of headrace's source, checked with `ast`; `test_architecture.py` applies them to the tree."""

import ast
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path, PurePosixPath

# Longest prefix wins. An import goes to the same layer or to a lower one.
LAYERS = {
    "headrace": 0,  # __version__, and names that are loaded when they are used
    "headrace.errors": 0,
    "headrace.config": 0,
    "headrace.config_async": 0,
    "headrace.config_data": 0,
    "headrace.config_env": 0,
    "headrace.config_generation": 0,
    "headrace.config_grpo": 0,
    "headrace.config_journal": 0,
    "headrace.config_logging": 0,
    "headrace.config_policy": 0,
    "headrace.utils": 0,
    "headrace.distributed": 1,
    "headrace.data_plane": 2,
    "headrace.models": 3,
    "headrace.experience": 4,
    "headrace.environments": 4,
    "headrace.algorithms": 5,
    "headrace.__main__": 6,
    "headrace.cli": 6,
    "headrace.config_commands": 6,
    "headrace.recipe_reference": 6,
    "headrace.metric_names": 6,
    "headrace.compat": 6,
    "headrace.dashboard": 6,
    "headrace.dashboard_commands": 6,
    "headrace.doctor": 6,
    "headrace.init_commands": 6,
    "headrace.length_spec": 6,
    "headrace.library_logs": 6,
    "headrace.live_view": 6,
    "headrace.model_commands": 6,
    "headrace.progress": 6,
    "headrace.report": 6,
    "headrace.step_commands": 6,
    "headrace.store_commands": 6,
    "headrace.data_commands": 6,
    "headrace.training": 6,
    "headrace.run_tables": 6,
    "headrace.trackers": 6,
}

# The lowest layer that may import a package from outside; one that is in neither table may not be imported.
LOWEST_LAYER = {
    "pydantic": 0,
    "pydantic_core": 0,  # comes with pydantic
    "omegaconf": 0,
    "yaml": 0,
    "numpy": 1,
    "torch": 1,
    "triton": 1,  # comes with torch for CUDA
    "msgspec": 1,
    "tensordict": 2,
    "accelerate": 3,
    "gguf": 3,
    "huggingface_hub": 3,
    "jinja2": 3,
    "peft": 3,
    "torchao": 3,
    "verifiers": 4,
    "safetensors": 3,
    "tokenizers": 3,
    "transformers": 3,
    "datasets": 4,
    "math_verify": 4,
    "pyarrow": 4,
    "reasoning_gym": 4,
    "sympy": 4,
    "PIL": 6,  # comes with matplotlib
    "matplotlib": 6,
    "opentelemetry": 6,
    "prometheus_client": 6,
    "rich": 6,
    "typer": 6,
    "?": 6,  # a module whose name is computed
}

# Packages that only these modules may import.
ONLY_IN = {
    "ray": (
        "headrace.compat.actors",
        "headrace.distributed.worker_groups",
        "headrace.distributed.ray_connection",
        "headrace.distributed.virtual_cluster",
        "headrace.data_plane.adapters.transfer_queue",
        "headrace.data_plane.adapters.transfer_queue_cluster",
        "headrace.data_plane.adapters.transfer_queue_mooncake",
        "headrace.models.generation.engine_actor",
    ),
    "transfer_queue": (
        "headrace.data_plane.adapters.transfer_queue_cluster",
        "headrace.data_plane.adapters.transfer_queue_index",
        "headrace.data_plane.adapters.transfer_queue_mooncake",
        "headrace.data_plane.adapters.transfer_queue_socket",
    ),
    "mooncake": ("headrace.data_plane.adapters.transfer_queue_mooncake",),
    "zmq": (
        "headrace.data_plane.adapters.transfer_queue_ask",
        "headrace.data_plane.adapters.transfer_queue_index",
        "headrace.data_plane.adapters.transfer_queue_socket",
    ),
    "vllm": ("headrace.models.generation.vllm",),
    "sglang": ("headrace.models.generation.sglang",),
    "megatron": ("headrace.models.megatron", "headrace.compat.megatron_replay"),
    "wandb": ("headrace.trackers.wandb",),
    "mlflow": ("headrace.trackers.mlflow",),
    "trackio": ("headrace.trackers.trackio",),
    "opentelemetry": ("headrace.trackers.opentelemetry",),
    "prometheus_client": ("headrace.trackers.prometheus",),
    "peft": ("headrace.models.automodel.lora",),
    "verifiers": ("headrace.environments.verifiers",),
    "torchao": ("headrace.models.automodel.optimizer_8bit", "headrace.models.automodel.quantized_base"),
    "starlette": ("headrace.dashboard.server",),
    "uvicorn": ("headrace.dashboard.server",),
    "triton": ("headrace.distributed.ragged_triton", "headrace.models.automodel.fused_head_kernels"),
}

# Factories that load something slow or optional: (file, module imported inside a function).
LOCAL_IMPORTS = {
    ("__init__.py", "?"),
    ("dashboard_commands.py", "headrace.dashboard"),
    ("data_commands.py", "headrace.experience"),
    ("data_commands.py", "headrace.models.automodel.setup"),
    ("training.py", "headrace.algorithms"),
    ("cli.py", "headrace.models.router_replay.trace"),
    ("compat/nemo_rl.py", "?"),
    ("compat/submodules.py", "?"),
    ("compat/actors.py", "ray"),
    ("compat/media_inputs.py", "PIL"),
    ("compat/media_inputs.py", "transformers.audio_utils"),
    ("compat/media_inputs.py", "transformers.video_utils"),
    ("compat/megatron_replay.py", "headrace.models.megatron"),
    ("compat/megatron_replay.py", "megatron.core"),
    ("doctor.py", "headrace.models.automodel.attention"),
    ("doctor.py", "torch"),
    ("trackers/mlflow.py", "mlflow"),
    ("trackers/opentelemetry.py", "headrace.data_plane.observability"),
    ("trackers/opentelemetry.py", "opentelemetry"),
    ("trackers/opentelemetry.py", "opentelemetry.exporter.otlp.proto.http.trace_exporter"),
    ("trackers/opentelemetry.py", "opentelemetry.sdk.resources"),
    ("trackers/opentelemetry.py", "opentelemetry.sdk.trace"),
    ("trackers/opentelemetry.py", "opentelemetry.sdk.trace.export"),
    ("trackers/prometheus.py", "prometheus_client"),
    ("trackers/tensorboard.py", "torch.utils.tensorboard"),
    ("trackers/tensorboard.py", "torch.utils.tensorboard.summary"),
    ("trackers/trackio.py", "trackio"),
    ("trackers/wandb.py", "wandb"),
    ("report.py", "matplotlib.figure"),
    ("step_commands.py", "headrace.algorithms"),
    ("store_commands.py", "headrace.data_plane"),
    ("data_plane/adapters/transfer_queue_mooncake.py", "mooncake.store"),
    ("data_plane/factory.py", "headrace.data_plane.adapters.transfer_queue"),
    ("distributed/ragged.py", "headrace.distributed"),
    ("environments/build.py", "headrace.environments.math"),
    ("environments/build.py", "headrace.environments.reasoning_gym"),
    ("environments/dataset.py", "headrace.environments.math"),
    ("environments/sources.py", "datasets"),
    ("environments/sources.py", "pyarrow"),
    ("environments/verifiers.py", "verifiers.legacy"),
    ("environments/verifiers.py", "verifiers.legacy.clients"),
    ("environments/verifiers.py", "verifiers.legacy.types"),
    ("models/automodel/attention.py", "torch.nn.attention.varlen"),
    ("models/automodel/fused_head.py", "headrace.models.automodel"),
    ("model_commands.py", "headrace.models.automodel.export"),
    ("model_commands.py", "headrace.models.memory_plan"),
    ("models/automodel/lora.py", "peft"),
    ("models/automodel/optimizer_8bit.py", "torchao.optim"),
    ("models/automodel/quantized_base.py", "torchao.quantization"),
    ("models/generation/engine_pool.py", "headrace.models.generation.engine_actor"),
    ("models/generation/engine_process.py", "headrace.models.generation.hf_engine"),
    ("models/generation/engine_process.py", "headrace.models.generation.vllm"),
    ("models/generation/vllm.py", "vllm"),
    ("models/generation/vllm.py", "vllm.model_executor.model_loader.reload"),
    ("models/generation/vllm.py", "vllm.v1.sample.logits_processor"),
    ("models/policy/launch.py", "headrace.distributed.worker_groups.ray_group"),
}

# Where a value names a module: a call to a worker names functions and classes, which have to be registered.
COMPUTED_IMPORTS = {"__init__.py", "distributed/worker_groups/wire.py", "utils/targets.py"}

# Where a process answers another one and goes on, whatever the error, or looks at what may be broken: (file, function).
BROAD_EXCEPTS = {
    ("data_plane/adapters/transfer_queue_index.py", "reply_to"),
    # A put that ends with any error is told to be refused.
    ("data_plane/journal/client.py", "put_samples"),
    ("data_plane/journal/restore.py", "_is_put"),
    ("distributed/collectives.py", "from_first_rank"),
    ("distributed/worker_groups/rank.py", "answers"),
    ("distributed/worker_groups/rank.py", "build"),
    ("doctor.py", "_check"),
    # Code of a user's own, which may raise anything.
    ("environments/reward_calls.py", "_call"),
    ("environments/reward_calls.py", "_call_batch"),
    ("environments/reward_calls.py", "one"),
    ("utils/background.py", "run"),
    ("utils/targets.py", "_import"),
    ("utils/targets.py", "user_code"),
    ("trackers/base.py", "_tell"),
}

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, order=True)
class Violation:
    """A rule that a line breaks."""

    file: str
    line: int
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.rule}: {self.text}"


def check_tree(package: Path) -> list[Violation]:
    """Return every violation in the package's files."""
    files = package.rglob("*.py")
    return sorted({v for f in files for v in check_source(f.relative_to(package).as_posix(), f.read_text())})


def check_source(file: str, source: str) -> list[Violation]:
    """Return the violations of one file, named relative to the package."""
    tree = ast.parse(source)
    found: list[Violation] = []

    def report(line: int, rule: str, text: str) -> None:
        found.append(Violation(file, line, rule, text))

    lines = source.count("\n")
    if lines > MAX_FILE_LINES:
        report(MAX_FILE_LINES, "file-length", f"{lines} lines; at most {MAX_FILE_LINES}")
    for line, rule, text in (
        *_check_imports(file, tree),
        *_check_local_imports(file, tree),
        *_check_calls(tree),
        *_check_handlers(file, tree),
        *_check_function_lengths(file, tree),
        *_check_docstrings(tree),
    ):
        report(line, rule, text)
    return found


Finding = tuple[int, str, str]


def module_name(file: str) -> str:
    """Return the module of a file named relative to the package: `utils/__init__.py` is `headrace.utils`."""
    parts = PurePosixPath(file).with_suffix("").parts
    return ".".join(("headrace", *(parts[:-1] if parts[-1] == "__init__" else parts)))


def layer_of(module: str) -> int | None:
    """Return the layer of a headrace module; None if it is in none."""
    parts = module.split(".")
    if len(parts) == 1:
        return LAYERS[module]
    prefixes = (".".join(parts[:n]) for n in range(len(parts), 1, -1))
    return next((LAYERS[p] for p in prefixes if p in LAYERS), None)


def _within(module: str, prefix: str) -> bool:
    return module == prefix or module.startswith(f"{prefix}.")


def _imported(node: ast.AST, file: str) -> list[str]:
    """Return the modules that a statement imports; `from headrace import x` counts as `headrace.x`."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            package = ("headrace", *PurePosixPath(file).parent.parts)
            kept = package[: len(package) - node.level + 1]
            base = ".".join((*kept, base) if base else kept)
        if base == "headrace":
            return [
                f"headrace.{a.name}" if layer_of(f"headrace.{a.name}") is not None else base
                for a in node.names
            ]
        return [base]
    if isinstance(node, ast.Call) and ast.unparse(node.func) in (
        "importlib.import_module",
        "import_module",
        "resolve_name",
        "pkgutil.resolve_name",
        "__import__",
        "load_optional",
    ):
        argument = node.args[0] if node.args else None
        return (
            [argument.value]
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
            else ["?"]
        )
    return []


def _check_imports(file: str, tree: ast.Module) -> Iterator[Finding]:
    importer = module_name(file)
    layer = layer_of(importer)
    if layer is None:
        yield 1, "layer", f"{importer} is in no layer; add it to LAYERS"
        return
    for node in ast.walk(tree):
        for module in _imported(node, file):
            problem = _import_problem(importer, layer, module)
            if problem and not (module == "?" and file in COMPUTED_IMPORTS):
                yield node.lineno, "layer", problem  # type: ignore[attr-defined]


def _import_problem(importer: str, layer: int, module: str) -> str | None:
    root = module.split(".")[0]
    if root == "headrace":
        target = layer_of(module)
        if target is None:
            return f"{module} is in no layer"
        return f"{importer} (L{layer}) imports {module} (L{target})" if target > layer else None
    if root in ONLY_IN:
        allowed = any(_within(importer, home) for home in ONLY_IN[root])
        return None if allowed else f"{root} belongs into {' and '.join(ONLY_IN[root])}"
    if root in sys.stdlib_module_names:
        return None
    if root not in LOWEST_LAYER:
        return f"{root} is not a known dependency; add it to LOWEST_LAYER"
    lowest = LOWEST_LAYER[root]
    return f"{importer} (L{layer}) imports {root}, which starts at L{lowest}" if layer < lowest else None


def local_imports(package: Path) -> set[tuple[str, str]]:
    """Return every import inside a function, as (file, module)."""
    files = {f.relative_to(package).as_posix(): ast.parse(f.read_text()) for f in package.rglob("*.py")}
    return {(file, module) for file, tree in files.items() for _, module, _ in _local_imports(file, tree)}


def import_circle(package: Path) -> list[str]:
    """Return modules that import each other in a circle, those imported for type checking alone too; empty: none."""
    sources = {module_name(f.relative_to(package).as_posix()): f for f in package.rglob("*.py")}
    edges = {module: set(_targets(file, package, sources)) - {module} for module, file in sources.items()}
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def _targets(file: Path, package: Path, modules: Collection[str]) -> Iterator[str]:
    """Yield the modules that a file imports at its top level; of `from package import module`, the module."""
    name = file.relative_to(package).as_posix()
    for node in ast.walk(ast.parse(file.read_text())):
        for base in _imported(node, name) if isinstance(node, ast.Import | ast.ImportFrom) else ():
            inner = [f"{base}.{a.name}" for a in node.names] if isinstance(node, ast.ImportFrom) else []
            found = [module for module in inner if module in modules]
            yield from found or ([base] if base in modules else [])


def packages_from_outside(package: Path) -> set[str]:
    """Return what the package's files import that is neither theirs nor Python's."""
    roots = {
        module.split(".")[0]
        for f in package.rglob("*.py")
        for node in ast.walk(ast.parse(f.read_text()))
        for module in _imported(node, f.relative_to(package).as_posix())
    }
    return roots - sys.stdlib_module_names - {"headrace", "?"}


def _local_imports(file: str, tree: ast.Module) -> Iterator[Finding]:
    for function in _functions(tree):
        for node in ast.walk(function):
            for module in _imported(node, file):
                yield node.lineno, module, function.name  # type: ignore[attr-defined]


def _check_local_imports(file: str, tree: ast.Module) -> Iterator[Finding]:
    for line, module, function in _local_imports(file, tree):
        if (file, module) not in LOCAL_IMPORTS and not (module == "?" and file in COMPUTED_IMPORTS):
            yield line, "local-import", f"{module} inside {function}"


def _check_calls(tree: ast.Module) -> Iterator[Finding]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name == "print":
                yield node.lineno, "print", "print() in the package"
            if name.endswith(".cuda") and name != "torch.cuda":
                yield node.lineno, "cuda", f"{name}(): the device comes from the model or the mesh"
            if name.split(".")[-1] == "suppress" and any(_is_broad(arg) for arg in node.args):
                yield node.lineno, "broad-except", "suppress() of every exception"


def broad_excepts(package: Path) -> set[tuple[str, str]]:
    """Return every handler of all exceptions, as (file, function)."""
    files = {f.relative_to(package).as_posix(): ast.parse(f.read_text()) for f in package.rglob("*.py")}
    return {(file, function) for file, tree in files.items() for _, function in _broad_excepts(tree)}


def _broad_excepts(node: ast.AST, function: str = "") -> Iterator[tuple[int, str]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ExceptHandler) and _is_broad(child.type):
            yield child.lineno, function
        yield from _broad_excepts(child, child.name if isinstance(child, Function) else function)


def _check_handlers(file: str, tree: ast.Module) -> Iterator[Finding]:
    for line, function in _broad_excepts(tree):
        if (file, function) not in BROAD_EXCEPTS:
            yield line, "broad-except", "name the exceptions that are expected"


def _is_broad(kind: ast.expr | None) -> bool:
    if kind is None:
        return True
    if isinstance(kind, ast.Tuple):
        return any(_is_broad(item) for item in kind.elts)
    return ast.unparse(kind).removeprefix("builtins.") in ("Exception", "BaseException")


def _check_function_lengths(file: str, tree: ast.Module) -> Iterator[Finding]:
    limit = MAX_FUNCTION_LINES
    for function in _functions(tree):
        lines = (function.end_lineno or function.lineno) - function.lineno + 1
        if lines > limit:
            yield function.lineno, "function-length", f"{function.name} has {lines} lines; at most {limit}"


def _check_docstrings(tree: ast.Module) -> Iterator[Finding]:
    """Yield the public classes without a docstring; a function has one where it says more than the name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and not ast.get_docstring(node):
            yield node.lineno, "docstring", f"{node.name} has none"


def _functions(tree: ast.Module) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, Function))
