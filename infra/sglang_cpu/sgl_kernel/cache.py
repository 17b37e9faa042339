"""Bookkeeping of the KV cache: which slots a request's tokens lie in."""

import ctypes


def assign_req_to_token_pool_cpu(req_pool_indices, req_to_token, start, end, cache_loc, stride):
    """req_to_token[r, s:e] = the next e - s entries of cache_loc, for every request."""
    offset = 0
    for r, s, e in zip(req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=False):
        req_to_token[r, s:e] = cache_loc[offset : offset + e - s].to(req_to_token.dtype)
        offset += e - s


def assign_extend_cache_locs_cpu(req_pool_indices, req_to_token, start, end, out, stride):
    """The reverse: out = the slots of tokens s..e of every request, one after another."""
    offset = 0
    for r, s, e in zip(req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=False):
        out[offset : offset + e - s] = req_to_token[r, s:e].to(out.dtype)
        offset += e - s


def assign_draft_cache_locs_contiguous_cpu(req_pool_indices, req_to_token, seq_lens, out, stride, topk, num_steps):
    """out = for every request the topk * num_steps slots that follow its sequence."""
    n = topk * num_steps
    out = out.view(-1)
    for i, (r, s) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=False)):
        out[i * n : (i + 1) * n] = req_to_token[r, s : s + n].to(out.dtype)


def copy_all_layer_kv_cache_cpu(buffer_ptrs, strides, target, source):
    """Copies slots `source` onto slots `target` in every layer's buffer, given as address and bytes a slot."""
    for ptr, stride in zip(buffer_ptrs.tolist(), strides.tolist(), strict=False):
        rows = [ctypes.string_at(ptr + i * stride, stride) for i in source.tolist()]
        for i, row in zip(target.tolist(), rows, strict=False):
            ctypes.memmove(ptr + i * stride, row, stride)
