"""Time steps from a column of times: calendar bins of dates, bins of numbers, or one time step for each value."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from feddrift.errors import ConfigError, DataError, safe_repr, suggest_name
from feddrift.tables.columns import parse_number
from feddrift.tables.problems import join_first

CALENDAR: Mapping[str, Callable[[datetime], str]] = {  # the alphabetical order of these names is the order of time
    "year": lambda date: f"{date.year:04}",
    "quarter": lambda date: f"{date.year:04}Q{(date.month + 2) // 3}",
    "month": lambda date: f"{date.year:04}-{date.month:02}",
    "week": lambda date: "{:04}-W{:02}".format(*date.isocalendar()[:2]),
}
MAX_BINS = 1e12  # floats cannot represent the positions of more bins
MIN_DATE_PARTS = {"year": 1, "quarter": 2, "month": 2}  # number of parts that a date must have; others need all three

_CLOCK = r"(?:[T ] ?(?P<hour>\d{1,2}):(?P<minute>\d\d)(?::(?P<second>\d\d)(?:[.,]\d+)?)? ?(?P<am_pm>[AaPp][Mm])?"
_CLOCK += r" ?(?:Z|UTC|(?P<utc_offset>[+-]\d\d:?\d\d))?)?"
_YEAR_FIRST = re.compile(r"(\d{4})(?:([-/.])(\d{1,2})(?:\2(\d{1,2})" + _CLOCK + ")?)?", re.ASCII)
_COMPACT = re.compile(r"(\d{4})()(\d\d)(\d\d)" + _CLOCK, re.ASCII)
_YEAR_LAST = re.compile(r"(\d{1,2})([-/.])(\d{1,2})\2(\d{4})" + _CLOCK, re.ASCII)
DATE_EXAMPLES = (
    "2009-01-31, 2009/01/31, 31.01.2009, 20090131, or one of these with a time of day such as 2009-01-31 13:30"
)


@dataclass(frozen=True)
class TimeSteps:
    """The time step of each text of a column, and the names of the time steps."""

    step_by_text: Mapping[str, int]
    names: tuple[str, ...]


def parse_every(every: object) -> str | float | None:
    """Check the option `every`: a word of the calendar, or a number above 0, which is converted to float.

    >>> parse_every("month"), parse_every("7")
    ('month', 7.0)
    """
    if every is None or (isinstance(every, str) and every in CALENDAR):
        return every
    try:
        size = math.nan if isinstance(every, bool) or "_" in str(every) else float(every)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        size = math.nan
    if not 0 < size < math.inf:
        hint = suggest_name(every, list(CALENDAR)) if isinstance(every, str) else ""
        raise ConfigError(
            f"unknown every {safe_repr(every)}{hint or ','} legal are {', '.join(CALENDAR)}, or a number above 0: "
            "of days where times are dates, else of the units of the column"
        )
    return size


def build_time_steps(texts: Sequence[str], every: str | float | None, place: Callable[[str], str] = repr) -> TimeSteps:
    """Divide the times of a column into time steps.

    Dates are divided into years, quarters, months or weeks, or into bins of `every` days; numbers into bins of `every`
    units. Bins begin at the smallest value; empty bins are left out. Without `every` each value is a time step: numbers
    and dates in their order, other texts in natural order, 2009H2 before 2009H10.

    Args:
        texts: The times of the column.
        every: A word of `CALENDAR` or the size of a bin.
        place: Names a text and its position, for messages.

    Raises:
        DataError: The times do not fit `every`, or a date is ambiguous.

    >>> build_time_steps(["31.01.2009", "01.02.2009"], "quarter").names
    ('2009Q1',)
    >>> build_time_steps(["2009H10", "2009H2"], None).names
    ('2009H2', '2009H10')
    """
    distinct = list(dict.fromkeys(texts))
    if isinstance(every, str):
        dates = _read_dates(distinct, MIN_DATE_PARTS.get(every, 3), f"every={every}", place)
        return _group_by_key({text: (CALENDAR[every](date),) * 2 for text, date in dates.items()})
    parsed = {text: parse_number(text) for text in distinct}
    numbers = {text: number for text, number in parsed.items() if math.isfinite(number)}
    compact = all(_is_compact(text) for text in distinct)  # 20090131 is a date rather than twenty millions
    if len(numbers) == len(distinct) and not compact:
        if every is None:
            return _group_by_key({text: (number, text) for text, number in numbers.items()})
        return _bin_numbers(numbers, every)
    if every is not None:
        return _bin_dates(_read_dates(distinct, 3, f"every={every:g}", place), every)
    if all(_match_date(text) for text in distinct):
        return _group_by_key(
            {text: (date, text) for text, date in _read_dates(distinct, 1, "a time column", place).items()}
        )
    return _group_by_key({text: (natural_sort_key(text), text) for text in distinct})


def _is_compact(text: str) -> bool:
    match = _COMPACT.fullmatch(text)
    try:
        return match is not None and bool(_build_date(match, True, 3))
    except (ValueError, OverflowError):
        return False


def natural_sort_key(text: str) -> tuple[Any, ...]:
    """Return a sort key that puts client_2 before client_10."""
    parts = [part.lstrip("0") if i % 2 else part for i, part in enumerate(re.split(r"([0-9]+)", text))]
    return tuple((len(part), part) if i % 2 else part for i, part in enumerate(parts)), text


def _group_by_key(keyed: Mapping[str, tuple[Any, str]]) -> TimeSteps:
    """Make a time step of all texts with the same key; its name is that of the first of them."""
    names: dict[Any, str] = {}
    for key, name in keyed.values():
        names.setdefault(key, name)
    order = sorted(names)
    position = {key: t for t, key in enumerate(order)}
    return TimeSteps({text: position[key] for text, (key, _) in keyed.items()}, tuple(names[key] for key in order))


def _bin_numbers(numbers: Mapping[str, float], size: float) -> TimeSteps:
    first = min(numbers.values())
    last = max(numbers.values())
    if not (last - first) / size < MAX_BINS:
        raise DataError(f"every={size:g} is too small for times from {first:g} to {last:g}")
    bins = {text: math.floor((number - first) / size + 1e-9) for text, number in numbers.items()}
    return _group_by_key({text: (k, f"{first + k * size:.12g}") for text, k in bins.items()})


def _bin_dates(dates: Mapping[str, datetime], size: float) -> TimeSteps:
    if size != int(size):
        raise DataError(f"every={size:g} is a number of days where times are dates, expected a whole one")
    first = min(dates.values()).replace(hour=0, minute=0, second=0)
    bins = {text: (date - first).days // int(size) for text, date in dates.items()}
    return _group_by_key(
        {text: (k, (first + timedelta(days=k * int(size))).date().isoformat()) for text, k in bins.items()}
    )


def _match_date(text: str) -> re.Match[str] | None:
    return _YEAR_FIRST.fullmatch(text) or _COMPACT.fullmatch(text) or _YEAR_LAST.fullmatch(text)


def _read_dates(distinct: Sequence[str], parts: int, wanted: str, place: Callable[[str], str]) -> dict[str, datetime]:
    """Read texts as dates with at least this number of parts, and with one order of day and month."""
    matches = {text: _match_date(text) for text in distinct}
    day_first = _is_day_first([match for match in matches.values() if match and match.re is _YEAR_LAST])
    dates = {}
    problems = []
    for text, match in matches.items():
        try:
            dates[text] = _build_date(match, day_first, parts)
        except ValueError as error:
            problems.append(f"{place(text)}: {error}")
    if problems:
        raise DataError(f"{wanted} needs dates such as {DATE_EXAMPLES}; got {join_first(problems)}")
    return dates


def _is_day_first(matches: Sequence[re.Match[str]]) -> bool:
    slashes = [match for match in matches if match[2] != "."]  # with dots the day is always first
    day = next((match[0] for match in slashes if int(match[1]) > 12), None)
    month = next((match[0] for match in slashes if int(match[3]) > 12), None)
    if day and month:
        raise DataError(f"'{day}' has the day first and '{month}' the month: write all dates as 2009-01-31")
    if slashes and not day and not month:
        raise DataError(
            f"'{slashes[0][0]}' may have the day or the month first, and no other date decides it: write dates as "
            "2009-01-31"
        )
    return month is None


def _build_date(match: re.Match[str] | None, day_first: bool, parts: int) -> datetime:
    if match is None:
        raise ValueError("not a date")
    if match.re is _YEAR_LAST:
        day, month = (match[1], match[3]) if day_first or match[2] == "." else (match[3], match[1])
        fields = [match[4], month, day]
    else:
        fields = [part for part in (match[1], match[3], match[4]) if part]
    if len(fields) < parts:
        raise ValueError(f"it has no {('month', 'day')[len(fields) - 1]}")
    hour, minute, second = (int(match[name] or 0) for name in ("hour", "minute", "second"))
    if match["am_pm"]:
        if not 1 <= hour <= 12:
            raise ValueError("hour must be in 1..12")
        hour = hour % 12 + 12 * (match["am_pm"].lower() == "pm")
    year, month, day = (*map(int, fields), 1, 1)[:3]
    date = datetime(year, month, day, hour, minute, second)
    if utc_offset := match["utc_offset"]:
        minutes = 60 * int(utc_offset[1:3]) + int(utc_offset[-2:])
        date -= timedelta(minutes=minutes if utc_offset[0] == "+" else -minutes)
    return date
