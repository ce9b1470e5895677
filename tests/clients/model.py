"""A folder with a small model of random weights and 16k tokens of context, which has the chat template of Qwen3."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

ROOT = Path(__file__).parents[2]
TEMPLATE = ROOT / "dora" / "seed" / "checkpoint_tools" / "chat_template.jinja"
END = "<|im_end|>"
SPECIAL = ("<|endoftext|>", "<|im_start|>", END)
#: Text that prompts of agents are like.
TEXTS = ("docs/AGENTS.md", "docs/ENVIRONMENTS-PROTOCOL.md", "tests/environments/random_agent.py")
CONTEXT = 16_384


def make_model(folder: Path) -> Path:
    """Write it. A turn has some hundred tokens, as each token is about as likely as the one that ends it."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.train_from_iterator(
        [ROOT.joinpath(text).read_text() for text in TEXTS],
        trainers.BpeTrainer(vocab_size=600, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()),
    )
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    made.add_tokens(
        [
            AddedToken(f"<{end}{tag}>", normalized=False)
            for tag in ("tool_call", "tool_response", "think")
            for end in ("", "/")
        ]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END, pad_token=SPECIAL[0])
    tokenizer.chat_template = TEMPLATE.read_text()
    tokenizer.save_pretrained(folder)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=CONTEXT, tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    return folder
