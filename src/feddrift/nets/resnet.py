"""ResNet-18 (He et al., 2016) as a pair of functions, with the parameter names of torchvision.

BatchNorm uses the fixed statistics of the weights. The minibatches of a client would shift them towards its classes,
and an average of statistics is right for none of the clients (docs/decisions/0009-resnet.md).
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
from feddrift.trees import tree_paths
from feddrift.types import Net, Params

STAGE_CHANNELS = (64, 128, 256, 512)  # two blocks each; all stages but the first halve the picture
BATCH_NORM_EPSILON = 1e-5

Arrays = Mapping[str, npt.NDArray[np.float32]]  # by torchvision's names


@cache
def resnet18(classes: int, weights: str | Path | None = None) -> Net:
    """Build a ResNet-18 for pictures [n, height, width, 3] of values 0 to 255; its trunk is all but the classifier.

    Args:
        classes: The number of classes.
        weights: A file with weights of torchvision's resnet18: .npz, .safetensors, or .pth if PyTorch is installed. A
            classifier for another number of classes is initialised randomly. None: all weights are random.
    """
    pretrained = {} if weights is None else read_weights(Path(weights))
    fixed = {
        name: pretrained.get(name, _make_default_statistics(name, shape))
        for name, shape in _list_statistics_shapes().items()
    }
    return Net(
        partial(_init_params, classes, pretrained),
        partial(_apply_net, fixed),
        is_in_trunk,
        classes={"fc/weight": 0, "fc/bias": 0},
        hidden=partial(_apply_trunk, fixed),
    )


def is_in_trunk(path: str) -> bool:
    """Return True if several models may share these parameters."""
    return not path.startswith("fc/")


def _list_parameter_shapes(classes: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"conv1.weight": (64, 3, 7, 7)} | _list_norm_shapes("bn1", 64)
    width = 64
    for s, channels in enumerate(STAGE_CHANNELS, start=1):
        for b in range(2):
            name = f"layer{s}.{b}"
            shapes |= {f"{name}.conv1.weight": (channels, width, 3, 3)} | _list_norm_shapes(f"{name}.bn1", channels)
            shapes |= {f"{name}.conv2.weight": (channels, channels, 3, 3)} | _list_norm_shapes(f"{name}.bn2", channels)
            if b == 0 and s > 1:
                shapes |= {f"{name}.downsample.0.weight": (channels, width, 1, 1)}
                shapes |= _list_norm_shapes(f"{name}.downsample.1", channels)
            width = channels
    return shapes | {"fc.weight": (classes, 512), "fc.bias": (classes,)}


def _list_norm_shapes(name: str, channels: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (channels,), f"{name}.bias": (channels,)}


def _list_statistics_shapes() -> dict[str, tuple[int, ...]]:
    """Return the shapes of mean and variance of each BatchNorm layer."""
    norms = [
        (n.removesuffix(".weight"), s)
        for n, s in _list_parameter_shapes(1).items()
        if len(s) == 1 and n.endswith(".weight")
    ]
    return {f"{name}.running_{kind}": shape for name, shape in norms for kind in ("mean", "var")}


def _make_default_statistics(name: str, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    return (np.ones if name.endswith("var") else np.zeros)(shape, dtype=np.float32)


def _init_params(classes: int, pretrained: Arrays, key: rng.Words) -> Params:
    params: dict[str, Any] = {}
    for i, (name, shape) in enumerate(_list_parameter_shapes(classes).items()):
        if name in pretrained and pretrained[name].shape == shape:
            leaf = np.asarray(pretrained[name], dtype=np.float32)
        else:
            leaf = _draw_parameter(name, shape, rng.threefry2x32(key, (np.uint32(i), np.uint32(1))))
        *branch, last = name.split(".")
        node = params
        for part in branch:
            node = node.setdefault(part, {})
        node[last] = leaf
    return params


def _draw_parameter(name: str, shape: tuple[int, ...], key: rng.Words) -> npt.NDArray[np.float32]:
    """Initialise as torchvision: Kaiming normal by fan-out, BatchNorm with one and zero, nn.Linear's uniform."""
    if len(shape) == 4:
        return rng.normal(key, shape) * np.float32(math.sqrt(2 / (shape[0] * shape[2] * shape[3])))
    if name.startswith("fc."):
        return rng.uniform(key, shape, -(512**-0.5), 512**-0.5)
    return (np.ones if name.endswith("weight") else np.zeros)(shape, dtype=np.float32)


def _apply_net(fixed: Arrays, params: Params, x: Any) -> Any:
    return compute_layers(fixed, params, x)["fc"]


def _apply_trunk(fixed: Arrays, params: Params, x: Any) -> Any:
    return compute_layers(fixed, params, x)["avgpool"]


def compute_layers(fixed: Arrays, params: Params, x: Any) -> dict[str, Any]:
    """Return the output of each layer by name; [n, height, width, channel] up to the pooling."""

    def normalize(x: Any, norm: Params, name: str) -> Any:
        scale = norm["weight"] / jnp.sqrt(fixed[f"{name}.running_var"] + BATCH_NORM_EPSILON)
        return (x - fixed[f"{name}.running_mean"]) * scale + norm["bias"]

    outputs = {"conv1": _convolve(x.astype(jnp.float32) / 255, params["conv1"]["weight"], 2, 3)}
    x = outputs["relu"] = jax.nn.relu(normalize(outputs["conv1"], params["bn1"], "bn1"))
    pads = ((0, 0), (1, 1), (1, 1), (0, 0))
    x = outputs["maxpool"] = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), pads)
    for s in range(1, 5):
        for b in range(2):
            block = params[f"layer{s}"][str(b)]
            name = f"layer{s}.{b}"
            stride = 2 if s > 1 and b == 0 else 1
            inner = jax.nn.relu(
                normalize(_convolve(x, block["conv1"]["weight"], stride, 1), block["bn1"], f"{name}.bn1")
            )
            inner = normalize(_convolve(inner, block["conv2"]["weight"], 1, 1), block["bn2"], f"{name}.bn2")
            if "downsample" in block:
                shortcut = _convolve(x, block["downsample"]["0"]["weight"], stride, 0)
                x = normalize(shortcut, block["downsample"]["1"], f"{name}.downsample.1")
            x = jax.nn.relu(inner + x)
        outputs[f"layer{s}"] = x
    x = outputs["avgpool"] = x.mean(axis=(1, 2))
    outputs["fc"] = x @ params["fc"]["weight"].T + params["fc"]["bias"]
    return outputs


def _convolve(x: Any, kernel: Any, stride: int, pad: int) -> Any:
    return jax.lax.conv_general_dilated(
        x, kernel, (stride, stride), ((pad, pad), (pad, pad)), dimension_numbers=("NHWC", "OIHW", "NHWC")
    )


def convert_to_torchvision(net: Net, params: Params) -> dict[str, npt.NDArray[np.float32]]:
    """Return the parameters of a `resnet18` and its BatchNorm statistics by the names that `read_weights` reads."""
    fixed: Arrays = net.apply.args[0]  # type: ignore[attr-defined]  # a partial
    arrays = {path.replace("/", "."): np.ascontiguousarray(leaf) for path, leaf in tree_paths(params)}
    return arrays | {name: np.ascontiguousarray(values) for name, values in fixed.items()}


def read_weights(path: Path) -> Arrays:
    """Read the weights of a torchvision resnet18 from a file.

    Raises:
        DataError: If the file cannot be read, or names or shapes are wrong.
    """
    try:
        if path.suffix == ".npz":
            with path.open("rb") as file, np.load(file) as arrays:  # np.load(path) may leave it open
                weights = {name: arrays[name] for name in arrays.files}
        elif path.suffix == ".safetensors":
            from safetensors.numpy import load_file

            weights = load_file(path)
        else:
            weights = _read_pytorch(path)
    except FeddriftError:
        raise
    except Exception as error:  # three libraries raise many kinds of errors for broken files
        raise DataError(f"cannot read the weights in {path}: {type(error).__name__}: {error}") from None
    expected = {
        n: s for n, s in (_list_parameter_shapes(1) | _list_statistics_shapes()).items() if not n.startswith("fc.")
    }
    for name, shape in expected.items():
        if name not in weights:
            raise DataError(f"{path} is not a ResNet-18: '{name}' is missing")
        if weights[name].shape != shape:
            raise DataError(f"{path} is not a ResNet-18: '{name}' has shape {weights[name].shape}, not {shape}")
    used = [*expected, *(name for name in weights if name.startswith("fc."))]
    return {name: _check_array(path, name, weights[name]) for name in used}


def _check_array(path: Path, name: str, array: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    if array.dtype.kind != "f":
        raise DataError(f"{path}: '{name}' must hold floating-point numbers, got {array.dtype}")
    with np.errstate(over="ignore"):
        weights = np.asarray(array, dtype=np.float32)
    if not np.isfinite(weights).all() or (name.endswith("running_var") and (weights < 0).any()):
        raise DataError(f"{path}: '{name}' must hold finite numbers, and no variance below 0")
    return weights


def _read_pytorch(path: Path) -> dict[str, Any]:
    try:
        import torch  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        raise DataError(
            f'reading {path} needs PyTorch; convert it once where PyTorch is installed: python -c "import torch, '
            f"numpy; numpy.savez('resnet18.npz', **torch.load('{path.name}', weights_only=True))\""
        ) from None
    state = torch.load(path, map_location="cpu", weights_only=True)
    return {name: tensor.numpy() for name, tensor in state.items()}
