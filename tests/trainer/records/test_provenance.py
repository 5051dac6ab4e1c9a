"""What digests of a run's origins cover."""

import sys
from pathlib import Path

import pytest

from composer_nb.harness.environment import EnvSettings
from composer_nb.harness.rewards import RewardSettings
from composer_nb.trainer.learning.loss import LossSettings
from composer_nb.trainer.records.provenance import EVALUATION, ROOT, capsule, package_digest
from composer_nb.trainer.settings import Settings


def test_a_digest_covers_every_part_that_evaluates() -> None:
    assert all((ROOT / part).exists() for part in EVALUATION)
    digests = {package_digest(*EVALUATION[:count]) for count in range(1, len(EVALUATION) + 1)}
    assert len(digests) == len(EVALUATION) and package_digest() not in digests


def test_the_capsule_follows_the_users_own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every kind that settings name: a package's modules beside the one that is named count, other modules do not."""
    monkeypatch.syspath_prepend(str(tmp_path))
    package, module, other = tmp_path / "own_terms", tmp_path / "own_loss.py", tmp_path / "own_other.py"
    package.mkdir()
    (package / "__init__.py").write_text("def brevity(rollout, grade): return 0.0\n")
    (package / "helper.py").write_text("")
    module.write_text("def median(rewards, solved): return rewards - rewards.median()\n")
    other.write_text("")
    settings = Settings(
        reward=RewardSettings(weights={"judged": 1.0, "own_terms:brevity": -0.1}, judge="own_loss:median"),
        loss=LossSettings(baseline="own_loss:median"),
    )
    assert settings.user_code == ["own_loss:median", "own_loss:median", "own_terms:brevity"]
    digests = [capsule(tmp_path, EnvSettings(), settings.user_code)]
    for file in (package / "helper.py", module, other):
        file.write_text(file.read_text() + "# changed\n")
        digests.append(capsule(tmp_path, EnvSettings(), settings.user_code))
    changes = [[name for name in old if old[name] != new[name]] for old, new in zip(digests, digests[1:], strict=False)]
    assert changes == [["user_code"], ["user_code"], []]
    for name in ("own_terms", "own_loss"):
        sys.modules.pop(name)
