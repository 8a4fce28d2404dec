"""The validator's child: reads folders from stdin, answers with reasons on stdout, ends with its parent."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import BinaryIO

import msgspec

from loraplex.adapters.errors import AdapterRefusedError, Reason
from loraplex.adapters.values import check_values

_NICENESS = 10


def main() -> None:
    os.nice(_NICENESS)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever a library prints is no answer
    serve(sys.stdin.buffer, answers)


def serve(questions: BinaryIO, answers: BinaryIO) -> None:
    """Answer until the parent closes its end. A message is 8 bytes of length (big-endian) and the bytes."""
    while header := questions.read(8):
        folder = Path(questions.read(int.from_bytes(header, "big")).decode())
        answer = msgspec.msgpack.encode(reasons_against(folder))
        answers.write(len(answer).to_bytes(8, "big") + answer)
        answers.flush()


def reasons_against(folder: Path) -> list[Reason]:
    try:
        return check_values(folder)
    except AdapterRefusedError as refusal:
        return list(refusal.reasons)


if __name__ == "__main__":
    main()
