"""The HTML report in a real browser: its content, no script errors, no blank pages."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread

from feddrift.reports import page
from feddrift.reports.page import data
from feddrift.runs import record
from feddrift.runs.writer import RecordWriter
from tests.support.records import make_header, make_merge_event, make_rows, write_federation_record, write_record

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
RESULTS = Path(__file__).parents[2] / "results"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="needs Chromium: apt-get install chromium"),
]


def browse(file: Path, *options: str, chosen: str = "") -> str:
    """What the browser prints of a page with this choice in its address; fails when a script complains."""
    assert BROWSER is not None
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=8000",
        "--enable-logging=stderr", f"--user-data-dir={file.parent / 'profile'}", *options, f"{file.as_uri()}#{chosen}",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert not [line for line in done.stderr.splitlines() if ":CONSOLE" in line], done.stderr
    return done.stdout


def read_text(file: Path, chosen: str = "") -> tuple[str, str]:
    """The page's markup after its scripts ran, and its text alone."""
    markup = browse(file, "--dump-dom", chosen=chosen)
    assert 'data-ready="yes"' in markup
    body = re.sub(r"<(script|style)\b.*?</\1>", "", markup, flags=re.S)
    return markup, re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", " ", body)))


def picture(file: Path, chosen: str, size: str = "1280,1400") -> Any:
    """A screenshot as an array [y, x, rgb]."""
    shot = file.parent / "shot.png"
    browse(file, f"--screenshot={shot}", f"--window-size={size}", chosen=chosen)
    return imread(shot)[..., :3]


@pytest.fixture(scope="module")
def sine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of committed records: FedDrift, Oblivious and Oracle on sine-2, ten seeds each."""
    names = ("FedDrift", "Oblivious", "Oracle")
    records = record.read_all(RESULTS / "tables", lambda h: h["stream"] == "sine-2" and h["algorithm"] in names)
    file = tmp_path_factory.mktemp("sine") / "report.html"
    page.write_page(records, file, "tables")
    return file


def test_a_new_client_can_list_who_drifted_when(sine: Path) -> None:
    _, text = read_text(sine, "algorithm=FedDrift&client=7&time=4")
    assert "sine-2: FedDrift, Oblivious and Oracle" in text and "FedDrift, seed 0" in text
    assert "10 of 10 drifts noticed, each in the step in which it happened" in text
    history = text[text.index("Client 7 Mean accuracy") :]
    assert "time 4 Its data changed from concept A to B; noticed at once." in history
    assert "Alarm: the best model's error rose from 0.020 to 0.990, by more than delta 0.1; model 2" in history
    assert "time 5 Model 2 merged into model 1" in history
    assert "feddrift run --stream sine-2 --algorithm FedDrift --set delta=0.1 --seed 0" in text
    assert "Dummy: always 0.11 1.00 0.00 90 80 0" in text  # precision, recall, delay, moves, false, missed


def test_pointing_at_a_cell_and_walking_with_arrow_keys(sine: Path) -> None:
    act = """<script>
      const wait = setInterval(() => {
        if (document.documentElement.dataset.ready !== "yes") return;
        clearInterval(wait);
        const map = document.querySelector(".map"), { left, top } = map.querySelector("canvas").getBoundingClientRect();
        for (const key of ["ArrowDown", "ArrowDown", "ArrowRight", "ArrowUp"])
          map.dispatchEvent(new KeyboardEvent("keydown", { key }));
        const x = left + view.maps.nameWidth + view.maps.panels[0].columnWidth * 4.5,
          y = top + 4 + view.maps.rowHeight * 5.5;
        map.dispatchEvent(new MouseEvent("mousemove", { clientX: x, clientY: y, bubbles: true }));
      }, 20);
    </script>"""
    file = sine.with_name("act.html")
    file.write_text(sine.read_text().replace("</body>", f"{act}</body>"))
    _, text = read_text(file, "algorithm=FedDrift&client=1&time=4")
    assert "Client 2 Mean accuracy" in text and "time 5 Its data changed" in text  # two down, one up, one right
    tooltip = text[text.index("Client 5, time 5") :]
    assert tooltip.startswith(
        "Client 5, time 5 model 5 accuracy, next step 99.2 % concept B, changed Alarm: the best model's"
    )


def test_another_run_is_chosen_by_the_address(sine: Path) -> None:
    markup, text = read_text(sine, "algorithm=Oblivious&seed=3")
    assert "Oblivious, seed 3" in text and "0 of 10 drifts noticed" in text
    assert markup.count("<canvas") == 2 and "missed" in text


def test_light_and_dark_and_not_blank(sine: Path) -> None:
    day, night = (picture(sine, f"theme={theme}") for theme in ("light", "dark"))
    assert day[700:, 5].mean() > 0.9 and night[700:, 5].mean() < 0.2  # the margin
    for shot in (day, night):
        assert len(np.unique((shot[::3, ::3] * 32).astype(int).reshape(-1, 3), axis=0)) > 60  # many colours


def test_names_are_text_whatever_they_are(tmp_path: Path) -> None:
    evil = "<img src=x onerror=\"document.title='pwned'\"><script>document.title='pwned'</script>"
    head = make_header(3, 2, clients=[evil, "</script>"], stream=f"folder:{evil}", algorithm="<b>Mine</b>")
    columns = {"model": [[0, 0], [1, 0], [1, 0]], "drift": [[False, False], [True, False], [False, False]]}
    cause = {"clients": [0], "reason": "<i>because</i>"}
    write_record(tmp_path / "runs", head, columns, [{"t": 1, "event": "created", "model": 1, "cause": cause}])
    page.write_page(record.read_all(tmp_path / "runs"), tmp_path / "report.html", "<u>runs</u>")
    markup, text = read_text(tmp_path / "report.html")
    assert "<title>&lt;u&gt;runs&lt;/u&gt; · feddrift report</title>" in markup
    assert "<img" not in markup and "<b>Mine" not in markup and "<i>because" not in markup
    assert "&lt;img src=x onerror=" in markup  # as text
    assert re.search(
        r"1 alarm was raised and acted on: <img[^.]*…[^.]+</script> at time 2\. The true concepts are unknown\.", text
    )
    assert "because" in text


def test_an_unfinished_run_is_shown_and_can_be_followed(tmp_path: Path) -> None:
    head = make_header(6, 3, concepts=[[0, 0, 0]] * 3 + [[1, 0, 0]] * 4)
    with RecordWriter(tmp_path / "runs", head) as writer:
        for t in range(3):
            writer.write_step(make_rows(head, t))
        page.write_page(record.read_all(tmp_path / "runs"), tmp_path / "report.html", "runs")
    markup, text = read_text(tmp_path / "report.html")
    assert "unfinished: 3 of 6 time steps" in text and "So far the clients use 1 model" in text
    assert re.search(r'<button[^>]*id="live"(?![^>]*hidden)', markup)


def test_a_run_before_its_first_step(tmp_path: Path) -> None:
    write_record(tmp_path / "runs", make_header(3, 2), steps=0)
    page.write_page(record.read_all(tmp_path / "runs"), tmp_path / "report.html", "runs")
    assert "No time step is done yet." in read_text(tmp_path / "report.html")[1]


def test_a_thousand_clients(tmp_path: Path) -> None:
    n, steps, draw = 1000, 20, np.random.default_rng(0)
    when = draw.integers(3, steps + 5, n)
    concepts = (np.arange(steps + 1)[:, None] >= when).astype(int)
    model = np.where(concepts[:-1] == 1, 1, 0)
    first = np.flatnonzero(when == 3)
    model[3, first] = 1 + np.arange(len(first))  # each its own, merged in the next step
    drift = np.zeros(model.shape, dtype=bool)
    drift[3, first] = True
    events = [
        {"t": 3, "event": "created", "model": 1 + k, "cause": {"clients": [int(c)], "from": 0}}
        for k, c in enumerate(first)
    ] + [make_merge_event(4, 1 + k, 1) for k in range(1, len(first))]
    accuracy = np.where(concepts[1:] == concepts[:-1], 0.9, 0.2)
    columns = {"model": model.tolist(), "drift": drift.tolist(), "accuracy": accuracy.tolist()}
    write_record(tmp_path / "runs", make_header(steps, n, concepts=concepts.tolist()), columns, events)
    file = tmp_path / "report.html"
    page.write_page(record.read_all(tmp_path / "runs"), file, "runs")
    assert file.stat().st_size < 300_000
    drifted = int(((when >= 1) & (when < steps)).sum())
    text = read_text(file, "client=17")[1]
    assert f"{drifted} of {drifted} drifts noticed" in text and "Client 17" in text and f"12 of {drifted}" in text
    shot = picture(file, "theme=light", "1280,2000")
    assert len(np.unique((shot[::3, ::3] * 32).astype(int).reshape(-1, 3), axis=0)) > 60


def test_of_many_clients_a_sample_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "MAX_SHOWN_CLIENTS", 100)
    n = 1000
    drift = [[False] * n, [c % 2 == 1 for c in range(n)]]
    file = tmp_path / "report.html"
    page.write_page([write_record(tmp_path, make_header(2, n), {"drift": drift})], file, "runs")
    _, text = read_text(file)
    assert "1,000 clients" in text and "500 alarms were raised and all were acted on" in text  # of all clients
    assert "an even sample of 100 of 1,000 clients; numbers and curves include all clients" in text
    assert "Among the clients of the sample. By mean accuracy" in text
    listed = int(re.findall(r"12 of (\d+)", text)[0])
    assert 30 < listed < 70  # about half of those that are shown


def test_absent_clients_and_names_of_times(tmp_path: Path) -> None:
    columns = {
        "received": [[5, 0], [5, 5], [0, 5], [5, 5]], "tested": [[5, 5], [0, 5], [5, 5], [5, 5]],
        "loss": [[0.5, None], [0.25, 0.125], [None, 0.1], [0.1, 0.1]], "sent_scoring": [[1, 0], [1, 1], [0, 1], [1, 1]],
    }  # fmt: skip
    head = make_header(4, 2, clients=["old", "new"], times=[f"week {k}" for k in range(5)], model_bytes=10**6)
    page.write_page([write_record(tmp_path, head, columns)], tmp_path / "report.html", "runs")
    _, text = read_text(tmp_path / "report.html", "client=new&time=1")
    assert "time 1 week 0 It had not joined yet." in text and "time 2 week 1 It joined: its first data." in text
    assert "not joined yet" in text and "pale: no new data" in text
    assert "Total: 74.0 MB for training and 6.0 MB for scoring." in text
    _, text = read_text(tmp_path / "report.html", "client=old&time=2")
    assert "time 3 week 2 No new data reached the server until time 4 (week 3)." in text
    act = """<script>
      const wait = setInterval(() => {
        if (document.documentElement.dataset.ready !== "yes") return;
        clearInterval(wait);
        const map = document.querySelector(".map"), { left, top } = map.querySelector("canvas").getBoundingClientRect();
        const x = left + view.maps.nameWidth + view.maps.panels[0].columnWidth * 1.5,
          y = top + 4 + view.maps.rowHeight * 1.5;
        map.dispatchEvent(new MouseEvent("mousemove", { clientX: x, clientY: y, bubbles: true }));
      }, 20);
    </script>"""
    file = tmp_path / "act.html"
    file.write_text((tmp_path / "report.html").read_text().replace("</body>", f"{act}</body>"))
    _, text = read_text(file)
    assert "new, time 2 (week 1)" in text and "loss before training 0.125" in text


def run_script(file: Path, script: str, chosen: str = "", width: int | None = None) -> tuple[str, str]:
    """As `text_of`, of a page in which a script acted when it was ready; within a frame of this width what it said."""
    act = f"""<script>
      const wait = setInterval(() => {{
        if (document.documentElement.dataset.ready !== "yes") return;
        clearInterval(wait);
        {script}
      }}, 20);
    </script>"""
    page_that_acts = file.with_name("act.html")
    page_that_acts.write_text(file.read_text().replace("</body>", f"{act}</body>"))
    if width is None:
        return read_text(page_that_acts, chosen)
    frame = file.with_name("frame.html")
    hears = "onmessage = (e) => { said.textContent = e.data; document.documentElement.dataset.ready = 'yes'; }"
    frame.write_text(
        f"<p id=said></p><script>{hears}</script>"
        f"<iframe src='act.html#{chosen}' style='width:{width}px;height:3000px;border:0'></iframe>"
    )
    return read_text(frame)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of committed records without a truth: five seeds of eleven methods, by log loss."""
    records = record.read_all(RESULTS / "real", lambda header: header["stream"] == "air-beijing")
    records.sort(key=lambda run: record.build_record_name(run.header))
    file = tmp_path_factory.mktemp("real") / "report.html"
    page.write_page(record.select_score(records, "log_loss"), file, "real")
    return file


def heads_and_names(markup: str) -> tuple[list[str], list[str]]:
    """Of the comparison, which heads sort it and how, and the first column."""
    (body,) = re.findall(r'<div class="scroll" id="compare".*?</div>', markup, flags=re.S)
    heads = re.findall(r'<th[^>]*aria-sort="(\w+)"[^>]*><button[^>]*>([^<]*)', body)
    names = re.findall(r"<tr[^>]*><td[^>]*>(?:<button[^>]*>)?([^<]*)", body)
    return [f"{text} {how}" for how, text in heads], names


def test_the_comparison_is_sorted_by_the_chosen_score_and_by_its_headers(real: Path) -> None:
    markup, text = read_text(real)
    heads, names = heads_and_names(markup)
    assert heads == ["log loss ascending"] and names[:3] == ["Oblivious", "FineTuned", "Local"] and len(names) == 11
    assert names[-1] == "Local-W" and "Majority" in names
    compared = text[text.index("Side by side") :]
    assert not re.search("omitting drifts|ARI|NMI|precision|lost|spare|Dummy", compared)  # nobody knows the truth
    press = """const press = (text) =>
      [...document.querySelectorAll("#compare th button")].find((b) => b.textContent.startsWith(text)).click();
      press("AUC");"""
    heads, best = heads_and_names(run_script(real, press)[0])
    assert heads == ["AUC, % descending"] and best[0] == "Oblivious"
    markup, text = run_script(
        real,
        press
        + """press("AUC");
      document.getElementById("foot").append(` ${document.activeElement.textContent} has the focus`);""",
    )
    heads, names = heads_and_names(markup)
    assert heads == ["AUC, % ascending"] and names == best[::-1]
    assert "AUC, % has the focus" in text
    assert heads_and_names(read_text(real, "sort=-auc")[0]) == (heads, names)
    assert heads_and_names(read_text(real, "sort=ari")[0])[0] == ["log loss ascending"]  # it is not there


def test_a_switch_has_the_numbers_that_explain_it(tmp_path: Path) -> None:
    """Client 1's old model is wrong on 0.6 of its new data, the one it moves to on 0.25: story, tip and table."""
    columns = {
        "model": [[0, 1], [0, 1], [0, 0]], "accuracy": [[0.9, 0.8], [0.9, 0.4], [0.9, 0.85]],
        "loss": [[0.1, 0.1], [0.1, 0.2], [0.1, 0.25]],
    }  # fmt: skip
    file = tmp_path / "report.html"
    record_of = write_record(tmp_path, make_header(3, 2, settings={"metric": "error"}), columns)
    page.write_page([record_of], file, "runs")
    moved = "Moved from model 1 to the existing model 0"
    point = """const map = document.querySelector(".map"),
        { left, top } = map.querySelector("canvas").getBoundingClientRect();
      const x = left + view.maps.nameWidth + view.maps.panels[0].columnWidth * 2.5,
        y = top + 4 + view.maps.rowHeight * 1.5;
      map.dispatchEvent(new MouseEvent("mousemove", { clientX: x, clientY: y, bubbles: true }));"""
    _, text = run_script(file, point, "client=1&time=3")
    why = f"{moved}: on its new data, model 1 had error 0.600 and model 0 had error 0.250 before training."
    assert text.count(why) == 2  # the story and the tip
    assert "error, old model error, new model accuracy next, % why" in text
    assert f"3 Client 1 switch 0.600 0.250 85.0 {moved}." in text
    page.write_page([write_record(tmp_path / "b", make_header(3, 2, settings={}), columns)], file, "runs")
    _, text = read_text(file, "client=1&time=3")
    assert "on its new data, model 1 had accuracy 40.0 % and model 0 had loss 0.250 before training." in text


MEASURE = """const root = document.documentElement, wide = [...document.querySelectorAll("main *")]
    .filter((e) => getComputedStyle(e).overflowX === "auto" && e.scrollWidth > e.clientWidth);
  const bare = wide.filter((e) => !getComputedStyle(e).backgroundImage.includes("gradient"));
  const covered = [...document.querySelectorAll("td button.link")].filter((e) => e.offsetParent &&
    e.getBoundingClientRect().right > e.closest("td").getBoundingClientRect().right + 1);
  const charts = wide.filter((e) => e.matches(".chart"));
  const out = [...document.querySelectorAll(".chart")].filter((e) => e.offsetParent).flatMap((e) => {
    const { left, right } = e.querySelector("svg").getBoundingClientRect();
    return [...e.querySelectorAll("text")].map((t) => [t.getBoundingClientRect(), t.textContent])
      .filter(([box]) => box.left < left - 2 || box.right > right + 2).map(([, text]) => text);
  });
  const cut = [...document.querySelectorAll(".chart text")].filter((t) => t.firstChild.data.includes("…")).length;
  parent.postMessage(
    `page ${root.scrollWidth - innerWidth} wide ${wide.length} bare ${bare.length} cut ${cut} ` +
      `covered ${covered.length} charts ${charts.length} out ${out}.`, "*");"""


@pytest.mark.parametrize("width", [390, 1440])
def test_nothing_but_wide_tables_scrolls_sideways(real: Path, width: int, tmp_path: Path) -> None:
    """These have a shadow at the edge; labels of charts and names in tables end in their places, however long."""
    head = make_header(13, 2, times=["30 September"] * 14, clients=["Wanshouxigong, north-west of the river", "b"])
    records = [
        write_record(tmp_path / str(k), head | {"settings": {"a_setting_with_a_long_name": k, "and_another_one": -k}})
        for k in range(2)
    ]
    page.write_page(records, tmp_path / "long.html", "long")
    for file in (real, tmp_path / "long.html"):
        text = run_script(file, MEASURE, width=width)[1]
        found = re.findall(r"page (-?\d+) wide (\d+) bare (\d+) cut (\d+) covered (\d+) charts (\d+) out (.*?)\.", text)
        page_wider, wide, bare, cut, covered, charts, out = found[0]
        assert int(page_wider) <= 0 and int(bare) == 0 and int(covered) == 0 and int(charts) == 0 and out == "", file
        assert (int(cut) > 0) == (file != real and width == 1440)  # names of usual length are whole, also below charts
        assert int(wide) >= 1 if width == 390 else int(wide) <= 1  # the comparison of methods


def test_on_a_narrow_screen_reasons_are_below_their_rows_and_lines_have_names(tmp_path: Path) -> None:
    """Nothing that a reader needs is beyond the edge: the reason of an alarm, and which line is which method."""
    names = ["hospital north-west, ward for internal medicine", "hospital south-east, ward for internal medicine"]
    columns = {"model": [[0, 0], [1, 0], [1, 0]], "drift": [[False] * 2, [True, False], [False] * 2]}
    cause = {"clients": [0], "reason": "the new data contradict the old data"}
    event = {"t": 1, "event": "created", "model": 1, "cause": cause}
    records = [
        write_record(tmp_path / "a", make_header(3, 2, clients=names), columns, [event]),
        write_record(tmp_path / "b", make_header(3, 2, clients=names, algorithm="Oblivious")),
    ]
    page.write_page(records, tmp_path / "report.html", "runs")
    measure = """const reason = document.querySelector("#drifts-list p.below"),
        inside = (e) => e.getBoundingClientRect().right <= innerWidth && e.getBoundingClientRect().left >= 0;
      const lines = [...document.querySelectorAll("#accuracy .key span")];
      parent.postMessage(JSON.stringify([reason?.textContent, reason && inside(reason), lines.map((e) => e.textContent),
        lines.every(inside), document.querySelectorAll("#drifts-list th").length, view.maps.names]), "*");"""

    def read(width: int) -> Any:
        text = run_script(tmp_path / "report.html", measure, width=width)[1]
        return json.loads(re.findall(r"\[.*\]", text)[0])

    reason, reason_inside, lines, lines_inside, n_columns, labels = read(390)
    assert reason.startswith("Alarm: the new data contradict the old data") and reason_inside
    assert sorted(lines) == ["FedDrift", "Oblivious"] and lines_inside
    assert len(set(labels)) == 2 and all(len(label) <= 13 for label in labels)
    reason, _, lines, _, n_columns_wide, labels = read(1440)
    assert reason is None and lines == [] and n_columns_wide == n_columns + 1
    assert len(set(labels)) == 2 and all(len(label) <= 25 for label in labels)


def test_a_single_alarm_as_at_most_clients_has_its_numbers(tmp_path: Path) -> None:
    """A rule change in a season has its own row; several such alarms share one, with the ranges of their scores."""
    shift = {"what": "mean", "name": "price", "before": 1.0, "after": 2.0, "distance": 1.0, "common": True}
    found = {"since": 0, "rows": [90, 90], "moved": [shift], "more": 0}
    columns = {
        "drift": [[False] * 3, [True, False, False], [False, True, True]],
        "accuracy": [[0.4, 0.9, 0.9], [0.9, 0.7, 0.5], [0.9, 0.8, 0.6]],
        "shifts": [[None] * 3, [found, None, None], [None, found, found]],
    }
    file = tmp_path / "report.html"
    page.write_page([write_record(tmp_path, make_header(3, 3), columns)], file, "runs")
    _, text = read_text(file)
    assert (
        "2 Client 0 alarm 40.0 90.0 Alarm, but no new model for this client. Its data: everything that changed" in text
    )
    assert "alarms 50.0 to 70.0 60.0 to 80.0 2 alarms: the data changed as at most clients, for example with" in text
    assert "alarm 1 as at most clients 1" in text  # the filter
    assert "cause common" not in text and "common cause" not in text


def test_commands_in_a_verdict_are_not_broken(tmp_path: Path) -> None:
    records = [write_record(tmp_path / name, make_header(3, 2, algorithm=name)) for name in ("FedDrift", "Oblivious")]
    page.write_page(records, tmp_path / "report.html", "runs")
    measure = """parent.postMessage("lines " + [...document.querySelectorAll("#verdict code")].map((e) =>
      e.getClientRects().length * (e.scrollHeight > 30 ? 2 : 1)).join() + ".", "*");"""
    for width in (320, 360, 390, 430):
        assert re.search(r"lines 1(,1)*\.", run_script(tmp_path / "report.html", measure, width=width)[1])


def test_an_unfinished_federation(tmp_path: Path) -> None:
    """Also before its first time step, and with one that is not tested yet."""
    going_on = write_federation_record(tmp_path)
    file = tmp_path / "page.html"
    page.write_page([going_on], file, "fed")
    _, text = read_text(file, "client=2&time=3")
    assert "3 clients · 1 run" in text and "unfinished: 3 time steps" in text
    assert "Time 3 (day 2) is trained and not tested yet" in text
    assert "Accuracy on the next time step: not tested yet." in text
    assert "last column: not tested yet" in text and "feddrift deploy run DIR" in text
    requests = text[text.index("Requests to the clients") :]
    assert "Client 1 0 of 2" in requests and "train, round 1 it is not connected" in requests
    empty = tmp_path / "empty.html"
    lines = (next(tmp_path.glob("*.part"))).read_text().splitlines(keepends=True)
    for n in (1, 2, 6):  # a header, a request, a time step that is not tested yet
        (tmp_path / "some.jsonl").write_text("".join(lines[:n]))
        page.write_page([record.read(tmp_path / "some.jsonl")], empty, "fed")
        text = read_text(empty)[1]
        assert ("No time step is done yet" in text) == (n < 6)
        assert ("Time 1 (day 0) is trained and not tested yet" in text) == (n == 6)
