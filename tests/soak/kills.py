"""Soak A: processes are killed again and again, and the result equals that of an undisturbed run, bit for bit."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import numpy as np

from feddrift import algorithms
from feddrift.deploy.server.loop import federate
from feddrift.engines.conditions.conditions import Conditions
from feddrift.engines.flower.client.batches import StepFiles
from feddrift.engines.flower.client.client import Client
from feddrift.engines.flower.local_grid import LocalGrid
from feddrift.engines.flower.server.connection import Roster
from feddrift.engines.flower.server.exchange import WaitingRules
from feddrift.engines.flower.server.federation import Flower
from feddrift.runs.record import Record, read_latest
from feddrift.simulation import Step
from tests.soak.deployment import ANSWERED, Deployment, digest

SERVER_SIDE = [("server", "flower-superlink"), ("server", "flower-superexec"), ("server", "flwr-serverapp"),
               ("server", "deploy server"), ("server", "nginx: master"), ("run", "deploy run")]  # fmt: skip
CLIENT_SIDE = ["flower-superexec", "deploy client"]


def soak_a(folder: Path, kills: int, steps: int = 4, seed: int = 0) -> Deployment:
    """Kill so many processes, and end as if nothing had happened."""
    clients = ("a", "b", "c")
    fed = Deployment(folder, clients, f"time_steps = {steps}\nrounds = 2\nquorum = 3\nevaluate = 90\ntrain = 90\n")
    for t in range(steps + 1):
        for name in clients:
            fed.deliver(name, swapped=name == "c" and t >= 2)
    whole, record = run_undisturbed(fed, folder / "undisturbed")
    draw = random.Random(seed)
    with fed.running():
        for name in ("server", *clients):
            fed.start(name)
        fed.until_online(3)
        fed.start("run")
        for strike in itertools.count():
            if fed.kills >= kills:
                break
            fed.skip()
            for _ in range(1 + draw.randrange(2)):
                fed.until(ANSWERED)
            if strike % 2:  # between messages, and while there is a server to say goodbye to
                victims = [(name, draw.choice(CLIENT_SIDE)) for name in draw.sample(clients, 2)] + [SERVER_SIDE[-1]]
            else:
                victims = draw.sample(SERVER_SIDE, 3)
            for unit, word in victims:
                fed.kill(unit, word)
        fed.until_finished()
    found = fed.record
    assert fed.digests == {step.tau: {digest(step.state)} for step in whole}, (fed.digests, fed.read_logs())
    for name in ("received", "model", "n_models", "drift", "tested", "accuracy"):
        np.testing.assert_array_equal(getattr(found.rows, name), getattr(record.rows, name), name)
    assert [_plain(event) for event in found.events] == [_plain(event) for event in record.events]
    fed.say(f"soak A: {fed.kills} kills, {steps} time steps, all as in the undisturbed run")
    return fed


def run_undisturbed(fed: Deployment, folder: Path) -> tuple[list[Step], Record]:
    """The same federation in one process, with nothing between server and clients that could fail."""
    settings = fed.settings
    clients = {name: Client(name, folder, StepFiles(fed.folder / "clients" / name / "data")) for name in fed.clients}
    keys = {name.encode(): name for name in fed.clients}
    roster = Roster(settings.experiment, fed.clients, keys, settings.features, len(settings.classes))
    rules = WaitingRules(quorum=len(fed.clients), start=0, poll=0.01, look=0.01)
    engine = Flower(
        *(LocalGrid(clients), roster, settings.create_net(fed.server), settings.local, settings.seed, rules),
        *(Conditions(defend=settings.defend), settings.time_steps),
        explain=settings.explain,
    )
    algorithm = algorithms.algorithm(settings.algorithm, **settings.settings)
    steps = list(federate(engine, algorithm, folder / "state"))
    record = read_latest(folder / "state" / f"{settings.experiment}.jsonl")
    assert record is not None
    return steps, record


def _plain(event: dict[str, Any]) -> tuple[Any, ...]:
    return event["t"], event["event"], event["model"], event["cause"]
