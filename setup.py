"""Packaging: ``passes/``, ``backends/`` and ``tools/`` are installed as ``hgc.passes``, ``hgc.backends`` and ``hgc.tools``.

Only ``hgc`` lands in site-packages. ``pyproject.toml`` makes editable installs use PEP 660, which honours this mapping.
"""

from pathlib import Path

from setuptools import find_packages, setup

MAPPED = ("passes", "backends", "tools")
HERE = Path(__file__).parent

packages = find_packages(include=["hgc", "hgc.*"])
for folder in MAPPED:
    packages += [f"hgc.{folder}", *(f"hgc.{folder}.{name}" for name in find_packages(folder))]

setup(
    name="hgc",
    version="0.1.0",
    description="A compiler for distributed PyTorch training: plans, verifies and writes the program that torchrun runs",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    classifiers=["Programming Language :: Python :: 3 :: Only", "Intended Audience :: Science/Research", "Typing :: Typed"],
    python_requires=">=3.11",
    packages=packages,
    package_dir={f"hgc.{folder}": folder for folder in MAPPED},
    package_data={"hgc": ["py.typed"], "hgc.cost": ["presets/*/*.json"]},
    entry_points={"console_scripts": ["hgc = hgc.tools.cli:main"]},
    install_requires=["torch>=2.11", "numpy", "sympy", "cvxpy", "graphviz", "rich"],
    extras_require={
        "hf": ["transformers>=5.0"],
        "dev": ["transformers>=5.0", "pytest", "pytest-xdist", "hypothesis", "sybil", "ruff", "mypy", "import-linter"],
    },
)
