"""What the objective marks or measures on tokens for the metrics."""

from __future__ import annotations

from typing import Final

#: What a term may mark or measure on a token, without gradient: name -> (unit, formula of its mean over tokens). Tokens
#: that a mask rejects count too.
MARKS: Final = {
    "clip_low": ("fraction", "mean of [the loss is clipped because the ratio is too low]"),
    "clip_high": ("fraction", "mean of [the loss is clipped because the ratio is too high]"),
    "dual_clip": ("fraction", "mean of [A < 0 and the loss is cut at -dual_clip A]"),
    "tis_capped": ("fraction", "mean of [the ratio of objective.weight > weight_high]"),
    "masked_token": ("fraction", "mean of [a mask rejects the token, IcePop gives it a weight of 0, or M2PO drops it]"),
    "masked_seq": ("fraction", "mean of [the whole sequence of the token is rejected by a mask]"),
    "veto": ("fraction", "mean of [the sequence of the token is rejected by objective.veto]"),
    "kl_reference": ("nats", "mean of e^d - d - 1, d = log reference - log π"),
}
