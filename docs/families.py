"""Runs every causal family of transformers on two ranks, and writes the verdicts and the table of the page.

    python docs/families.py              runs all of them: about two minutes on two cores
    python docs/families.py llama gpt2   runs these, and keeps the other verdicts

A tiny random model of each family learns from plain rows, padded rows and packed documents, as
`tests/integrations/transformers/families.py` defines them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "families.json"


def main(kinds: list[str]) -> int:
    """Write `results/families.json` and the page; return the exit code, 1 where a family differs without an error."""
    sys.path.insert(0, str(HERE.parent))
    import transformers

    from tests.integrations.transformers.families import DIFFERS, FAMILIES, MODES, judge
    from tests.support.pool import Pools

    known = json.loads(RESULTS.read_text())["families"] if RESULTS.exists() else {}
    pools = Pools()
    found = {kind: known[kind] for kind in FAMILIES if kind in known} if kinds else {}
    for kind in kinds or FAMILIES:
        found[kind] = {mode: pools(2).run(judge, kind, mode)[0] for mode in MODES}
    pools.close()
    ordered = {kind: found[kind] for kind in sorted(found)}
    RESULTS.write_text(json.dumps({"transformers": transformers.__version__, "families": ordered}, indent=1) + "\n")
    subprocess.run([sys.executable, str(HERE / "tables.py")], check=True)
    return int(any(verdict.startswith(DIFFERS) for verdicts in found.values() for verdict in verdicts.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
