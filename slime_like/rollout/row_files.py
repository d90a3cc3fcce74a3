"""Rows of JSONL and Parquet files as dicts, one after the other: neither the file nor its rows are held."""

from __future__ import annotations

import datetime
import decimal
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from slime_like.errors import DataError

_PARQUET = ".parquet"
#: A line of JSON, and a row's text: some 20 million tokens, far beyond any context.
LONGEST_LINE_BYTES = 64 * 1024**2
#: Deeper JSON is no row: what writes and copies it later is recursive.
_DEEPEST = 200
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
            for number in itertools.count(1):
                line = stream.readline(LONGEST_LINE_BYTES + 1)
                if not line:
                    return
                if len(line) > LONGEST_LINE_BYTES:
                    raise DataError(
                        f"{row_name(file, number)} has more than {LONGEST_LINE_BYTES >> 20} MiB. Fix: a JSONL file, one"
                        " object a line."
                    )
                if line.strip():
                    yield number, line
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise DataError(f"{file} cannot be read: {getattr(error, 'strerror', None) or error}.") from None


def _decode(line: bytes, number: int, where: str) -> str:
    try:
        return line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        fix = f"a name that ends in {_PARQUET}" if line.startswith(b"PAR1") else "give a JSONL file"
        raise DataError(f"{where} is no UTF-8 text (byte {error.start}). Fix: {fix}.") from None


def _parse(line: str, where: str) -> dict:
    try:
        record = json.loads(line)
    except RecursionError:
        raise DataError(f"{where} is nested too deeply to be read. It starts with {line.strip()[:60]!r}.") from None
    except ValueError as error:
        raise DataError(f"{where} is malformed JSON: {error}. It starts with {line.strip()[:60]!r}.") from None
    if not isinstance(record, dict):
        raise DataError(f"{where} is a JSON {type(record).__name__}, not an object with keys.")
    if line.count("{") + line.count("[") > _DEEPEST and depth(record) > _DEEPEST:
        raise DataError(f"{where} is nested more than {_DEEPEST} deep. It starts with {line.strip()[:60]!r}.")
    if "\\u" in line:  # the only way to half a character: UTF-8 has none
        check_text(record, where)
    return record


def check_text(value: Any, where: str) -> None:
    """Raises DataError naming the row if any text in the value has half a character in it (a lone surrogate), which no
    tokenizer, engine or log takes.
    """
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where} holds half a character (the lone surrogate \\u{ord(error.object[error.start]):04x}), which is no"
            " text. Fix: the file, which was cut inside of a character."
        ) from None


def depth(value: Any) -> int:
    """Levels of lists and objects of a value of JSON, counted without recursion. Example: [1, {"a": []}] has 3."""
    levels, below = 0, [value]
    while below := [one for one in below if isinstance(one, (list, dict))]:
        levels += 1
        below = [child for one in below for child in (one.values() if isinstance(one, dict) else one)]
    return levels


def num_characters(value: Any) -> int:
    """Characters of all texts in a value of JSON."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, (list, dict)):
        return sum(map(num_characters, value.values() if isinstance(value, dict) else value))
    return 0


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
    except (pyarrow.ArrowException, KeyError, UnicodeDecodeError) as error:
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
