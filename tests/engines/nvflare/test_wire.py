"""Messages as bytes: everything back as it was, and nothing else accepted."""

from __future__ import annotations

import json
import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nvflare.apis.shareable import Shareable
from nvflare.apis.utils.decomposers import flare_decomposers
from nvflare.fuel.utils import fobs
from safetensors.torch import save

from medfed.engines.nvflare.wire import (
    WireError,
    own_values,
    pack,
    pack_answer,
    pack_request,
    read_answer,
    read_request,
    unpack,
)
from medfed.federation.client import Request
from medfed.federation.messages import Message, Refusal

TYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (2, 3)])
def test_tensors_keep_type_shape_and_value(dtype, shape):
    sent = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape).to(dtype)
    _, message = unpack(pack(Message({"a/b": sent})))
    assert message.tensors["a/b"].dtype == dtype
    assert message.tensors["a/b"].shape == sent.shape
    assert torch.equal(message.tensors["a/b"], sent)


def test_names_keep_their_order_and_views_of_one_buffer_are_admitted():
    whole = torch.arange(12.0).reshape(3, 4)
    tensors = {"z": whole[1], "a": whole.t(), "m": whole[:, 1:]}
    _, message = unpack(pack(Message(tensors)))
    assert list(message.tensors) == ["z", "a", "m"]
    assert all(torch.equal(message.tensors[k], t) for k, t in tensors.items())


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60)
@given(st.dictionaries(st.text(max_size=8), plain, max_size=4))
def test_plain_values_come_back(values):
    _, message = unpack(pack(Message({}, values)))
    assert message.values == values


def test_what_is_not_finite_travels_so_that_it_is_refused_at_the_door():
    _, message = unpack(pack(Message({"w": torch.tensor([float("nan")])}, {"loss": float("nan"), "up": -float("inf")})))
    assert math.isnan(message.values["loss"])
    assert message.values["up"] == -float("inf")
    assert torch.isnan(message.tensors["w"]).all()


def test_fobs_sees_bytes_and_text_only():
    """Through NVFlare's own serialisation, without a decomposer of ours (trap: types that FOBS does not admit)."""
    flare_decomposers.register()
    shareable = Shareable()
    shareable["medfed"] = pack(Message({"w": torch.ones(3, dtype=torch.bfloat16)}, {"ü": [1, None]}))
    shareable["own"] = own_values(Request("t", 1, 1, 0, Message(), {"c": {"status": "clean"}}), "c")
    back = fobs.loads(fobs.dumps(shareable))
    assert {type(back[k]) for k in ("medfed", "own")} == {bytes, str}
    assert unpack(back["medfed"])[1].values == {"ü": [1, None]}


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps({"a": 1}),
        b"",
        b"\xff" * 40,
        save({"a": torch.ones(2)}),
        save({"a": torch.ones(2)}, metadata={"medfed": "[1]"}),
        save({"a": torch.ones(2)}, metadata={"medfed": json.dumps({"schema": 1})}),
        save({"a": torch.ones(2)}, metadata={"medfed": json.dumps({"schema": 1, "values": {}, "names": ["b"]})}),
        save({"a": torch.ones(2)}, metadata={"medfed": json.dumps({"schema": 1, "values": [], "names": ["a"]})}),
        None,
        7,
        {"a": 1},
    ],
)
def test_what_is_no_message_is_refused(data):
    with pytest.raises(WireError, match="no message"):
        unpack(data)


def test_truncated_bytes_are_refused_at_every_length():
    whole = pack(Message({"w": torch.ones(4)}, {"a": 1}))
    for length in range(0, len(whole), 7):
        with pytest.raises(WireError, match="no message"):
            unpack(whole[:length])


def test_a_header_that_nests_without_end_is_refused():
    deep = "[" * 100_000 + "]" * 100_000
    with pytest.raises(WireError, match="no message"):
        unpack(save({}, metadata={"medfed": f'{{"schema": 1, "values": {{"a": {deep}}}, "names": []}}'}))


@pytest.mark.parametrize("schema", [0, 2, "1", None])
def test_another_schema_is_refused_with_both_numbers(schema):
    data = save({}, metadata={"medfed": json.dumps({"schema": schema, "values": {}, "names": []})})
    with pytest.raises(WireError, match=r"schema .* not 1: the versions of medfed differ"):
        unpack(data)


def test_a_limit_is_a_limit():
    data = pack(Message({"w": torch.ones(1000)}))
    unpack(data, len(data))
    with pytest.raises(WireError, match="larger than the agreed"):
        unpack(data, len(data) - 1)


def request(**changes):
    facts = {
        "task": "train",
        "round": 2,
        "step": 5,
        "confirmed": 4,
        "message": Message({"m/w": torch.ones(2)}, {"a": 1}),
    }
    return Request(**{**facts, "each": {"c0": {"b": 2}, "c1": {"b": 3}}, **changes})


def test_a_request_as_its_client_reads_it():
    sent = request()
    got = read_request(pack_request(sent, "r"), own_values(sent, "c0"), "c0", "r", None)
    assert (got.task, got.round, got.step, got.confirmed) == ("train", 2, 5, 4)
    assert got.message_for("c0").values == {"a": 1, "b": 2}
    assert b'"b"' not in pack_request(sent, "r")  # what is for one client alone is not in what all are sent


@pytest.mark.parametrize("own", [None, 3, "", "[1]", "{", "null"])
def test_values_for_one_client_that_are_no_mapping_are_refused(own):
    with pytest.raises(WireError, match="mapping"):
        read_request(pack_request(request(), "r"), own, "c0", "r", None)


def test_a_request_of_another_run_or_no_request_is_refused():
    with pytest.raises(WireError, match="another run"):
        read_request(pack_request(request(), "other"), "{}", "c0", "r", None)
    with pytest.raises(WireError, match="no request"):
        read_request(
            pack(Message(), kind="request", run="r", task="t", round=True, step=1, confirmed=0), "{}", "c", "r", 9**9
        )
    with pytest.raises(WireError, match="no request"):
        read_request(pack_answer(Message(), "c0", {"run": "r"}), "{}", "c0", "r", None)


def test_a_refusal_arrives_as_one():
    data = pack_answer(Refusal("c0", "its disk is full"), "c0", {"run": "r", "step": 5})
    assert read_answer(data, "c0", "r", 5, None) == Refusal("c0", "its disk is full")
