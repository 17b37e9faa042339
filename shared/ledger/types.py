"""Column types that both databases share."""

from __future__ import annotations

from typing import Any

import msgspec
from sqlalchemy import JSON, Dialect
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.types import TypeDecorator

Json = JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")


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
