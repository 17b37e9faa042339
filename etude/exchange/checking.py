"""Checks that a checkpoint directory holds what its config.json asks for. Writes nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from etude import recognise
from etude.exchange.card import context_of, read_card
from etude.exchange.errors import NotExchanged, located


@dataclass(frozen=True, slots=True)
class Checked:
    """`parameters`: of the model, those included that the files lack. `whole`: they lack none."""

    vocabulary: int
    positions: int
    parameters: int
    whole: bool
    notes: tuple[str, ...]


def check(directory: Path) -> Checked:
    """Whether the files hold what their config.json asks for, in dtypes that are read and with numbers alone, and its card fits.
    No model is made: every tensor is looked at by itself, and only once all else is right. Raises NotExchanged."""
    from shared.model.checkpoint import READ, copies, expected_shapes, not_finite, other_than, stored_tensors
    from shared.model.config import ModelConfig, UnknownModel

    if (what := recognise.objection(directory)) is not None:
        raise NotExchanged(what)
    try:
        config = ModelConfig.load(directory)
        context_of(read_card(directory), config.max_position_embeddings)
        wanted, found = expected_shapes(config), stored_tensors(directory)
    except UnknownModel as error:
        raise located(directory, error) from None
    parameters = sum(math.prod(shape) for shape in wanted.values())
    mtp = tuple(f"model.layers.{config.num_hidden_layers + i}." for i in range(config.num_mtp_layers))
    notes: tuple[str, ...] = ()
    if mtp and not any(name.startswith(mtp) for name in found):
        notes = ("it has no MTP tensors although config.json names such layers: they begin at random",)
        wanted = {name: shape for name, shape in wanted.items() if not name.startswith(mtp)}
    # Copies of others, and tables of angles, which follow from config.json: some save them all the same.
    spare = {name: original for name, original in copies(config).items() if name in found and original in found}
    strange = sorted(n for n in found.keys() - wanted.keys() - spare.keys() if not n.endswith("rotary_emb.inv_freq"))
    missing = sorted(wanted.keys() - found.keys())
    wrong = sorted(name for name in wanted.keys() & found.keys() if wanted[name] != found[name].shape)
    unread = sorted(name for name in wanted.keys() & found.keys() if found[name].dtype not in READ.values())
    kind = f"{directory}: not a whole {config.model_type}"
    if missing:
        instead = f"; found instead: {len(strange)}, the first is {strange[0]!r}" if strange else ""
        raise NotExchanged(f"{kind}: {len(missing)} tensors are missing, the first is {missing[0]!r}{instead}")
    if wrong:
        raise NotExchanged(
            f"{kind}: {len(wrong)} tensors have another shape than config.json asks for, the first is {wrong[0]!r}: "
            f"{found[wrong[0]].shape}, asked for {wanted[wrong[0]]}"
        )
    if strange:
        raise NotExchanged(
            f"{kind}: {len(strange)} tensors that this architecture does not have, the first is {strange[0]!r}; merge adapters "
            "and undo quantisation before"
        )
    if unread:
        raise NotExchanged(
            f"{directory}: {len(unread)} tensors are of a dtype that is not read, the first is {unread[0]!r}: "
            f"{found[unread[0]].dtype}; allowed: {', '.join(READ.values())}"
        )
    try:
        bad, other = not_finite(directory, wanted), other_than(directory, spare)
    except UnknownModel as error:
        raise located(directory, error) from None
    if bad:
        raise NotExchanged(f"{directory}: {len(bad)} tensors are not finite in bf16, the first is {bad[0]!r}")
    if other:
        tied = " (tie_word_embeddings: false in config.json, if it is the head)" if other[0] == "lm_head.weight" else ""
        raise NotExchanged(
            f"{directory}: {other[0]!r} differs from {spare[other[0]]!r}, which would stand in its place; allowed: the same "
            f"numbers{tied}"
        )
    return Checked(config.vocab_size, config.max_position_embeddings, parameters, not notes, notes)
