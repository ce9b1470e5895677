"""Chat templates as the renderers of some families have them, written here for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from renderers import glm45, kimi_k2

import dora.seed

_QWEN3: Final = (Path(dora.seed.__file__).parent / "checkpoint_tools" / "chat_template.jinja").read_text()
#: The shipped template, and the thinking switch that Qwen3 has.
_SWITCH: Final = (
    r"""{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"""
)

_GLM: Final = r"""{{- '[gMASK]<sop>' }}
{%- if tools %}
{{- '<|system|>' + HEADER }}
{%- for tool in tools %}{{ tool | tojson + '\n' }}{% endfor %}
{{- FOOTER }}
{%- endif %}
{%- set last = namespace(question=-1) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{% set last.question = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{{- '<|assistant|>\n<think>' }}
{%- if message.reasoning_content and loop.index0 > last.question %}{{ message.reasoning_content.strip() }}{% endif %}
{{- '</think>' }}
{%- if message.content.strip() %}{{ '\n' + message.content.strip() }}{% endif %}
{%- for call in message.tool_calls or [] %}
{{- '\n<tool_call>' + call.function.name + '\n' }}
{%- for key, value in call.function.arguments.items() %}
{{- '<arg_key>' + key + '</arg_key>\n<arg_value>' }}
{%- if value is string %}{{ value }}{% else %}{{ value | tojson }}{% endif %}
{{- '</arg_value>\n' }}
{%- endfor %}
{{- '</tool_call>' }}
{%- endfor %}
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|observation|>' }}{% endif %}
{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
{%- else %}
{{- '<|' + message.role + '|>\n' + message.content }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}
""".replace("HEADER", json.dumps(glm45._TOOLS_HEADER)).replace("FOOTER", json.dumps(glm45._TOOLS_FOOTER))

_KIMI: Final = r"""{%- if tools %}
{{- '<|im_system|>tool_declare<|im_middle|>' + tools | tojson(separators=(',', ':'), sort_keys=true) + '<|im_end|>' }}
{%- endif %}
{%- if messages[0].role != 'system' %}
{{- '<|im_system|>system<|im_middle|>' + DEFAULT + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|im_system|>' + message.name + '<|im_middle|>## Return of ' + message.tool_call_id + '\n' + message.content }}
{%- else %}
{{- '<|im_' + message.role + '|>' + message.role + '<|im_middle|>' + message.content }}
{%- if message.tool_calls %}
{{- '<|tool_calls_section_begin|>' }}
{%- for call in message.tool_calls %}
{{- '<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>' + call.function.arguments | tojson }}
{{- '<|tool_call_end|>' }}
{%- endfor %}
{{- '<|tool_calls_section_end|>' }}
{%- endif %}
{%- endif %}
{{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_assistant|>assistant<|im_middle|>' }}{% endif %}
""".replace("DEFAULT", json.dumps(kimi_k2._DEFAULT_SYSTEM))

TEMPLATES: Final = {"qwen3": _QWEN3 + _SWITCH, "glm-4.5": _GLM, "kimi-k2": _KIMI}
