"""Keeps the garbage collector away from what a process holds for all its life."""

from __future__ import annotations

import gc


def spare_collector() -> None:
    """Exempt everything alive now from garbage collections; call it once, when the process is ready to serve.

    A full collection walks all imported modules: with torch or transformers among them that is most of a second (it
    was measured), in which no step is made and no probe is answered.
    """
    gc.collect()
    gc.freeze()
