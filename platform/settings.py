"""Every setting of LoRAplex. The only reader of the environment: each setting is also `LORAPLEX_<NAME>`.

`DataSettings` is what the host commands (tenant, key, db) need; `Settings` adds what `loraplex serve` needs. The
descriptions are the help of the command line and the table in the documentation.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, ValidationError, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from loraplex.engine.config import GIB, DType, EngineConfig
from loraplex.engine.errors import ConfigurationError

ENV_PREFIX = "LORAPLEX_"

logger = logging.getLogger(__name__)

_CLIENT_VARIABLES = {"LORAPLEX_URL", "LORAPLEX_API_KEY"}  # where the commands that call a server find it

_VISIBLE_ASCII = re.compile(r"[\x21-\x7e]+")
_SERVED_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,199}")


def redact_url(url: str) -> str:
    """The URL as it may be logged: without its password, and without its query (which may hold secrets too)."""
    try:
        return make_url(url).set(query={}).render_as_string(hide_password=True)
    except ArgumentError:
        return "(not a URL)"


def _default_database_url(data: dict[str, Any]) -> SecretStr:
    return SecretStr(f"sqlite+aiosqlite:///{data['data_dir'] / 'loraplex.db'}")


def _default_store_url(data: dict[str, Any]) -> SecretStr:
    return SecretStr((data["data_dir"] / "store").as_uri())


def _default_served_name(data: dict[str, Any]) -> str:
    return Path(data["model"]).resolve().name


def _absolute(path: Path) -> Path:
    return path.expanduser().absolute()


def _check_admin_key(key: SecretStr) -> SecretStr:
    value = key.get_secret_value()
    if not 32 <= len(value) <= 200 or not _VISIBLE_ASCII.fullmatch(value):
        raise ValueError(f"must be 32 to 200 visible ASCII characters without spaces; {len(value)} characters given")
    return key


def _check_served_name(name: str) -> str:
    if not _SERVED_NAME.fullmatch(name):
        raise ValueError(
            f"{name!r} cannot be the base's name in the API; give --served-model-name of letters, digits, "
            "'.', '_', '-' and '/' (':' and '@' select adapters)"
        )
    return name


def _split_commas(value: object) -> object:
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return value


AbsolutePath = Annotated[Path, AfterValidator(_absolute)]


class DataSettings(BaseSettings):
    """Where this installation keeps its data, and the secret that its keys hang on."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, extra="forbid", frozen=True, env_ignore_empty=True)

    data_dir: AbsolutePath = Field(
        default=Path("~/.loraplex"), description="Folder of the database, the adapters and the secret key."
    )
    database_url: SecretStr = Field(
        default_factory=_default_database_url,
        description="Database: sqlite:///FILE or postgresql://USER:PASSWORD@HOST/NAME. "
        "Default: a file in the data folder.",
    )
    secret_key: SecretStr | None = Field(
        default=None,
        description="Secret that API keys and cache salts are derived from, at least 32 characters (64 hex digits are "
        "taken as 32 bytes). Must be given with PostgreSQL.",
    )
    secret_key_file: AbsolutePath | None = Field(
        default=None, description="File with the secret key. Default: secret.key in the data folder, made at need."
    )

    @classmethod
    def load(cls, **given: Any) -> Self:
        """Settings from `given` (None = not given), then the environment, then the defaults.

        Raises ConfigurationError with every fault and, for each, the flag and the variable that sets it.
        """
        for name in unknown_environment():
            logger.warning("the environment variable %s sets nothing; is it mistyped?", name)
        try:
            return cls(**{name: value for name, value in given.items() if value is not None})
        except ValidationError as error:
            raise _configuration_error(error) from None


class Settings(DataSettings):
    """Everything that `loraplex serve` can be told."""

    model: str = Field(description="The base model: a Hugging Face folder, or org/name on the hub.")
    served_model_name: Annotated[str, AfterValidator(_check_served_name)] = Field(
        default_factory=_default_served_name, description="The base's name in the API. Default: the folder's name."
    )
    host: str = Field(default="127.0.0.1", description="Address to listen on.")
    port: int = Field(default=8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")

    dtype: DType = Field(default="auto", description="Type of weights and activations; auto = the checkpoint's.")
    device: str = Field(default="cpu", description="Torch device of the engine.")
    max_model_len: int | None = Field(
        default=None, ge=1, description="Longest prompt plus output, in tokens. Default: the model's."
    )
    max_num_seqs: int = Field(default=64, ge=1, description="Most requests in one step.")
    max_num_batched_tokens: int = Field(default=2048, ge=1, description="Most tokens computed in one step.")
    block_size: int = Field(default=16, ge=1, description="Tokens in a block of the KV cache.")
    gpu_memory_utilization: float = Field(
        default=0.9, gt=0, le=1, description="Share of the device's memory for weights, adapters and KV cache."
    )
    kv_cache_memory_gib: float | None = Field(
        default=None, gt=0, description="Memory of the KV cache in GiB, instead of a share of the device."
    )
    adapter_slots: int | None = Field(
        default=None, ge=1, description="Adapter slots in each of the two spaces (attention, MLP)."
    )
    adapter_memory_gib: float | None = Field(
        default=None, gt=0, description="Memory of the adapter slots in GiB, instead of their number."
    )
    adapter_host_memory_gib: float = Field(default=4.0, gt=0, description="Host memory for adapters that wait, in GiB.")
    slot_rank: int = Field(default=8, ge=1, description="Rank rows in a slot.")
    lora_dtype: DType = Field(
        default="auto",
        description="Type of the adapters in their slots; auto = float32, which holds every adapter as it is. "
        "bfloat16 takes half the memory, and refuses adapters that it would round.",
    )
    max_lora_rank: int = Field(default=256, ge=1, description="Highest rank of an adapter that is accepted.")
    enforce_eager: bool = Field(default=False, description="Run without CUDA graphs.")
    num_threads: int | None = Field(
        default=None, ge=1, description="Threads that the engine computes with; as a rule its physical cores."
    )
    skip_tokenizer_init: bool = Field(
        default=False, description="Serve a folder without a tokenizer: prompts are token ids, answers too."
    )
    tensor_parallel_size: int = Field(default=1, ge=1, description="Only 1 is supported.")

    store_url: SecretStr = Field(
        default_factory=_default_store_url,
        description="Store of the adapters' files: file:///FOLDER or s3://BUCKET/PREFIX. Default: in the data folder.",
    )
    max_upload_mib: int = Field(default=2048, ge=1, description="Largest upload of one adapter version, in MiB.")
    admin_key: Annotated[SecretStr, AfterValidator(_check_admin_key)] | None = Field(
        default=None,
        description="At the first start: the platform admin's key, 32 to 200 visible ASCII characters, "
        "instead of a generated one.",
    )
    cors_origin: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split_commas)] = Field(
        default=(), description="Origins that browsers may call from; comma-separated or repeated. None by default."
    )
    metrics_public: bool = Field(default=False, description="Serve /metrics without a key.")
    shutdown_grace_s: float = Field(
        default=30.0, ge=0, description="Seconds that running requests get to finish after SIGTERM."
    )

    @model_validator(mode="after")
    def _check_together(self) -> Settings:
        if self.tensor_parallel_size > 1:
            raise ValueError(f"tensor_parallel_size is {self.tensor_parallel_size}; only 1 is supported for now")
        if self.kv_cache_memory_gib is not None and "gpu_memory_utilization" in self.model_fields_set:
            raise ValueError("give kv_cache_memory_gib or gpu_memory_utilization, not both")
        return self

    def engine_config(self) -> EngineConfig:
        """What the engine is told. Raises ConfigurationError."""
        return EngineConfig(
            model=self.model,
            dtype=self.dtype,
            device=self.device,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            block_size=self.block_size,
            gpu_memory_utilization=self.gpu_memory_utilization,
            kv_cache_memory_bytes=_gib(self.kv_cache_memory_gib),
            adapter_slots=self.adapter_slots,
            adapter_memory_bytes=_gib(self.adapter_memory_gib),
            slot_rank=self.slot_rank,
            lora_dtype=self.lora_dtype,
            max_lora_rank=self.max_lora_rank,
            adapter_host_memory_bytes=int(self.adapter_host_memory_gib * GIB),
            enforce_eager=self.enforce_eager,
            num_threads=self.num_threads,
        )


def unknown_environment() -> list[str]:
    """Variables with our prefix that set nothing: most likely mistyped."""
    known = {f"{ENV_PREFIX}{name.upper()}" for name in Settings.model_fields} | _CLIENT_VARIABLES
    return sorted(name for name in os.environ if name.startswith(ENV_PREFIX) and name not in known)


def _gib(value: float | None) -> int | None:
    return None if value is None else int(value * GIB)


def _configuration_error(error: ValidationError) -> ConfigurationError:
    faults = [fault for fault in error.errors() if fault["type"] != "default_factory_not_called"]
    lines = [_describe(str(fault["loc"][0]) if fault["loc"] else None, fault["msg"]) for fault in faults]
    return ConfigurationError("; ".join(lines), param=str(faults[0]["loc"][0]) if faults[0]["loc"] else None)


def _describe(name: str | None, message: str) -> str:
    text = message.removeprefix("Value error, ")
    if name is None:
        return text
    return f"--{name.replace('_', '-')} ({ENV_PREFIX}{name.upper()}): {text}"
