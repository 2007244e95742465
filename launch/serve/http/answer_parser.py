"""Splits the text of an answer to a chat, as it comes, into content, reasoning and calls of tools.

Texts of special tokens that mean something (`marks`) are part of the text here; other special tokens have none.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from ringattn.launch.serve.http.detokenizer import partial_match
from ringattn.launch.serve.http.xml_calls import END_TOOL_CALL, FORMS, TOOL_CALL, XmlCallReader

THINK, END_THINK = "<think>", "</think>"
PYTHON_TAG = "<|python_tag|>"
START, CHANNEL, CONSTRAIN, MESSAGE, END = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>"
HARMONY = (START, CHANNEL, CONSTRAIN, MESSAGE, END, "<|call|>", "<|return|>")
ARGUMENTS = ("arguments", "parameters")

Delta = dict[str, Any]
Kind = Literal["content", "reasoning_content"]


class AnswerParser:
    """Parser of an answer, whose parts are deltas as OpenAI's streams have them.

    Args:
        marks: Special tokens with their texts that the format reads.
        reasoning: Whether reasoning is a part of the message; else it is left out.
        most_calls: Maximum of calls; 0 where the text of a call is content.

    Attributes:
        calls: The calls so far, as a message has them.
        done: Whether the answer has all the calls that it may have, so that nothing more is wanted.
    """

    def __init__(self, marks: Mapping[int, str], *, reasoning: bool = True, most_calls: int = 0) -> None:
        self.marks, self.done = marks, False
        self.calls: list[dict[str, Any]] = []
        self._reasoning, self._most_calls = reasoning, most_calls
        self._texts: dict[Kind, list[str]] = {"content": [], "reasoning_content": []}
        self._deltas: list[Delta] = []
        self._buffer = ""  # text that has no meaning yet
        self._space = ""  # white space that is dropped if nothing of its kind follows
        self._trims = False  # whether white space that comes next is dropped
        # reads the buffer, and returns whether the next state may read on
        self._state: Callable[[], bool]

    def push(self, text: str) -> list[Delta]:
        """Add a piece of text; return the deltas that are certain now."""
        self._buffer += text
        while not self.done and self._state():
            pass
        return self._take()

    def end(self) -> list[Delta]:
        """Return the last deltas."""
        if not self.done:
            self._flush()
        return self._take()

    def message(self) -> dict[str, Any]:
        """Return the parts of the message so far."""
        content, reasoning = ("".join(self._texts[kind]) for kind in ("content", "reasoning_content"))
        found: dict[str, Any] = {"content": content or (None if self.calls else "")}
        found |= {"reasoning_content": reasoning} if reasoning else {}
        return found | ({"tool_calls": self.calls} if self.calls else {})

    def _flush(self) -> None:
        raise NotImplementedError

    def _take(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return deltas

    def _say(self, kind: Kind, text: str) -> None:
        """Add text; white space at its end waits for what follows."""
        text = self._space + (text.lstrip() if self._trims else text)
        stripped = text.rstrip()
        self._space = text[len(stripped) :]
        if stripped:
            self._trims = False
            if kind == "content" or self._reasoning:
                self._texts[kind].append(stripped)
                self._deltas.append({kind: stripped})

    def _begin_part(self) -> None:
        """Begin another part: white space between the two is dropped."""
        self._space, self._trims = "", True

    def _split(self, marks: Sequence[str]) -> tuple[str, str | None]:
        """Remove from the buffer the text that certainly comes before any mark, and the mark if it is there."""
        slots = [(place, mark) for mark in marks if (place := self._buffer.find(mark)) >= 0]
        if slots:
            place, mark = min(slots)
            text, self._buffer = self._buffer[:place], self._buffer[place + len(mark) :]
            return text, mark
        place = min((partial_match(mark, self._buffer) for mark in marks), default=len(self._buffer))
        text, self._buffer = self._buffer[:place], self._buffer[place:]
        return text, None

    def _begins_with(self, mark: str) -> bool | None:
        """Return whether the buffer begins with a mark, which is removed with white space before; None if it is not known yet."""
        text = self._buffer.lstrip()
        if text.startswith(mark):
            self._buffer = text[len(mark) :]
            return True
        return None if mark.startswith(text) else False

    def _open_call(self, name: str) -> None:
        call = {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": {"name": name, "arguments": ""}}
        self.calls.append(call)
        told = {**call, "function": dict(call["function"])}
        self._deltas.append({"tool_calls": [{"index": len(self.calls) - 1, **told}]})

    def _add_arguments(self, text: str) -> None:
        if text:
            self.calls[-1]["function"]["arguments"] += text
            self._deltas.append({"tool_calls": [{"index": len(self.calls) - 1, "function": {"arguments": text}}]})

    def _close_call(self) -> None:
        if not self.calls[-1]["function"]["arguments"]:
            self._add_arguments("{}")
        self.done = len(self.calls) >= self._most_calls
        self._begin_part()


class TextParser(AnswerParser):
    """Parser of reasoning in `<think>`, and of calls: in JSON as Llama 3 writes them, or in `<tool_call>`, JSON or XML.

    Args:
        thinks: Whether an answer may begin with reasoning.
        opened: Whether the prompt has begun it.
        call_format: "llama", "hermes", or one of the forms of XML.
        schemas: Schema of the arguments by the name of a function.
    """

    def __init__(
        self,
        marks: Mapping[int, str],
        *,
        thinks: bool,
        opened: bool,
        call_format: str,
        schemas: Mapping[str, Any],
        **options: Any,
    ) -> None:
        super().__init__(marks, **options)
        self._call_format = call_format if self._most_calls else "none"
        self._state = self._think if opened else self._begin if thinks else self._content_state()
        self._trims = opened
        self._schemas = schemas
        self._call: CallReader | XmlCallReader | None = None

    def _content_state(self) -> Callable[[], bool]:
        return self._begin_llama if self._call_format == "llama" else self._content

    def _begin(self) -> bool:
        thinks = self._begins_with(THINK)
        if thinks is not None:
            self._state, self._trims = (self._think, True) if thinks else (self._content_state(), False)
        return thinks is not None

    def _think(self) -> bool:
        text, mark = self._split([END_THINK])
        self._say("reasoning_content", text)
        if mark is not None:
            self._begin_part()
            self._state = self._content_state()
        return mark is not None

    def _content(self) -> bool:
        text, mark = self._split([] if self._call_format in ("llama", "none") else [TOOL_CALL])
        self._say("content", text)
        if mark is not None:
            self._begin_call(mark)
        return mark is not None

    def _begin_llama(self) -> bool:
        """Read what an answer of Llama begins with: a call, which is JSON, or content."""
        tagged = self._begins_with(PYTHON_TAG)
        text = self._buffer.lstrip("; \n\r\t" if self.calls else None)
        if tagged is None or not text:
            return False
        if text[0] == "{":
            self._buffer = text
            self._begin_call("")
        else:
            self._state = self._content
        return True

    def _begin_call(self, before: str) -> None:
        form = FORMS.get(self._call_format)
        self._call = CallReader() if form is None else XmlCallReader(form, self._schemas)
        self._before_call = before
        self._state = self._read_call

    def _read_call(self) -> bool:
        call = self._call
        assert call is not None, "a call has begun"
        self._buffer = call.push(self._buffer)
        if call.invalid:
            self._drop_call()
            return True
        if (name := call.name) is None:
            if call.ended:
                self._drop_call()
            return call.ended
        if not call.opened and (call.ended or call.has_arguments):
            call.opened = True
            self._open_call(name)
        if call.opened:
            self._add_arguments(call.take_arguments())
        if call.ended:
            self._call = None
            self._close_call()
            self._state = self._begin_llama if self._call_format == "llama" else self._end_call
        return call.ended

    def _drop_call(self) -> None:
        """Make the text of what is no call content."""
        assert self._call is not None, "a call has begun"
        self._say("content", self._before_call + self._call.text)
        self._call, self._state = None, self._content

    def _end_call(self) -> bool:
        if self._begins_with(END_TOOL_CALL) is None:
            return False
        self._state = self._content
        return True

    def _flush(self) -> None:
        if self._call is not None and not self._call.opened:
            self._drop_call()
        if self._call is not None or (self._state == self._end_call and END_TOOL_CALL.startswith(self._buffer.strip())):
            return
        thinking = self._state == self._think
        self._say("reasoning_content" if thinking else "content", self._buffer)
        if self._space and not (thinking or self.calls):
            self._texts["content"].append(self._space)
            self._deltas.append({"content": self._space})


class CallReader:
    """Reads a call as JSON, an object with a name and arguments, character by character.

    Attributes:
        text: All of it so far.
        name: The name; None before it is known.
        invalid: Whether it can be no call: it is no object.
        ended: Whether the object has ended.
        opened: Whether its reader has seen its name.

    Example:
        >>> call = CallReader()
        >>> call.push('{"name": "f", "arguments": {"a": '), call.name, call.take_arguments()
        ('', 'f', '{"a":')
        >>> call.push('1}} and'), call.ended, call.take_arguments()
        (' and', True, ' 1}')
    """

    def __init__(self) -> None:
        self.text, self.name, self.invalid, self.ended, self.opened = "", None, False, False, False
        self._depth, self._in_string, self._escaped = 0, False, False
        self._key, self._from = "", 0  # of the value that is read, and where it, or its key, begins
        self._in_value = False
        self._arguments: tuple[int, int | None] | None = None  # where they begin and end
        self._taken = 0

    @property
    def has_arguments(self) -> bool:
        """Whether arguments have begun."""
        return self._arguments is not None

    def push(self, piece: str) -> str:
        """Add a piece; return what comes after the object."""
        for at, letter in enumerate(piece):
            if self.ended or self.invalid:
                return piece[at:]
            self.text += letter
            if self._in_string:
                self._in_string = self._escaped or letter != '"'
                self._escaped = letter == "\\" and not self._escaped
            elif not self._depth:
                self._depth = int(letter == "{")
                self.invalid = letter != "{" and not letter.isspace()
                self._from = len(self.text)
            else:
                self._read(letter)
        return ""

    def take_arguments(self) -> str:
        """Return the text of the arguments since the last call, without white space around them; see `has_arguments`."""
        if self._arguments is None:
            return ""
        begin, end = self._arguments
        whole = self.text[begin:end].lstrip()
        if whole.startswith('"'):  # JSON in a string
            whole = "" if end is None else _string(whole)
        whole = whole.rstrip()
        piece, self._taken = whole[self._taken :], max(self._taken, len(whole))
        return piece

    def _read(self, letter: str) -> None:
        """Read a letter of the object that is in no string."""
        if letter == '"':
            self._in_string = True
        elif letter in "{[":
            self._depth += 1
        elif letter in "}]":
            self._depth -= 1
            if not self._depth:
                self._end_value()
                self.ended = True
        elif self._depth == 1 and letter == ":" and not self._in_value:
            self._key, self._from, self._in_value = _string(self.text[self._from : -1]), len(self.text), True
            if self._key in ARGUMENTS and self._arguments is None:
                self._arguments = len(self.text), None
        elif self._depth == 1 and letter == ",":
            self._end_value()

    def _end_value(self) -> None:
        end = len(self.text) - 1
        if self._in_value and self._key == "name":
            self.name = _string(self.text[self._from : end]) or None
        elif self._in_value and self._arguments is not None and self._arguments[1] is None:
            self._arguments = self._arguments[0], end
        self._from, self._in_value = end + 1, False


def _string(text: str) -> str:
    """Return the string that a text is in JSON; "" if it is none."""
    try:
        found = json.loads(text)
    except ValueError:
        return ""
    return found if isinstance(found, str) else ""


class HarmonyParser(AnswerParser):
    """Parser of the messages of GPT-OSS: reasoning in the channel `analysis`, calls in `commentary`, content elsewhere."""

    def __init__(self, marks: Mapping[int, str], **options: Any) -> None:
        super().__init__(marks, **options)
        self._head = ""
        self._kind: Kind | Literal["call"] = "content"
        self._state = self._header

    def _header(self) -> bool:
        text, mark = self._split(HARMONY)
        self._head += text
        if mark is None:
            return False
        if mark == MESSAGE:
            self._begin_message()
        else:
            self._head = "" if mark == START else self._head + " "
        return True

    def _begin_message(self) -> None:
        named = re.search(r"\bto=(?:functions\.)?(\S+)", self._head)
        self._kind = "reasoning_content" if "analysis" in self._head.split() else "content"
        self._begin_part()
        if named is not None and self._most_calls:
            self._kind = "call"
            self._open_call(named[1])
        elif self._texts[self._kind]:
            self._space = "\n"  # between two messages
        self._state = self._body

    def _body(self) -> bool:
        text, mark = self._split(HARMONY)
        self._tell(text)
        if mark is None:
            return False
        if self._kind == "call":
            self._close_call()
        self._head, self._state = "", self._header
        return True

    def _tell(self, text: str) -> None:
        if self._kind == "call":
            self._add_arguments(text)
        else:
            self._say(self._kind, text)

    def _flush(self) -> None:
        if self._state == self._body:
            self._tell(self._buffer)
            if self._kind == "call":
                self._close_call()
        elif not (self.calls or self._texts["content"] or self._texts["reasoning_content"]):
            self._say("content", self._head + self._buffer)  # without any message
