"""The C extension: that it is built with the package, what it does, and that nothing needs it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from headrace.data_plane.routes_codec import pack_routes
from headrace.distributed.ragged_kernel import load_kernel

ROOT = Path(__file__).parents[2]
PROBE = """
import torch
from headrace.distributed.ragged import RowLayout
from headrace.distributed.ragged_kernel import load_kernel
print(load_kernel() is not None, RowLayout([1, 2], None).pad(torch.tensor([1, 2, 3]), 9).tolist())
"""
needs_kernel = pytest.mark.skipif(load_kernel() is None, reason="the C extension was not built")


def build(folder: Path, **environment: str) -> list[Path]:
    """Build the extension into a folder, and return the libraries there."""
    pytest.importorskip("setuptools")
    places = ("--build-lib", str(folder / "lib"), "--build-temp", str(folder / "temp"))
    command = [sys.executable, "setup.py", "-q", "build_ext", *places]
    subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, check=True)
    return list(folder.glob("lib/**/_ragged.*"))


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_the_extension_is_built_with_the_package(tmp_path: Path) -> None:
    (library,) = build(tmp_path)
    code = (
        "import importlib.util as u, sys; s = u.spec_from_file_location('_ragged', sys.argv[1]); "
        "m = u.module_from_spec(s); s.loader.exec_module(m); print(m.narrow(0, 4, 0, 1, 9, 0, 1))"
    )
    shown = subprocess.run([sys.executable, "-c", code, str(library)], capture_output=True, text=True)
    assert shown.stdout == "True\n", shown.stderr


def test_without_a_compiler_the_package_is_built_all_the_same(tmp_path: Path) -> None:
    assert build(tmp_path, CC="/nowhere/cc") == []


def test_without_it_rows_are_padded_all_the_same() -> None:
    environment = {**os.environ, "HEADRACE_KERNEL": "0"}
    done = subprocess.run([sys.executable, "-c", PROBE], env=environment, capture_output=True, text=True)
    assert done.stdout == "False [[1, 9], [2, 3]]\n", done.stderr


@needs_kernel
@pytest.mark.parametrize("experts", [128, 256, 300, 32_768])
@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
def test_narrowing_gives_what_a_cast_gives_and_finds_every_id_out_of_range(
    experts: int, dtype: torch.dtype
) -> None:
    kernel = load_kernel()
    assert kernel is not None
    ids = torch.randint(-1, experts, (5001,), dtype=dtype, generator=torch.Generator().manual_seed(experts))
    ids[0], ids[-1] = -1, experts - 1
    row = (len(ids), 1)
    out = torch.empty(len(ids), dtype=torch.uint8 if experts <= 256 else torch.int16)
    sizes = ids.element_size(), out.element_size()
    if sizes[0] == sizes[1]:
        pytest.skip("nothing to narrow")
    for wrong, place in (
        (None, 0),
        (-2, 0),
        (-2, 5000),
        (experts, 17),
        (torch.iinfo(dtype).min, 4999),
        (torch.iinfo(dtype).max, 1),
    ):
        given = ids.clone()
        if wrong is not None and wrong <= torch.iinfo(dtype).max:
            given[place] = wrong
        fits = bool(((given >= -1) & (given < experts)).all())
        assert kernel.narrow(given.data_ptr(), sizes[0], *row, experts, out.data_ptr(), sizes[1]) is fits
        if fits:
            assert torch.equal(out, given.to(out.dtype))


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
def test_missing_rows_keep_their_mark_when_routes_are_narrowed(dtype: torch.dtype) -> None:
    routes = torch.tensor([[[3, 1]], [[-1, -1]], [[0, 255]]], dtype=dtype)
    assert pack_routes([routes[:2], routes[2:]], num_experts=256).tolist() == [
        [[3, 1]],
        [[255, 255]],
        [[0, 255]],
    ]


@needs_kernel
@pytest.mark.parametrize("width", [2, 3, 8, 2048])
def test_narrowing_finds_every_row_that_is_partly_missing(width: int) -> None:
    kernel = load_kernel()
    assert kernel is not None
    rows = 3 + 6000 // width
    ids = torch.arange(rows * width, dtype=torch.int32).remainder_(250).view(rows, width)
    ids[1] = ids[-1] = -1
    out = torch.empty(rows, width, dtype=torch.uint8)
    sizes = (rows, width, 256, out.data_ptr(), 1)
    assert not kernel.narrow(ids.data_ptr(), 4, 1, 2049, 256, out.data_ptr(), 1)
    assert kernel.narrow(ids.data_ptr(), 4, *sizes)
    assert torch.equal(out, ids.to(torch.uint8))
    for row, place in ((0, 0), (0, width - 1), (1, 0), (rows - 2, width // 2), (rows - 1, width - 1)):
        given = ids.clone()
        given[row, place] = 7 if given[row, place] < 0 else -1
        assert not kernel.narrow(given.data_ptr(), 4, *sizes)


@pytest.mark.parametrize("size", [0, 1, 15, 16, 63, 64, 65, 1000, 70_003])
@pytest.mark.parametrize("shift", [0, 1, 7, 16])
def test_a_streamed_copy_writes_these_bytes_and_no_others(size: int, shift: int) -> None:
    kernel = load_kernel()
    if kernel is None:
        pytest.skip("the C extension was not built")
    source = torch.randint(0, 256, (size + 64,), dtype=torch.uint8)
    out = torch.full((size + 64,), 7, dtype=torch.uint8)
    kernel.copy(source[3:].data_ptr(), size, out[shift:].data_ptr())
    assert torch.equal(out[shift : shift + size], source[3 : 3 + size])
    assert torch.all(out[:shift] == 7)
    assert torch.all(out[shift + size :] == 7)
