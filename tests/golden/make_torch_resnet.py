"""Write torch_resnet.json: outputs of torchvision's ResNet-18 on . Needs torchvision."""

from __future__ import annotations

import importlib
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np


def make_weights(shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    """Weights and statistics that anybody can make again, from their names alone."""
    made = {}
    for name, shape in shapes.items():
        a = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
        if name.endswith("running_var"):
            a = np.abs(a) + 0.5
        elif len(shape) == 4:
            a *= np.sqrt(2 / (shape[0] * shape[2] * shape[3]))
        else:
            a = a * 0.1 + (len(shape) == 1 and name.endswith("weight"))
        made[name] = a.astype(np.float32)
    return made


def make_pictures() -> Any:
    return np.random.RandomState(1).randint(0, 256, (2, 64, 64, 3)).astype(np.uint8)


def describe_array(a: Any) -> dict[str, Any]:
    """Enough of an array [n, ...] to tell it from another."""
    flat = np.asarray(a, dtype=np.float64).reshape(-1)
    return {
        "shape": list(a.shape),
        "mean": flat.mean(),
        "std": flat.std(),
        "some": flat[:: max(1, len(flat) // 16)][:16].tolist(),
    }


def main() -> None:
    torch, torchvision = (importlib.import_module(name) for name in ("torch", "torchvision"))
    model = torchvision.models.resnet18()
    shapes = {n: tuple(v.shape) for n, v in model.state_dict().items() if v.dtype == torch.float32}
    model.load_state_dict({n: torch.tensor(a) for n, a in make_weights(shapes).items()}, strict=False)
    model.eval()
    found: dict[str, Any] = {}
    for name in ("conv1", "relu", "maxpool", "layer1", "layer2", "layer3", "layer4", "avgpool", "fc"):

        def keep(_: Any, __: Any, out: Any, name: str = name) -> None:
            a = out.detach().numpy()
            a = a.transpose(0, 2, 3, 1) if a.ndim == 4 else a
            found.setdefault(name, describe_array(a.reshape(2, -1) if name == "avgpool" else a))

        getattr(model, name).register_forward_hook(keep)
    x = torch.tensor(make_pictures().transpose(0, 3, 1, 2).astype(np.float32) / 255)
    with torch.no_grad():
        model(x)
    found["versions"] = {"torch": torch.__version__, "torchvision": torchvision.__version__}
    Path(__file__).with_name("torch_resnet.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
