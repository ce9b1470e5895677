"""Stands in for SGLang's compiled kernels, of which no CPU wheel exists. Installed into the environment by build.py.

Only the one kernel that SGLang 0.5.20 calls with the flags of serve.py is here, in plain torch; any other name can be
imported but not called. A plain module, not a package, so that SGLang's tests for `sgl_kernel.<part>` find nothing.
"""

__version__ = "0.0.0"


def assign_req_to_token_pool_cpu(req_pool_indices, req_to_token, start, end, out_cache_loc, stride):
    """Writes each request's new KV places, one after another in `out_cache_loc`, into its row of `req_to_token`."""
    at = 0
    for row, begin, stop in zip(req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=True):
        req_to_token[row, begin:stop] = out_cache_loc[at : at + stop - begin].to(req_to_token.dtype)
        at += stop - begin


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} has no CPU stand-in; see docs/SGLANG.md")

    return kernel
