"""Runs every causal family of transformers on ranks, and writes the verdicts and the tables of the pages.

    python docs/families.py              runs all of them: about two minutes on two cores
    python docs/families.py llama gpt2   runs these, and keeps the other verdicts

A tiny random model of each family learns on two ranks from plain rows, padded rows and packed documents, as
`tests/integrations/transformers/families.py` defines them. One with latent attention learns on one, two and three ranks, too, and
generates on two.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "families.json"
Verdicts = dict[str, str]


def main(kinds: list[str]) -> int:
    """Write `results/families.json` and the page; return the exit code, 1 where a family differs without an error."""
    sys.path.insert(0, str(HERE.parent))
    import transformers

    from tests.integrations.transformers.families import (
        CALLS,
        DIFFERS,
        FAMILIES,
        LATENT_FAMILIES,
        MODES,
        judge,
        judge_generation,
    )
    from tests.support.pool import Pools

    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    pools = Pools()

    def learned(kind: str) -> Verdicts:
        return {mode: pools(2).run(judge, kind, mode)[0] for mode in MODES}

    def latent(kind: str) -> Verdicts:
        trained = {f"{n} ranks": pools(n).run(judge, kind, "plain")[0] for n in (1, 2, 3)}
        return trained | {call: pools(2).run(judge_generation, kind, call)[0] for call in CALLS}

    found: dict[str, dict[str, Verdicts]] = {}
    for table, all_kinds, run in (("families", FAMILIES, learned), ("latent", LATENT_FAMILIES, latent)):
        kept = {kind: x for kind, x in known.get(table, {}).items() if kind in all_kinds} if kinds else {}
        now = {kind: run(kind) for kind in all_kinds if not kinds or kind in kinds}
        found[table] = dict(sorted((kept | now).items()))
    pools.close()
    RESULTS.write_text(json.dumps({"transformers": transformers.__version__, **found}, indent=1) + "\n")
    subprocess.run([sys.executable, str(HERE / "tables.py")], check=True)
    verdicts = [x for table in found.values() for each in table.values() for x in each.values()]
    return int(any(verdict.startswith(DIFFERS) for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
