"""A model for the tests of the server that answers with a function of all tokens it was given, and keeps them in honest books."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from ringattn.inference.pages import Pages
from ringattn.launch.serving.scheduling import Plan

VOCAB = 256
STOP = 0


def follow(tokens: Sequence[int]) -> int:
    """The token that follows: one of the printable ones, or now and then STOP."""
    digest = hashlib.sha256(bytes(token % 251 for token in tokens)).digest()
    return STOP if digest[0] == 0 else 32 + digest[1] % 95


def answer(prompt: Sequence[int], max_tokens: int) -> list[int]:
    """What a request gets alone."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens and (token := follow(tokens)) != STOP:
        tokens.append(token)
    return tokens[len(prompt) :]


class FakeRunner:
    """Keeps each token in the page and row where the books put it, and reads it back from there."""

    def __init__(self, world_size: int = 2, pages: int = 64, page_size: int = 4, step_s: float = 0.0) -> None:
        self.books = Pages(world_size, pages, page_size)
        self.memory = [[[-1] * page_size for _ in range(pages)] for _ in range(world_size)]
        self.step_s = step_s
        self.steps: list[tuple[int, ...]] = []

    def run(self, plan: Plan) -> Tensor:
        self.steps.append(tuple(plan.counts))
        if self.step_s:
            time.sleep(self.step_s)
        at = 0
        decode = set(plan.counts) == {1}
        for pieces in self.books.place(plan.requests, plan.counts, one_by_one=decode):
            for piece in pieces:
                page = self.memory[piece.rank][piece.page]
                page[piece.row : piece.row + piece.length] = plan.tokens[at : at + piece.length]
                at += piece.length
        logits = torch.zeros(len(plan.requests), VOCAB)
        for row, request in enumerate(plan.requests):
            tokens: list[int] = []
            for block in self.books.blocks(request):
                tokens += self.memory[block.rank][block.page][: block.length]
            logits[row, follow(tokens)] = 10.0
        return logits
