"""What the studies start with: tasks that can be made, and runs that are theirs."""

from composer_nb.harness.sandbox.calls import CachedExecutor, SandboxExecutor
from composer_nb.tour.miniatures import make_miniatures
from scripts.studies.measure_search import SETS


def test_the_study_of_search_has_requests_in_the_code_s_words_and_in_others(sandboxes: SandboxExecutor) -> None:
    for name, options in SETS.items():
        few = options | {"count": 2, "executor": CachedExecutor(sandboxes), "kinds": ("paraphrase",)}
        for task in make_miniatures("a study", **few):
            assert (task.metadata["function"] in task.instruction) == (name == "the code's own words")
