"""The one thing that pyproject.toml cannot say: a C extension, left out where there is no compiler."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "headrace.distributed._ragged",
            ["src/headrace/distributed/_ragged.c"],
            extra_compile_args=["-O3"],
            optional=True,
        )
    ]
)
