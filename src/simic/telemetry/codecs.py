"""Fields of events as JSON and back, by type. Numbers that are not finite are null, and null is NaN."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

from simic.storage.json_files import check_values
from simic.telemetry.series import Series, SeriesReader, write_series


class Codec(NamedTuple):
    """Conversion of a field's value to JSON and back."""

    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


def _number(value: Any) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None


def _float(value: Any) -> float:
    return math.nan if value is None else float(value)


def _plain(value: Any) -> Any:
    """Free-form data as JSON: numpy numbers become Python's, types that JSON lacks become text."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float):
        return _number(value)
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


def _or_none(codec: Codec) -> Codec:
    return Codec(*(lambda value, convert=convert: None if value is None else convert(value) for convert in codec))


def _values(codec: Codec) -> Codec:
    return Codec(*(lambda d, convert=convert: {str(k): convert(v) for k, v in d.items()} for convert in codec))


def _pairs(items: Any) -> tuple[tuple[str, int], ...]:
    return tuple((str(name), operator.index(number)) for name, number in items)


def _write_columns(columns: dict[str, Series]) -> dict[str, Any]:
    return {str(name): write_series(values) for name, values in columns.items()}


def _read_columns(saved: dict[str, Any], reader: SeriesReader) -> dict[str, Series]:
    return {name: reader.read(values) for name, values in saved.items()}


def _read_tables(saved: dict[str, Any], reader: SeriesReader) -> dict[str, dict[str, Series]]:
    return {name: _read_columns(columns, reader) for name, columns in saved.items()}


_INT = Codec(operator.index, operator.index)
_FLOAT = Codec(_number, _float)
_STR = Codec(str, str)
CODECS: dict[Any, Codec] = {
    bool: Codec(bool, bool),
    int: _INT,
    float: _FLOAT,
    str: _STR,
    str | None: _or_none(_STR),
    float | None: _or_none(_FLOAT),
    tuple[str, ...]: Codec(lambda items: [str(item) for item in items], lambda items: tuple(map(str, items))),
    tuple[tuple[str, int], ...]: Codec(_pairs, _pairs),
    dict[str, int]: _values(_INT),
    dict[str, float]: _values(_FLOAT),
    dict[str, str]: _values(_STR),
    dict[str, Series]: Codec(_write_columns, lambda saved: _read_columns(saved, SeriesReader())),
    dict[str, dict[str, Series]]: Codec(
        lambda tables: {str(name): _write_columns(table) for name, table in tables.items()},
        lambda saved: _read_tables(saved, SeriesReader()),
    ),
    dict[str, Any]: Codec(_plain, lambda table: check_values(dict(table), "its settings")),
}
"""The conversion of each type that a field may have."""
