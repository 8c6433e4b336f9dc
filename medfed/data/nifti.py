"""NIfTI to pixels: one slice at a time, displayed as radiologists do.

The voxels are brought to RAS axes (right, anterior, superior) by the affine.  A frame is a slice along the third of
them, axial, counted from the feet; a volume one voxel thick along another axis has that plane as its only frame.  Rows
run from anterior to posterior (axial) or from superior to inferior (coronal, sagittal); the patient's right is at the
left of the picture (axial, coronal), anterior at the left (sagittal).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from medfed.data.decode import Decoded, DecodeOptions, Probe, Undecodable, check_frame, check_size, is_finite

if TYPE_CHECKING:
    from nibabel.nifti1 import Nifti1Image

_HOUNSFIELD_BELOW = -900.0  # a slice that reaches this holds air in Hounsfield units


def probe(file: BinaryIO) -> Probe:
    """Number of slices and size of a slice."""
    image = _open(file)
    frames, height, width = _layout(image)[:3]
    return Probe("nifti", frames, height, width)


def decode(file: BinaryIO, frame: int, options: DecodeOptions) -> Decoded:
    """Decodes one slice of an opened NIfTI file; see :func:`medfed.data.decode.decode`."""
    image = _open(file)
    frames, height, width, order, flips, plane = _layout(image)
    check_frame(frame, frames)
    check_size(height, width, options.max_pixels)
    corrections = []
    if not (image.header["qform_code"] > 0 or image.header["sform_code"] > 0):
        corrections.append("nifti_orientation_missing")
    index: list[slice | int] = [slice(None)] * 3 + [0] * (len(image.shape) - 3)
    index[order[plane]] = frames - 1 - frame if flips[plane] < 0 else frame
    try:
        stored = np.asarray(image.dataobj[tuple(index[: len(image.shape)])])
    except (ValueError, OSError, EOFError) as error:
        raise Undecodable("pixel data shorter than the header says") from error
    if stored.dtype.kind not in "iuf":
        raise Undecodable(f"unsupported NIfTI voxel type {stored.dtype}")
    first, second = (axis for axis in range(3) if axis != plane)
    picture = stored.T if order[first] < order[second] else stored  # [second RAS axis, first RAS axis]
    # The picture runs against the RAS axes: down is posterior or inferior, right is the patient's left, except
    # that a sagittal slice has anterior at the left, which also runs against the axis.
    pixels = picture[:: -flips[second], :: -flips[first]].astype(np.float32, order="C")
    if not is_finite(pixels):
        raise Undecodable("NaN or infinite pixel values")
    low, high = float(pixels.min()), float(pixels.max())
    if options.nifti == "hounsfield" or (options.nifti == "guess" and low <= _HOUNSFIELD_BELOW):
        if options.nifti == "guess":
            corrections.append("nifti_taken_for_hounsfield")
        return Decoded(pixels[None], "hounsfield", (low, high), tuple(corrections))
    if image.get_data_dtype() == np.uint8 and stored.dtype == np.uint8:
        return Decoded(pixels[None], "image", (0.0, 255.0), tuple(corrections))
    calibrated = float(image.header["cal_min"]), float(image.header["cal_max"])
    if calibrated[1] > calibrated[0]:
        value_range = calibrated
    else:
        value_range = (low, high if high > low else low + 1.0)
        corrections.append("no_window_full_range")
    return Decoded(pixels[None], "image", value_range, tuple(corrections))


def _open(file: BinaryIO) -> Nifti1Image:
    from nibabel.fileholders import FileHolder
    from nibabel.nifti1 import Nifti1Image
    from nibabel.nifti2 import Nifti2Image

    head = file.read(8)
    file.seek(0)
    kind = Nifti2Image if head[4:7] == b"n+2" else Nifti1Image
    holder = FileHolder(fileobj=file)  # type: ignore[arg-type]
    try:
        image = kind.from_file_map({"header": holder, "image": holder})
    except Exception as error:
        raise Undecodable("damaged NIfTI header") from error
    if image.header["magic"].item().startswith(b"ni"):
        raise Undecodable("a NIfTI header whose voxels are in another file")
    if len(image.shape) < 2 or any(n != 1 for n in image.shape[3:]):
        raise Undecodable(f"NIfTI of shape {tuple(map(int, image.shape))}; two or three dimensions are read")
    return image


def _layout(image: Nifti1Image) -> tuple[int, int, int, list[int], list[int], int]:
    """How the slices lie.

    Returns:
        Frames, height, width; for each RAS axis the stored axis and its direction (+1 or -1); the RAS axis that
        the frames are counted along.
    """
    from nibabel.orientations import io_orientation

    shape = (*image.shape[:3], 1)[:3]
    orientation = io_orientation(image.affine)
    if not np.isfinite(orientation).all():
        raise Undecodable("NIfTI affine without three directions")
    order = [int(np.flatnonzero(orientation[:, 0] == axis)[0]) for axis in range(3)]
    flips = [int(orientation[order[axis], 1]) for axis in range(3)]
    ras = [int(shape[order[axis]]) for axis in range(3)]
    thin = [axis for axis in range(3) if ras[axis] == 1]
    plane = thin[0] if len(thin) == 1 else 2
    first, second = (axis for axis in range(3) if axis != plane)
    return ras[plane], ras[second], ras[first], order, flips, plane
