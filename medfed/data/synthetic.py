"""Made-up medical images for demos and tests: retinal B-scans, head CT slices, dermoscopic photographs.

Each class has the sign that defines it, in overlapping severity and under speckle, gain and shift, so that a network
has something to learn and cannot learn it all.  They look like the real thing from afar and prove nothing about it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from scipy.ndimage import gaussian_filter, gaussian_filter1d

from medfed.data.readers.rsna_ich import SUBTYPES

OCT_SHAPE = (128, 160)
CT_SIZE = 128
DERM_SHAPE = (120, 160)
AIR, BRAIN, VENTRICLE, BONE, BLOOD = -1000.0, 35.0, 8.0, 1000.0, 65.0

# Reflectivity over the depth of the retina, 0 at its inner surface and 1 at the pigment epithelium.
_DEPTH = (0.0, 0.04, 0.16, 0.22, 0.36, 0.42, 0.5, 0.56, 0.62, 0.86, 0.89, 0.93, 0.96, 1.0)
_LIGHT = (0.55, 0.75, 0.7, 0.5, 0.48, 0.34, 0.34, 0.52, 0.3, 0.28, 0.66, 0.5, 0.9, 0.95)


def _texture(shape: tuple[int, ...], sigma: float | tuple[float, ...], rng: np.random.Generator) -> np.ndarray:
    """Smooth noise of zero mean and unit deviation."""
    field = gaussian_filter(rng.standard_normal(shape), sigma)
    return (field - field.mean()) / (field.std() + 1e-12)


@dataclass(frozen=True)
class Eye:
    """What the scans of one eye have in common; lengths in pixels, positions as a share of the width."""

    top: float
    thickness: float
    bend: float
    tilt: float
    pit: float
    gain: float
    speckle: float

    @staticmethod
    def draw(rng: np.random.Generator) -> Eye:
        """Draws an eye."""
        return Eye(
            top=rng.uniform(38, 48),
            thickness=rng.uniform(36, 46),
            bend=rng.normal(12, 6),
            tilt=rng.normal(0, 5),
            pit=rng.uniform(4, 14),
            gain=rng.uniform(0.6, 1.0),
            speckle=rng.uniform(0.45, 0.8),
        )


def oct_scan(label: str, eye: Eye, rng: np.random.Generator) -> np.ndarray:
    """A retinal B-scan.

    Args:
        label: ``CNV`` (irregular elevation with fluid), ``DME`` (cysts within a thick retina), ``DRUSEN`` (bumps of
            the pigment epithelium) or ``NORMAL``.
        eye: whose scan it is.
        rng: what differs from scan to scan.

    Returns:
        Grey values ``[128, 160]`` in 0..1.
    """
    height, width = OCT_SHAPE
    x = np.linspace(0, 1, width)
    fovea = rng.uniform(0.35, 0.65)
    base = eye.top + eye.thickness + eye.tilt * (x - 0.5) + eye.bend * (x - 0.5) ** 2 + rng.normal(0, 3)
    base = base + gaussian_filter1d(rng.standard_normal(width), 12) * 3
    inner = base - eye.thickness + eye.pit * np.exp(-(((x - fovea) / 0.09) ** 2))
    epithelium, severity = base.copy(), rng.beta(2.2, 1.5)
    rows = np.arange(height)[:, None]
    dark = np.zeros(OCT_SHAPE)
    # Slight unevenness of the epithelium is normal, and its range overlaps with small drusen.
    bumps, size = int(rng.integers(0, 3)), rng.uniform(0.5, 2.2)
    if label == "DRUSEN":
        bumps, size = int(rng.integers(3, 9)), 2 + 5 * severity
    for _ in range(bumps):
        place, spread = rng.uniform(0.08, 0.92), rng.uniform(0.015, 0.04)
        epithelium -= size * rng.uniform(0.6, 1.2) * np.exp(-(((x - place) / spread) ** 2))
    if label == "CNV":
        place, spread = fovea + rng.normal(0, 0.12), rng.uniform(0.08, 0.2)
        mound = np.exp(-(((x - place) / spread) ** 4))
        rough = 1 + 0.35 * gaussian_filter1d(rng.standard_normal(width), 3) * 3
        epithelium -= (4 + 17 * severity) * mound * rough
        inner -= (1 + 6 * severity) * mound
        fluid = (1 + 9 * severity) * np.exp(-(((x - place - rng.normal(0, 0.1)) / (0.7 * spread)) ** 2))
        dark += 0.9 * ((rows < epithelium - 1) & (rows > epithelium - 1 - fluid))
    if label == "DME":
        inner -= (2 + 15 * severity) * np.exp(-(((x - fovea) / 0.3) ** 2))
        columns = np.arange(width)
        for _ in range(int(rng.integers(2, 4 + int(8 * severity)))):
            cx = (fovea + rng.normal(0, 0.13)) * width
            at = int(np.clip(cx, 0, width - 1))
            depth = rng.uniform(0.3, 0.8)
            cy = inner[at] + depth * (epithelium[at] - inner[at])
            a, b = rng.uniform(2.5, 5 + 6 * severity), rng.uniform(2, 3.5 + 5 * severity)
            dark += ((columns - cx) / a) ** 2 + ((rows - cy) / b) ** 2 < 1
    depth_map = (rows - inner) / np.maximum(epithelium - inner, 4)
    image = np.interp(depth_map, _DEPTH, _LIGHT, left=0.05)
    below = rows - epithelium
    choroid = 0.2 + 0.32 * np.exp(-np.maximum(below - 3, 0) / 14) + 0.06 * _texture(OCT_SHAPE, 2.5, rng)
    image = np.where(below > 2.5, choroid, np.where(below > 0, 0.95, image))
    # Between a raised epithelium and Bruch's membrane lies little that reflects.
    image = np.where((below > 2.5) & (rows < base - 1), 0.32, image)
    image = image * (1 - np.clip(gaussian_filter(np.clip(dark, 0, 1), 0.7), 0, 1) * rng.uniform(0.55, 0.85))
    shadows = 1 - 0.25 * np.clip(gaussian_filter1d(rng.standard_normal(width), 2) * 2, 0, 1)
    speckle = gaussian_filter(rng.gamma(2.0, 0.5, OCT_SHAPE), (0.5, 0.8))
    image = image * shadows * (1 + eye.speckle * (speckle - 1))
    return np.clip(eye.gain * rng.uniform(0.85, 1.1) * image + rng.uniform(0, 0.05), 0, 1)


def head_ct(subtypes: Collection[str], slices: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """A plain head CT with haemorrhage.

    Args:
        subtypes: RSNA's names of what is to be seen somewhere in the study.
        slices: number of slices, base to vertex.
        rng: of everything in this study.

    Returns:
        Hounsfield units ``[slices, 128, 128]`` and which subtype is on which slice ``[slices, 5]`` (bool).
    """
    n, middle = CT_SIZE, (CT_SIZE - 1) / 2
    z = np.linspace(-0.6, 0.65, slices)[:, None, None]
    level = np.sqrt(1 - z**2 * 0.75)
    half = np.array([0.40, 0.33]) * rng.normal(1, 0.03, 2) * n
    angle = rng.normal(0, 0.08)
    row, column = np.mgrid[:n, :n] - middle - rng.normal(0, 1.5, 2)[:, None, None]
    y = np.cos(angle) * row - np.sin(angle) * column
    x = np.sin(angle) * row + np.cos(angle) * column
    radius = np.sqrt((y / half[0]) ** 2 + (x / half[1]) ** 2)[None] / level
    theta = np.arctan2(x / half[1], y / half[0])[None]
    inside = radius < 0.86
    white = np.clip(_texture((slices, n, n), (0.8, 3, 3), rng), -1.5, 1.5)
    units = np.full((slices, n, n), AIR)
    units[radius < 1.06] = 20 + 15 * rng.random()
    units[radius < 0.98] = BONE + rng.normal(0, 80)
    units[inside] = (BRAIN + rng.normal(0, 2) + 3.2 * white)[inside]
    units[(radius > 0.82) & inside] = 12
    folds = _texture((slices, n, n), (0.6, 1.6, 1.6), rng)
    sulci = inside & (radius > 0.58) & (np.abs(folds) < 0.3)
    units[sulci] = 18
    size = rng.uniform(0.7, 1.3)
    u, v = x[None] / (half[1] * level), y[None] / (half[0] * level)
    horn = ((np.abs(u) - 0.13) / (0.09 * size)) ** 2 + ((v + 0.05) / (0.27 * size)) ** 2 < 1
    ventricles = horn & (np.abs(z - 0.05) < 0.42) & inside
    units[ventricles] = VENTRICLE
    scene = {"radius": radius, "theta": theta, "u": u, "v": v, "inside": inside, "sulci": sulci, "horn": ventricles}
    present = np.zeros((slices, len(SUBTYPES)), dtype=bool)
    for k, name in enumerate(SUBTYPES):
        if name not in subtypes:
            continue
        mask = _bleed(name, scene, z, rng)
        # A few pixels that nobody would see are no finding.
        mask &= (mask.sum(axis=(1, 2)) >= 18)[:, None, None]
        density = BLOOD + rng.normal(0, 4)
        # Severity overlaps: thin or diluted blood is hardly denser than the brain around it.
        strength = np.clip(rng.beta(2.2, 1.2) + 0.4, 0, 1)
        soft = gaussian_filter(mask.astype(float), (0, 0.6, 0.6)) * (radius < 0.9)
        units = units + soft * strength * (density - np.clip(units, 0, 70))
        present[:, k] = mask.any(axis=(1, 2))
    # Partial volume at edges, then the noise of a thin slice.
    units = gaussian_filter(units, (0, 0.6, 0.6)) + gaussian_filter(rng.normal(0, 4.5, units.shape), (0, 0.5, 0.5))
    units[radius > 1.1] = AIR + rng.normal(0, 4, units.shape)[radius > 1.1]
    return np.clip(units + rng.normal(0, 1.5), -1024, 3000), present


def _bleed(name: str, scene: dict[str, np.ndarray], z: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Where the blood of one subtype is ``[slices, n, n]``."""
    radius, theta, inside = scene["radius"], scene["theta"], scene["inside"]
    slices, extent = len(z), rng.uniform(0.3, 0.7)
    centre = rng.uniform(-0.35, 0.4)
    along = np.clip(1 - ((z - centre) / extent) ** 2, 0, None)
    side = rng.choice((-1.0, 1.0))
    if name == "epidural":  # a lens between bone and dura, short and thick
        place = side * rng.uniform(0.8, 2.2)
        turn = np.abs(np.angle(np.exp(1j * (theta - place))))
        thick = rng.uniform(0.22, 0.42) * along * np.clip(1 - (turn / rng.uniform(0.4, 0.65)) ** 2, 0, None)
        return inside & (radius > 0.86 - thick) & (thick > 0.01)
    if name == "subdural":  # a crescent along the convexity, long and thin
        place = side * rng.uniform(1.1, 1.9)
        turn = np.abs(np.angle(np.exp(1j * (theta - place))))
        thick = rng.uniform(0.1, 0.22) * along**0.5 * np.clip(1 - (turn / rng.uniform(1.0, 1.5)) ** 4, 0, None)
        return inside & (radius > 0.86 - thick) & (thick > 0.01)
    if name == "intraparenchymal":  # an irregular blob within the brain
        v, u = rng.uniform(-0.4, 0.4), side * rng.uniform(0.2, 0.5)
        rough = 1 + 0.3 * _texture((slices, *radius.shape[1:]), (0.5, 3, 3), rng)
        distance = np.sqrt((scene["u"] - u) ** 2 + (scene["v"] - v) ** 2) * rough
        return inside & (distance < rng.uniform(0.14, 0.3) * along)
    if name == "intraventricular":  # blood settles at the back of the horns
        depth = rng.uniform(-0.1, 0.15)
        one_sided = (scene["u"] * side > 0) | (rng.random() < 0.6)
        return scene["horn"] & (scene["v"] > depth - 0.15 * along) & one_sided & (along > 0)
    # Subarachnoid: streaks in the sulci of one region.
    place = side * rng.uniform(0.6, 2.4)
    turn = np.abs(np.angle(np.exp(1j * (theta - place))))
    return scene["sulci"] & (turn < rng.uniform(0.8, 1.5)) & (along > 0)


# Class: colours of the lesion (inner, outer), irregularity of the border, its softness, mean radius.
_LESIONS: dict[str, tuple[tuple[float, float, float], tuple[float, float, float], float, float, float]] = {
    "MEL": ((0.22, 0.14, 0.13), (0.42, 0.27, 0.2), 0.3, 0.05, 0.62),
    "NV": ((0.38, 0.24, 0.17), (0.52, 0.35, 0.26), 0.12, 0.06, 0.5),
    "BCC": ((0.66, 0.42, 0.4), (0.78, 0.55, 0.5), 0.2, 0.12, 0.48),
    "AK": ((0.78, 0.5, 0.45), (0.82, 0.6, 0.53), 0.28, 0.25, 0.55),
    "BKL": ((0.52, 0.39, 0.27), (0.6, 0.46, 0.34), 0.22, 0.04, 0.55),
    "DF": ((0.72, 0.56, 0.48), (0.58, 0.4, 0.32), 0.1, 0.2, 0.42),
    "VASC": ((0.5, 0.12, 0.2), (0.66, 0.28, 0.32), 0.15, 0.05, 0.42),
    "SCC": ((0.82, 0.66, 0.55), (0.76, 0.48, 0.42), 0.26, 0.12, 0.52),
}


@dataclass(frozen=True)
class Lesion:
    """What the photographs of one lesion have in common."""

    label: str
    inner: np.ndarray
    outer: np.ndarray
    skin: np.ndarray
    border: np.ndarray
    softness: float
    radius: float

    @staticmethod
    def draw(label: str, rng: np.random.Generator) -> Lesion:
        """Draws a lesion of a class of ISIC 2019."""
        inner, outer, irregular, softness, radius = _LESIONS[label]
        orders = np.arange(1, 8)
        size = rng.normal(0, irregular * rng.uniform(0.3, 1.1), 7) / orders
        tint = rng.normal(0, 0.04) + rng.normal(0, 0.015, 3)
        return Lesion(
            label,
            np.array(inner) + tint,
            np.array(outer) + tint,
            np.array((0.83, 0.65, 0.57)) + rng.normal(0, 0.04) + rng.normal(0, 0.015, 3),
            np.stack([size, rng.uniform(0, 2 * np.pi, 7)]),
            softness * rng.uniform(0.7, 1.4),
            radius * rng.uniform(0.7, 1.2),
        )


def dermoscopy(lesion: Lesion, centre: int, rng: np.random.Generator) -> np.ndarray:
    """A dermoscopic photograph.

    Args:
        lesion: what is photographed.
        centre: index of the centre, which has its own white balance and field of view.
        rng: what differs from photograph to photograph.

    Returns:
        RGB ``[120, 160, 3]`` in 0..1.
    """
    height, width = DERM_SHAPE
    row, column = np.mgrid[:height, :width] / (height / 2) - np.array([1, width / height])[:, None, None]
    row, column = row - rng.normal(0, 0.08), column - rng.normal(0, 0.1)
    theta = np.arctan2(row, column) + rng.uniform(0, 2 * np.pi)
    sizes, phases = lesion.border
    wave = sum(s * np.cos((k + 1) * theta + p) for k, (s, p) in enumerate(zip(sizes, phases)))
    reach = lesion.radius * rng.uniform(0.9, 1.1) * (1 + wave)
    distance = np.hypot(row, column) / np.maximum(reach, 0.1)
    mask = (1 / (1 + np.exp(np.clip((distance - 1) / lesion.softness, -30, 30))))[..., None]
    mix = np.clip(1 - distance + 0.25 * _texture(DERM_SHAPE, 5, rng), 0, 1)[..., None]
    colour = mix * lesion.inner + (1 - mix) * lesion.outer
    colour = colour * (1 + _signs(lesion.label, distance, rng))
    skin = lesion.skin * (1 + 0.03 * _texture(DERM_SHAPE, 1.5, rng)[..., None])
    image = mask * colour + (1 - mask) * skin
    image = _hairs(image, rng)
    light = 1 - rng.uniform(0.05, 0.2) * (row**2 + column**2)[..., None] / 3
    balance = np.array([(1, 1, 1), (1.04, 0.96, 0.94), (0.95, 1, 1.06)][centre]) * rng.normal(1, 0.02, 3)
    image = image * light * balance * rng.uniform(0.85, 1.1) + rng.normal(0, 0.02, image.shape)
    if centre == 1:
        image = image * (np.hypot(row, column) < rng.uniform(1.35, 1.6))[..., None]
    return np.clip(image, 0, 1)


def _signs(label: str, distance: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The dermoscopic sign of a class as relative change of colour ``[H, W, 3]``, in varying strength."""
    strength = 0.2 + rng.beta(2, 1.4)
    fine, coarse = _texture(DERM_SHAPE, 1.2, rng), _texture(DERM_SHAPE, 3.5, rng)
    change = np.zeros((*DERM_SHAPE, 3))
    if label == "NV":  # pigment network
        change -= 0.3 * (np.abs(fine) < 0.4)[..., None]
    elif label == "MEL":  # several colours, a blue-white veil
        change += 0.45 * (coarse > 0.6)[..., None] * np.array((0.2, 0.5, 1.0))
        change -= 0.4 * (coarse < -0.7)[..., None]
    elif label == "BKL":  # milia-like dots
        change += 0.5 * (fine > 1.3)[..., None]
    elif label == "BCC":  # blue-grey nests and fine vessels
        change += 0.45 * (coarse > 1.1)[..., None] * np.array((-1.0, -0.5, 0.2))
        change += 0.35 * (np.abs(coarse) < 0.06)[..., None] * np.array((0.3, -1.0, -0.8))
    elif label == "AK":  # red net around follicles, scale
        change += 0.3 * (fine > 0.7)[..., None] * np.array((0.3, 0.8, 0.8))
    elif label == "SCC":  # white structureless centre, keratin
        change += 0.35 * np.exp(-((distance / 0.45) ** 2))[..., None] * np.array((0.4, 0.9, 0.8))
    elif label == "DF":  # central white patch
        change += 0.5 * np.exp(-((distance / 0.35) ** 2))[..., None]
    elif label == "VASC":  # red lacunae
        change += 0.5 * (coarse > 0.3)[..., None] * np.array((0.8, -0.7, -0.4))
    return strength * change


def _hairs(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draws a few dark, curved hairs over an image ``[H, W, 3]``."""
    height, width = image.shape[:2]
    cover = np.zeros((height, width))
    t = np.linspace(0, 1, 240)
    for _ in range(int(rng.integers(0, 4))):
        points = rng.uniform(-0.1, 1.1, (3, 2))
        curve = (1 - t)[:, None] ** 2 * points[0] + (2 * t * (1 - t))[:, None] * points[1] + t[:, None] ** 2 * points[2]
        rows, columns = (curve * (height, width)).astype(int).T
        keep = (rows >= 0) & (rows < height) & (columns >= 0) & (columns < width)
        cover[rows[keep], columns[keep]] = 1
    return image * (1 - 0.75 * np.clip(gaussian_filter(cover, 0.5), 0, 1))[..., None]
