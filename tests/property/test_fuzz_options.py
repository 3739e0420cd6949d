"""Options, seeds, settings, drift patterns and grids: any input gives a valid value or an error of one sentence."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from feddrift import algorithms, cli
from feddrift.algorithms.feddrift.drift_tests import TESTS, Evidence, drift_test
from feddrift.cli import console, run
from feddrift.engines.conditions.conditions import Conditions
from feddrift.errors import MAX_MESSAGE_LENGTH, FeddriftError
from feddrift.runs import sweep
from feddrift.runs.config import MAX_SEEDS, RunConfig, parse_seeds, read_trace
from feddrift.runs.poison import POISON_KINDS, parse_poison
from feddrift.runs.recorded_run import find_unfinished_runs
from feddrift.streams import patterns
from feddrift.testing import FakeFederation
from feddrift.types import Algorithm
from tests.support.cli import SWEEP_GRID
from tests.support.fuzzing import ODD_WORDS, call_or_refuse, limit_examples, mutations, values, words

NUMBERS = ("rounds", "steps", "batch", "lr", "participation", "dropout")
SMALL = "random:every=1,concepts=2,clients=2,steps=2"
ALL_SETTINGS = sorted({key for entry in algorithms.ALGORITHMS.values() for key in algorithms.get_options(entry.cls)})


@limit_examples(150)
@given(st.dictionaries(st.sampled_from(sorted(RunConfig.model_fields)) | words, values, max_size=3))
def test_run_options(given_: dict[str, Any]) -> None:
    config = call_or_refuse(lambda: RunConfig.from_values(**{"stream": "sine-2", "algorithm": "Oblivious", **given_}))
    if config is None:
        return
    assert 0 <= config.seed < 2**63 and all(type(getattr(config, name)) is not bool for name in NUMBERS)
    if config.pattern is None:
        s = call_or_refuse(config.model_copy(update={"pattern": SMALL}).load_stream)
        if s is not None:
            call_or_refuse(lambda: config.resolve_algorithm(s))
            call_or_refuse(lambda: config.build_conditions(s))


@limit_examples(150)
@given(words | st.from_regex(r"[0-9٣]{0,6}(-[0-9]{0,22})?(,[0-9 ]{0,6}(-[0-9]{0,6})?){0,3}", fullmatch=True))
def test_seeds(text: str) -> None:
    seeds = call_or_refuse(lambda: parse_seeds(text))
    if seeds is not None:
        assert 0 < len(seeds) == len(set(seeds)) <= MAX_SEEDS and min(seeds) >= 0


@limit_examples(400)
@given(st.sampled_from(sorted(algorithms.ALGORITHMS)), st.data())
def test_settings_of_algorithms(name: str, data: st.DataObject) -> None:
    legal = sorted(algorithms.get_options(algorithms.find_entry(name).cls))
    keys = st.sampled_from(legal or ["delta"]) | st.sampled_from(ALL_SETTINGS) | words
    settings = data.draw(st.dictionaries(keys, values, max_size=2))
    made = call_or_refuse(lambda: algorithms.algorithm(name, **settings))
    if made is not None:
        _check_meaning(made, settings)


def _check_meaning(made: Algorithm, given_: dict[str, Any]) -> None:
    told = {name: getattr(made, f.name) for name, f in algorithms.get_options(made).items()}
    assert set(given_) <= set(told)
    for key, value in told.items():
        assert not isinstance(value, float) or (math.isfinite(value) and value >= 0), (key, value)
        if isinstance(value, int) and not isinstance(value, bool):
            assert 1 <= value < 2**31 and not isinstance(given_.get(key), bool), (key, value)
    if told.get("n_models", 0) <= 100 and not getattr(made, "needs_truth", False):
        call_or_refuse(lambda: made.init(FakeFederation(0, 3)))


names = st.sampled_from(["random", "Y", "R0", "every", "concepts", "clients", "steps", "seed"])
count = st.integers(-1, 40).map(str) | words
spec = st.lists(st.tuples(names | words, count).map("=".join) | words, max_size=5).map(
    lambda o: "random:" + ",".join(o)
)
nearly = st.lists(st.tuples(names, count).map("=".join), max_size=2).map(
    lambda o: ",".join(["random:every=2,concepts=3", *o])
)


@limit_examples(300)
@given(words | spec | nearly, st.integers(0, 2**63 - 1))
def test_patterns(text: str, seed: int) -> None:
    _check_pattern(text, seed)


def _check_pattern(text: str, seed: int = 0) -> None:
    concepts = call_or_refuse(lambda: patterns.build_pattern(text, seed))
    if concepts is not None:
        assert concepts.ndim == 2 and len(concepts) >= 2 and concepts.shape[1] >= 1
        assert concepts.min() >= 0 and concepts.max() < 10**18


@limit_examples(150)
@given(st.binary(max_size=60) | mutations(b"0 0 1\n0, 1, 1\n# then\n2 1 1\n"))
def test_pattern_files(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "pattern.txt"
    path.write_bytes(content)
    _check_pattern(str(path))


@limit_examples(150)
@given(
    words
    | st.tuples(st.sampled_from([*POISON_KINDS, "lie", "flip:1+glue"]), count, count).map(
        lambda o: f"{o[0]}:{o[1]},{o[2]}"
    )
)
def test_poison(text: str) -> None:
    found = call_or_refuse(lambda: parse_poison(text, 10))
    if found is not None:
        assert found.clients and set(found.clients) <= set(range(10)) and parse_poison(str(found), 10) == found


@limit_examples(100)
@given(st.binary(max_size=60) | mutations(b"1 0 1\n1, 1, 1\n# then\n0 0 0\n"))
def test_traces(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "trace.txt"
    path.write_bytes(content)
    trace = call_or_refuse(lambda: read_trace(path))
    if trace is not None:
        assert trace.ndim == 2 and trace.size and trace.dtype == bool
        call_or_refuse(lambda: Conditions(trace=trace).draw_reachable(np.ones((4, 3), dtype=np.int64), 0))


parameters = st.sampled_from(["ratio", "confidence", "delta", "threshold", "alpha", "window_size", "grace_period", "x"])
pairs = st.lists(
    st.tuples(parameters, words | st.floats().map(str) | st.integers(-3, 300).map(str)).map("=".join), max_size=2
)
tests = st.tuples(st.sampled_from([*TESTS, "x"]), pairs).map(lambda o: f"{o[0]}:{','.join(o[1])}")
EVIDENCE = Evidence(
    np.array([[0.5, 0.5, 0.1], [0.1, 0.3, np.nan], [0.1, 0.9, 0.3]]), np.full((3, 3), 60), np.array([1, 2, 1]),
    np.array([0.1, 0.3, 0.1]),
)  # fmt: skip


@limit_examples(150)
@given(words | tests)
def test_drift_tests(spec: str) -> None:
    test = call_or_refuse(lambda: drift_test(spec, 0.05))
    if test is not None:
        assert test(EVIDENCE).shape == (3,)


toml = st.none().flatmap(
    lambda _: st.sampled_from(
        ["stream", "algorithm", "seeds", "rounds", "lr", "weights", "settings", "dropout", "trace", "poison", "average"]
    )
)
literals = st.sampled_from([
    "1", "-1", "0", "1.5", "nan", "inf", "true", "[]", "[[]]", "[1, 1]", "[true]", "{}", "{delta = nan}",
    "{delta = [[]]}", "{max_models = true}", "{name = 1}", "{stream = 'x'}", "{delta = 1979-05-27}", "'sine-2'",
    "'FedDrift'", "'0-9999'", "['0-9', '5-15']", "'folder:~nobody-of-this-name'", "'a\\u0000b'", '"a\\u0000b"',
    '"a\\nb"', "0x" + "f" * 5000, "9" * 5000, "[" * 3000, "1979-05-27", "{init = 'hot'}",
    "{max_models = 0xffffffffffffffffffff}", "''", "[1, '2']",
])  # fmt: skip


@limit_examples(120)
@given(mutations(SWEEP_GRID.encode()) | st.lists(st.tuples(toml, literals), max_size=4))
def test_grids(tmp_path: Path, content: bytes | list[tuple[str, str]]) -> None:
    path = tmp_path / "grid.toml"
    if isinstance(content, list):
        lines = {"stream": "'sine-2'", "algorithm": "'FedDrift'", **dict(content)}
        content = "\n".join(["[[runs]]", *(f"{key} = {value}" for key, value in lines.items())]).encode()
    path.write_bytes(content)
    configs = call_or_refuse(lambda: sweep.read_grid(path))
    if configs is not None:
        assert 0 < len(configs) <= sweep.MAX_RUNS
        for config in configs[:3]:
            assert config.algorithm in algorithms.ALGORITHMS
            _check_meaning(algorithms.algorithm(config.algorithm, **config.settings), config.settings)


RUN = ["--stream", "--algorithm", "--set", "--seed", "--seeds", "--data-dir", "--rounds", "--steps", "--batch", "--lr"]
RUN += ["--pattern", "--engine", "--label", "--weights", "--participation", "--dropout", "--trace", "--poison"]
RUN += ["--average"]
likely = st.sampled_from(
    ["sine-2", "sea-4", "FedDrift", "IFCA", "Oracle", "delta=0.1", "n_models=3", "0-3", "reference"]
)
typed = (likely | words | st.tuples(st.sampled_from(ALL_SETTINGS), words).map("=".join)).filter(
    lambda text: "\x00" not in text and not re.search("[\ud800-\udc7f\udd00-\udfff]", text)  # no shell passes these on
)


def _typed(monkeypatch: pytest.MonkeyPatch, args: list[str]) -> None:
    """As `main` answers it: done, or one sentence."""

    def told() -> None:
        try:
            result = CliRunner().invoke(cli.app, args, standalone_mode=False)
        except console.CommandLineError as error:
            raise FeddriftError(error.format_message()) from None
        if isinstance(result.exception, console.CommandLineError):
            raise FeddriftError(result.exception.format_message())
        if result.exception is not None:
            raise result.exception

    with monkeypatch.context() as patch:
        patch.setattr("signal.signal", lambda *_: None)
        patch.setattr(run, "_build_cost_table", lambda *_: "nothing is run")
        call_or_refuse(told)


@pytest.mark.slow
@limit_examples(120)
@given(st.lists(st.tuples(st.sampled_from(RUN), typed), max_size=3))
def test_run_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: list[tuple[str, str]]) -> None:
    monkeypatch.chdir(tmp_path)
    given_ = [f"{name}={value}" for name, value in options]
    chosen = {name for name, _ in options}
    defaults = {"--stream": "sine-2", "--algorithm": "FedDrift", "--pattern": SMALL}
    given_ += [f"{name}={value}" for name, value in defaults.items() if name not in chosen]
    _typed(monkeypatch, ["run", "--dry-run", *given_])


@pytest.mark.slow
@limit_examples(100)
@given(st.sampled_from(["report", "plot", "sweep", "resume", "export", "list"]), st.lists(typed, max_size=3), st.data())
def test_other_commands(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str, args: list[str], data: st.DataObject
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep, "run_sweep", lambda *_: pytest.fail("nothing here is a grid"))
    flags = {
        "report": ["--against", "--json", "--paper"],
        "plot": ["--out", "--algorithm"],
        "sweep": ["--out", "--jobs"],
    }
    options = st.sampled_from([*flags.get(command, []), "--json"])
    more = data.draw(st.lists(options | st.tuples(options, typed).map("=".join), max_size=2))
    _typed(monkeypatch, [command, *args, *more])


@pytest.mark.slow
@pytest.mark.parametrize("value", [*ODD_WORDS, 10**5000, -(10**5000)], ids=range(len(ODD_WORDS) + 2))
def test_odd_values_everywhere(value: Any) -> None:
    for field in sorted(RunConfig.model_fields):
        given_values = {"stream": "sine-2", "algorithm": "Oracle", field: value}
        call_or_refuse(lambda given_values=given_values: RunConfig.from_values(**given_values))  # type: ignore[misc]
    for name, entry in algorithms.ALGORITHMS.items():
        for key in (
            [*algorithms.get_options(entry.cls), str(value)]
            if isinstance(value, str)
            else algorithms.get_options(entry.cls)
        ):
            made = call_or_refuse(lambda name=name, key=key: algorithms.algorithm(name, **{key: value}))  # type: ignore[misc]
            if made is not None:
                _check_meaning(made, {key: value})
    if isinstance(value, str):
        call_or_refuse(lambda: parse_seeds(value))
        call_or_refuse(lambda: parse_poison(f"flip:{value}", 10))
        call_or_refuse(lambda: read_trace(value))
        call_or_refuse(lambda: find_unfinished_runs(Path(value) / "nowhere"))
        for text in (
            value,
            f"random:{value}",
            *(f"random:every=2,concepts=2,{key}={value}" for key in ("clients", "seed")),
        ):
            _check_pattern(text)
        _check_pattern(f"random:every={value},concepts={value}")


def test_one_line_has_an_end() -> None:
    assert len(str(FeddriftError("x " * 10**6))) == MAX_MESSAGE_LENGTH
    assert str(FeddriftError("a\nb\x1b")) == "a\\nb\\x1b"
