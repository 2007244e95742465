"""Format of the answers of a model, which its chat template tells: parsers and grammars of calls and reasoning."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ringattn.launch.serve.config import ServeArgs
from ringattn.launch.serve.grammar import TEXT, Grammar
from ringattn.launch.serve.http import answer_parser as marks
from ringattn.launch.serve.http.answer_parser import AnswerParser, HarmonyParser, TextParser
from ringattn.launch.serve.http.api import Chat
from ringattn.launch.serve.http.fields import MAX_TOOLS, NamedTool, Tool, answer_grammar
from ringattn.launch.serve.http.xml_calls import FORMS, add_calls
from ringattn.launch.serve.tokenizer import Tokenizer

TAIL = 8  # last tokens of a prompt among which its template may begin the reasoning


@dataclass(frozen=True)
class ChatFormat:
    """The format of a model's answers to chats.

    Attributes:
        tools: "hermes", "llama", "harmony" or a form of XML; "none" where no calls are served.
        reasoning: "think" or "harmony"; "none" where it stays a part of the content, or, in Harmony, is left out.
        tokens: Texts of added tokens with the tokens. Grammars name these: llguidance takes no letters in their place.
    """

    tools: str
    reasoning: str
    tokens: Mapping[str, int]

    def parser(self, body: Chat, opened: bool) -> AnswerParser | None:
        """Return the parser of an answer; None where all of it is content.

        Args:
            body: The request.
            opened: See `opens_reasoning`.
        """
        callable_tools = body.tools if body.tool_choice != "none" else ()
        most = (MAX_TOOLS if body.parallel_tool_calls else 1) if callable_tools else 0
        found = {token: text for text, token in self.tokens.items()}
        if self.tools == "harmony":
            reasoning = body.include_reasoning and self.reasoning != "none"
            return HarmonyParser(_those(found, marks.HARMONY), reasoning=reasoning, most_calls=most)
        thinks = self.reasoning == "think"
        if not (most or thinks):
            return None
        read = [marks.THINK, marks.END_THINK] if thinks else []
        read += [marks.TOOL_CALL, marks.END_TOOL_CALL, marks.PYTHON_TAG] if most else []
        form = FORMS.get(self.tools)
        read += [] if form is None or not most else [*form.key, *form.value]
        return TextParser(
            _those(found, read),
            thinks=thinks,
            opened=opened,
            call_format=self.tools,
            schemas={tool.function.name: tool.function.parameters for tool in callable_tools},
            reasoning=body.include_reasoning,
            most_calls=most,
        )

    def grammar(self, body: Chat, opened: bool) -> Grammar | None:
        """Return the grammar of an answer; None where any text will do. See `parser`."""
        part = body.answer_part
        tools = [] if body.tool_choice == "none" else body.tools
        if not (body.must_call or part or any(tool.function.strict for tool in tools)):
            return None
        if isinstance(body.tool_choice, NamedTool):
            tools = [tool for tool in tools if tool.function.name == body.tool_choice.function.name]
        if self.tools != "harmony" and not tools and part and self.reasoning == "none":
            return answer_grammar(part)
        grammar = Grammar([f"TEXT: {TEXT}", "WS: /[ \\n]{1,4}/"], {} if part is None else {"answer": part})
        several = body.parallel_tool_calls and not isinstance(body.tool_choice, NamedTool)
        if self.tools == "harmony":
            self._add_harmony(grammar, tools, body.must_call)
        else:
            self._add_text(grammar, tools, body.must_call, several, opened)
        return grammar

    def opens_reasoning(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> bool:
        """Return whether a prompt ends where reasoning has begun: some templates write `<think>` themselves."""
        if self.reasoning != "think":
            return False
        tail = [tokenizer.added_texts.get(token) or tokenizer.decode([token]) for token in prompt[-TAIL:]]
        return "".join(tail).rstrip().endswith(marks.THINK)

    def _mark(self, text: str) -> str:
        """Return a text in Lark's syntax: a token where it is one."""
        return f"<[{self.tokens[text]}]>" if text in self.tokens else json.dumps(text)

    @property
    def _line(self) -> str:
        """Line between tags, in Lark's syntax."""
        form = FORMS.get(self.tools)
        return '"\\n"' if form is None else form.line

    @property
    def _called(self) -> str:
        """Text of a call after `<tool_call>`, in Lark's syntax."""
        return f"{self._line} call {self._line} {self._mark(marks.END_TOOL_CALL)}"

    def _add_text(self, grammar: Grammar, tools: Sequence[Tool], must_call: bool, several: bool, opened: bool) -> None:
        """Add the rules of an answer with reasoning in `<think>`, and calls in it; not those of Harmony."""
        rules = grammar.rules
        main = ["@answer"] if "answer" in grammar.parts else []
        if tools:
            if (form := FORMS.get(self.tools)) is not None:
                add_calls(grammar, tools, form, self._mark)
            else:
                key = "parameters" if self.tools == "llama" else "arguments"
                _add_calls(grammar, tools, '{"name": "%s", "' + key + '": ')
            if self.tools == "llama":
                rules.append("calls: call")
            else:
                rules.append(f"tagged: {self._mark(marks.TOOL_CALL)} {self._called}")
                rules.append(f"calls: tagged ({self._line} tagged)*" if several else "calls: tagged")
            main.append("calls")
            if not must_call and "answer" not in grammar.parts:
                main = ["free"]
                self._add_free(rules)
        rules.append("main: " + " | ".join(main))
        if self.reasoning != "think":
            rules.append("start: main")
            return
        end = self._mark(marks.END_THINK)
        rules.append(f"thought: TEXT {end}" if marks.END_THINK in self.tokens else f"thought[suffix={end}]: TEXT")
        rules.append(f"start: {'thought WS?' if opened else f'({self._mark(marks.THINK)} thought WS?)?'} main")

    def _add_free(self, rules: list[str]) -> None:
        """Add the rules of any text with calls in it."""
        if self.tools == "llama":
            rules.extend(["PLAIN: /[^{](.|\\n)*/", "free: PLAIN | calls |"])
            return
        begin, is_token = self._mark(marks.TOOL_CALL), marks.TOOL_CALL in self.tokens
        rules.append(f"head: TEXT {begin}" if is_token else f"head[lazy]: TEXT {begin}")
        rules.extend([f"said: head {self._called}", "free: said* TEXT"])

    def _add_harmony(self, grammar: Grammar, tools: Sequence[Tool], must_call: bool) -> None:
        """Add the rules of messages of GPT-OSS, the first of which the prompt has begun."""
        start, channel, constrain, message, end = map(
            self._mark, (marks.START, marks.CHANNEL, marks.CONSTRAIN, marks.MESSAGE, marks.END)
        )
        rules, main = grammar.rules, []
        rules.append(f'thought: {channel} "analysis" {message} TEXT {end} {start} "assistant"')
        if not must_call:
            rules.append(f'final: {channel} "final" {message} {"@answer" if "answer" in grammar.parts else "TEXT"}')
            main.append("final")
        for i, tool in enumerate(tools):
            name = json.dumps(f"commentary to=functions.{tool.function.name} ")
            rules.append(f'call{i}: {channel} {name} {constrain} "json" {message} @arguments{i}')
            grammar.parts[f"arguments{i}"] = _arguments(tool)
            main.append(f"call{i}")
        rules.extend(["main: " + " | ".join(main), "start: thought* main"])


def _add_calls(grammar: Grammar, tools: Sequence[Tool], before: str) -> None:
    """Add the rule `call` of calls of tools, whose names stand in `before`."""
    calls = []
    for i, tool in enumerate(tools):
        grammar.parts[f"arguments{i}"] = _arguments(tool)
        calls.append(f'{json.dumps(before % tool.function.name)} @arguments{i} "}}"')
    grammar.rules.append("call: " + " | ".join(calls))


def _arguments(tool: Tool) -> tuple[str, object]:
    return "json" if tool.function.strict else "json_lenient", tool.function.parameters


def _those(found: Mapping[int, str], texts: Sequence[str]) -> dict[int, str]:
    return {token: text for token, text in found.items() if text in texts}


def chat_format(args: ServeArgs, tokenizer: Tokenizer) -> ChatFormat:
    """Return the format of a model's answers by the flags, or by its chat template.

    Raises ValueError for Harmony where the tokenizer lacks its tokens.
    """
    template, tokens = tokenizer.template, {text: token for token, text in tokenizer.added_texts.items()}
    tools = _tools_of(template) if args.tool_format == "auto" else args.tool_format
    missing = [text for text in marks.HARMONY[:5] if text not in tokens]
    if tools == "harmony" and missing:
        if args.tool_format == "harmony":
            raise ValueError(
                f"tool_format must be one whose special tokens the tokenizer has, got 'harmony' without {missing[0]}; pass another "
                "--tool-format"
            )
        tools = "none"
    reasoning = args.reasoning_format
    if reasoning == "auto":
        reasoning = "think" if marks.END_THINK in template or marks.END_THINK in tokens else "none"
    if tools == "harmony":
        reasoning = "none" if args.reasoning_format == "none" else "harmony"
    return ChatFormat(tools, reasoning, tokens)


def _tools_of(template: str) -> str:
    """Return the format of calls that a chat template writes."""
    if marks.CHANNEL in template and marks.MESSAGE in template:
        return "harmony"
    if marks.TOOL_CALL in template:
        if "<arg_key>" in template:
            return "glm45"
        if "<function=" in template:
            return "qwen3_coder" if "<parameter=" in template else "none"
        return "hermes"
    if marks.PYTHON_TAG in template or ("ipython" in template and '"parameters"' in template):
        return "llama"
    return "none"
