"""The two attention operations of SGLang's `intel_amx` backend, one request at a time, in fp32."""

import torch


def _attend(q, k, v, scale, mask, logit_cap):
    """q (T, H, D), k (L, Hkv, D), v (L, Hkv, Dv), mask (T, L) or None -> (T, H, Dv)."""
    group = q.shape[1] // k.shape[1]
    if group > 1:
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("thd,lhd->htl", q.float(), k.float()) * scale
    if logit_cap and logit_cap > 0:
        scores = logit_cap * torch.tanh(scores / logit_cap)
    if mask is not None:
        scores = scores.masked_fill(~mask[None], float("-inf"))
    return torch.einsum("htl,lhd->thd", scores.softmax(-1), v.float())


def _only_plain(cross_attention, sliding_window, sinks):
    """What is not written must not pass for computed."""
    if cross_attention or sinks is not None or (sliding_window is not None and sliding_window > 0):
        raise NotImplementedError("sgl_kernel stand-in: cross attention, sliding window and sinks")


def decode_attention_cpu(
    q,
    k_buffer,
    v_buffer,
    k_scale,
    v_scale,
    out,
    k,
    v,
    cache_loc,
    attn_logits,
    req_to_token,
    req_pool_indices,
    seq_lens,
    scale,
    logit_cap,
    cross_attention,
    sliding_window,
    encoder_lens,
    sinks,
):
    """One new token a request: stores its k and v, then attends over all its slots."""
    _only_plain(cross_attention, sliding_window, sinks)
    if k is not None:
        n = cache_loc.numel()
        k_buffer[cache_loc] = k.reshape(n, *k_buffer.shape[1:]).to(k_buffer.dtype)
        # MLA: v is a view of the same latent, which is already stored
        if v is not None and v_buffer.data_ptr() != k_buffer.data_ptr():
            v_buffer[cache_loc] = v.reshape(n, *v_buffer.shape[1:]).to(v_buffer.dtype)
    for i, (r, s) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=False)):
        if s > 0:
            slots = req_to_token[r, :s].long()
            out[i] = _attend(q[i : i + 1], k_buffer[slots], v_buffer[slots], scale, None, logit_cap)[0].to(out.dtype)


def extend_attention_cpu(
    q,
    k,
    v,
    out,
    k_buffer,
    v_buffer,
    k_scale,
    v_scale,
    req_to_token,
    req_pool_indices,
    seq_lens,
    extend_lens,
    extend_starts,
    max_extend_len,
    scale,
    logit_cap,
    cross_attention,
    sliding_window,
    encoder_lens,
    sinks,
    tree_mask,
    causal,
):
    """Several new tokens a request, after a prefix in the cache: prefill, and the check of drafts (tree_mask)."""
    _only_plain(cross_attention, sliding_window, sinks)
    tree_offset = 0
    for r, s, e, start in zip(
        req_pool_indices.tolist(), seq_lens.tolist(), extend_lens.tolist(), extend_starts.tolist(), strict=False
    ):
        if e <= 0:
            continue
        prefix, new = s - e, slice(start, start + e)
        if k is None:
            slots = req_to_token[r, :s].long()
            keys, values = k_buffer[slots], v_buffer[slots]
        else:
            keys = k.reshape(k.shape[0], -1, q.shape[-1])[new]
            values = v.reshape(v.shape[0], -1, out.shape[-1])[new]
            if prefix > 0:
                slots = req_to_token[r, :prefix].long()
                keys = torch.cat([k_buffer[slots], keys.to(k_buffer.dtype)])
                values = torch.cat([v_buffer[slots], values.to(v_buffer.dtype)])
        mask = None
        if causal:
            mask = torch.ones(e, s, dtype=torch.bool)
            if tree_mask is None:
                mask[:, prefix:] = torch.ones(e, e, dtype=torch.bool).tril()
            else:
                mask[:, prefix:] = tree_mask.reshape(-1)[tree_offset : tree_offset + e * e].view(e, e).bool()
                tree_offset += e * e
        out[new] = _attend(q[new], keys, values, scale, mask, logit_cap).to(out.dtype)


def build_draft_decode_metadata_cpu(req_to_token, req_pool_indices, seq_lens, topk, num_steps, pool_len):
    """The slot table of the draft model's decode: a row for each (request, branch), prefix and then its own steps."""
    table = torch.zeros(req_pool_indices.numel() * topk, pool_len, dtype=req_to_token.dtype)
    for i, (r, s) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=False)):
        for t in range(topk):
            table[i * topk + t, :s] = req_to_token[r, :s]
            table[i * topk + t, s : s + num_steps] = req_to_token[r, s + t * num_steps : s + (t + 1) * num_steps]
    return table


# SGLang looks these up as torch operations.
torch.ops.sgl_kernel.decode_attention_cpu = decode_attention_cpu
torch.ops.sgl_kernel.extend_attention_cpu = extend_attention_cpu
