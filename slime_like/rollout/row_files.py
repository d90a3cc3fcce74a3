"""Rows of JSONL and Parquet files as dicts, one after the other: neither the file nor its rows are held."""

from __future__ import annotations

import datetime
import decimal
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from slime_like.errors import DataError

_PARQUET = ".parquet"
_BATCH_ROWS = 256  # conversations may be long


class FileRow(NamedTuple):
    """One row of a file, and how an error names it."""

    number: int  # from 1: the line, or the row of a Parquet file
    record: dict
    where: str


def row_name(file: str, number: int) -> str:
    """How a row of a file is called: `x.jsonl line 3`, `x.parquet row 3`."""
    return f"{file} {'row' if file.endswith(_PARQUET) else 'line'} {number}"


def read_rows(file: str, wanted: slice, needed: Mapping[str, str], optional: Sequence[str] = ()) -> Iterator[FileRow]:
    """The wanted rows in order; blank lines are no rows.

    needed: key -> the flag that names it; optional: keys that may be absent. Of a Parquet file only these columns are
    read; a null inside a struct is left out there, as Parquet cannot say that a key is absent. Raises DataError naming
    file and row, without a needed column also those that there are.
    """
    if file.endswith(_PARQUET):
        return _parquet_rows(file, wanted, needed, optional)
    return _json_rows(file, wanted)


def _json_rows(file: str, wanted: slice) -> Iterator[FileRow]:
    start, stop = wanted.start or 0, wanted.stop
    if start < 0 or (stop or 0) < 0:
        start, stop, _ = wanted.indices(sum(1 for _ in _lines(file)))
    is_empty = True
    for place, (number, line) in enumerate(_lines(file)):
        if stop is not None and place >= stop:
            break
        if place >= start:
            is_empty = False
            where = row_name(file, number)
            yield FileRow(number, _parse(_decode(line, number, where), where), where)
    if is_empty:
        raise _no_rows(file, wanted, sum(1 for _ in _lines(file)))


def _lines(file: str) -> Iterator[tuple[int, bytes]]:
    """(number from 1, line) of the lines that are not blank."""
    try:
        with open(file, "rb") as stream:
            for number, line in enumerate(stream, 1):
                if line.strip():
                    yield number, line
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}.") from None


def _decode(line: bytes, number: int, where: str) -> str:
    try:
        return line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        fix = f"a name that ends in {_PARQUET}" if line.startswith(b"PAR1") else "give a JSONL file"
        raise DataError(f"{where} is no UTF-8 text (byte {error.start}). Fix: {fix}.") from None


def _parse(line: str, where: str) -> dict:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is malformed JSON: {error}. It starts with {line.strip()[:60]!r}.") from None
    if not isinstance(record, dict):
        raise DataError(f"{where} is a JSON {type(record).__name__}, not an object with keys.")
    return record


def _no_rows(file: str, wanted: slice, count: int) -> DataError:
    if not count:
        return DataError(f"{file} is empty: it has no row.")
    ends = ["" if end is None else end for end in (wanted.start, wanted.stop)]
    return DataError(f"{file}: the slice [{ends[0]}:{ends[1]}] takes none of its {count} rows.")


def _parquet_rows(file: str, wanted: slice, needed: Mapping[str, str], optional: Sequence[str]) -> Iterator[FileRow]:
    import pyarrow
    import pyarrow.parquet

    try:
        with open(file, "rb") as stream, pyarrow.parquet.ParquetFile(stream, pre_buffer=False) as parquet:
            columns = _columns(file, parquet.schema_arrow.names, needed, optional)
            start, stop, _ = wanted.indices(parquet.metadata.num_rows)
            if start >= stop:
                raise _no_rows(file, wanted, parquet.metadata.num_rows)
            place = 0
            for group in range(parquet.num_row_groups):
                size = parquet.metadata.row_group(group).num_rows
                if place + size <= start or place >= stop:
                    place += size
                    continue
                for batch in parquet.iter_batches(_BATCH_ROWS, row_groups=[group], columns=columns):
                    first, last = max(start - place, 0), min(stop - place, batch.num_rows)
                    rows = batch.slice(first, max(last - first, 0)).to_pylist(maps_as_pydicts="strict")
                    for number, row in enumerate(rows, place + first + 1):
                        where = row_name(file, number)
                        yield FileRow(number, {name: _plain(row[name], name, where) for name in row}, where)
                    place += batch.num_rows
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror or error}.") from None  # pages of it may be torn
    except (pyarrow.ArrowException, KeyError) as error:
        raise DataError(f"{file} cannot be read as Parquet: {error}.") from error


def _columns(file: str, names: Sequence[str], needed: Mapping[str, str], optional: Sequence[str]) -> list[str]:
    for key, flag in needed.items():
        if key not in names:
            raise DataError(f"{file} has no column {key!r} ({flag}). Its columns: {', '.join(map(repr, names))}.")
    return [name for name in names if name in needed or name in optional]


def _plain(value: Any, name: str, where: str) -> Any:
    """A value as JSON would give it, without the nulls inside structs."""
    if isinstance(value, dict):
        return {key: _plain(item, name, where) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_plain(item, name, where) for item in value]
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, (datetime.date, datetime.time)):  # a datetime is a date
        return value.isoformat()
    if isinstance(value, decimal.Decimal):
        return str(value)
    raise DataError(f"{where}: the column {name!r} holds a {type(value).__name__}: only text, numbers, lists and"
                    " structs of them are read.")  # fmt: skip
