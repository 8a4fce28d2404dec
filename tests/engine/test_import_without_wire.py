"""A GPU machine may have torch and little else: the engine itself needs no serialisation and no sockets."""

from __future__ import annotations

import subprocess
import sys

BLOCKED = ("fastapi", "sqlalchemy", "msgspec", "zmq")

_SCRIPT = f"""
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {BLOCKED!r}:
            raise ModuleNotFoundError(f"{{name}} is blocked", name=name)

sys.meta_path.insert(0, Block())
import loraplex.engine.assembly
import loraplex.engine.models.decoder_builder
"""


def test_the_engine_imports_without_the_packages_of_the_platform() -> None:
    done = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
