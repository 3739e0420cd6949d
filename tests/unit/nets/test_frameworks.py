"""The nets of other frameworks in docs/extend-nets.md, if these are installed."""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path

import pytest

import feddrift as fd
from feddrift.nets import named_net
from feddrift.testing import check_net
from tests.support.documentation import read_blocks

NETS = {
    "jax_nets:with_equinox": ("equinox", "keras"),
    "jax_nets:with_keras": ("equinox", "keras"),
    "torch_nets:small": ("torch", "torchax"),
    "torch_nets:Dropout": ("torch",),
}


@pytest.mark.filterwarnings("default")  # those of the frameworks are not ours
@pytest.mark.parametrize("name", NETS)
def test_nets_of_the_docs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = [package for package in NETS[name] if importlib.util.find_spec(package) is None]
    if missing:
        pytest.skip(f"{missing[0]} is not installed")
    for block in read_blocks("docs/extend-nets.md"):
        if block.file in ("jax_nets.py", "torch_nets.py"):
            (tmp_path / f"docs_{block.file}").write_text(block.text)
    monkeypatch.chdir(tmp_path)
    stream = fd.stream("sine-2")
    net = named_net(f"docs_{name}", stream)
    if name != "torch_nets:Dropout":
        check_net(net, [2], 2)
    *_, last = itertools.islice(fd.run(stream, "Oracle", net=net, local=fd.Local(rounds=2, steps=20)), 2)
    assert last.accuracy.mean() > 0.6
