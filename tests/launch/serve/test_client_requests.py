"""Bodies that clients and benchmarks of other projects send, written after their sources (client_requests.json)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.serving import FakeRunner, FakeServer

REQUESTS = json.loads(Path(__file__).with_name("client_requests.json").read_text())


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with FakeServer(FakeRunner(pages=500)) as served, httpx.Client(base_url=served.url) as client:
        yield client


@pytest.mark.parametrize("asked", REQUESTS, ids=[one["client"] for one in REQUESTS])
def test_the_requests_of_clients_are_served(http, asked):
    body = asked["body"]
    answer = http.post(f"/v1/{asked['path']}", json=body)
    assert answer.status_code == 200, answer.text
    if not body.get("stream"):
        assert answer.json()["choices"][0]["finish_reason"] in ("stop", "length")
        return
    *chunks, end = answer.text.removesuffix("\n\n").split("\n\n")
    assert end == "data: [DONE]"
    usage = [json.loads(chunk.removeprefix("data: ")).get("usage") for chunk in chunks]
    options = body.get("stream_options", {})
    assert (usage[-1] is not None) == options.get("include_usage", False)
    if options.get("continuous_usage_stats"):
        counts = [one["completion_tokens"] for one in usage]
        assert counts == sorted(counts)
        assert {1, 2, 3, 4} <= set(counts)
    else:
        assert set(usage[:-1]) == {None}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools are not supported by the chat template"),
    ({"tools": [{"type": "function"}]}, "tools.0.function: Field required"),
    ({"tool_choice": "required"}, "tool_choice must be 'auto' or 'none' without tools, got 'required'"),
    ({"functions": [{}]}, "functions are not supported; pass them as tools"),
    ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, "tools are not supported by the chat"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]}, "tool_calls must be of an assistant"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "tool_call_id must be there where role is 'tool', only"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "only text is supported"),
    (
        {"structured_outputs": {"regex": "a", "choice": ["b"]}},
        "structured_outputs must have one of json, regex, choice",
    ),
    ({"structured_outputs": {"regex": "a"}, "min_tokens": 3}, "min_tokens must be left out where a format or a call"),
    ({"kv_transfer_params": {"do_remote_decode": True}}, "prefill and decode share the ranks of one server"),
    ({"lora_path": "x"}, "lora_path is not supported; adapters are merged when the server starts"),
    ({"reasoning_effort": "high"}, "reasoning_effort is not supported by the chat template"),
    ({"use_beam_search": True}, "use_beam_search is not supported, got true; leave it out"),
    ({"length_penalty": 1.5}, "length_penalty is not supported"),
    ({"guided_json": {}}, "guided_json is not supported; pass structured_outputs"),
    ({"modalities": ["text", "audio"]}, "modalities are not supported"),
    ({"max_tokens": 12.5}, "max_tokens: "),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens must be at most max_tokens, got 5 and 4"),
    ({"n": 128, "max_tokens": 500, "logprobs": True, "top_logprobs": 20}, "must be at most 1048576, so 390 new tokens"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_is_not_served_is_refused_by_name(http, fields, message):
    answer = http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}], **fields})
    assert answer.status_code == 400, answer.text
    assert message in answer.json()["error"]["message"]
    assert "Input should" not in answer.text or message == "max_tokens: "
