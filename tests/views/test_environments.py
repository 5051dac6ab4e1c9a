"""What the walkthrough of sandboxes notes is what happened, and its figures show what was noted."""

import json

from pixels import inked_share

from composer_nb.harness.grading.plan import Twin
from composer_nb.harness.sandbox.bwrap import BwrapBackend
from composer_nb.harness.sandbox.contract import SandboxSpec
from composer_nb.labs.attacks.patch_target import TARGET
from composer_nb.labs.attacks.patches import patches
from composer_nb.views import environments
from composer_nb.views.environments import Watched
from composer_nb.views.style import Picture

SPEC = SandboxSpec(memory_bytes=192 << 20, disk_bytes=16 << 20, processes=48)


def texts(picture: Picture) -> list[str]:
    return [text.get_text() for ax in picture.axes for text in ax.texts]


# Instruments.


def test_calls_are_noted_with_their_turn_and_what_was_seen(backend: BwrapBackend):
    with backend.create(SPEC) as sandbox:
        agent = Watched(sandbox)
        agent.turn("write, then look")
        agent.write("a.txt", "one\ntwo\n")
        assert agent.read("a.txt") == "one\ntwo\n"
        agent.turn("count, and fail")
        assert agent.exec(["wc", "-l", "a.txt"]).exit_code == 0
        assert agent.exec(["false"]).exit_code == 1
    noted = [(turn.said, json.loads(turn.call), turn.observation) for turn in agent.turns]
    assert noted == [
        ("write, then look", {"name": "write", "arguments": {"target": "a.txt"}}, "written"),
        ("", {"name": "read", "arguments": {"target": "a.txt"}}, "one\ntwo"),
        ("count, and fail", {"name": "exec", "arguments": {"target": "wc -l a.txt"}}, "2 a.txt"),
        ("", {"name": "exec", "arguments": {"target": "false"}}, "exit code 1"),
    ]
    assert all(turn.seconds > 0 and turn.beside == (not turn.said) for turn in agent.turns)
    assert len(agent.stats) == 2 and agent.stats[0].disk_bytes > 0
    calls, memory, cpu = (picture := environments.timeline(agent)).axes
    assert sum(len(group) for group in calls.containers) == 4 and inked_share(picture.png()) > 0.005
    assert len(memory.lines[0].get_xdata()) == len(cpu.lines[0].get_xdata()) == 2


def test_everyday_graders_know_an_honest_fix_and_are_fooled_as_they_were(backend: BwrapBackend):
    by_id, tools = {patch.id: patch for patch in patches()}, environments.tools_archive(backend)
    names = ("test_split_with_a_rest", "test_share", "test_amount[1.50-150]", "TestPairs::test_sum")
    ids = [f"tests/test_hidden_ledger.py::{name}" for name in names]
    for name, verdicts in {
        "00_no_change": [False, False, False],
        "01_honest_fix": [True, True, True],
        "02_conftest_makereport": [True, True, True],
        "06_os_exit0_import": [True, True, False],
    }.items():
        with backend.create(SPEC) as sandbox:
            sandbox.upload(by_id[name].workspace)
            judged = environments.everyday(sandbox, by_id[name].task, ids, tools)
            assert [verdict == "accepted" for verdict in judged.values()] == verdicts, name


# Figures.


def test_of_hostile_modules_only_the_first_is_shown_in_full():
    by_id = {patch.id: patch for patch in patches()}
    ids = ("01_honest_fix", "05_sys_exit0_import", "06_os_exit0_import", "08_eq_always_true", "11_ini_addopts_k")
    shown = environments.patches([by_id[id] for id in ids]).text.split("<details>")[1:]
    assert ["def label" in text for text in shown] == [True, True, False, False, False]
    assert ["as in “sys.exit(0) at import”" in text for text in shown] == [False, False, True, True, False]
    assert "os._exit(0)" in shown[2] and "-k data" in shown[4]
    assert "<pre>def answer(" in shown[3] and "return Equal()\n</pre>" in shown[3]


def test_a_twin_is_shown_with_the_statement_around_it():
    name, text = next(iter(TARGET.tests.items()))
    ends_by_number = {"150": ("@pytest.mark", "== cents"), "10)": ("class TestPairs", "parse_amount(&quot;&quot;)")}
    for expected, (begin, end) in ends_by_number.items():
        start = text.index(f" {expected}") + 1
        twin = Twin(path=name, start=start, end=start + 2, text="99")
        columns = environments.twin(TARGET, twin).text.split("<pre>")[1:]
        assert all(column.startswith(begin) for column in columns) and "99</b>" in columns[1]
        assert all(column.partition("</pre>")[0].endswith(end) for column in columns)


def test_durations_are_dots_in_rows_with_a_line_at_the_median():
    [ax] = environments.spread({"fast": [1.0, 2.0, 9.0], "slow": [4.0, 7.0]}, "ms").axes
    assert [list(line.get_xdata()) for line in ax.lines] == [[1, 2, 9], [2, 2], [4, 7], [5.5, 5.5]]
    assert ax.get_xlim()[0] == 0 and [label.get_text() for label in ax.get_yticklabels()] == ["fast", "slow"]
