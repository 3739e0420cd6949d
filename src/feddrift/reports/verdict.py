"""Verdict of a comparison: the best method of a stream, whether that is more than noise, and the outcome of alarms."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np

from feddrift.algorithms import RECOMMENDED
from feddrift.algorithms.feddrift.detection import NOT_ACTED_ON
from feddrift.errors import format_count
from feddrift.reports.labels import build_labels, find_common_settings, format_settings
from feddrift.reports.summary import (
    Difference,
    average_cells,
    compute_difference,
    compute_interval,
    get_start_time,
    list_configurations,
    summarise_run,
)
from feddrift.runs.record import Record, select_score
from feddrift.scores import ACCURACY, SCORES, Score

ONE_MODEL = "Oblivious"
FINE_TUNED = "FineTuned"
SUGGESTED_SEEDS = 5
MAX_SUGGESTED_SEEDS = 100
MAX_NAMED_METHODS = 3
CLOSE_TO_MAJORITY = 1.0  # points of accuracy
Group = Sequence[Record]  # the runs of one configuration, by seed


@dataclass(frozen=True)
class Gain:
    """Advantage of a method over a baseline with its 95 % interval; positive is better, whatever the score."""

    mean: float
    low: float | None  # None with one seed
    high: float | None
    n_seeds: int

    @classmethod
    def of(cls, difference: Difference, score: Score) -> Gain:
        """Return the gain of a difference; of scores where lower is better, the sign is exchanged."""
        low = difference.low
        high = difference.high
        if score.higher_is_better or low is None or high is None:
            mean = difference.mean if score.higher_is_better else -difference.mean
            return cls(mean, low, high, len(difference.seeds))
        return cls(-difference.mean, -high, -low, len(difference.seeds))

    @property
    def is_clear(self) -> bool:
        """True if the interval is above 0."""
        return self.low is not None and self.low > 0

    @property
    def is_clear_loss(self) -> bool:
        """True if the interval is below 0."""
        return self.high is not None and self.high < 0

    def count_needed_seeds(self) -> int | None:
        """Return the number of seeds whose interval would exclude 0, if mean and deviation stay; None if too many."""
        if self.low is None or self.high is None or not self.mean:
            return None
        from scipy.special import stdtrit  # here, since SciPy takes a while to import

        deviation = (self.high - self.low) / 2 / stdtrit(self.n_seeds - 1, 0.975) * np.sqrt(self.n_seeds)
        n = np.arange(2, MAX_SUGGESTED_SEEDS + 1)
        enough = n[stdtrit(n - 1, 0.975) * deviation / np.sqrt(n) < abs(self.mean)]
        return int(enough[0]) if len(enough) else None


@dataclass(frozen=True, eq=False)
class Contender:
    """One configuration of a stream: its runs and its label."""

    runs: Group
    label: str

    @cached_property
    def seeds(self) -> frozenset[int]:
        """The seeds of the runs."""
        return frozenset(int(run.header["seed"]) for run in self.runs)

    @cached_property
    def mean(self) -> float:
        """The mean score over seeds, omitting drifts where these are known; NaN if nothing was tested."""
        runs = [summarise_run(run) for run in self.runs]
        values = [run.including_drifts if run.omitting_drifts is None else run.omitting_drifts for run in runs]
        known = [value for value in values if value is not None]
        return float(np.mean(known)) if known else np.nan

    @property
    def algorithm(self) -> str:
        """The name of the algorithm."""
        return str(self.runs[0].header["algorithm"])

    @property
    def is_ranked(self) -> bool:
        """False for one shared model, for the majority class, and for methods that know the true concepts."""
        return self.algorithm not in (ONE_MODEL, "Majority") and not self.algorithm.startswith("Oracle")

    @property
    def raises_alarms(self) -> bool:
        """True if the runs have alarms, or if the algorithm has a drift test."""
        has_test = self.algorithm == RECOMMENDED or "test" in self.runs[0].header["settings"]
        return has_test or any(run.rows.drift.any() for run in self.runs)


def find_verdicts(records: Iterable[Record], name_streams: bool | None = None) -> list[str]:
    """Return what to conclude from finished runs, in a few sentences for each stream.

    Args:
        records: The runs.
        name_streams: True to begin each verdict with its stream; by default if there are several.

    Returns:
        One text for each stream, or for each stream and its options where these differ. Empty without finished runs.
    """
    groups = list_configurations(records)
    parts: list[tuple[str, list[Group]]] = []
    for stream, of_stream in groupby(groups, key=lambda group: str(group[0].header["stream"])):
        by_options: dict[str, list[Group]] = {}
        in_stream = list(of_stream)
        common = find_common_settings([group[0].header["overrides"] for group in in_stream])
        for group in in_stream:
            own = {key: value for key, value in group[0].header["overrides"].items() if key not in common}
            by_options.setdefault(format_settings(own), []).append(group)
        parts += [(f"{stream}, {options}" if options else stream, part) for options, part in by_options.items()]
    if name_streams is None:
        name_streams = len(parts) > 1
    return [f"{name}: {_write_verdict(part)}" if name_streams else _write_verdict(part) for name, part in parts]


def _write_verdict(groups: Sequence[Group]) -> str:
    """Return the verdict on runs with the same data and training."""
    labels = build_labels([group[0].header for group in groups])
    score = groups[0][0].score
    contenders = [Contender(group, label) for group, label in zip(groups, labels, strict=True)]
    lead = _find_lead(contenders)
    compared = _select_common_seeds(contenders, lead)
    comparison = _compare_methods(compared, lead, score)
    alarms = _describe_alarms(lead) if lead else ""
    majority, nothing_is_learned = _compare_with_majority(compared)
    sentences = [majority, comparison, alarms] if nothing_is_learned else [comparison, alarms, majority]
    return " ".join(sentence for sentence in sentences if sentence)


def _select_common_seeds(contenders: Sequence[Contender], lead: Contender | None) -> list[Contender]:
    """Restrict all methods to the seeds of the method in question and of one shared model; leave out those without."""
    one_model = _find_algorithm(contenders, ONE_MODEL)
    largest = max(contenders, key=lambda contender: len(contender.seeds))
    seeds = (lead or largest).seeds & (one_model or largest).seeds
    return [
        Contender([run for run in contender.runs if run.header["seed"] in seeds], contender.label)
        for contender in contenders
        if seeds and seeds <= contender.seeds
    ]


def _find_algorithm(contenders: Iterable[Contender], name: str) -> Contender | None:
    return next((contender for contender in contenders if contender.algorithm == name), None)


def _sort_best_first(contenders: Iterable[Contender], score: Score) -> list[Contender]:
    """Return the methods to compare with one shared model, the best first; of equal ones the default method."""
    sign = -1 if score.higher_is_better else 1
    ranked = [contender for contender in contenders if contender.is_ranked]

    def build_key(contender: Contender) -> tuple[bool, float, bool]:
        return np.isnan(contender.mean), sign * contender.mean, contender.algorithm != RECOMMENDED

    return sorted(ranked, key=build_key)


def _find_lead(contenders: Sequence[Contender]) -> Contender | None:
    """Return the method in question: of those that raise alarms, the default method or else the one that ran first."""
    detectors = [contender for contender in contenders if contender.raises_alarms]
    default = [contender for contender in detectors if contender.algorithm == RECOMMENDED]
    by_start = sorted(detectors, key=lambda contender: min(map(get_start_time, contender.runs)))
    return next(iter(default or by_start), None)


def _compute_gain(a: Contender, b: Contender, score: Score) -> Gain | None:
    """Return the gain of a method over another one over their common seeds; None without any."""
    difference = compute_difference(a.runs, b.runs, b.label)
    return None if difference is None else Gain.of(difference, score)


def _compare_methods(contenders: Sequence[Contender], lead: Contender | None, score: Score) -> str:
    """Return the sentences about the best method and the method in question."""
    ranked = _sort_best_first(contenders, score)
    one_model = _find_algorithm(contenders, ONE_MODEL)
    if not ranked:
        return f"Only baselines were run: add `--algorithm {RECOMMENDED}`, the default method."
    if one_model is None:
        return _compare_without_one_model(ranked, score)
    gains = [(contender, _compute_gain(contender, one_model, score)) for contender in ranked]
    known = [(contender, gain) for contender, gain in gains if gain is not None]
    if not known:
        return "Nothing was tested yet."
    top, top_gain = known[0]
    if top_gain.low is None:
        return (
            f"One seed is not enough to tell which method is best: in this one, {top.label} has "
            f"{_format_value(top.mean, score)} and one shared model ({ONE_MODEL}) "
            f"{_format_value(one_model.mean, score)}. Run {SUGGESTED_SEEDS} seeds (`--seeds 0-{SUGGESTED_SEEDS - 1}`)."
        )
    clear = [(contender, gain) for contender, gain in known if gain.is_clear]
    best, gain = clear[0] if clear else known[0]
    others = [
        f"{_name_method(c)} {_format_gain(g, score)}{_note_clearly_less(best, c, g, score)}"
        for c, g in known
        if c is not best and (c.algorithm == FINE_TUNED or (lead and c.label == lead.label))
    ]
    in_addition = f"{_capitalise(' and '.join(others))}." if others else ""
    if clear:
        text = f"{best.label} {_format_gain(gain, score)} over one shared model ({ONE_MODEL})."
        equal = _list_equals(best, [contender for contender, _ in known], score)
        return " ".join(part for part in (text, in_addition, equal) if part)
    if gain.is_clear_loss:
        text = (
            f"One shared model ({ONE_MODEL}) is best: {best.label}, the best of the other methods, "
            f"{_format_gain(gain, score)}."
        )
        return f"{text} {in_addition}".rstrip()
    if gain.mean <= 0:
        text = (
            f"One shared model ({ONE_MODEL}) is enough here: {best.label}, the best of the other methods, "
            f"{_format_gain(gain, score)}."
        )
        return f"{text} {in_addition}".rstrip()
    text = (
        f"No method beats one shared model ({ONE_MODEL}) by more than noise here: the best, {best.label}, "
        f"{_format_gain(gain, score)}."
    )
    needed = gain.count_needed_seeds()
    advice = f"About {needed} seeds would be enough to tell whether {best.label} is better."
    return " ".join(part for part in (text, in_addition, advice if needed and needed > gain.n_seeds else "") if part)


def _note_clearly_less(best: Contender, other: Contender, gain: Gain, score: Score) -> str:
    """Return an addition to the gain of fine-tuning if it is clearly less than that of the best method."""
    if other.algorithm != FINE_TUNED or not gain.is_clear:
        return ""
    advantage = _compute_gain(best, other, score)
    return f", clearly less than {best.label}" if advantage is not None and advantage.is_clear else ""


def _capitalise(sentence: str) -> str:
    return sentence[0].upper() + sentence[1:]


def _compare_without_one_model(ranked: Sequence[Contender], score: Score) -> str:
    """Return the sentence about the best method if one shared model was not run."""
    best, *others = ranked
    advice = f"add `--algorithm {ONE_MODEL}` to learn whether one shared model does as well"
    if not others:
        fine_tuning = "" if best.algorithm == FINE_TUNED else f", and `--algorithm {FINE_TUNED}` for fine-tuning"
        return f"Nothing to compare {best.label} with: {advice}{fine_tuning}."
    gain = _compute_gain(best, others[0], score)
    if gain is None or gain.low is None:
        return f"One seed is not enough to tell which method is best: run {SUGGESTED_SEEDS} seeds, and {advice}."
    if gain.is_clear:
        return f"{best.label} is best and {_format_gain(gain, score)} over {others[0].label}; {advice}."
    return f"{best.label} has the best mean, but {others[0].label} is within noise of it; {advice}."


def _name_method(contender: Contender) -> str:
    names = {FINE_TUNED: f"fine-tuning alone ({FINE_TUNED})", ONE_MODEL: f"one shared model ({ONE_MODEL})"}
    return names.get(contender.algorithm, contender.label)


def _list_equals(best: Contender, ranked: Sequence[Contender], score: Score) -> str:
    """Return a sentence that names the methods whose difference to the best one is not more than noise."""
    gains = [(other, _compute_gain(best, other, score)) for other in ranked if other is not best]
    equal = [other.label for other, gain in gains if gain is not None and not gain.is_clear]
    if not equal:
        return ""
    n_unnamed = len(equal) - MAX_NAMED_METHODS
    names = equal if n_unnamed <= 0 else [*equal[:MAX_NAMED_METHODS], f"{n_unnamed} more"]
    text = " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
    return f"{text} {'is' if len(equal) == 1 else 'are'} within noise of {best.label}."


def _describe_alarms(lead: Contender) -> str:
    """Return the sentence about the alarms of a method."""
    counts = AlarmCounts.of(lead.runs)
    over = f" in {len(lead.runs)} runs" if len(lead.runs) > 1 else ""
    if not counts.raised:
        return f"{lead.label} raised no alarm{over}."
    parts = [f"{lead.label} raised {format_count(counts.raised, 'alarm')}{over}"]
    if counts.acted_on == counts.raised:
        parts.append("acted on all of them" if counts.raised > 1 else "acted on it")
    else:
        parts.append(f"acted on {counts.acted_on or 'none'} of them" if counts.raised > 1 else "did not act on it")
    sentence = " and ".join(parts)
    if counts.confirmed or counts.contradicted:
        undecided = counts.reviewed - counts.confirmed - counts.contradicted
        contradicted = f"contradicted {counts.contradicted}"
        outcome = f", {contradicted} and left {undecided} undecided" if undecided > 0 else f" and {contradicted}"
        sentence += f"; later data confirmed {counts.confirmed}{outcome}"
    elif counts.reviewed:
        sentence += f"; later data neither confirmed nor contradicted {'it' if counts.raised == 1 else 'any'}"
    if counts.common:
        which = "this alarm" if counts.raised == 1 else f"{counts.common} of them"
        if counts.common == counts.raised > 1:
            which = "all of them"
        sentence += f". At {which} the data changed as at most clients, for example with a season"
    return f"{sentence}."


@dataclass(frozen=True)
class AlarmCounts:
    """Numbers of alarms in runs, over all clients and time steps."""

    raised: int
    acted_on: int
    reviewed: int  # by methods that compare alarms with later data
    confirmed: int
    contradicted: int
    common: int  # the client's data changed as at most clients; whether the rule changed too is not tested there

    @classmethod
    def of(cls, runs: Iterable[Record]) -> AlarmCounts:
        """Count the alarms of these runs."""
        totals = np.zeros(6, dtype=int)
        for run in runs:
            totals += _count_alarms(run)
        return cls(*totals.tolist())


def _count_alarms(run: Record) -> list[int]:
    raised = run.rows.drift
    ignored = {
        (event["t"], c)
        for event in run.events
        if NOT_ACTED_ON in str(event["cause"].get("reason", ""))
        for c in event["cause"].get("clients", ())
    }
    n_ignored = sum(bool(raised[t, c]) for t, c in ignored if t < len(raised))
    reviews: list[Mapping[str, Any]] = [event["cause"] for event in run.events if "confirmed" in event["cause"]]
    outcomes = [sum(int(review.get(name, 0)) for review in reviews) for name in ("alarms", "confirmed", "contradicted")]
    return [int(raised.sum()), int(raised.sum()) - n_ignored, *outcomes, len(find_common_alarms(run))]


def find_common_alarms(run: Record) -> list[tuple[int, int]]:
    """Return (t, c) of the alarms at which everything that changed in the client's data changed at most clients."""
    return [
        place
        for place, shifts in run.shifts.items()
        if shifts["moved"] and all(shift.get("common") for shift in shifts["moved"])
    ]


def _compare_with_majority(contenders: Sequence[Contender]) -> tuple[str, bool]:
    """Compare the best method or one shared model with the prediction of each client's most frequent class.

    Returns:
        A sentence, or "" if the accuracy is clearly higher; and True if no method is better than the majority class.
    """
    by_accuracy = [
        Contender(select_score(contender.runs, ACCURACY.name), contender.label)
        for contender in contenders
        if contender.is_ranked or contender.algorithm == ONE_MODEL
    ]
    scored = [contender for contender in by_accuracy if not np.isnan(contender.mean)]
    if not scored:
        return "", False
    best = max(scored, key=lambda contender: contender.mean)
    pairs = []
    for run in best.runs:
        accuracy = average_cells(run, run.rows.accuracy)
        majority = average_cells(run, run.rows.majority)
        if accuracy is not None and majority is not None:
            pairs.append((100 * accuracy, 100 * majority))
    if not pairs:
        return "", False
    accuracy, majority = np.mean(pairs, axis=0)
    if accuracy - majority > CLOSE_TO_MAJORITY:
        return "", False
    mean, low, _ = compute_interval([a - m for a, m in pairs])
    nothing_is_learned = (mean if low is None else low) <= 0
    if nothing_is_learned:
        sentence = (
            f"No method is better than always naming each client's most frequent class ({majority:.1f} %): the best, "
            f"{_name_method(best)}, has an accuracy of {accuracy:.1f} %"
        )
    else:
        sentence = (
            f"The accuracy of {_name_method(best)} ({accuracy:.1f} %) is close to that of always naming each client's "
            f"most frequent class ({majority:.1f} %)"
        )
    score = _find_separating_score(contenders)
    if score is not None:
        advice = f"; {score.title} separates the methods better (`feddrift report DIR --score {score.name}`)"
        return f"{sentence}{advice}.", nothing_is_learned
    one_model = _find_algorithm(by_accuracy, ONE_MODEL)
    gain = None if one_model is None or best is one_model else _compute_gain(best, one_model, ACCURACY)
    is_noise = best is one_model or (gain is not None and gain.low is not None and not gain.is_clear)
    return sentence + ("; no other score separates the methods." if is_noise else "."), nothing_is_learned


def _find_separating_score(contenders: Sequence[Contender]) -> Score | None:
    """Return the score by which the best method is most clearly ahead of one shared model; None if it is by none."""
    one_model = _find_algorithm(contenders, ONE_MODEL)
    ranked = [contender for contender in contenders if contender.is_ranked]
    if one_model is None or not ranked:
        return None
    clearest: tuple[float, Score] | None = None
    for score in SCORES.values():
        runs = [run for contender in (one_model, *ranked) for run in contender.runs]
        if score.name == "majority" or any(np.isnan(getattr(run.rows, score.name)).all() for run in runs):
            continue
        scored = [Contender(select_score(c.runs, score.name), c.label) for c in (one_model, *ranked)]
        gain = _compute_gain(_sort_best_first(scored, score)[0], scored[0], score)
        if gain is None or not gain.is_clear or gain.low is None or gain.high is None:
            continue
        clarity = gain.mean / max(gain.high - gain.low, 1e-12)
        if clearest is None or clarity > clearest[0]:
            clearest = clarity, score
    return clearest and clearest[1]


def _format_value(value: float, score: Score) -> str:
    return f"{value:.1f} %" if score.share else f"a {score.title} of {value:.4f}"


def _format_gain(gain: Gain, score: Score) -> str:
    """Format a gain with its interval: "gains 7.6 points [7.1, 8.1]"; also a loss, or a difference within noise."""
    digits = _choose_digits(gain) if score.share else 4
    unit = " points" if score.share else f" of {score.title}"
    if gain.low == gain.mean == gain.high == 0:
        return "is equal in every run"
    is_loss = gain.is_clear_loss or (gain.low is None and gain.mean < 0)
    is_clear = gain.is_clear or gain.low is None or is_loss
    sign = -1 if is_loss else 1
    mean, *interval = (
        f"{sign * value + 0.0:.{digits}f}" for value in (gain.mean, gain.low, gain.high) if value is not None
    )
    verb = "differs by" if not is_clear else "loses" if is_loss else "gains"
    limits = f" [{', '.join(interval[::sign])}]" if interval else ""
    return f"{verb} {mean}{unit}{limits}".replace("-0.0 ", "0.0 ")


def _choose_digits(gain: Gain) -> int:
    """Return one decimal, or more for narrow intervals and so that a limit that is not 0 is not shown as 0."""
    if gain.low is None or gain.high is None:
        return 1
    smallest = min(abs(gain.low), abs(gain.high))
    if 0 < smallest < 0.005:
        return 3
    return 2 if gain.high - gain.low < 0.2 or smallest < 0.1 else 1
