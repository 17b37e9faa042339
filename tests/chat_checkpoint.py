"""What makes a directory speak: a small tokenizer, and a chat template in the manner of ChatML with Hermes' tool calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.integration import engine_platform

VOCABULARY = 384
BEGIN, END = "<|im_start|>", "<|im_end|>"
MODEL: dict[str, Any] = {**engine_platform.CONFIG, "vocab_size": VOCABULARY}
TEMPLATE = r"""
{%- if tools %}
<|im_start|>system
{%- if messages[0].role == 'system' %} {{ messages[0].content }}{% endif %}
You may call: {% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role not in ['system', 'user', 'assistant', 'tool'] %}
{{- raise_exception('who is ' ~ message.role ~ '?') }}
{%- elif message.role == 'assistant' %}
<|im_start|>assistant
{% generation %}{{ message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\n<tool_call>\n' }}
{{- {"name": call.function.name, "arguments": call.function.arguments} | tojson }}
{{- '\n</tool_call>' }}
{%- endfor %}<|im_end|>{% endgeneration %}

{% elif not (tools and loop.first and message.role == 'system') %}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}
<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}
{%- endif %}
"""


def write_chat(directory: Path, template: str | None = TEMPLATE) -> Tokenizer:
    """The files beside the weights. `template` None: a tokenizer alone."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - 4,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[],
        show_progress=False,
    )
    tokenizer.train_from_iterator([Path(engine_platform.__file__).read_text()], trainer)  # any text without the tags
    tokenizer.add_special_tokens([BEGIN, END])
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in ("<tool_call>", "</tool_call>")])
    assert tokenizer.get_vocab_size() == VOCABULARY
    tokenizer.save(str(directory / "tokenizer.json"))
    about: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    (directory / "tokenizer_config.json").write_text(json.dumps(about))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [tokenizer.token_to_id(END)]}))
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    return tokenizer


def call(name: str, **arguments: Any) -> str:
    """As a model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


def tool(name: str) -> dict[str, Any]:
    """As a client offers it."""
    parameters = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
    return {"type": "function", "function": {"name": name, "description": f"<{name}> it", "parameters": parameters}}
