"""ResNet-18 (He et al., 2016) as a pair of functions, with torchvision's names, so that its weights fit.

BatchNorm uses the statistics that come with the weights and never changes them: a client's minibatches would pull them
towards its own classes, and an average of statistics is not the statistics of anybody (docs/decisions/0009-resnet.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from feddrift import rng
from feddrift.errors import DataError, FeddriftError
from feddrift.trees import paths
from feddrift.types import Net, Params

STAGES = (64, 128, 256, 512)  # channels; two blocks each, all but the first stage halve the picture
EPS = 1e-5

Arrays = Mapping[str, npt.NDArray[np.float32]]  # by torchvision's names


@cache
def resnet18(classes: int, weights: str | Path | None = None) -> Net:
    """A ResNet-18 for pictures [n, height, width, 3] of values 0 to 255; its trunk is all but the classifier.

    `weights` is a file of torchvision's resnet18 (.npz or .safetensors by its names, or .pth where PyTorch is
    installed); without it all weights are random. A classifier of another number of classes starts anew.
    """
    pretrained = {} if weights is None else read_weights(Path(weights))
    fixed = {name: pretrained.get(name, _plain(name, shape)) for name, shape in _statistics().items()}
    make, logits, pooled = partial(_init, classes, pretrained), partial(_apply, fixed), partial(_pooled, fixed)
    return Net(make, logits, below_the_classifier, classes={"fc/weight": 0, "fc/bias": 0}, hidden=pooled)


def below_the_classifier(path: str) -> bool:
    """Whether several models may share these parameters."""
    return not path.startswith("fc/")


def _shapes(classes: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"conv1.weight": (64, 3, 7, 7)} | _norm("bn1", 64)
    width = 64
    for s, channels in enumerate(STAGES, start=1):
        for b in range(2):
            name = f"layer{s}.{b}"
            shapes |= {f"{name}.conv1.weight": (channels, width, 3, 3)} | _norm(f"{name}.bn1", channels)
            shapes |= {f"{name}.conv2.weight": (channels, channels, 3, 3)} | _norm(f"{name}.bn2", channels)
            if b == 0 and s > 1:
                shapes |= {f"{name}.downsample.0.weight": (channels, width, 1, 1)}
                shapes |= _norm(f"{name}.downsample.1", channels)
            width = channels
    return shapes | {"fc.weight": (classes, 512), "fc.bias": (classes,)}


def _norm(name: str, channels: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (channels,), f"{name}.bias": (channels,)}


def _statistics() -> dict[str, tuple[int, ...]]:
    """What BatchNorm knows of each channel: its mean and variance."""
    norms = [(n.removesuffix(".weight"), s) for n, s in _shapes(1).items() if len(s) == 1 and n.endswith(".weight")]
    return {f"{name}.running_{kind}": shape for name, shape in norms for kind in ("mean", "var")}


def _plain(name: str, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    return (np.ones if name.endswith("var") else np.zeros)(shape, dtype=np.float32)


def _init(classes: int, pretrained: Arrays, key: rng.Words) -> Params:
    params: dict[str, Any] = {}
    for i, (name, shape) in enumerate(_shapes(classes).items()):
        if name in pretrained and pretrained[name].shape == shape:
            leaf = np.asarray(pretrained[name], dtype=np.float32)
        else:
            leaf = _random(name, shape, rng.threefry2x32(key, (np.uint32(i), np.uint32(1))))
        *branch, last = name.split(".")
        place = params
        for part in branch:
            place = place.setdefault(part, {})
        place[last] = leaf
    return params


def _random(name: str, shape: tuple[int, ...], key: rng.Words) -> npt.NDArray[np.float32]:
    """As torchvision starts: Kaiming normal by fan-out, BatchNorm at one and zero, nn.Linear's uniform."""
    if len(shape) == 4:
        return rng.normal(key, shape) * np.float32(math.sqrt(2 / (shape[0] * shape[2] * shape[3])))
    if name.startswith("fc."):
        return rng.uniform(key, shape, -(512**-0.5), 512**-0.5)
    return (np.ones if name.endswith("weight") else np.zeros)(shape, dtype=np.float32)


def _apply(fixed: Arrays, params: Params, x: Any) -> Any:
    return layers(fixed, params, x)["fc"]


def _pooled(fixed: Arrays, params: Params, x: Any) -> Any:
    return layers(fixed, params, x)["avgpool"]


def layers(fixed: Arrays, params: Params, x: Any) -> dict[str, Any]:
    """The output of every layer, by name; [n, height, width, channel] up to the pooling."""

    def norm(x: Any, where: Params, name: str) -> Any:
        scale = where["weight"] / jnp.sqrt(fixed[f"{name}.running_var"] + EPS)
        return (x - fixed[f"{name}.running_mean"]) * scale + where["bias"]

    outputs = {"conv1": _convolved(x.astype(jnp.float32) / 255, params["conv1"]["weight"], 2, 3)}
    x = outputs["relu"] = jax.nn.relu(norm(outputs["conv1"], params["bn1"], "bn1"))
    pads = ((0, 0), (1, 1), (1, 1), (0, 0))
    x = outputs["maxpool"] = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), pads)
    for s in range(1, 5):
        for b in range(2):
            block, name = params[f"layer{s}"][str(b)], f"layer{s}.{b}"
            stride = 2 if s > 1 and b == 0 else 1
            inner = jax.nn.relu(norm(_convolved(x, block["conv1"]["weight"], stride, 1), block["bn1"], f"{name}.bn1"))
            inner = norm(_convolved(inner, block["conv2"]["weight"], 1, 1), block["bn2"], f"{name}.bn2")
            if "downsample" in block:
                beside = _convolved(x, block["downsample"]["0"]["weight"], stride, 0)
                x = norm(beside, block["downsample"]["1"], f"{name}.downsample.1")
            x = jax.nn.relu(inner + x)
        outputs[f"layer{s}"] = x
    x = outputs["avgpool"] = x.mean(axis=(1, 2))
    outputs["fc"] = x @ params["fc"]["weight"].T + params["fc"]["bias"]
    return outputs


def _convolved(x: Any, kernel: Any, stride: int, pad: int) -> Any:
    return jax.lax.conv_general_dilated(
        x, kernel, (stride, stride), ((pad, pad), (pad, pad)), dimension_numbers=("NHWC", "OIHW", "NHWC")
    )


def torchvision_names(net: Net, params: Params) -> dict[str, npt.NDArray[np.float32]]:
    """A model of `resnet18` and the statistics of its BatchNorm, by the names that `read_weights` reads."""
    fixed: Arrays = net.apply.args[0]  # type: ignore[attr-defined]  # a partial
    arrays = {path.replace("/", "."): np.ascontiguousarray(leaf) for path, leaf in paths(params)}
    return arrays | {name: np.ascontiguousarray(values) for name, values in fixed.items()}


def read_weights(path: Path) -> Arrays:
    """The arrays of a file of torchvision's resnet18, checked for names and shapes."""
    try:
        if path.suffix == ".npz":
            with path.open("rb") as file, np.load(file) as arrays:  # np.load alone leaves it open
                weights = {name: arrays[name] for name in arrays.files}
        elif path.suffix == ".safetensors":
            from safetensors.numpy import load_file

            weights = load_file(path)
        else:
            weights = _from_pytorch(path)
    except FeddriftError:
        raise
    except Exception as error:  # whatever three libraries say of a broken file
        raise DataError(f"cannot read the weights in {path}: {type(error).__name__}: {error}") from None
    expected = {n: s for n, s in (_shapes(1) | _statistics()).items() if not n.startswith("fc.")}
    for name, shape in expected.items():
        if name not in weights:
            raise DataError(f"{path} is no ResNet-18: it has no '{name}'")
        if weights[name].shape != shape:
            raise DataError(f"{path} is no ResNet-18: '{name}' has shape {weights[name].shape}, not {shape}")
    used = [*expected, *(name for name in weights if name.startswith("fc."))]
    return {name: _checked(path, name, weights[name]) for name in used}


def _checked(path: Path, name: str, array: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    if array.dtype.kind != "f":
        raise DataError(f"{path}: '{name}' must hold floating-point numbers, got {array.dtype}")
    with np.errstate(over="ignore"):
        weights = np.asarray(array, dtype=np.float32)
    if not np.isfinite(weights).all() or (name.endswith("running_var") and (weights < 0).any()):
        raise DataError(f"{path}: '{name}' must hold finite numbers, and no variance below 0")
    return weights


def _from_pytorch(path: Path) -> dict[str, Any]:
    try:
        import torch  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        raise DataError(
            f'reading {path} needs PyTorch; where that is installed, convert it once: python -c "import torch, numpy; '
            f"numpy.savez('resnet18.npz', **torch.load('{path.name}', weights_only=True))\""
        ) from None
    state = torch.load(path, map_location="cpu", weights_only=True)
    return {name: tensor.numpy() for name, tensor in state.items()}
