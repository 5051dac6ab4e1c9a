"""The script that compares behaviour over seeds: its tasks and their demonstrations."""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random

from composer_nb.harness.agent.turns import Limits
from composer_nb.harness.environment import EnvSettings, Sandboxes, make_agent

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts" / "studies"))
import compare_behaviour as script


def test_the_demonstrations_of_effort_solve_and_differ_in_words() -> None:
    with Sandboxes() as sandboxes:
        agent = make_agent(EnvSettings(), script.TOKENIZER, Limits(turns=12, turn_tokens=96, tokens=512), sandboxes)
        rows = script.told(agent, sandboxes, Random(3), 60)  # refuses one that fails
    written = [int((row.weight == 1.0).sum()) for row in rows]
    for odd in (0, 1):
        assert max(written[odd::2]) > 2 * min(written[odd::2])
    assert {script.either(n).id.partition("-")[0] for n in (4, 5)} == {"add", "either"}


def test_only_a_test_says_which_sign_is_wrong() -> None:
    for number in range(1, 20, 2):
        hard = script.either(number)
        assert hard.instruction == "fix f.py: one sign"
        wrong = [hard.files["f.py"].replace(*signs) for signs in script.SIGNS.values()]
        assert hard.solution["f.py"] in wrong and len(set(wrong)) == 2 and hard.files["f.py"] not in wrong
