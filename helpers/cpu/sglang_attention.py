"""Attention for SGLang on a CPU: torch_native plus attention sinks, sliding windows and whole batches at once.

Imported by the plugin inside SGLang's processes only. Upstream's torch_native has no sinks, reads the sliding-window pool with
full-pool indices, and loops over the sequences of a batch in Python.
"""

from __future__ import annotations

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc


class SinkAttentionBackend(TorchNativeAttnBackend):
    """Shapes: B sequences, Q new tokens of the longest, L cached tokens of the longest, H heads, K key-value heads, D head size."""

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True, sinks=None, **_):
        """q [B, H * D] -> [B, H * D]"""
        self._save(layer, forward_batch, k, v, save_kv_cache)
        query = q.view(-1, 1, layer.tp_q_head_num, layer.qk_head_dim)
        keys, values = self._cached(layer, forward_batch)
        positions = (forward_batch.seq_lens - 1)[:, None]
        return attend(query, keys, values, positions, layer, sinks).to(q.dtype).view(q.shape[0], -1)

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, sinks=None, **_):
        """q [tokens of all sequences, H * D] -> the same; the ragged sequences are padded to the longest."""
        self._save(layer, forward_batch, k, v, save_kv_cache)
        lengths, start = forward_batch.extend_seq_lens, forward_batch.extend_prefix_lens
        row = torch.arange(int(lengths.max()), device=q.device)
        present = row < lengths[:, None]  # [B, Q]
        flat = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        query = flat.new_zeros(*present.shape, *flat.shape[1:])
        query[present] = flat
        keys, values = self._cached(layer, forward_batch)
        out = attend(query, keys, values, start[:, None] + row, layer, sinks)
        return out[present].to(q.dtype).reshape(flat.shape[0], -1)

    def _save(self, layer, forward_batch, k, v, wanted) -> None:
        if wanted and k is not None:
            where = KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc)
            self.token_to_kv_pool.set_kv_buffer(layer, where, k, v)

    def _cached(self, layer, forward_batch):
        """Keys and values of the batch's sequences, [B, L, K, D] each; entries past a sequence's end are some other token's."""
        longest = int(forward_batch.seq_lens.max())
        where = self.req_to_token_pool.req_to_token[forward_batch.req_pool_indices, :longest]
        pool = self.token_to_kv_pool
        if self.use_sliding_window_kv_pool and pool.layers_mapping[layer.layer_id][1]:
            where = pool.translate_loc_from_full_to_swa(where)
        where = where.long()
        return pool.get_key_buffer(layer.layer_id)[where], pool.get_value_buffer(layer.layer_id)[where]


def attend(query, keys, values, positions, layer, sinks):
    """Causal attention in fp32. query [B, Q, H, D], keys and values [B, L, K, D], positions [B, Q] -> [B, Q, H, D].

    A token sees itself and what came before, in a sliding layer only `sliding_window_size` tokens back (SGLang's number
    is the window minus one). The sink is one more logit a head that takes probability and gives nothing.
    """
    B, Q, H, D = query.shape
    L, K = keys.shape[1:3]
    grouped = query.float().view(B, Q, K, H // K, D).permute(0, 2, 3, 1, 4).reshape(B, K, -1, D)
    scores = (grouped @ keys.float().permute(0, 2, 3, 1)).view(B, K, H // K, Q, L) * layer.scaling
    back = positions[..., None] - torch.arange(L, device=query.device)  # [B, Q, L]: how far the key lies back
    visible = back >= 0
    if layer.sliding_window_size is not None and layer.sliding_window_size > -1:
        visible &= back <= layer.sliding_window_size
    scores.masked_fill_(~visible[:, None, None], float("-inf"))
    if sinks is not None:
        column = sinks.float().view(1, K, H // K, 1, 1).expand(B, K, H // K, Q, 1)
        scores = torch.cat([scores, column], -1)
    weights = scores.softmax(-1)[..., :L].reshape(B, K, -1, L)
    out = weights @ values.float().permute(0, 2, 1, 3)  # [B, K, (H / K) * Q, D]
    return out.view(B, K, H // K, Q, D).permute(0, 3, 1, 2, 4).reshape(B, Q, H, D)
