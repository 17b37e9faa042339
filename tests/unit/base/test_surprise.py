"""What a reference repair costs the policy in nats: the same alone and in a batch, and small for a policy that knows it."""

import math

import torch

from services.trainer.base.settings import MODEL
from services.trainer.base.surprise import surprises
from services.trainer.base.traces import reference_repair
from shared.model import ModelConfig, Transformer, causal_rows
from shared.problems import FunctionHidden, FunctionProblem
from shared.renderers.formats.compact_1 import Compact

Pairs = list[tuple[FunctionProblem, FunctionHidden]]


def policy(vocabulary: int) -> Transformer:
    torch.manual_seed(0)
    tiny = {"hidden_size": 32, "num_hidden_layers": 2, "num_experts": 4, "moe_intermediate_size": 16, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": vocabulary}
    return Transformer(ModelConfig.from_dict({**MODEL, **tiny, **heads}))


def told(model: Transformer, compact: Compact, pairs: Pairs) -> dict[str, float]:
    return surprises(model, compact, pairs, lambda share: None)


def test_a_problem_is_as_surprising_alone_as_among_others(compact: Compact, train_pairs: Pairs) -> None:
    model = policy(compact.vocab_size)
    together = told(model, compact, train_pairs)
    assert len(together) > 5
    for problem, hidden in train_pairs:
        alone = told(model, compact, [(problem, hidden)])
        assert alone.keys() == together.keys() & {problem.id}
        assert all(math.isclose(nats, together[name], rel_tol=1e-4) for name, nats in alone.items())


def test_it_is_the_chance_of_the_repair_as_the_first_thing_said(compact: Compact, train_pairs: Pairs) -> None:
    model = policy(compact.vocab_size)
    found = told(model, compact, train_pairs)
    problem, hidden = next((p, h) for p, h in train_pairs if p.id in found)
    prompt, repair = compact.prompt(problem, problem.files), reference_repair(problem, hidden, compact)
    assert repair is not None
    chance = 1.0
    for i, token in enumerate(repair):
        tokens = torch.tensor(prompt + repair[:i])
        out = model(tokens, torch.arange(len(tokens)), causal_rows(1, len(tokens)))
        chance *= model.logits(out.hidden_ND[-1:]).softmax(-1)[0, token].item()
    assert math.isclose(math.exp(-found[problem.id]), chance, rel_tol=1e-3)


def test_a_problem_without_a_solution_that_can_be_written_is_left_out(compact: Compact, train_pairs: Pairs) -> None:
    (problem, hidden) = train_pairs[0]
    longer = FunctionHidden(id=hidden.id, cases=hidden.cases, solution={"m.py": "def f():\n    pass\n" * 9})
    assert (
        told(
            policy(compact.vocab_size), compact, [(problem, FunctionHidden(id=problem.id, cases=[])), (problem, longer)]
        )
        == {}
    )
