# pyright: reportCallIssue=false
from __future__ import annotations

import os
from typing import Any

import pytest

pytest.importorskip("triton.experimental.gluon")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter is on, and it replaces the compiler", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from tests.kernels.compile.ttgir import stale_bounds

pytestmark = pytest.mark.compile


@gluon.jit
def entry(work, at):
    return gl.load(work + at * 2), gl.load(work + at * 2 + 1)


@gluon.jit
def carried(work, out, n):
    first, blocks = entry(work, 0)
    for at in range(n):
        total = first
        for i in range(1, blocks):
            total += i
        gl.store(out + at, total)
        first, blocks = entry(work, gl.minimum(at + 1, n - 1))


@gluon.jit
def loaded_anew(work, out, n):
    for at in range(n):
        first, blocks = entry(work, at)
        total = first
        for head in range(n):
            for i in range(head, blocks):
                total += i
        gl.store(out + at, total)


def ttgir_of(kernel: Any) -> str:
    source = GluonASTSource(kernel, {"work": "*i32", "out": "*i32", "n": "i32"}, {}, {})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["ttgir"]


def test_numbers_carried_as_bounds_are_found_out():
    said = stale_bounds(ttgir_of(carried))
    if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 8):
        assert said == ()  # they stay carried there
    else:
        assert len(said) == 1
        assert "is the same in all rounds around it" in said[0]


def test_numbers_loaded_in_their_round_may_be_bounds():
    assert stale_bounds(ttgir_of(loaded_anew)) == ()


LOOPS = """
  tt.func public @kernel(%work: !tt.ptr<i32>, %n: i32) {{
    %c1 = arith.constant 1 : i32
    %before = tt.load %work : !tt.ptr<i32>
    %some:2 = scf.for %x = %c1 to %before step %c1 iter_args(%a = %c1, %b = %c1) -> (i32, i32)  : i32 {{
      scf.yield %a, %b : i32, i32
    }}
    ttg.warp_specialize(%work, %n)
    default {{
      %last:2 = scf.for %at = %c1 to %before step %c1 iter_args(%turn = %before, %b = %c1) -> (i32, i32)  : i32 {{
        %place = tt.addptr %work, %at : !tt.ptr<i32>, i32
        %now = tt.load %place : !tt.ptr<i32>
        %old = arith.addi %before, %c1 : i32
        %new = arith.addi %old, %at : i32
        %inner = scf.for %i = {lower} to {upper} step %c1 iter_args(%sum = %c1) -> (i32)  : i32 {{
          %more = arith.addi %sum, %i : i32
          scf.yield %more : i32
        }} loc(#loc1)
        scf.yield %inner, %now : i32, i32
      }} loc(#loc2)
      ttg.warp_yield
    }}
    partition0(%arg0: !tt.ptr<i32>, %arg1: i32) num_warps(4) {{
      scf.for %i = %arg1 to %arg1 step %arg1  : i32 {{
        scf.for %j = %arg1 to %arg1 step %arg1  : i32 {{
        }}
      }}
      ttg.warp_return
    }} : (!tt.ptr<i32>, i32) -> ()
    tt.return
  }}
"""


@pytest.mark.parametrize("end", ["%before", "%some#1", "%old"])
@pytest.mark.parametrize("text", [("{}", "%now"), ("%c1", "{}")], ids=["lower", "upper"])
def test_either_bound_may_be_stale(text: tuple[str, str], end: str):
    lower, upper = (bound.format(end) for bound in text)
    (said,) = stale_bounds(LOOPS.format(lower=lower, upper=upper))
    assert f"{end.partition('#')[0]}, a bound of the loop over %i," in said


@pytest.mark.parametrize("end", ["%n", "%c1", "%at", "%turn", "%new", "%now"])
def test_arguments_constants_and_what_belongs_to_the_round_are_not_stale(end: str):
    assert stale_bounds(LOOPS.format(lower="%c1", upper=end)) == ()
