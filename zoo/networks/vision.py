"""Networks of torchvision and timm."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from torch import nn

from zoo.network import Inputs, Network

_CLASSES: Final = 16


def _images(size: int, batch: int) -> Inputs:
    return {"x": torch.randn(batch, 3, size, size)}


def _network(
    name: str, library: str, build: Callable[[], nn.Module], size: int = 64, batch: int = 2
) -> Network:
    return Network(
        name=name,
        library=library,
        build=build,
        inputs=partial(_images, size, batch),
        dynamic={"x": {0: "batch"}},
    )


def _torchvision(name: str, **options: Any) -> Network:
    """A network that torchvision has by name, with settings of its own."""

    def build() -> nn.Module:
        from torchvision import models

        return models.get_model(name, weights=None, num_classes=_CLASSES, **options)

    return _network(name, "torchvision", build)


def _timm(name: str, model: str, *, size: int = 64, batch: int = 2, **options: Any) -> Network:
    def build() -> nn.Module:
        import timm

        return timm.create_model(model, pretrained=False, num_classes=_CLASSES, **options)

    return _network(name, "timm", build, size, batch)


def _resnet() -> nn.Module:
    from torchvision.models.resnet import BasicBlock, ResNet

    return ResNet(BasicBlock, [1, 1, 1, 1], num_classes=_CLASSES)


def _resnext() -> nn.Module:
    from torchvision.models.resnet import Bottleneck, ResNet

    return ResNet(Bottleneck, [1, 1, 1, 1], num_classes=_CLASSES, groups=8, width_per_group=4)


def _densenet() -> nn.Module:
    from torchvision.models import DenseNet

    return DenseNet(
        growth_rate=8, block_config=(2, 2, 2), num_init_features=16, num_classes=_CLASSES
    )


def _mobilenet_v2() -> nn.Module:
    from torchvision.models import MobileNetV2

    setting = [[1, 16, 1, 1], [4, 24, 2, 2], [4, 32, 1, 2]]
    return MobileNetV2(num_classes=_CLASSES, inverted_residual_setting=setting)


def _shufflenet() -> nn.Module:
    from torchvision.models import ShuffleNetV2

    return ShuffleNetV2([2, 2, 2], [24, 48, 96, 192, 256], num_classes=_CLASSES)


def _swin() -> nn.Module:
    from torchvision.models import SwinTransformer

    return SwinTransformer(
        patch_size=[4, 4],
        embed_dim=32,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=[4, 4],
        num_classes=_CLASSES,
    )


def _maxvit() -> nn.Module:
    from torchvision.models import MaxVit

    return MaxVit(
        input_size=(64, 64),
        stem_channels=16,
        partition_size=4,
        block_channels=[16, 32],
        block_layers=[1, 1],
        head_dim=8,
        stochastic_depth_prob=0.0,
        num_classes=_CLASSES,
    )


def _vgg() -> nn.Module:
    from torchvision.models.vgg import VGG, make_layers

    layers: list[str | int] = [16, "M", 32, "M", 64, "M", 512, "M"]
    net = VGG(make_layers(layers, batch_norm=True), num_classes=_CLASSES)
    net.classifier = nn.Sequential(nn.Linear(512 * 49, 64), nn.ReLU(), nn.Linear(64, _CLASSES))
    return net


def _regnet() -> nn.Module:
    from torchvision.models.regnet import BlockParams, RegNet

    settings = BlockParams.from_init_params(4, 24, 36.0, 2.5, 8, se_ratio=0.25)
    return RegNet(settings, num_classes=_CLASSES)


def _hrnet() -> nn.Module:
    """Two resolutions instead of four, one block and module each."""
    from timm.models.hrnet import HighResolutionNet

    def stage(branches: int, kind: str = "BASIC") -> dict[str, Any]:
        channels = [16 * 2**i for i in range(branches)]
        return {
            "num_modules": 1, "num_branches": branches, "block_type": kind,
            "num_blocks": [1] * branches, "num_channels": channels, "fuse_method": "SUM",
        }  # fmt: skip

    stages = {f"stage{n}": stage(n) for n in range(2, 5)}
    config = {"stem_width": 16, "stage1": stage(1, "BOTTLENECK"), **stages}
    return HighResolutionNet(config, num_classes=_CLASSES)


def _mixer() -> nn.Module:
    from timm.models.mlp_mixer import MlpMixer

    return MlpMixer(_CLASSES, img_size=64, patch_size=8, num_blocks=2, embed_dim=64)


def _segmentation() -> nn.Module:
    from torchvision.models._utils import IntermediateLayerGetter
    from torchvision.models.segmentation import DeepLabV3
    from torchvision.models.segmentation.deeplabv3 import DeepLabHead

    backbone = IntermediateLayerGetter(_resnet(), return_layers={"layer4": "out"})
    return DeepLabV3(backbone, DeepLabHead(512, _CLASSES))


class _Flow(nn.Module):
    """RAFT, small, with two updates of the flow instead of twelve."""

    def __init__(self) -> None:
        super().__init__()
        from torchvision.models.optical_flow import raft_small

        self.raft = raft_small(weights=None)

    def forward(self, image1: torch.Tensor, image2: torch.Tensor) -> list[torch.Tensor]:
        return self.raft(image1, image2, num_flow_updates=2)


def _two_images() -> Inputs:
    first = torch.rand(1, 3, 128, 128) * 2 - 1
    return {"image1": first, "image2": first.roll(3, -1)}


NETWORKS: Final = (
    _network("resnet", "torchvision", _resnet),
    _network("resnext", "torchvision", _resnext),
    _network("densenet", "torchvision", _densenet),
    _network("vgg", "torchvision", _vgg, size=112),
    _torchvision("squeezenet1_1"),
    _network("mobilenet_v2", "torchvision", _mobilenet_v2),
    _network("shufflenet_v2", "torchvision", _shufflenet),
    _network("swin", "torchvision", _swin, size=32),
    _network("maxvit", "torchvision", _maxvit),
    _network("deeplabv3", "torchvision", _segmentation),
    Network(name="raft", library="torchvision", build=_Flow, inputs=_two_images),
    _timm("efficientnet", "test_efficientnet"),
    _timm("convnext", "test_convnext"),
    _timm("nfnet", "test_nfnet"),
    _timm("mambaout", "test_mambaout"),
    _network("regnet", "torchvision", _regnet),
    _timm("ghostnet", "ghostnet_050"),
    _network("hrnet", "timm", _hrnet),
    _timm("vit", "test_vit", img_size=64),
    _timm("deit3", "deit3_small_patch16_224", img_size=32, patch_size=8, embed_dim=64,
          depth=2, num_heads=4, size=32),
    _timm("beit", "beit_base_patch16_224", img_size=32, patch_size=8, embed_dim=64, depth=2,
          num_heads=4, size=32),
    _network("mixer", "timm", _mixer),
    _timm("pvt_v2", "pvt_v2_b0", depths=(1, 1, 1, 1)),
    _timm("cait", "cait_xxs24_224", img_size=32, patch_size=8, embed_dim=64, depth=2,
          num_heads=4, size=32),
    _timm("xcit", "xcit_nano_12_p8_224", img_size=32, embed_dim=64, depth=2, num_heads=4,
          size=32),
)  # fmt: skip
