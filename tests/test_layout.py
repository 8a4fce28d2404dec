"""The top level is five namespace folders: an `__init__.py` in one would hide another module of that name."""

from __future__ import annotations

import platform
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("platform", "engine", "kernels", "adapters", "migrations")


def test_top_level_folders_are_namespaces() -> None:
    # platform/__init__.py would hide the standard library's module, kernels/__init__.py Hugging Face's package
    assert [name for name in PACKAGES if (ROOT / name / "__init__.py").exists()] == []
    assert list((ROOT / "tests").rglob("__init__.py")) == []
    assert platform.system() != ""


def test_nested_packages_have_an_init() -> None:
    # a folder without one works in the checkout and is missing from the wheel
    folders = {
        path.parent
        for name in PACKAGES
        for path in (ROOT / name).rglob("*.py")
        if path.parent != ROOT / name and "versions" not in path.parts
    }
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []
