"""DICOM file to float32 Hounsfield units against pydicom's ``pixel_array`` alone, 512x512, uncompressed."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from common import arguments, in_turn, machine, table
from pydicom import dcmread
from pydicom.dataset import FileDataset, FileMetaDataset
from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian, generate_uid

from medfed.data.decode import decode


def write_slice(path: Path, seed: int) -> Path:
    """A CT slice with the usual header."""
    meta = FileMetaDataset()
    meta.MediaStorageSOPClassUID, meta.TransferSyntaxUID = CTImageStorage, ExplicitVRLittleEndian
    meta.MediaStorageSOPInstanceUID = generate_uid()
    data = FileDataset(str(path), {}, file_meta=meta, preamble=b"\0" * 128)
    data.SOPClassUID, data.SOPInstanceUID = CTImageStorage, meta.MediaStorageSOPInstanceUID
    data.PatientID, data.Modality, data.StudyInstanceUID, data.SeriesInstanceUID = "p", "CT", "1.2", "1.2.3"
    data.Rows = data.Columns = 512
    data.SamplesPerPixel, data.PhotometricInterpretation = 1, "MONOCHROME2"
    data.BitsAllocated, data.BitsStored, data.HighBit, data.PixelRepresentation = 16, 16, 15, 1
    data.RescaleIntercept, data.RescaleSlope, data.WindowCenter, data.WindowWidth = -1024, 1, 40, 80
    data.PixelSpacing, data.ImagePositionPatient = [0.5, 0.5], [0, 0, seed]
    data.ImageOrientationPatient = [1, 0, 0, 0, 1, 0]
    values = np.random.default_rng(seed).integers(0, 2500, (512, 512)).astype(np.int16)
    data.PixelData = values.tobytes()
    data.save_as(path, enforce_file_format=True)
    return path


def main() -> None:
    options = arguments(__doc__, rounds=21, slices=16)
    with tempfile.TemporaryDirectory() as folder:
        paths = [write_slice(Path(folder) / f"{k}.dcm", k) for k in range(options.slices)]

        def plain() -> None:
            for path in paths:
                _ = dcmread(path).pixel_array

        def plain_float() -> None:
            for path in paths:
                data = dcmread(path)
                _ = data.pixel_array.astype(np.float32) * float(data.RescaleSlope) + float(data.RescaleIntercept)

        def ours() -> None:
            for path in paths:
                decode(path)

        times = in_turn(
            {"pydicom pixel_array": plain, "pydicom, to float and Hounsfield units": plain_float, "medfed": ours},
            options.rounds,
            quiet=options.quiet,
        )
    base = times["pydicom pixel_array"]
    rows = [[k, min(t.wall) / options.slices * 1e3, *t.over(base).values()] for k, t in times.items()]
    table(["what", "ms a slice", "ratio of medians", "of minima", "of CPU time"], rows)
    print(machine())


if __name__ == "__main__":
    main()
