"""`rl.frozen_layers`: what is frozen keeps its bits, and all else has the gradient that it has without."""

from random import Random

import pytest
import torch

from composer_nb.labs.rewards.rescore import stored_batch
from composer_nb.trainer.learning.ranks import Ranks
from composer_nb.trainer.models.transformer import Model
from composer_nb.trainer.recipe.reader import example_run
from composer_nb.trainer.rl import to_streams
from composer_nb.trainer.services.services import make_learner
from composer_nb.trainer.settings import Settings, override


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_frozen_layers_keep_their_bits_and_the_others_their_gradients(optimizer: str) -> None:
    run = example_run()
    streams = [stream for s in stored_batch(run, -1).groups[0] for stream in to_streams(s.attempt, s.advantage)]

    def learnt(frozen_layers: int) -> Model:
        settings = override(Settings(), {"rl.frozen_layers": frozen_layers, "optimizer.name": optimizer})
        learner, _, _ = make_learner(run.path / "weights" / "start", settings)
        options = {"minibatches": 1, "denominator": 8.0, "lr": 0.1, "clip": 1e9, "microbatch_tokens": 4096}
        learner.learn(streams, Ranks(), Random(0), **options)
        return learner.model

    start = dict(make_learner(run.path / "weights" / "start", Settings())[0].model.named_parameters())
    whole, frozen = dict(learnt(0).named_parameters()), dict(learnt(2).named_parameters())
    for name, parameter in frozen.items():
        if name == "embed" or name.startswith(("_layers.0.", "_layers.1.")):
            assert torch.equal(parameter, start[name]) and not torch.equal(whole[name], start[name]), name
        else:
            assert not torch.equal(parameter, start[name])
            torch.testing.assert_close(parameter.grad, whole[name].grad, rtol=1e-6, atol=1e-8, msg=name)


def test_rl_may_start_from_the_policy_before_its_sharpness_was_set(tiny_run, copy_of) -> None:
    run = copy_of(tiny_run)
    info = run.finished("sft")
    run.finish("sft", info.pop("seconds"), {**info, "sharpness": 1.4})
    settings = [
        override(Settings(), {"rl.uncalibrated": value, "rl.sharpness": [1, 2], "loss.beta": 0.1})
        for value in (False, True)
    ]
    start, less = (make_learner(run.path / "weights" / "start", variant, run.sharpness)[0] for variant in settings)
    for before, after in ((start.model, less.model), (start.reference, less.reference)):
        torch.testing.assert_close(after.final_norm, before.final_norm / 1.4, rtol=2**-8, atol=0)
        assert torch.equal(after.embed, before.embed)
