"""The classifier with the interface of scikit-learn: its checks, data of clients over time, and pipelines."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import feddrift as fd

sklearn = pytest.importorskip("sklearn", minversion="1.7", reason="scikit-learn is not installed")

from sklearn.base import clone  # noqa: E402
from sklearn.model_selection import GridSearchCV, TimeSeriesSplit, cross_validate  # noqa: E402
from sklearn.pipeline import make_pipeline  # noqa: E402
from sklearn.preprocessing import StandardScaler  # noqa: E402
from sklearn.utils.estimator_checks import check_estimator, parametrize_with_checks  # noqa: E402

from feddrift.sklearn import FedDriftClassifier  # noqa: E402

PAGE = Path(__file__).parents[2] / "docs" / "sklearn.md"
EXPECTED_FAILED_CHECKS: dict[str, str] = {}  # by check: the reason
SKIPPED_CHECKS = {"check_array_api_input"}
PAGE_VERSION = "1.9"  # of scikit-learn, whose checks the page lists
QUICK = {"rounds": 5, "steps": 10, "lr": 0.1, "random_state": 0}


def make_classifier(algorithm: str = "FedDrift-Auto", **parameters: Any) -> Any:
    return FedDriftClassifier(algorithm, **(QUICK | parameters))


class Drift:
    """Two clients, three time steps; from the second one on, the labels of client b are swapped."""

    def __init__(self) -> None:
        draw = np.random.default_rng(0)
        self.X: npt.NDArray[Any] = draw.uniform(size=(1200, 2))
        self.clients = np.repeat(["a", "b"], 600)
        self.times = np.tile(["2024-01", "2024-02", "2024-03"], 400)
        self.swapped = (self.clients == "b") & (self.times > "2024-01")
        self.y = np.where((self.X[:, 0] > 0.5) ^ self.swapped, "yes", "no")
        self.last = self.times == "2024-03"

    def fit(self, model: Any) -> Any:
        return model.fit(self.X, self.y, clients=self.clients, times=self.times)


@pytest.fixture(scope="module")
def drift() -> Drift:
    return Drift()


def expect_failures(_: Any) -> dict[str, str]:
    return EXPECTED_FAILED_CHECKS


@parametrize_with_checks([make_classifier(), make_classifier("AUE")], expected_failed_checks=expect_failures)  # type: ignore[untyped-decorator]
def test_the_checks_of_scikit_learn_pass(estimator: Any, check: Any) -> None:
    check(estimator)


def test_the_page_lists_the_checks_that_pass_and_that_are_skipped() -> None:
    results = check_estimator(make_classifier("Local"), on_skip=None, expected_failed_checks=EXPECTED_FAILED_CHECKS)
    names = {status: {r["check_name"] for r in results if r["status"] == status} for status in ("passed", "skipped")}
    assert names["passed"] | names["skipped"] == {r["check_name"] for r in results}
    assert names["skipped"] <= SKIPPED_CHECKS
    if not sklearn.__version__.startswith(PAGE_VERSION):
        return
    passed, skipped = PAGE.read_text().partition("## Passed checks")[2].split("## Skipped checks")
    assert set(passed.partition("```text\n")[2].partition("```")[0].split()) == names["passed"]
    assert set(re.findall(r"`(check_\w+)`", skipped)) == SKIPPED_CHECKS | set(EXPECTED_FAILED_CHECKS)


def test_drift_at_one_client_raises_an_alarm_and_gives_it_another_model(drift: Drift) -> None:
    model = drift.fit(make_classifier("FedDrift"))
    assert model.alarms_ == [(1, "b")] and model.clients_ == ["a", "b"] and model.n_steps_ == 3
    assert np.isnan(model.test_scores_[0]) and 0.4 < model.test_scores_[1] < 0.6 < model.test_scores_[2]
    last = drift.last
    by_client = model.score(drift.X[last], drift.y[last], clients=drift.clients[last])
    assert by_client > 0.95 > 0.6 > model.score(drift.X[last], drift.y[last])
    assert model.predict(drift.X[:3], clients=["a", "b", "a"]).dtype == drift.y.dtype


@pytest.mark.parametrize("algorithm", ["FedDrift", "FedDrift-Auto", "AUE", "DriftSurf"])
def test_partial_fit_for_each_time_step_is_the_same_as_fit(drift: Drift, algorithm: str) -> None:
    whole, parts = drift.fit(make_classifier(algorithm)), make_classifier(algorithm)
    for time in np.unique(drift.times):
        rows = drift.times == time
        parts.partial_fit(drift.X[rows], drift.y[rows], clients=drift.clients[rows], classes=["no", "yes"])
        parts = pickle.loads(pickle.dumps(parts))
    for method in ("predict", "predict_proba"):
        expected = getattr(whole, method)(drift.X, clients=drift.clients)
        np.testing.assert_array_equal(getattr(parts, method)(drift.X, clients=drift.clients), expected)
    assert parts.alarms_ == whole.alarms_ and parts.n_steps_ == 3
    np.testing.assert_array_equal(parts.test_scores_, whole.test_scores_)


def test_the_models_are_those_of_a_run_on_the_same_stream(drift: Drift) -> None:
    labels = drift.y == "yes"
    cells: Any = []
    for time in np.unique(drift.times):
        parts = [(drift.times == time) & (drift.clients == client) for client in ("a", "b")]
        cells.append([(drift.X[rows], labels[rows]) for rows in parts])
    cells.append([(drift.X[:0], labels[:0])] * 2)
    *_, step = fd.run(fd.Stream.from_arrays(cells), "FedDrift", local=fd.Local(rounds=5, steps=10, lr=0.1), seed=0)
    model = drift.fit(make_classifier("FedDrift"))
    np.testing.assert_array_equal(model.state_.models.params["W1"], step.state.models.params["W1"])
    assert model.state_.models.ids == step.state.models.ids


def test_an_unknown_client_gets_the_shared_model_that_most_clients_use(drift: Drift) -> None:
    model = make_classifier("FedDrift")
    clients = np.where(np.arange(1200) < 300, "c", drift.clients)  # a and c have one concept, b another
    model.fit(drift.X, drift.y, clients=clients, times=drift.times)
    new = model.predict_proba(drift.X, clients=np.full(1200, "new"))
    np.testing.assert_array_equal(new, model.predict_proba(drift.X))
    np.testing.assert_array_equal(new, model.predict_proba(drift.X, clients=np.full(1200, "a")))
    assert (new != model.predict_proba(drift.X, clients=np.full(1200, "b"))).any()


def test_a_client_may_join_later_and_another_may_be_absent(drift: Drift) -> None:
    model = make_classifier("FedDrift")
    model.partial_fit(drift.X[:200], drift.y[:200], clients=["b"] * 200, classes=["no", "yes"])
    model.partial_fit(drift.X[200:400], drift.y[200:400], clients=["a"] * 200)
    assert model.clients_ == ["b", "a"] and model.n_steps_ == 2 and len(model.test_scores_) == 2
    assert model.score(drift.X[:400], drift.y[:400], clients=["a", "b"] * 200) > 0.9


def test_parameters_reach_the_run_and_are_cloned(drift: Drift) -> None:
    net = fd.mlp(2, 7, 2)
    model = clone(make_classifier("FedDrift", settings={"delta": 0.9}, net=net))
    assert model.get_params()["settings"] == {"delta": 0.9} and model.set_params(batch=20).batch == 20
    drift.fit(model)
    assert model.alarms_ == [] and model.state_.models.params["W1"].shape == (1, 2, 7)  # no error rises by 90 points
    assert drift.fit(make_classifier("Oblivious", net="linear")).state_.models.params.keys() != {"W1", "b1", "W2", "b2"}
    one, other = (drift.fit(make_classifier("Oblivious", random_state=seed)) for seed in (0, np.random.RandomState(1)))
    assert (one.predict_proba(drift.X) != other.predict_proba(drift.X)).any()


def test_a_pipeline_passes_clients_and_times(drift: Drift) -> None:
    model = make_pipeline(StandardScaler(), make_classifier("FedDrift"))
    step = "feddriftclassifier"
    model.fit(drift.X, drift.y, **{f"{step}__clients": drift.clients, f"{step}__times": drift.times})
    assert model[-1].alarms_ == [(1, "b")]
    right = model.predict(drift.X[drift.last], clients=drift.clients[drift.last]) == drift.y[drift.last]
    assert right.mean() > 0.95


def test_metadata_routing_passes_clients_and_times_to_cross_validation(drift: Drift) -> None:
    order = np.argsort(drift.times, kind="stable")
    X, y, clients, times = drift.X[order], drift.y[order], drift.clients[order], drift.times[order]
    with sklearn.config_context(enable_metadata_routing=True):
        classifier = make_classifier("Local-W", rounds=20)
        classifier.set_fit_request(clients=True, times=True).set_score_request(clients=True)
        model = make_pipeline(StandardScaler(), classifier)
        split = TimeSeriesSplit(2)
        given = {"clients": clients, "times": times}
        scores = cross_validate(model, X, y, cv=split, params=given, return_estimator=True)
        assert [e[-1].clients_ for e in scores["estimator"]] == [["a", "b"]] * 2 and scores["test_score"][1] > 0.9
        search = GridSearchCV(model, {"feddriftclassifier__lr": [1e-6, 0.1]}, cv=split).fit(X, y, **given)
        assert search.best_params_ == {"feddriftclassifier__lr": 0.1}


@pytest.mark.parametrize(
    ("parameters", "sentence"),
    [
        ({"algorithm": "Fedrift"}, "unknown algorithm 'Fedrift'"),
        ({"algorithm": fd.State}, "algorithm must be a name or an object with init and step"),
        ({"algorithm": fd.algorithm("FedDrift"), "settings": {"delta": 1}}, "settings are for an algorithm .* by name"),
        ({"settings": {"delt": 0.1}, "algorithm": "FedDrift"}, "setting of FedDrift.*'delt', did you mean 'delta'"),
        ({"net": "liner"}, "unknown net 'liner'"),
        ({"net": fd.mlp(5, 4, 2)}, "the net takes 5 features"),
        ({"rounds": 0}, "rounds must be at least 1, got 0"),
        ({"lr": -1}, "lr must be above 0"),
        ({"random_state": -1}, "random_state must be a whole number from 0 on or None, got -1"),
    ],
)
def test_a_wrong_parameter_is_reported_by_fit(drift: Drift, parameters: dict[str, Any], sentence: str) -> None:
    model = make_classifier(**parameters)
    with pytest.raises(fd.ConfigError, match=sentence):
        model.fit(drift.X, drift.y)
    assert not hasattr(model, "state_")


def test_wrong_data_are_reported_as_scikit_learn_does(drift: Drift) -> None:
    X, y = drift.X[:40], drift.y[:40]
    model = make_classifier("Local")
    for arguments, sentence in (
        ({"clients": ["a"] * 39}, "clients must have a value for each of 40 rows, got 39"),
        ({"times": [1] * 41}, "times must have a value for each of 40 rows, got 41"),
        ({"times": [1.0] * 39 + [np.nan]}, "times must have a value for each row, row 39 has none"),
        ({"clients": [None] + ["a"] * 39}, "clients must have a value for each row, row 0 has none"),
    ):
        with pytest.raises(ValueError, match=sentence):
            model.fit(X, y, **arguments)
    with pytest.raises(ValueError, match="classes must be given in the first call"):
        model.partial_fit(X, y)
    with pytest.raises(ValueError, match="y has the class yes, known are \\['no'\\]"):
        model.partial_fit(X, y, classes=["no"])
    model.partial_fit(X, y, classes=["yes", "no"])
    before = model.predict_proba(X)
    with pytest.raises(ValueError, match="classes must be those of the first call"):
        model.partial_fit(X, y, classes=["yes", "no", "maybe"])
    with pytest.raises(ValueError, match="clients must be given in all calls or in none"):
        model.partial_fit(X, y, clients=["a"] * 40)
    with pytest.raises(ValueError, match="y has the class perhaps"):
        model.partial_fit(X, ["perhaps"] * 40)
    assert model.n_steps_ == 1
    np.testing.assert_array_equal(model.predict_proba(X), before)
