"""What was checked and measured: printed line by line as it comes, kept as JSON and Markdown at the end."""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

COLUMNS = ("section", "case", "result", "passed")


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table. `figures` are numbers under names with their unit, such as `time_us`."""

    section: str
    case: str
    passed: bool
    figures: dict[str, float | str] = field(default_factory=dict)

    @property
    def cells(self) -> tuple[str, ...]:
        result = ", ".join(f"{name} {_shown(value)}" for name, value in self.figures.items())
        return self.section, self.case, result, "yes" if self.passed else "NO"


class Report:
    """Collects rows. A section that fails becomes a row, and the next one is run."""

    def __init__(self, *, budget_s: float) -> None:
        self.rows: list[Row] = []
        self._start = time.monotonic()
        self._budget_s = budget_s

    @property
    def passed(self) -> bool:
        return bool(self.rows) and all(row.passed for row in self.rows)

    def check_time(self) -> None:
        """Raise TimeoutError when the time is up: what was found so far is still reported."""
        elapsed = time.monotonic() - self._start
        if elapsed > self._budget_s:
            raise TimeoutError(f"{elapsed:.0f} s have passed; the rest of this section was not run")

    def add(self, section: str, case: str, *, passed: bool = True, **figures: float | str) -> None:
        row = Row(section=section, case=case, passed=passed, figures=figures)
        self.rows.append(row)
        say(f"{time.monotonic() - self._start:6.1f} s  " + " | ".join(row.cells))

    def run(self, section: str, work: Callable[[], None]) -> None:
        try:
            self.check_time()
            work()
        except Exception as error:  # the edge of a section: the others are independent of it
            say(traceback.format_exc())
            self.add(section, "the section as a whole", passed=False, error=f"{type(error).__name__}: {error}"[:300])

    def markdown(self) -> str:
        lines = ["| " + " | ".join(COLUMNS) + " |", "|" + " --- |" * len(COLUMNS)]
        lines += ["| " + " | ".join(cell.replace("|", "/") for cell in row.cells) + " |" for row in self.rows]
        return "\n".join(lines) + "\n"

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "gpu_check.md").write_text(self.markdown())
        data = {"passed": self.passed, "rows": [asdict(row) for row in self.rows]}
        (folder / "gpu_check.json").write_text(json.dumps(data, indent=2))


def _shown(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"
