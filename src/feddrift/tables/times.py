"""From a column of times to time steps: calendar bins of dates, bins of numbers, or each value as it is."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from feddrift.errors import ConfigError, DataError, nearest, safe_repr
from feddrift.tables.columns import read_number
from feddrift.tables.problems import listed

CALENDAR: Mapping[str, Callable[[datetime], str]] = {  # names whose alphabetical order is that of time
    "year": lambda date: f"{date.year:04}",
    "quarter": lambda date: f"{date.year:04}Q{(date.month + 2) // 3}",
    "month": lambda date: f"{date.year:04}-{date.month:02}",
    "week": lambda date: "{:04}-W{:02}".format(*date.isocalendar()[:2]),
}
MOST_BINS = 1e12  # beyond, floats do not tell them apart
FINEST = {"year": 1, "quarter": 2, "month": 2}  # how many parts of a date each needs at least; else all three

_CLOCK = r"(?:[T ] ?(?P<hour>\d{1,2}):(?P<minute>\d\d)(?::(?P<second>\d\d)(?:[.,]\d+)?)? ?(?P<half>[AaPp][Mm])?"
_CLOCK += r" ?(?:Z|UTC|(?P<ahead>[+-]\d\d:?\d\d))?)?"
_YEAR_FIRST = re.compile(r"(\d{4})(?:([-/.])(\d{1,2})(?:\2(\d{1,2})" + _CLOCK + ")?)?", re.ASCII)
_COMPACT = re.compile(r"(\d{4})()(\d\d)(\d\d)" + _CLOCK, re.ASCII)
_YEAR_LAST = re.compile(r"(\d{1,2})([-/.])(\d{1,2})\2(\d{4})" + _CLOCK, re.ASCII)
FORMS = "2009-01-31, 2009/01/31, 31.01.2009, 20090131, or one of these with a time of day such as 2009-01-31 13:30"


@dataclass(frozen=True)
class Steps:
    """The time step of every text, and what the time steps are called."""

    of: Mapping[str, int]
    names: tuple[str, ...]


def read_every(every: object) -> str | float | None:
    """A word of the calendar, or a number above 0.

    >>> read_every("month"), read_every("7")
    ('month', 7.0)
    """
    if every is None or (isinstance(every, str) and every in CALENDAR):
        return every
    try:
        size = math.nan if isinstance(every, bool) or "_" in str(every) else float(every)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        size = math.nan
    if not 0 < size < math.inf:
        hint = nearest(every, list(CALENDAR)) if isinstance(every, str) else ""
        raise ConfigError(
            f"unknown every {safe_repr(every)}{hint or ','} legal are {', '.join(CALENDAR)}, or a number above 0: "
            "of days where times are dates, else of the units of the column"
        )
    return size


def steps(written: Sequence[str], every: str | float | None, place: Callable[[str], str] = repr) -> Steps:
    """The time steps of a column; a DataError says in one sentence why there are none, and by `place` where.

    Dates go into years, quarters, months or weeks; with a number into bins of so many days, and numbers into bins of so
    many units, both counted from the smallest. Without `every` each value is a time step: numbers and dates in their
    order, all else in that of the text, where 2009H2 comes before 2009H10. Bins that nothing falls into are no steps.

    >>> steps(["31.01.2009", "01.02.2009"], "quarter").names, steps(["2009H10", "2009H2"], None).names
    (('2009Q1',), ('2009H2', '2009H10'))
    """
    distinct = list(dict.fromkeys(written))
    if isinstance(every, str):
        dates = _dates(distinct, FINEST.get(every, 3), f"every={every}", place)
        return _named({text: (name := CALENDAR[every](date), name) for text, date in dates.items()})
    numbers = {text: number for text in distinct if math.isfinite(number := read_number(text))}
    compact = all(_is_compact(text) for text in distinct)  # 20090131 is a date rather than twenty millions
    if len(numbers) == len(distinct) and not compact:
        if every is None:
            return _named({text: (number, text) for text, number in numbers.items()})
        return _bins(numbers, every)
    if every is not None:
        return _days(_dates(distinct, 3, f"every={every:g}", place), every)
    if all(_parts(text) for text in distinct):
        return _named({text: (date, text) for text, date in _dates(distinct, 1, "a time column", place).items()})
    return _named({text: (natural(text), text) for text in distinct})


def _is_compact(text: str) -> bool:
    match = _COMPACT.fullmatch(text)
    try:
        return match is not None and bool(_date(match, True, 3))
    except (ValueError, OverflowError):
        return False


def natural(text: str) -> tuple[Any, ...]:
    """A key that sorts client_2 before client_10."""
    parts = [part.lstrip("0") if i % 2 else part for i, part in enumerate(re.split(r"([0-9]+)", text))]
    return tuple((len(part), part) if i % 2 else part for i, part in enumerate(parts)), text


def _named(keyed: Mapping[str, tuple[Any, str]]) -> Steps:
    """Texts whose keys are equal are the same time step, called as the first of them."""
    names: dict[Any, str] = {}
    for key, name in keyed.values():
        names.setdefault(key, name)
    order = sorted(names)
    position = {key: t for t, key in enumerate(order)}
    return Steps({text: position[key] for text, (key, _) in keyed.items()}, tuple(names[key] for key in order))


def _bins(numbers: Mapping[str, float], size: float) -> Steps:
    first, last = min(numbers.values()), max(numbers.values())
    if not (last - first) / size < MOST_BINS:
        raise DataError(f"every={size:g} is too small for times from {first:g} to {last:g}")
    bins = {text: math.floor((number - first) / size + 1e-9) for text, number in numbers.items()}
    return _named({text: (k, f"{first + k * size:.12g}") for text, k in bins.items()})


def _days(dates: Mapping[str, datetime], size: float) -> Steps:
    if size != int(size):
        raise DataError(f"every={size:g} is a number of days where times are dates, expected a whole one")
    first = min(dates.values()).replace(hour=0, minute=0, second=0)
    bins = {text: (date - first).days // int(size) for text, date in dates.items()}
    return _named({text: (k, (first + timedelta(days=k * int(size))).date().isoformat()) for text, k in bins.items()})


def _parts(text: str) -> re.Match[str] | None:
    return _YEAR_FIRST.fullmatch(text) or _COMPACT.fullmatch(text) or _YEAR_LAST.fullmatch(text)


def _dates(distinct: Sequence[str], parts: int, wanted: str, place: Callable[[str], str]) -> dict[str, datetime]:
    """Each text as the date that it is; those with slashes agree on what comes first, the day or the month."""
    matches = {text: _parts(text) for text in distinct}
    day_first = _day_first([match for match in matches.values() if match and match.re is _YEAR_LAST])
    dates, bad = {}, []
    for text, match in matches.items():
        try:
            dates[text] = _date(match, day_first, parts)
        except ValueError as error:
            bad.append(f"{place(text)}: {error}")
    if bad:
        raise DataError(f"{wanted} needs dates such as {FORMS}; got {listed(bad)}")
    return dates


def _day_first(matches: Sequence[re.Match[str]]) -> bool:
    slashes = [match for match in matches if match[2] != "."]  # with dots the day comes first everywhere
    day = next((match[0] for match in slashes if int(match[1]) > 12), None)
    month = next((match[0] for match in slashes if int(match[3]) > 12), None)
    if day and month:
        raise DataError(f"'{day}' has the day first and '{month}' the month: write all dates as 2009-01-31")
    if slashes and not day and not month:
        raise DataError(
            f"'{slashes[0][0]}' may have the day or the month first, and no other date tells which: write dates as "
            "2009-01-31"
        )
    return month is None


def _date(match: re.Match[str] | None, day_first: bool, parts: int) -> datetime:
    if match is None:
        raise ValueError("no date")
    if match.re is _YEAR_LAST:
        day, month = (match[1], match[3]) if day_first or match[2] == "." else (match[3], match[1])
        fields = [match[4], month, day]
    else:
        fields = [part for part in (match[1], match[3], match[4]) if part]
    if len(fields) < parts:
        raise ValueError(f"it has no {('month', 'day')[len(fields) - 1]}")
    hour, minute, second = (int(match[name] or 0) for name in ("hour", "minute", "second"))
    if match["half"]:
        if not 1 <= hour <= 12:
            raise ValueError("hour must be in 1..12")
        hour = hour % 12 + 12 * (match["half"].lower() == "pm")
    year, month, day = (*map(int, fields), 1, 1)[:3]
    date = datetime(year, month, day, hour, minute, second)
    if ahead := match["ahead"]:  # of universal time
        minutes = 60 * int(ahead[1:3]) + int(ahead[-2:])
        date -= timedelta(minutes=minutes if ahead[0] == "+" else -minutes)
    return date
