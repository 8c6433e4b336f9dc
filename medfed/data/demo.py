"""The built-in demo cohorts: synthetic images written as real files in the public layouts.

They are read back by the real readers, so that a demo or a test goes the whole way from files on.  The images are
made up (see :mod:`medfed.data.synthetic`); nothing in them comes from a patient.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd
from PIL import Image

from medfed.data import synthetic
from medfed.data.readers.isic import ISIC_CLASSES
from medfed.data.readers.kermany import CLASSES as OCT_CLASSES
from medfed.data.readers.rsna_ich import OUTPUTS, SUBTYPES
from medfed.errors import ConfigError, DataError, nearest
from medfed.seeding import derive_seed, numpy_generator

Kind = Literal["oct", "ct", "derm"]
SLICES = 10
_OCT_SHARES = (0.3, 0.2, 0.2, 0.3)
_CT_SHARES = (0.12, 0.22, 0.18, 0.22, 0.26)
_DERM_SHARES = (0.18, 0.3, 0.14, 0.07, 0.13, 0.06, 0.06, 0.06)


def make_demo_cohort(root: Path, kind: Kind, *, patients: int, seed: int = 0) -> Path:
    """Writes a demo cohort.

    Args:
        root: an empty or new folder.
        kind: ``oct`` (Kermany's tree, JPEG), ``ct`` (RSNA's files and table, DICOM) or ``derm`` (ISIC 2019).
        patients: number of patients (lesions in ``derm``); about 5 B-scans, 10 slices or 2 photographs each.
        seed: the same seed gives the same files.

    Returns:
        The root, ready for the reader ``kermany``, ``rsna_ich`` or ``isic``.

    Raises:
        ConfigError: an unknown kind, or fewer patients than classes.
        DataError: the folder holds files already.
    """
    writers: dict[str, tuple[Callable[[Path, int, int], None], int]] = {
        "oct": (_write_oct, len(OCT_CLASSES)),
        "ct": (_write_ct, len(SUBTYPES)),
        "derm": (_write_derm, len(ISIC_CLASSES)),
    }
    if kind not in writers:
        raise ConfigError(f"There is no demo cohort {kind!r}.", where="kind", fix=nearest(str(kind), writers))
    write, least = writers[kind]
    if patients < least:
        raise ConfigError(f"A demo cohort {kind!r} needs {least} patients or more, not {patients}.", where="patients")
    root = Path(root)
    if root.exists() and any(root.iterdir()):
        raise DataError("The folder for the demo cohort is not empty.", where=str(root), fix="Choose a new one.")
    root.mkdir(parents=True, exist_ok=True)
    write(root, patients, seed)
    return root


def _deal(shares: tuple[float, ...], count: int, rng: np.random.Generator) -> np.ndarray:
    """Class of each patient ``[count]``: by the shares, each class at least once, in random order."""
    classes = np.arange(len(shares))
    more = rng.choice(classes, count - len(shares), p=np.array(shares) / sum(shares))
    return rng.permutation(np.concatenate([classes, more]))


def _save_jpeg(path: Path, pixels: np.ndarray, quality: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.clip(np.rint(pixels * 255), 0, 255).astype(np.uint8)).save(path, quality=quality)


def _write_oct(root: Path, patients: int, seed: int) -> None:
    rng = numpy_generator(seed, "demo", "oct", "cohort")
    numbers = rng.choice(np.arange(10_000, 10_000_000), patients, replace=False)
    held_out = set(rng.choice(patients, max(patients // 5, 1), replace=False).tolist())
    for k, label in enumerate(_deal(_OCT_SHARES, patients, rng)):
        draw = numpy_generator(seed, "demo", "oct", k)
        eye = synthetic.Eye.draw(draw)
        # A few patients have another finding in some of their scans, as in the public set.
        other = int(draw.integers(len(OCT_CLASSES))) if draw.random() < 0.08 else int(label)
        for scan in range(int(draw.integers(3, 8))):
            name = OCT_CLASSES[other if scan >= 3 else label]
            split = "test" if k in held_out else "train"
            path = root / "OCT2017" / split / name / f"{name}-{numbers[k]}-{scan + 1}.jpeg"
            _save_jpeg(path, synthetic.oct_scan(name, eye, draw), quality=85)


def _write_ct(root: Path, patients: int, seed: int) -> None:
    rng = numpy_generator(seed, "demo", "ct", "cohort")
    rows: list[tuple[str, int]] = []
    for k, label in enumerate(_deal(_CT_SHARES, patients, rng)):
        draw = numpy_generator(seed, "demo", "ct", k)
        subtypes = {SUBTYPES[label]}
        if draw.random() < 0.15:
            subtypes.add(SUBTYPES[int(draw.integers(len(SUBTYPES)))])
        volume, present = synthetic.head_ct(subtypes, SLICES, draw)
        for z in range(SLICES):
            name = f"ID_{derive_seed(seed, 'demo slice', k, z) % 16**9:09x}"
            _save_dicom(root / "stage_2_train" / f"{name}.dcm", volume[z], seed, k, z)
            flags = [int(present[z, SUBTYPES.index(s)]) for s in SUBTYPES]
            rows += [(f"{name}_{s}", v) for s, v in zip(OUTPUTS, [*flags, max(flags)])]
    # The public table repeats the six rows of four images.
    images = np.array(rows, dtype=object).reshape(-1, 6, 2)
    for k in sorted(rng.choice(len(images), 4, replace=False)):
        rows += [(name, value) for name, value in images[k]]
    pd.DataFrame(rows, columns=["ID", "Label"]).to_csv(root / "stage_2_train.csv", index=False)


def _save_dicom(path: Path, hounsfield: np.ndarray, seed: int, patient: int, z: int) -> None:
    from pydicom.dataset import Dataset, FileMetaDataset
    from pydicom.uid import UID, CTImageStorage, ExplicitVRLittleEndian

    def identifier(*parts: int | str) -> UID:
        return UID(f"2.25.{derive_seed(seed, 'demo uid', patient, *parts)}")

    meta = FileMetaDataset()
    meta.MediaStorageSOPClassUID = CTImageStorage
    meta.MediaStorageSOPInstanceUID = identifier("image", z)
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    meta.ImplementationClassUID = UID("2.25.330427106543872")
    image = Dataset()
    image.file_meta = meta
    image.SOPClassUID = meta.MediaStorageSOPClassUID
    image.SOPInstanceUID = meta.MediaStorageSOPInstanceUID
    image.Modality = "CT"
    image.PatientID = f"ID_{derive_seed(seed, 'demo patient', patient) % 16**8:08x}"
    image.StudyInstanceUID, image.SeriesInstanceUID = identifier("study"), identifier("series")
    image.InstanceNumber = z + 1
    image.ImagePositionPatient = [-125, -125, 12 * z]
    image.ImageOrientationPatient = [1, 0, 0, 0, 1, 0]
    image.SamplesPerPixel, image.PhotometricInterpretation = 1, "MONOCHROME2"
    image.Rows, image.Columns = hounsfield.shape
    image.PixelSpacing = [250 / hounsfield.shape[0], 250 / hounsfield.shape[1]]
    image.BitsAllocated, image.BitsStored, image.HighBit, image.PixelRepresentation = 16, 16, 15, 1
    image.WindowCenter, image.WindowWidth = 40, 80
    image.RescaleIntercept, image.RescaleSlope = -1024, 1
    image.PixelData = (np.rint(hounsfield) + 1024).astype("<i2").tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save_as(path, enforce_file_format=True)


def _write_derm(root: Path, patients: int, seed: int) -> None:
    rng = numpy_generator(seed, "demo", "derm", "cohort")
    folder = root / "ISIC_2019_Training_Input"
    truth, metadata, number = [], [], 0
    prefixes = ("HAM_", "BCN_", "MSK4_")
    for k, label in enumerate(_deal(_DERM_SHARES, patients, rng)):
        draw = numpy_generator(seed, "demo", "derm", k)
        lesion = synthetic.Lesion.draw(ISIC_CLASSES[label], draw)
        centre = int(draw.choice(3, p=(0.45, 0.4, 0.15)))
        known = draw.random() > 0.08
        for _ in range(int(draw.choice((1, 2, 3), p=(0.4, 0.35, 0.25)))):
            name = f"ISIC_{number:07d}" + ("_downsampled" if centre == 2 else "")
            number += 1
            _save_jpeg(folder / f"{name}.jpg", synthetic.dermoscopy(lesion, centre, draw), quality=88)
            truth.append([name, *(float(c == label) for c in range(len(ISIC_CLASSES))), 0.0])
            age = int(draw.integers(4, 17)) * 5
            metadata.append([name, age, "anterior torso", f"{prefixes[centre]}{k:07d}" if known else "", "female"])
    columns = ["image", *ISIC_CLASSES, "UNK"]
    pd.DataFrame(truth, columns=columns).to_csv(root / "ISIC_2019_Training_GroundTruth.csv", index=False)
    columns = ["image", "age_approx", "anatom_site_general", "lesion_id", "sex"]
    pd.DataFrame(metadata, columns=columns).to_csv(root / "ISIC_2019_Training_Metadata.csv", index=False)
