"""Tokenizers with chat templates of the kinds that targets have, for tests of spans."""

from transformers import PreTrainedTokenizerFast

from mtptrain.data.template import ChatTemplate
from mtptrain.target.tiny import tiny_tokenizer

CHATML_DEFAULT_SYSTEM = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TRIMMING = CHATML_DEFAULT_SYSTEM.replace("message['content']", "message['content'] | trim")
NO_GENERATION_PROMPT = CHATML_DEFAULT_SYSTEM.split("{% if add_generation_prompt")[0]
GENERATION = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
    "{% generation %}{{ message['content'] + '<|im_end|>' + '\n' }}{% endgeneration %}"
    "{% else %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
GENERATION_WITHOUT_MARKER = GENERATION.replace(" + '<|im_end|>' + '\n' }}{% endgeneration %}", " }}{% endgeneration %}{{ '<|im_end|>\n' }}")
GENERATION_WITH_ROLE = GENERATION.replace(
    "{{ '<|im_start|>assistant\n' }}{% generation %}", "{% generation %}{{ '<|im_start|>assistant\n' }}", 1
)
STRIPS_THINKING = (
    "{% for message in messages %}{% set content = message['content'] %}"
    "{% if message['role'] == 'assistant' and not loop.last %}{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ALTERNATING = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    + STRIPS_THINKING.replace(".split('</think>')[-1].lstrip('\n')", "")
)
LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
LLAMA2 = (
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ '<|im_start|>[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] + ' <|im_end|>' }}{% endif %}{% endfor %}"
)


def chat(template: str = CHATML_DEFAULT_SYSTEM) -> ChatTemplate:
    """A tiny byte-level tokenizer with `template`; generation stops at <|im_end|> and <|endoftext|>."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return ChatTemplate(tokenizer, [0, 2])


def llama3() -> ChatTemplate:
    """Llama 3's markers: the tokenizer's eos is not the turn's end marker, which only generation_config names."""
    tokenizer: PreTrainedTokenizerFast = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]})
    tokenizer.chat_template = LLAMA3
    eot = tokenizer.convert_tokens_to_ids("<|eot_id|>")
    return ChatTemplate(tokenizer, [2, eot])
