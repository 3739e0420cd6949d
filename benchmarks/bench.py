"""The benchmarks: `python benchmarks/bench.py [SECTION ...]`, see README.md."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
HISTORY = HERE / "history.json"
SOURCE = str(HERE.parent / "src")

NETS = {"SINE 2-4-2": [2, 4, 2], "SEA 3-6-2": [3, 6, 2], "11-22-2": [11, 22, 2], "784-128-10": [784, 128, 10]}
PARAMETERS = [(4, 2), (8, 10), (24, 36), (45, 45), (46, 45), (128, 128), (320, 310)]  # features, hidden units
PUBLIC = "fd.stream; fd.algorithm; fd.run"
AUTHORS_TRIAL_MINUTES = 10.6  # one SINE-2 trial of the authors' system, its sleeps removed; measured elsewhere
FLOWER = "flwr[simulation]==1.41.0"
QUIET = {  # no telemetry of Flower and Ray
    "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}  # fmt: skip

out = Console(width=None if sys.stdout.isatty() else 120)
Numbers = dict[str, Any]


class Skipped(Exception):
    """Why a section cannot run here."""


class Failed(Skipped):
    """Error of a section, with its cause."""


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a process that runs feddrift: this source, and no stored programs of JAX."""
    env = {key: value for key, value in os.environ.items() if key != "JAX_COMPILATION_CACHE_DIR"}
    return env | {"PYTHONPATH": SOURCE} | more


def measure(work: str, one_core: bool = False, **arguments: Any) -> Any:
    """Return the result of work.py in its own process."""

    def restrict() -> None:
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})

    command = [sys.executable, str(HERE / "work.py"), work, json.dumps(arguments)]
    return answer(command, environment(), restrict if one_core else None)


def answer(command: list[str], env: dict[str, str], before: Callable[[], None] | None = None) -> Any:
    """The last line that a command prints, as JSON."""
    done = subprocess.run(command, capture_output=True, text=True, env=env, preexec_fn=before)
    if done.returncode:
        raise Failed(f"{' '.join(command[1:])}: {(done.stderr.strip() or 'no message').splitlines()[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


def fail(sentence: str) -> NoReturn:
    """One sentence, and out."""
    Console(stderr=True).print(f"Error: {sentence}", highlight=False, markup=False, soft_wrap=True)
    raise typer.Exit(2)


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table."""
    table = Table()
    for k, column in enumerate(columns):
        table.add_column(column, justify="right" if k else "left")
    for row in rows:
        table.add_row(*(number(cell) for cell in row))
    out.print(f"[bold]{title}[/]", table, "", highlight=False)


def number(value: object) -> str:
    """Three digits, as people write them."""
    if isinstance(value, float):
        return f"{value:.0f}" if value >= 100 else f"{value:#.3g}"
    return "-" if value is None else str(value)


def step(**_: Any) -> Numbers:
    """Microseconds per local step of one client's model."""
    ours = {cores: measure("train", cores == "one", cases=[{"net": net} for net in NETS.values()])
            for cores in ("one", "all")}  # fmt: skip
    found: Numbers = {}
    for k, (name, net) in enumerate(NETS.items()):
        floor = measure("floor", net=net)["us"] if shutil.which("cc") else None
        loop = measure("loop", net=net)
        one = ours["one"][k]["us"]
        all_ = ours["all"][k]["us"]
        found[name] = {
            "floor_us": floor, "one_core_us": one, "all_cores_us": all_, "loop_us": loop["us"],
            "ours_to_floor": one / floor if floor else None, "loop_to_ours": loop["us"] / all_, "loop": loop["in"],
        }  # fmt: skip
    columns = ["net", "C floor, one core", "ours, one core", "ours, all cores", loop["in"], "ours/floor, one core",
               "loop/ours, all cores"]  # fmt: skip
    rows = [[name, *list(row.values())[:6]] for name, row in found.items()]
    show("us per lane-step: 10 clients, minibatches of 50, Adam", columns, rows)
    if floor is None:
        out.print("no floor: a C compiler called cc is missing\n")
    return found


def flower(flower_python: str | None = None, **_: Any) -> Numbers:
    """Rounds of FedAvg in Flower's own simulation, and ours."""
    if not flower_python:
        raise Skipped(
            f"no Python with Flower: python3.11 -m venv DIR && DIR/bin/pip install '{FLOWER}', "
            "then --flower-python DIR/bin/python or FEDDRIFT_FLOWER_PYTHON=DIR/bin/python"
        )
    if not shutil.which(flower_python):
        raise Skipped(f"{flower_python} is not a program")
    steps = (5, 50)
    with tempfile.TemporaryDirectory() as home:
        env = environment(**QUIET, FLWR_HOME=home, PYTHONPATH=str(HERE))
        theirs = answer([flower_python, str(HERE / "flower_ray.py"), *map(str, steps)], env)
    ours = measure("train", cases=[{"net": NETS["SINE 2-4-2"], "steps": k} for k in steps])
    found: Numbers = {"start_up_seconds": theirs["start_up_seconds"]}
    for k, mine in zip(steps, ours, strict=True):
        one = mine["seconds_per_round"] * 1e3
        other = theirs["seconds_per_round"][str(k)] * 1e3
        found[f"{k} local steps"] = {"flower_ms": other, "ours_ms": one, "flower_to_ours": other / one}
    rows = [[name, *row.values()] for name, row in found.items() if isinstance(row, dict)]
    show(f"ms per round of FedAvg: 10 clients, SINE net (Flower first starts for {theirs['start_up_seconds']:.1f} s)",
         ["round", "Flower on Ray", "ours", "Flower/ours"], rows)  # fmt: skip
    return found


def growth(large: bool = False, **_: Any) -> Numbers:
    """Measure how time and memory grow with clients, models, history and parameters."""
    clients = {n: measure("drift", clients=n, steps=20) for n in (10, 100, 1000, *([10_000] if large else []))}
    axis("clients (FedDrift, 20 time steps, 5 rounds of 50 steps)", clients, {
        "ms per client and time step": "ms_per_client_step", "peak MB": "peak_mb", "MB of it for the run": "own_mb",
        "most models": "models",
    })  # fmt: skip
    if large:
        full = {n: measure("drift", clients=n, steps=20, rounds=100) for n in (100, 10_000)}
        axis("clients (FedDrift, 20 time steps, the paper's 100 rounds of 50 steps)", full, {
            "ms per client and time step": "ms_per_client_step", "peak MB": "peak_mb",
        })  # fmt: skip
    many = (1, 4, 16, 64)
    cases = [{"net": NETS["SINE 2-4-2"], "clients": 64, "models": m} for m in many]
    models = dict(zip(many, measure("train", cases=cases), strict=True))
    axis("models (Algorithm 1, 64 clients)", models, {"us per lane-step": "us"})
    history = {n: measure("drift", clients=10, steps=n) for n in (10, 50, 100, 200)}
    axis("time steps (FedDrift, 10 clients, 5 rounds of 50 steps)", history, {
        "ms per time step, last tenth": "ms_per_late_step", "peak MB": "peak_mb", "most models": "models",
    })  # fmt: skip
    sizes = [h * (d + 3) + 2 for d, h in PARAMETERS]
    cases = [{"net": [d, h, 2]} for d, h in PARAMETERS]
    parameters = dict(zip(sizes, measure("train", cases=cases), strict=True))
    for size, row in parameters.items():
        row["us_per_1000"] = row["us"] / size * 1000
    axis("parameters (Algorithm 1, 10 clients)", parameters, {
        "us per lane-step": "us", "us per 1000 parameters": "us_per_1000", "code": "code",
    })  # fmt: skip
    found = {"clients": clients, "models": models, "history": history, "parameters": parameters}
    return found | ({"clients_full": full} if large else {})


def axis(name: str, found: dict[int, Numbers], columns: dict[str, str]) -> None:
    """One table of growth; the first column's numbers also relative to those of the first row."""
    first, *_ = columns.values()
    base = next(iter(found.values()))[first]
    rows = [[n, *(row[key] for key in columns.values()), row[first] / base] for n, row in found.items()]
    show(f"growth with {name}", [name.partition(" (")[0], *columns, "relative"], rows)


def server(**_: Any) -> Numbers:
    """Measure the server: merging, and all work between requests."""
    found: Numbers = {f"merge {n}": measure("merge", models=n)["seconds"] for n in (1000, 5000)}
    found["between verbs, %"] = measure("between")["percent"]
    title = "the server: seconds to merge models into five; share of a SINE-2 run between the verbs"
    show(title, list(found), [list(found.values())])
    return found


def methods(**_: Any) -> Numbers:
    """Whole runs of what needs no settings beside what it is compared with."""
    names = ["FedDrift", "Oblivious", "Local", "FineTuned", "FedDrift-Trunk", "FedDrift-Auto"]
    found: Numbers = {}
    for stream in ("sine-2", "air-quality"):
        if (seconds := measure("methods", stream=stream, names=names)) is not None:
            found[stream] = {"seconds": seconds, "to FedDrift": {n: seconds[n] / seconds["FedDrift"] for n in names}}
    if "air-quality" not in found:
        out.print("no air-quality: its data are not there, see docs/streams.md\n")
    rows = [[f"{stream}, {what}", *values.values()] for stream, both in found.items() for what, values in both.items()]
    show("a whole run, and relative to FedDrift's", ["", *names], rows)
    return found


def start(**_: Any) -> Numbers:
    """Seconds from the shell to a first result."""
    with tempfile.TemporaryDirectory() as folder:
        env = environment(NUMBA_CACHE_DIR=f"{folder}/cache")
        numpy, names = (python(code, env) for code in ("import numpy", f"import feddrift as fd; {PUBLIC}"))
        version = statistics.median(command(["--version"], env)[1] for _ in range(9))
        trials = [trial(Path(folder) / str(k), env) for k in range(4)]
    warm = [statistics.median(parts) for parts in zip(*trials[1:], strict=True)]
    found: Numbers = {
        "version": version, "authors_minutes": AUTHORS_TRIAL_MINUTES, "import_numpy": numpy,
        "version_to_numpy": version / numpy, "names_to_numpy": names / numpy,
    }  # fmt: skip
    show("multiples of python -c 'import numpy'",
         ["import numpy, s", "feddrift --version", f"import feddrift as fd; {PUBLIC}"],
         [[numpy, version / numpy, names / numpy]])  # fmt: skip
    for name, (first, whole) in {"empty caches": trials[0], "warm caches": warm}.items():
        authors = AUTHORS_TRIAL_MINUTES * 60 / whole
        found[name] = {"first_step": first, "trial": whole, "authors_to_ours": authors}
    rows = [[name, version, *row.values()] for name, row in found.items() if isinstance(row, dict)]
    show("seconds from the shell: feddrift run --stream sine-2 --algorithm FedDrift",
         ["", "--version", "first time step", "whole trial", f"authors' {AUTHORS_TRIAL_MINUTES} min / ours"],
         rows)  # fmt: skip
    return found


def trial(folder: Path, env: dict[str, str]) -> tuple[float, float]:
    """Seconds to the first time step in the record, and to the end."""
    arguments = ["run", "--stream", "sine-2", "--algorithm", "FedDrift", "--out", str(folder)]

    def has_rows() -> bool:
        return any('"row"' in record.read_text() for record in folder.glob("*.jsonl*"))

    return command(arguments, env, has_rows)


def python(code: str, env: dict[str, str]) -> float:
    """Seconds that Python takes for this code, start and end included."""

    def once() -> float:
        begin = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], env=env, check=True)
        return time.perf_counter() - begin

    return statistics.median(once() for _ in range(9))


def command(arguments: list[str], env: dict[str, str], seen: Callable[[], bool] = lambda: True) -> tuple[float, float]:
    """Seconds until something is seen while feddrift runs, and until it ends."""
    begin = time.perf_counter()
    first = 0.0
    process = subprocess.Popen([sys.executable, "-m", "feddrift", *arguments], env=env, stdout=subprocess.DEVNULL)
    while process.poll() is None:
        if not first and seen():
            first = time.perf_counter() - begin
        time.sleep(0.005)
    if process.returncode:
        raise Failed(f"feddrift {' '.join(arguments)} ended with {process.returncode}")
    whole = time.perf_counter() - begin
    return first or whole, whole


def machine() -> Numbers:
    """Describe the machine and the versions on which the numbers depend."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    packages = {name: importlib.metadata.version(name) for name in ("numpy", "jax", "numba")}
    cores = len(os.sched_getaffinity(0))
    return {"cpu": model or platform.machine(), "cores": cores, "load": os.getloadavg()[0],
            "python": platform.python_version(), **packages}  # fmt: skip


def commit() -> str:
    """The short name of the commit, with a + where the tree differs from it."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", HERE, *arguments], capture_output=True, text=True).stdout.strip()

    changed = git("status", "--porcelain", "--", "..", f":!{HISTORY.name}")
    return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")


def past() -> list[Any]:
    """The entries so far."""
    try:
        entries = json.loads(HISTORY.read_text()) if HISTORY.exists() else []
    except ValueError:
        entries = None
    return entries if isinstance(entries, list) else fail(f"{HISTORY} is not a JSON list: repair it, or --no-history")


SECTIONS: dict[str, Callable[..., Numbers]] = {
    "step": step, "flower": flower, "growth": growth, "server": server, "methods": methods,
    "start": start,
}  # fmt: skip


def main(
    sections: Annotated[list[str] | None, typer.Argument(help=f"of {', '.join(SECTIONS)}; default: all")] = None,
    no_history: Annotated[bool, typer.Option("--no-history", help="only print")] = False,
    large: Annotated[bool, typer.Option("--large", help="growth: also 10 000 clients, some 15 minutes more")] = False,
    flower_python: Annotated[
        str | None, typer.Option(envvar="FEDDRIFT_FLOWER_PYTHON", help=f"a Python that has {FLOWER}")
    ] = None,
) -> None:
    """Measure feddrift beside a C floor, a plain loop, Flower, and itself at other sizes."""
    for name in sections or []:
        if name not in SECTIONS:
            fail(f"unknown section {name!r}: choose from {', '.join(SECTIONS)}")
    entries = [] if no_history else past()
    entry: Numbers = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "commit": commit(), "machine": machine()}
    if entry["machine"]["load"] > 0.5:
        out.print(f"the machine is busy (load {entry['machine']['load']:.1f}): expect noise, most on all cores\n")
    for name in dict.fromkeys(sections or SECTIONS):
        try:
            entry[name] = SECTIONS[name](flower_python=flower_python, large=large)
        except Skipped as reason:
            word = "failed" if isinstance(reason, Failed) else "skipped"
            entry[name] = {word: str(reason)}
            out.print(f"{name} {word}: {reason}\n", highlight=False, markup=False, soft_wrap=True)
    if not no_history:
        text = json.dumps([*entries, entry], indent=1)
        part = HISTORY.with_suffix(".part")
        part.write_text(text + "\n")
        part.replace(HISTORY)
        out.print(f"added to {HISTORY}", highlight=False, soft_wrap=True)
    if any("failed" in entry.get(name, {}) for name in SECTIONS):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
