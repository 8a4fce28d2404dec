"""One server for all tests that leave it as they found it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.server import Server, running_server
from tests.helpers import make_adapter, make_byte_level_tokenizer, make_checkpoint

ENGINE_FLAGS = ("--max-num-seqs", "32", "--max-num-batched-tokens", "128", "--kv-cache-memory-gib", "0.05")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_checkpoint(folder, vocab_size=260, max_position_embeddings=512, eos_token_id=259)
    return make_byte_level_tokenizer(folder, merges=(("h", "e"), ("l", "l"), ("he", "ll")))


@pytest.fixture(scope="session")
def adapter_folders(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Ten adapters of ranks 1 to 64, loud enough to change greedy tokens."""
    root = tmp_path_factory.mktemp("adapters")
    ranks = (1, 2, 4, 8, 8, 12, 16, 24, 32, 64)
    return {
        f"a{index}": make_adapter(root / f"a{index}", model, seed=index, r=rank, lora_alpha=rank)
        for index, rank in enumerate(ranks)
    }


@pytest.fixture(scope="session")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_server(model, tmp_path_factory.mktemp("data"), "--adapter-slots", "16", *ENGINE_FLAGS) as running:
        yield running


@pytest.fixture(scope="session")
def tenant(server: Server, adapter_folders: dict[str, Path]) -> Iterator[httpx.Client]:
    """Tenant `acme` with adapters a0 to a9, and its key."""
    with server.create_tenant("acme") as client:
        for name, folder in adapter_folders.items():
            server.upload("acme", name, folder)
        yield client
