"""Models, tokenizers, pieces of text and the choice of tokens, as the server uses them."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from ringattn.launch.common.checkpoint_files import check_place
from ringattn.launch.common.distributed import Refusal, Session
from ringattn.launch.common.model_optimization import optimize_model
from ringattn.launch.serve import run as serve_run
from ringattn.launch.serve import scheduler as scheduler_module
from ringattn.launch.serve.config import ServeArgs, check_model
from ringattn.launch.serve.http.detokenizer import StopStrings
from ringattn.launch.serve.model_runner import MIXED_ROWS, ModelRunner
from ringattn.launch.serve.models import (
    broadcast_weights,
    check_memory,
    describe_cache,
    load_model,
    make_cache,
    resolve_weights,
)
from ringattn.launch.serve.sampling import Logprob, Sampling, sample_tokens
from ringattn.launch.serve.scheduler import AnswerRequest, Scheduler
from ringattn.launch.serve.tokenizer import ByteTokenizer, ChatTemplateError, PretrainedTokenizer, make_tokenizer
from ringattn.launch.train.pretrained import build_causal_lm, load_tokenizer
from ringattn.ring import Ring
from tests.support.graph_recorder import Reruns

CPU = torch.device("cpu")
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' and loop.first %}{{ raise_exception('no user') }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CONFIG = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIG |= {"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512}


@cache
def _tokenizer() -> Any:
    """A byte-level BPE tokenizer, made here: characters of several bytes may fall into several tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    special = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(["the ring of keys and the ring of values, straße, naïve"] * 20, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|end|>", chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint as transformers saves it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    path = tmp_path_factory.mktemp("models") / "small"
    torch.manual_seed(1)
    config = AutoConfig.for_model("qwen3", vocab_size=len(_tokenizer()) + 5, eos_token_id=[0, 7], **CONFIG)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    _tokenizer().save_pretrained(path)
    return path


def sample(logits: torch.Tensor, how: list[Sampling]) -> list[tuple[int | None, Logprob | None]]:
    return sample_tokens(logits, how, [[]] * len(how)).on_host().read()


def opened(path: Path | str, **how: Any) -> Any:
    return load_model(ServeArgs(str(path), **how), CPU)


def answered(
    model_runner: ModelRunner, prompts: list[list[int]], ahead: bool = False, mixed: bool = False
) -> tuple[list[list[int]], Counter[str]]:
    """Six greedy tokens for each prompt, which come one after another, and how many steps there were of which kind.

    Args:
        replica: Computes them.
        prompts: Tokens.
        ahead: The next step is started before one is read.
        mixed: Prompts may come together with answers.
    """
    chunk = 64 if model_runner.graph_runner.most_pieces else 8
    scheduler = Scheduler(
        model_runner.allocator,
        chunk=chunk,
        max_running=4,
        keep=False,
        pieces=min(2, model_runner.graph_runner.most_pieces),
        rows=model_runner.graph_runner.most_rows if mixed else 0,
    )
    answers: dict[int, list[int]] = {name: [] for name in range(len(prompts))}
    pending = [AnswerRequest(name, prompt, 6, sampling=Sampling(0)) for name, prompt in enumerate(prompts)]
    scheduler.add([pending.pop(0)])
    before, kinds = None, Counter[str]()
    while (plan := scheduler.plan()) or before:
        started = (plan, model_runner.start(plan)) if plan and plan.requests else None
        if plan is not None:
            kinds.update(name for name in ("decodes", "packed", "mixed") if getattr(plan, name))
        if ahead:
            started, before = before, started
        if started is not None:
            plan, step = started
            sampled: Any = step.wait()
            for event in scheduler.record(plan, sampled.read()):
                answers[event.request_id].append(event.token or 0)
            if pending and plan.answers:
                scheduler.add([pending.pop(0)])
    return list(answers.values()), kinds


def test_requests_whose_frequencies_would_depend_on_others_are_refused(tmp_path):
    """Up to a length the longest request of a step does not change the frequencies of others."""
    from transformers import AutoConfig

    told: dict[str, Any] = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    config: Any = AutoConfig.for_model("llama", vocab_size=300, rope_parameters=told, **CONFIG)
    path = tmp_path / "config.json"
    config.to_json_file(path)
    with pytest.raises(Refusal, match=r"max_len must be at most 512 where rope_type is 'dynamic'.*--max-len 512"):
        opened(path, max_len=513)
    assert opened(path, max_len=512).length == 512


def test_longrope_is_served_at_full_length_with_its_long_factors(tmp_path):
    """Prompts beyond the original length get what transformers' generate gives; up to it a server of that length does."""
    from transformers import AutoConfig, AutoModelForCausalLM

    told: dict[str, Any] = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64}
    told |= {"short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 4.0, 8.0]}
    torch.manual_seed(3)
    ends = {"eos_token_id": 256, "bos_token_id": 0, "pad_token_id": 0, "original_max_position_embeddings": 64}
    config: Any = AutoConfig.for_model(
        "phi3", vocab_size=300, rope_parameters=told, initializer_range=0.3, **ends, **CONFIG
    )
    path = tmp_path / "long"
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    plain: Any = AutoModelForCausalLM.from_pretrained(path, attn_implementation="sdpa", dtype=torch.float32)
    ids = torch.randint(1, 300, (100,), generator=torch.Generator().manual_seed(5)).tolist()  # 0 pads
    wanted = {}
    for length in (100, 80, 40):
        given: Any = torch.tensor([ids[:length]])
        found = plain.generate(given, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
        wanted[length] = found[0, length:].tolist()

    def served(lengths: tuple[int, ...], **how: Any) -> list[list[int]]:
        opened_model = opened(path, **how)
        cache = make_cache(opened_model.model, Ring(), gib=0.001, page_size=4, kv_dtype="auto")
        return answered(ModelRunner(opened_model.model, cache, 4, False), [ids[:length] for length in lengths])[0]

    assert opened(path).length == 512
    assert "--max-len 64 takes the short ones" in opened(path).notes[0]
    assert not opened(path, max_len=64).notes
    # a short prompt beside long ones does not change them
    assert served((100, 40, 80))[::2] == [wanted[100], wanted[80]]
    assert served((40,), max_len=64) == [wanted[40]]
    assert served((40,)) != [wanted[40]], "the factors of the test do not matter"


TOOL_TEMPLATE = (
    "{% for t in tools %}{{ t.function.name }}: {{ t.function.parameters | tojson }};{% endfor %}"
    "{% for m in messages %}{{ m.role }}={{ m.content }}{% for c in m.tool_calls %}[{{ c.function.name }} "
    "{% for k, v in c.function.arguments.items() %}{{ k }}:{{ v }} {% endfor %}]{% endfor %}"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.tool_call_id }};{% endfor %}"
)


def test_tools_calls_and_results_go_to_the_chat_template(folder):
    """Arguments as objects, which templates write themselves."""
    from ringattn.launch.serve.http.api import Chat

    tokenizer = PretrainedTokenizer(folder, frozenset(), 400, TOOL_TEMPLATE)
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1], "b": "x"}'}}
    messages = [
        {"role": "developer", "content": "s"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "hm"},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "42"}]},
    ]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "strict": True}}]
    body = Chat.model_validate({"messages": messages, "tools": tools})
    given = [tool.model_dump(exclude_unset=True) for tool in body.tools]
    assert given == tools
    tokens = tokenizer.chat([message.template_message() for message in body.messages], None, given)
    wanted = 'f: {"type": "object"};system=s;assistant=[f a:[1] b:x ](hm);tool=42c1;'
    assert tokenizer.decode(tokens) == wanted
    with pytest.raises(ChatTemplateError, match=r"chat_template_kwargs must be variables .* got 'tools'"):
        tokenizer.chat([], None, tools=given)
    with pytest.raises(ChatTemplateError, match="tools must be left out for a model whose chat template does not"):
        PretrainedTokenizer(folder, frozenset(), 400).chat([], None, given)
    assert tokenizer.added_texts[0] == "<|end|>"


def test_requests_beyond_a_table_of_positions_are_refused_before_one_comes(tmp_path):
    from transformers import AutoConfig

    path = tmp_path / "config.json"
    AutoConfig.for_model("gpt2", vocab_size=300, n_positions=64, n_embd=32, n_layer=1, n_head=2).to_json_file(path)
    with pytest.raises(
        Refusal, match=r"max_len must be at most 64, the positions that GPT2LMHeadModel has learned, got 65"
    ):
        opened(path, max_len=65)
    assert opened(path, max_len=64).length == 64
    # rotary ones go on
    AutoConfig.for_model("llama", vocab_size=300, **CONFIG).to_json_file(path)
    assert opened(path, max_len=513).length == 512


def test_a_checkpoint_brings_its_weights_its_tokenizer_and_its_stops(folder):
    from transformers import AutoModelForCausalLM

    served = opened(folder)
    assert (served.name, served.length) == ("small", 512)
    assert served.tokenizer.stops == {0, 7}
    assert not served.model.training
    plain: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa", dtype=torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), served.model.parameters(), strict=True))
    assert opened(folder, name="other", dtype="bfloat16").model.dtype == torch.bfloat16
    # what the scheduler gets out of it is what the model gives by itself, by replays as by plain calls
    prompt = served.tokenizer.encode("the ring of keys and values, and then some more")
    prompts = [prompt, prompt[:20], prompt[3:9]]
    wanted = [
        plain.generate(torch.tensor([tokens]), max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
        for tokens in prompts
    ]
    cache = make_cache(served.model, Ring(), gib=0.001, page_size=4, kv_dtype="auto")
    for recorder in (None, Reruns()):
        model_runner = ModelRunner(served.model, cache, 4, recorder)
        prepared = model_runner.prepare()
        assert prepared[-1].startswith("prompts around the ring: ")
        assert cache.used_pages == (0,)
        for ahead, mixed in ((False, False), (True, False), (True, True), (False, True)):
            answers, kinds = answered(model_runner, prompts, ahead, mixed)
            assert answers == [x[0, len(tokens) :].tolist() for x, tokens in zip(wanted, prompts, strict=True)]
            assert bool(kinds["mixed"]) == (mixed and recorder is not None)
        if recorder is not None:
            assert prepared[0].startswith(
                f"decoding, and prompts in parts of up to 512 tokens: {8 + len(MIXED_ROWS)} CUDA graphs captured in"
            )
            rows = [(1, 4)] * len(MIXED_ROWS)  # of as many requests as may decode
            assert sorted(recorder.shapes) == sorted(
                [(1, 1), (1, 2), (1, 4), (1, 8), (1, 16), (1, 32), (2, 1), (4, 1), *rows]
            )
            # a prompt in two steps, and two that come later
            assert recorder.replays >= 5 + 4
    assert "tokens in float32 on 1 ranks" in describe_cache(cache)


def test_no_mixed_step_is_planned_for_which_there_is_no_room():
    from ringattn.integrations.transformers.cuda_graph_runner import ROW_TOKENS

    assert scheduler_module.MIXED_LENGTH <= ROW_TOKENS


def test_a_chat_template_comes_from_the_checkpoint(folder):
    tokenizer = PretrainedTokenizer(folder, frozenset(), 500)
    messages = [{"role": "system", "content": "be"}, {"role": "user", "content": "the ring"}]
    tokens = tokenizer.chat(messages)
    assert tokenizer.inner.decode(tokens) == "<|system|>be<|user|>the ring<|assistant|>"
    assert tokenizer.decode(tokens) == "bethe ring"
    with pytest.raises(ChatTemplateError, match="no user"):
        tokenizer.chat([{"role": "assistant", "content": "x"}])
    tokenizer.inner.chat_template = None
    with pytest.raises(
        ChatTemplateError, match="must have a chat template to chat, got none in its folder; use /v1/completions"
    ):
        tokenizer.chat(messages)


def test_tokens_have_the_bytes_of_their_text(folder):
    """Of byte-level vocabularies and of bytes in SentencePiece's spelling; together they are the text."""
    tokenizer = PretrainedTokenizer(folder, frozenset(), 500)
    for text in ("straße naïve", "環 of 🔑", "\ufffd"):
        assert b"".join(tokenizer.token_bytes(token) or b"?" for token in tokenizer.encode(text)).decode() == text
    assert tokenizer.token_bytes(499) is None
    spelled: Any = SimpleNamespace(convert_ids_to_tokens=["<0xE2>", "環", "<0x>"].__getitem__)
    tokenizer.inner = spelled
    assert [tokenizer.token_bytes(token) for token in range(2)] == [b"\xe2", None]


def test_a_template_of_a_file_and_its_variables(folder, tmp_path):
    path = tmp_path / "chat.jinja"
    path.write_text("{{ messages[0].content }}{% if enable_thinking %} thinks{% endif %}")
    tokenizer = opened(folder, chat_template=str(path)).tokenizer
    for one in (tokenizer, make_tokenizer(tokenizer.recipe)):
        chat: Any = [{"role": "user", "content": "the ring"}]
        assert one.decode(one.chat(chat)) == "the ring"
        assert one.decode(one.chat(chat, enable_thinking=True)) == "the ring thinks"
        # code, arguments of transformers, and variables that would be accepted and ignored
        for name in ("chat_template", "tokenize", "messages", "conversation", "self", "thinking", "enable.thinking"):
            with pytest.raises(ChatTemplateError, match="chat_template_kwargs must be") as refused:
                one.chat(chat, **{name: "{{ 1 }}"})
            assert refused.value.field == "chat_template_kwargs"
    with pytest.raises(ChatTemplateError, match="chat_template_kwargs"):
        ByteTokenizer().chat(chat, enable_thinking=True)
    with pytest.raises(Refusal, match="chat_template must be left out"):
        opened("tiny", chat_template=str(path))


def test_a_chat_template_that_does_not_parse_is_refused_at_the_start(folder, tmp_path):
    path = tmp_path / "chat.jinja"
    for wrong in ("{% for x in messages %}", "{{ messages | nofilter }}", "{{ messages[0 }}"):
        path.write_text(f"\n{wrong}")
        with pytest.raises(ValueError, match=r"the chat template must parse, got .* in line 2; mend it"):
            opened(folder, chat_template=str(path))
    # of one that parses, other messages may be wanted
    path.write_text("{% generation %}{{ raise_exception('no system message') }}{% endgeneration %}")
    opened(folder, chat_template=str(path))


def test_defaults_of_sampling_come_from_the_checkpoint(folder, tmp_path):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    said = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": 7, "max_length": 9}
    (tmp_path / "generation_config.json").write_text(json.dumps(said))
    assert opened(tmp_path).defaults == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    (tmp_path / "generation_config.json").write_text(json.dumps({**said, "top_k": 20.0}))
    assert isinstance(opened(tmp_path).defaults["top_k"], int)
    assert opened(tmp_path, generation_defaults=False).defaults == {}
    assert opened("tiny").defaults == {}
    (tmp_path / "generation_config.json").write_text(json.dumps({**said, "temperature": 3.0}))
    with pytest.raises(Refusal, match="temperature"):
        opened(tmp_path)


def test_a_template_executes_nothing(folder):
    tokenizer = PretrainedTokenizer(folder, frozenset(), 500)
    tokenizer.inner.chat_template = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(ChatTemplateError):
        tokenizer.chat([{"role": "user", "content": "x"}])
    tokenizer.inner.chat_template = TEMPLATE
    text = "{{ 7 * 6 }}{% for x in messages %}"
    assert text in tokenizer.inner.decode(tokenizer.chat([{"role": "user", "content": text}]))


def test_a_config_alone_gives_the_same_random_weights_everywhere(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 300, **CONFIG}))
    state = torch.random.get_rng_state()
    config = tmp_path / "config.json"
    one, other, path = opened(config), opened(config), opened(config, seed=1)
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True))
    assert one.facts == other.facts != path.facts
    assert one.name == path.name == tmp_path.name
    assert isinstance(one.tokenizer, ByteTokenizer)
    # what such a model answers with may be part of the next prompt
    assert one.tokenizer.vocab_size == one.model.config.vocab_size == 300
    assert one.tokenizer.decode([97, 256, 299, 98]) == "ab"


def test_random_weights_and_lengths_beyond_the_models_are_reported(tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", "vocab_size": 300, **CONFIG}))
    for max_len, warned in ((512, False), (513, True)):
        args = ServeArgs(str(path), seed=7, max_len=max_len, cache_gib=0.001, page_size=4, max_running=1)
        serve_run._prepare(args, Session(0, 1, CPU, None, 0))
        said = capsys.readouterr().out
        assert "random weights of seed 7" in said
        assert ("warning: --max-len 513 exceeds the 512 positions" in said) == warned


def drawn_apart() -> list[torch.Tensor]:
    rank = Session(dist.get_rank(), dist.get_world_size(), CPU, "gloo", 0)
    torch.manual_seed(rank.rank)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    model(torch.randn(2, 3))
    broadcast_weights(model, rank)
    return [x.detach() for x in (*model.parameters(), *model.buffers())]


def test_random_weights_and_buffers_are_those_of_rank_0(pool):
    first, second = pool(2).run(drawn_apart)
    torch.manual_seed(0)
    assert torch.equal(first[0], torch.nn.Linear(3, 4).weight)
    assert len(first) == 7
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


def test_models_that_cannot_be_served_are_refused(tmp_path, folder):
    with pytest.raises(Refusal, match=r"model must be 'tiny', a config\.json or a folder with one"):
        check_model(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 256, **CONFIG}))
    with pytest.raises(Refusal, match="must have at least 257 tokens, for bytes and an end, got 256"):
        opened(tmp_path / "config.json")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(Refusal, match=r"weights must be safetensors, got \*\.bin .* would be unpickled"):
        check_model(str(tmp_path))
    with pytest.raises(Refusal, match="must hold a page of 64 tokens at least"):
        make_cache(opened(folder).model, Ring(), gib=1e-9, page_size=64, kv_dtype="auto")


def test_a_folder_without_all_weights_is_not_served_with_random_ones(tmp_path, folder):
    """Regression: a layer that was in no file got random weights."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3, "layer_types": None}))
    with pytest.raises(
        Refusal,
        match=r"must have all weights of Qwen3ForCausalLM, got .* without 11 of them, such as model\.layers\.2\.",
    ):
        opened(tmp_path)


def test_an_index_without_its_weights_is_refused(tmp_path, folder):
    """Regression: a checkpoint without its large files was served with random weights."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    for make in (opened, lambda path: build_causal_lm(str(path), 0, CPU, 10)):
        with pytest.raises(
            Refusal, match=r"weights in .* must be whole, got 1 of 1 files missing, such as model-00001-of"
        ):
            make(tmp_path)


@pytest.mark.parametrize(
    ("name", "cut", "message"),
    [
        (
            "model.safetensors",
            -100,
            "weights in .* must be whole and of the model in its config.json, got SafetensorError",
        ),
        ("config.json", 0, "model must be a configuration that transformers can read, got .*not a valid JSON file"),
        (
            "config.json",
            {"hidden_size": "32"},
            r"must be .*config.* got .*(StrictDataclassFieldValidation|Type)Error",
        ),
        ("config.json", {"hidden_size": 48}, "weights in .* must be whole and of the model in its config.json"),
        ("config.json", None, "model must be a configuration that transformers can read, got .*TypeError"),
    ],
)
def test_files_that_are_cut_short_or_say_nonsense_are_refused(tmp_path, folder, name, cut, message):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    path = tmp_path / name
    if isinstance(cut, int):
        path.write_bytes(path.read_bytes()[:cut])
    else:
        path.write_text(json.dumps(cut if cut is None else {**json.loads(path.read_text()), **cut}))
    with pytest.raises(Refusal, match=message):
        opened(tmp_path)
    with pytest.raises(Refusal, match=message):
        build_causal_lm(str(tmp_path), 0, CPU, 10)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], "weights in .* must be model.safetensors, .* got none of them; .* config.json for random weights"),
        (["model-q4.gguf"], "weights in .* got model-q4.gguf"),
        (["model-00001-of-00002.safetensors"], "weights in .* got model-00001-of-00002.safetensors"),
        (["adapter_model.safetensors", "adapter_config.json"], "model must be a folder without an adapter"),
    ],
)
def test_a_folder_without_weights_is_not_given_random_ones(tmp_path, folder, files, message):
    """Regression: a download that had brought all files but the large ones was served, and trained, with random weights."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors").unlink()
    for name in files:
        (tmp_path / name).write_text("{}")
    for make in (check_model, check_place, opened, lambda path: build_causal_lm(str(path), 0, CPU, 10)):
        with pytest.raises(Refusal, match=message):
            make(str(tmp_path))
    # asked for by name, random ones are served and trained, with the tokenizer that is beside
    served = opened(tmp_path / "config.json")
    assert served.random_weights
    assert isinstance(served.tokenizer, PretrainedTokenizer)
    assert load_tokenizer(str(tmp_path / "config.json")) is not None
    assert not opened(folder).random_weights


def test_an_adapter_beside_a_config_is_refused_and_one_that_is_asked_for_is_merged(tmp_path, folder, monkeypatch):
    """Regression: an adapter beside config.json was applied where peft was installed, and else ignored."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    base: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    adapted = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "adapter")
    served = opened(folder, adapter=str(tmp_path / "adapter"))
    wanted = adapted.merge_and_unload().state_dict()
    assert all(torch.equal(x, wanted[name]) for name, x in served.model.state_dict().items())
    assert not torch.equal(
        wanted["model.layers.0.self_attn.q_proj.weight"],
        opened(folder).model.state_dict()["model.layers.0.self_attn.q_proj.weight"],
    )
    shutil.copytree(folder, tmp_path / "both")
    shutil.copytree(tmp_path / "adapter", tmp_path / "both", dirs_exist_ok=True)
    with pytest.raises(Refusal, match=r"model must be a folder without an adapter, got .*--adapter"):
        opened(tmp_path / "both")
    with pytest.raises(Refusal, match=r"adapter must be a folder with adapter_config.json"):
        opened(folder, adapter=str(folder))
    other = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text()) | {"target_modules": ["k_proj"]}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(other))
    with pytest.raises(Refusal, match=r"adapter must be one of Qwen3ForCausalLM that peft can merge"):
        opened(folder, adapter=str(tmp_path / "adapter"))
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(Refusal, match="adapter needs peft"):
        opened(folder, adapter=str(tmp_path / "adapter"))


def test_models_whose_attention_is_not_the_rings_are_refused(tmp_path, folder):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "config.json"
    sizes = {name: size for name, size in CONFIG.items() if name != "head_dim"}
    path.write_text(json.dumps({"model_type": "falcon", "vocab_size": 300, **sizes}))
    for place in (path, tmp_path):
        with pytest.raises(
            Refusal,
            match=r"^a model must attend through transformers' attention interface, got FalconModel, which chooses",
        ):
            opened(place)
    path.write_text(json.dumps({"model_type": "t5", "vocab_size": 300}))
    for place in (path, tmp_path):
        with pytest.raises(
            Refusal, match=r"must be a causal language model of transformers, got .* of model_type 't5'"
        ):
            opened(place)
    kinds = ["linear_attention", "full_attention"]
    path.write_text(json.dumps({"model_type": "qwen3_next", "vocab_size": 300, **CONFIG, "layer_types": kinds}))
    with pytest.raises(Refusal, match=r"tokens must interact in attention only .* \['linear_attention'\] layers"):
        make_cache(opened(path).model, Ring(), gib=None, page_size=64, kv_dtype="auto")


def test_the_tiny_model_answers_with_letters():
    served = opened("tiny")
    with torch.no_grad():
        chosen = served.model(torch.arange(256)[None], use_cache=False).logits[0].argmax(-1)
    assert set(chosen.tolist()) <= {*b"abcdefghijklmnopqrstuvwxyz ,.", ByteTokenizer.END}
    assert len(set(chosen.tolist())) > 10


# text


@given(
    st.text("abE", max_size=30),
    st.lists(st.integers(1, 4), max_size=30),
    st.lists(st.text("abE", min_size=1, max_size=4), max_size=3),
)
def test_a_text_ends_before_the_first_stop_string(text, cuts, strings):
    stops, found, at = StopStrings(strings), "", 0
    for cut in [*cuts, len(text)]:
        found += stops.push(text[at : at + cut])
        at += cut
    if not stops.found:
        found += stops.rest()
        assert found == text
    assert not [string for string in strings if string in found]
    if stops.found:
        assert any(text[len(found) :].startswith(string) for string in strings)


class Counted(str):
    """A stop string that counts how often it is read."""

    reads = 0

    def __getitem__(self, key):
        Counted.reads += 1
        return super().__getitem__(key)

    def startswith(self, *prefix):
        Counted.reads += 1
        return super().startswith(*prefix)


def test_long_stop_strings_are_read_a_few_times_per_token():
    # sixteen of them took 6 ms a token beside a text that begins one of them, and delayed the streams of others
    stops, most = StopStrings([Counted("a" * 999 + "b"), Counted("aab" + "x" * 997)]), 0
    for i in range(990):
        before = Counted.reads
        assert not stops.push("a")
        if i:  # the first reads the strings whole
            most = max(most, Counted.reads - before)
    assert most <= 10
    assert stops.push("c") == "a" * 990 + "c"


# the choice of tokens


def test_positive_and_negative_seeds_draw_different_tokens():
    logits = torch.zeros(1, 1000)
    drawn = [[sample(logits, [how])[0][0] for _ in range(3)] for how in map(lambda x: Sampling(seed=x), range(-3, 4))]
    assert len(set(map(tuple, drawn))) == 7
    assert [sample(logits, [how])[0][0] for how in [Sampling(seed=-3)] * 3] == drawn[0]


def test_the_smallest_temperature_and_top_p_take_the_largest():
    logits = torch.randn(20, 50) * 100
    for how in ((1e-30, 1.0), (1e-60, 1.0), (2.0, 1e-9)):
        assert [token for token, _ in sample(logits, [Sampling(*how) for _ in range(20)])] == logits.argmax(-1).tolist()


def test_logprobs_are_those_of_temperature_1():
    logits = torch.randn(1, 10)
    [(token, said)] = sample(logits, [Sampling(0.3, 0.5, logprobs=3)])
    wanted = logits[0].log_softmax(-1)
    assert said is not None
    assert said.logprob == pytest.approx(float(wanted[token]))
    assert [name for name, _ in said.top] == wanted.topk(3).indices.tolist()


@pytest.mark.parametrize(
    ("flags", "fails", "asked", "said"),
    [
        ({}, "", ["parallel", "compile"], ["tensor parallelism: 3 modules", "compiled for decode: 7 modules"]),
        ({}, "compile", ["parallel", "compile"], ["tensor parallelism: 3 modules", "compiled for decode: none"]),
        ({}, "parallel", ["parallel", "compile"], ["every rank reads all weights: no memory", "7 modules"]),
        ({"fuse": False}, "", ["parallel"], ["3 modules"]),
        ({"split": False}, "", ["compile"], ["7 modules"]),
        ({"ranks": 1}, "", ["compile"], ["7 modules"]),
    ],
)
def test_a_model_that_can_not_be_changed_is_served_as_it_is(monkeypatch, flags, fails, asked, said):
    transformers = pytest.importorskip("ringattn.integrations.transformers")
    calls = []

    def apply(*_: Any) -> int:
        calls.append("parallel")
        if fails == "parallel":
            raise transformers.TensorParallelError("no memory")
        return 3

    def compile_(*_: Any) -> int:
        calls.append("compile")
        return 0 if fails == "compile" else 7

    monkeypatch.setattr(transformers, "apply_tensor_parallel", apply)
    monkeypatch.setattr(transformers, "compile_for_decode", compile_)
    ring: Any = SimpleNamespace(world_size=flags.get("ranks", 2))
    found = optimize_model(None, ring, fused=flags.get("fuse", True), split=flags.get("split", True))
    assert calls == asked
    done = set(asked) - {fails}
    assert (found.fused, found.split) == (7 * ("compile" in done), 3 * ("parallel" in done))
    assert len(found.messages) == len(said)
    assert all(words in line for words, line in zip(said, found.messages, strict=True))


def test_auto_shards_weights_where_whole_ones_leave_too_little_room(tmp_path):
    # 1 GiB of embedding
    sizes = {"vocab_size": 2**17, "hidden_size": 4096, "tie_word_embeddings": True, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128, "intermediate_size": 64}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **sizes}))
    args = ServeArgs(str(tmp_path / "config.json"), dtype="bfloat16")

    def weights(gib: float | None, ranks: int = 2, **flags: Any) -> str:
        whole = None if gib is None else int(gib * 2**30)
        return resolve_weights(dataclasses.replace(args, **flags), CPU, ranks, whole).weights

    assert weights(4) == "whole"
    assert weights(4, max_tokens=3 * 2**20) == "sharded"
    assert weights(4, max_tokens=3 * 2**20, adapter="lora") == "whole"
    assert weights(4, cache_gib=2.5) == "sharded"
    assert weights(2) == "sharded"
    assert weights(2, ranks=1) == weights(None) == "whole"
    assert weights(2, weights="whole") == "whole"
    with pytest.raises(Refusal, match=r"no cache fits beside the weights, which every .* or --weights sharded"):
        check_memory(args, CPU, 2, int(2.4 * 2**30))
    planned = check_memory(dataclasses.replace(args, weights="sharded"), CPU, 2, int(2.6 * 2**30))
    assert planned.startswith("planned memory 2.5 of 2.6 GiB")
    with pytest.raises(Refusal, match="adapter must be left out with sharded weights, got lora; merge it"):
        weights(4, adapter="lora", weights="sharded")


def test_what_a_gpu_cannot_hold_is_refused_before_it_is_loaded(tmp_path, monkeypatch):
    def check(gib: float, **flags: Any) -> str:
        args = ServeArgs(str(tmp_path / "config.json"), dtype="bfloat16", **flags)
        return check_memory(args, CPU, 2, int(gib * 2**30))

    # 1 GiB of embedding, and keys and values of 1 KiB a token
    sizes = {"vocab_size": 2**17, "hidden_size": 4096, "tie_word_embeddings": True, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128, "intermediate_size": 64}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **sizes}))
    planned = check(4)
    assert planned.startswith("planned memory 2.")
    with pytest.raises(Refusal, match="no cache fits beside the weights, which every rank holds"):
        check(2)
    with pytest.raises(
        Refusal, match=r"got a plan of .*weights 1.0.*kv_cache 3.0.*pass --cache-gib 1.\d+ or less"
    ) as caught:
        check(4, cache_gib=3.0)
    most = re.search(r"--cache-gib ([\d.]+)", str(caught.value))
    assert most is not None
    assert check(4, cache_gib=float(most[1])).startswith("planned memory 4.0 of 4.0")
    with pytest.raises(Refusal, match="pass --max-len and --max-tokens of at most") as caught:
        check(4, max_tokens=10**8)
    tokens = re.search(r"at most (\d+)", str(caught.value))
    assert tokens is not None
    assert check(4, max_tokens=int(tokens[1])).startswith("planned memory 4.0 of 4.0")
    assert check(4, max_tokens=int(tokens[1]) * 2, kv_dtype="fp8").startswith("planned memory")
    assert check(4, cache_gib=float(most[1]) + 0.1).startswith("warning: planned memory 4.1 of 4.0")
    said = check(2, check_memory=False)
    assert said.startswith("warning: planned memory")
    assert said.endswith("; --no-check-memory goes on anyway")
    monkeypatch.setattr(serve_run, "least_gpu_bytes", lambda _: 2**30)
    monkeypatch.setattr(serve_run, "load_model", lambda *_, **__: pytest.fail("nothing is loaded before"))
    with pytest.raises(Refusal, match=r"a rank must fit into 1\.0 GiB of a GPU"):
        serve_run._prepare(ServeArgs(str(tmp_path / "config.json")), Session(0, 1, CPU, None, 0))
