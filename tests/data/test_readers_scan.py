"""Which files a scan finds, and what it says of the others."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from medfed.data.cohort import Findings
from medfed.data.readers import READERS, get_reader
from medfed.data.readers.common import header_of, natural_order, read_table
from medfed.data.readers.scan import scan, stem_of, suffix_of
from medfed.errors import ConfigError, DataError


def png(path: Path, value: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((4, 4), value, np.uint8)).save(path, format="png")
    return path


@pytest.mark.parametrize("name", sorted(READERS))
def test_every_reader_has_options_that_refuse_unknown_keys_and_a_read(name):
    module = get_reader(name)
    assert callable(module.read)
    with pytest.raises(ValueError, match="no_such_option"):
        module.Options(no_such_option=1)


def test_unknown_reader_names_the_nearest():
    with pytest.raises(ConfigError, match="Did you mean 'kermany'"):
        get_reader("kermani")


@pytest.mark.parametrize(
    ("name", "suffix", "stem"),
    [
        ("a.PNG", ".png", "a"),
        ("ISIC_0000002_downsampled.jpg", ".jpg", "ISIC_0000002_downsampled"),
        ("brain.nii.gz", ".nii.gz", "brain"),
        ("1.2.840.113619.5", ".5", "1.2.840.113619.5"),
        ("noextension", "", "noextension"),
    ],
)
def test_names(name, suffix, stem):
    assert (suffix_of(name), stem_of(name)) == (suffix, stem)


def test_files_are_sorted_into_images_others_and_system_files(tmp_path):
    png(tmp_path / "b.PNG")
    png(tmp_path / "sub" / "1.2.840")  # recognised by content
    png(tmp_path / "sub" / "._b.png")
    (tmp_path / ".DS_Store").write_bytes(b"x")
    png(tmp_path / "__MACOSX" / "c.png")
    (tmp_path / "labels.csv").write_text("a\n")
    (tmp_path / "README").write_text("no image")
    found = scan(tmp_path)
    assert [found.relative(p) for p in found.images] == ["b.PNG", "sub/1.2.840"]
    assert [p.name for p in found.others] == ["README", "labels.csv"]
    assert sorted(p.name for p in found.system) == [".DS_Store", "._b.png", "__MACOSX"]
    findings = Findings()
    found.report(findings)
    assert "3 files of the operating system" in findings.notes[0]


def test_a_dicomdir_is_named_and_not_an_image(tmp_path):
    (tmp_path / "DICOMDIR").write_bytes(b"\0" * 128 + b"DICM")
    png(tmp_path / "a.png")
    found = scan(tmp_path)
    assert len(found.images) == 1
    assert "DICOMDIR" in found.unusable[0].reason


def test_links_are_followed_once_and_loops_end(tmp_path):
    data, outside = tmp_path / "data", tmp_path / "outside"
    png(outside / "linked.png")
    png(data / "real" / "own.png")
    (data / "a_link").symlink_to(outside)
    (data / "z_link").symlink_to(outside)
    (data / "real" / "loop").symlink_to(data)
    (data / "nowhere.png").symlink_to(tmp_path / "gone.png")
    found = scan(data)
    assert [found.relative(p) for p in found.images] == ["a_link/linked.png", "real/own.png"]
    reasons = sorted(u.reason for u in found.unusable)
    assert reasons == ["link that leads nowhere", *["link to a folder that was read already"] * 2]


def test_a_linked_folder_keeps_the_path_of_the_real_one(tmp_path):
    png(tmp_path / "b" / "x.png")
    (tmp_path / "a").symlink_to(tmp_path / "b")
    assert [scan(tmp_path).relative(p) for p in scan(tmp_path).images] == ["b/x.png"]


def test_missing_folder_and_file_as_folder(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        scan(tmp_path / "gone")
    with pytest.raises(DataError, match="is a file"):
        scan(png(tmp_path / "a.png"))


def test_tables_are_text_with_any_separator_and_a_byte_order_mark(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("\ufeff id ;value\n000123;NA\n7;\n", encoding="utf-8")
    table = read_table(path)
    assert list(table.columns) == ["id", "value"]
    assert table.to_numpy().tolist() == [["000123", "NA"], ["7", ""]]
    assert header_of(path) == ["id", "value"]


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "empty"), (b"a,b\n1,2\n1,2,3\n", "cannot be parsed"), (b"a,b\n\xff\xfe,1\n", "not UTF-8")],
)
def test_broken_tables(tmp_path, content, message):
    path = tmp_path / "t.csv"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_table(path)


def test_grades_sort_by_value_and_names_as_text():
    assert natural_order(["10", "2", "1", "2"]) == ["1", "2", "10"]
    assert natural_order(["b", "10", "a"]) == ["10", "a", "b"]


def test_links_to_themselves_and_pipes_are_named_and_never_waited_for(tmp_path):
    (tmp_path / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    (tmp_path / "self.png").symlink_to("self.png")
    (tmp_path / "self").symlink_to("self")
    os.mkfifo(tmp_path / "pipe")
    os.mkfifo(tmp_path / "pipe.png")
    found = scan(tmp_path)
    assert [p.name for p in found.images] == ["a.png"]
    assert sorted((os.path.basename(u.path), u.reason) for u in found.unusable) == [
        ("pipe", "a pipe, socket or device and not a file"),
        ("pipe.png", "a pipe, socket or device and not a file"),
        ("self", "link that leads nowhere"),
        ("self.png", "link that leads nowhere"),
    ]
