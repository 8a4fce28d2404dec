"""The validator's process: it may die, uploads may not hang."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from loraplex.adapters.errors import Reason
from loraplex.platform.adapters import validator as validator_module
from loraplex.platform.adapters.validator import Validator
from loraplex.platform.errors import ServiceUnavailableError
from tests.platform.adapters.helpers import RegistryWorld, adapter_files
from tests.platform.adapters.test_versions import assert_nothing_is_left


@pytest.fixture
async def validator() -> AsyncIterator[Validator]:
    opened = Validator()
    yield opened
    await opened.aclose()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, content in adapter_files().items():
        (tmp_path / name).write_bytes(content)
    return tmp_path


async def test_one_process_of_low_priority_serves_all_checks(validator: Validator, folder: Path) -> None:
    assert await asyncio.gather(*(validator.check(folder) for _ in range(4))) == [[]] * 4
    assert validator.pid is not None
    ours, its = (os.getpriority(os.PRIO_PROCESS, pid) for pid in (os.getpid(), validator.pid))
    assert its == min(ours + 10, 19)


def test_the_process_imports_neither_torch_nor_the_web() -> None:
    code = "import sys, loraplex.platform.adapters.validator_process; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-I", "-c", code], check=True, capture_output=True, text=True).stdout
    assert {"numpy", "loraplex.adapters.values"} <= set(modules.split())
    assert not {"torch", "fastapi", "sqlalchemy"} & set(modules.split())


async def test_the_process_sees_no_secret(validator: Validator, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORAPLEX_SECRET_KEY", "must stay here")
    await validator.check(folder)
    environment = Path(f"/proc/{validator.pid}/environ")
    if not environment.exists():
        pytest.skip("this system shows no process's environment")
    assert b"must stay here" not in environment.read_bytes()


async def test_a_dead_validator_is_replaced(validator: Validator, folder: Path) -> None:
    await validator.check(folder)
    pid = validator.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ServiceUnavailableError, match="send it again"):
        await validator.check(folder)
    assert await validator.check(folder) == []
    assert validator.pid != pid


async def test_a_validator_that_does_not_answer_in_time_is_ended(folder: Path) -> None:
    validator = Validator(timeout_s=0.01)  # a process takes longer to start
    with pytest.raises(ServiceUnavailableError, match="send it again"):
        await validator.check(folder)
    assert validator.pid is None
    await validator.aclose()


async def test_a_cancelled_check_does_not_answer_the_next(validator: Validator, folder: Path) -> None:
    await validator.check(folder)
    tensors = {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": np.full((4, 16), np.inf, np.float32)}
    poisoned = folder / "poisoned"
    poisoned.mkdir()
    (poisoned / "adapter_config.json").write_bytes(adapter_files()["adapter_config.json"])
    (poisoned / "adapter_model.safetensors").write_bytes(safetensors.numpy.save(tensors))
    task = asyncio.create_task(validator.check(poisoned))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert await validator.check(folder) == []
    assert [reason.code for reason in await validator.check(poisoned)] == ["values_not_finite"]


async def test_an_upload_whose_validator_dies_is_a_503_and_leaves_nothing(
    world: RegistryWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ask_a_dying_process(process: Process, folder: Path) -> list[Reason]:
        process.kill()
        return await ask(process, folder)

    ask = validator_module._ask
    with monkeypatch.context() as patched:
        patched.setattr(validator_module, "_ask", ask_a_dying_process)
        assert (await world.upload("sql")).status_code == 503
    await assert_nothing_is_left(world)
    assert (await world.upload("sql")).json()["version"] == 1
