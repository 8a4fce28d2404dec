"""What of this process's environment an engine process may see: no keys, no passwords, no settings."""

from __future__ import annotations

from collections.abc import Mapping

_NAMES = frozenset(
    {
        "HOME",
        "LANG",
        "LANGUAGE",
        "LD_LIBRARY_PATH",
        "LD_PRELOAD",  # allocators such as jemalloc come this way
        "PATH",
        "PYTHONPATH",
        "PYTHONWARNINGS",
        "SSL_CERT_DIR",
        "SSL_CERT_FILE",
        "TMPDIR",
        "TZ",
        "USER",
        "HF_HOME",
        "HF_HUB_OFFLINE",
        "TRANSFORMERS_OFFLINE",
        "TRITON_CACHE_DIR",
        "XDG_CACHE_HOME",
    }
)
_PREFIXES = ("LC_", "OMP_", "GOMP_", "KMP_", "MKL_", "CUDA_", "NVIDIA_")
_DEFAULTS = {
    # Threads that spin at a barrier wait for a descheduled one: beside one busy process a loop got 10 to 40 times
    # slower (measured).
    "OMP_WAIT_POLICY": "passive",
    "TOKENIZERS_PARALLELISM": "false",
}


def child_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The allowed variables of `environ`, and the defaults that an engine needs."""
    return _DEFAULTS | {name: value for name, value in environ.items() if name in _NAMES or name.startswith(_PREFIXES)}
