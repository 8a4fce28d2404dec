"""Long lists, a page at a time: `?limit=` rows after the one named by `?after=`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Generic, Literal, TypeVar

from fastapi import Query
from pydantic import BaseModel

Item = TypeVar("Item")
Row = TypeVar("Row")

Limit = Annotated[int, Query(ge=1, le=1000, description="How many at most.")]
PRINTABLE = r"^[^\x00-\x1f\x7f]*$"  # text without control characters; PostgreSQL stores no NUL
After = Annotated[str | None, Query(max_length=64, pattern=PRINTABLE, description="The last one of the page before.")]


class Page(BaseModel, Generic[Item]):
    object: Literal["list"] = "list"
    data: list[Item]
    has_more: bool


def cut(rows: Sequence[Row], limit: int) -> tuple[Sequence[Row], bool]:
    """A page out of up to `limit + 1` rows, and whether more follow."""
    return rows[:limit], len(rows) > limit
