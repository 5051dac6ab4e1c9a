"""Settings that reach the model: formats of the experts, for trainer and engine, and layers that are computed again."""

import pytest
import torch

from composer_nb.harness.policy import Request
from composer_nb.trainer.engine import Engine, pack
from composer_nb.trainer.models.transformer import Kernels, Model, ModelConfig
from composer_nb.trainer.models.variants import PAIRS, variant
from composer_nb.trainer.settings import Settings, override

SIZES = {"vocab_size": 31, "hidden_size": 64, "num_hidden_layers": 2, "head_dim": 16, "moe_intermediate_size": 32}
CONFIG = ModelConfig(**SIZES, max_position_embeddings=64)


def model(recipe: str = "bf16") -> Model:
    torch.manual_seed(0)
    net = Model(CONFIG)
    net.kernels = override(Settings(), {"kernels.recipe": recipe}).kernels
    return net


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_engine_and_trainer_read_the_same_numbers(recipe: str):
    """Tokens decoded one by one have the log-probabilities of a forward pass over all of them."""
    net = model(recipe)
    assert variant(net, PAIRS["bf16"].engine).kernels == net.kernels == Kernels(recipe=recipe)
    assert pack(net) is None and pack(model()) is not None, "the compiled engine has no formats"
    engine = Engine(net, stop=frozenset(), slots=4, max_length=64, temperature=1.0)
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8]]
    completions = engine.generate([Request(rollout=n, token_ids=ids, max_tokens=20) for n, ids in enumerate(prompts)])
    single = completions[1]
    plain = Engine(model(), stop=frozenset(), slots=4, max_length=64)
    plain_completion = plain.generate([Request(rollout=1, token_ids=prompts[1], max_tokens=20)])[0]
    assert plain_completion.logprobs != single.logprobs
    ids = torch.tensor([[*prompts[1], *single.token_ids]])
    with torch.no_grad():
        logits, _ = net(ids)
    read = logits[0, 4:-1].log_softmax(-1).gather(1, ids[0, 5:, None])[:, 0]
    torch.testing.assert_close(read, torch.tensor(single.logprobs), atol=2e-5, rtol=0)
