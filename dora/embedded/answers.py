"""Answers to /generate in SGLang's shape: unary results and stream chunks.

A chunk covers the output tokens that were not sent yet (incremental) or all tokens so far (cumulative).
"""

from __future__ import annotations

import base64
import time
from dataclasses import dataclass
from typing import Any

import msgspec

from dora.embedded.generation import ABORTED_WAITING, QUEUE_FULL, Generation
from dora.embedded.requests import GenerateCall
from dora.embedded.text import Text

_encode = msgspec.json.Encoder().encode


def event(answer: dict[str, Any]) -> bytes:
    return b"data: " + _encode(answer) + b"\n\n"


@dataclass(slots=True)
class CallAnswer:
    """The answers to one call; `sent` counts the output tokens that the client already has."""

    call: GenerateCall
    text: Text | None  # None in skip-tokenizer mode
    incremental: bool
    has_spans: bool
    weight_version: str = ""
    dispatched_at: float = 0.0
    sent: int = 0

    @property
    def generation(self) -> Generation:
        return self.call.generation

    def due(self) -> bool:
        return self.generation.done or self.generation.published > self.sent

    def next(self) -> dict[str, Any]:
        """The next chunk, or the whole result if nothing was sent before and the generation is done."""
        generation = self.generation
        start, end = (self.sent if self.incremental else 0), generation.published
        self.sent = end
        answer: dict[str, Any] = {}
        if self.text is not None or self._ended_in_queue():
            answer["text"] = self.text.upto(end, incremental=self.incremental) if self.text is not None else ""
        answer["output_ids"] = generation.output_ids[start:end]
        answer["meta_info"] = self._meta(start, end)
        if self.call.return_prompt_token_ids:
            answer["prompt_token_ids"] = generation.prompt_ids
        return answer

    def _ended_in_queue(self) -> bool:
        """Whether the request ended in the queue. SGLang makes such answers outside the batch: always with a text,
        never with the counts of the prompt."""
        return self.generation.done and self.generation.finish_reason in (ABORTED_WAITING, QUEUE_FULL)

    def _meta(self, start: int, end: int) -> dict[str, Any]:
        generation = self.generation
        finish_reason = generation.finish_reason if generation.done else None
        meta: dict[str, Any] = {"id": generation.rid, "finish_reason": finish_reason}
        cached = generation.cached_tokens
        if not self._ended_in_queue():
            meta["prompt_tokens"] = len(generation.prompt_ids)
            meta["num_retractions"] = generation.num_retractions
            meta["cached_tokens"] = cached
            meta["cached_tokens_details"] = {"device": cached, "host": 0} if cached else None
            meta["reasoning_tokens"] = 0
            meta["dp_rank"] = None
            meta["forward_entry_time"] = generation.admitted_at
            meta["prefill_finished_time"] = generation.prefilled_at
            meta["queue_time"] = generation.admitted_at - generation.queued_at
        meta["weight_version"] = self.weight_version
        meta["completion_tokens"] = end
        refused = generation.finish_reason == QUEUE_FULL and not generation.output_ids
        if self.call.return_logprob and not refused:
            pairs = zip(generation.output_logprobs[start:end], generation.output_ids[start:end], strict=True)
            meta["input_token_logprobs"] = self._prompt_logprobs() if start == 0 else []
            meta["output_token_logprobs"] = [(logprob, token, None) for logprob, token in pairs]
            meta["output_token_logprobs_length"] = end
        if generation.done:
            meta.update(self._at_the_end(end))
        return meta

    def _prompt_logprobs(self) -> list[tuple[float | None, int, None]]:
        generation = self.generation
        if generation.prompt_logprobs is None or generation.logprob_start is None:
            return []
        tokens = generation.prompt_ids[generation.logprob_start :]
        return [(logprob, token, None) for logprob, token in zip(generation.prompt_logprobs, tokens, strict=True)]

    def _at_the_end(self, end: int) -> dict[str, Any]:
        generation = self.generation
        meta: dict[str, Any] = {
            "weight_version": generation.labels[-1][0],
            "e2e_latency": generation.finished_at - generation.received_at,
            "response_sent_to_client_ts": time.time(),
        }
        if self.has_spans:
            meta["weight_versions"] = generation.spans()
        if generation.experts is not None:
            meta["routed_experts"] = base64.b64encode(generation.experts).decode()
        if generation.num_steps:
            kept = end - generation.num_steps
            meta["spec_accept_rate"] = kept / generation.num_drafted if generation.num_drafted else 0.0
            meta["spec_accept_length"] = end / generation.num_steps
            meta["spec_num_correct_drafts"] = kept
            meta["spec_num_proposed_drafts"] = generation.num_drafted
            meta["spec_verify_ct"] = generation.num_steps
        if generation.prefilled_at:
            meta["request_received_ts"] = generation.received_at
            meta["api_server_dispatch_finish_ts"] = self.dispatched_at
            meta["request_finished_ts"] = generation.finished_at
            decode_s = generation.finished_at - generation.prefilled_at
            if end > 1 and decode_s > 0:
                meta["decode_throughput"] = (end - 1) / decode_s
        return meta
