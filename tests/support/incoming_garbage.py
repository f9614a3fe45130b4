"""Garbage that a broker may deliver, drawn by Hypothesis: bodies, headers and properties of every kind."""

import json
from datetime import UTC, datetime

from hypothesis import strategies as st

NOON = datetime(2013, 1, 1, 12, tzinfo=UTC)

HEADERS = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.floats(), st.binary(), st.text()),
    *(st.text(min_size=500, max_size=600), st.binary(min_size=500, max_size=600)),
    st.sampled_from([b"\xff\xfe", "\ud800", b"id", "id", 1 << 80, -1, NOON, NOON.replace(tzinfo=None), [], {}]),
)
BODIES = st.one_of(
    st.binary(),
    st.text().map(lambda text: text.encode("utf-8", "surrogatepass")),
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text()),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    ).map(lambda value: json.dumps(value).encode()),
    st.sampled_from([b"", b"[" * 100_000, b"9" * 5_000, b"NaN", b"[1e999]", '"é"'.encode("latin-1"), b"\x00"]),
)
ATTRIBUTES = ("specversion", "id", "source", "type", "time", "data", "data_base64", "datacontenttype")
