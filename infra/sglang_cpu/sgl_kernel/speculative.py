"""Speculation (EAGLE / NEXTN): the draft tree, its verification, and the bookkeeping around them.

A request's drafts are nodes 0..D-1 of a tree; node 0 is its last committed token. `retrieve_index` gives a node's
row in the flat batch, `next_token` a node's first child, `next_sibling` the next child of the same parent; -1 is none.
"""

import torch


def rotate_input_ids_cpu(input_ids, start, lens, topk_index, select=None):
    """Shifts each request's tokens left by one and puts the newly drafted token at the end (or at select)."""
    for i, (s, n) in enumerate(zip(start.tolist(), lens.tolist(), strict=False)):
        if n > 0:
            input_ids[s : s + n - 1] = input_ids[s + 1 : s + n].clone()
            input_ids[s + n - 1 if select is None else int(select[i])] = topk_index.reshape(-1)[i]


def fill_bonus_tokens_cpu(accepted, accept_lens, bonus, stride):
    """bonus[i] = the last accepted token of request i."""
    rows = torch.arange(accept_lens.numel()) * stride + accept_lens.long() - 1
    bonus[:] = accepted.reshape(-1)[rows].to(bonus.dtype)


def fill_accept_out_cache_loc_cpu(accept_index, out_cache_loc, accept_out_cache_loc):
    """The slots of the accepted nodes, packed."""
    rows = accept_index.reshape(-1)
    rows = rows[rows > -1].long()
    accept_out_cache_loc[: rows.numel()] = out_cache_loc[rows]


def build_tree_kernel_efficient_cpu(
    parent_list,
    top_index,
    seq_lens,
    tree_mask,
    positions,
    retrieve_index,
    next_token,
    next_sibling,
    topk,
    depth,
    num_draft_tokens,
    mask_mode,
):
    """Builds tree, positions and mask from the draft's beams. Only the mask over the drafts alone (mode 1)."""
    if int(mask_mode) != 1:
        raise NotImplementedError(f"sgl_kernel stand-in: tree mask mode {mask_mode}")
    batch, n = seq_lens.numel(), num_draft_tokens
    parents, tops = parent_list.reshape(batch, -1), top_index.reshape(batch, -1)
    mask, positions = tree_mask.view(-1), positions.view(-1)
    next_token[:batch], next_sibling[:batch] = -1, -1
    for b in range(batch):
        parent = [0] * n
        for t in range(1, n):
            beam = int(tops[b, t - 1]) // topk
            if beam > 0:
                wanted = int(parents[b, beam])
                parent[t] = next((j + 1 for j in range(n - 1) if int(tops[b, j]) == wanted), 0)
        for t in range(n - 1, 0, -1):
            first = int(next_token[b, parent[t]])
            next_token[b, parent[t]] = t
            if first != -1:
                next_sibling[b, t] = first
        for t in range(n):
            ancestors = [t]
            while ancestors[-1] != 0:
                ancestors.append(parent[ancestors[-1]])
            row = b * n + t
            retrieve_index[b, t] = row
            positions[row] = int(seq_lens[b]) + len(ancestors) - 1
            mask[row * n : (row + 1) * n] = False
            for a in ancestors:
                mask[row * n + a] = True


def verify_tree_greedy_cpu(
    predicts,
    accept_index,
    accept_token_num,
    candidates,
    retrive_index,
    retrive_next_token,
    retrive_next_sibling,
    target_predict,
):
    """Accepts drafts as long as they are the target's own choice."""
    target, predicts = target_predict.reshape(-1), predicts.view(-1)
    for b in range(candidates.shape[0]):
        last = int(retrive_index[b, 0])
        accept_index[b, 0] = last
        accepted = node = 0
        for _ in range(1, accept_index.shape[1]):
            node = int(retrive_next_token[b, node])
            while node != -1 and int(candidates[b, node]) != int(target[last]):
                node = int(retrive_next_sibling[b, node])
            if node == -1:
                break
            predicts[last] = target[last]
            last = int(retrive_index[b, node])
            accepted += 1
            accept_index[b, accepted] = last
        accept_token_num[b] = accepted
        predicts[last] = target[last]


def tree_speculative_sampling_target_only(
    predicts,
    accept_index,
    accept_token_num,
    candidates,
    retrive_index,
    retrive_next_token,
    retrive_next_sibling,
    uniform_samples,
    uniform_samples_for_final_sampling,
    target_probs,
    draft_probs,
    threshold_single=1.0,
    threshold_acc=1.0,
    deterministic=True,
):
    """Accepts a draft with the target's probability of it, else samples from what is left of the target.

    With both thresholds at 1 (SGLang's default) the tokens are distributed exactly as without speculation.
    """
    predicts = predicts.view(-1)
    depth = accept_index.shape[1]
    for b in range(candidates.shape[0]):
        last = int(retrive_index[b, 0])
        accept_index[b, 0] = last
        accepted = at = 0  # `at`: the last accepted node, whose distribution decides on its children
        while accepted < depth - 1:
            probs, coin, seen = target_probs[b, at], float(uniform_samples[b, at]), 0.0
            node = int(retrive_next_token[b, at])
            while node != -1:
                token = int(candidates[b, node])
                p = float(probs[token])
                seen += p
                if coin <= seen / threshold_acc or p >= threshold_single:
                    break
                draft_probs[b, at, token] = probs[token]
                node = int(retrive_next_sibling[b, node])
            if node == -1:
                break
            predicts[last] = token
            last, at = int(retrive_index[b, node]), node
            accepted += 1
            accept_index[b, accepted] = last
        accept_token_num[b] = accepted
        left = (target_probs[b, at] - draft_probs[b, at]).clamp_(min=0).double()
        if float(left.sum()) <= 0:
            left = target_probs[b, at].double()
        cdf = left.cumsum(0)
        token = int(torch.searchsorted(cdf, float(uniform_samples_for_final_sampling[b]) * cdf[-1], right=True))
        predicts[last] = min(token, cdf.numel() - 1)


def top_k_renorm_prob(probs, top_ks):
    """Keeps each row's k most probable tokens."""
    values, index = probs.sort(-1, descending=True)
    keep = torch.arange(probs.shape[-1])[None] < top_ks.reshape(-1, 1)
    return _renormed(values, index, keep)


def top_p_renorm_prob(probs, top_ps):
    """Keeps each row's most probable tokens until they hold p."""
    values, index = probs.sort(-1, descending=True)
    keep = values.cumsum(-1) - values < top_ps.reshape(-1, 1)
    return _renormed(values, index, keep)


def _renormed(values, index, keep):
    values = values * keep
    return torch.zeros_like(values).scatter_(-1, index, values / values.sum(-1, keepdim=True))
