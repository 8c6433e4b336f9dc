"""Real images and the odd DICOM files of the field, from the reader to the image store."""

from __future__ import annotations

import csv
import shutil

import numpy as np
import pydicom
import pytest
from pydicom.pixels import apply_rescale

from medfed.config import validate
from medfed.data.decode import DecodeOptions, decode
from medfed.experiment import load_bundle, prepare, read_section

# What MANIFEST.csv expects to be refused, and why; all others must decode.
REFUSED = {
    "no-pixel-data.dcm": "not an image",
    "reportsi.dcm": "not an image",
    "meta_missing_tsyntax.dcm": "no pixel data",
    "MR_truncated.dcm": "",
    "derived_head_ct_truncated.dcm": "",
    "GH177_D_CLUNIE_CT1_IVRLE_BigEndian_undefined_length.dcm": "damaged DICOM header",
    "JPEG2000-embedded-sequence-delimiter.dcm": "compressed pixels",
}
FRAMES = {"ECT_fragmented_no_bot_jpegls": 2, "emri_small": 10, "sm_image": 25, "derived_opt_4frames": 4}


def experiment(tmp_path, reader, root, bundle="rsna_ich_ct_classification", **more):
    return validate(
        {
            "cohort": {"reader": reader, "root": str(root)},
            "condition": {"partition": {"kind": "dirichlet", "clients": 2, "min_samples": 1}},
            "bundle": bundle,
            "method": "fedavg",
            "cache": str(tmp_path / "cache"),
            "overrides": {"image_size": [64, 64], "network_name": "squeezenet1_1"},
            **more,
        },
        "x",
    )


@pytest.mark.parametrize("reader", ["table", "folder"])
def test_odd_dicom_files_are_as_the_manifest_says(shared, tmp_path, reader):
    source = shared / "data" / "dicom_odd"
    with (source / "MANIFEST.csv").open(encoding="utf-8") as file:
        names = [row["file"] for row in csv.DictReader(file)]
    root = tmp_path / "odd ünd"
    lines = ["path;label"]
    for k, name in enumerate(names):
        label = "ab"[k % 2]
        (root / label).mkdir(parents=True, exist_ok=True)
        # By content, not by name: every third file loses its extension, every other third has a wrong one.
        given = (name, name[:-4], name[:-4] + ".png")[k % 3] if reader == "folder" else name
        shutil.copy(source / name, root / label / given)
        lines.append(f"{label}\\{given};{label}")
    (root / "table.csv").write_text("\r\n".join(lines), encoding="utf-8-sig")
    prepared = prepare(experiment(tmp_path, reader, root / "table.csv" if reader == "table" else root))

    def stem(sample):
        return sample.rpartition("/")[2].partition("#")[0].removesuffix(".dcm").removesuffix(".png")

    reasons = {stem(u.sample or u.path): u.reason for u in prepared.findings.unusable}
    assert set(reasons) == {name[:-4] for name in REFUSED}
    for name, reason in REFUSED.items():
        assert reason in reasons[name[:-4]]
    rows = {**prepared.rows, **prepared.clean_rows}
    usable = [stem(s) for s in rows]
    for name in names:
        if name not in REFUSED:
            assert usable.count(name[:-4]) == FRAMES.get(name[:-4], 1)
    of = {stem(s): prepared.store.images[row] for s, row in rows.items()}
    lossless = [n for n in of if n.startswith("CTImage_") and n not in ("CTImage_explLE", "CTImage_JPEGProcess2_4")]
    assert len(lossless) == 6
    for name in lossless:
        np.testing.assert_array_equal(of[name], of["CTImage_explLE"])
    assert prepared.findings.corrections["rsna_12bit_wrap_suspected"] == 1
    assert any("1 CT slices may have wrapped at 12 bits" in w for w in prepared.warnings)


def test_the_12_bit_wrap_is_undone_by_an_override_of_the_bundle(shared, tmp_path):
    file = shared / "data" / "dicom_odd" / "derived_rsna_wrap_u12.dcm"
    (tmp_path / "t.csv").write_text(f"path,label\n{file},a\n")
    fixed = experiment(tmp_path, "table", tmp_path / "t.csv", overrides={"load::fix_12bit_wrap": True})
    pipeline = load_bundle(fixed, read_section(fixed.cohort).task).pipeline()
    loaded = pipeline.load({"image": str(file), "frame": 0, "sample": "x"})
    truth = np.load(file.with_name("derived_rsna_wrap_u12_true_hu.npy"))
    np.testing.assert_array_equal(loaded["image"][0].numpy(), np.maximum(truth, loaded["image"].min().item()))
    assert "rsna_12bit_wrap" in loaded["image_corrections"]
    assert decode(file, options=DecodeOptions()).pixels.max() > 3000


def test_a_real_head_ct_is_what_pydicom_reads(shared):
    for file in sorted((shared / "data" / "ct" / "ge_head_trauma").iterdir()):
        dataset = pydicom.dcmread(file)
        units = apply_rescale(dataset.pixel_array, dataset).astype(np.float32)
        found = decode(file)
        assert found.kind == "hounsfield"
        padding = units == dataset.PixelPaddingValue
        assert padding.any()
        assert (found.pixels[0][padding] <= -1000).all()
        np.testing.assert_array_equal(found.pixels[0][~padding], np.maximum(units[~padding], -1024))


def test_oct_patients_with_identical_scans_stay_on_one_side(shared, tmp_path):
    prepared = prepare(experiment(tmp_path, "kermany", shared / "data" / "oct", "oct_bscan_classification"))
    assert len(prepared.rows) + len(prepared.clean_rows) == 792
    assert not set(prepared.rows.values()) & set(prepared.clean_rows.values())
    assert any("these 26 patients count as 13" in n for n in prepared.findings.notes)
    holder = dict(zip(prepared.condition.truth.samples, prepared.condition.truth.clients))
    clients = {}
    for sample, row in prepared.rows.items():
        clients.setdefault(row, set()).add(holder[sample])
    assert all(len(names) == 1 for names in clients.values())


def test_unmodified_oct_scans_and_a_tree_with_a_blank(shared, tmp_path):
    shutil.copytree(shared / "data" / "oct_fullres", tmp_path / "x" / "OCT2017 " / "train")
    prepared = prepare(experiment(tmp_path, "kermany", tmp_path / "x", "oct_bscan_classification"))
    assert len(prepared.rows) + len(prepared.clean_rows) == 34
    assert not prepared.findings.unusable


def test_dermoscopy_is_grouped_by_lesion(shared):
    section = validate(
        {
            "cohort": {"reader": "isic", "root": str(shared / "data" / "derm")},
            "bundle": "isic_dermoscopy_classification",
            "method": "fedavg",
        },
        "x",
    ).cohort
    cohort = read_section(section)
    with (shared / "data" / "derm" / "labels.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(cohort) == len(rows) == 2407
    lesions = {r["image_id"]: r["lesion_id"] for r in rows}
    assert dict(zip(cohort.table["sample"], cohort.table["patient"])) == lesions
    diagnoses = {r["image_id"]: r["dx"] for r in rows}
    assert [cohort.task.classes[k] for k in cohort.labels] == [diagnoses[s] for s in cohort.table["sample"]]
