"""Rows of a run's files: lists of plain dicts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from dora import foreign
from dora.extras import require_extra

if TYPE_CHECKING:
    import pyarrow


class Rows(list[dict[str, Any]]):
    """A list of dicts, as `pandas.DataFrame(rows)` and `polars.DataFrame(rows)` take it."""

    def to_arrow(self) -> pyarrow.Table:
        """Return an Arrow table with a column for every key; a value of mixed types becomes its JSON text. Needs
        pyarrow."""
        require_extra("pyarrow", field="to_arrow()")
        import pyarrow as pa

        def column(name: str) -> Any:
            values = [row.get(name) for row in self]
            try:
                return pa.array(values)
            except (pa.ArrowException, TypeError, ValueError, OverflowError):
                return pa.array([None if value is None else json.dumps(value) for value in values])

        return pa.table({name: column(name) for name in dict.fromkeys(name for row in self for name in row)})


def read_rows(path: Path, *, max_bytes: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file of JSON lines, without damaged ones; none if the file is missing."""
    with suppress(FileNotFoundError):
        for line in foreign.read_lines(path, max_bytes=max_bytes):
            with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                if isinstance(row := msgspec.json.decode(line), dict):
                    yield row
