"""The work list of a client: signals by hand calculation, order, what is listed, the page and its pictures."""

from __future__ import annotations

import base64
import hashlib
import io
import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from test_html import Page

from medfed.errors import DataError, FederationError
from medfed.report.audit import work_list
from medfed.report.audit_page import SIDE, Standing, thumbnail, write_audit_page, write_csv
from medfed.report.audit_signals import Evidence, left_out_signal, spectral_signal, strength

NAN = float("nan")
CLASSES = ("CNV", "DME", "NORMAL")


def by_hand() -> Evidence:
    """Four samples observed as CNV, DME, DME, NORMAL; two checkpoints."""
    return Evidence(
        rounds=(20, 40),
        proposals=np.array([[1, 1, 0, -1], [1, 1, -1, 2]]),
        representative=np.array([[4.0, 8, 2], [1, 5, 2], [6, 3, 3], [1, 2, 4]]),
        residual=np.array([[0.9, 0.3, 0.6], [0.4, 0.2, 0.5], [0.5, 0.4, 0.8], [0.6, 0.5, 0.1]]),
        left_out=np.array([1, 1, 2, 0]),
        left_out_margin=np.array([0.7, -0.9, -0.1, 0.2]),
        targets=np.array([1, 1, 0, 2]),
    )


OBSERVED = np.array([0, 1, 1, 2])
SAMPLES = ["a", "b", "c", "d"]


def test_signals_by_hand():
    found = spectral_signal(by_hand().representative, OBSERVED)
    # (best other - own) / larger of the two
    np.testing.assert_allclose(found.margin, [(8 - 4) / 8, (2 - 5) / 5, (6 - 3) / 6, (2 - 4) / 4])
    assert found.points.tolist() == [1, 1, 0, 2]
    found = spectral_signal(by_hand().residual, OBSERVED, smallest=True)
    np.testing.assert_allclose(
        found.margin, [(0.9 - 0.3) / 0.9, (0.2 - 0.4) / 0.4, (0.4 - 0.5) / 0.5, (0.1 - 0.5) / 0.5]
    )
    assert found.points.tolist() == [1, 1, 1, 2]


def test_a_class_without_reference_is_neither_proposed_nor_compared():
    scores = np.array([[NAN, 2.0, 1.0], [3.0, NAN, 1.0], [NAN, NAN, 1.0], [NAN, NAN, NAN]])
    found = spectral_signal(scores, np.array([1, 1, 2, 0]))
    np.testing.assert_allclose(found.margin, [-0.5, NAN, NAN, NAN])
    assert found.points.tolist() == [1, 0, 2, -1]
    assert found.contradicts.tolist() == [False] * 4


def test_equal_scores_and_zero_features_contradict_nothing():
    found = spectral_signal(np.array([[2.0, 2.0], [0.0, 0.0]]), np.array([1, 0]))
    assert found.margin.tolist() == [0, 0]
    assert found.points.tolist() == [1, 0]


def test_leave_one_out_needs_another_label_and_a_finite_margin():
    found = left_out_signal(np.array([1, 0, -1, 1]), np.array([0.5, 0.5, 0.5, NAN]), np.array([0, 0, 0, 0]))
    assert found.contradicts.tolist() == [True, False, False, False]
    assert found.points.tolist() == [1, 0, -1, -1]


def test_strength_is_the_mean_mid_rank():
    margins = np.array([[0.1, 0.3, 0.2, NAN], [5.0, 7.0, 7.0, NAN]])
    # ranks 1, 3, 2 of 3 and 1, 2.5, 2.5 of 3, each less a half
    expected = [(0.5 / 3 + 0.5 / 3) / 2, (2.5 / 3 + 2 / 3) / 2, (1.5 / 3 + 2 / 3) / 2, 0]
    np.testing.assert_allclose(strength(margins), expected)


def test_list_by_hand():
    found = work_list(SAMPLES, OBSERVED, CLASSES, by_hand(), {"a": ("/data/a.png", 0), "d": ("/data/d.dcm", 3)})
    table = found.table.set_index("sample")
    # a: all three; d: leave-one-out alone; c: the class direction alone, at one of two checkpoints; b: nothing.
    assert found.table["sample"].tolist() == ["a", "c", "d"]
    assert found.table["rank"].tolist() == [1, 2, 3]
    assert table["contradicting"].tolist() == [3, 1, 1]
    assert table["proposed"].tolist() == ["DME", "CNV", "CNV"]
    assert table["training_target"].tolist() == ["DME", "CNV", "NORMAL"]
    assert table["checkpoints_proposing"].tolist() == [2, 1, 0]
    assert table["always_same"].tolist() == ["yes", "yes", ""]
    assert table.loc["a", "S_R DME"] == 8
    assert table.loc["d", "S_N CNV"] == 0.6
    assert (table.loc["d", "path"], table.loc["d", "frame"]) == ("/data/d.dcm", 3)
    assert found.changed == 2
    assert found.summary() == [("CNV", [0, 1, 0], 0, 1), ("DME", [1, 0, 0], 1, 2), ("NORMAL", [1, 0, 0], 0, 1)]
    assert table.loc["a", "reason"] == (
        "Class direction, residual directions and leave-one-out prediction point to DME, not CNV; the two spectral "
        "criteria agreed on DME at 2 of 2 checkpoints; training now uses DME."
    )
    assert table.loc["d", "reason"].endswith("at none of 2 checkpoints; training still uses NORMAL.")


def test_an_earlier_proposal_or_another_target_is_listed_though_nothing_contradicts_now():
    quiet = Evidence(
        rounds=(5, 9),
        proposals=np.array([[1, -1, 0], [-1, -1, 0]]),
        representative=np.array([[2.0, 1], [2, 1], [2, 1]]),
        residual=np.array([[1.0, 2], [1, 2], [1, 2]]),
        targets=np.array([0, 1, 0]),
    )
    found = work_list(["x", "y", "z"], np.zeros(3, int), ("n", "p"), quiet)
    assert found.table["sample"].tolist() == ["x", "y"]
    assert found.table["contradicting"].tolist() == [0, 0]
    assert found.table["proposed"].tolist() == ["p", "p"]


def test_different_proposals_are_told_apart():
    changing = Evidence(rounds=(1, 2, 3), proposals=np.array([[1], [2], [2]]))
    row = work_list(["x"], np.array([0]), CLASSES, changing).table.iloc[0]
    assert (row["proposed"], row["checkpoints_proposing"], row["checkpoints_other"]) == ("NORMAL", 2, 1)
    assert row["always_same"] == "no"
    assert "Relabelling proposed NORMAL at 2 of 3 checkpoints, on yet another label at 1" in row["reason"]


def test_one_checkpoint_is_no_plural():
    once = Evidence(rounds=(3,), proposals=np.array([[1, -1]]), left_out=np.array([1, 1]), left_out_margin=np.ones(2))
    reasons = work_list(["x", "y"], np.array([0, 0]), CLASSES, once).table["reason"]
    assert [r for r in reasons if "at 1 of 1 checkpoint;" in r or "at none of 1 checkpoint;" in r] == list(reasons)


def test_observed_class_without_reference_is_said():
    scores = np.array([[NAN, 2.0, 1.0]])
    proposed = Evidence((1,), np.array([[1]]), scores, np.array([[NAN, 1.0, 2.0]]), targets=np.array([1]))
    found = work_list(["x"], np.array([0]), CLASSES, proposed)
    assert found.without_reference == ("CNV",)
    row = found.table.iloc[0]
    assert (row["contradicting"], row["criteria"], row["proposed"]) == (0, 0, "DME")
    assert "There is no reference for CNV, so the spectral criteria cannot compare" in row["reason"]


def test_leave_one_out_alone():
    alone = Evidence(left_out=np.array([1, 1, 0]), left_out_margin=np.array([0.2, 0.9, -1.0]))
    found = work_list(["x", "y", "z"], np.zeros(3, int), ("n", "p"), alone)
    assert found.table["sample"].tolist() == ["y", "x"]
    assert found.criteria == ("left_out",)
    assert found.table["checkpoints"].tolist() == [0, 0]


def test_posterior_decides_order_and_proposal():
    """It points elsewhere than the three others and its margin alone is the strength."""
    probability = np.array([[0.2, 0.1, 0.7], [0.1, 0.8, 0.1], [0.9, 0.05, 0.05], [0.3, 0.1, 0.6]])
    found = work_list(SAMPLES, OBSERVED, CLASSES, replace(by_hand(), posterior=probability))
    assert found.criteria == ("representative", "residual", "left_out", "posterior")
    rows = found.table.set_index("sample")
    # (best other - own) / larger: 0.5 / 0.7, -0.7 / 0.8, 0.85 / 0.9, -0.3 / 0.6.
    assert rows["posterior_margin"]["a"] == pytest.approx(0.5 / 0.7)
    assert list(found.table["sample"])[:2] == ["c", "a"]
    assert rows["strength"]["c"] == pytest.approx(3.5 / 4)
    assert rows["proposed"]["a"] == "NORMAL"
    assert rows["proposed"]["c"] == "CNV"
    assert "relabelling proposed CNV at 1 of 2 checkpoints" in rows["reason"]["c"]
    assert "irection and posterior of features and label point to CNV, not DME" in rows["reason"]["c"]


def test_order_is_criteria_then_strength_then_checkpoints_then_sample():
    margins = np.array([0.1, 0.9, 0.5, 0.5, 0.5, 0.2])
    evidence = Evidence(
        rounds=(1, 2),
        proposals=np.array([[1, -1, -1, 1, -1, 1], [1, -1, -1, -1, -1, 1]]),
        left_out=np.array([1, 1, 1, 1, 1, 0]),
        left_out_margin=margins,
    )
    table = work_list(list("abdefg"), np.zeros(6, int), ("n", "p"), evidence).table
    # g is contradicted by no criterion now; b is strongest; of the equal ones e has a checkpoint; then by id.
    assert table["sample"].tolist() == ["b", "e", "d", "f", "a", "g"]


@st.composite
def cases(draw):
    n, size, m = draw(st.integers(2, 12)), draw(st.integers(2, 4)), draw(st.integers(0, 3))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    scores = rng.integers(0, 5, (2, n, size)).astype(float)
    scores[:, :, rng.random(size) < 0.2] = NAN
    return rng.integers(0, size, n), Evidence(
        rounds=tuple(range(m)),
        proposals=rng.integers(-1, size, (m, n)),
        representative=scores[0],
        residual=scores[1],
        left_out=rng.integers(0, size, n),
        left_out_margin=rng.normal(size=n),
        targets=rng.integers(0, size, n),
    )


@settings(max_examples=60)
@given(cases(), st.integers(0, 10**6))
def test_the_order_of_samples_does_not_matter_and_nothing_is_lost(case, seed):
    observed, evidence = case
    n = len(observed)
    names = [f"s{i:02d}" for i in range(n)]
    classes = tuple("abcd"[: evidence.representative.shape[1]])
    first = work_list(names, observed, classes, evidence).table
    move = np.random.default_rng(seed).permutation(n)
    moved = Evidence(
        evidence.rounds,
        evidence.proposals[:, move],
        evidence.representative[move],
        evidence.residual[move],
        evidence.left_out[move],
        evidence.left_out_margin[move],
        evidence.targets[move],
    )
    second = work_list([names[i] for i in move], observed[move], classes, moved).table
    pd.testing.assert_frame_equal(first, second)
    assert (first["proposed"] != first["observed"]).all()
    assert (first["proposed"] != "").all()
    listed = set(first["sample"])
    for i in range(n):
        against = evidence.left_out_margin[i] > 0 and evidence.left_out[i] != observed[i]
        if against or evidence.targets[i] != observed[i]:
            assert names[i] in listed
    order = list(zip(-first["contradicting"], -first["strength"], -first["checkpoints_proposing"], first["sample"]))
    assert order == sorted(order)


@settings(max_examples=60)
@given(cases(), st.integers(0, 11), st.floats(0.01, 10))
def test_a_stronger_leave_one_out_contradiction_never_costs_a_place(case, index, more):
    observed, evidence = case
    i = index % len(observed)
    names, classes = [f"s{k:02d}" for k in range(len(observed))], tuple("abcd"[: evidence.representative.shape[1]])
    evidence.left_out[i] = (observed[i] + 1) % len(classes)
    before = work_list(names, observed, classes, evidence).table.set_index("sample")
    evidence.left_out_margin[i] += more
    after = work_list(names, observed, classes, evidence).table.set_index("sample")
    if names[i] in before.index:
        assert after.loc[names[i], "rank"] <= before.loc[names[i], "rank"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"representative": np.zeros((3, 3))}, "audit_representative of shape"),
        ({"proposals": np.zeros((1, 4), int)}, "audit_proposals of shape"),
        ({"left_out": np.full(4, 3)}, "audit_loo_label outside the 3 classes"),
        ({"targets": np.full(4, -1)}, "labels outside the 3 classes"),
    ],
)
def test_evidence_of_other_data_is_refused(changes, words):
    evidence = Evidence(**{**by_hand().__dict__, **changes})
    with pytest.raises(DataError, match=words):
        work_list(SAMPLES, OBSERVED, CLASSES, evidence)


def test_memory_without_evidence_is_none():
    assert Evidence.of({}) is None
    assert Evidence.of({"labels": np.zeros(3, int)}) is None
    assert Evidence.of({"audit_loo_label": np.zeros(3, int)}) is None
    assert Evidence.of({"audit_rounds": [3], "audit_proposals": np.zeros((1, 3), int)}).rounds == (3,)


def write(folder, evidence=None, samples=SAMPLES, observed=OBSERVED, classes=CLASSES, **options):
    files = {s: (f"/data/<i>{s} 1.png", 0) for s in samples}
    found = work_list(samples, observed, classes, evidence or by_hand(), files)
    options = {"thumbnails": {}, "standing": Standing("noisy", 0.03, 7), **options}
    table = found.of_class(options["only"]) if options.get("only") else found.table
    page = write_audit_page(found, table, folder / "page.html", client="<b>St. Anna", run="r", method="m", **options)
    text = page.read_text(encoding="utf-8")
    return text, Page(re.sub(r"<script>.*?</script>", "", text, flags=re.S))


def test_page_says_what_it_is_and_escapes_what_it_shows(tmp_path):
    text, page = write(tmp_path)
    for words in (
        "Labels to look at: <b>St. Anna",
        "A person who may read these images must look at each one",
        "corrects no diagnosis",
        "counted this client as noisy in round 7 (probability of clean 0.03)",
        "2 of 4 training targets differ",
        "Pictures of the first 0 of 3 rows by rank",
        "always the same",
    ):
        assert words in page.text, words
    assert "<b>St. Anna" not in text
    assert "<i>a" not in text
    assert "file:///data/%3Ci%3Ea%201.png" in text
    assert [r[0] for r in page.rows if r and r[0].isdigit()] == ["1", "2", "3"]
    assert page.row("DME") == ["DME", "1", "–", "0", "1", "2"]
    assert not re.search(r"corrected (label|diagnos)", text)


def test_page_of_a_method_that_changes_labels_without_references_speaks_of_none(tmp_path):
    """FedCorr, FedELC, RoFL and FedNed leave their own labels, and no criterion speaks."""
    only = Evidence(rounds=(4,), proposals=np.array([[1, -1, -1, -1]]), targets=np.array([1, 1, 1, 2]))
    _, page = write(tmp_path, only)
    assert "Relabelling proposed DME at 1 of 1 checkpoint; training now uses DME." in page.text
    assert "criteria that speaknone" in page.text
    assert not re.search("spectral|class direction|residual|[Rr]eference", page.text)


@pytest.mark.parametrize("posterior", [False, True])
def test_page_explains_the_criteria_it_shows_and_how_it_ranks(tmp_path, posterior):
    """Where the posterior speaks it decides the order; where a criterion does not speak, it is not explained."""
    evidence = replace(by_hand(), left_out=None, left_out_margin=None)
    if posterior:
        evidence = replace(evidence, posterior=np.full((4, 3), 1 / 3))
    _, page = write(tmp_path, evidence)
    assert ("posterior of features and labelThe most probable class" in page.text) == posterior
    assert ("rankBy strength, then criteria that contradict" in page.text) == posterior
    assert ("rankBy criteria that contradict, then strength" in page.text) != posterior
    assert "leave-one-out" not in page.text


def test_a_class_that_cannot_be_compared_with_the_observed_one_is_not_shown_as_evidence(tmp_path):
    scores = np.array([[NAN, 2.0, 1.0], [NAN, 1, NAN], [NAN, 2, NAN], [NAN, NAN, NAN]])
    evidence = replace(by_hand(), representative=scores)
    text, page = write(tmp_path, evidence)
    assert "class direction: DME (no score for CNV)" in page.text
    assert "class direction: DME alone has a score" in page.text
    assert "class direction: cannot compare" in page.text
    assert '<li class="against">class direction' not in text


def test_page_asks_for_nothing_and_runs_only_its_own_script(tmp_path):
    text, page = write(tmp_path, thumbnails={"a": thumbnail(np.zeros((1, 8, 8), np.uint8))})
    for tag, name, value in page.attributes:
        if name in ("href", "src"):
            assert value.startswith(("data:image/jpeg;base64,", "file:///")), (tag, name)
        assert not name.startswith("on"), (tag, name)
    scripts = re.findall(r"<script>(.*?)</script>", text, flags=re.S)
    assert len(scripts) == 1
    digest = base64.b64encode(hashlib.sha256(scripts[0].encode()).digest()).decode()
    policy = next(v for t, k, v in page.attributes if t == "meta" and k == "content" and "default-src" in v)
    assert f"script-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert not re.search(r"fetch\(|XMLHttpRequest|WebSocket|import\(|eval\(|innerHTML", scripts[0])


@pytest.mark.parametrize(
    ("standing", "words"),
    [
        (
            Standing("clean", 0.99),
            "counted this client as clean (probability of clean 0.99): its labels were not changed",
        ),
        (Standing("undetermined", None, 3), "could not judge this client in round 3"),
        (Standing("noisy", 0.1, 1, targets=False), "noisy in round 1 (probability of clean 0.10): its labels were not"),
        (Standing(), "keeps no judgement of this client"),
    ],
)
def test_page_of_clients_that_are_not_noisy(tmp_path, standing, words):
    _, page = write(tmp_path, standing=standing)
    assert words in page.text


def test_page_of_one_class_keeps_ranks_and_of_nothing_proves_nothing(tmp_path):
    _, page = write(tmp_path, only="DME")
    assert [r[0] for r in page.rows if r and r[0].isdigit()] == ["2"]
    quiet = Evidence(left_out=OBSERVED, left_out_margin=np.full(4, -1.0))
    text, page = write(tmp_path, quiet)
    assert "That does not prove the labels right" in page.text
    assert "<script>" not in text


def test_thousands_of_rows_and_few_pictures(tmp_path):
    n = 5000
    rng = np.random.default_rng(0)
    many = Evidence(left_out=rng.integers(0, 2, n), left_out_margin=np.ones(n))
    names = [f"s{i:05d}" for i in range(n)]
    picture = thumbnail(rng.integers(0, 256, (3, 128, 128), dtype=np.uint8))
    text, page = write(
        tmp_path, many, names, np.zeros(n, int), ("n", "p"), thumbnails=dict.fromkeys(names[:20], picture)
    )
    count = int((many.left_out == 1).sum())
    assert sum(bool(r) and r[0].isdigit() for r in page.rows) == count
    assert len(text) < 12_000_000


def test_csv_holds_all_rows_and_opens_in_a_spreadsheet(tmp_path):
    found = work_list(["ä,1", "b", "c", "d"], OBSERVED, CLASSES, by_hand())
    file = write_csv(found.table, tmp_path / "new" / "audit.csv")
    assert file.read_bytes().startswith(b"\xef\xbb\xbfrank,sample")
    back = pd.read_csv(file)
    assert back["sample"].tolist() == ["ä,1", "c", "d"]
    assert back["strength"].tolist() == pytest.approx(found.table["strength"].tolist(), abs=1e-5)
    (tmp_path / "file").write_text("")
    with pytest.raises(FederationError, match="cannot be written"):
        write_csv(found.table, tmp_path / "file" / "audit.csv")


def decoded(url: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))))


def test_thumbnails_show_the_record():
    grey = np.zeros((1, 40, 60), np.uint8)
    grey[0, :, 30:] = 200
    shown = decoded(thumbnail(grey))
    assert shown.shape == (40, 60)
    assert abs(int(shown[20, 45]) - 200) < 6
    assert decoded(thumbnail(np.repeat(grey, 3, axis=0))).shape == (40, 60)
    red = np.zeros((3, 16, 16), np.uint8)
    red[0] = 255
    assert decoded(thumbnail(red))[8, 8].tolist() == pytest.approx([255, 0, 0], abs=4)
    assert decoded(thumbnail(red, windows=True)).shape == (16, 48)
    assert decoded(thumbnail(np.full((1, 8, 8), 0.5, np.float32)))[4, 4] == pytest.approx(128, abs=2)
    assert max(decoded(thumbnail(np.zeros((1, 600, 300), np.uint8))).shape) == SIDE
