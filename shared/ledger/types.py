"""Column types that both databases share."""

from __future__ import annotations

from typing import Any

import msgspec
from sqlalchemy import JSON, Dialect, Text
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.types import TypeDecorator

from shared import storable

Json = JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")


class PlainText(TypeDecorator[str]):
    """Text that both databases keep (`shared.storable`)."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        return None if value is None else storable.text(value)


class StructJson(TypeDecorator[Any]):
    """A msgspec structure of the contracts as JSON: `StructJson(Ref)`. NULL is None."""

    impl = Json
    cache_ok = True

    def __init__(self, struct: type[msgspec.Struct]) -> None:
        super().__init__()
        self.struct = struct

    def process_bind_param(self, value: Any, dialect: Dialect) -> Any:
        return None if value is None else msgspec.to_builtins(value)

    def process_result_value(self, value: Any, dialect: Dialect) -> Any:
        return None if value is None else msgspec.convert(value, self.struct)
