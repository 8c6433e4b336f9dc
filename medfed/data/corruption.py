"""Image corruptions of ImageNet-C at severities 1 to 5, frozen for each image and seed.

Hendrycks and Dietterich, "Benchmarking Neural Network Robustness to Common Corruptions and Perturbations", ICLR 2019.
The parameter tables are theirs for pictures of 224 x 224 (brightness-like corruptions that say little about medical
images are left out); FedISM (IJCAI 2024) uses ``gaussian_noise`` at severity 3.  For CT, noise and blur may also act on
Hounsfield units before the window, as they do in a scanner.

A picture of one channel gets grey noise, one of three channels coloured noise: noise is drawn for each array element.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from medfed.errors import ConfigError, nearest
from medfed.seeding import numpy_generator

_Generator = np.random.Generator

GAUSSIAN_NOISE = (0.08, 0.12, 0.18, 0.26, 0.38)  # standard deviation
SHOT_NOISE = (60, 25, 12, 5, 3)  # photons at full brightness
MOTION_BLUR = ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15))  # radius and standard deviation, pixels
GAUSSIAN_BLUR = (1, 2, 3, 4, 6)  # standard deviation, pixels
DEFOCUS_BLUR = ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5))  # radius of the disk, smoothing, pixels
CONTRAST = (0.4, 0.3, 0.2, 0.1, 0.05)  # factor
LOW_RESOLUTION = (0.6, 0.5, 0.4, 0.3, 0.25)  # fraction of the size
JPEG = (25, 18, 15, 10, 7)  # quality


def gaussian_noise(pixels: np.ndarray, severity: int, random: _Generator, scale: float = 1.0) -> np.ndarray:
    """Adds N(0, (scale sigma)^2) to every array element."""
    noise = random.standard_normal(pixels.shape, dtype=np.float32)
    return pixels + np.float32(scale * GAUSSIAN_NOISE[severity - 1]) * noise


def shot_noise(pixels: np.ndarray, severity: int, random: _Generator) -> np.ndarray:
    """Draws Poisson counts of photons: x' = Poisson(c x) / c."""
    photons = SHOT_NOISE[severity - 1]
    return (random.poisson(np.clip(pixels, 0, 1) * photons) / photons).astype(np.float32)


def motion_blur(pixels: np.ndarray, severity: int, random: _Generator) -> np.ndarray:
    """Blurs along a line at an angle drawn from +-45 degrees; the same on all channels."""
    radius, sigma = MOTION_BLUR[severity - 1]
    return blur_along(pixels, radius, sigma, random.uniform(-45, 45))


def gaussian_blur(pixels: np.ndarray, severity: int, random: _Generator) -> np.ndarray:
    """Blurs with a Gaussian; borders repeat the edge."""
    from scipy.ndimage import gaussian_filter

    sigma = GAUSSIAN_BLUR[severity - 1]
    return gaussian_filter(pixels, (0, sigma, sigma), mode="nearest")


def defocus_blur(pixels: np.ndarray, severity: int, random: _Generator) -> np.ndarray:
    """Blurs with a disk, as a lens out of focus does."""
    from scipy.ndimage import convolve, gaussian_filter

    radius, smoothing = DEFOCUS_BLUR[severity - 1]
    reach = np.arange(-radius - 2, radius + 3)
    disk = (reach[:, None] ** 2 + reach[None] ** 2 <= radius**2).astype(np.float32)
    disk = gaussian_filter(disk, smoothing)
    return np.stack([convolve(channel, disk / disk.sum(), mode="nearest") for channel in pixels])


def contrast(pixels: np.ndarray, severity: int, random: _Generator) -> np.ndarray:
    """Draws each channel towards its mean."""
    mean = pixels.mean(axis=(1, 2), keepdims=True, dtype=np.float64).astype(np.float32)
    return mean + np.float32(CONTRAST[severity - 1]) * (pixels - mean)


def low_resolution(pixels: np.ndarray, severity: int, random: _Generator) -> np.ndarray:
    """Averages to fewer pixels and repeats them to the old size."""
    from PIL import Image

    height, width = pixels.shape[1:]
    factor = LOW_RESOLUTION[severity - 1]
    small = max(int(width * factor), 1), max(int(height * factor), 1)
    lowered = np.empty_like(pixels)
    for channel, into in zip(pixels, lowered):
        picture = Image.fromarray(channel).resize(small, Image.Resampling.BOX)
        into[:] = np.asarray(picture.resize((width, height), Image.Resampling.NEAREST))
    return lowered


def jpeg(pixels: np.ndarray, severity: int, random: _Generator) -> np.ndarray:
    """Compresses to JPEG and back (8 bits); 1 or 3 channels, others channel by channel."""
    from PIL import Image

    def through(picture: np.ndarray) -> np.ndarray:
        with io.BytesIO() as file:
            Image.fromarray(picture).save(file, "JPEG", quality=JPEG[severity - 1])
            return np.asarray(Image.open(file), dtype=np.float32) / 255

    eight = to_uint8(pixels, truncate=False)
    if len(eight) == 3:
        return np.ascontiguousarray(np.moveaxis(through(np.moveaxis(eight, 0, -1)), -1, 0))
    return np.stack([through(channel) for channel in eight])


def blur_along(pixels: np.ndarray, radius: int, sigma: float, angle: float) -> np.ndarray:
    """Averages along a line that begins at each pixel, with Gaussian weights.

    The kernel has 2 radius + 1 taps at distances 0, 1, 2, ... from the pixel towards ``angle``, rounded to whole
    pixels, with weights exp(-d^2 / (2 sigma^2)) that sum to 1: one-sided, as in the ImageMagick filter behind
    ImageNet-C.  Beyond the border the edge repeats.

    Args:
        pixels: float32 ``[C, H, W]``.
        radius: half length in pixels.
        sigma: standard deviation in pixels.
        angle: degrees, clockwise from the direction of rising columns.

    Returns:
        float32 ``[C, H, W]``.
    """
    distance = np.arange(2 * radius + 1)
    weights = np.exp(-(distance**2) / (2 * sigma**2))
    weights /= weights.sum()
    down = np.rint(distance * np.sin(np.radians(angle))).astype(int)
    right = np.rint(distance * np.cos(np.radians(angle))).astype(int)
    height, width = pixels.shape[1:]
    reach = 2 * radius
    padded = np.pad(pixels, ((0, 0), (reach, reach), (reach, reach)), mode="edge")
    blurred = np.zeros(pixels.shape, dtype=np.float32)
    for weight, y, x in zip(weights.astype(np.float32), down + reach, right + reach):
        blurred += weight * padded[:, y : y + height, x : x + width]
    return blurred


def to_uint8(unit: np.ndarray, truncate: bool = True) -> np.ndarray:
    """Values in 0..1 to 0..255.

    Args:
        unit: floats; clipped to 0..1.
        truncate: cut off fractions, as the files behind FedISM's tables were written; otherwise round.  A clean
            8-bit picture survives either unchanged.

    Returns:
        uint8 of the same shape.
    """
    # k / 255 in float32 is rounded up for every k in 0..255, so nothing is lost by cutting off fractions.
    levels = np.clip(unit, 0, 1).astype(np.float64) * 255
    return (levels if truncate else np.rint(levels)).astype(np.uint8)


_KINDS: dict[str, Callable[..., np.ndarray]] = {
    "gaussian_noise": gaussian_noise,
    "shot_noise": shot_noise,
    "motion_blur": motion_blur,
    "gaussian_blur": gaussian_blur,
    "defocus_blur": defocus_blur,
    "contrast": contrast,
    "low_resolution": low_resolution,
    "jpeg": jpeg,
}
_HOUNSFIELD_KINDS = ("gaussian_noise", "motion_blur", "gaussian_blur", "defocus_blur", "low_resolution")
KINDS = tuple(_KINDS)


@dataclass(frozen=True)
class Corruption:
    """One corruption, the same for an image whenever and wherever it is applied.

    Args:
        kind: one of :data:`KINDS`.
        severity: 1 (weak) to 5 (strong).
        domain: ``"image"`` acts on values in 0..1 and clips to them; ``"hounsfield"`` acts on CT before the window
            and does not clip.
        seed: another seed gives other noise.
        hu_range: in the Hounsfield domain, the width in HU that stands for the full range of an image, so that
            noise of severity 3 has a standard deviation of ``0.18 * hu_range`` HU (default: a brain window).

    Raises:
        ConfigError: for an unknown kind or domain, a severity outside 1..5, or a kind that means nothing in HU.
    """

    kind: str
    severity: int
    domain: Literal["image", "hounsfield"] = "image"
    seed: int = 0
    hu_range: float = 80.0

    def __post_init__(self) -> None:
        def wrong(what: str, fix: str) -> ConfigError:
            return ConfigError(what, where="corruption", fix=fix)

        if self.kind not in _KINDS:
            raise wrong(f"unknown kind {self.kind!r}.", nearest(str(self.kind), _KINDS))
        if isinstance(self.severity, bool) or self.severity not in (1, 2, 3, 4, 5):
            raise wrong(f"severity is {self.severity!r}.", "It must be 1, 2, 3, 4 or 5.")
        if self.domain not in ("image", "hounsfield"):
            raise wrong(f"unknown domain {self.domain!r}.", nearest(str(self.domain), ("image", "hounsfield")))
        if self.domain == "hounsfield" and self.kind not in _HOUNSFIELD_KINDS:
            raise wrong(
                f"{self.kind} has no meaning in Hounsfield units.",
                f"There: {', '.join(_HOUNSFIELD_KINDS)}; or use domain 'image'.",
            )
        if not 0 < self.hu_range < float("inf"):
            raise wrong(f"hu_range is {self.hu_range!r}.", "It must be a width in HU above 0.")

    def key(self) -> str:
        """A short text that differs between any two corruptions that give different pixels."""
        fields = asdict(self)
        if self.domain == "image":
            del fields["hu_range"]
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]

    def apply(self, pixels: np.ndarray, identity: str) -> np.ndarray:
        """Corrupts one image.

        Args:
            pixels: float32 ``[C, H, W]``, in 0..1 or in HU as the domain says; not changed.
            identity: names the image; with the seed it decides the noise, which is the same at every severity up
                to its strength.

        Returns:
            float32 ``[C, H, W]``.
        """
        if pixels.ndim != 3:
            raise ValueError(f"pixels must be [C, H, W], got shape {pixels.shape}")
        random = numpy_generator(self.seed, "corruption", self.kind, identity)
        pixels = np.asarray(pixels, dtype=np.float32)
        if self.domain == "image":
            return np.clip(_KINDS[self.kind](pixels, self.severity, random), 0, 1)
        if self.kind == "gaussian_noise":
            return gaussian_noise(pixels, self.severity, random, scale=self.hu_range)
        return _KINDS[self.kind](pixels, self.severity, random)


def __getattr__(name: str) -> Any:
    """``Corruptd``, the MONAI transform: imported on demand, since importing MONAI takes seconds."""
    if name == "Corruptd":
        from medfed.data.transforms import Corruptd

        return Corruptd
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
