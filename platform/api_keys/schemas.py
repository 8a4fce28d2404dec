"""API keys as the API shows and takes them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, Field

from loraplex.platform.api_keys.principal import Scope
from loraplex.platform.api_keys.service import CreatedKey
from loraplex.platform.db.models import ApiKey
from loraplex.platform.paging import PRINTABLE


def _to_utc(moment: datetime) -> datetime:
    try:
        return moment.astimezone(UTC)
    except OverflowError:
        raise ValueError("lies outside the years 1 to 9999 in UTC") from None


class CreateKey(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str = Field(min_length=1, max_length=100, pattern=PRINTABLE, description="What the key is for.")
    scopes: list[Scope] = Field(min_length=1, description="What it may do; only scopes that the caller holds.")
    expires_at: Annotated[AwareDatetime, AfterValidator(_to_utc)] | None = Field(
        default=None, description="When it stops working, with a UTC offset."
    )


class KeyView(BaseModel):
    id: str
    name: str
    prefix: str = Field(description="The first 12 characters of the key.")
    scopes: list[Scope]
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None

    @classmethod
    def of(cls, key: ApiKey) -> KeyView:
        return cls.model_validate(key, from_attributes=True)


class CreatedKeyView(KeyView):
    secret: str = Field(description="The key itself. It is shown this once and cannot be had again.")

    @classmethod
    def of_created(cls, created: CreatedKey) -> CreatedKeyView:
        return cls(**KeyView.of(created.key).model_dump(), secret=created.secret)
